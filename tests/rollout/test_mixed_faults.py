"""Faults of envs and of the engine drawn at random, many in one rollout: each episode is there once, and why."""

import collections
import functools
import random

import pytest
from tests.rollout.doubles import CounterEnv, HashEngine, with_env

from shoal import envs
from shoal.core.errors import EngineError
from shoal.rollout.plan import place_of
from shoal.rollout.rollouts import ParallelRolloutManager
from shoal.rollout.samplers.sampler import Completion
from shoal.rollout.samplers.tokenizers import TinyTokenizer

GROUPS, MEMBERS = 12, 2
OF_ENVS = {
    "raise": "env_error",
    "exit": "env_error",
    "nan": "env_error",
    "hang": "timeout",
    "kill": "env_error",
}
OF_THE_ENGINE = ("refuse", "crash", "nothing", "banana", "not finite", "too long", "unreadable", "context")
UNREADABLE = (9,) * 7


@pytest.fixture(autouse=True, scope="module")
def _counter():
    envs.register("test_counter", CounterEnv, replace=True)


class PlannedEnv(CounterEnv):
    """Fails as is planned for its seed."""

    plan: dict[int, str]

    def _start(self, rng):
        super()._start(rng)
        self._fault = self.plan.get(self._seed, "")
        self._faulty = bool(self._fault)

    def _advance(self, action):
        outcome = super()._advance(action)
        if self._faulty and self._steps == 2:
            self._fail(self._fault)
            if self._fault == "nan":
                return type(outcome)(float("nan"))
        return outcome


def make_env(plan, **settings):
    env = PlannedEnv(**settings)
    env.plan = plan
    return env


class FussyTokenizer(TinyTokenizer):
    def decode(self, ids):
        if tuple(ids) == UNREADABLE:
            raise UnicodeError("no such text")
        return super().decode(ids)


class PlannedEngine(HashEngine):
    """Answers the second request of an episode as is planned for it."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.tokenizer = FussyTokenizer(("one", "two", "three"))

    def generate(self, requests):
        for request in requests:
            fault = self._fault(request)
            if fault == "refuse":
                raise EngineError("not this one")
            if fault == "crash":
                raise ZeroDivisionError("lost")
        return super().generate(requests)

    def _fault(self, request):
        return self.plan.get(request.key.path[1:3]) if request.key.path[3] == 1 else None

    def _answer(self, request):
        good = super()._answer(request)
        ids, values = good.token_ids, good.logprobs
        match self._fault(request):
            case "nothing":
                return None
            case "banana":
                return Completion(ids, values, "banana", 3)
            case "not finite":
                return Completion(ids, (float("nan"), *values[1:]), "stop", 3)
            case "too long":
                return Completion(ids * 9, values * 9, "length", 3)
            case "unreadable":
                return Completion(UNREADABLE, (-1.0,) * 7, "stop", 3)
            case "context":
                return Completion((), (), "context", 3)
        return good


def plans(seed, backend):
    draw = random.Random(seed)
    of_env = [fault for fault in OF_ENVS if fault != "kill" or backend == "processes"]
    by_seed, by_episode = {}, {}
    for group in range(GROUPS):
        if draw.random() < 0.3:
            by_seed[place_of(7, 4, group, 0).env_seed] = draw.choice(of_env)
        for member in range(MEMBERS):
            if draw.random() < 0.5:
                by_episode[group, member] = draw.choice(OF_THE_ENGINE)
    return by_seed, by_episode


def play(backend, by_seed, by_episode, schedule="greedy"):
    limits = {"step_timeout": 0.8, "max_deaths": 1, "env_retries": 0, "schedule": schedule}
    env = functools.partial(make_env, by_seed)
    settings = with_env(env, groups=GROUPS, members=MEMBERS, parallel=limits)
    with ParallelRolloutManager(settings, PlannedEngine(by_episode), backend=backend) as manager:
        return manager.collect(4)


@pytest.mark.parametrize(
    ("backend", "seed"),
    [
        *(("threads", seed) for seed in range(4)),
        ("processes", 20),
        *(pytest.param("threads", seed, marks=pytest.mark.slow) for seed in range(4, 20)),
        *(pytest.param("processes", seed, marks=pytest.mark.slow) for seed in range(21, 30)),
    ],
)
@pytest.mark.flaky(reruns=2)
def test_each_episode_is_there_once_with_its_reason_and_the_calm_ones_are_unchanged(backend, seed):
    by_seed, by_episode = plans(seed, backend)
    calm = play("serial", {}, {})
    played = play(backend, by_seed, by_episode, ("greedy", "barrier")[seed % 2])
    assert [(t.group, t.member) for t in played] == [(g, m) for g in range(GROUPS) for m in range(MEMBERS)]
    told = collections.Counter()
    for before, now in zip(calm, played, strict=True):
        of_engine, of_env = by_episode.get((now.group, now.member)), by_seed.get(now.env_seed)
        if of_engine == "context":
            found, expected = (now.status, now.turns, now.truncated), ("ok", before.turns[:1], True)
        elif of_engine:
            found, expected = (now.status, now.turns), ("engine_error", before.turns[:1])
        elif of_env in ("kill", "hang"):
            found, expected = (now.status, now.turns), (OF_ENVS[of_env], ())
        elif of_env:
            found, expected = (now.status, now.turns), (OF_ENVS[of_env], before.turns[:2])
        else:
            found, expected = now, before
        assert found == expected, (of_engine, of_env, now.error)
        assert (now.error is None) == (now.status == "ok")
        told[of_engine or of_env or ""] += 1
    assert sum(told.values()) == GROUPS * MEMBERS
    assert len(told) > 4
