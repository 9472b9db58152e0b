"""The other faces of a pool: containers, ParallelEnv, SB3, checks for users."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import batch_space

from shoal.core.errors import EnvError, UnknownNameError
from shoal.core.seeding import derive_seed
from shoal.testing import check_vector_env
from shoal.vector import (
    AsyncVectorEnv,
    MultiProcessEnvironmentContainer,
    ParallelEnv,
    groups,
)
from tests.vector.faulty import CountEnv, Faulty
from tests.vector.same_step import make_vec
from tests.vector.scripted import SlowEnv, WordEnv


def test_a_container_steps_groups_that_start_alike() -> None:
    with MultiProcessEnvironmentContainer(WordEnv, env_num=2, group_n=3, seed=42) as container:
        seen = []
        for iteration in range(2):
            obs, infos = container.reset()
            seeds = [derive_seed(42, "env", iteration, group) for group in (0, 1)]
            assert obs == [f"start {seeds[i // 3]}" for i in range(6)]
            assert infos == [{"success": False}] * 6
            seen.append(obs)
        assert seen[0] != seen[1]
        obs, rewards, dones, infos = container.step(["a", None, "b" * 5000, 7, "", "é"])
        assert obs[:2] == ["'a' ☃", f"start {seeds[0]}"]
        assert obs[3:] == ["7 ☃", "'' ☃", "'é' ☃"]
        assert rewards == [0.5, 0.0, 0.5, 0.5, 0.5, 0.5]
        assert dones == [False] * 6
        assert container.get_available_actions() == [["go 1"], ["go 0"], *[["go 1"]] * 4]
        assert container.render() == ["<1>", "<0>", *["<1>"] * 4]
        container.step(["x"] * 6)
        assert container.step(["x"] * 6)[2] == [True, False, True, True, True, True]
        with pytest.raises(EnvError, match=r"\[0\]"):
            container.step(["x", *[None] * 5])
        with pytest.raises(ValueError, match="expected 6 actions"):
            container.step(["x"])


def test_a_container_replaces_a_worker_and_reports_all_its_envs_done_also_who_was_left_alone() -> None:
    fns = functools.partial(Faulty, "kill")
    with MultiProcessEnvironmentContainer(fns, 4, 1, num_workers=2) as container:
        container.reset()
        _, rewards, dones, infos = container.step([9, None, 1, 1])
        assert (rewards, dones) == ([0.0, 0.0, 11.0, 11.0], [True, True, False, False])
        assert [info["worker_env"] for info in infos[:2]] == [0, 0]
        assert infos[0]["worker_restarted"]
        assert "SIGKILL" in infos[0]["worker_error"]
        container.reset()
        assert container.step([None, 1, 1, 1])[1:3] == ([0.0, 11.0, 11.0, 11.0], [False] * 4)
    assert container.envs.closed


@pytest.mark.parametrize("actions", ["12", {0: "1 + 2", 1: "2 + 1"}])
def test_a_container_does_not_share_a_text_out_by_letters(actions: Any) -> None:
    with MultiProcessEnvironmentContainer("countdown", 1, 2, backend="serial") as container:
        container.reset()
        with pytest.raises(TypeError, match="expected one action for each of 2 environments, got the single"):
            container.step(actions)
        assert container.step(["1", None])[2] == [True, False]  # nothing was stepped


def test_a_first_reset_that_fails_is_done_again_with_the_same_seeds() -> None:
    class Slow(CountEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if len(seen) < 2:
                seen.append(seed)
                raise RuntimeError("not yet")
            return super().reset(seed=seed, options=options)

    seen: list[int | None] = []
    with ParallelEnv([Slow, Slow], seed=5, backend="serial") as envs:
        with pytest.raises(RuntimeError):
            envs.reset()
        assert envs.reset()[0][:, 0].tolist() == [5, 6]
    seen.clear()
    with MultiProcessEnvironmentContainer(
        Slow, 2, seed=42, backend="serial", on_failure="raise"
    ) as container:
        with pytest.raises(RuntimeError):
            container.reset()
        assert [obs[0] for obs in container.reset()[0]] == [seed % 1000 for seed in groups(42, 2, 1)]


def test_parallel_env_takes_lambdas_and_resets_itself() -> None:
    with ParallelEnv([lambda: CountEnv(2), lambda: CountEnv(3)], start_method="spawn", seed=5) as envs:
        obs, _ = envs.reset()
        assert obs[:, 0].tolist() == [5, 6]
        envs.step([1, 1])
        obs, _, terminated, _, infos = envs.step([1, 1])
        assert terminated.tolist() == [True, False]
        assert infos["final_obs"][0].tolist() == [5, 1, 2, 1]
        assert obs[:, 1].tolist() == [2, 1]  # the first is in its second episode
        assert len(envs) == envs.n_envs == 2
    assert envs.envs.closed


def test_a_container_of_no_environments_is_refused() -> None:
    for env_num, group_n in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"at least 1, got {env_num} and {group_n}"):
            MultiProcessEnvironmentContainer(WordEnv, env_num, group_n)
    with pytest.raises(ValueError, match=f"at least 1, got {env_num} and {group_n}"):
        groups(0, env_num, group_n)


def test_nobody_goes_on_in_a_container_after_a_reset_that_failed() -> None:
    class FailsOnce(CountEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if self.index == 1 and self.episode == 1:
                self.episode = 2
                raise ZeroDivisionError
            return super().reset(seed=seed)

    fns = iter([functools.partial(FailsOnce, 5, i) for i in range(2)])
    with MultiProcessEnvironmentContainer(
        lambda: next(fns)(), 2, backend="serial", on_failure="raise"
    ) as container:
        container.reset()
        container.step([1, 1])
        with pytest.raises(ZeroDivisionError):
            container.reset()
        with pytest.raises(EnvError, match=r"episodes of environments \[0, 1\] are over"):
            container.step([1, 1])  # env 0 has begun anew already
        container.reset()
        assert container.step([1, 1])[1] == [11.0, 11.0]


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_our_backends_pass_the_check_for_vector_envs(backend: Any, mode: str) -> None:
    check_vector_env(lambda fns: make_vec(fns, backend=backend, autoreset=mode), CountEnv)


def test_gymnasiums_serial_vector_env_passes_the_check_and_broken_ones_do_not() -> None:
    check_vector_env(SyncVectorEnv, CountEnv)

    class LateByOne(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            result = super().step(actions)
            stale, self.stale = getattr(self, "stale", result), result
            return stale

    class WorkerSeeds(SyncVectorEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return super().reset(seed=[seed] * self.num_envs)

    with pytest.raises(AssertionError, match="step 1, env 0"):
        check_vector_env(LateByOne, CountEnv)
    with pytest.raises(AssertionError, match="env 1 must be reset with seed 1"):
        check_vector_env(WorkerSeeds, CountEnv)


def test_async_vector_env_takes_gymnasiums_arguments() -> None:
    envs = AsyncVectorEnv(
        [CountEnv] * 2, shared_memory=False, context="spawn", daemon=False, max_concurrency=1
    )
    assert envs.reset(seed=3)[0][:, 0].tolist() == [3, 4]
    assert len(envs.stats()["workers"]) == 1
    envs.step_async([1, 1])
    with pytest.raises(
        AlreadyPendingCallError, match="`reset_async` while waiting for a pending call to `step`"
    ):
        envs.reset_async()
    with pytest.warns(UserWarning, match="pending call to `step`"):
        envs.close()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"worker": print}, "worker"),
        ({"context": "frok"}, "no start method named 'frok'. Did you mean 'fork'"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1, got 0"),
        ({"max_concurrency": 1.5}, "max_concurrency must be a whole number, got 1.5"),
        ({"step_timeouts": 1}, "step_timeouts"),
    ]
    for given, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            AsyncVectorEnv([CountEnv], **given)


class Within(CountEnv):
    """Its observations lie within `bounds`, its actions below `n`."""

    def __init__(self, low: float, high: float, size: int = 4, n: int = 10) -> None:
        super().__init__()
        self.observation_space = spaces.Box(low, high, (size,), np.float64)
        self.action_space = spaces.Discrete(n)


WIDE = spaces.Box(-9, 9, (4,), np.float64)
ALIKE, WIDER = functools.partial(Within, 0, 9), functools.partial(Within, 0, 99)


@pytest.mark.parametrize(
    ("fns", "mode"),
    [
        ([ALIKE, ALIKE], "same"),
        ([ALIKE, WIDER], "same"),
        ([ALIKE, WIDER], "different"),
        ([ALIKE, functools.partial(Within, 0, 9, 5)], "different"),
        ([ALIKE, WIDER], (batch_space(WIDE, 2), WIDE)),
        ([ALIKE, functools.partial(Within, 0, 9, 5)], (batch_space(WIDE, 2), WIDE)),
        ([ALIKE, WIDER], ("wide", WIDE)),
        ([ALIKE, WIDER], (WIDE, WIDE, WIDE)),
        ([ALIKE, WIDER], "alike"),
        ([ALIKE, functools.partial(Within, 0, 9, 4, 3)], "same"),
    ],
)
def test_observation_modes_are_gymnasiums(fns: Any, mode: Any) -> None:
    try:
        theirs = SyncVectorEnv(fns, observation_mode=mode)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        kind = RuntimeError if isinstance(error, AssertionError) else type(error)
        with pytest.raises(kind):
            AsyncVectorEnv(fns, observation_mode=mode, num_workers=1)
        return
    with contextlib.closing(AsyncVectorEnv(fns, observation_mode=mode, num_workers=1)) as ours:
        assert ours.observation_space == theirs.observation_space
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.single_action_space == theirs.single_action_space
        assert (ours.context, ours.observation_mode, ours.max_concurrency) == (None, mode, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_stable_baselines_trains_on_our_vec_env() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from shoal.vector import SB3VecEnv

    envs = SB3VecEnv([lambda: gymnasium.make("CartPole-v1")] * 4)
    model = sb3.PPO("MlpPolicy", envs, n_steps=64, seed=0, device="cpu")
    model.set_logger(sb3.common.logger.Logger(None, []))  # which leaves no folder behind
    model.learn(512)
    assert model.num_timesteps == 512
    envs.close()


class Parts(CountEnv):
    """Observations in parts; episodes are cut after two steps."""

    observation_space = spaces.Dict(  # type: ignore[assignment]
        {"seed": spaces.Box(-1, 999, (1,)), "t": spaces.Discrete(9)}
    )

    def observe(self, action: Any) -> Any:
        return {"seed": np.array([self.seed_], np.float32), "t": self.t}

    def step(self, action: Any) -> Any:
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, self.t >= 2, info


class Acting(CountEnv):
    """Tells the parts of its actions."""

    action_space: Any = spaces.Dict(go=spaces.Discrete(5), far=spaces.Tuple((spaces.Box(0, 1, (2,)),)))

    def step(self, action: Any) -> Any:
        return *super().step(0)[:4], {"go": int(action["go"]), "far": action["far"][0].tolist()}


def lists(obs: dict[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() for key, value in obs.items()}


class Around(gymnasium.Wrapper[Any, Any, Any, Any]):
    pass


@pytest.mark.filterwarnings("ignore")
def test_sb3_sees_what_its_own_vec_env_shows(monkeypatch: Any) -> None:
    own = pytest.importorskip("stable_baselines3.common.vec_env")
    from shoal.vector import SB3VecEnv

    fns = [functools.partial(Parts, 1000, 0, "ansi"), lambda: Around(Parts(1000, 0, "ansi"))]
    ours, theirs = SB3VecEnv(fns, backend="thread"), own.DummyVecEnv(fns)
    assert (ours.metadata["autoreset_mode"], ours.render_mode) == (
        gymnasium.vector.AutoresetMode.SAME_STEP,
        "ansi",
    )
    for envs in (ours, theirs):
        envs.seed(7)
    for _ in range(2):
        expected, seen = theirs.reset(), ours.reset()
        assert lists(seen) == lists(expected)
        assert ours.reset_infos == theirs.reset_infos
        for _ in range(3):
            actions = np.array([1, 2])
            ours.step_async(actions)
            assert ours.waiting
            obs, rewards, dones, infos = ours.step_wait()
            assert not ours.waiting
            wanted, *same = theirs.step(actions)
            assert lists(obs) == lists(wanted)
            assert (rewards.tolist(), dones.tolist(), infos) == (same[0].tolist(), same[1].tolist(), same[2])
    assert ours.env_is_wrapped(Around) == theirs.env_is_wrapped(Around) == [False, True]
    assert ours.env_is_wrapped(Around, [-1]) == [True]
    assert ours.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [False, False]
    assert (ours.has_attr("length"), ours.has_attr("width")) == (True, False)
    ours.set_attr("length", 5, [1])
    assert ours.get_attr("length") == [1000, 5]
    assert ours.env_method("observe", 3, indices=[0])[0]["t"] == 1
    theirs.set_attr("length", 5, [1])
    twice = [1, 0, -1, 1]  # an env that is named twice is asked twice
    assert ours.get_attr("length", twice) == theirs.get_attr("length", twice) == [5, 1000, 5, 5]
    assert ours.env_is_wrapped(Around, twice) == theirs.env_is_wrapped(Around, twice)
    came = [
        [result[0]["t"] for result in envs.env_method("step", 1, indices=twice)] for envs in (ours, theirs)
    ]
    assert came[0] == came[1]
    for envs in (ours, theirs):
        envs.set_attr("length", 6, [0, 0])
        assert envs.get_attr("length") == [6, 5]
        for wrong in (2, [0, 7], -3):
            with pytest.raises(IndexError):
                envs.get_attr("length", wrong)
    assert ours.get_images() == [None, None]
    ours.close()
    assert ours.pool.closed
    ours.close()
    theirs.close()

    from stable_baselines3.common.vec_env import patch_gym

    from shoal.vector.faces.sb3_workers import patched

    monkeypatch.setattr(patch_gym, "_patch_env", lambda env: ("patched", env))
    assert patched(lambda: "an old env") == ("patched", "an old env")


@pytest.mark.filterwarnings("ignore")
def test_sb3_passes_options_pictures_and_actions_of_parts_on() -> None:
    own = pytest.importorskip("stable_baselines3.common.vec_env")
    from shoal.vector import SB3VecEnv

    class Seen(CountEnv):
        def render(self) -> Any:
            return np.full((2, 2, 3), self.t)

    fns = [functools.partial(Seen, 2, 0, "rgb_array")] * 2
    ours, theirs = SB3VecEnv(fns, backend="serial"), own.DummyVecEnv(fns)
    for envs in (ours, theirs):
        envs.seed(3)
        envs.set_options([{"level": 1}, {}])
    for _ in range(2):  # seeds and options hold for one reset
        assert ours.reset().tolist() == theirs.reset().tolist()
        assert ours.reset_infos == theirs.reset_infos
    ours.step_async([1, 2])
    theirs.step_async(np.array([1, 2]))
    (obs, rewards, dones, infos), wanted = ours.step_wait(), theirs.step_wait()
    assert (obs.tolist(), rewards.tolist(), dones.tolist()) == tuple(part.tolist() for part in wanted[:3])
    assert infos == wanted[3]
    assert rewards.dtype == wanted[1].dtype == np.float32
    pictures = ours.get_images(), theirs.get_images()
    assert all(np.array_equal(a, b) for a, b in zip(*pictures, strict=True))
    assert pictures[0][0].shape == (2, 2, 3)
    acting = [Acting] * 2
    ours, theirs = SB3VecEnv(acting, backend="serial"), own.DummyVecEnv(acting)
    assert ours.reset().tolist() == theirs.reset().tolist()
    actions = [ours.action_space.sample() for _ in acting]
    assert ours.step(actions)[3] == theirs.step(actions)[3]
    with pytest.raises(ValueError, match="expected 2 actions"):
        ours.step(actions[:1])
    with pytest.raises(ValueError, match="frok"):
        SB3VecEnv(fns, "frok")
    failed = SB3VecEnv([functools.partial(Faulty, "raise"), CountEnv], backend="serial")
    failed.reset()
    with pytest.raises(ZeroDivisionError):
        failed.step(np.array([9, 1]))
    failed.set_options({"level": 2})  # one for all: a whole reset, which alone may follow
    assert failed.reset()[:, 2].tolist() == [0, 0]
    assert [info["options"] for info in failed.reset_infos] == ["{'level': 2}"] * 2
    strange = SB3VecEnv([functools.partial(Faulty, "nan reward")], backend="serial", check_nan=True)
    strange.reset()
    strange.step_async(np.array([9]))
    with pytest.raises(EnvError, match="reward is NaN"):
        strange.step_wait()
    lax = SB3VecEnv([functools.partial(Faulty, "nan reward")], backend="serial")
    lax.reset()
    assert np.isnan(lax.step(np.array([9]))[1]).all()


@pytest.mark.filterwarnings("ignore")
def test_a_question_for_a_wrapper_of_sb3_has_no_worker_import_it() -> None:
    monitor = pytest.importorskip("stable_baselines3.common.monitor").Monitor
    from shoal.vector import SB3VecEnv

    envs = SB3VecEnv([CountEnv, lambda: Around(CountEnv())])
    assert envs.env_is_wrapped(monitor) == [False, False]
    assert envs.env_is_wrapped(Around) == [False, True]
    assert envs.pool.apply(lambda env: "torch" in sys.modules) == [False, False]
    envs.close()


def test_names_are_found_or_explained() -> None:
    envs = make_vec("CartPole-v1", 2, backend="process", env_kwargs={"max_episode_steps": 7})
    assert envs.call("spec")[1].max_episode_steps == 7
    envs.close()
    with pytest.raises(UnknownNameError, match="Did you mean 'CartPole-v1'"):
        make_vec("CartPol-v1", 2)
    envs = make_vec("frozen_lake", 2, backend="process", env_kwargs={"is_slippery": False})
    assert isinstance(envs.reset(seed=1)[0][0], str)
    envs.close()


def test_scripts_need_no_main_guard_and_no_extra_and_show_what_their_envs_log() -> None:
    program = """
