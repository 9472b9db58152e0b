"""Chats that take long to tokenize: meanwhile other sessions are answered, and a session keeps its order."""

import asyncio
import threading

import pytest

from shoal.core.errors import EngineError
from shoal.gateway.server import Gateway
from shoal.samplers.sampler import Completion
from shoal.samplers.tokenizers import TinyTokenizer
from tests.gateway.asking import chat_of, handled

LONG = "so long a story " * 400


class Held(TinyTokenizer):
    """Is at work on the first long text until `go` is set, and says when it has begun."""

    def __init__(self, at):
        super().__init__()
        self.at, self.waited, self.begun, self.go = at, False, threading.Event(), threading.Event()

    def wait(self, at, size):
        if at == self.at and size > 1000 and not self.waited:
            self.waited = True
            self.begun.set()
            assert self.go.wait(60)

    def start(self, messages):
        self.wait("prompt", len(messages[-1]["content"]))
        if messages[-1]["content"].endswith("refused"):
            raise EngineError("no such chat")
        return super().start(messages)

    def decode(self, ids):
        self.wait("answer", len(ids))
        return super().decode(ids)


class Echo:
    """Says what it was asked, when `held` lets it, and keeps each request."""

    def __init__(self, held=None):
        self.held, self.requests = held, []

    async def sample(self, request):
        self.requests.append(request)
        if self.held is not None:
            await asyncio.to_thread(self.held.wait, "model", len(request.prompt_ids))
        return Completion(request.prompt_ids, (-0.5,) * len(request.prompt_ids), "stop", 0)


def ask(gateway, session, text, **more):
    return asyncio.ensure_future(handled(gateway, session, chat_of(text, **more)))


async def begun(tokenizer):
    assert await asyncio.to_thread(tokenizer.begun.wait, 60)


@pytest.mark.parametrize("at", ["prompt", "answer"])
def test_a_session_is_answered_while_the_chat_of_another_one_is_tokenized(at):
    tokenizer = Held(at)

    async def play():
        gateway = Gateway(Echo(), tokenizer)
        long = ask(gateway, "a", LONG)
        await begun(tokenizer)
        for text in ("hi", LONG):
            assert (await ask(gateway, "b", text))[0] == 200
        assert not long.done()
        tokenizer.go.set()
        return await long

    status, answer = asyncio.run(play())
    assert (status, answer["choices"][0]["message"]["content"]) == (200, LONG)


def test_requests_of_a_session_keep_the_order_in_which_they_came():
    """Whoever asks the same first has the first noise, however long the tokenizer takes."""
    tokenizer, sampler = Held("prompt"), Echo()

    async def play():
        gateway = Gateway(sampler, tokenizer)
        first = ask(gateway, "a", LONG, top_p=0.5)
        await begun(tokenizer)
        others = [ask(gateway, "a", LONG, top_p=0.6), ask(gateway, "a", "hi", top_p=0.7)]
        await ask(gateway, "b", "hi", top_p=0.8)
        tokenizer.go.set()
        return await asyncio.gather(first, *others)

    assert [status for status, _ in asyncio.run(play())] == [200] * 3
    assert [request.sampling.top_p for request in sampler.requests] == [0.8, 0.5, 0.6, 0.7]
    assert [request.key.path[-1] for request in sampler.requests] == [0, 0, 1, 0]


@pytest.mark.parametrize("at", ["prompt", "model", "answer"])
def test_a_session_that_ends_while_a_call_of_it_is_under_way_records_nothing(at):
    tokenizer = Held(at)
    sampler = Echo(tokenizer)

    async def play():
        gateway = Gateway(sampler, tokenizer)
        long = ask(gateway, "a", LONG)
        await begun(tokenizer)
        assert gateway.sessions["a"].close() == []
        tokenizer.go.set()
        return gateway.sessions["a"], await long

    session, (status, answer) = asyncio.run(play())
    assert (status, session.calls) == (409, [])
    assert "'a' has ended" in answer["error"]["message"]
    assert len(sampler.requests) == (at != "prompt")


@pytest.mark.parametrize("length", [0, 1])
def test_a_long_chat_that_the_template_refuses_is_refused_as_a_short_one_is(length):
    async def play():
        return await ask(Gateway(Echo(), Held("nowhere")), "a", LONG * length + "refused")

    status, answer = asyncio.run(play())
    assert (status, answer["error"]["message"]) == (400, "no such chat")
