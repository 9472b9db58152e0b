"""JAX environments as one vector env, against a plain loop over the same functions; NumPy where JAX is missing."""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces

from shoal.core.errors import EnvError, MissingExtraError
from shoal.vector import JaxVectorEnv, make_vec

try:
    import jax
except ImportError:
    from tests.vector import jax_of_numpy as jax


@pytest.fixture(autouse=True)
def _jax_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", jax)


def native(env: Any, n: int = 3, **kwargs: Any) -> Any:
    return make_vec(env, n, backend="native", autoreset="same_step", env_kwargs=kwargs)


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


def test_masked_resets_leave_the_others_alone() -> None:
    for env in (Walk, Walk()):
        envs, calm = native(env), native(env)
        first, _ = envs.reset(seed=4)
        calm.reset(seed=4)
        before, want = envs.step([2, 2, 2])[0], calm.step([2, 2, 2])[0]
        assert np.array_equal(before, want)
        after, _ = envs.reset(seed=4, options={"reset_mask": np.array([False, True, False])})
        assert np.array_equal(after, np.array([before[0], first[1], before[2]]))
        one, other = envs.step([0, 2, 1]), calm.step([0, 1, 1])
        assert np.array_equal(one[0][[0, 2]], other[0][[0, 2]])  # undisturbed
        assert np.array_equal(one[0][1], before[1])  # again its own first step


def test_resets_without_a_seed_begin_other_episodes_that_follow_from_the_seed_of_all() -> None:
    def starts(**kwargs: Any) -> list[list[float]]:
        envs = native(Walk, 2, **kwargs)
        return [envs.reset()[0][:, 0].tolist() for _ in range(3)]

    seen = starts(seed=5)
    assert len({x for row in seen for x in row}) == 6
    assert starts(seed=5) == seen
    assert starts() == starts(seed=0) != seen


def test_steps_are_those_of_the_functions_themselves() -> None:
    class Plain:
        """Named as in older versions of gymnax; its episodes are cut after three steps."""

        default_params = 0.5
        observation_space, action_space, see = Walk.observation_space, Walk.action_space, Walk.see
        reset, step = Walk.reset_env, Walk.step_env

        def is_truncated(self, state: Any, params: Any) -> Any:
            return state.t >= 3

    envs = native(Plain, 2, params=2.0)
    obs, infos = envs.reset(seed=1)
    assert infos == {}
    x = obs[:, 0]
    for t in range(1, 7):
        obs, rewards, terminated, truncated, infos = envs.step([2, 0])
        over = t % 3 == 0
        assert (terminated.tolist(), truncated.tolist()) == ([False] * 2, [over] * 2)
        assert rewards.dtype == np.float64
        assert infos["discount"].tolist() == [1.0, 1.0]
        last = np.array(infos["final_obs"].tolist(), np.float32) if over else obs
        assert last.tolist() == [[np.float32(rewards[i]), (t - 1) % 3 + 1] for i in range(2)]
        moved = last[:, 0] - x - [2.0, -2.0]  # params times action - 1, and noise
        assert (np.abs(moved) < 5).all()
        assert moved[0] != moved[1]
        assert obs[:, 1].tolist() == [0.0 if over else t % 3] * 2
        x = obs[:, 0]


def test_what_terminates_at_its_time_limit_is_both_told_apart() -> None:
    class Falls(Walk):
        def step_env(self, key: Any, state: Any, action: Any, params: Any) -> Any:
            obs, after, x, _, info = super().step_env(key, state, action, params)
            return obs, after, x, (after.t >= 4) | (action == 0), info

    envs = native(Falls, 2, truncation=lambda state, params: state.t >= 4)
    envs.reset(seed=0)
    ends = [envs.step([0, 1])[2:4] for _ in range(4)]
    assert [end[0].tolist() for end in ends] == [[True, False]] * 4
    assert [end[1].tolist() for end in ends] == [[False, False]] * 3 + [[False, True]]


def test_gymnaxs_environments_are_made_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.SimpleNamespace(make=lambda env_id, **settings: (Walk(), len(env_id) * settings["far"]))
    monkeypatch.setitem(sys.modules, "gymnax", made)
    for name in ("gymnax:Walk-v0", "jax:Walk-v0"):
        assert native(name, 2, far=3).env.params == 21
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(MissingExtraError, match='gymnax envs need a package: run pip install "gymnax"'):
        native("gymnax:Walk-v0", 2)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingExtraError, match="JaxVectorEnv"):
        native(Walk)


def test_a_batch_of_jax_says_what_it_needs_before_it_can_step() -> None:
    envs = JaxVectorEnv(Walk(), 2)
    with pytest.raises(EnvError, match="a step before the first reset"):
        envs.step(np.zeros(2, int))
    with pytest.raises(EnvError, match="a reset_mask before the first reset"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(TypeError, match="options must be a dict"):
        envs.reset(options=["reset_mask"])  # type: ignore[arg-type]
    for n_envs, error in ((2.0, TypeError), (0, ValueError)):
        with pytest.raises(error, match="num_envs must be "):
            JaxVectorEnv(Walk(), n_envs)  # type: ignore[arg-type]


def test_spaces_of_gymnax_are_gymnasiums() -> None:
    discrete, box = (
        types.SimpleNamespace(n=3),
        types.SimpleNamespace(low=-1, high=[1, 2], shape=(2,), dtype="f4"),
    )
    nested = types.SimpleNamespace(spaces={"a": discrete, "b": types.SimpleNamespace(spaces=[box, discrete])})
    expected = spaces.Box(np.float32(-1), np.array([1, 2], np.float32), (2,), np.float32)

    class Spaced(Walk):
        def observation_space(self, params: Any) -> Any:
            return params

        def action_space(self, params: Any) -> Any:
            return expected

    envs = JaxVectorEnv(Spaced(), 2, params=nested)
    parts = {"a": spaces.Discrete(3), "b": spaces.Tuple((expected, spaces.Discrete(3)))}
    assert envs.single_observation_space == spaces.Dict(parts)
    assert envs.single_action_space is expected
    with pytest.raises(TypeError, match="expected a space of gymnax or Gymnasium, got SimpleNamespace"):
        JaxVectorEnv(Spaced(), 2, params=types.SimpleNamespace())
