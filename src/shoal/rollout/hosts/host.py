"""What a driver knows of hosts: episodes begin in their slots, ask, are answered and end; a host may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from shoal.core.errors import WorkerError
from shoal.rollout.hosts.episodes import CLOSE_SECONDS, Begin, Event, Reply, Setup, Slot, SlotThreads
from shoal.rollout.prompts import Prompter


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


class Host(Protocol):
    """Where episodes are played, each in a slot."""

    @property
    def lost(self) -> bool:
        """Whether it no longer answers."""

    def tell(self, message: Begin | Reply) -> Awaitable[Event]:
        """What the slot of a message answers.

        Raises:
            HostLostError: the host is lost.
        """

    async def overdue(self) -> list[tuple[int, str]]:
        """Slots whose env does not answer within its time limit, and what it is at."""

    def give_up(self, slot: int, why: str) -> None:
        """Stop waiting for an env that hangs; its host is replaced."""

    async def close_envs(self, seconds: float) -> None:
        """Close the envs, for which so many seconds are waited."""

    def end(self) -> None:
        """End at once; may be called twice."""


class Hosts(Protocol):
    """The hosts of one rollout after another."""

    count: int

    async def host(self, number: int) -> Host | None:
        """Host `number`, a new one if it is lost or not there yet; None if it did not come within its time.

        Raises:
            HostsFailedError: there can be none.
        """

    async def spare(self) -> Host:
        """A host for one episode alone."""

    async def dismiss(self, host: Host) -> None:
        """A spare host is not needed any more."""

    async def rest(self, *, keep_envs: bool) -> None:
        """The rollout is over: close envs, unless they are to be kept."""

    async def close(self) -> None:
        """End all hosts; may be called twice."""

    def pids(self) -> list[int]:
        """The processes of hosts that were started here."""


class OpenSlots:
    """Messages that a host has not answered yet."""

    def __init__(self) -> None:
        self.lost = False
        self._why = "it was ended"
        self._open: dict[int, asyncio.Future[Event]] = {}

    def open(self, message: Begin | Reply) -> asyncio.Future[Event]:
        """What will be answered to a message."""
        if self.lost:
            raise HostLostError(self._why, 0)
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._open[message.slot] = future
        return future

    def settle(self, event: Event) -> None:
        """A slot answered."""
        future = self._open.pop(event.slot, None)
        if future is not None and not future.done():
            future.set_result(event)

    def lose(self, why: str, *, hung: bool = False, slot: int | None = None) -> None:
        """Nothing is answered any more."""
        if self.lost:
            return
        self.lost, self._why = True, why
        waiting, self._open = self._open, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(HostLostError(why, len(waiting), hung=hung, slot=slot))

    def lose_slot(self, slot: int, why: str) -> None:
        """One slot does not answer any more."""
        future = self._open.pop(slot, None)
        if future is not None and not future.done():
            future.set_exception(HostLostError(why, hung=True, slot=slot))


class InlineHost:
    """Plays in the thread that asks, one step after another: what a debugger sees."""

    lost = False

    def __init__(self, setup: Setup) -> None:

        self._slot = Slot(0, setup, Prompter(setup.prompt, setup.tokenizer))

    async def tell(self, message: Begin | Reply) -> Event:
        """The slot's answer, at once."""
        return self._slot.handle(message)

    async def overdue(self) -> list[tuple[int, str]]:
        """Nobody can look while this thread waits."""
        return []

    def give_up(self, slot: int, why: str) -> None:
        """It cannot be left."""

    async def close_envs(self, seconds: float) -> None:
        """Close the envs."""
        self._slot.close_envs()

    def end(self) -> None:
        """There is nothing to end."""


class ThreadHost:
    """Plays each slot in a thread of this process; one that hangs is left behind."""

    lost = False

    def __init__(self, setup: Setup) -> None:
        self._loop = asyncio.get_running_loop()
        self._slots = OpenSlots()
        self._threads = SlotThreads(setup, self._reply)

    def _reply(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._slots.settle, event)

    def tell(self, message: Begin | Reply) -> Awaitable[Event]:
        """The slot's answer."""
        future = self._slots.open(message)
        self._threads.post(message)
        return future

    async def overdue(self) -> list[tuple[int, str]]:
        """Slots whose env does not answer."""
        return self._threads.overdue()

    def give_up(self, slot: int, why: str) -> None:
        """Leave the thread of a slot behind."""
        self._threads.leave(slot)
        self._slots.lose_slot(slot, why)

    async def close_envs(self, seconds: float) -> None:
        """Close the envs, each in its thread."""
        if closing := [asyncio.wrap_future(future) for future in self._threads.close_envs()]:
            await asyncio.wait(closing, timeout=seconds)

    def end(self) -> None:
        """End the threads."""
        self._threads.end()


class LocalHosts:
    """Hosts in this process: threads, or the thread of the caller.

    Args:
        make: makes one, in the driver's event loop.
        count: how many.
        seconds: for which the end of envs is waited for.
    """

    def __init__(self, make: Callable[[], Any], count: int = 1, seconds: float = CLOSE_SECONDS) -> None:
        self.count = count
        self._make, self._seconds = make, seconds
        self._hosts: dict[int, Host] = {}

    async def host(self, number: int) -> Host | None:
        """The host of that number."""
        if number not in self._hosts:
            self._hosts[number] = self._make()
        return self._hosts[number]

    async def spare(self) -> Host:
        """One of them: each slot is on its own."""
        return next(iter(self._hosts.values()))

    async def dismiss(self, host: Host) -> None:
        """It stays."""

    async def rest(self, *, keep_envs: bool) -> None:
        """Close the envs."""
        if not keep_envs:
            await asyncio.gather(*(host.close_envs(self._seconds) for host in self._hosts.values()))

    async def close(self) -> None:
        """End the hosts."""
        hosts, self._hosts = self._hosts, {}
        try:
            await asyncio.gather(*(host.close_envs(self._seconds) for host in hosts.values()))
        finally:
            for host in hosts.values():
                host.end()

    def pids(self) -> list[int]:
        """None: it is this process."""
        return []
