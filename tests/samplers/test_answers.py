"""What a sampler answers is checked in one place; what cannot be an answer ends its own episode and no other."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.doubles import CounterEnv, HashEngine, config, each

from shoal import envs
from shoal.core.errors import EngineError
from shoal.rollout.factory import make_environments
from shoal.rollout.play import ParallelRolloutManager, TrajectoryCollector
from shoal.rollout.prompts import PromptConfig
from shoal.samplers.sampler import Completion, Key, Request, Sampling, checked
from shoal.samplers.tokenizers import ChatCodec

WRONG = {
    "a log-probability that is no number": {"logprobs": (math.nan,)},
    "an end that there is not": {"finish": "banana"},
    "a token that there is not": {"token_ids": (10_000,), "logprobs": (-1.0,)},
}


class Bent(HashEngine):
    """Its answer to one turn of the episodes of one group is wrong."""

    how = None

    def _answer(self, request):
        plain = super()._answer(request)
        if self.how is None or (request.key.path[1], request.key.path[3]) != (1, 2):
            return plain
        return msgspec.structs.replace(plain, **WRONG[self.how])


class Undecodable(HashEngine):
    """Its tokenizer knows fewer tokens than its network writes."""

    vocabulary = 50_000

    def _answer(self, request):
        plain = super()._answer(request)
        if (request.key.path[1], request.key.path[3]) != (1, 2):
            return plain
        return msgspec.structs.replace(plain, token_ids=(49_999, *plain.token_ids[1:]))


@pytest.fixture(autouse=True, scope="module")
def _counter():
    envs.register("test_counter", CounterEnv, replace=True)


def play(backend, engine):
    if backend == "lockstep":
        settings = config()
        train, _ = make_environments({k: v for k, v in settings.items() if k != "agent_proxy"})
        prompt = PromptConfig(**settings["agent_proxy"]["prompt"])
        collector = TrajectoryCollector(train.pool, train.tags, train.roles, 2, engine, prompt, 7)
        try:
            return collector.collect(4, Sampling(16, 1.0, ("</action>",)))
        finally:
            collector.close()
    with ParallelRolloutManager(config(), engine, backend=backend) as manager:
        return manager.collect(4)


@pytest.fixture(scope="module")
def calm(_counter):
    return play("serial", HashEngine())


def check_only_group_1_ends(calm, played):
    assert len(played) == len(calm)
    for before, now in zip(calm, played, strict=True):
        if now.group == 1:
            assert (now.status, now.turns, now.success) == ("engine_error", before.turns[:2], False)
            assert now.error
        else:
            assert now == before


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_answer_ends_its_own_episode_and_costs_no_worker(calm, how):
    engine = Bent()
    engine.how = how
    for backend in ("lockstep", "serial", "thread"):
        check_only_group_1_ends(calm, play(backend, engine))
    with ParallelRolloutManager(config(), engine, backend="process") as manager:
        check_only_group_1_ends(calm, manager.collect(4))
        assert manager.report.worker_deaths == 0


@pytest.mark.parametrize("backend", ["lockstep", "thread"])
def test_a_token_that_the_tokenizer_cannot_decode_ends_its_own_episode(calm, backend):
    played = play(backend, Undecodable())
    check_only_group_1_ends(calm, played)
    assert "cannot decode" in next(t.error for t in played if t.group == 1)


def request(limit=4):
    return Request((1, 2, 3), Key(1, (0, 0, 0, 0)), Sampling(limit))


NUMBERS = st.one_of(st.integers(-3, 9), st.floats(), st.booleans(), st.none(), st.text(max_size=2))


@given(
    ids=st.one_of(st.none(), st.lists(NUMBERS, max_size=6), st.tuples(st.integers(0, 6))),
    logprobs=st.one_of(st.none(), st.lists(NUMBERS, max_size=6), st.tuples(st.floats(-3, 0))),
    finish=st.sampled_from(["stop", "length", "context", "banana", None, 3]),
    version=NUMBERS,
)
def test_whatever_is_answered_is_a_completion_that_can_be_or_an_error(ids, logprobs, finish, version):
    try:
        found = checked(request(), Completion(ids, logprobs, finish, version), 7)
    except EngineError:
        return
    if found.finish == "context":
        assert (found.token_ids, found.logprobs) == ((), ())
    else:
        assert found.finish in ("stop", "length")
        assert 1 <= len(found.token_ids) == len(found.logprobs) <= 4
    assert all(type(i) is int and 0 <= i < 7 for i in found.token_ids)
    assert all(type(x) is float and -math.inf < x <= 1e-3 for x in found.logprobs)
    assert type(found.weights_version) is int
    assert found.weights_version >= 0
    msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Completion)  # it can be sent


def test_right_answers_pass_in_numbers_of_numpy_too():
    for ids, logprobs in [
        ((0, 6), (-1.0, 0.0)),
        (np.array([0, 6]), np.array([-1.0, 0.0])),
        ([0, np.int32(6)], [-1, 0]),
    ]:
        found = checked(request(), Completion(ids, logprobs, "stop", np.int64(2)), 7)
        assert found == Completion((0, 6), (-1.0, 0.0), "stop", 2)
        assert type(found.token_ids[1]) is int
        assert type(found.logprobs[1]) is float
    for nobodys in (None, "text", 3, [1]):
        with pytest.raises(EngineError, match="the sampler returned no completion"):
            checked(request(), nobodys)


def test_a_sampler_of_messages_may_write_more_characters_than_tokens_and_no_log_probabilities():
    size, text = ChatCodec.size, ChatCodec().encode("hello, this is long")
    for answer in (Completion(text, (), "stop"), Completion((), (), "stop")):
        assert checked(request(), answer, size, exact=False) == answer
    with pytest.raises(EngineError, match="token ids below"):
        checked(request(), Completion((0x110001,), (), "stop"), size, exact=False)


def test_fewer_answers_than_requests_fail_all_of_them():
    class Short(HashEngine):
        def generate(self, requests):
            return super().generate(requests)[:-1]

    assert all(isinstance(answer, EngineError) for answer in each(Short(), [request(16)] * 3))
