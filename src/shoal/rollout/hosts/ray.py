"""Hosts as Ray actors, on any node of a cluster; driver and host speak by actor calls."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from shoal.core.executors import connect_ray
from shoal.rollout.hosts.episodes import Begin, Event, Reply, Setup, SlotThreads
from shoal.rollout.hosts.host import Host, HostsFailedError, OpenSlots
from shoal.rollout.hosts.processes import ProcessHosts
from shoal.rollout.hosts.sockets import MISSED, encode, pickled, unpickled

MOST_CALLS = 100_000
ROOM_SECONDS = 30.0
"""For which room is waited for that one episode alone needs."""
_to_host = msgspec.msgpack.Decoder(Begin | Reply)
_to_driver = msgspec.msgpack.Decoder(Event)


class _Actor:
    """A host in an async actor, so that thousands of its calls may wait at once."""

    def __init__(self, setup: bytes) -> None:
        self._threads = SlotThreads(unpickled(setup), self._reply)
        self._open: dict[int, asyncio.Future[bytes]] = {}

    async def ready(self) -> None:
        """It is there."""
        self._loop = asyncio.get_running_loop()

    async def tell(self, data: bytes) -> bytes:
        message = _to_host.decode(data)
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._open[message.slot] = future
        self._threads.post(message)
        return await future

    def _reply(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._settle, event.slot, encode(event))

    def _settle(self, slot: int, data: bytes) -> None:
        if not (future := self._open.pop(slot)).done():
            future.set_result(data)

    async def overdue(self) -> list[tuple[int, str]]:
        return self._threads.overdue()

    async def close_envs(self) -> None:
        if closing := [asyncio.wrap_future(future) for future in self._threads.close_envs()]:
            await asyncio.wait(closing)


class RayHost:
    """An actor as a host."""

    def __init__(self, ray: Any, actor: Any, setup: Setup) -> None:
        self._ray, self._actor, self._setup = ray, actor, setup
        self._slots = OpenSlots()

    @property
    def lost(self) -> bool:
        """Whether it does not answer any more."""
        return self._slots.lost

    async def ready(self) -> None:
        """Wait until there is room for it."""
        await self._actor.ready.remote()

    async def tell(self, message: Begin | Reply) -> Event:
        """The slot's answer."""
        future = self._slots.open(message)
        task = asyncio.ensure_future(self._call(message))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await future
        finally:
            task.cancel()

    async def _call(self, message: Begin | Reply) -> None:
        try:
            self._slots.settle(_to_driver.decode(await self._actor.tell.remote(encode(message))))
        except self._ray.exceptions.RayError as error:
            self._slots.lose(
                f"a Ray worker was lost: {(str(error).splitlines() or [type(error).__name__])[0]}"
            )

    async def overdue(self) -> list[tuple[int, str]]:
        """What the actor says; it is lost if it says nothing for long."""
        limit = max(self._setup.step_timeout or 0.0, self._setup.make_timeout or 0.0) + MISSED
        try:
            async with asyncio.timeout(limit):
                return list(await self._actor.overdue.remote())
        except TimeoutError:
            self._slots.lose(f"a Ray worker gave no sign of life for {limit:g} s", hung=True)
            self._kill()
        except self._ray.exceptions.RayError as error:
            self._slots.lose(f"a Ray worker was lost: {error}")
        return []

    def give_up(self, slot: int, why: str) -> None:
        """The whole actor is given up."""
        self._slots.lose(why, hung=True, slot=slot)
        self._kill()

    async def close_envs(self, seconds: float) -> None:
        """Close the envs."""
        if not self.lost:
            with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):
                async with asyncio.timeout(seconds):
                    await self._actor.close_envs.remote()

    def end(self) -> None:
        """Kill the actor."""
        self._slots.lose("it was ended")
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)


class RayHosts:
    """Actors on a Ray cluster, started when first needed and kept for the next rollout.

    Args:
        setup: what they play.
        count: how many.
        options: of each actor: `num_cpus`, `resources`, `runtime_env`, …
    """

    def __init__(self, setup: Setup, count: int, options: dict[str, Any]) -> None:
        self.count = count
        self._setup, self._data = setup, pickled(setup)
        self._ray = connect_ray()
        # They reserve no CPU by default: two rollouts that keep their actors would wait for each other.
        own = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": MOST_CALLS,
            "scheduling_strategy": "SPREAD",
        }
        self._options = own | options
        self._hosts: dict[int, RayHost] = {}
        self._next = count
        self._spare = ProcessHosts(setup, 0)

    async def host(self, number: int) -> Host | None:
        """The actor of that number."""
        known = self._hosts.get(number)
        if known is None or known.lost:
            known = self._hosts[number] = await self._start()
        return known

    async def spare(self) -> Host:
        """An actor of its own; a process of this machine where Ray is gone, or has no room for one."""
        if self._ray.is_initialized():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROOM_SECONDS):
                    host = await self._start()
                self._next += 1
                self._hosts[self._next] = host
                return host
        return await self._spare.spare()

    async def _start(self) -> RayHost:
        if not self._ray.is_initialized():
            raise HostsFailedError("Ray was shut down")
        host = RayHost(
            self._ray, self._ray.remote(_Actor).options(**self._options).remote(self._data), self._setup
        )
        try:
            await host.ready()
        except self._ray.exceptions.RayError as error:
            raise HostsFailedError(f"no Ray actor can be started: {error}") from error
        except BaseException:  # the others have played everything before there was room for it
            host.end()
            raise
        return host

    async def dismiss(self, host: Host) -> None:
        """End a spare actor."""
        if isinstance(host, RayHost):
            host.end()
        else:
            await self._spare.dismiss(host)

    async def rest(self, *, keep_envs: bool) -> None:
        """Close the envs; spare hosts end."""
        for number in [number for number, host in self._hosts.items() if number >= self.count or host.lost]:
            self._hosts.pop(number).end()
        if not keep_envs:
            seconds = self._setup.close_seconds
            await asyncio.gather(*(host.close_envs(seconds) for host in self._hosts.values()))

    async def close(self) -> None:
        """End the actors."""
        hosts, self._hosts = self._hosts, {}
        try:
            if self._ray.is_initialized():
                seconds = self._setup.close_seconds
                await asyncio.gather(*(host.close_envs(seconds) for host in hosts.values()))
        finally:
            await self._spare.close()
            if self._ray.is_initialized():
                for host in hosts.values():
                    host.end()

    def pids(self) -> list[int]:
        """None that were started here."""
        return []
