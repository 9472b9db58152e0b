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

from shoal.core.errors import EngineError, WorkerDiedError
from shoal.rollout.parallel.wire import (
    Alive,
    Answer,
    Entered,
    Hello,
    Left,
    Refusal,
    ask_of,
    client_frames,
    completion_of,
    episode_of,
    frame,
)
from shoal.rollout.samplers.sampler import Completion, Key, Request

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


class LinkLostError(EngineError, WorkerDiedError):
    """The connection is gone: like a worker that died, it says nothing of the episodes that were at play."""


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
            EngineError: the engine refused, or (`LinkLostError`) the connection is gone.
            TimeoutError: no answer in time.
        """
        now = time.monotonic()
        deadline = None if timeout is None else now + timeout
        if len(requests) == 1 and self._reading.acquire(blocking=False):
            return [self._ask_and_read(requests[0], now, deadline)]
        return self._ask_and_wait(requests, now, deadline)

    def entered(self, keys: Sequence[Key]) -> None:
        """Episodes are at play."""
        self._send(frame(Entered([episode_of(key) for key in keys])))

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
            raise LinkLostError(f"the shared engine is gone ({error})") from error

    def _beat(self, seconds: float) -> None:
        with contextlib.suppress(EngineError):
            while not self._broken:
                time.sleep(seconds)
                self._send(frame(Alive()))

    def _ask_and_read(self, request: Request, now: float, deadline: float | None) -> Completion:
        """The short way: nobody reads, so read for all until the answer is there."""
        try:
            (number,) = self._numbers(1)
            self._send(frame(ask_of(number, request, now)))
            while True:
                answer: Answer | Refusal | None = None
                for message in self._receive(deadline):
                    if message.number == number:
                        answer = message
                    else:
                        self._hand_over(message)
                if self._ready:
                    self._ring_next()
                if answer is not None:
                    return completion_of(answer)
                self._check(deadline)
        finally:
            self._reading.release()
            self._wake_others()

    def _ask_and_wait(
        self, requests: Sequence[Request], now: float, deadline: float | None
    ) -> list[Completion]:
        """The way of threads that ask while another one reads, and of several requests."""
        numbers = self._numbers(len(requests))
        call = _Call(numbers)
        with self._state:
            self._calls.update(dict.fromkeys(numbers, call))
        try:
            asks = [frame(ask_of(k, request, now)) for k, request in zip(numbers, requests, strict=True)]
            self._send(b"".join(asks))
            self._wait(call, deadline)
        finally:
            if not call.done:
                with self._state:
                    for number in numbers:
                        self._calls.pop(number, None)
            call.over = True
            self._wake_others()
        return [completion_of(answer) for answer in call.results()]

    def _numbers(self, n: int) -> range:
        with self._state:
            first = self._next
            self._next = first + n
        return range(first, first + n)

    def _check(self, deadline: float | None) -> None:
        if self._broken:
            raise LinkLostError(f"the connection to the shared engine ended: {self._broken}")
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError("the engine did not answer in time")

    def _wait(self, call: _Call, deadline: float | None) -> None:
        while not call.done:
            self._check(deadline)
            if self._reading.acquire(blocking=False):
                try:
                    while not call.done and not self._broken:
                        for message in self._receive(deadline):
                            self._hand_over(message)
                        if self._ready:
                            self._ring_next()
                        self._check(deadline)
                finally:
                    self._reading.release()
            elif call.bell is None:  # then look once more: what would have woken us may just have happened
                bell = allocate_lock()
                bell.acquire()
                call.bell = bell
            else:
                call.bell.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic()))

    # --- for whoever reads
    def _receive(self, deadline: float | None) -> list[Answer | Refusal]:
        """What the engine sent, once it sent something; nothing when it is too late."""
        left = None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())
        try:  # a blocking read would also be woken when the engine has read what we sent; poll is not
            if not self._poll.poll(left):
                return []
            size = self._socket.recv_into(self._chunk)
            if not size:
                self._broken = "the other side closed it"
            return self._frames.feed(self._chunk[:size])
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._broken = str(error)
            return []

    def _hand_over(self, message: Answer | Refusal) -> None:
        call = self._calls.pop(message.number, None)
        if call is not None and call.put(message):  # None: its asker has given up
            self._ready.append(call)

    def _wake_others(self) -> None:
        if self._ready:
            self._ring_next()
        if self._calls and not self._reading.locked():
            self._wake_another()

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

    __slots__ = ("_answers", "_numbers", "bell", "done", "over")

    def __init__(self, numbers: range) -> None:
        self.bell: LockType | None = None  # held while nobody rings; made when somebody else reads
        self._answers: dict[int, Answer | Refusal] = {}
        self._numbers = numbers
        self.done = not numbers
        self.over = False  # the thread that asked has left, and woken the next

    def put(self, message: Answer | Refusal) -> bool:
        """Take an answer; whether a thread sleeps that has all of its own now."""
        self._answers[message.number] = message
        self.done = len(self._answers) == len(self._numbers)
        return self.done and self.bell is not None

    def ring(self) -> None:
        """Wake the thread that asked."""
        assert self.bell is not None
        with contextlib.suppress(RuntimeError):  # it rings already
            self.bell.release()

    def results(self) -> list[Answer | Refusal]:
        return [self._answers[number] for number in self._numbers]
