import pytest

from shoal.samplers.sampler import Completion
from shoal.samplers.scripted import RandomEngine
from shoal.samplers.tiny import TinyEngine
from shoal.testing import check_engine


def test_shoals_own_engines_pass():
    check_engine(lambda: RandomEngine(["Up", "Down"]))
    check_engine(lambda: TinyEngine(["Up"]))


class Broken(RandomEngine):
    def __init__(self, bend):
        super().__init__(["Up", "Down", "Left", "Right"])
        self.bend, self.calls = bend, 0

    def generate(self, requests):
        self.calls += 1
        return self.bend(self, requests, super().generate(requests))


def each(change):
    return lambda engine, requests, done: [change(c) for c in done]


@pytest.mark.parametrize(
    ("bend", "message"),
    [
        (lambda e, r, done: done[:-1], "must give"),
        (each(lambda c: Completion(c.token_ids, c.logprobs[1:], c.finish)), "each token needs"),
        (each(lambda c: Completion(c.token_ids, (0.5,) * len(c.token_ids), c.finish)), "at most 0"),
        (each(lambda c: Completion(c.token_ids * 9, c.logprobs * 9, c.finish)), "max_tokens is 2"),
        (each(lambda c: Completion(c.token_ids[:1], c.logprobs[:1], "length")), "'length' after 1 of 2"),
        (each(lambda c: Completion(c.token_ids, c.logprobs, c.finish, 3)), "weights_version must be 0"),
        (
            lambda e, r, done: [Completion((7 + e.calls,) * 2, (0.0,) * 2, "stop") for _ in done],
            r"asked .*other tokens \(L2\)",
        ),
        (
            lambda e, r, done: [
                Completion(c.token_ids, (-float(len(r)),) * len(c.logprobs), c.finish) for c in done
            ],
            r"other log-probabilities \(L2\)",
        ),
    ],
)
def test_each_broken_promise_is_named(bend, message):
    with pytest.raises(AssertionError, match=message):
        check_engine(lambda: Broken(bend))
