"""Policies that remember: an update beside a slow oracle, sequences cut where episodes begin, the same bytes."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.train.ppo.ppo_envs import DictEnv, RecallEnv, state

from shoal.core.errors import ConfigError
from shoal.train.ppo.arrays.spaces import ActionRows, ObservationRows
from shoal.train.ppo.arrays.steps import StepRollout
from shoal.train.ppo.compiled.network import UpdateBatch, UpdateRates
from shoal.train.ppo.config import PPOConfig
from shoal.train.ppo.learner import RecurrentLearner
from shoal.train.ppo.networks import RecurrentActorCritic
from shoal.train.ppo.policy import load_policy
from shoal.train.ppo.ppo import PPO
from shoal.train.ppo.trainer import PPOTrainer

KINDS = ["lstm", "gru"]
SMALL: dict[str, Any] = {"n_envs": 3, "n_steps": 11, "batch_size": 22, "n_epochs": 2, "hidden": (6,),
                         "memory_units": 5, "backend": "serial"}  # fmt: skip
T, N, D = 7, 4, 3


def learner_of(kind: str, seed: int = 0) -> RecurrentLearner:
    """In float64, with weights of a size that makes every part count."""
    rows, actions = ObservationRows(spaces.Box(-1, 1, (D,))), ActionRows(spaces.MultiDiscrete([2, 3]))
    network = RecurrentActorCritic(rows, actions, PPOConfig(hidden=(6,), recurrent=kind, memory_units=5))
    chance = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=chance) * 0.5
    return RecurrentLearner(network.double(), actions)


def batch_of(learner: RecurrentLearner, seed: int = 0) -> UpdateBatch:
    """Masked choices; episodes begin in the middle, twice running, and at the last step; some rows do not count."""
    rng = np.random.default_rng(seed)
    begins, valid = np.zeros((T, N), bool), rng.random((T, N)) > 0.2
    begins[3, 0] = begins[4, 0] = begins[2, 1] = begins[T - 1, 2] = True
    masks = (rng.random((T * N, 5)) > 0.3).astype(np.uint8)
    actions = np.stack([rng.integers(0, 2, T * N), rng.integers(0, 3, T * N)], axis=1)
    masks[np.arange(T * N), actions[:, 0]] = masks[np.arange(T * N), 2 + actions[:, 1]] = 1
    return UpdateBatch(
        obs=rng.standard_normal((T * N, D)), actions=actions, logprobs=-rng.random(T * N) * 2,
        advantages=rng.standard_normal(T * N), returns=rng.standard_normal(T * N), values=rng.standard_normal(T * N),
        masks=masks, orders=np.array([[2, 0, 3, 1]]), begins=begins, valid=valid,
        memory=rng.standard_normal((N, learner.network.memory_size)),
    )  # fmt: skip


RATES = UpdateRates(1e-3, 0.2, 0.0, 0.01, 0.5, 0.5, 0.0, True, 1e-5, T * N)


def slow_step(w: dict[str, torch.Tensor], kind: str, x: torch.Tensor, memory: torch.Tensor) -> Any:
    """One row, by the equations of the papers: gates in torch's order (i, f, g, o) and (r, z, n)."""
    x = torch.tanh(w["encoder.0.weight"] @ x + w["encoder.0.bias"])
    into = w["core.weight_ih_l0"] @ x + w["core.bias_ih_l0"]
    hidden = memory[:5]
    back = w["core.weight_hh_l0"] @ hidden + w["core.bias_hh_l0"]
    if kind == "lstm":
        i, f, g, o = ((into + back)[5 * k : 5 * k + 5] for k in range(4))
        cell = torch.sigmoid(f) * memory[5:] + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        return hidden, torch.cat([hidden, cell])
    reset, update = torch.sigmoid(into[:5] + back[:5]), torch.sigmoid(into[5:10] + back[5:10])
    new = torch.tanh(into[10:] + reset * back[10:])
    hidden = (1 - update) * new + update * hidden
    return hidden, hidden


