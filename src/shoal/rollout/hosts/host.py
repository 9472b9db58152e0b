"""What a driver knows of hosts: episodes begin in their slots, ask, are answered and end; a host may be lost."""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from shoal.core.errors import WorkerError
from shoal.rollout.hosts.episodes import CLOSE_SECONDS, Begin, Event, Reply, Setup, Slot, SlotThreads

MISSED = 5.0
"""Seconds beyond the limits of envs after which a host that does not answer at all is given up."""


class HostLostError(WorkerError):
    """A host died or hangs, with the episodes that were open in it.

    Args:
        why: in words.
        open_slots: how many episodes were open.
        hung: whether it did not answer in time.
        slot: whose env was the cause, where that is known.
    """

    def __init__(self, why: str, open_slots: int = 1, *, hung: bool = False, slot: int | None = None) -> None:
        super().__init__(why)
        self.open_slots, self.hung, self.slot = open_slots, hung, slot


class HostsFailedError(WorkerError):
    """No host is available: the remaining episodes are played sequentially."""


class Host:
    """Where episodes are played, each in a slot: a message to a slot is open until it answers, or the host is lost."""

    name = "a rollout worker"

    def __init__(self) -> None:
        self.lost = False
        self._why = ""
        self._open: dict[int, asyncio.Future[Event]] = {}

    def tell(self, message: Begin | Reply) -> Awaitable[Event]:
        """What the slot of a message answers.

        Raises:
            HostLostError: the host is lost.
        """
        if self.lost:
            raise HostLostError(self._why, 0)
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._open[message.slot] = future
        self._send(message)
        return future

    def _send(self, message: Begin | Reply) -> None:
        """Have the slot go on with this message."""
        raise NotImplementedError

    def _hear(self, event: Event) -> None:
        """A slot answered."""
        future = self._open.pop(event.slot, None)
        if future is not None and not future.done():
            future.set_result(event)

    async def overdue(self) -> list[tuple[int, str]]:
        """Slots whose env does not answer within its time limit, and what it does; none if nobody can look."""
        return []

    def give_up(self, slot: int, why: str) -> None:
        """Stop waiting for an env that hangs: its whole host is given up and replaced."""
        self.lose(why, hung=True, slot=slot)

    def lose(self, why: str, *, hung: bool = False, slot: int | None = None) -> None:
        """Stop waiting for it; nothing is answered any more."""
        if self.lost:
            return
        self.lost, self._why = True, why
        waiting, self._open = self._open, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(HostLostError(why, len(waiting), hung=hung, slot=slot))

    async def close_envs(self, seconds: float) -> None:
        """Close the envs, for which so many seconds are waited."""

    def end(self) -> None:
        """End at once; may be called twice."""

    def pids(self) -> list[int]:
        """The processes that were started here for it."""
        return []


class InlineHost(Host):
    """Plays in the thread that asks, one step after another: what a debugger sees.

    Args:
        setup: what it plays.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._slot = Slot(setup, setup.prompter)

    def _send(self, message: Begin | Reply) -> None:
        self._hear(self._slot.handle(message))

    async def close_envs(self, seconds: float) -> None:
        """Close the envs."""
        self._slot.close_envs()


class ThreadHost(Host):
    """Plays each slot in a thread of this process; one that hangs is left behind.

    Args:
        setup: what it plays.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._threads = SlotThreads(setup, self._reply)

    def _send(self, message: Begin | Reply) -> None:
        self._threads.post(message)

    def _reply(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._hear, event)

    async def overdue(self) -> list[tuple[int, str]]:
        """Slots whose env does not answer."""
        return self._threads.overdue()

    def give_up(self, slot: int, why: str) -> None:
        """Leave the thread of a slot behind."""
        self._threads.leave(slot)
        future = self._open.pop(slot, None)
        if future is not None and not future.done():
            future.set_exception(HostLostError(why, hung=True, slot=slot))

    async def close_envs(self, seconds: float) -> None:
        """Close the envs, each in its thread."""
        if closing := [asyncio.wrap_future(future) for future in self._threads.close_envs()]:
            await asyncio.wait(closing, timeout=seconds)

    def end(self) -> None:
        """End the threads."""
        self.lose("it was ended")
        self._threads.end()


