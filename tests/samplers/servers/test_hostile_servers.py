"""Servers that break the rules: every wait has an end, every failure is an `EngineError`, of its own request alone."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.rollout.doubles import FakeServer, until

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
        # or the wait in it would outlive it, and after Ctrl-Z go on in another
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


@contextlib.contextmanager
def asking(first, again=b"", pause=0.02, scheme="http", timeout=30, retries=0, **policy):
    """A client of such a server."""
    server = Hostile(first, again, pause)
    url = server.url.replace("http", scheme)
    with contextlib.closing(server), HttpClient(url, RetryPolicy(timeout, retries, **policy)) as client:
        yield client


QUICK = {"backoff": 0.001, "max_backoff": 0.01}


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("pause", [0.02, 0.0], ids=["slowly", "at once"])
def test_a_server_that_never_ends_its_answer_is_given_up_in_time(how, pause, monkeypatch):
    monkeypatch.setattr(http, "MAX_REPLY", 2**20)
    first, again = HOSTILE[how]
    begin = time.monotonic()
    with (
        asking(first, again, pause if again else 0.02, timeout=0.4, retries=1, **QUICK) as client,
        pytest.raises(EngineError, match="no answer in 2 attempts"),
    ):
        client.post("/x", {})
    assert time.monotonic() - begin < 30  # two attempts of 0.4 s, on a loaded machine


def test_an_answer_is_capped_in_bytes(monkeypatch):
    monkeypatch.setattr(http, "MAX_REPLY", 1000)
    whole, longer = (
        OK + b"Content-Length: %d\r\n\r\n" % size + json.dumps("x" * (size - 2)).encode()
        for size in (1000, 1001)
    )
    with asking(whole) as client:
        assert client.post("/x", {}) == "x" * 998
    with asking(longer) as client, pytest.raises(EngineError, match="longer than 1000 bytes"):
        client.post("/x", {})


def request():
    return Request((7, 8, 9), Key(0, (0, 0, 0, 0)), Sampling(5))


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
    with asking(answer(head, body), retries=1, **QUICK) as client:
        if message:
            with pytest.raises(EngineError, match=message):
                client.post("/x", {})
        else:
            assert client.post("/x", {}) == {"text": "not packed at all"}


def test_an_address_that_speaks_no_tls_is_told_in_the_words_of_tls():
    with (
        asking(answer(b"400 Bad Request"), scheme="https") as client,
        pytest.raises(EngineError, match="no connection: .*SSL: "),
    ):
        client.get("/v1/models")


def test_a_server_may_ask_for_a_pause_and_gets_no_longer_one_than_allowed(monkeypatch):
    asked = {}  # the pauses of each thread: other loops may be running
    sleep = asyncio.sleep

    async def note(seconds):
        if seconds:  # not of a loop that ends
            asked.setdefault(threading.get_ident(), []).append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    busy = answer(b"429 Busy\r\nRetry-After: 1" + b"0" * 400)
    with (
        asking(busy, retries=2, backoff=0.001, max_backoff=0.05) as client,
        pytest.raises(EngineError, match="HTTP 429"),
    ):
        client.post("/x", {})
    assert [0.05, 0.05] in asked.values()


def test_requests_under_way_end_when_the_sampler_is_closed_and_nothing_is_answered_after():
    with FakeServer("vllm") as server, ThreadPoolExecutor(1) as threads:
        engine = OpenAIEngine(server.url, tokenizer=TinyTokenizer())
        server.faults = [30.0]
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
