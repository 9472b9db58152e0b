"""`backend="native"`: an environment's own batch keeps what `make_vec` promises, or refuses it by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from shoal.core.errors import ConfigError, EnvError, UnknownNameError
from shoal.vector import groups, make_vec


class Counters(VectorEnv[Any, Any, Any]):
    """Counts its steps per environment; each ends after `3 + i` steps and begins again one step later."""

    def __init__(self, num_envs: int, **said: Any) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, **said}
        self.single_observation_space = spaces.Box(-1, 99, (1,), np.float32)
        self.single_action_space = spaces.Discrete(3, start=5)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.obs = np.zeros((num_envs, 1), np.float32)  # one array, written again in every step
        self.over = np.zeros(num_envs, bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.obs[mask], self.over[mask] = 0, False
        return self.obs, {"seed": seed}

    def step(self, actions: Any) -> Any:
        assert actions.dtype == np.int64
        self.obs += 1
        self.obs[self.over] = 0
        self.over = self.obs[:, 0] >= 3 + np.arange(self.num_envs)
        none = np.zeros(self.num_envs, bool)
        return self.obs, actions - 5.0, self.over.copy(), none, {"count": self.obs[:, 0].astype(int)}


class Scripted(Counters):
    """Makes of each step what it is told to."""

    script: Callable[[Any], Any] = staticmethod(lambda answer: answer)

    def step(self, actions: Any) -> Any:
        return self.script(super().step(actions))


def raising(error: Any) -> Callable[[Any], Any]:
    def script(answer: Any) -> Any:
        raise error

    return script


def native(env: Any, n: int = 3, autoreset: str = "next_step", **options: Any) -> Any:
    return make_vec(env, n, backend="native", autoreset=autoreset, **options)


# ------------------------------------------------------------------ what it refuses, by name


def test_every_option_that_only_workers_honour_is_refused_by_name_at_once() -> None:
    asked = {"num_workers": 2, "start_method": "spawn", "step_timeout": 1.0, "on_failure": "restart"}
    made: list[Any] = []
    with pytest.raises(ConfigError) as caught:
        native(lambda num_envs: made.append(num_envs), **asked)
    for name, value in asked.items():
        assert f"{name}={value!r}" in str(caught.value)
    assert "leave that out, or use another backend" in str(caught.value)
    assert not made


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("MountainCar-v0", "vector_entry_point, got 'MountainCar-v0'"),
        ("frozen_lake", "vector_entry_point, got 'frozen_lake'"),
        (lambda num_envs: gymnasium.make("CartPole-v1"), "must give a VectorEnv, got TimeLimit"),
        (lambda num_envs: Counters(num_envs + 1), "has num_envs=4 and .* got num_envs=3 and"),
        (lambda num_envs: Counters(num_envs, autoreset_mode=None), "metadata"),
        (lambda num_envs: 1 / 0, "cannot be made with {}: ZeroDivisionError"),
        (7, "needs an id"),
    ],
)
def test_what_is_no_batch_is_told_with_what_was_expected(env: Any, said: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=said):
        native(env)


def test_another_autoreset_than_the_batchs_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="has .*autoreset='next_step'.* got .*'same_step': pass autoreset='next_step'"
    ):
        native("CartPole-v1", autoreset="same_step")
    with pytest.raises(ConfigError, match="got .*autoreset='disabled'"):
        native(Counters, autoreset="disabled")
    assert native("CartPole-v1").metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP


def test_calls_that_a_batch_cannot_take_are_refused_and_it_goes_on_as_if_not_asked() -> None:
    envs, calm = native("CartPole-v1"), native("CartPole-v1")
    assert np.array_equal(envs.reset(seed=1)[0], calm.reset(seed=1)[0])
    refused: list[Callable[[], Any]] = [
        lambda: envs.reset(seed=[1, 2, 3]),
        lambda: envs.reset(seed=groups(0, 3, 1)),
        lambda: envs.reset(options={"reset_mask": np.array([True, False, False])}),
    ]
    for call in refused:
        with pytest.raises(EnvError, match="the native batch of 'CartPole-v1' .* does not support .* use"):
            call()
    for wrong in ([0, 1], [0, 1, 2], [0, 1, -1], [0.5, 1, 1], [[0], [1], [1]]):
        with pytest.raises(ValueError, match="expected actions"):
            envs.step(wrong)
    for name in ("step_some", "reset_some", "send", "recv", "call", "get_attr", "apply"):
        assert not hasattr(envs, name)
    assert np.array_equal(envs.step([0, 1, 1])[0], calm.step([0, 1, 1])[0])
    assert envs.stats()["failures"] == [0, 0, 0]


# ------------------------------------------------------------------ what it does


def test_gymnasiums_own_batch_gives_what_it_gives_alone() -> None:
    envs = native("CartPole-v1", 4)
    alone = gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")
    assert np.array_equal(envs.reset(seed=3)[0], alone.reset(seed=3)[0])
    actions, ends = np.random.default_rng(0), 0
    for _ in range(80):
        action = actions.integers(2, size=4)
        obs, rewards, terminated, truncated, _ = envs.step(action)
        want = alone.step(action)
        assert np.array_equal(obs, want[0])
        assert np.array_equal(rewards, want[1])
        assert rewards.dtype == np.float64
        assert np.array_equal(terminated, want[2])
        assert np.array_equal(truncated, want[3])
        ends += int(terminated.sum())
    assert ends > 4
    assert envs.stats()["step_seconds"] > 0
    again = native("CartPole-v1", 4)
    assert np.array_equal(again.reset(seed=3)[0], native("CartPole-v1", 4).reset(seed=3)[0])
    assert not np.array_equal(again.reset(seed=4)[0], again.reset(seed=3)[0])


def test_a_batch_says_in_its_metadata_what_it_keeps_to() -> None:
    envs = native(lambda num_envs: Counters(num_envs, reset_mask=True, seed_per_env=True))
    assert envs.reset(seed=[4, 4, 9])[1]["seed"] == [4, 4, 9]
    envs.step([5, 6, 7])
    assert envs.reset(options={"reset_mask": np.array([False, True, False])})[0].tolist() == [[1], [0], [1]]
    with pytest.raises(ValueError, match="the length must match num_envs=3"):
        envs.reset(seed=[1, 2])
    for mask in (np.zeros(3, bool), np.ones(2, bool), np.ones(3), [True] * 3):
        with pytest.raises((TypeError, ValueError), match="reset_mask.* must"):
            envs.reset(options={"reset_mask": mask})


def test_what_was_returned_is_not_written_again_unless_views_were_asked_for() -> None:
    for copies, then in ((True, 1.0), (False, 2.0)):
        envs, counts = native(Scripted, copy=copies), np.zeros(3)

        def count(answer: Any, counts: Any = counts) -> Any:
            counts += 1
            return *answer[:4], {"count": counts, "inner": {"count": counts}}

        envs.env.script = count
        envs.reset()
        kept, *_, infos = envs.step([5, 5, 5])
        envs.step([5, 5, 5])
        assert kept[2] == then
        assert infos["count"].tolist() == infos["inner"]["count"].tolist() == [then] * 3


def test_begun_operations_are_finished_in_order_and_nothing_works_after_close() -> None:
    envs = native(Counters)
    with pytest.raises(EnvError, match=r"it was not reset yet: reset\(\) all environments before `step`"):
        envs.step([5, 5, 5])
    with pytest.raises(NoAsyncCallError, match="step_wait"):
        envs.step_wait()
    envs.reset()
    actions = np.array([5, 6, 7], dtype=np.int32)
    envs.step_async(actions)
    actions[:] = 5  # the caller's own
    with pytest.raises(AlreadyPendingCallError):
        envs.reset()
    assert envs.step_wait()[1].tolist() == [0.0, 1.0, 2.0]
    envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.reset()
    with native(Counters) as envs:
        envs.reset()
        envs.step_async([5, 5, 5])
    with pytest.raises(ClosedEnvironmentError):
        envs.step_wait()


# ------------------------------------------------------------------ faults


def test_what_fails_inside_is_told_with_batch_operation_and_cause_and_a_reset_begins_again() -> None:
    envs = native(Scripted)
    envs.reset()
    envs.env.script = raising(ZeroDivisionError("inside"))
    with pytest.raises(
        EnvError, match=r"Scripted, 3 environments\) failed in step: ZeroDivisionError: inside"
    ) as caught:
        envs.step([5, 5, 5])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for error in (KeyboardInterrupt, SystemExit):
        envs.env.script = raising(error)
        with pytest.raises(
            EnvError, match=r"the last step failed .*: reset\(\) all environments before `step`"
        ):
            envs.step([5, 5, 5])
        envs.reset()
        with pytest.raises(error):
            envs.step([5, 5, 5])
    envs.env.script = lambda answer: answer
    envs.reset()
    assert envs.step([5, 5, 6])[1].tolist() == [0, 0, 1]
    assert envs.stats()["failures"] == [1, 1, 1]


# ------------------------------------------------------------------ batches of other packages


def rollout(envs: Any, seed: Any, n_actions: int, steps: int = 40) -> np.ndarray[Any, Any]:
    """Observations `[steps + 1, n_envs, …]` when all take the same actions."""
    actions = np.random.default_rng(0)
    seen = [envs.reset(seed=seed)[0]]
    for _ in range(steps):
        seen.append(envs.step(np.full(envs.num_envs, actions.integers(n_actions)))[0])
    return np.stack(seen)


def check_seeds(make: Callable[[], Any], n_actions: int) -> None:
    """Seeds decide, each environment by its own; groups start and stay alike."""
    first = rollout(make(), 5, n_actions)
    envs = make()
    rollout(envs, 9, n_actions)
    assert np.array_equal(rollout(envs, 5, n_actions), first)
    assert np.array_equal(rollout(make(), [5, 6, 7, 8], n_actions), first)
    grouped = rollout(make(), groups(2, 2, 2), n_actions)
    assert np.array_equal(grouped[:, 0], grouped[:, 1])
    assert np.array_equal(grouped[:, 2], grouped[:, 3])
    assert not np.array_equal(grouped[:, 0], grouped[:, 2])


@pytest.mark.parametrize("mode", ["same_step", pytest.param("next_step", marks=pytest.mark.slow)])
def test_ales_batch_keeps_seeds_masks_and_both_ways_to_begin_again(mode: str) -> None:
    pytest.importorskip("ale_py")

    def make(**more: Any) -> Any:
        return native("ale_py:ALE/Pong-v5", 4, autoreset=mode, env_kwargs={"num_threads": 2, **more})

    check_seeds(make, 6)
    envs = make()
    envs.reset(seed=1)
    before = [envs.step([2, 3, 2, 3])[0] for _ in range(30)][-1]
    after, _ = envs.reset(seed=[0, 7, 0, 0], options={"reset_mask": np.array([False, True, False, False])})
    assert [np.array_equal(after[i], before[i]) for i in range(4)] == [True, False, True, True]
    with pytest.raises(ValueError, match="expected actions"):
        envs.step([0, 0, 0, 99])  # inside, this would end the process
    with pytest.raises(ConfigError, match="cannot be made.*Disabled"):
        native("ale_py:ALE/Pong-v5", 4, autoreset="disabled")
    with pytest.raises(EnvError, match="failed in reset: .*expected observations of 4"):
        make(batch_size=2).reset()
    short = make(max_num_frames_per_episode=120)
    short.reset(seed=0)
    ends = [step for step in (short.step([0] * 4) for _ in range(40)) if step[3].any()]
    assert ends
    assert all(("_final_obs" in infos) == (mode == "same_step") for *_, infos in ends)
    for obs, _, _, truncated, infos in ends if mode == "same_step" else ():
        assert infos["_final_obs"].tolist() == truncated.tolist()
        i = int(np.flatnonzero(truncated)[0])
        assert not np.array_equal(infos["final_obs"][i], obs[i])


def test_gymnax_environments_end_by_time_as_gymnax_says() -> None:
    pytest.importorskip("jax")
    gymnax = pytest.importorskip("gymnax")
    envs = native("gymnax:CartPole-v1", 4, autoreset="same_step")
    check_seeds(lambda: native("gymnax:CartPole-v1", 4, autoreset="same_step"), 2)
    env, params = gymnax.make("CartPole-v1")
    if hasattr(env, "is_truncated"):
        brief = native(
            env, 4, autoreset="same_step", env_kwargs={"params": params.replace(max_steps_in_episode=3)}
        )
        brief.reset(seed=0)
        cuts = [brief.step([0, 1, 0, 1])[3].tolist() for _ in range(6)]
        assert cuts == ([[False] * 4] * 2 + [[True] * 4]) * 2
    envs.reset(seed=0)
    obs, *_ = envs.step([0, 1, 0, 1])
    obs[:] = 0  # the caller's own


class Pictured(Counters):
    """Its actions are a Dict, and it renders."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.single_action_space = spaces.Dict({"go": spaces.Discrete(3), "far": spaces.Box(0, 1, (2,))})
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.given: Any = None

    def step(self, actions: Any) -> Any:
        self.given = actions
        none = np.zeros(self.num_envs, bool)
        return self.obs, np.zeros(self.num_envs), none, none, {}

    def render(self) -> Any:
        return "a picture"


