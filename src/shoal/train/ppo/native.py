"""Batches that environments bring along (ale-py's, EnvPool's, in JAX): trained on in this process, as they are.

A batch steps its environments itself, so nothing is put around one of them, and no episode can be played again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.core.errors import ConfigError
from shoal.core.seeding import derive_seed
from shoal.envs.catalogue import name_of
from shoal.train.ppo.arrays.steps import SeededEpisodes, entry_of
from shoal.train.ppo.envs import EnvFactory
from shoal.train.ppo.presets import id_of
from shoal.vector.backends.native import make_native
from shoal.vector.make import Options

CLIPS = ("reward_clipping", "reward_clip")
"""Arguments of ale-py's batch and of EnvPool's that clip rewards to their sign; an evaluation counts the points."""


@dataclass(frozen=True)
class BatchFactory(EnvFactory):
    """Makes native batches; called like an `EnvFactory` it makes a batch of one, as an environment.

    Raises:
        ConfigError: for what can only be put around single environments.
    """

    native: ClassVar[bool] = True

    def __post_init__(self) -> None:
        around = {name: getattr(self, name) for name in ("wrappers", "atari", "frame_stack", "squash")}
        if given := [f"{name}={value!r}" for name, value in around.items() if value]:
            raise ConfigError(
                "expected nothing around the environments of a native batch, which it steps itself, got "
                f"{', '.join(given)}: leave that out (a batch has env_kwargs of its own), or take another backend"
            )
        object.__setattr__(self, "name", name_of(self.source))

    def __call__(self, index: int = 0, **more: Any) -> SeededEpisodes:
        """A fresh batch of one that seeds its own episodes."""
        return SeededEpisodes(OneOfBatch(self.batch(1, **more)), self.seed, index, self.stream)

    def batch(self, n_envs: int, **more: Any) -> VectorEnv[Any, Any, Any]:
        """A fresh batch. Episodes begin in the step that ended one where the batch has the choice: no step is lost."""
        options = Options("native", autoreset=AutoresetMode.SAME_STEP, check_nan=False, copy=False)
        kwargs = {**self._kwargs(), **more}
        return make_native(self.source, n_envs, kwargs, (), options, any_autoreset=True)

    def seeds(self, envs: VectorEnv[Any, Any, Any], started: Sequence[int]) -> int | list[int]:
        """For the reset of a batch of which env `i` has started so many episodes, the next one included."""
        seeds = [derive_seed(self.seed, self.stream, i, n - 1) & 0x7FFFFFFF for i, n in enumerate(started)]
        return seeds if envs.metadata["seed_per_env"] else seeds[0]

    def _kwargs(self) -> dict[str, Any]:
        kwargs = dict(self.kwargs)
        if self.stream != "env":
            clips = {*kwargs, "reward_clipping"} if id_of(self.name).startswith("ALE/") else {*kwargs}
            kwargs |= {name: False for name in CLIPS if name in clips}
        return kwargs


class OneOfBatch(gym.Env[Any, Any]):
    """A batch of one as an environment. It resets itself, so what it shows at an end may be the next episode's."""

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        self.envs, self.render_mode = envs, envs.render_mode
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observations, infos = self.envs.reset(seed=seed, options=options)
        return entry_of(observations, 0), _masks(infos)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step."""
        observations, rewards, terminated, truncated, infos = self.envs.step(np.asarray(action)[None])
        return entry_of(observations, 0), rewards[0], terminated[0], truncated[0], _masks(infos)

    def render(self) -> Any:
        """Its picture."""
        frames = self.envs.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Close the batch."""
        self.envs.close()


def _masks(infos: dict[str, Any]) -> dict[str, Any]:
    return {"action_mask": infos["action_mask"][0]} if "action_mask" in infos else {}
