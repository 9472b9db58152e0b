"""Envs that answer nonsense, fork, or do not let go: each costs its own episode and nothing else."""

import asyncio
import functools
import os
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.rollout.doubles import (
    CounterEnv,
    HashEngine,
    SpeechlessError,
    check_faulty,
    in_lockstep,
    with_env,
)

from shoal.core.data import encode_trajectory
from shoal.rollout.plan import place_of
from shoal.rollout.play import ParallelRolloutManager
from shoal.samplers.sampler import Sampling

BACKENDS = ("serial", "thread", "process")
ELSEWHERE = BACKENDS[1:]


def play(backend, env=CounterEnv, times=1, **changes):
    with ParallelRolloutManager(with_env(env, **changes), HashEngine(), backend=backend) as manager:
        played = [manager.collect(4) for _ in range(times)]
    assert all(trajectories == played[0] for trajectories in played)
    return played[0]


@pytest.fixture(scope="module")
def calm():
    return play("serial")


def odd(answer):
    """An env whose second step of some episodes gives what `answer` makes of the right one."""

    class Odd(CounterEnv):
        def step(self, action):
            given = super().step(action)
            return answer(*given) if self._faulty and self._steps == 2 else given

    return Odd


def raises(error, *said):
    def answer(*given):
        raise error(*said)

    return odd(answer)


def says(**more):
    """Has this in its info."""
    return odd(lambda *given: (*given[:4], {**given[4], **more}))


class BadExit(raises(ValueError, "lost")):
    """It raises, and its end does too."""

    def close(self):
        raise SystemExit(3)


OddMessage = raises(ValueError, "caf\udce9")
FIVE = "step must return (observation, reward, terminated, truncated, info), as Gymnasium has it; got 4"
ODD = [
    (odd(lambda o, r, *rest: (o, float("nan"), *rest)), "the reward must be a finite number, got nan"),
    (
        odd(lambda o, *rest: (None, *rest)),
        "EnvError: the observation must be str in a Text space, got NoneType",
    ),
    (
        odd(lambda o, r, *rest: (o, np.str_("1"), *rest)),
        "EnvError: the reward must be a number, got np.str_('1')",
    ),
    (odd(lambda o, r, t, *rest: (o, r, "False", *rest)), "terminated must be True or False, got 'False'"),
    (says(success=np.str_("False")), "success must be True or False, got np.str_('False')"),
    (says(action_is_valid="no"), "action_is_valid must be True or False, got 'no'"),
    (odd(lambda *given: (*given[:4], None)), "EnvError: the info must be a dict, got NoneType"),
    (odd(lambda o, r, t, *rest: (o, r, *rest)), f"EnvError: {FIVE}"),
    (odd(lambda o, *rest: ("\ud800", *rest)), "UnicodeEncodeError"),
    (says(image=object()), "picture"),
    (says(image="\ud800"), "UnicodeEncodeError"),
    (odd(lambda o, r, *rest: (o, None, *rest)), "EnvError: the reward must be a number, got None"),
    (raises(asyncio.CancelledError), "CancelledError"),
    (raises(GeneratorExit), "GeneratorExit"),
    (raises(SpeechlessError), "SpeechlessError: its message raises SystemExit"),
    (OddMessage, r"ValueError: caf\udce9"),
    (BadExit, "ValueError: lost"),
]


@pytest.mark.parametrize(("env", "cause"), ODD)
@pytest.mark.filterwarnings("ignore")
def test_whatever_an_env_answers_only_its_own_episode_ends_in_lockstep_as_on_workers(calm, env, cause):
    played = play("serial", env)
    assert play_in_lockstep(env) == played
    check_faulty(calm, played, "env_error", re.escape(cause), 1)


@pytest.mark.parametrize("env", [OddMessage, BadExit])  # what an error says, and an end that fails
@pytest.mark.parametrize("backend", ELSEWHERE)
def test_a_failure_is_told_in_the_same_words_by_workers(backend, env):
    assert play(backend, env) == play("serial", env)


@pytest.mark.parametrize("at_once", [None, 1])  # in threads of a worker, or in its main one
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_interrupt_that_an_env_raises_by_itself_is_a_failure_of_its_own(calm, backend, at_once):
    played = play(backend, raises(KeyboardInterrupt), parallel={"episodes_at_once": at_once})
    check_faulty(calm, played, "env_error", "KeyboardInterrupt", 1)


def forks(*answer):
    """Its child leaves by `sys.exit`, through the code that plays the episode."""
    if not (pid := os.fork()):
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    return answer


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_child_that_an_env_forked_is_no_second_worker(calm, backend):
    assert play(backend, odd(forks)) == calm


class Clings(CounterEnv):
    """Some do not come back from their end."""

    def close(self):
        if self._faulty:
            time.sleep(1000)


@pytest.mark.parametrize("backend", ELSEWHERE)
@pytest.mark.flaky(reruns=2)
def test_envs_whose_end_hangs_are_left_behind_in_time(calm, backend):
    assert play(backend, Clings, parallel={"step_timeout": 0.5}) == calm
    played = play(backend, Clings, fault="raise", parallel={"step_timeout": 0.5, "max_deaths": 1})
    check_faulty(calm, played, "timeout", "close failed: no answer within 0.5 s", 0)


