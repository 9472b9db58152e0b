"""Environments whose episodes can be started again: seeds by (run, env, episode), never by worker or time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from shoal.core.errors import EnvError, ShoalError
from shoal.core.seeding import derive_seed

MASK_METHODS = ("action_masks", "action_mask")


def mask_method(env: gym.Env) -> Callable[[], Any] | None:
    """The method by which an environment tells its legal actions, if it has one."""
    for name in MASK_METHODS:
        method = getattr(env.unwrapped, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    return None


class SeededEpisodes(gym.Wrapper):
    """Seeds each episode by the run's seed, the env's global index and the episode's number.

    So an episode is a function of those and its actions: it can be played again after a crash
    (`resume_episode`), and no number of workers can change it. An environment with a method `action_masks` or
    `action_mask` gets its result into `info["action_mask"]`.

    Args:
        env: one environment.
        seed: of the run.
        index: of this env among all of the run.
        stream: name of the stream of seeds, "env" for training.
    """

    def __init__(self, env: gym.Env, seed: int, index: int, stream: str = "env") -> None:
        super().__init__(env)
        self.seed, self.index, self.stream = seed, index, stream
        self.episode = 0  # the number of the next episode
        self._mask = mask_method(env)
        if self._mask is None:
            self.step = env.step  # type: ignore[method-assign]  # one Python call less per step

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episode; a `seed` given by the caller is used instead of the derived one."""
        chosen = derive_seed(self.seed, self.stream, self.index, self.episode) if seed is None else seed
        self.episode += 1
        seed = chosen & 0x7FFFFFFF
        try:
            answer: Any = self.env.reset(seed=seed, options=options)
        except ShoalError:
            raise
        except Exception as error:
            raise EnvError(
                f"{self._name} failed at the start of episode {self.episode - 1}, in reset(seed={seed}, "
                f"options={options}): {error!r}"
            ) from error
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            raise EnvError(
                f"{self._name}: reset must return (observation, info) with a dict of infos, as Gymnasium has it; got "
                f"{type(answer).__name__} {answer!r:.100}"
            )
        return answer[0], self._with_mask(answer[1])

    @property
    def _name(self) -> str:
        return f"env {self.index} ({type(self.unwrapped).__name__})"

    def step(self, action: Any) -> Any:
        """One step, with the action mask in `info`."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, self._with_mask(info)

    def resume_episode(
        self, episodes: Sequence[int], actions: Sequence[Sequence[Any]]
    ) -> tuple[Any, dict[str, Any]]:
        """Play the episode again that was under way, and return its last observation and info.

        Args:
            episodes: by env index, how many episodes had been started.
            actions: by env index, the env's own actions since that episode's reset.
        """
        self.episode = int(episodes[self.index]) - 1
        observation, info = self.reset()
        for action in actions[self.index]:
            observation, _, terminated, truncated, info = self.step(action)
            if terminated or truncated:
                break
        return observation, info

    def restart_episode(self, indices: Sequence[int]) -> tuple[Any, dict[str, Any]] | None:
        """Break off this episode and start the next one if this env is among `indices`."""
        return self.reset() if self.index in indices else None

    def _with_mask(self, info: dict[str, Any]) -> dict[str, Any]:
        if self._mask is None:
            return info
        return {**info, "action_mask": np.asarray(self._mask())}
