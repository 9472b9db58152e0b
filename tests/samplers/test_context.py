"""The context is a limit like any other: responses end at it, episodes are truncated by it, and all are counted."""

import pytest
from tests.records import exchanges
from tests.rollout.doubles import CounterEnv, HashEngine, config
from tests.rollout.doubles import llama_engine as make_engine
from tests.samplers.definitions import by_definition

from shoal import envs
from shoal.core.data import decode_trajectory, encode_trajectory
from shoal.rollout.play import ParallelRolloutManager
from shoal.samplers.sampler import Completion, Key, Request, Sampling, room_left
from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.testing import check_engine


@pytest.fixture(autouse=True, scope="module")
def _counter():
    envs.register("test_counter", CounterEnv, replace=True)


def tiny():
    return TinyEngine(["Up"], TinyShape(16, 1, 2, 32), seed=3)


@pytest.mark.parametrize(("make", "context"), [(tiny, 32), (make_engine, 200)])
def test_a_response_ends_where_the_context_does(make, context):
    engine = make()
    asked = [
        Request(tuple(3 + (7 * i) % 20 for i in range(length)), Key(1, (0, length, 0, 0)), Sampling(6))
        for length in (context - 9, context - 6, context - 5, context - 3, context - 1, context, context + 1)
    ]
    rooms = [6, 6, 5, 3, 1, 0, 0]
    assert [room_left(engine, request) for request in asked] == rooms
    for request, room, completion in zip(asked, rooms, engine.generate(asked), strict=True):
        assert completion.token_ids == by_definition(engine, request)[0]
        if not room:
            assert completion == Completion((), (), "context", 0)
        elif completion.token_ids[-1] not in engine.tokenizer.end_ids:
            assert (len(completion.token_ids), completion.finish) == (room, "length")
        assert make().generate([request])[0].token_ids == completion.token_ids  # alone as in the batch


def test_engines_with_a_short_context_keep_their_promises():
    check_engine(lambda: TinyEngine(["Up"], TinyShape(16, 1, 2, 17)))  # "Say something." is 16 tokens


class Short(HashEngine):
    """Has room for prompts of up to `context - 1` tokens."""

    context = 90

    def _answer(self, request):
        room = room_left(self, request)
        plain = super()._answer(request)
        if not room:
            return Completion((), (), "context", self.weights_version)
        kept = slice(0, room)
        finish = "stop" if room >= len(plain.token_ids) else "length"
        return Completion(plain.token_ids[kept], plain.logprobs[kept], finish, self.weights_version)


def play(backend, engine):
    settings = config(groups=8, members=4)
    settings["agent_proxy"]["prompt"] = {
        "mode": "append",
        "first": "{observation} " * 5,
        "later": "{observation} " * 3,
    }
    settings["agent_proxy"]["use_parallel_rollout"] = True
    with ParallelRolloutManager(settings, engine, backend=backend) as manager:
        return manager.collect(4)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_episode_that_fills_the_context_is_truncated_and_counted(backend):
    roomy, short = play("serial", HashEngine()), play(backend, Short())
    assert len(short) == len(roomy) == 32
    assert {t.status for t in short} == {"ok"}
    full = [t for t in short if t.truncated and not t.terminated and len(t.turns) < 6]
    assert full  # some did
    for before, now in zip(roomy, short, strict=True):
        for a, b in zip(exchanges(before), exchanges(now), strict=False):
            if len(b.response_ids) < len(a.response_ids):
                assert b.finish == "length"
                assert len(b.prompt_ids) + len(b.response_ids) == Short.context
                break
            assert a == b
    for trajectory in full:
        last = exchanges(trajectory)[-1]
        assert len(last.prompt_ids) + len(last.response_ids) <= Short.context
    assert short == play("serial", Short())


def test_a_prompt_that_never_fits_gives_an_episode_without_turns():
    class Tight(Short):
        context = 3

    for trajectory in play("serial", Tight()):
        assert (trajectory.turns, trajectory.status) == ((), "ok")
        assert trajectory.truncated
        assert not trajectory.terminated
        assert not trajectory.success
        assert decode_trajectory(encode_trajectory(trajectory)) == trajectory
