"""What environments may return and what is refused: observations, rewards, ends and infos, wherever they come."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest

from shoal.core.errors import EnvError
from tests.vector.faulty import CountEnv, Faulty
from tests.vector.same_step import make_vec


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("where", ["step", "end", "reset after it"])
@pytest.mark.parametrize("wrong", [["none"], None, "", np.zeros(2)])
def test_an_info_that_is_no_dict_is_refused_wherever_it_comes(mode: str, where: str, wrong: Any) -> None:
    class Env(CountEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            obs, info = super().reset(seed=seed)
            return obs, wrong if where == "reset after it" and self.episode == 2 else info

        def step(self, action: Any) -> Any:
            *results, over, cut, info = super().step(action)
            return *results, over, cut, wrong if (where, self.t) in (("step", 1), ("end", 2)) else info

    envs = make_vec([CountEnv, functools.partial(Env, 2)], backend="serial", autoreset=mode)
    envs.reset(seed=0)
    for _ in range({"step": 0, "end": 1, "reset after it": 1 if mode == "same_step" else 2}[where]):
        envs.step([1, 1])
    with pytest.raises(Exception, match=r"env 1 .*info must be a dict, got (list|NoneType|str|ndarray)"):
        envs.step([1, 1])
    envs.close()


class Parts(CountEnv):
    """Gives something else in place of what `reset` or `step` should return, from the episode `since` on."""

    def __init__(self, call: str, wrong: Any, since: int = 1) -> None:
        super().__init__(1)
        self.call, self.wrong, self.since = call, wrong, since

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        answer = super().reset(seed=seed)
        return self.wrong if self.call == "reset" and self.episode >= self.since else answer

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        return self.wrong if self.call == "step" and self.episode >= self.since else answer


STEP, RESET = r"step must return \(observation, .*, info\)", r"reset must return \(observation, info\)"


@pytest.mark.parametrize(
    ("call", "wrong", "said"),
    [
        ("step", (np.zeros(2), 1.0, False, {}), f"{STEP}.*got 4 values as in the old Gym API: split"),
        ("step", (np.zeros(2), 1.0, False, False, {}, 6), f"{STEP}.*got 6 values"),
        ("step", None, f"{STEP}.*got NoneType"),
        ("reset", np.zeros(2), f"{RESET}.*got ndarray"),
        ("reset", (np.zeros(2), {}, 3), f"{RESET}.*got 3 values"),
        ("reset", {"x": 1, "y": 2}, f"{RESET}.*got dict"),
    ],
)
def test_what_a_step_or_reset_must_return_is_said_where_something_else_came(
    call: str, wrong: Any, said: str
) -> None:
    def play(envs: Any) -> None:
        for _ in envs.reset(seed=0), *range(3):
            envs.step([1])

    for since, mode in ((1, "disabled"), (2, "same_step"), (2, "next_step")):
        fn = functools.partial(Parts, call, wrong, since)
        envs = make_vec(fn, 1, backend="serial", autoreset=mode)
        with contextlib.closing(envs), pytest.raises(EnvError, match=said):
            play(envs)


class Extreme(CountEnv):
    """Shows the largest number there is, and with action 9 one that is none."""

    def observe(self, action: Any) -> Any:
        return np.array([np.finfo(float).max, np.nan if action == 9 else 0.0, 0.0, 0.0])


def test_the_largest_numbers_are_observations_also_where_numpy_is_told_to_raise() -> None:
    envs = make_vec(Extreme, 2, backend="serial")
    with np.errstate(all="raise"):
        envs.reset(seed=0)
        assert envs.step([1, 1])[0][1, 0] == np.finfo(float).max
        with pytest.raises(Exception, match="env 1.*holds NaN"):
            envs.step([1, 9])
    envs.close()


class BornSpoiled(CountEnv):
    """The first observation of its second episode with seed 8 holds NaN."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        obs[0] = np.nan if (self.seed_, self.episode) == (8, 2) else obs[0]
        return obs, info