def test_actions_of_several_parts_reach_the_batch_as_they_are_or_are_refused() -> None:
    envs = native(Pictured)
    envs.reset()
    actions = {"go": np.array([0, 1, 2]), "far": np.zeros((3, 2), np.float32)}
    envs.step_async(actions)
    actions["go"][:] = actions["far"][:] = 1
    envs.step_wait()
    assert envs.env.given["go"].tolist() == [0, 1, 2]
    assert not envs.env.given["far"].any()
    with pytest.raises(ValueError, match="expected 3 actions of Dict"):
        envs.step({"go": np.array([0, 1, 3]), "far": np.zeros((3, 2), np.float32)})
    assert envs.render() == "a picture"


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.MultiBinary(2), [[0, 1], [1, 0], [1, 1]], [[0, 1], [1, 2], [0, 0]]),
        (spaces.MultiDiscrete([2, 3]), [[1, 2], [0, 0], [1, 1]], [[1, 2], [0, 3], [0, 0]]),
        (spaces.Discrete(3), [0, 1, 2], [0, -1, 2]),
        (spaces.Discrete(3, start=5), [5, 6, 7], [5, 4, 7]),
        (spaces.Discrete(3, start=5), [5, 6, 7], [5, 8, 7]),
    ],
    ids=str,
)
def test_an_index_out_of_range_never_reaches_the_batch(space: Any, good: Any, bad: Any) -> None:
    class Indexed(Pictured):
        def __init__(self, num_envs: int) -> None:
            super().__init__(num_envs)
            self.single_action_space = space
            self.action_space = batch_space(space, num_envs)

    envs = native(Indexed)
    envs.reset()
    envs.step(np.array(good))
    assert envs.env.given.tolist() == good
    with pytest.raises(ValueError, match=r"got others from environments \[1\]"):
        envs.step(np.array(bad))


