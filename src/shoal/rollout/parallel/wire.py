"""How rollout workers in other processes talk to the shared engine: msgpack frames over a Unix socket.

A frame is four bytes of length and one message. Nothing that is received can run code: messages are decoded
into the types below and anything else ends the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from shoal.core.errors import EngineError
from shoal.rollout.samplers.sampler import Completion, Key, Request, Sampling

HEADER = struct.Struct("<I")
MAX_FRAME = 2**30
"""Bytes of one message, at most (an episode may show many pictures); a connection that announces more is ended."""
STRANGERS = 2**16
"""Bytes of a message of somebody who has not introduced himself."""


class Hello(msgspec.Struct, array_like=True, tag="h"):
    """The first message: who asks, with the secret that was handed to it."""

    token: bytes
    asker: int


class Ask(msgspec.Struct, array_like=True, tag="a"):
    """One request; `number` comes back with its answer."""

    number: int
    prompt_ids: tuple[int, ...]
    key: Key
    max_tokens: int
    temperature: float
    stop: tuple[str, ...]
    asked: float | None  # when, on the monotonic clock that all processes of a machine share
    images: tuple[str, ...] = ()


class Alive(msgspec.Struct, array_like=True, tag="v"):
    """A sign of life of a worker that has nothing to ask just now."""


class Entered(msgspec.Struct, array_like=True, tag="e"):
    """Episodes are at play now: lockstep waits for their questions."""

    keys: list[tuple[int, int, int, int]]


class Left(msgspec.Struct, array_like=True, tag="l"):
    """An episode is over: it will not ask again. `report` is for the owner of the engine."""

    key: tuple[int, int, int, int]
    report: bytes


class Answer(msgspec.Struct, array_like=True, tag="c"):
    """A completion."""

    number: int
    completion: Completion


class Refusal(msgspec.Struct, array_like=True, tag="r"):
    """A request that has no answer, and why."""

    number: int
    error: str
    late: bool


_to_server = msgspec.msgpack.Decoder(Hello | Ask | Entered | Left | Alive)
_to_client = msgspec.msgpack.Decoder(Answer | Refusal)
_encoder = msgspec.msgpack.Encoder()


class Link(Protocol):
    """A worker's way to the shared engine."""

    def generate(self, requests: Sequence[Request], timeout: float | None = None) -> list[Completion]:
        """One completion a request, in order."""
        ...

    def entered(self, keys: Sequence[Key]) -> None:
        """The episodes of these keys are at play (to be said where batches are launched in lockstep)."""
        ...

    def left(self, key: Key, report: bytes = b"") -> None:
        """The episode of `key` is over; `report` goes to the owner of the engine."""
        ...


def episode_of(key: Key) -> tuple[int, int, int, int]:
    """What names an episode among all that one engine serves."""
    return (key.seed, key.iteration, key.group, key.member)


def frame(message: msgspec.Struct) -> bytes:
    """A message as bytes with its length in front."""
    data = _encoder.encode(message)
    if len(data) > MAX_FRAME:
        raise EngineError(f"a message must have at most {MAX_FRAME} bytes, got {len(data)}")
    return HEADER.pack(len(data)) + data


def ask_of(number: int, request: Request, asked: float | None) -> Ask:
    """A request as a message."""
    sampling = request.sampling
    return Ask(
        number,
        request.prompt_ids,
        request.key,
        sampling.max_tokens,
        sampling.temperature,
        sampling.stop,
        asked,
        request.images,
    )


def request_of(ask: Ask) -> Request:
    """The request in a message."""
    sampling = _sampling(ask.max_tokens, ask.temperature, ask.stop)
    return Request(ask.prompt_ids, ask.key, sampling, ask.images)


_sampling = lru_cache(maxsize=256)(Sampling)


def answer_of(number: int, result: Completion | Exception) -> Answer | Refusal:
    """What became of a request, as a message."""
    if isinstance(result, Exception):
        why = str(result).encode("utf-8", "backslashreplace").decode()
        return Refusal(number, why, isinstance(result, TimeoutError))
    return Answer(number, result)


class Frames:
    """Bytes as they come, cut into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder, most: int = MAX_FRAME) -> None:
        self.most = most
        """Bytes of one message, at most."""
        self._decoder = decoder
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes | memoryview) -> list[Any]:
        """The messages that `data` completes; raises `ValueError` for what is not one."""
        buffer, size = self._buffer, len(data)
        if not buffer and size >= HEADER.size:  # the common case: exactly one message
            (length,) = HEADER.unpack_from(data)
            if size == HEADER.size + length:
                return [self._decoder.decode(memoryview(data)[HEADER.size :])]
        buffer += data
        messages: list[Any] = []
        at, end = 0, len(buffer)
        with memoryview(buffer) as view:
            while end - at >= HEADER.size:
                (length,) = HEADER.unpack_from(buffer, at)
                if length > self.most:
                    if messages:  # one of them may be the introduction; the rest of this one is yet to come
                        break
                    raise ValueError(
                        f"a message must have at most {self.most} bytes, {length} were announced"
                    )
                if end - at < HEADER.size + length:
                    break
                start = at + HEADER.size
                at = start + length
                messages.append(self._decoder.decode(view[start:at]))
        del buffer[:at]
        return messages


def server_frames() -> Frames:
    """A decoder for what workers send, who are strangers at first."""
    return Frames(_to_server, STRANGERS)


def client_frames() -> Frames:
    """A decoder for what the engine sends."""
    return Frames(_to_client)


def completion_of(answer: Answer | Refusal) -> Completion:
    """The completion in a message.

    Raises:
        TimeoutError: the engine refused because it took too long.
        EngineError: it refused for another reason.
    """
    if isinstance(answer, Refusal):
        raise (TimeoutError if answer.late else EngineError)(answer.error)
    return answer.completion