import logging, sys
logging.basicConfig(level=logging.INFO)
sys.modules["stable_baselines3"] = None
import gymnasium
from shoal.vector import *
class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(3)
    action_space = gymnasium.spaces.Discrete(3)
    def reset(self, seed=None, options=None):
        logging.getLogger("my.env").info("hello from an env")
        return 1, {}
    def step(self, action): return 2, 1.0, False, False, {}
gymnasium.register("Mine-v0", entry_point=Mine)
envs = make_vec("Mine-v0", 2, backend="process", start_method="spawn")
print(envs.reset()[0].tolist())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": "src"},
    )
    assert done.stdout.strip() == "[1, 1]", done.stderr
    assert "hello from an env" in done.stderr


def test_stats_tell_pid_memory_and_restarts_of_each_worker() -> None:
    envs = make_vec(
        functools.partial(Faulty, "exit"), 2, backend="process", num_workers=2, on_failure="restart"
    )
    envs.reset(seed=0)
    envs.step([1, 9])
    stats = envs.stats()
    assert stats["failures"] == [0, 1]
    assert [row["restarts"] for row in stats["workers"]] == [0, 1]
    assert all(5 < row["rss_mib"] < 5000 for row in stats["workers"])
    envs.close()


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_stats_tell_how_long_a_step_takes_those_that_failed_left_out(backend: Any) -> None:
    fns = [functools.partial(Faulty, "raise"), functools.partial(SlowEnv, 0.03)]
    with make_vec(fns, backend=backend) as envs:
        envs.reset(seed=0)
        with pytest.raises(ZeroDivisionError):
            envs.step([9, 1])
        envs.reset()
        assert np.isnan(envs.stats()["step_seconds"])
        for _ in range(5):
            envs.step(np.zeros(2, np.int64))
        stats = envs.stats()
    assert stats["steps"] == 5
    assert 0.03 <= stats["step_seconds"] < 60
