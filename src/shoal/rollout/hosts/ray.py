"""Hosts as Ray actors, on any node of a cluster; driver and host speak by actor calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from shoal.core.executors import connect_ray, ray_reason
from shoal.rollout.hosts.episodes import Message, Setup, decode_event, decode_message, encode
from shoal.rollout.hosts.host import Host, HostsFailedError, SlotsHost, ThreadHost
from shoal.rollout.hosts.processes import ProcessHosts, unpickled

logger = logging.getLogger(__name__)
MOST_CALLS = 100_000
ROOM_SECONDS = 30.0
"""For which room is waited for that one episode alone needs."""
LOOK_SECONDS = 1.0
"""Between looks at whether Ray still runs, while an actor starts."""
OPTIONS = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": MOST_CALLS, "scheduling_strategy": "SPREAD"}
"""They reserve no CPU by default: two rollouts that keep their actors would wait for each other."""


class _Actor:
    """A host in an async actor, so that thousands of its calls may wait at once."""

    def __init__(self, setup: bytes) -> None:
        self._setup = unpickled(setup)
        self._host: ThreadHost | None = None

    async def tell(self, data: bytes) -> bytes:
        self._host = self._host or ThreadHost(self._setup)  # in the event loop of the actor
        return encode(await self._host.tell(decode_message(data)))


class RayHost(SlotsHost):
    """An actor as a host."""

    name = "a Ray worker"

    def __init__(self, ray: Any, actor: Any, setup: Setup) -> None:
        super().__init__(setup)
        self._ray, self._actor = ray, actor
        self._calls: set[asyncio.Task[None]] = set()

    async def start(self, seconds: float | None) -> int:
        """Wait until it has its setup; also ends when Ray is shut down, which leaves calls without an answer."""
        starting = asyncio.ensure_future(super().start(seconds))
        try:
            while not (await asyncio.wait([starting], timeout=LOOK_SECONDS))[0]:
                if not self._ray.is_initialized():
                    self.lose("Ray was shut down")
            return await starting
        finally:
            starting.cancel()

    def _send(self, message: Message) -> None:
        call = asyncio.ensure_future(self._call(encode(message)))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, data: bytes) -> None:
        """Have the actor go on with a message; it is lost if it cannot."""
        why = "Ray was shut down"
        try:
            if self._ray.is_initialized():  # else a call would begin Ray anew
                return self._receive(decode_event(await self._actor.tell.remote(data)))
        except self._ray.exceptions.RayError as error:
            why = ray_reason(error)
        return self.lose(f"{self.name} was lost: {why}")

    def lose(self, why: str, *, hung: bool = False, slot: int | None = None) -> None:
        """Stop waiting for it, and kill the actor."""
        super().lose(why, hung=hung, slot=slot)
        for call in self._calls - {asyncio.current_task()}:
            call.cancel()
        if self._ray.is_initialized():
            with contextlib.suppress(Exception):
                self._ray.kill(self._actor)


class RayHosts(ProcessHosts):
    """Actors on a Ray cluster, started when first needed and kept for the next rollout.

    A process of this machine takes the place of one that cannot be started, or of a spare one for which there is no
    room.
    """

    def __init__(self, setup: Setup, count: int, options: dict[str, Any]) -> None:
        super().__init__(setup, count)
        self._ray = connect_ray()
        self._options = OPTIONS | options

    async def _start(self, number: int) -> Host:
        why = "Ray was shut down"
        if self._ray.is_initialized():
            actor = self._ray.remote(_Actor).options(**self._options).remote(self._data)
            host = RayHost(self._ray, actor, self._setup)
            try:
                await host.start(None if number < self.count else ROOM_SECONDS)
                return host
            except HostsFailedError as error:
                why = str(error)
        logger.warning("%s; a process of this machine takes its place", why)
        return await super()._start(number)
