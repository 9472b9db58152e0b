"""The compiled kernels against torch autograd, NumPy and each other."""

from __future__ import annotations

import runpy
import threading

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.executors import OwnThread
from shoal.maths.updates import gae
from shoal.train.ppo.arrays.spaces import ActionRows
from shoal.train.ppo.compiled import network
from shoal.train.ppo.compiled.network import NO_MASKS, UpdateBatch, UpdateRates, when_compiling
from shoal.train.ppo.config import PPOConfig
from shoal.train.ppo.learner import CompiledLearner, TorchLearner
from shoal.train.ppo.networks import MLPActorCritic
from shoal.train.ppo.ppo import PPO

SPACES = {
    "discrete": spaces.Discrete(2),
    "many": spaces.Discrete(19),
    "multi": spaces.MultiDiscrete([3, 2, 5]),
    "binary": spaces.MultiBinary(4),
    "box": spaces.Box(-1, 1, (3,), np.float32),
}


def learners(
    space: spaces.Space, inputs: int, hidden: tuple[int, ...], activation: str = "tanh", seed: int = 0
):
    """A compiled and a torch learner with equal, not too small weights."""
    actions = ActionRows(space)
    config = PPOConfig(hidden=hidden, activation=activation)
    network = MLPActorCritic(inputs, actions, config, seed=seed)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += torch.from_numpy(rng.standard_normal(parameter.shape).astype(np.float32) * 0.1)
    twin = MLPActorCritic(inputs, actions, config)
    twin.load_state_dict(network.state_dict())
    return CompiledLearner(network), TorchLearner(twin, actions), actions


def sample(actions: ActionRows, n: int, inputs: int, rng: np.random.Generator, masked: bool = False):
    obs = rng.standard_normal((n, inputs)).astype(np.float32)
    if actions.is_discrete:
        noise = rng.random((n, actions.size), dtype=np.float32)
    else:
        noise = rng.standard_normal((n, actions.size), dtype=np.float32)
    masks = NO_MASKS
    if masked:
        masks = (rng.random((n, actions.n_parameters)) < 0.6).astype(np.uint8)
        starts = np.cumsum([0, *actions.groups[:-1]])
        masks[:, starts] = 1
    return obs, noise, masks


def play(learner, actions, obs, noise, masks, deterministic=False):
    chosen = np.zeros((len(obs), actions.size), actions.dtype)
    logprobs = np.zeros(len(obs), np.float32)
    learner.act(obs, masks, noise, chosen, logprobs, deterministic)
    return chosen, logprobs


