"""Evaluation on an environment of its own, with seeds of its own; training never notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from shoal.core.errors import ConfigError, EnvError, missing_extra
from shoal.core.seeding import stream
from shoal.rollout.arrays.spaces import ActionRows, ObservationRows
from shoal.rollout.arrays.steps import SeededEpisodes, StepPolicy, mask_of

Array = np.ndarray


class Player(StepPolicy, Protocol):
    """Who plays; `PPOAgent.alone()` is one."""

    @property
    def noise_size(self) -> int:
        """How many numbers of chance an action takes."""
        ...

    def forget(self, i: int) -> None:
        """An episode begins."""


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


def evaluate(
    player: Player,
    env: SeededEpisodes,
    *,
    episodes: int = 10,
    deterministic: bool = True,
    max_steps: int = 100_000,
    frames: list[Any] | None = None,
) -> Evaluation:
    """Play episodes 0, 1, … of `env`'s stream and report their returns.

    Args:
        player: the policy, for one env; its statistics must not move.
        env: a single environment that nothing else uses.
        episodes: how many.
        deterministic: the likeliest action instead of a drawn one.
        max_steps: of one episode; an error beyond, since an environment without end would never return.
        frames: filled with what `env.render()` shows, for a video.
    """
    if episodes < 1:
        raise ConfigError(f"episodes must be at least 1, got {episodes}")
    rows, actions = ObservationRows(env.observation_space), ActionRows(env.action_space)
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
            if masked:
                masks = mask_of(info, actions.n_parameters, 0).reshape(1, -1).astype(np.uint8)
                if any(actions.forbidden(masks)):
                    raise EnvError(
                        f"evaluation episode {episode}, step {length}: the action mask allows no action"
                    )
            if actions.is_discrete:
                noise = chance.random((1, player.noise_size), dtype=np.float32)
            else:
                noise = chance.standard_normal((1, player.noise_size), dtype=np.float32)
            player.act(obs, masks, noise, chosen, logprob, deterministic)
            observation, reward, terminated, truncated, info = env.step(actions.to_env(chosen)[0])
            total, length = total + float(reward), length + 1
            if terminated or truncated:
                break
            if length >= max_steps:
                raise EnvError(
                    f"evaluation episode {episode} did not end in {max_steps} steps; give the "
                    "environment a time limit (gymnasium.wrappers.TimeLimit)"
                )
        returns.append(total)
        lengths.append(length)
    return Evaluation(returns, lengths)


def write_video(path: Path, frames: list[Any], fps: float = 30.0) -> Path:
    """Write frames `[H, W, 3]` as an animated GIF; every second one is kept when there are many."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("recording video", "vision") from error
    stride = max(1, len(frames) // 300)
    pictures = [Image.fromarray(np.asarray(frame, np.uint8)) for frame in frames[::stride]]
    if not pictures:
        raise EnvError("the environment rendered no frames")
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=max(20, int(1000 * stride / fps)), loop=0
    )
    return path
