"""A PPO in the single-file style: torch modules and Categorical, a Python loop over steps, no tricks.

Written for the benchmark from what such scripts do: sampling through `torch.distributions`, GAE as a Python
loop over torch rows, NumPy index shuffling, a `.item()` per minibatch, default Adam.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from torch import nn
from torch.distributions import Categorical


def linear(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Network(nn.Module):
    """Two separate perceptrons of 64 tanh units."""

    def __init__(self, inputs: int, n_actions: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            linear(inputs, 64), nn.Tanh(), linear(64, 64), nn.Tanh(), linear(64, 1, 1.0)
        )
        self.actor = nn.Sequential(
            linear(inputs, 64), nn.Tanh(), linear(64, 64), nn.Tanh(), linear(64, n_actions, 0.01)
        )

    def judge(self, obs: torch.Tensor, action: torch.Tensor | None = None) -> Any:
        """(action, logprob, entropy, value)."""
        spread = Categorical(logits=self.actor(obs))
        action = spread.sample() if action is None else action
        return action, spread.log_prob(action), spread.entropy(), self.critic(obs).flatten()


def train(
    env_id: str,
    n_envs: int,
    total: int,
    settings: dict[str, Any],
    seed: int,
    stop: Callable[[int, deque], bool],
) -> int:
    """Train until `stop(steps, last 100 returns)` or `total` steps; returns the steps taken."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    envs = SyncVectorEnv(
        [lambda: RecordEpisodeStatistics(gym.make(env_id)) for _ in range(n_envs)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    network = Network(int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(network.parameters(), lr=settings["learning_rate"], eps=1e-5)
    n_steps, gamma, lam = settings["n_steps"], settings["gamma"], settings["gae_lambda"]
    size = n_steps * n_envs
    obs = torch.zeros((n_steps, n_envs, *envs.single_observation_space.shape))
    actions, logprobs, rewards, dones, values = (torch.zeros((n_steps, n_envs)) for _ in range(5))
    returns: deque = deque(maxlen=100)
    steps = 0
    next_obs = torch.Tensor(envs.reset(seed=seed)[0])
    next_done = torch.zeros(n_envs)
    while steps < total:
        left = 1.0 - steps / total if settings["linear"] else 1.0
        optimizer.param_groups[0]["lr"] = left * settings["learning_rate"]
        clip = settings["clip_range"] * left
        for t in range(n_steps):
            steps += n_envs
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                action, logprobs[t], _, values[t] = network.judge(next_obs)
            actions[t] = action
            observation, reward, terminated, truncated, infos = envs.step(action.numpy())
            rewards[t] = torch.tensor(reward)
            next_obs = torch.Tensor(observation)
            next_done = torch.Tensor(np.logical_or(terminated, truncated))
            if "final_info" in infos:
                ended = infos["_final_info"]
                returns.extend(infos["final_info"]["episode"]["r"][ended].tolist())
                if stop(steps, returns):
                    envs.close()
                    return steps
        with torch.no_grad():
            following = network.critic(next_obs).flatten()
            advantages = torch.zeros_like(rewards)
            last = torch.zeros(n_envs)
            for t in reversed(range(n_steps)):
                alive = 1.0 - (next_done if t == n_steps - 1 else dones[t + 1])
                ahead = following if t == n_steps - 1 else values[t + 1]
                delta = rewards[t] + gamma * ahead * alive - values[t]
                advantages[t] = last = delta + gamma * lam * alive * last
            targets = advantages + values
        flat_obs = obs.reshape(size, -1)
        flat = [x.reshape(-1) for x in (actions, logprobs, advantages, targets, values)]
        order, clipped = np.arange(size), []
        for _ in range(settings["n_epochs"]):
            np.random.shuffle(order)
            for start in range(0, size, settings["batch_size"]):
                rows = order[start : start + settings["batch_size"]]
                action, old_logprob, advantage, target, old_value = (x[rows] for x in flat)
                _, logprob, entropy, value = network.judge(flat_obs[rows], action.long())
                ratio = (logprob - old_logprob).exp()
                with torch.no_grad():
                    clipped.append(((ratio - 1.0).abs() > clip).float().mean().item())
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy = torch.max(
                    -advantage * ratio, -advantage * torch.clamp(ratio, 1 - clip, 1 + clip)
                ).mean()
                error = (value - target) ** 2
                if settings["clip_range_vf"]:
                    bound = settings["clip_range_vf"]
                    held = old_value + torch.clamp(value - old_value, -bound, bound)
                    error = torch.max(error, (held - target) ** 2)
                loss = policy - settings["ent_coef"] * entropy.mean() + 0.5 * error.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 0.5)
                optimizer.step()
        if stop(steps, returns):
            break
    envs.close()
    return steps
