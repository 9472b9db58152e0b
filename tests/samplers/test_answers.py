"""What a sampler answers is checked in one place."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.doubles import HashEngine, each

from shoal.core.errors import EngineError
from shoal.samplers.sampler import Completion, Key, Request, Sampling, checked
from shoal.samplers.tokenizers import ChatCodec


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


@pytest.mark.parametrize(
    ("ids", "logprobs", "finish"),
    [
        (("one",), (-1.0,), "stop"),
        ((0.5,), (-1.0,), "stop"),
        ((-1,), (-1.0,), "stop"),
        ((7,), (-1.0,), "stop"),
        ((1,), (math.nan,), "stop"),
        ((1,), (math.inf,), "stop"),
        ((1,), (-math.inf,), "stop"),
        ((1,), (0.5,), "stop"),
        ((1, 2), (-1.0,), "stop"),
        ((1,), (-1.0, -0.5), "stop"),
        ((1,), (), "stop"),
        ((), (), "stop"),
        ((1,) * 5, (-1.0,) * 5, "length"),
        ((1,), (-1.0,), "context"),
        ((1,), (-1.0,), "banana"),
        ((1,), (-1.0,), None),
    ],
)
def test_an_answer_that_is_no_completion_of_its_request_is_refused(ids, logprobs, finish):
    with pytest.raises(EngineError):
        checked(request(), Completion(ids, logprobs, finish), 7)


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