@pytest.mark.parametrize("backend", ["serial", "process"])
@pytest.mark.parametrize("check_nan", [True, False])
def test_a_first_observation_with_nan_is_refused_like_any_other(backend: Any, check_nan: bool) -> None:
    envs = make_vec(BornSpoiled, 2, backend=backend, autoreset="disabled", check_nan=check_nan)
    envs.reset(seed=7)
    with (
        contextlib.nullcontext() if not check_nan else pytest.raises(Exception, match="env 1 .*in reset.*NaN")
    ):
        envs.reset()
    envs.close()


@pytest.mark.parametrize("backend", ["serial", "process"])
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_an_observation_with_nan_is_refused_once_and_no_end_comes_of_it(mode: str, backend: Any) -> None:
    fns = [functools.partial(Extreme, 3)] * 2
    envs = make_vec(fns, backend=backend, autoreset=mode, on_failure="restart")
    envs.reset(seed=0)
    for actions in ([1, 9], [1, 1]):  # in the middle of an episode
        _, rewards, terminated, truncated, infos = envs.step(actions)
        bad = actions[1] == 9
        assert terminated.tolist() == [False, False]
        assert truncated.tolist() == [False, bad]
        assert rewards[1] == (0.0 if bad else 11.0 if mode == "same_step" else rewards[1])
        assert ("worker_restarted" in infos) is bad
        if mode == "disabled" and bad:
            envs.reset(options={"reset_mask": np.array([False, True])})
    envs.reset(seed=0)
    for actions in ([1, 1], [1, 1], [1, 9], [1, 1], [1, 1]):  # as the last of one
        _, rewards, terminated, truncated, infos = envs.step(actions)
        bad = actions[1] == 9
        assert truncated.tolist() == [False, bad]
        assert not terminated[1]
        assert ("worker_restarted" in infos) is bad
        if bad:
            assert (rewards.tolist(), terminated.tolist()) == ([13.0, 0.0], [True, False])
        if mode == "disabled" and bad:
            envs.reset(options={"reset_mask": np.array([True, True])})
    if mode == "same_step":  # the next end, of the other one, does not bring it up again
        envs.reset(options={"reset_mask": np.array([False, True])})
        _, _, terminated, _, infos = envs.step([1, 1])
        assert terminated.tolist() == [True, False]
        assert "worker_restarted" not in infos
    envs.close()


class Pays(CountEnv):
    """Pays one and the same in every step."""

    def __init__(self, reward: Any, length: int) -> None:
        super().__init__(length)
        self.reward = reward

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, self.reward, *rest


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_a_list_of_numbers_is_an_observation_in_every_step(mode: str) -> None:
    class Lists(CountEnv):
        def observe(self, action: Any) -> Any:
            return super().observe(action).tolist()

    with closing(make_vec([functools.partial(Lists, 2)], backend="serial", autoreset=mode)) as envs:
        assert envs.reset(seed=0)[0].tolist() == [[0, 1, 0, 0]]
        assert envs.step(np.array([1]))[0].tolist() == [[0, 1, 1, 1]]
        obs, _, terminated, _, infos = envs.step(np.array([1]))
        last = infos["final_obs"] if mode == "same_step" else obs
        assert (list(last[0]), terminated.tolist()) == ([0, 1, 2, 1], [True])


@pytest.mark.parametrize("length", [1, 2], ids=["the last step", "a step"])
def test_what_is_paid_is_a_number_in_the_last_step_as_in_any(length: int) -> None:
    for reward, number in ((2.5, 2.5), (np.array([2.0]), 2.0), (np.float32(0.5), 0.5), (3, 3.0), (True, 1.0)):
        with closing(make_vec([functools.partial(Pays, reward, length)], backend="serial")) as envs:
            envs.reset(seed=0)
            assert envs.step(np.array([1]))[1].tolist() == [number]
    for reward in (None, "1", math.nan):
        with closing(make_vec([functools.partial(Pays, reward, length)], backend="serial")) as envs:
            envs.reset(seed=0)
            with pytest.raises(Exception, match="reward (must be a number, got|is NaN)"):
                envs.step(np.array([1]))


