"""Hosts in processes of the standard library's multiprocessing, which end with this one whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

from shoal.rollout.hosts.episodes import Setup
from shoal.rollout.hosts.host import Host, HostsFailedError
from shoal.rollout.hosts.sockets import Listener, SocketHost, serve

PR_SET_PDEATHSIG = 1
START_SECONDS = 120.0
"""Within which a process must be there, where nobody limits the making of envs."""
JOIN_SECONDS = 1.0


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
        self._processes: dict[SocketHost, BaseProcess] = {}
        self._next = count

    async def host(self, number: int) -> Host | None:
        """The host of that number."""
        known = self._hosts.get(number)
        if known is None or known.lost:
            known = self._hosts[number] = await self._start(number)
        return known

    async def spare(self) -> Host:
        """A process of its own."""
        self._next += 1
        host = self._hosts[self._next] = await self._start(self._next)
        return host

    async def _start(self, number: int) -> SocketHost:
        self._forget_lost()
        await self._listener.start()
        arrives = self._listener.expect(number)
        try:
            process = start_process(serve_alone, self._listener.path, self._listener.key, number)
        except OSError as error:
            raise HostsFailedError(f"no worker process can be started: {error}") from error
        loop = asyncio.get_running_loop()
        died: asyncio.Future[None] = loop.create_future()
        loop.add_reader(process.sentinel, _set, died)
        try:
            limit = self._setup.make_timeout or START_SECONDS
            wanted: list[asyncio.Future[Any]] = [arrives, died]
            await asyncio.wait(wanted, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(process.sentinel)
        if not arrives.done():
            kill(process)
            how = describe_exit(process.exitcode) if died.done() else f"did not start within {limit:g} s"
            raise HostsFailedError(f"a worker process {how} before it played anything")
        host = arrives.result()
        self._processes[host] = process
        host.ended = lambda: kill(process)
        loop.add_reader(process.sentinel, self._died, host)
        return host

    def _died(self, host: SocketHost) -> None:
        asyncio.get_running_loop().remove_reader(self._processes[host].sentinel)
        host.lose(host.ended())

    def _forget_lost(self) -> None:
        for host, process in list(self._processes.items()):
            if host.lost:
                with contextlib.suppress(OSError, ValueError):
                    asyncio.get_running_loop().remove_reader(process.sentinel)
                kill(process)
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
        self._forget_lost()
        if not keep_envs:
            seconds = self._setup.close_seconds
            await asyncio.gather(*(host.close_envs(seconds) for host in self._hosts.values()))
        self._forget_lost()

    async def close(self) -> None:
        """Close the envs, and end the processes."""
        try:
            await self.rest(keep_envs=False)
        finally:
            for host in self._hosts.values():
                host.end()
            self._forget_lost()
            self._listener.close()

    def pids(self) -> list[int]:
        """The processes that run now."""
        return [host.pid for host in list(self._processes) if not host.lost]


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def kill(process: BaseProcess) -> str:
    """Kill a host with what its envs started; returns how it ended."""
    pid = process.pid
    if process.exitcode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            process.kill()
    if pid is not None and pid > 1:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    process.join(JOIN_SECONDS)
    return describe_exit(process.exitcode)


def describe_exit(code: int | None) -> str:
    """An exit code in words.

    >>> describe_exit(-9)
    'was killed by SIGKILL'
    """
    if code is None:
        return "is gone"
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def start_process(target: Any, *args: Any) -> BaseProcess:
    """Start a process that imports what it needs and nothing of the user's script."""
    method = "forkserver" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver" and forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
        context.set_forkserver_preload([__name__])
    process = context.Process(  # type: ignore[attr-defined]
        target=target, args=(*args, dict(os.environ)), daemon=True, name="shoal-host"
    )
    with _no_main():
        process.start()
    return process  # type: ignore[no-any-return]


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Without a main module, which a new process would run once more: no script needs a guard."""
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    try:
        if "__file__" in hidden:
            del main.__file__
        main.__spec__ = None
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


# --- in the process
def serve_alone(path: str, key: str, number: int, environ: dict[str, str]) -> None:
    """Be a host in a process of its own."""
    os.setpgid(0, 0)  # what envs start is killed with it, and Ctrl-C of the terminal goes to the parent alone
    with contextlib.suppress(Exception):  # Linux; elsewhere the end of the socket ends it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ.clear()
    os.environ.update(environ)
    code = 1
    try:
        serve(path, key, number, ends_process=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
