"""How well a policy does: episodes of a single environment of its own, with seeds of their own."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from shoal.core.data import check_flags, reward_of
from shoal.core.errors import EnvError
from shoal.core.seeding import stream
from shoal.train.ppo.agent import PPOAgent
from shoal.train.ppo.arrays.spaces import AS_FLOAT32
from shoal.train.ppo.arrays.steps import SeededEpisodes, mask_of
from shoal.train.ppo.config import check_whole


class Evaluation(NamedTuple):
    """How a policy did."""

    returns: list[float]
    lengths: list[int]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Population deviation of the returns."""
        return float(np.std(self.returns))


LONGEST_EVALUATION = 100_000
"""Steps of one episode; an error beyond, since an environment without end would never return."""


def evaluate(
    player: PPOAgent, env: SeededEpisodes, *, episodes: int, deterministic: bool, frames: list[Any] | None
) -> Evaluation:  # fmt: skip
    """Play episodes 0, 1, … of `env`'s stream and report their returns.

    Args:
        player: the policy, for one env.
        env: a single environment that nothing else uses.
        episodes: how many.
        deterministic: the likeliest action instead of a drawn one.
        frames: filled with what `env.render()` shows, for a video.
    """
    check_whole("episodes", episodes, 1)
    rows, actions = player.obs_rows, player.action_rows
    obs = np.zeros((1, rows.size), rows.dtype)
    shape = (1, actions.size)
    chosen, logprob = np.zeros(shape, actions.dtype), np.zeros(1, np.float32)
    returns, lengths = [], []
    for episode in range(episodes):
        env.episode = episode
        observation, info = env.reset()
        player.forget(0)
        chance = stream(env.seed, env.stream, "actions", episode)
        total, length, masks = 0.0, 0, np.zeros((1, 0), np.uint8)
        masked = actions.is_discrete and "action_mask" in info
        while True:
            if frames is not None:
                frames.append(env.render())
            rows.encode_one(observation, obs[0])
            if not np.isfinite(rows.numbers(obs)).all():
                raise EnvError(
                    f"evaluation episode {episode}, step {length}: the observation must be finite ({AS_FLOAT32})"
                )
            if masked:
                masks = mask_of(info, actions.n_parameters, 0).reshape(1, -1).astype(np.uint8)
                if any(actions.forbidden(masks)):
                    raise EnvError(
                        f"evaluation episode {episode}, step {length}: the action mask allows no action"
                    )
            player.act(obs, masks, player.draw(chance, 1), chosen, logprob, deterministic)
            try:
                observation, reward, terminated, truncated, info = env.step(actions.to_env(chosen)[0])
                check_flags(terminated, truncated)
                paid = reward_of(reward)
            except Exception as error:  # an env may raise whatever it likes
                raise EnvError(
                    f"evaluation failed in episode {episode}, step {length}, action {chosen[0].tolist()}: {error!r}"
                ) from error
            if not math.isfinite(paid):
                raise EnvError(
                    f"evaluation episode {episode}, step {length}: reward must be finite, got {paid}"
                )
            total, length = total + paid, length + 1
            if terminated or truncated:
                break
            if length >= LONGEST_EVALUATION:
                raise EnvError(
                    f"evaluation episode {episode} did not end in {LONGEST_EVALUATION} steps; give the "
                    "environment a time limit (gymnasium.wrappers.TimeLimit)"
                )
        returns.append(total)
        lengths.append(length)
    return Evaluation(returns, lengths)
