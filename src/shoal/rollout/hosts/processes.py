"""Hosts in worker processes, which end with this one whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any

from shoal.core.errors import WorkerDiedError
from shoal.core.workers import WorkerProcess, describe_exit
from shoal.rollout.hosts.episodes import Setup
from shoal.rollout.hosts.host import Host, HostsFailedError
from shoal.rollout.hosts.sockets import Listener, SocketHost, serve

logger = logging.getLogger(__name__)
START_SECONDS = 120.0
"""Seconds within which a process must connect, without a `make_timeout`."""


class ProcessHosts:
    """Hosts in processes, started when first needed and kept for the next rollout.

    Args:
        setup: what they play.
        count: how many.
    """

    def __init__(self, setup: Setup, count: int) -> None:
        self.count = count
        self._setup = setup
        self._listener = Listener(setup)
        self._hosts: dict[int, SocketHost] = {}
        self._processes: dict[SocketHost, WorkerProcess] = {}
        self._next = count

    async def host(self, number: int) -> Host | None:
        """The host of that number."""
        known = self._hosts.get(number)
        if known is None or known.lost:
            known = self._hosts[number] = await self._start(number)
        return known

    async def spare(self) -> Host:
        """A process of its own."""
        number = self._next = self._next + 1
        host = self._hosts[number] = await self._start(number)
        return host

    async def _start(self, number: int) -> SocketHost:
        """A host in a new process; one that ends before it plays is started once more."""
        try:
            return await self._try(number)
        except HostsFailedError as error:
            logger.warning("%s; another one is started", error)
            return await self._try(number)

    async def _try(self, number: int) -> SocketHost:
        self._forget_lost()
        await self._listener.start()
        arrives = self._listener.expect(number)
        try:
            process = WorkerProcess(serve_alone, (self._listener.path, self._listener.key, number))
        except (OSError, WorkerDiedError) as error:
            raise HostsFailedError(f"no worker process can be started: {error}") from error
        loop = asyncio.get_running_loop()
        died: asyncio.Future[None] = loop.create_future()
        loop.add_reader(process.sentinel, _set, died)
        limit = self._setup.make_timeout or START_SECONDS
        try:
            wanted: list[asyncio.Future[Any]] = [arrives, died]
            await asyncio.wait(wanted, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            process.close()
            raise
        finally:
            loop.remove_reader(process.sentinel)
        if not arrives.done():
            how = "did not start in time"
            if died.done():
                process.wait(1.0)
                how = describe_exit(process.exit_code)
            process.close()
            raise HostsFailedError(f"a worker process {how} before it played anything")
        host = arrives.result()
        self._processes[host] = process
        host.ended = lambda: _end(process)
        loop.add_reader(process.sentinel, self._died, host)
        return host

    def _died(self, host: SocketHost) -> None:
        asyncio.get_running_loop().remove_reader(self._processes[host].sentinel)
        host.lose(host.ended())

    def _forget_lost(self) -> None:
        for host, process in list(self._processes.items()):
            if host.lost:
                asyncio.get_running_loop().remove_reader(process.sentinel)
                process.close()
                del self._processes[host]
        self._hosts = {number: host for number, host in self._hosts.items() if not host.lost}

    async def dismiss(self, host: Host) -> None:
        """End a spare process."""
        await host.close_envs(self._setup.close_seconds)
        host.end()
        self._forget_lost()

    async def rest(self, *, keep_envs: bool) -> None:
        """Close the envs; spare hosts end."""
        for number in [number for number in self._hosts if number >= self.count]:
            self._hosts.pop(number).end()
        if not keep_envs:
            seconds = self._setup.close_seconds
            await asyncio.gather(*(host.close_envs(seconds) for host in self._hosts.values()))
        self._forget_lost()

    async def close(self) -> None:
        """Close the envs, and end the processes."""
        try:
            await self.rest(keep_envs=False)
        finally:
            for host in self._processes:
                host.end()
            self._forget_lost()
            self._listener.close()

    def pids(self) -> list[int]:
        """The processes that run now."""
        return [host.pid for host in list(self._processes) if not host.lost]


def _end(process: WorkerProcess) -> str:
    """Make sure that a process has ended, and describe its exit."""
    process.wait(0.0 if process.alive() else 1.0)
    code = process.exit_code
    process.kill()
    return "lost its connection" if code is None else describe_exit(code)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def serve_alone(pipe: Any, path: str, key: str, number: int) -> None:
    """Run a host in a dedicated process; it ends at once, whatever its envs are doing."""
    del pipe
    with contextlib.suppress(ConnectionError):
        serve(path, key, number)
    os._exit(0)
