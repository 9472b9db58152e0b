"""What a driver knows of hosts: episodes begin in their slots, ask, are answered and end; a host may be lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shoal.core.errors import WorkerError
from shoal.rollout.hosts.episodes import (
    CLOSE,
    LOOK,
    Begin,
    Control,
    Event,
    Message,
    Reply,
    Report,
    Setup,
    Slot,
    SlotThreads,
)

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
    """Where episodes are played, each in a slot: a message to a slot is open until its event, or the host is lost."""

    name = "a rollout worker"

    def __init__(self) -> None:
        self.lost = False
        self._why = ""
        self._open: dict[int, asyncio.Future[Any]] = {}

    def tell(self, message: Message) -> Awaitable[Any]:
        """The next event of the slot of a message, or the report that it asks for.

        Raises:
            HostLostError: the host is lost.
        """
        if self.lost:
            raise HostLostError(self._why, 0)
        future = self._open[message.slot] = asyncio.get_running_loop().create_future()
        self._send(message)
        return future

    def _send(self, message: Any) -> None:
        """Have the slot go on with this message."""
        raise NotImplementedError

    def _receive(self, event: Event | Report) -> None:
        """A slot goes on."""
        future = self._open.pop(event.slot, None)
        if future is not None and not future.done():
            future.set_result(event)

    async def overdue(self) -> Sequence[tuple[int, str]]:
        """Slots whose env does not return within its time limit, and from what; none if nobody can look."""
        return ()

    def lose(self, why: str, *, hung: bool = False, slot: int | None = None) -> None:
        """Stop waiting for it, for an env of `slot` that hangs, say; there are no more events."""
        if self.lost:
            return
        self.lost, self._why = True, why
        waiting, self._open = self._open, {}
        episodes = sum(number >= 0 for number in waiting)
        for future in waiting.values():
            if not future.done():
                future.set_exception(HostLostError(why, episodes, hung=hung, slot=slot))
                future.exception()  # nobody need be waiting for it

    async def close_envs(self) -> None:
        """Close the envs, within a time limit."""

    def end(self) -> None:
        """End at once; may be called twice."""

    def pids(self) -> list[int]:
        """The processes that were started here for it."""
        return []


class InlineHost(Host):
    """Plays in the thread that asks, one step after another: what a debugger sees."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._slot = Slot(setup, setup.prompter)

    def _send(self, message: Begin | Reply) -> None:
        self._receive(self._slot.handle(message))

    async def close_envs(self) -> None:
        """Close the envs."""
        self._slot.close_envs()


class SlotsHost(Host):
    """A host whose slots have threads, here or in another process."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup = setup

    async def start(self, seconds: float | None) -> int:
        """Wait until it has its setup; returns its process id.

        Raises:
            HostsFailedError: it has not within so many seconds.
        """
        try:
            return (await asyncio.wait_for(self.tell(Control(LOOK)), seconds)).pid  # type: ignore[no-any-return]
        except TimeoutError as error:
            self.end()
            raise HostsFailedError(f"{self.name} did not start within {seconds:g} s") from error
        except HostLostError as error:
            raise HostsFailedError(f"{error} before it played anything") from error
        except BaseException:
            self.end()
            raise

    async def overdue(self) -> Sequence[tuple[int, str]]:
        """Slots whose env does not return; the host is lost if it does not report for long."""
        limit = max(self._setup.step_timeout or 0.0, self._setup.make_timeout or 0.0) + MISSED
        with contextlib.suppress(HostLostError):
            try:
                return (await asyncio.wait_for(self.tell(Control(LOOK)), limit)).overdue  # type: ignore[no-any-return]
            except TimeoutError:
                self.lose(f"{self.name} gave no sign of life for {limit:g} s", hung=True)
        return ()

    async def close_envs(self) -> None:
        """Close the envs; a host that does not within its time is lost."""
        seconds = self._setup.close_seconds
        with contextlib.suppress(HostLostError):
            try:
                await asyncio.wait_for(self.tell(Control(CLOSE)), seconds)
            except TimeoutError:
                self.lose(f"{self.name} did not close its envs within {seconds:g} s")

    def end(self) -> None:
        """End at once; may be called twice."""
        self.lose("it was ended")


class ThreadHost(SlotsHost):
    """Plays each slot in a thread of this process; those of a host that is lost are left behind."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        loop = asyncio.get_running_loop()
        self._threads = SlotThreads(setup, lambda event: loop.call_soon_threadsafe(self._receive, event))

    def _send(self, message: Message) -> None:
        self._threads.post(message)

    def lose(self, why: str, *, hung: bool = False, slot: int | None = None) -> None:
        """End the threads, each after the call that is under way."""
        super().lose(why, hung=hung, slot=slot)
        self._threads.end()


class Hosts:
    """The hosts of one rollout after another, each started when first needed; here in this process.

    Args:
        make: makes one, in the driver's event loop; unread where `_start` is replaced.
        count: how many.
    """

    def __init__(self, make: Callable[[], Host] = Host, count: int = 1) -> None:
        self._make, self.count = make, count
        self._hosts: dict[int, Host] = {}
        self._spares = itertools.count(count)

    async def _start(self, number: int) -> Host:
        """A new host; one whose number is not below `count` is a spare one.

        Raises:
            HostsFailedError: there can be none.
        """
        return self._make()

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

    async def rest(self, *, keep_envs: bool) -> None:
        """The rollout is over: spare hosts end, the others close their envs, unless those are to be kept."""
        for number in [number for number, host in self._hosts.items() if number >= self.count or host.lost]:
            self._hosts.pop(number).end()
        if not keep_envs:
            await asyncio.gather(*(host.close_envs() for host in self._hosts.values()))

    async def close(self) -> None:
        """Close the envs and end all hosts; may be called twice."""
        hosts, self._hosts = self._hosts, {}
        try:
            await asyncio.gather(*(host.close_envs() for host in hosts.values()))
        finally:
            for host in hosts.values():
                host.end()

    def pids(self) -> list[int]:
        """The processes of hosts that were started here and run now."""
        return [pid for host in list(self._hosts.values()) if not host.lost for pid in host.pids()]
