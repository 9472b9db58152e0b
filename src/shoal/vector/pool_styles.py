"""A pool as users of EnvPool and PufferLib know it: `async_reset`, then `recv` and `send` for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.vector.pool import VectorPool


class EnvPoolStyle:
    """EnvPool's asynchronous interface: every `recv` gives `batch_size` environments, whichever came first.

    Args:
        pool: from `make_vec`.
        batch_size: environments per `recv`; default all.
    """

    def __init__(self, pool: VectorPool, batch_size: int | None = None) -> None:
        self.pool = pool
        self.num_envs = pool.num_envs
        self.batch_size = batch_size or pool.num_envs
        if not 1 <= self.batch_size <= self.num_envs:
            raise ValueError(f"batch_size must be in [1, {self.num_envs}], got {batch_size}")
        self.observation_space, self.action_space = pool.single_observation_space, pool.single_action_space
        self._spare: list[tuple[Any, ...]] = []

    def async_reset(self, seed: int | None = None) -> None:
        """Begin an episode everywhere; the first observations come by `recv`."""
        seeds: Sequence[int | None] = [None if seed is None else seed + i for i in range(self.num_envs)]
        self._spare = []
        self.pool.send_reset(range(self.num_envs), seeds)

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Observations, rewards, terminated, truncated and infos of `batch_size` environments.

        `infos["env_id"]` says which they are, `infos["infos"]` has what each of them told.
        """
        wanted = min(self.batch_size, len(self._spare) + len(self.pool.flight.ids))
        if len(self._spare) < wanted:
            ready = self.pool.recv(wanted - len(self._spare))
            layout = self.pool.slots.observations
            columns = layout.flatten(ready.observations)
            for k, i in enumerate(ready.ids.tolist()):
                row = [column[k] for column in columns]
                flags = (ready.rewards[k], ready.terminated[k], ready.truncated[k])
                self._spare.append((i, row, *flags, ready.infos[k]))
        taken, self._spare = self._spare[:wanted], self._spare[wanted:]
        ids, values, rewards, terminated, truncated, infos = zip(*taken, strict=True)
        return (
            self._batch(values),
            np.array(rewards),
            np.array(terminated),
            np.array(truncated),
            {"env_id": np.array(ids, dtype=np.int64), "infos": list(infos)},
        )

    def send(self, actions: Any, env_id: Any = None) -> None:
        """Give these environments their next actions; without ids, all of them in order."""
        ids = range(self.num_envs) if env_id is None else [int(i) for i in env_id]
        self.pool.send(ids, actions)

    def step(self, actions: Any, env_id: Any = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """`send`, then `recv`."""
        self.send(actions, env_id)
        return self.recv()

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def _batch(self, values: Sequence[Sequence[Any]]) -> Any:
        layout = self.pool.slots.observations
        columns: list[Any] = []
        for leaf, column in zip(layout.leaves, zip(*values, strict=True), strict=True):
            columns.append(np.stack(column) if leaf.kind == "fixed" else tuple(column))
        return layout.rebuild(columns)


class PufferStyle:
    """PufferLib's interface: `async_reset`, `recv` with env ids and a mask, `send` for the batch just received.

    Args:
        pool: from `make_vec`.
        batch_size: environments per `recv`; default all.
    """

    def __init__(self, pool: VectorPool, batch_size: int | None = None) -> None:
        self._inner = EnvPoolStyle(pool, batch_size)
        self.num_agents = self.num_envs = pool.num_envs
        self.agents_per_batch = self._inner.batch_size
        self.single_observation_space = pool.single_observation_space
        self.single_action_space = pool.single_action_space
        self._ids = np.arange(pool.num_envs)

    def async_reset(self, seed: int = 0) -> None:
        """Begin an episode everywhere, environment i with `seed + i`."""
        self._inner.async_reset(seed)

    def recv(self) -> tuple[Any, Any, Any, Any, list[dict[str, Any]], Any, Any]:
        """Observations, rewards, terminals, truncations, infos, env ids and mask of one batch."""
        obs, rewards, terminated, truncated, infos = self._inner.recv()
        self._ids = infos["env_id"]
        told = [info for info in infos["infos"] if info]
        return obs, rewards, terminated, truncated, told, self._ids, np.ones(len(self._ids), dtype=bool)

    def send(self, actions: Any) -> None:
        """The actions for the batch that `recv` gave."""
        self._inner.send(actions, self._ids)

    def reset(self, seed: int = 0) -> tuple[Any, list[dict[str, Any]]]:
        """`async_reset` and the first batch."""
        self.async_reset(seed)
        obs, _, _, _, infos, _, _ = self.recv()
        return obs, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, list[dict[str, Any]]]:
        """`send`, then `recv`, without ids and mask."""
        self.send(actions)
        return self.recv()[:5]

    def close(self) -> None:
        """End the workers."""
        self._inner.close()
