"""JAX environments as one vector env, against a plain loop over the same functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")


class Discrete:
    n = 3


class Box:
    low, high, shape, dtype = -10.0, 10.0, (2,), np.float32


class Walk:
    """A random walk in gymnax's interface, over after four steps."""

    default_params = 0.5

    def observation_space(self, params: Any) -> Any:
        return Box()

    def action_space(self, params: Any) -> Any:
        return Discrete()

    def reset_env(self, key: Any, params: Any) -> Any:
        state = State(jax.random.normal(key), jax.numpy.int32(0))
        return self.see(state), state

    def see(self, state: Any) -> Any:
        return jax.numpy.stack([state.x, state.t.astype(jax.numpy.float32)])

    def step_env(self, key: Any, state: Any, action: Any, params: Any) -> Any:
        x = state.x + params * (action - 1) + jax.random.normal(key)
        after = State(x, state.t + 1)
        return self.see(after), after, x, after.t >= 4, {"discount": 1.0 - (after.t >= 4)}


class State(NamedTuple):
    x: Any
    t: Any


def test_batched_steps_equal_single_ones_whatever_the_number() -> None:
    from shoal.vector import JaxVectorEnv

    large, small = JaxVectorEnv(Walk(), 5), JaxVectorEnv(Walk(), 2)
    first, _ = large.reset(seed=3)
    again, _ = small.reset(seed=3)
    assert np.array_equal(first[:2], again)
    assert not np.array_equal(first[0], first[1])
    for t in range(10):
        actions = np.array([t % 3] * 5)
        obs, rewards, terminated, truncated, infos = large.step(actions)
        part = small.step(actions[:2])
        assert np.array_equal(obs[:2], part[0])
        assert np.array_equal(rewards[:2], part[1])
        assert not truncated.any()
        over = t % 4 == 3
        assert terminated.tolist() == [over] * 5
        if over:
            assert obs[:, 1].tolist() == [0.0] * 5  # a new episode …
            assert [row[1] for row in infos["final_obs"]] == [4.0] * 5  # … and the last of the old one
            assert np.allclose([row[0] for row in infos["final_obs"]], rewards)
    assert large.single_action_space.n == 3
    assert large.observation_space.shape == (5, 2)


def test_time_limits_are_truncations_when_told() -> None:
    from shoal.vector import JaxVectorEnv

    envs = JaxVectorEnv(Walk(), 2, truncation=lambda state, params: state.t >= 4)
    envs.reset(seed=0)
    flags = [envs.step(np.array([1, 1]))[2:4] for _ in range(4)]
    assert flags[-1][0].tolist() == [False, False]
    assert flags[-1][1].tolist() == [True, True]