class OneThread(CounterEnv):
    """As envs with a database or a browser: only the thread that made it may use it. Notes its life in a folder."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self._home, self._folder = threading.get_ident(), folder
        self._note("made")

    def _note(self, what):
        if threading.get_ident() != self._home:
            raise RuntimeError("used in another thread than the one that made it")
        Path(self._folder, f"{what}-{os.getpid()}-{id(self)}-{time.monotonic_ns()}").touch()

    def reset(self, **settings):
        self._note("reset")
        return super().reset(**settings)

    def _advance(self, action):
        self._note("step")
        return super()._advance(action)

    def close(self):
        self._note("closed")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_lives_and_dies_in_one_thread(calm, backend, keep, tmp_path):
    env = functools.partial(OneThread, str(tmp_path))
    limits = {
        "episodes_at_once": 1 if keep else None,
        "keep_envs": keep,
        "env_retries": 0,
        "schedule": "barrier" if keep else "adaptive",
    }
    assert play(backend, env, times=3, parallel=limits) == calm
    lives = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    assert lives.count("closed") == lives.count("made") > 0


@pytest.mark.parametrize(("backend", "schedule"), [("thread", "barrier"), ("process", "adaptive")])
@pytest.mark.flaky(reruns=2)
def test_an_episode_is_tried_again_though_the_end_of_its_failed_env_hangs(calm, backend, schedule, tmp_path):
    changes = {"fault": "raise", "once": str(tmp_path / "once")}
    assert play(backend, Clings, parallel={"step_timeout": 0.5, "schedule": schedule}, **changes) == calm
    assert (tmp_path / "once").exists()


class NoReset(CounterEnv):
    def reset(self, *, seed=None, options=None):
        if seed is not None and seed % 4 == 0:
            raise ValueError("no such world")
        return super().reset(seed=seed, options=options)


class FailsForGood(CounterEnv):
    """From then on only some worlds are left, and not that of the env that takes its place."""

    failed = False

    def step(self, action):
        if self._faulty:
            FailsForGood.failed = True
            raise ValueError("lost")
        return super().step(action)

    def reset(self, *, seed=None, options=None):
        worlds = {place_of(7, 4, group, 0).env_seed for group in range(8)}
        if FailsForGood.failed and (seed % 4 == 0 or seed not in worlds):
            raise OSError("no such world")
        return super().reset(seed=seed, options=options)


def play_in_lockstep(env, vector="serial", limit=None, **changes):
    limits = {"num_workers": 2, "step_timeout": limit} if vector == "process" else {}
    playing = in_lockstep(with_env(env, **changes), HashEngine(), {"backend": vector, **limits})
    try:
        played = [playing.collect(4, Sampling(16, 1.0, ("</action>",))) for _ in range(2)]
    finally:
        playing.close()
    assert played[0] == played[1]
    return played[0]


@pytest.mark.parametrize(("vector", "env"), [("serial", NoReset), ("process", OddMessage)])
@pytest.mark.filterwarnings("ignore")
def test_a_failing_env_leaves_in_lockstep_the_same_trajectories_and_words_as_on_workers(vector, env):
    assert play_in_lockstep(env, vector) == play("serial", env)


@pytest.mark.parametrize(
    ("vector", "fault"), [("serial", "raise"), ("process", "raise"), ("process", "kill")]
)
@pytest.mark.filterwarnings("ignore")
def test_an_env_that_fails_once_costs_no_episode_in_lockstep_nor_do_those_lost_with_its_worker(
    calm, vector, fault, tmp_path
):
    assert play_in_lockstep(CounterEnv, vector, fault=fault, once=str(tmp_path / "once")) == calm
    assert (tmp_path / "once").exists()


@pytest.mark.filterwarnings("ignore")
def test_an_env_that_always_ends_its_worker_costs_its_own_episode_alone_in_lockstep(calm):
    check_faulty(calm, play_in_lockstep(CounterEnv, "process", fault="kill"), "env_error", "", 2)


@pytest.mark.filterwarnings("ignore")
def test_an_env_for_which_there_is_no_other_costs_its_own_episode_alone_in_lockstep(calm):
    cause = r"^reset failed: OSError: no such world \(.*:\d+ in reset\)$"
    check_faulty(calm, play_in_lockstep(FailsForGood), "env_error", cause, 0)


class NumpyText(CounterEnv):
    """Shows what NumPy drew from a list of words, say."""

    def observe(self):
        return np.str_(super().observe())


@pytest.mark.parametrize("backend", [*BACKENDS, "lockstep"])
def test_text_that_is_a_kind_of_text_is_recorded_as_plain_text(calm, backend):
    if backend == "lockstep":
        playing = in_lockstep(with_env(NumpyText), HashEngine())
        played = playing.collect(4, Sampling(16, 1.0, ("</action>",)))
        playing.close()
    else:
        played = play(backend, NumpyText)
    assert list(map(encode_trajectory, played)) == list(map(encode_trajectory, calm))