class WorkerHost(Host):
    """A host in another process.

    Args:
        setup: what it plays.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup = setup

    @abstractmethod
    async def _ask(self, name: str) -> Any:
        """What it answers to a question about all slots, "overdue" or "close_envs"."""

    async def overdue(self) -> list[tuple[int, str]]:
        """What the host says; it is lost if it says nothing for long."""
        limit = max(self._setup.step_timeout or 0.0, self._setup.make_timeout or 0.0) + MISSED
        try:
            async with asyncio.timeout(limit):
                return [tuple(one) for one in await self._ask("overdue") or ()]
        except TimeoutError:
            self.lose(f"{self.name} gave no sign of life for {limit:g} s", hung=True)
            return []

    async def close_envs(self, seconds: float) -> None:
        """Close the envs; a host that does not within its time is lost."""
        try:
            async with asyncio.timeout(seconds):
                if not self.lost:
                    await self._ask("close_envs")
        except TimeoutError:
            self.lose(f"{self.name} did not close its envs within {seconds:g} s")

    def end(self) -> None:
        """Nothing more is expected of it."""
        self.lose("it was ended")


class Hosts:
    """The hosts of one rollout after another, each started when first needed.

    Args:
        count: how many.
        seconds: for which the end of envs is waited for.
    """

    def __init__(self, count: int, seconds: float = CLOSE_SECONDS) -> None:
        self.count, self._seconds = count, seconds
        self._hosts: dict[int, Host] = {}
        self._spares = itertools.count(count)

    @abstractmethod
    async def _start(self, number: int) -> Host:
        """A new host; one whose number is not below `count` is a spare one.

        Raises:
            HostsFailedError: there can be none.
        """

    async def host(self, number: int) -> Host:
        """Host `number`, a new one if it is lost or not there yet.

        Raises:
            HostsFailedError: there can be none.
        """
        known = self._hosts.get(number)
        if known is None or known.lost:
            known = self._hosts[number] = await self._start(number)
        return known

    async def spare(self) -> Host:
        """A host for one episode alone."""
        return await self.host(next(self._spares))

    async def dismiss(self, host: Host) -> None:
        """A spare host is not needed any more."""
        await host.close_envs(self._seconds)
        host.end()

    async def rest(self, *, keep_envs: bool) -> None:
        """The rollout is over: spare hosts end, the others close their envs, unless those are to be kept."""
        for number in [number for number, host in self._hosts.items() if number >= self.count or host.lost]:
            self._hosts.pop(number).end()
        if not keep_envs:
            await asyncio.gather(*(host.close_envs(self._seconds) for host in self._hosts.values()))

    async def close(self) -> None:
        """Close the envs and end all hosts; may be called twice."""
        hosts, self._hosts = self._hosts, {}
        try:
            await asyncio.gather(*(host.close_envs(self._seconds) for host in hosts.values()))
        finally:
            for host in hosts.values():
                host.end()

    def pids(self) -> list[int]:
        """The processes of hosts that were started here and run now."""
        return [pid for host in list(self._hosts.values()) if not host.lost for pid in host.pids()]


class LocalHosts(Hosts):
    """Hosts in this process: threads, the thread of the caller, or its event loop.

    Args:
        make: makes one, in the driver's event loop.
        count: how many.
        seconds: for which the end of envs is waited for.
    """

    def __init__(self, make: Callable[[], Host], count: int = 1, seconds: float = CLOSE_SECONDS) -> None:
        super().__init__(count, seconds)
        self._make = make

    async def _start(self, number: int) -> Host:
        return self._make()

    async def spare(self) -> Host:
        """One of them: each slot is on its own."""
        return next(iter(self._hosts.values()))

    async def dismiss(self, host: Host) -> None:
        """It stays."""
