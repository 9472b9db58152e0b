"""A worker process's connection to the shared engine, used by all its threads at once.

Whoever waits first reads the socket for all, so there is no thread between an answer and its asker. Waiting is
on bare locks and a thread is woken once a turn: with many envs in a process, waking threads is what costs time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shoal.core.errors import EngineError
from shoal.rollout.engine import Completion, Key, Request
from shoal.rollout.wire import (
    Alive,
    Answer,
    Hello,
    Left,
    Refusal,
    ask_of,
    client_frames,
    completion_of,
    episode_of,
    frame,
)

CHUNK = 2**16
"""Bytes read at once."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a shared engine listens, and the secret that it expects."""

    path: str
    token: bytes
    beat: float | None = None  # seconds between a worker's signs of life, where the engine watches for them

    def connect(self, asker: int) -> SocketLink:
        """A link for a worker in another process."""
        return SocketLink(self, asker)


class SocketLink:
    """A worker's connection to the shared engine; any number of threads may ask at once."""

    def __init__(self, address: Address, asker: int = 0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(address.path)
        except OSError:
            self._socket.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._frames, self._chunk = client_frames(), memoryview(bytearray(CHUNK))
        self._sending, self._reading, self._state = threading.Lock(), threading.Lock(), threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._ready: deque[_Call] = deque()  # answered, and asleep
        self._next = 0
        self._broken: str | None = None
        self._send(frame(Hello(address.token, asker)))
        if address.beat is not None:
            threading.Thread(target=self._beat, args=(address.beat,), daemon=True).start()

    def generate(self, requests: Sequence[Request], timeout: float | None = None) -> list[Completion]:
        """One completion a request, in order.

        Raises:
            EngineError: the engine refused, or the connection is gone.
            TimeoutError: no answer in time.
        """
        n = len(requests)
        call = _Call(n)
        now = time.monotonic()
        with self._state:
            first = call.first = self._next
            self._next = first + n
            for number in range(first, first + n):
                self._calls[number] = call
        try:
            if n == 1:
                self._send(frame(ask_of(first, requests[0], now)))
            else:
                self._send(b"".join(frame(ask_of(first + k, r, now)) for k, r in enumerate(requests)))
            self._wait(call, None if timeout is None else now + timeout)
        finally:
            if not call.done:
                with self._state:
                    for number in range(first, first + n):
                        self._calls.pop(number, None)
            call.over = True
            if self._ready:
                self._ring_next()
            if self._calls and not self._reading.locked():
                self._wake_another()
        return call.results()

    def left(self, key: Key, report: bytes = b"") -> None:
        """The episode of `key` is over."""
        self._send(frame(Left(episode_of(key), report)))

    def close(self) -> None:
        """End the connection."""
        self._broken = self._broken or "this worker closed it"
        self._socket.close()

    def _send(self, data: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise EngineError(f"the shared engine is gone ({error})") from error

    def _beat(self, seconds: float) -> None:
        with contextlib.suppress(EngineError):
            while not self._broken:
                time.sleep(seconds)
                self._send(frame(Alive()))

    def _wait(self, call: _Call, deadline: float | None) -> None:
        while not call.done:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("the engine did not answer in time")
            if self._reading.acquire(blocking=False):
                try:
                    self._read(call, deadline)
                finally:
                    self._reading.release()
            elif call.bell is None:  # then look once more: what would have woken us may just have happened
                bell = allocate_lock()
                bell.acquire()
                call.bell = bell
            else:
                call.bell.acquire(timeout=-1 if left is None else left)
            if self._broken and not call.done:
                raise EngineError(f"the connection to the shared engine ended: {self._broken}")

    def _read(self, call: _Call, deadline: float | None) -> None:
        """Read for all askers until `call` is done."""
        while not call.done and not self._broken:
            left = None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())
            try:  # a blocking read would also be woken when the engine has read what we sent; poll is not
                if not self._poll.poll(left):
                    return
                size = self._socket.recv_into(self._chunk)
                if not size:
                    self._broken = "the other side closed it"
                for message in self._frames.feed(self._chunk[:size]):
                    theirs = self._calls.pop(message.number, None)
                    if theirs is not None and theirs.put(
                        message.number, message
                    ):  # None: its asker has given up
                        self._ready.append(theirs)
                self._ring_next()
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                self._broken = str(error)

    def _ring_next(self) -> None:
        """Wake one whose answers are there; it wakes the next, lest all run for the interpreter lock at once."""
        with contextlib.suppress(IndexError):
            while (call := self._ready.popleft()).over:
                pass
            call.ring()

    def _wake_another(self) -> None:
        """Let somebody who still waits read in our place (everybody, when there is nothing to read)."""
        with self._state:
            waiting = dict.fromkeys(list(self._calls.values()))
        for call in waiting:
            if call.bell is not None:
                call.ring()
                if not self._broken:
                    break


class _Call:
    """Requests that one thread waits for."""

    __slots__ = ("_answers", "_n", "bell", "done", "first", "over")

    def __init__(self, n: int) -> None:
        self.first = 0
        self.bell: LockType | None = None  # held while nobody rings; made when somebody else reads
        self._answers: dict[int, Answer | Refusal] = {}
        self._n = n
        self.done = n == 0
        self.over = False  # the thread that asked has left, and woken the next

    def put(self, number: int, message: Answer | Refusal) -> bool:
        """Take an answer; whether a thread sleeps that has all of its own now."""
        self._answers[number] = message
        self.done = len(self._answers) == self._n
        return self.done and self.bell is not None

    def ring(self) -> None:
        """Wake the thread that asked."""
        assert self.bell is not None
        with contextlib.suppress(RuntimeError):  # it rings already
            self.bell.release()

    def results(self) -> list[Completion]:
        return [completion_of(self._answers[k]) for k in range(self.first, self.first + self._n)]
