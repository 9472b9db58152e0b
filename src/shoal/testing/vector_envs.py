"""What every vector env promises: the results of a plain loop over its environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from shoal.testing.promises import expect


def check_vector_env(
    make: Callable[[Any], Any],
    env_fn: Callable[[], Any],
    *,
    num_envs: int = 3,
    steps: int = 30,
    seed: int = 0,
) -> None:
    """Compare a vector env with a plain loop over its environments, action by action.

    Args:
        make: from a list of functions that make environments to a vector env of them
            (`lambda fns: make_vec(fns, backend="process")`).
        env_fn: makes one environment; it must depend on its seed alone.
        num_envs: how many to put together.
        steps: vector steps to compare.
        seed: environment i is reset with `seed + i`.

    Raises:
        AssertionError: which promise broke, at which step and in which environment.
    """
    single = [env_fn() for _ in range(num_envs)]
    vec = make([env_fn] * num_envs)
    try:
        expect(vec.num_envs == num_envs, f"num_envs must be {num_envs}, got {vec.num_envs}")
        mode = vec.metadata.get("autoreset_mode")
        expect(
            isinstance(mode, AutoresetMode),
            f"metadata['autoreset_mode'] must be an AutoresetMode, got {mode}",
        )
        vec.action_space.seed(seed)
        for attempt in range(2):
            obs, _ = vec.reset(seed=seed)
            expected = [env.reset(seed=seed + i)[0] for i, env in enumerate(single)]
            for i, row in enumerate(iterate(vec.observation_space, obs)):
                expect(
                    _alike(row, expected[i]),
                    f"reset {attempt}: env {i} must be reset with seed {seed + i}: got {row!r}, a single env "
                    f"gives {expected[i]!r}",
                )
            _compare_steps(vec, single, mode, steps)
    finally:
        vec.close()
        for env in single:
            env.close()
    vec.close()  # a second time must do nothing


def _compare_steps(vec: Any, single: list[Any], mode: AutoresetMode, steps: int) -> None:
    over = [False] * len(single)
    for t in range(steps):
        batch = vec.action_space.sample()
        actions = list(iterate(vec.action_space, batch))
        obs, rewards, terminated, truncated, infos = vec.step(batch)
        for i, (env, row) in enumerate(zip(single, iterate(vec.observation_space, obs), strict=True)):
            where = f"step {t}, env {i}"
            if over[i] and mode is AutoresetMode.NEXT_STEP:
                want: tuple[Any, ...] = (env.reset()[0], 0.0, False, False)
            else:
                want = env.step(actions[i])[:4]
            over[i] = bool(want[2] or want[3])
            got = (float(rewards[i]), bool(terminated[i]), bool(truncated[i]))
            expect(
                got == (float(want[1]), bool(want[2]), bool(want[3])),
                f"{where}: reward, terminated, truncated are {got}, a single env gives {want[1:]}",
            )
            shown = want[0]
            if over[i] and mode is AutoresetMode.SAME_STEP:
                expect(
                    bool(infos.get("_final_obs", [False] * len(single))[i])
                    and _alike(infos["final_obs"][i], want[0]),
                    f"{where}: infos['final_obs'] must hold the last observation of the episode",
                )
                shown = env.reset()[0]
            expect(_alike(row, shown), f"{where}: observation is {row!r}, a single env gives {shown!r}")
        if mode is AutoresetMode.DISABLED and any(over):
            return


def _alike(a: Any, b: Any) -> bool:
    if isinstance(b, dict):
        return isinstance(a, dict) and a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in b)
    if isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(np.array_equal(a, b))