class Nested(Counters):
    """Its observations have parts, one of them again in parts."""

    def __init__(self, num_envs: int, autoreset_mode: AutoresetMode) -> None:
        super().__init__(num_envs, autoreset_mode=autoreset_mode)
        one = self.single_observation_space
        self.single_observation_space = spaces.Dict(a=one, b=spaces.Tuple((one, one)))  # type: ignore[assignment]

    def parts(self, obs: Any) -> Any:
        return {"a": obs, "b": (obs + 10, obs + 20)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        obs, infos = super().reset(seed=seed, options=options)
        return self.parts(obs), infos

    def step(self, actions: Any) -> Any:
        obs, rewards, over, cut, infos = super().step(actions)
        if over.any():
            infos = {**infos, "final_obs": self.parts(obs.copy())}  # of all, without a mask
            obs[over], self.over[over] = 0, False
        return self.parts(obs), rewards, over, cut, infos


def test_parts_of_observations_are_copied_and_kept_at_an_end() -> None:
    envs = native(Nested, 2, autoreset="same_step")
    envs.reset()
    assert set(envs.step([5, 5])[4]) == {"count"}
    kept = envs.step([5, 5])[0]
    obs, _, terminated, _, infos = envs.step([5, 5])  # env 0 ends in its third step, env 1 in its fourth
    assert terminated.tolist() == infos["_final_obs"].tolist() == [True, False]
    assert (kept["a"].tolist(), kept["b"][1].tolist()) == ([[2], [2]], [[22], [22]])
    assert (obs["a"].tolist(), obs["b"][0].tolist()) == ([[0], [3]], [[10], [13]])
    final = infos["final_obs"]
    assert (final[0]["a"].tolist(), final[0]["b"][0].tolist(), final[0]["b"][1].tolist()) == ([3], [13], [23])
    assert final[1] is None


def test_specs_and_names_of_modules_are_taken_like_ids() -> None:
    spec = gymnasium.spec("CartPole-v1")
    envs = [native("CartPole-v1", 2), native(spec, 2), native("gymnasium:CartPole-v1", 2)]
    first, *others = [one.reset(seed=3)[0].tolist() for one in envs]
    assert others == [first, first]
    assert envs[1].name == "the native batch of 'CartPole-v1' (CartPoleVectorEnv, 2 environments)"
    with pytest.raises(UnknownNameError, match=r"Did you mean 'gymnasium:CartPole-v1'\?"):
        native("gymnasium:CartPol-v1")
    with pytest.raises(ConfigError, match="there is no module 'no_such_module' here"):
        native("no_such_module:Env")
    with pytest.raises(
        ConfigError, match="vector_entry_point, got 'gymnasium.envs.classic_control:CartPoleEnv'"
    ):
        native("gymnasium.envs.classic_control:CartPoleEnv")
    with pytest.raises(ConfigError, match="env_kwargs must be a mapping"):
        native("CartPole-v1", env_kwargs=[1])
    function = f"{__name__}:make_many"
    assert native(function, 2).reset(seed=3)[0].tolist() == first


def make_many(num_envs: int) -> Any:
    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


def test_what_is_no_number_of_environments_or_no_operation_is_refused() -> None:
    assert native(Counters, None).num_envs == 1  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no use for wrappers=.*gymnasium.wrappers.vector"):
        native(Counters, wrappers=[gymnasium.Wrapper])
    with pytest.raises(EnvError, match="it was not reset yet"):
        native(lambda num_envs: Counters(num_envs, reset_mask=True)).reset(
            options={"reset_mask": np.array([True, False, False])}
        )
    stats = native(Counters).stats()
    assert np.isnan(stats["step_seconds"])
    assert (stats["restarts"], stats["workers"]) == ([0, 0, 0], [])


def test_seeds_of_all_kinds_of_whole_numbers_reach_the_batch_as_integers() -> None:
    envs = native(lambda num_envs: Counters(num_envs, seed_per_env=True))
    for seed, given in ((np.int64(7), 7), (np.array([4, 5, 6]), [4, 5, 6]), (None, None)):
        reached = envs.reset(seed=seed)[1]["seed"]
        assert (reached, type(reached)) == (given, type(given))
    for wrong in ([1, 2], [1, 2, 3, 4], [1, 2, 0.5], 0.5, "abc"):
        with pytest.raises(
            (TypeError, ValueError), match="a seed must be a whole number|the length must match"
        ):
            envs.reset(seed=wrong)


@pytest.mark.parametrize(
    ("place", "part", "said"),
    [
        (0, None, "got None"),
        (0, np.zeros((2, 1)), "expected observations of 3"),
        (0, np.zeros((3, 5)), r"expected observations of 3, each of shape \(1,\)"),
        (0, 0.0, "expected observations of 3"),
        (0, {"a": np.zeros((3, 1))}, r"expected observations of 3, .* got \{"),
        (0, np.full((3, 1), "a"), "must have dtype float32"),
        (1, np.zeros(2), r"expected 3 rewards.* got \(2,\) of float64"),
        (1, ["1", "2", "3"], "expected 3 rewards.* of <U1"),
        (1, [None, 1.0, 2.0], "expected 3 rewards.* of object"),
        (0, [[1.0], [2.0], [np.nan]], r"EnvError: got NaN from environments \[2\]"),
        (1, [0.0, np.nan, 0.0], r"EnvError: got NaN from environments \[1\]"),
        (1, [-np.inf, 0.0, 0.0], r"got an infinite reward from environments \[0\]"),
        (2, ["False"] * 3, "expected 3 terminated, got .*<U5"),
        (3, [np.nan] * 3, r"expected 3 truncated, got .*float64$"),
        (4, [], "the info must be a dict, got list"),
        (4, None, "the info must be a dict, got None"),
    ],
)
def test_an_answer_of_the_wrong_kind_is_a_failure_of_the_batch(place: int, part: Any, said: str) -> None:
    envs, trusting = native(Scripted), native(Scripted, check_nan=False)
    for one in (envs, trusting):
        one.reset(seed=0)
        one.env.script = lambda answer: (*answer[:place], part, *answer[place + 1 :])
    with pytest.raises(EnvError, match=f"failed in step: (?s:.*){said}"):
        envs.step(np.full(3, 5))
    if said.startswith(("EnvError: got NaN", "got an infinite")):
        assert np.array_equal(trusting.step(np.full(3, 5))[place], part, equal_nan=True)


@pytest.mark.parametrize(
    ("space", "told", "said"),
    [
        (spaces.Box(-9, 9, (1,), np.float32), np.full((3, 1), 2.0), None),
        (spaces.Box(0, 9, (1,), np.uint8), np.full((3, 1), 2.0), "must have dtype uint8, got float64"),
        (spaces.Box(0, 9, (1,), np.int32), np.full((3, 1), 2), None),
        (spaces.Box(0, 9, (1,), np.int32), np.full((3, 1), 2**40), "numbers that int32 has no room for"),
        (spaces.Discrete(3), np.full(3, 2, np.int32), None),
        (spaces.Discrete(3), np.full(3, 1.5), "must have dtype int64, got float64"),
    ],
)
def test_observations_of_another_dtype_are_made_that_of_the_space_where_nothing_is_lost(
    space: Any, told: Any, said: str | None
) -> None:
    class Other(Scripted):
        def __init__(self, num_envs: int) -> None:
            super().__init__(num_envs)
            self.single_observation_space = space

        def reset(self, **how: Any) -> Any:
            return np.zeros((3, *space.shape), space.dtype), {}

    envs = native(Other)
    envs.reset(seed=0)
    envs.env.script = lambda answer: (told, *answer[1:])
    if said is None:
        seen = envs.step(np.full(3, 5))[0]
        assert (seen.dtype, seen.tolist()) == (space.dtype, told.tolist())
    else:
        with pytest.raises(EnvError, match=f"failed in step: EnvError: observation .*{said}"):
            envs.step(np.full(3, 5))
    envs.close()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (lambda b: (b[0], b[1][:1]), "ValueError: "),
        (lambda b: (b[0], None), "ValueError: "),
        (lambda b: b[:1], "ValueError: "),
        (lambda b: (b[0], b[1] * [[1], [np.nan], [1]]), r"EnvError: got NaN from environments \[1\]"),
    ],
)
def test_a_part_of_parts_without_a_good_row_of_each_environment_is_a_failure_of_the_batch(
    parts: Any, said: str
) -> None:
    class Ragged(Nested):
        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            return {**obs, "b": parts(obs["b"])}, *rest

    envs = native(lambda num_envs: Ragged(num_envs, AutoresetMode.NEXT_STEP))
    envs.reset()
    with pytest.raises(EnvError, match=f"failed in step: {said}"):
        envs.step([5, 5, 5])
    envs.close()


@pytest.mark.parametrize("last", [None, np.zeros((2, 1))])
def test_an_end_without_its_last_observation_is_a_failure_of_the_batch(last: Any) -> None:
    envs = native(
        lambda num_envs: Scripted(num_envs, autoreset_mode=AutoresetMode.SAME_STEP), autoreset="same_step"
    )
    envs.reset(seed=0)
    envs.env.script = lambda answer: (*answer[:2], np.ones(3, bool), answer[3], {"final_obs": last})
    with pytest.raises(EnvError, match="failed in step"):
        envs.step(np.full(3, 5))


def test_of_two_calls_at_once_the_second_is_refused() -> None:
    envs = native(Scripted)
    envs.reset(seed=0)
    inside, go_on = threading.Event(), threading.Event()

    def waits(answer: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return answer

    envs.env.script = waits
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(envs.step, np.full(3, 5))
        assert inside.wait(60)
        for call in (lambda: envs.step(np.full(3, 5)), envs.reset, envs.close):
            with pytest.raises(AlreadyPendingCallError, match="another call is at work"):
                call()
        go_on.set()
        assert first.result(60)[1].shape == (3,)
    envs.close()
    assert envs.env.closed
