"""Hosts as tasks of joblib: loky, threading or multiprocessing; they end with the rollout."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any

from shoal.core.errors import format_error, needs_extra
from shoal.core.executors import OwnThread
from shoal.rollout.hosts.episodes import Setup
from shoal.rollout.hosts.host import Host, HostsFailedError
from shoal.rollout.hosts.processes import START_SECONDS, ProcessHosts
from shoal.rollout.hosts.sockets import Listener, SocketHost, serve

logger = logging.getLogger(__name__)
POOLS = 2
"""Pools of one rollout: after the first one broke there is another."""


class JoblibHosts:
    """Tasks of a `joblib.Parallel`, which runs in a side thread and whose tasks connect from wherever they are.

    Args:
        setup: what they play.
        count: how many tasks.
        backend: joblib's name of it.
    """

    def __init__(self, setup: Setup, count: int, backend: str) -> None:
        with needs_extra(f"rollouts on joblib's {backend}", "parallel"):
            import joblib
        self.count, self._joblib, self._backend, self._setup = count, joblib, backend, setup
        self._listener = Listener(setup)
        self._spare = ProcessHosts(setup, 0)
        self._thread = OwnThread("shoal-joblib")
        self._pool: asyncio.Future[Any] | None = None
        self._pools = 0
        self._hosts: list[SocketHost] = []

    async def host(self, number: int) -> Host | None:
        """The next host that connects; None if none does within its time."""
        await self._listener.start()
        if self._pool is None or self._pool.done():
            self._start_pool()
        assert self._pool is not None
        arrives = asyncio.ensure_future(self._listener.arrived.get())
        limit = self._setup.make_timeout or START_SECONDS
        await asyncio.wait([arrives, self._pool], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if arrives.done():
            self._hosts.append(arrives.result())
            return arrives.result()
        arrives.cancel()
        if self._pool.done():
            return await self.host(number)
        logger.warning(
            "a worker of joblib's %s did not start within %g s: the others take its envs",
            self._backend,
            limit,
        )
        if not self._hosts:
            raise HostsFailedError(f"no worker of joblib's {self._backend} started within {limit:g} s")
        return None

    def _start_pool(self) -> None:
        broke = None
        if self._pool is not None and not self._pool.cancelled():
            broke = self._pool.exception()
        if self._pools == POOLS:
            reason = format_error(broke) if broke is not None else "its tasks ended early"
            raise HostsFailedError(f"joblib's {self._backend} pool broke {POOLS} times, at last: {reason}")
        self._pools += 1
        if broke is not None:
            logger.warning(
                "joblib's %s pool broke: %s; another one takes over", self._backend, format_error(broke)
            )
        work = partial(self._run, self._listener.path, self._listener.key)
        self._pool = asyncio.wrap_future(self._thread.submit(work))

    def _run(self, path: str, key: str) -> None:
        parallel = self._joblib.Parallel(n_jobs=self.count, backend=self._backend)
        parallel(self._joblib.delayed(serve)(path, key, number) for number in range(self.count))

    async def spare(self) -> Host:
        """A process of its own."""
        return await self._spare.spare()

    async def dismiss(self, host: Host) -> None:
        """End a spare process."""
        await self._spare.dismiss(host)

    async def rest(self, *, keep_envs: bool) -> None:
        """Close the envs and end the tasks."""
        del keep_envs
        await self._spare.rest(keep_envs=False)
        seconds = self._setup.close_seconds
        await asyncio.gather(*(host.close_envs(seconds) for host in self._hosts))
        for host in self._hosts:
            host.end()
        self._hosts.clear()
        if self._pool is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait([self._pool], timeout=seconds)
        while not self._listener.arrived.empty():
            self._listener.arrived.get_nowait().end()
        self._pool, self._pools = None, 0

    async def close(self) -> None:
        """End everything; joblib keeps its idle processes for a while."""
        try:
            await self.rest(keep_envs=False)
            await self._spare.close()
        finally:
            self._listener.close()
            self._thread.end()

    def pids(self) -> list[int]:
        """The processes of spare hosts."""
        return self._spare.pids()
