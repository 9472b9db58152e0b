"""Hosts as tasks of joblib: loky, threading or multiprocessing; they end with the rollout."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from shoal.core.errors import format_error, needs_extra
from shoal.core.executors import OwnThread
from shoal.rollout.hosts.episodes import Setup
from shoal.rollout.hosts.host import Host
from shoal.rollout.hosts.processes import START_SECONDS, ProcessHosts
from shoal.rollout.hosts.sockets import SocketHost, serve

logger = logging.getLogger(__name__)


class JoblibHosts(ProcessHosts):
    """Tasks of a `joblib.Parallel`, which runs in a side thread and whose tasks connect from wherever they are.

    Each is started once a rollout; in the place of one that is lost, or does not come, there is a process of its own.

    Args:
        setup: what they play.
        count: how many tasks.
        backend: joblib's name of it.
    """

    def __init__(self, setup: Setup, count: int, backend: str) -> None:
        with needs_extra(f"rollouts on joblib's {backend}", "parallel"):
            import joblib
        super().__init__(setup, count)
        self._joblib, self._backend = joblib, backend
        self._thread = OwnThread("shoal-joblib")
        self._pool: asyncio.Future[Any] | None = None
        self._coming: dict[int, asyncio.Future[SocketHost]] = {}

    async def _start(self, number: int) -> Host:
        await self._listener.start()
        if self._pool is None:
            self._coming = {n: self._listener.expect(n) for n in range(self.count)}
            self._pool = asyncio.wrap_future(self._thread.submit(partial(self._run, self._listener.path)))
            self._pool.add_done_callback(lambda pool: pool.cancelled() or pool.exception())
        arrives = self._coming.pop(number, None)
        if arrives is None:  # a spare host, or a second one of that number
            return await super()._start(next(self._spares))
        await asyncio.wait([arrives, self._pool], timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if arrives.done():
            return arrives.result()
        arrives.cancel()
        broke = self._pool.exception() if self._pool.done() else None
        why = (
            f"did not start within {START_SECONDS:g} s" if broke is None else f"broke: {format_error(broke)}"
        )
        logger.warning("a worker of joblib's %s %s; a process takes its place", self._backend, why)
        return await super()._start(next(self._spares))

    def _run(self, path: str) -> None:
        parallel = self._joblib.Parallel(n_jobs=self.count, backend=self._backend)
        parallel(self._joblib.delayed(serve)(path, number) for number in range(self.count))

    async def rest(self, *, keep_envs: bool) -> None:
        """Close the envs and end the tasks."""
        del keep_envs
        await super().close()
        if self._pool is not None:
            await asyncio.wait([self._pool], timeout=self._seconds)
        self._pool = None

    async def close(self) -> None:
        """End everything; joblib keeps its idle processes for a while."""
        try:
            await self.rest(keep_envs=False)
        finally:
            self._thread.end()