def batch_of(learner, actions, n, inputs, rng, epochs=1, masked=False, off=0.0):
    """Samples of a rollout, in an order for each epoch; `off` is how far its log-probabilities are off."""
    obs, noise, masks = sample(actions, n, inputs, rng, masked and actions.is_discrete)
    chosen, logprobs = play(learner, actions, obs, noise, masks)
    old, advantages, returns, moved = rng.standard_normal((4, n)).astype(np.float32)
    values = learner.values(obs)
    return UpdateBatch(
        obs, chosen, logprobs + old * np.float32(off), advantages, returns=values + returns,
        values=values + moved * np.float32(0.3), masks=masks,
        orders=np.stack([rng.permutation(n) for _ in range(epochs)]),
    )  # fmt: skip


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("hidden", [(64, 64), (24,), (33, 17, 40)])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_compiled_actions_logprobs_and_values_are_those_of_torch(kind, hidden, activation):
    fast, slow, actions = learners(SPACES[kind], 5, hidden, activation)
    rng = np.random.default_rng(1)
    for masked in (False, True) if actions.is_discrete else (False,):
        obs, noise, masks = sample(actions, 67, 5, rng, masked)
        for deterministic in (False, True):
            ours, theirs = (play(x, actions, obs, noise, masks, deterministic) for x in (fast, slow))
            if actions.is_discrete:
                assert (
                    ours[0] == theirs[0]
                ).mean() > 0.99  # noise within 1e-6 of an edge may fall either way
                same = (ours[0] == theirs[0]).all(axis=1)
                np.testing.assert_allclose(ours[1][same], theirs[1][same], atol=3e-6)
            else:
                np.testing.assert_allclose(ours[0], theirs[0], atol=3e-6)
                np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)
        np.testing.assert_allclose(fast.values(obs), slow.values(obs), atol=3e-6)


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize(
    ("rows", "batch_size", "value_clip", "ent_coef", "max_norm", "masked"),
    [(256, 256, 0.2, 0.01, 0.5, False), (96, 37, 0.0, 0.0, 0.0, True), (64, 64, 0.5, 0.05, 1e9, True)],
)
def test_compiled_update_is_autograd_clipping_and_adam(
    kind, rows, batch_size, value_clip, ent_coef, max_norm, masked
):
    fast, slow, actions = learners(SPACES[kind], 5, (40, 20))  # padded to multiples of 16
    batch = batch_of(
        slow, actions, rows, 5, np.random.default_rng(2), epochs=2, masked=masked, off=0.2
    )  # some clip
    rates = UpdateRates(1e-3, 0.2, value_clip, ent_coef, 0.5, max_norm, 0.0, True, 1e-5, batch_size)
    ours, theirs = fast.update(batch, rates), slow.update(batch, rates)
    assert ours.n_minibatches == theirs.n_minibatches == 2 * -(-rows // batch_size)
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
    (w_ours, m_ours), (w_theirs, m_theirs) = fast.state(), slow.state()
    assert w_ours.keys() == w_theirs.keys()
    assert m_ours.keys() == m_theirs.keys()
    for name, value in w_ours.items():
        np.testing.assert_allclose(value, w_theirs[name], atol=5e-5, err_msg=name)
    for name, value in m_ours.items():
        scale = np.abs(m_theirs[name]).max() + 1e-12
        np.testing.assert_allclose(value / scale, m_theirs[name] / scale, atol=2e-4, err_msg=name)


def test_one_compiled_gradient_equals_autograd_to_float32_precision():
    """One step from zero moments: exp_avg is 0.1 times the gradient."""
    for kind in ("discrete", "box"):
        fast, slow, actions = learners(SPACES[kind], 8, (64, 64))
        batch = batch_of(slow, actions, 37, 8, np.random.default_rng(3))
        rates = UpdateRates(1e-3, 0.2, 0.2, 0.01, 0.5, 0.5, 0.0, True, 1e-5, 64)
        fast.update(batch, rates)
        slow.update(batch, rates)
        ours, theirs = fast.state()[1], slow.state()[1]
        for name in ours:
            if name.startswith("exp_avg."):
                scale = np.abs(theirs[name]).max()
                assert np.abs(ours[name] - theirs[name]).max() <= 5e-6 * scale + 1e-9, name


@given(st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=20)
def test_a_rows_result_never_depends_on_the_rows_beside_it(n, seed):
    fast, _, actions = learners(SPACES["many"], 6, (64, 32))
    obs, noise, masks = sample(actions, n, 6, np.random.default_rng(seed))
    together = play(fast, actions, obs, noise, masks)
    values = fast.values(obs)
    for i in range(n):
        alone = play(fast, actions, obs[i : i + 1], noise[i : i + 1], masks)
        assert alone[0].tobytes() == together[0][i : i + 1].tobytes()
        assert alone[1].tobytes() == together[1][i : i + 1].tobytes()
        assert fast.values(obs[i : i + 1]).tobytes() == values[i : i + 1].tobytes()


def test_drawn_choices_follow_their_probabilities():
    fast, _, actions = learners(SPACES["many"], 4, (16,))
    n = 40_000
    obs = np.repeat(np.ones((1, 4), np.float32), n, axis=0)
    noise = np.random.default_rng(0).random((n, 1), dtype=np.float32)
    chosen, logprobs = play(fast, actions, obs, noise, NO_MASKS)
    counts = np.bincount(chosen[:, 0], minlength=19) / n
    for action in range(19):
        expected = np.exp(logprobs[chosen[:, 0] == action][0])
        assert abs(counts[action] - expected) < 5 * np.sqrt(expected / n)  # five standard errors


@pytest.mark.parametrize("path", ["compiled", "torch"])
@pytest.mark.parametrize("u", [0.0, 1.0 - 2**-24])
def test_the_edges_of_the_noise_never_choose_a_forbidden_action(path, u):
    fast, slow, actions = learners(SPACES["multi"], 4, (16,))
    learner = fast if path == "compiled" else slow
    rng = np.random.default_rng(0)
    obs, noise, masks = sample(actions, 200, 4, rng, masked=True)
    noise[:] = u
    chosen, _ = play(learner, actions, obs, noise, masks)
    start = 0
    for g, size in enumerate(actions.groups):
        assert np.take_along_axis(masks[:, start : start + size], chosen[:, g : g + 1], axis=1).all()
        start += size


@given(st.integers(1, 12), st.integers(1, 5), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**31))
@settings(max_examples=30)
def test_compiled_gae_is_the_numpy_one(n_steps, n_envs, gamma, lam, seed):
    fast, _, _ = learners(SPACES["discrete"], 2, (16,))
    rng = np.random.default_rng(seed)
    rewards, values, ahead = (rng.standard_normal((n_steps, n_envs)).astype(np.float32) for _ in range(3))
    terminated = rng.random((n_steps, n_envs)) < 0.2
    done = terminated | (rng.random((n_steps, n_envs)) < 0.2)
    ours = fast.gae(rewards, values, ahead, terminated, done, gamma, lam)
    theirs = gae(rewards, values, ahead, terminated, done, gamma=gamma, gae_lambda=lam)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_compiled_tanh_is_tanh():
    fast, _, _ = learners(SPACES["discrete"], 1, (16,))
    weights, moments = fast.state()
    for name in weights:
        weights[name][...] = 0
    weights["critic.0.weight"][0, 0] = 1
    weights["critic.2.weight"][0, 0] = 1
    fast.load_state(weights, moments)
    x = np.linspace(-12, 12, 20_001, dtype=np.float32)[:, None]
    exact = np.tanh(x.astype(np.float64))[:, 0]
    assert np.abs(fast.values(x) - exact).max() < 3e-7
    assert np.isnan(fast.values(np.full((1, 1), np.nan, np.float32))).all()


