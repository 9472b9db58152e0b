"""Hosts in worker processes, which end with this one whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

from shoal.core.errors import WorkerDiedError
from shoal.core.workers import WorkerProcess, describe_exit
from shoal.rollout.hosts.episodes import Setup
from shoal.rollout.hosts.host import Host, Hosts, HostsFailedError
from shoal.rollout.hosts.sockets import Listener, SocketHost, serve

START_SECONDS = 120.0
"""Seconds within which a process must have imported what its envs need, whatever their limits."""


class ProcessHosts(Hosts):
    """Hosts in processes, started when first needed and kept for the next rollout.

    Args:
        setup: what they play.
        count: how many.
    """

    def __init__(self, setup: Setup, count: int) -> None:
        super().__init__(count, setup.close_seconds)
        self._setup = setup
        self._listener = Listener(setup)
        self._processes: dict[SocketHost, WorkerProcess] = {}

    async def _start(self, number: int) -> Host:
        """A host in a new process."""
        self._forget_lost()
        await self._listener.start()
        arrives = self._listener.expect(number)
        try:
            process = WorkerProcess(serve_alone, (self._listener.path, number))
        except (OSError, WorkerDiedError) as error:
            raise HostsFailedError(f"no worker process can be started: {error}") from error
        loop = asyncio.get_running_loop()
        loop.add_reader(process.sentinel, _fail, arrives, process)
        try:
            async with asyncio.timeout(START_SECONDS):
                host = await arrives
        except BaseException as error:
            loop.remove_reader(process.sentinel)
            process.close()
            if isinstance(error, TimeoutError):
                raise HostsFailedError(
                    f"a worker process did not start within {START_SECONDS:g} s"
                ) from error
            raise
        self._processes[host] = process
        host.ended = lambda: _end(process)
        loop.add_reader(process.sentinel, self._died, host)
        return host

    def _died(self, host: SocketHost) -> None:
        asyncio.get_running_loop().remove_reader(self._processes[host].sentinel)
        host.lose(f"{host.name} {host.ended()}")

    def _forget_lost(self) -> None:
        for host, process in list(self._processes.items()):
            if host.lost:
                asyncio.get_running_loop().remove_reader(process.sentinel)
                process.close()
                del self._processes[host]

    async def dismiss(self, host: Host) -> None:
        """End a spare process."""
        await super().dismiss(host)
        self._forget_lost()

    async def rest(self, *, keep_envs: bool) -> None:
        """Close the envs; spare hosts end."""
        await super().rest(keep_envs=keep_envs)
        self._forget_lost()

    async def close(self) -> None:
        """Close the envs, and end the processes."""
        try:
            await super().close()
        finally:
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


def _fail(arrives: asyncio.Future[SocketHost], process: WorkerProcess) -> None:
    if not arrives.done():
        process.wait(1.0)
        how = describe_exit(process.exit_code)
        arrives.set_exception(HostsFailedError(f"a worker process {how} before it played anything"))


def serve_alone(pipe: Any, path: str, number: int) -> None:
    """Run a host in a dedicated process; it ends at once, whatever its envs are doing."""
    del pipe
    with contextlib.suppress(ConnectionError):
        serve(path, number)
    os._exit(0)
