"""A share of the environments in a worker process (or in one of its threads), as the pool sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from shoal.vector import slots as words
from shoal.vector import worker
from shoal.vector.actions import Loose
from shoal.vector.channel import Channel, ChannelClosedError, dumps
from shoal.vector.failures import Failure, died, timed_out
from shoal.vector.launch import WorkerProcess
from shoal.vector.share import Extras
from shoal.vector.slots import Slots, address_of
from shoal.vector.strips import strips_of
from shoal.vector.waiting import SLICE, Patience, Signal, init_signal


class WorkerGoneError(Exception):
    """Inside this file: the worker of a lane is gone or was killed; the failure says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.summary)
        self.failure = failure


class ProcessLane:
    """A share in a worker process (or in one of its threads)."""

    inline = False

    def __init__(
        self,
        process: WorkerProcess,
        slots: Slots,
        number: int,
        first: int,
        count: int,
        spin: float,
        step_timeout: float | None,
    ) -> None:
        self.process, self.slots, self.number = process, slots, number
        self.first, self.count = first, count
        self.step_timeout = step_timeout
        self.command, self.reply = slots.command[number], slots.reply[number]
        base = address_of(slots.signal_bytes)
        self._addresses = [base + (2 * number + k) * words.LINE for k in (0, 1)]
        for address in self._addresses:
            init_signal(address)
        self.wake, self.ready = Signal(self._addresses[0]), Signal(self._addresses[1])
        self.patience = Patience(spin)
        self._strips = strips_of(slots, first, count)
        self.sequence = 0
        self.ring = 0
        self.rings_bell = self._belled = False
        self.home = process
        self.busy = False  # a command is out whose reply was not taken
        self.abandoned = False  # … and nobody wants that reply any more
        self.doing = ""
        self._queued: tuple[int, Any, int] | None = None
        self._progress = (0, 0.0)
        self.lost: Failure | None = None
        self.channel: Channel | None = None

    # --- commands
    def start_step(self, members: Sequence[int] | None, loose: Loose, ring: int) -> None:
        """Begin to step all envs of the share, or only `members`."""
        if members is not None:
            mask = self.slots.mask[self.first : self.first + self.count]
            mask[...] = False
            mask[members] = True
        self.doing = "step"
        self._command(worker.STEP if members is None else worker.STEP_SOME, loose or None, ring)

    def start(self, operation: str, *args: Any) -> None:
        """Begin another operation of `Share`, by name."""
        self.doing = operation
        ring = args[-1] if operation == "reset" else 0
        self._command(worker.MESSAGE, (operation, args), ring)

    def start_trial(self, rounds: int) -> None:
        """Begin to be busy for so many rounds, without touching an env."""
        self.doing = "trial"
        self._command(worker.TRIAL, None, rounds)

    def _command(self, operation: int, message: Any, ring: int) -> None:
        if self.busy:  # an abandoned reply is still to come: this waits its turn
            self.abandoned = True
            self._queued = (operation, message, ring)
            return
        self._send(operation, message, ring)

    def _send(self, operation: int, message: Any, ring: int) -> None:
        self.busy, self.abandoned = True, False
        if self.lost is not None:
            return  # `finish` tells
        data = None if message is None else dumps(message)
        command = self.command
        self.sequence = (self.sequence + 1) & 0xFFFFFFFF
        command[words.OPERATION] = operation
        command[words.HAS_MESSAGE] = data is not None
        command[words.RING] = ring
        command[words.BELL_MODE] = self._belled = self.rings_bell
        command[words.SEQUENCE] = self.sequence
        if self.step_timeout is not None:
            self._progress = (-1, time.monotonic())
        self.wake.release()
        if data is not None:
            assert self.channel is not None
            try:
                self.channel.send(data, self._check)
            except (ChannelClosedError, WorkerGoneError):
                return  # `finish` tells

    # --- replies
    def finished(self) -> bool:
        """The reply is there, or never will be."""
        return self.lost is not None or self.reply[words.REPLY_SEQUENCE] == self.sequence

    def check(self) -> None:
        """Notice a worker that is gone or overdue."""
        if self.busy and self.lost is None:
            try:
                self._check()
            except WorkerGoneError as gone:
                self.lost = gone.failure

    def finish(self, timeout: float | None = None) -> Extras | None:
        """The reply; a dead or hung worker gives the failure of every env of the share."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                self._wait(deadline)
                extras = self._take()
                self.busy = False
                queued, self._queued = self._queued, None
                if not self.abandoned or queued is None:
                    self.abandoned = False
                    return extras
                self._send(*queued)  # that was the late reply: it is dropped, the next command goes out
        except WorkerGoneError as gone:
            self.busy, self.abandoned, self._queued = False, False, None
            self.lost = gone.failure
            return Extras(failures=[gone.failure])
        except TimeoutError:
            self.abandoned = True
            raise
        except BaseException:  # Ctrl-C: whatever comes later is not what the next caller asks for
            self.abandoned = True
            raise

    def _wait(self, deadline: float | None) -> None:
        reply, sequence = self.reply, self.sequence
        if self.lost is not None:
            raise WorkerGoneError(self.lost)
        if self._belled:  # (it rings the common bell, not this lane's)
            if reply[words.REPLY_SEQUENCE] == sequence:
                return
        elif self.patience.look(self.ready.acquire) and reply[words.REPLY_SEQUENCE] == sequence:
            return
        while True:
            if deadline is None:
                pause = SLICE
            else:
                pause = min(SLICE, deadline - time.monotonic())
                if pause <= 0 and reply[words.REPLY_SEQUENCE] != sequence:
                    raise TimeoutError
            (self._pause if self._belled else self.ready.acquire)(True, max(pause, 0.0))
            if reply[words.REPLY_SEQUENCE] == sequence:
                return
            self._check()

    @staticmethod
    def _pause(_: bool, seconds: float) -> None:
        time.sleep(min(seconds, 0.001))

    def _take(self) -> Extras | None:
        flags = self.reply[words.REPLY_MESSAGE]
        if not flags:
            return None
        extras = self._receive() if flags & worker.HAS_EXTRAS else Extras()
        if flags & worker.HAS_TEXT:
            for leaf, strip in self._strips.items():
                extras.columns[leaf] = strip.unpack()
        return extras

    def _receive(self) -> Extras:
        assert self.channel is not None
        while True:
            try:
                sequence, extras = self.channel.receive(self._check)
            except ChannelClosedError:
                self.process.check_soon()
                self._check()
                continue
            if sequence == self.sequence:
                found: Extras = extras
                return found

    def _check(self) -> None:
        """Raise when the worker is gone, or kill it when it has been at one env for too long."""
        if not self.process.alive():
            if self.reply[words.REPLY_SEQUENCE] == self.sequence and not self.reply[words.REPLY_MESSAGE]:
                return  # its last answer is complete; the next command will find it gone
            raise WorkerGoneError(self.epitaph())
        if self.step_timeout is None:
            return
        now = time.monotonic()
        at = int(self.reply[words.PROGRESS])
        if at != self._progress[0]:
            self._progress = (at, now)
        elif now - self._progress[1] > self.step_timeout:
            env = self.first + at
            stack = self.process.stack()
            pid = self.process.pid
            self.process.kill()
            raise WorkerGoneError(
                timed_out(env, self.doing, self._action(env), pid, self.step_timeout, stack)
            )

    def epitaph(self) -> Failure:
        """The failure that tells how the worker ended and which env it was at."""
        process = self.process
        process.reap()
        env = self.first + min(int(self.reply[words.PROGRESS]), self.count - 1)
        return died(env, self.doing, self._action(env), process.pid, process.exit_code, process.log_text())

    def _action(self, env: int) -> Any:
        if self.doing != "step":
            return None
        try:
            values = [
                array[env] if array is not None and leaf.kind == "fixed" else "(text or object)"
                for leaf, array in zip(self.slots.actions.leaves, self.slots.act, strict=True)
            ]
            return self.slots.actions.rebuild(values)
        except Exception:
            return None

    def reconnect(self) -> None:
        """Begin anew with a fresh worker in the same slots."""
        for address in self._addresses:
            init_signal(address)
        self.busy, self.abandoned, self.lost, self._queued = False, False, None, None
        self.reply[words.REPLY_SEQUENCE] = self.sequence
        self.reply[words.PROGRESS] = 0
        self.command[words.SEQUENCE] = self.sequence

    def close(self, timeout: float) -> None:
        """Ask the worker to close; `ProcessBackend.close` sees to it that it does."""
        del timeout
        if self.process.owner == os.getpid() and self.lost is None:
            self._send(worker.CLOSE, None, 0)
        if self.channel is not None:
            self.channel.close()