def test_target_kl_stops_both_paths_at_the_same_minibatch():
    fast, slow, actions = learners(SPACES["discrete"], 4, (32,))
    batch = batch_of(slow, actions, 256, 4, np.random.default_rng(5), epochs=20)
    rates = UpdateRates(3e-3, 0.2, 0.0, 0.0, 0.5, 0.5, 0.01, True, 1e-5, 64)
    ours, theirs = fast.update(batch, rates), slow.update(batch, rates)
    assert 1 < ours.n_minibatches < 80
    assert ours.n_minibatches == theirs.n_minibatches


def test_who_waits_for_numba_is_told_once_and_only_while_something_is_compiled(tmp_path):
    kernels = tmp_path / "kernels.py"
    kernels.write_text(
        "import numba\n"
        "@numba.njit(cache=True)\ndef one(x): return x + 1\n"
        "@numba.njit(cache=True)\ndef other(x): return one(x) + 2\n"
        "answers = one(1), other(1), other(2)\n"
    )
    told = []
    for times in (1, 1):  # the second time from the cache
        with when_compiling(lambda: told.append("compiling")):
            assert runpy.run_path(str(kernels))["answers"] == (2, 4, 5)
        assert len(told) == times
    kernels.write_text(kernels.read_text().replace("+ 2", "+ 20"))  # what is cached is of an older version
    with when_compiling(lambda: told.append("compiling")):
        assert runpy.run_path(str(kernels))["answers"] == (2, 22, 23)
    assert len(told) == 2


@pytest.mark.parametrize(("kind", "target_kl"), [("multi", 0.0), ("box", 0.0), ("discrete", 0.006)])
def test_an_update_in_two_threads_has_the_same_bytes(monkeypatch, kind, target_kl):
    helpers = []
    monkeypatch.setattr(network, "OwnThread", lambda name: helpers.append(name) or OwnThread(name))
    monkeypatch.setattr(network, "LEAST_WORK", 0)
    found = []
    for assisted in (False, True):
        fast, _, actions = learners(SPACES[kind], 5, (64, 48))
        fast.assisted = assisted
        batch = batch_of(fast, actions, 500, 5, np.random.default_rng(6), epochs=4)
        rates = UpdateRates(3e-3, 0.2, 0.2, 0.01, 0.5, 0.5, target_kl, True, 1e-5, 64)
        told = [fast.update(batch, rates) for _ in range(3)]
        assert (told[0].n_minibatches < 32) == (target_kl > 0)
        found.append((told, fast.weights.tobytes(), fast.second.tobytes()))
    assert found[0] == found[1]
    assert len(helpers) == 3
    left = [thread for thread in threading.enumerate() if thread.name == helpers[0]]
    for thread in left:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("free", [1, 2])
def test_two_workers_leave_their_cores_to_the_update_where_another_one_is_free(monkeypatch, free):
    monkeypatch.setattr("shoal.train.ppo.collect.free_cpus", lambda: free)
    with PPO("CartPole-v1", n_envs=4, n_steps=16, backend="process", num_workers=2, seed=0) as ppo:
        ppo.learn(64)
        assert ppo.agent.learner.assisted == (free > 1)
