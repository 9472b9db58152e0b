"""A gateway that answers for weeks: sessions end, and a call keeps what is new of it."""

import asyncio

import msgspec
import pytest

from shoal.gateway import server
from shoal.gateway.server import Gateway, Room
from shoal.gateway.sessions import Recorded
from shoal.samplers.tokenizers import TinyTokenizer
from tests.gateway.asking import Says, chat_of, handled


class Waits(Says):
    """Answers when `go` is set."""

    def __init__(self):
        super().__init__("yes")
        self.go = asyncio.Event()

    async def sample(self, request):
        await self.go.wait()
        return await super().sample(request)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(server, "time", clock)
    return clock


def make(sampler=None, **more):
    return Gateway(sampler or Says("yes"), TinyTokenizer(), **more)


async def ask(gateway, session, *texts):
    status, found = await handled(gateway, session, chat_of(*texts))
    return status, found["error"]["message"] if status != 200 else found["choices"][0]["message"]["content"]


def test_a_session_ends_that_was_not_asked_for_long_and_its_name_is_refused(clock):
    async def play():
        gateway = make(room=Room(idle_seconds=100))
        assert (await ask(gateway, "old", "go"))[0] == 200
        clock.now = 60
        assert (await ask(gateway, "busy", "go"))[0] == 200
        clock.now = 120
        assert (await ask(gateway, "new", "go"))[0] == 200
        assert set(gateway.sessions) == {"busy", "new"}
        status, why = await ask(gateway, "old", "go")
        assert status == 409
        assert "another name" in why
        assert (await ask(gateway, "busy", "go", "yes", "go"))[0] == 200

    asyncio.run(play())


def test_there_are_never_more_sessions_than_said_and_the_longest_idle_ends_first():
    async def play():
        gateway = make(room=Room(sessions=3))
        for name in ("a", "b", "c"):
            await ask(gateway, name, "go")
        await ask(gateway, "a", "go", "yes", "on")
        await ask(gateway, "d", "go")
        assert set(gateway.sessions) == {"a", "c", "d"}

    asyncio.run(play())


def test_names_that_are_refused_take_no_room():
    async def play():
        gateway = make(room=Room(sessions=2))
        await ask(gateway, "a", "go")
        for n in range(5):
            assert (await ask(gateway, f"-bad{n}", "go"))[0] == 404
        await ask(gateway, "b", "go")
        assert set(gateway.sessions) == {"a", "b"}

    asyncio.run(play())


def test_sessions_end_that_hold_more_than_said_but_none_that_is_being_answered():
    async def play():
        sampler = Waits()
        gateway = make(sampler, room=Room(bytes=5000))
        waits = asyncio.ensure_future(ask(gateway, "waits", "go"))
        await asyncio.sleep(0)
        sampler.go.set()
        assert (await waits)[0] == 200
        for n in range(8):
            await ask(gateway, f"s{n}", "long " * 20)
            assert sum(session.size for session in gateway.sessions.values()) < 5000 + 2000
        assert "waits" not in gateway.sessions
        assert "s7" in gateway.sessions
        sampler.go.clear()
        late = asyncio.ensure_future(ask(gateway, "late", "go"))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(ask(gateway, f"t{n}", "long " * 200)) for n in range(20)]
        await asyncio.sleep(0)
        sampler.go.set()
        assert (await late)[0] == 200
        assert [status for status, _ in await asyncio.gather(*others)] == [200] * 20

    asyncio.run(play())


def test_a_long_chat_takes_no_more_than_what_was_said_in_it(tmp_path):
    """Sixty turns: the record grows with the text, not with its square."""

    async def play():
        gateway = make(Says("y" * 50), journal=tmp_path / "calls.jsonl")
        texts = ["question " * 20]
        for _ in range(60):
            status, answer = await ask(gateway, "a", *texts)
            assert status == 200
            texts += [answer, "question " * 20]
        return gateway, sum(map(len, texts))

    gateway, said = asyncio.run(play())
    lines = (tmp_path / "calls.jsonl").read_bytes().splitlines()
    calls = [msgspec.json.decode(line, type=Recorded) for line in lines]
    assert [call.call.parent for call in calls] == [None, *range(59)]
    assert {len(call.turns) for call in calls} == {1}
    assert (
        sum(len(text) for call in calls for _, text in call.turns) + sum(len(c.answer) for c in calls) <= said
    )
    assert gateway.sessions["a"].size < 30 * said
    # all that the model read in the last call, from what each call has that is new
    ids = [*(one for call in calls for one in (*call.call.new_prompt_ids, *call.call.response_ids))]
    tokenizer = TinyTokenizer()
    assert tokenizer.decode(ids).count("question") == 60 * 20
