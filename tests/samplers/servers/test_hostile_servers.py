"""Servers that break the rules: every wait has an end, every failure is an `EngineError`, of its own request alone."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.rollout.doubles import FakeServer, each

from shoal.core.errors import EngineError
from shoal.samplers.asking import RetryPolicy
from shoal.samplers.sampler import Completion, Key, Request, Sampling
from shoal.samplers.servers import http
from shoal.samplers.servers.http import HttpClient
from shoal.samplers.servers.openai import OpenAIEngine
from shoal.samplers.tokenizers import TinyTokenizer

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HOSTILE = {  # what is sent at once, and what is sent again and again after it
    "nothing": (b"", b""),
    "headers without end": (OK, b"X-More: a\r\n"),
    "100 Continue without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a dripped chunk": (CHUNKED + b"FFFFFF\r\n", b" "),
    "a body without end": (OK + b"Connection: close\r\n\r\n", b" "),
}


class Hostile:
    """Answers every connection with `first`, then with `again` until it is closed."""

    def __init__(self, first, again, pause):
        self.first, self.again, self.pause = first, again, pause
        self.ended = threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while not self.ended.is_set():
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with connection:
            try:
                connection.recv(65536)
                connection.sendall(self.first)
                while not self.ended.is_set():
                    connection.sendall(self.again)
                    time.sleep(self.pause)
            except OSError:
                pass

    def close(self):
        self.ended.set()
        self.socket.shutdown(
            socket.SHUT_RDWR
        )  # or the wait in it would outlive it, and after Ctrl-Z go on in another
        self.socket.close()


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("pause", [0.02, 0.0], ids=["slowly", "at once"])
def test_a_server_that_never_ends_its_answer_is_given_up_in_time(how, pause, monkeypatch):
    monkeypatch.setattr(http, "MAX_REPLY", 2**20)
    first, again = HOSTILE[how]
    server = Hostile(first, again or b"", pause or (0 if again else 0.02))
    client = HttpClient(server.url, RetryPolicy(timeout=0.4, retries=1, backoff=0.01, max_backoff=0.02))
    begin = time.monotonic()
    try:
        with pytest.raises(EngineError, match="no answer in 2 attempts"):
            client.post("/x", {})
    finally:
        client.close()
        server.close()
    assert time.monotonic() - begin < 30  # two attempts of 0.4 s, on a loaded machine


def test_an_answer_is_capped_in_bytes(monkeypatch):
    monkeypatch.setattr(http, "MAX_REPLY", 1000)
    for size in (1000, 1001):
        body = json.dumps("x" * (size - 2)).encode()
        server = Hostile(OK + b"Content-Length: %d\r\n\r\n" % size + body, b"", 0.02)
        client = HttpClient(server.url, RetryPolicy(timeout=30, retries=0))
        try:
            if size == 1000:
                assert client.post("/x", {}) == "x" * 998
            else:
                with pytest.raises(EngineError, match="longer than 1000 bytes"):
                    client.post("/x", {})
        finally:
            client.close()
            server.close()


@pytest.fixture
def server():
    with FakeServer("vllm") as server:
        yield server


@pytest.fixture
def fake(server):
    policy = RetryPolicy(5.0, 3, 0.001, 0.01)
    with OpenAIEngine(server.url, tokenizer=TinyTokenizer(), retry_policy=policy, concurrency=4) as engine:
        yield server, engine


def request(i=0, n=5):
    return Request((7, 8, 9 + i), Key(0, (0, i, 0, 0)), Sampling(n))


def deep(n):
    return b'{"choices": ' + b"[" * n + b"]" * n + b"}"


CHOICE = b'{"choices": [{"token_ids": %s, "logprobs": {"token_logprobs": %s}, "finish_reason": "stop"}]}'


@pytest.mark.parametrize(
    "reply",
    [
        deep(100_000),
        CHOICE % (b"[1]", b"[1" + b"0" * 400 + b"]"),
        CHOICE % (b"[1.5]", b"[-1.0]"),
        CHOICE % (b"[1" + b"0" * 5000 + b"]", b"[-1.0]"),
        b'{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-1]}, "finish_reason": {"a": [1]}}]}',
        b'{"choices": [{"token_ids": [1], "logprobs": [1], "finish_reason": "stop"}]}',
    ],
)
def test_an_answer_that_cannot_be_read_is_asked_for_again_and_then_an_engine_error(fake, reply):
    server, engine = fake
    calm = engine.generate([request(i) for i in range(6)])
    server.faults = [reply]
    assert engine.generate([request(i) for i in range(6)]) == calm, "it is asked for again"
    server.faults = [reply] * 4
    (failed,) = each(engine, [request()])
    assert isinstance(failed, EngineError)


def answer(head, body=b"{}"):
    return b"HTTP/1.1 " + head + b"\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("head", "body", "message"),
    [
        ("429 Busy\r\nRetry-After: ²".encode("latin-1"), b"{}", "HTTP 429"),
        (b"429 Busy\r\nRetry-After: -1", b"{}", "HTTP 429"),
        (b"429 Busy\r\nRetry-After: Wed, 21 Oct 2026 07:28:00 GMT", b"{}", "HTTP 429"),
        (b"503 No", b"[" * 100_000, "HTTP 503"),
        (b"503 No", b"\xff\xfe\x00", "HTTP 503"),
        (b"302 Elsewhere\r\nLocation: http://127.0.0.1:1/", b"", "refused the request: HTTP 302"),
        (b"banana", b"", "no answer"),
        (b"200 OK\r\nContent-Length: x", b"", "no answer"),
        (b"200 OK\r\nContent-Encoding: gzip", b"not packed at all", ""),
        (b"200 OK\r\nSet-Cookie: " + b"a" * 100_000, b"", "no answer"),
    ],
)
def test_odd_heads_and_errors_are_engine_errors(head, body, message):
    server = Hostile(answer(head, body), b"", 0.02)
    client = HttpClient(server.url, RetryPolicy(timeout=30, retries=1, backoff=0.001, max_backoff=0.01))
    begin = time.monotonic()
    try:
        if message:
            with pytest.raises(EngineError, match=message):
                client.post("/x", {})
        else:
            assert client.post("/x", {}) == {"text": "not packed at all"}
    finally:
        client.close()
        server.close()
    assert time.monotonic() - begin < 30


def test_an_address_that_speaks_no_tls_is_told_in_the_words_of_tls():
    server = Hostile(answer(b"400 Bad Request"), b"", 0.02)
    client = HttpClient(server.url.replace("http", "https"), RetryPolicy(timeout=30, retries=0))
    with pytest.raises(EngineError, match="no connection: .*SSL: "):
        client.get("/v1/models")
    client.close()
    server.close()


def test_a_server_may_ask_for_a_pause_and_gets_no_longer_one_than_allowed(monkeypatch):
    asked = {}  # the pauses of each thread: other loops may be running
    server = Hostile(answer(b"429 Busy\r\nRetry-After: 1" + b"0" * 400), b"", 0.02)
    client = HttpClient(server.url, RetryPolicy(timeout=30, retries=2, backoff=0.001, max_backoff=0.05))
    sleep = asyncio.sleep

    async def note(seconds):
        if seconds:  # not of a loop that ends
            asked.setdefault(threading.get_ident(), []).append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    with pytest.raises(EngineError, match="HTTP 429"):
        client.post("/x", {})
    client.close()
    server.close()
    assert [0.05, 0.05] in asked.values()


def test_requests_under_way_end_when_the_sampler_is_closed_and_nothing_is_answered_after(fake):
    server, engine = fake
    server.faults = [30.0]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.generate, [request()])
        until(lambda: server.busy)
        engine.close()
        with pytest.raises(EngineError, match="was closed before it answered"):
            waiting.result(60)
    with pytest.raises(EngineError, match="the sampler was closed"):
        engine.generate([request()])


# --- the context
@pytest.mark.parametrize(("kind", "says"), [("vllm", 6), ("sglang", 6), ("llama.cpp", 6), ("vllm", None)])
def test_responses_are_capped_to_what_the_server_says_of_its_context(kind, says):
    def bend(reply):
        if "data" in reply and says:
            reply["data"][0]["max_model_len"] = says
        return reply

    with FakeServer(kind) as server:
        server.change = bend
        server.props = {"default_generation_settings": {"n_ctx": says}}
        with OpenAIEngine(server.url, tokenizer=TinyTokenizer()) as engine:
            assert engine.context == says
            full = Request((1,) * 6, Key(0, (0, 0, 0, 0)), Sampling(5))
            capped, none = engine.generate([request(), full])
            assert len(capped.token_ids) == (3 if says else 5)
            assert none == Completion((), (), "context", 0) if says else len(none.token_ids) == 5


@pytest.mark.parametrize(
    "error",
    [
        {"message": "too long", "code": "context_length_exceeded"},
        {
            "message": "This model's maximum context length is 64 tokens. However, you requested 90",
            "code": 400,
        },
        {
            "message": "The input (90 tokens) is longer than the model's context length (64 tokens).",
            "code": 400,
        },
        {
            "message": "request (90 tokens) exceeds the available context size (64 tokens), try increasing it",
            "type": "exceed_context_size_error",
            "code": 400,
        },
    ],
    ids=["openai", "vllm", "sglang", "llama.cpp"],
)
def test_a_chat_that_is_too_long_for_the_server_fills_the_context(error):
    with FakeServer("openai") as server, OpenAIEngine(server.url) as engine:
        prompt = engine.tokenizer.start([{"role": "user", "content": "hello"}])
        asked = Request(prompt, Key(0, (0, 0, 0, 0)), Sampling(5))
        server.faults = [(400, json.dumps({"error": error}).encode())]
        assert engine.generate([asked]) == [Completion((), (), "context", 0)]
        server.faults = [(400, b'{"error": {"message": "too long", "code": "other"}}')]
        with pytest.raises(EngineError, match="too long"):
            engine.generate([asked])


@pytest.mark.parametrize(
    "wrong", [[float("nan")] * 5, [0.5] * 5, [-0.5] * 4], ids=["no numbers", "more than sure", "too few"]
)
def test_an_answer_that_cannot_be_one_is_asked_for_again_by_itself(fake, wrong):
    server, engine = fake
    asked, bad = [request(i) for i in range(3)], [wrong]
    expected = engine.generate(asked)

    def change(reply):
        if bad and "choices" in reply:
            reply["choices"][0]["logprobs"]["token_logprobs"] = bad.pop()
        return reply

    server.change, before = change, len(server.seen)
    assert engine.generate(asked) == expected
    assert (bad, len(server.seen) - before) == ([], 4)


def until(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to that")
