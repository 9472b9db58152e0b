"""How rollout workers in other processes talk to the shared engine: msgpack frames over a Unix socket.

A frame is four bytes of length and one message. Nothing that is received can run code: messages are decoded
into the types below and anything else ends the connection.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import msgspec

from shoal.core.errors import EngineError
from shoal.rollout.engine import Completion, Key, Request, Sampling

HEADER = struct.Struct("<I")
MAX_FRAME = 16 * 2**20
"""Bytes of one message, at most; a connection that announces more is ended."""


class Hello(msgspec.Struct, array_like=True, tag="h"):
    """The first message: who asks, with the secret that was handed to it."""

    token: bytes
    asker: int


class Ask(msgspec.Struct, array_like=True, tag="a"):
    """One request; `number` comes back with its answer."""

    number: int
    prompt_ids: tuple[int, ...]
    key: tuple[int, int, int, int, int]
    max_tokens: int
    temperature: float
    stop: tuple[str, ...]
    seconds: float | None  # since the episode had its last answer
    images: tuple[str, ...] = ()


class Left(msgspec.Struct, array_like=True, tag="l"):
    """An episode is over: it will not ask again. `report` is for the owner of the engine."""

    key: tuple[int, int, int, int]
    report: bytes


class Answer(msgspec.Struct, array_like=True, tag="c"):
    """A completion."""

    number: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    weights_version: int


class Refusal(msgspec.Struct, array_like=True, tag="r"):
    """A request that has no answer, and why."""

    number: int
    error: str
    late: bool


_to_server = msgspec.msgpack.Decoder(Hello | Ask | Left)
_to_client = msgspec.msgpack.Decoder(Answer | Refusal)
_encoder = msgspec.msgpack.Encoder()


class Link(Protocol):
    """A worker's way to the shared engine."""

    def generate(self, requests: Sequence[Request], timeout: float | None = None) -> list[Completion]:
        """One completion a request, in order."""
        ...

    def left(self, key: Key, report: bytes = b"") -> None:
        """The episode of `key` is over; `report` goes to the owner of the engine."""
        ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where a shared engine listens, and the secret that it expects."""

    path: str
    token: bytes

    def connect(self, asker: int) -> SocketLink:
        """A link for a worker in another process."""
        return SocketLink(self, asker)


def episode_of(key: Key) -> tuple[int, int, int, int]:
    """What names an episode among all that one engine serves."""
    return (key.seed, key.iteration, key.group, key.member)


def frame(message: msgspec.Struct) -> bytes:
    """A message as bytes with its length in front."""
    data = _encoder.encode(message)
    if len(data) > MAX_FRAME:
        raise EngineError(f"a message must have at most {MAX_FRAME} bytes, got {len(data)}")
    return HEADER.pack(len(data)) + data


def ask_of(number: int, request: Request, seconds: float | None) -> Ask:
    """A request as a message."""
    key, sampling = request.key, request.sampling
    return Ask(
        number,
        request.prompt_ids,
        (key.seed, key.iteration, key.group, key.member, key.turn),
        sampling.max_tokens,
        sampling.temperature,
        sampling.stop,
        seconds,
        request.images,
    )


def request_of(ask: Ask) -> Request:
    """The request in a message."""
    sampling = _sampling(ask.max_tokens, ask.temperature, ask.stop)
    return Request(ask.prompt_ids, Key(*ask.key), sampling, images=ask.images)


_sampling = lru_cache(maxsize=256)(Sampling)


def answer_of(number: int, completion: Completion) -> Answer:
    """A completion as a message."""
    return Answer(
        number, completion.token_ids, completion.logprobs, completion.finish, completion.weights_version
    )


class Frames:
    """Bytes as they come, cut into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes; raises `ValueError` for what is not one."""
        buffer = self._buffer
        if not buffer and len(data) >= HEADER.size:  # the common case: exactly one message
            (length,) = HEADER.unpack_from(data)
            if len(data) == HEADER.size + length:
                return [self._decoder.decode(memoryview(data)[HEADER.size :])]
        buffer += data
        messages = []
        at, end = 0, len(buffer)
        with memoryview(buffer) as view:
            while end - at >= HEADER.size:
                (length,) = HEADER.unpack_from(buffer, at)
                if length > MAX_FRAME:
                    raise ValueError(
                        f"a message must have at most {MAX_FRAME} bytes, {length} were announced"
                    )
                if end - at < HEADER.size + length:
                    break
                start = at + HEADER.size
                at = start + length
                messages.append(self._decoder.decode(view[start:at]))
        del buffer[:at]
        return messages


def server_frames() -> Frames:
    """A decoder for what workers send."""
    return Frames(_to_server)


class SocketLink:
    """A worker's connection to the shared engine; any number of threads may ask at once.

    Whoever waits first reads the socket for all: there is no thread between an answer and its asker.
    """

    def __init__(self, address: Address, asker: int = 0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(address.path)
        except OSError:
            self._socket.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._frames = Frames(_to_client)
        self._sending, self._reading, self._state = threading.Lock(), threading.Lock(), threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._answered: dict[Hashable, float] = {}
        self._next = 0
        self._broken: str | None = None
        self._send(frame(Hello(address.token, asker)))

    def generate(self, requests: Sequence[Request], timeout: float | None = None) -> list[Completion]:
        """One completion a request, in order.

        Raises:
            EngineError: the engine refused, or the connection is gone.
            TimeoutError: no answer in time.
        """
        now = time.monotonic()
        call = _Call(len(requests))
        data = b""
        with self._state:
            first, self._next = self._next, self._next + len(requests)
            for place, request in enumerate(requests):
                self._calls[first + place] = call
                since = self._answered.pop(episode_of(request.key), None)
                data += frame(ask_of(first + place, request, None if since is None else now - since))
        call.first = first
        try:
            self._send(data)
            self._wait(call, None if timeout is None else now + timeout)
        finally:
            if not call.done:
                with self._state:
                    for place in range(len(requests)):
                        self._calls.pop(first + place, None)
            self._wake_another()
        now = time.monotonic()
        for request in requests:
            self._answered[episode_of(request.key)] = now
        return call.results()

    def left(self, key: Key, report: bytes = b"") -> None:
        """The episode of `key` is over."""
        self._answered.pop(episode_of(key), None)
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
            elif call.woken is None:  # then look once more: what would have woken us may just have happened
                call.woken = threading.Event()
            else:
                call.woken.wait(left)
                call.woken.clear()
            if self._broken and not call.done:
                raise EngineError(f"the connection to the shared engine ended: {self._broken}")

    def _read(self, call: _Call, deadline: float | None) -> None:
        """Read for all askers until `call` is done."""
        while not call.done and not self._broken:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                if left is not None and not self._poll.poll(left * 1000):
                    return
                data = self._socket.recv(2**18)
                if not data:
                    self._broken = "the other side closed it"
                for message in self._frames.feed(data):
                    theirs = self._calls.pop(message.number, None)
                    if theirs is not None:  # else its asker has given up
                        theirs.put(message.number, message)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                self._broken = str(error)

    def _wake_another(self) -> None:
        """Let somebody who still waits read in our place (everybody, when there is nothing to read)."""
        if not self._calls:
            return
        with self._state:
            waiting = dict.fromkeys(self._calls.values())
        for call in waiting:
            if call.woken is not None:
                call.woken.set()
                if not self._broken:
                    break


class _Call:
    """Requests that one thread waits for."""

    def __init__(self, n: int) -> None:
        self.first = 0
        self.woken: threading.Event | None = None  # made when somebody else reads
        self._answers: dict[int, msgspec.Struct] = {}
        self._n = n
        self.done = n == 0

    def put(self, number: int, message: msgspec.Struct) -> None:
        self._answers[number] = message
        if len(self._answers) == self._n:
            self.done = True
            if self.woken is not None:
                self.woken.set()

    def results(self) -> list[Completion]:
        completions = []
        for number in range(self.first, self.first + self._n):
            answer = self._answers[number]
            if isinstance(answer, Refusal):
                raise (TimeoutError if answer.late else EngineError)(answer.error)
            assert isinstance(answer, Answer)
            completions.append(
                Completion(answer.token_ids, answer.logprobs, answer.finish, answer.weights_version)
            )
        return completions