class KeepsAction(CountEnv):
    """Shows the action before the last one."""

    action_space = gymnasium.spaces.Box(-9, 9, (4,), np.float64)
    kept: Any = np.zeros(4)

    def observe(self, action: Any) -> Any:
        before, self.kept = self.kept, np.zeros(4) if np.ndim(action) == 0 else action
        return before.copy()

    def step(self, action: Any) -> Any:
        return self.observe(action), 0.0, False, False, {}


def test_an_action_that_an_env_keeps_is_its_own() -> None:
    envs = make_vec([KeepsAction] * 2, backend="serial")
    envs.reset(seed=0)
    actions = np.full((2, 4), 3.0)
    envs.step(actions)
    actions[:] = 7.0
    assert (envs.step(actions)[0] == 3.0).all()
    assert envs.step_some([1], [actions[1]])[0].observation.tolist() == [7.0] * 4
    assert envs.step_some([], []) == []
    envs.close()


class BadNext(CountEnv):
    """Its second episode begins with an observation of another shape, after an end that paid."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        return (obs[:2] if self.episode == 2 else obs), info


@pytest.mark.parametrize("backend", ["serial", "process", "thread"])
def test_a_rewarded_end_is_kept_when_what_comes_after_it_is_refused(backend: Any) -> None:
    envs = make_vec(functools.partial(BadNext, 1), 2, backend=backend, on_failure="restart")
    envs.reset(seed=0)
    _, rewards, terminated, truncated, infos = envs.step(np.array([3, 4]))
    assert rewards.tolist() == [31.0, 41.0]
    assert terminated.all()
    assert not truncated.any()
    assert [final.tolist() for final in infos["final_obs"]] == [[0, 1, 1, 3], [1, 1, 1, 4]]
    assert infos["worker_restarted"].all()
    envs.close()


@pytest.mark.parametrize("backend", ["serial", "process", "thread"])
def test_an_end_whose_reward_is_refused_is_no_end(backend: Any) -> None:
    fns = [functools.partial(Faulty, "nan reward", 1)] * 2
    envs = make_vec(fns, backend=backend, on_failure="restart")
    envs.reset(seed=0)
    _, rewards, terminated, truncated, _ = envs.step(np.array([9, 1]))
    assert rewards.tolist() == [0.0, 11.0]
    assert terminated.tolist() == [False, True]
    assert truncated.tolist() == [True, False]
    envs.close()


class EndsBadly(CountEnv):
    """Its episodes end with an observation that is none."""

    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), *super().step(action)[1:]


@pytest.mark.parametrize(
    ("backend", "mode"), [("serial", "disabled"), ("process", "disabled"), ("serial", "same_step")]
)
def test_an_end_whose_observation_is_refused_is_a_failure_and_no_forgotten_reset(
    backend: Any, mode: Any
) -> None:
    options: Any = {"backend": backend, "autoreset": mode, "on_failure": "restart"}
    with closing(make_vec([functools.partial(EndsBadly, 1), CountEnv], **options)) as envs:
        envs.reset(seed=0)
        _, rewards, _, truncated, infos = envs.step([1, 1])
        assert truncated.tolist() == [True, False]
        assert rewards.tolist() == [0.0, 11.0]
        assert "must have shape" in infos["worker_error"][0]


@pytest.mark.parametrize("which", ["terminated", "truncated"])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("end", ["False", [False], {"__all__": False}, math.nan], ids=repr)
def test_the_end_of_an_episode_is_not_told_in_words(which: str, autoreset: str, end: Any) -> None:
    class Wordy(CountEnv):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = super().step(action)
            return (
                (obs, reward, end, truncated, info)
                if which == "terminated"
                else (obs, reward, terminated, end, info)
            )

    with contextlib.closing(make_vec([Wordy], backend="serial", autoreset=autoreset)) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvError, match=re.escape(f"{which} must be True or False, got {end!r}")):
            envs.step([0])
