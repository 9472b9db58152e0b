"""Clients that are many, slow, large, or late: no call is lost, and none is in a record where it does not belong."""

import asyncio
import contextlib
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.core.ports import listening
from shoal.core.seeding import derive_seed
from shoal.gateway import server as server_module
from shoal.gateway.server import MOST_BODY, Gateway, GatewayServer
from shoal.samplers.asking import SamplerClient
from tests.gateway.asking import chat_of, handled, post


@pytest.fixture
def server(engine):
    with GatewayServer(Gateway(SamplerClient(engine), engine.tokenizer, max_tokens=3, seed=5)) as server:
        yield server


def ask(server, session, *texts):
    return post(server, chat_of(*texts), f"{session}/v1/chat/completions")


def said(answer):
    return answer["choices"][0]["message"]["content"]


def raw(server, head, body=b""):
    """A connection on which a request was begun."""
    connection = socket.create_connection(("127.0.0.1", int(server.base.rpartition(":")[2])))
    path = f"/{server.gateway.secret}/a/v1/chat/completions"
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n\r\n".encode() + body)
    return connection


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
    assert ask(server, "a", "go")[0] == 200


def test_a_slow_client_holds_up_nobody_and_is_sent_away(server, monkeypatch):
    monkeypatch.setattr(server_module, "BODY_SECONDS", 0.5)
    body = json.dumps(chat_of("go")).encode()
    with raw(server, f"Content-Length: {len(body)}", body[:5]) as connection:
        assert ask(server, "b", "go")[0] == 200
        assert b" 408 " in connection.recv(1000)
    assert "a" not in server.gateway.sessions


def test_an_agent_that_is_gone_before_it_reads_its_answer_leaves_the_others_alone(server):
    body = json.dumps(chat_of("go")).encode()
    for _ in range(20):
        with raw(server, f"Content-Length: {len(body)}", body):
            pass  # it hangs up at once
    status, answer = ask(server, "b", "go")
    assert status == 200
    assert len(server.gateway.sessions["b"].calls) == 1
    assert answer["id"].startswith("chatcmpl-b-")


def test_64_sessions_at_once_lose_no_call_and_share_no_noise(server, engine):
    def play(number):
        name, texts = f"s{number}", ["go"]
        for turn in range(4):
            status, answer = ask(server, name, *texts)
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
        await handled(first, "s7", chat_of("go"))

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
