"""Craftax behind `JaxVectorEnv`, against Craftax's own auto-resetting environment under its own `vmap`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.seeding import derive_seed

pytest.importorskip("craftax", reason="craftax is not installed")
jax = pytest.importorskip("jax")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # compiling takes most of it

N_ENVS, STEPS, LIMIT = 6, 40, 12


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["Craftax-Classic-Symbolic-v1", "Craftax-Symbolic-v1"])
def test_craftax_steps_bit_for_bit_as_under_its_own_vmap_with_its_own_auto_reset(name: str) -> None:
    from craftax.craftax_env import make_craftax_env_from_name

    from shoal.vector import JaxVectorEnv

    theirs = make_craftax_env_from_name(name, auto_reset=True)
    params = theirs.default_params.replace(max_timesteps=LIMIT)
    envs = JaxVectorEnv(
        make_craftax_env_from_name(name, auto_reset=False),
        N_ENVS,
        params=params,
        truncation=lambda state, params: state.timestep >= params.max_timesteps,
    )

    words = [derive_seed(3 + i, "jax-key") & 0xFFFFFFFF for i in range(N_ENVS)]
    keys = jax.vmap(jax.random.PRNGKey)(np.array(words, dtype=np.uint32))
    fold = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(0, None)))
    step = jax.jit(jax.vmap(theirs.step, in_axes=(0, 0, 0, None)))
    obs, state = jax.jit(jax.vmap(theirs.reset, in_axes=(0, None)))(keys, params)

    shown, _ = envs.reset(seed=3)
    assert same(shown, obs)
    rng = np.random.default_rng(0)
    ends = 0
    for t in range(1, STEPS + 1):
        actions = rng.integers(envs.single_action_space.n, size=N_ENVS)
        before = shown
        obs, state, reward, done, info = step(fold(keys, t), state, actions, params)
        shown, rewards, terminated, truncated, infos = envs.step(actions)
        assert same(shown, obs)
        assert same(rewards, np.asarray(reward, dtype=np.float64))
        assert same(terminated | truncated, done)
        for key, value in info.items():
            assert same(infos[key], value), key
        for i in np.flatnonzero(done).tolist():
            ends += 1
            final = infos["final_obs"][i]
            assert final.shape == shown[i].shape
            assert not np.array_equal(final, shown[i])  # the end of the old episode, not the new one's begin
            assert not np.array_equal(final, before[i])
    assert ends >= N_ENVS * (STEPS // LIMIT)
    assert same(jax.tree.leaves(envs._state), jax.tree.leaves(state))
    assert envs.single_observation_space.shape == theirs.observation_space(params).shape


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, dtype and shape included."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(
        np.asarray(a).dtype == np.asarray(b).dtype
        and np.asarray(a).shape == np.asarray(b).shape
        and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in pairs
    )
