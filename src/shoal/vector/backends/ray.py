"""Groups of environments in actors on a Ray cluster, with the results that the caller itself would get.

Ray places the actors, and never restarts one by itself: the vector env does, so that an episode that was cut shows it.
"""
# ruff: noqa: D102 (what is not documented here is in `Worker`)

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.executors import connect_ray, ray_reason
from shoal.core.workers import dumps
from shoal.envs.catalogue import EnvFn
from shoal.vector.env_group import EnvGroup, even_cuts
from shoal.vector.loop import is_empty, packed, seed_globals, unpacked
from shoal.vector.messages import Failure, Make, Rebuild, Reply, Reset, Step, from_exception
from shoal.vector.workers import LOADING_SECONDS, Limits, Worker, copy_rows, rows_of, with_actions


class EnvActor:
    """The actor of one group. It adds the folders of `path` (the caller's module path) that exist on its node."""

    def __init__(self, first: int, path: Sequence[str]) -> None:
        sys.path += [item for item in path if item not in sys.path and os.path.isdir(item)]
        self.first, self.seeded = first, False
        self.group: EnvGroup | None = None

    def run(self, data: bytes) -> tuple[bytes, Any]:
        """Execute a command; returns the reply, and the rows that a step or reset wrote."""
        try:
            command = pickle.loads(data)
            if isinstance(command, Make):
                self.group = EnvGroup(command.env_fns, self.first, [0])
        except BaseException as error:
            failure = from_exception(self.first, "reading its command", error, os.getpid())
            return packed(Reply(failures=[failure]), self.group, None), None
        group = self.group
        assert group is not None
        if isinstance(command, Reset) and not self.seeded:
            self.seeded = seed_globals(command.seeds, self.first)
        reply = group.run(command)
        answer = b"" if is_empty(reply) else packed(reply, group, command)
        if not isinstance(command, Step | Reset):
            return answer, None
        *rows, final = rows_of(group.buffers)
        return answer, (*rows, final if group.buffers.flags.any() else None)


class RayWorker(Worker):
    """A group in an actor."""

    inline = False

    def __init__(self, ray: Any, kind: Any, first: int, env_fns: Sequence[EnvFn], limits: Limits) -> None:
        super().__init__(first, env_fns, limits)
        self._ray, self._kind = ray, kind
        self._actor: Any = None
        self._reply: Any = None

    def _start(self) -> None:
        self.kill()
        self._actor = self._kind.remote(self.first, [item for item in sys.path if isinstance(item, str)])

    def _send(self, command: Any) -> None:
        data = dumps(with_actions(command, self.buffers, self.first, self.count))
        if self._ray.is_initialized():  # else Ray would start another session
            self._reply = self._actor.run.remote(data)

    def answered(self) -> bool:
        if self.lost is None and not self._ray.is_initialized():
            self.lose(self.failure("died", "the Ray session that it lived in was ended"))
        return self.lost is not None or bool(self._ray.wait([self._reply], timeout=0)[0])

    def wait(self, workers: Sequence[Any], seconds: float) -> None:
        self._ray.wait([worker._reply for worker in workers], timeout=seconds)

    def _receive(self) -> Reply:
        try:
            data, rows = self._ray.get(self._reply)
        except self._ray.exceptions.RayError as error:
            failure = self.failure("died", f"its Ray actor is gone: {ray_reason(error)}")
            failure.trace = str(error)
            self.lose(failure)
            return Reply()
        if rows is not None and self.buffers is not None:
            copy_rows(rows, self.command.members, self.buffers, self.first, self.count)
        try:
            return unpacked(data) if data else Reply()
        except Exception as error:  # what its environments gave cannot be read here
            doing = f"reading its reply to {self.command.doing}"
            return Reply(failures=[from_exception(i, doing, error) for i in self.ids])

    def overdue(self, now: float) -> float | None:
        """The time limit that its environments exceeded together; which of them, only the actor knows."""
        making = isinstance(self.command, Make | Rebuild)
        limit = self.limits.make if making else self.limits.step
        if limit is None:
            return None
        room = LOADING_SECONDS if isinstance(self.command, Make) else 0.0
        return limit if now - self._since > limit * self.count + room else None

    def failure(self, kind: str, summary: str) -> Failure:
        """A failure of one of its environments."""
        if kind == "timeout" and isinstance(self.command, Make):
            total, free = self._ray.cluster_resources(), self._ray.available_resources()
            amounts = [
                f"{free.get(name, 0):g} of {total[name]:g} {name}" for name in ("CPU", "GPU") if name in total
            ]
            summary += f"; the cluster has {', '.join(amounts)} free"
        found = super().failure(kind, summary)
        if others := [str(i) for i in self.asked() if i != found.env]:  # which of them was at work is unknown
            found.summary += (
                f" (or it was the fault of env {', '.join(others[:8])}, at work at the same time)"
            )
        return found

    def kill(self) -> None:
        if self._actor is not None and self._ray.is_initialized():
            with contextlib.suppress(Exception):  # it is gone already
                self._ray.kill(self._actor)

    def begin_close(self) -> bool:
        return self._actor is not None and self._ray.is_initialized() and super().begin_close()

    def close(self) -> None:
        self.kill()

    def stats(self) -> dict[str, Any]:
        """How often it was restarted."""
        return {"envs": list(self.ids), "restarts": self.starts - 1}


def ray_workers(
    env_fns: Sequence[EnvFn], n_workers: int, limits: Limits, options: Mapping[str, Any]
) -> list[RayWorker]:
    """Actors for environments; a local Ray is started if none runs, and stays until the program ends.

    Args:
        env_fns: functions that make the environments.
        n_workers: how many actors; 0 for as many as the cluster has CPUs for.
        limits: of time.
        options: of the actors, as Ray names them.

    Raises:
        ConfigError: for options that Ray does not know, or refuses.
    """
    ray = connect_ray()
    try:
        kind = ray.remote(max_restarts=0, max_task_retries=0, **options)(EnvActor)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"Ray refuses ray_options={dict(options)}: {error}") from error
    room = n_workers or int(ray.cluster_resources().get("CPU", 1) / float(options.get("num_cpus") or 1))
    cuts = even_cuts(len(env_fns), max(1, min(room, len(env_fns))))
    return [RayWorker(ray, kind, lo, env_fns[lo:hi], limits) for lo, hi in cuts]
