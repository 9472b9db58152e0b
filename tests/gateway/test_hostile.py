"""Clients that are many, slow, large, or late: no call is lost, and none is in a record where it does not belong."""

import asyncio
import contextlib
import json
import random
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.core.ports import listening
from shoal.core.seeding import derive_seed
from shoal.gateway import server as server_module
from shoal.gateway.server import MOST_BODY, Gateway, GatewayServer
from shoal.samplers.asking import SamplerClient
from shoal.samplers.tiny import TinyEngine, TinyShape


@pytest.fixture(scope="module")
def engine():
    return TinyEngine([], TinyShape(16, 1, 2, 2000), seed=3)


@pytest.fixture
def server(engine):
    with GatewayServer(Gateway(SamplerClient(engine), engine.tokenizer, max_tokens=3, seed=5)) as server:
        yield server


def body_of(*texts, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return json.dumps({"messages": messages, **more}).encode()


def post(server, session, body, **headers):
    address = f"{server.gateway.url(server.base, session)}/v1/chat/completions"
    request = urllib.request.Request(address, body, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def said(answer):
    return answer["choices"][0]["message"]["content"]


def raw(server, head, body=b""):
    """A connection on which a request was begun."""
    connection = socket.create_connection(("127.0.0.1", int(server.base.rpartition(":")[2])))
    path = f"/{server.gateway.secret}/a/v1/chat/completions"
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n\r\n".encode() + body)
    return connection


def test_identical_prompts_at_once_are_two_calls_with_noise_of_their_own(server):
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: post(server, "a", body_of("go")), range(2)))
    calls = [call for _, call in server.gateway.sessions["a"].close()]
    assert [status for status, _ in answers] == [200, 200]
    assert len({answer["id"] for _, answer in answers}) == len({call.response_ids for call in calls}) == 2
    assert [call.parent for call in calls] == [None, None]


def test_a_thousand_branches_of_one_answer_have_it_as_parent(server):
    async def play():
        gateway = server.gateway
        _, first = await gateway.handle("chat/completions", "a", body_of("go"), False)
        texts = [body_of("go", said(first), f"branch {n}") for n in range(1000)]
        await asyncio.gather(*(gateway.handle("chat/completions", "a", text, False) for text in texts))

    asyncio.run(play())
    calls = [call for _, call in server.gateway.sessions["a"].close()]
    assert [call.parent for call in calls] == [None] + [0] * 1000


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_before_it_has_all_arrived(server, chunked):
    part = b"x" * (1 << 20)
    with raw(server, "Transfer-Encoding: chunked" if chunked else "Content-Length: 52428800") as connection:
        with contextlib.suppress(ConnectionError):  # it may hang up before all is sent
            for _ in range(50):
                connection.sendall(b"100000\r\n" + part + b"\r\n" if chunked else part)
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(1000)
    assert not answer or b" 413 " in answer
    assert MOST_BODY < 50 << 20
    assert "a" not in server.gateway.sessions
    assert post(server, "a", body_of("go"))[0] == 200


def test_a_slow_client_holds_up_nobody_and_is_sent_away(server, monkeypatch):
    monkeypatch.setattr(server_module, "BODY_SECONDS", 0.5)
    body = body_of("go")
    with raw(server, f"Content-Length: {len(body)}", body[:5]) as connection:
        assert post(server, "b", body)[0] == 200
        assert b" 408 " in connection.recv(1000)
    assert "a" not in server.gateway.sessions


def test_a_client_that_reorders_keys_goes_on_from_its_answer(server):
    _, answer = post(server, "a", body_of("go"))
    messages = [{"content": "go", "role": "user"}, {"content": said(answer), "refusal": None, "role": "assistant"},
                {"name": "x", "content": [{"text": "on", "type": "text"}], "role": "user"}]  # fmt: skip
    assert post(server, "a", json.dumps({"temperature": 1.0, "messages": messages}).encode())[0] == 200
    assert [call.parent for _, call in server.gateway.sessions["a"].close()] == [None, 0]


def test_an_agent_that_is_gone_before_it_reads_its_answer_leaves_the_others_alone(server):
    body = body_of("go")
    for _ in range(20):
        with raw(server, f"Content-Length: {len(body)}", body):
            pass  # it hangs up at once
    status, answer = post(server, "b", body)
    assert status == 200
    assert len(server.gateway.sessions["b"].calls) == 1
    assert answer["id"].startswith("chatcmpl-b-")


def test_a_call_under_way_when_its_session_ends_is_refused_and_not_recorded(engine):
    class Waits:
        def __init__(self):
            self.asked, self.go = threading.Event(), threading.Event()
            self.inner = SamplerClient(engine)

        async def sample(self, request):
            self.asked.set()
            await asyncio.to_thread(self.go.wait)
            return await self.inner.sample(request)

    waits = Waits()
    with (
        GatewayServer(Gateway(waits, engine.tokenizer, max_tokens=3)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        late = pool.submit(post, server, "a", body_of("go"))
        assert waits.asked.wait(30)
        session = server.gateway.sessions["a"]
        assert session.close() == []
        waits.go.set()
        assert late.result(30)[0] == 409
        assert session.calls == []


def test_64_sessions_at_once_lose_no_call_and_share_no_noise(server, engine):
    def play(number):
        name, texts = f"s{number}", ["go"]
        for turn in range(4):
            status, answer = post(server, name, body_of(*texts))
            assert status == 200
            texts += [said(answer), f"turn {turn}"]
        return name

    order = list(range(64))
    random.Random(0).shuffle(order)
    with ThreadPoolExecutor(32) as pool:
        names = list(pool.map(play, order))
    calls = {name: [call for _, call in server.gateway.sessions[name].close()] for name in names}
    assert all([call.parent for call in found] == [None, 0, 1, 2] for found in calls.values())
    first = Gateway(SamplerClient(engine), engine.tokenizer, max_tokens=3, seed=5)

    async def alone():
        await first.handle("chat/completions", "s7", body_of("go"), False)

    asyncio.run(alone())
    assert first.sessions["s7"].calls[0].call == calls["s7"][0]  # as if it had been alone
    assert len({derive_seed(5, "session", name) for name in names}) == 64
    assert len({found[0].response_ids for found in calls.values()}) > 50


def test_answers_are_sent_at_once():
    """asyncio switches Nagle's algorithm off for sockets that name TCP; else a client waits 40 ms for a second part."""

    async def accepted():
        delayed = asyncio.get_running_loop().create_future()

        def look(_, writer):
            sock = writer.get_extra_info("socket")
            delayed.set_result(not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listening(0)
        async with await asyncio.start_server(look, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            found = await delayed
            writer.close()
            return found

    assert not asyncio.run(accepted())