@pytest.mark.parametrize("kind", KINDS)
def test_one_update_is_that_of_a_loop_over_steps_written_from_the_definitions(kind):
    learner = learner_of(kind)
    batch = batch_of(learner)
    w = {name: p.detach().clone().requires_grad_() for name, p in learner.network.named_parameters()}
    chosen, entropies, values, rows = [], [], [], []
    for i in range(N):
        memory = torch.from_numpy(batch.memory[i])
        for t in range(T):
            if batch.begins[t, i]:
                memory = torch.zeros_like(memory)
            row = t * N + i
            told, memory = slow_step(w, kind, torch.from_numpy(batch.obs[row]), memory)
            logits = w["actor.weight"] @ told + w["actor.bias"]
            logprob = entropy = torch.zeros(())
            for part, action in ((slice(0, 2), batch.actions[row, 0]), (slice(2, 5), batch.actions[row, 1])):
                allowed = [j for j in range(5)[part] if batch.masks[row, j]]
                weight = {j: torch.exp(logits[j]) for j in allowed}
                share = {j: weight[j] / sum(weight.values()) for j in allowed}
                logprob = logprob + torch.log(share[part.start + int(action)])
                entropy = entropy - sum(p * torch.log(p) for p in share.values())
            if batch.valid[t, i]:
                chosen.append(logprob)
                entropies.append(entropy)
                values.append(w["critic.weight"][0] @ told + w["critic.bias"][0])
                rows.append(row)
    ratio = torch.exp(torch.stack(chosen) - torch.from_numpy(batch.logprobs[rows]))
    gain = batch.advantages[rows]
    gain = torch.from_numpy((gain - gain.mean()) / (gain.std(ddof=1) + 1e-8))
    surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    error = (torch.stack(values) - torch.from_numpy(batch.returns[rows])) ** 2
    (-surrogate.mean() + 0.5 * error.mean() - 0.01 * torch.stack(entropies).mean()).backward()
    norm = float(sum((p.grad**2).sum() for p in w.values())) ** 0.5
    factor = min(1.0, 0.5 / (norm + 1e-6))
    assert factor < 0.9  # so that clipping counts
    stats = learner.update(batch, RATES)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-6)
    assert stats.policy_loss == pytest.approx(-surrogate.mean().item(), rel=1e-6)
    assert stats.value_loss == pytest.approx(error.mean().item(), rel=1e-6)
    for name, parameter in learner.network.named_parameters():
        gradient = w[name].grad * factor
        moved = w[name].detach() - 1e-3 * gradient / (gradient.abs() + 1e-5)  # Adam's first step
        torch.testing.assert_close(parameter.detach(), moved, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["same_step", "next_step", "absent"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_remember_what_came_before_in_the_episode_and_nothing_else(kind, mode):
    """Against single steps; final observations come after what was remembered up to them."""
    learner, rng = learner_of(kind), np.random.default_rng(2)
    obs = rng.standard_normal((T + 1, N, D))
    terminated, truncated = np.zeros((T, N), bool), np.zeros((T, N), bool)
    truncated[2, 0] = truncated[T - 1, 1] = truncated[4, 2] = True
    terminated[4, 1] = terminated[1, 3] = True
    valid = None
    if mode == "next_step":
        valid = np.ones((T, N), bool)
        valid[1:][(terminated | truncated)[:-1]] = False
    elif mode == "absent":  # two steps long nobody is in env 0, whose episode was truncated before
        valid = np.ones((T, N), bool)
        valid[3:5, 0] = False
    places = list(zip(*np.nonzero(truncated), strict=True))
    final_obs = np.stack(
        [obs[t + 1, i] if mode == "next_step" else rng.standard_normal(D) for t, i in places]
    )
    empty = np.zeros((0, 0, 0))
    memory = rng.standard_normal((N, learner.network.memory_size))
    rollout = StepRollout(obs, empty, empty, empty, terminated, truncated, final_obs, empty, valid, memory)
    values, finals = learner.values_along(rollout, obs, final_obs)
    expected, ends = np.zeros((T + 1, N)), {}
    with torch.inference_mode():
        for i in range(N):
            state = torch.from_numpy(memory[None, i])
            for t in range(T + 1):
                out = valid is not None and t > 0 and not valid[t - 1, i]
                begins = t > 0 and ((terminated | truncated)[t - 1, i] or out)
                state = torch.zeros_like(state) if begins else state
                _, value, state = learner.network.step(torch.from_numpy(obs[None, t, i]), state)
                expected[t, i] = value.item()
                if t < T and truncated[t, i]:
                    last = torch.from_numpy(final_obs[places.index((t, i))][None])
                    ends[t, i] = learner.network.step(last, state)[1].item()
    np.testing.assert_allclose(values, expected, atol=1e-12)
    np.testing.assert_allclose(finals, [ends[place] for place in places], atol=1e-12)


# --- runs
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_minibatch_has_ratio_one_also_with_masks(kind):
    with PPO(RecallEnv, env_kwargs={"masked": True}, recurrent=kind, **SMALL) as ppo:
        for metrics in ppo.updates(33 * 6):
            assert abs(metrics["first_kl"]) < 1e-6
        assert ppo.path == "torch"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_2n_is_n_saved_and_resumed_n(tmp_path, kind):
    with PPO(RecallEnv, env_kwargs={"masked": True}, recurrent=kind, **SMALL) as ppo:
        ppo.learn(99).save(tmp_path)
        assert np.abs(ppo.agent.memory).sum() > 0
        whole = state(ppo.learn(198))
    with PPO.load(tmp_path, RecallEnv, backend="serial", env_kwargs={"masked": True}) as ppo:
        assert state(ppo.learn(198)) == whole


def test_weights_do_not_depend_on_workers_or_on_one_that_dies():
    ends = []
    for workers in (0, 1, 2):
        settings = {**SMALL, "backend": "process" if workers else "serial", "num_workers": workers}
        with PPO(RecallEnv, env_kwargs={"masked": True}, recurrent="gru", **settings) as ppo:
            ppo.learn(99)
            if workers == 2:
                os.kill(ppo._experience.collector.envs.stats()["workers"][0]["pid"], signal.SIGKILL)
                with pytest.warns(RuntimeWarning, match="a worker failed"):
                    ppo.learn(33)
            ends.append(state(ppo.learn(198 - ppo.log.n_steps)))
    assert ends[0] == ends[1] == ends[2]


class Drifting(RecallEnv):
    """Is no function of its seed and actions: it shows how many episodes were begun before."""

    begun = 0

    def reset(self, **given):
        type(self).begun += 1
        self.mark = 0.1 * type(self).begun
        return super().reset(**given)

    def _look(self):
        return np.array([self.mark, 0.0], np.float32)


def test_an_episode_that_cannot_be_played_again_is_not_remembered(tmp_path):
    settings = {**SMALL, "n_steps": 3}
    with PPO(Drifting, recurrent="gru", env_kwargs={"length": 1000}, **settings) as ppo:
        ppo.learn(9).save(tmp_path)
    with PPO.load(tmp_path, Drifting, backend="serial", env_kwargs={"length": 1000}) as ppo:
        assert ppo.agent.memory.any()
        assert not ppo._experience.collect(None).memory.any()


def test_evaluation_remembers_nothing_of_training_nor_training_of_it():
    with PPO(RecallEnv, recurrent="lstm", **SMALL) as ppo:
        ppo.learn(99)
        before = state(ppo)
        first = ppo.evaluate(5)
        assert state(ppo) == before
        assert ppo.evaluate(5) == first


def test_a_loaded_policy_remembers_until_it_is_reset(tmp_path):
    with PPO(RecallEnv, recurrent="lstm", **SMALL) as ppo:
        ppo.learn(198).save(tmp_path)
    policy = load_policy(tmp_path)
    one, other = (np.array([[cue, 0.0]], np.float32) for cue in (1.0, -1.0))
    first = policy.parameters(one)
    second = policy.parameters(one)
    assert not np.array_equal(second, first)
    policy.reset()
    np.testing.assert_array_equal(policy.parameters(one), first)
    policy.reset()
    policy.parameters(other)
    assert not np.array_equal(policy.parameters(one), second)
    with pytest.raises(ConfigError, match="no ONNX form"):
        policy.export_onnx(tmp_path / "policy.onnx")


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_trainer_learns_with_memory_from_vector_envs_of_every_autoreset_mode(mode):
    trainer = PPOTrainer(recurrent="gru", n_steps=16, batch_size=32, hidden=(6,), memory_units=5)
    envs = SyncVectorEnv([lambda: RecallEnv(2)] * 3, autoreset_mode=mode)
    for _ in range(3):
        assert abs(trainer.train_episode_vectorized(envs)["first_kl"]) < 1e-6
    trainer.train_episode(RecallEnv(2))
    seen = np.array([1.0, 0.0], np.float32)
    first = trainer.select_action(seen, start=True)
    assert trainer.select_action(seen).value != first.value
    assert trainer.select_action(seen, start=True) == first


def test_pictures_and_points_may_be_remembered_too():
    settings = {**SMALL, "recurrent": "gru"}
    with PPO(DictEnv, **settings) as ppo:
        before = {name: value.clone() for name, value in ppo.network.state_dict().items()}
        for metrics in ppo.updates(66):
            assert abs(metrics["first_kl"]) < 1e-6
        after = ppo.network.state_dict()
        assert [name for name in after if torch.equal(after[name], before[name])] == []
    with PPO("Pendulum-v1", preset="none", normalize_obs=True, normalize_reward=True, **settings) as ppo:
        assert all(abs(metrics["first_kl"]) < 1e-6 for metrics in ppo.updates(66))


def test_a_network_of_ones_own_and_kernels_do_not_go_with_recurrence():
    with pytest.raises(ConfigError, match="but one was given"):
        PPO("CartPole-v1", recurrent="gru", network=torch.nn.Linear(4, 2), **SMALL)
    with pytest.raises(ConfigError, match="perceptrons only, got RecurrentActorCritic"):
        PPO("CartPole-v1", recurrent="gru", path="compiled", **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recurrent", "least", "most"), [("none", 0.2, 0.7), ("gru", 0.97, 1.0), ("lstm", 0.97, 1.0)]
)
def test_a_task_of_memory_is_solved_by_who_remembers_and_by_no_other(recurrent, least, most):
    settings = {"n_envs": 16, "n_steps": 32, "batch_size": 128, "n_epochs": 4, "hidden": (32,),
                "learning_rate": 3e-3, "ent_coef": 0.01, "gamma": 0.98, "backend": "serial"}  # fmt: skip
    core = {} if recurrent == "none" else {"recurrent": recurrent, "memory_units": 32}
    with PPO(RecallEnv, seed=1, env_kwargs={"length": 6, "forgives": False}, **core, **settings) as ppo:
        ppo.learn(120_000)
        assert least <= ppo.evaluate(100).mean <= most
