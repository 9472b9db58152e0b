"""Between rollout workers and the shared engine: msgpack frames over a Unix socket, both its ends.

A frame is four bytes of length and one message. Nothing that is received can run code: messages are decoded
into the types below and anything else ends the connection.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from shoal.core.errors import EngineError, WorkerDiedError
from shoal.rollout.samplers.sampler import Completion, Key, Request

logger = logging.getLogger(__name__)
Schedule = Literal["adaptive", "greedy", "barrier"]
"""When the engine runs: with what is expected so soon that it pays, whenever something waits, or in lockstep."""
Result = Completion | Exception
EpisodeName = tuple[int, int, int, int]
HEADER = struct.Struct("<I")
CHUNK = 2**16
"""Bytes read at once."""
MAX_FRAME = 2**30
"""Bytes of one message, at most (an episode may show many pictures); a connection that announces more is ended."""
STRANGERS = 2**16
"""Bytes of a message of somebody who has not introduced himself."""
MAX_CONNECTIONS = 1024
MESSAGE_SECONDS = 30.0
"""Within which a connection must have introduced itself and a message that began must end."""
BRIEF = 1e-4
"""Seconds of a wait that is shorter than what falling asleep and being woken costs both sides."""
READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class LinkLostError(EngineError, WorkerDiedError):
    """The connection is gone: like a worker that died, it says nothing of the episodes that were at play."""


class Link(Protocol):
    """A worker's way to the shared engine."""

    def generate(self, requests: Sequence[Request], timeout: float | None = None) -> list[Completion]:
        """One completion a request, in order."""

    def entered(self, keys: Sequence[Key]) -> None:
        """The episodes of these keys are at play (to be said where batches are launched in lockstep)."""

    def left(self, key: Key, report: bytes = b"") -> None:
        """The episode of `key` is over; `report` goes to the owner of the engine."""


# --- messages
class Hello(msgspec.Struct, array_like=True, tag="h"):
    """The first message: who asks, with the secret that was handed to it."""

    token: bytes
    asker: int


class Ask(msgspec.Struct, array_like=True, tag="a"):
    """One request; `number` comes back with its answer."""

    number: int
    request: Request


class Alive(msgspec.Struct, array_like=True, tag="v"):
    """A sign of life of a worker that has nothing to ask just now."""


class Entered(msgspec.Struct, array_like=True, tag="e"):
    """Episodes are at play now: lockstep waits for their questions."""

    episodes: list[EpisodeName]


class Left(msgspec.Struct, array_like=True, tag="l"):
    """An episode is over: it will not ask again. `report` is for the owner of the engine."""

    episode: EpisodeName
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


FromWorker = Hello | Ask | Entered | Left | Alive
_encoder = msgspec.msgpack.Encoder()
_from_server = msgspec.msgpack.Decoder(Answer | Refusal)
_anything = msgspec.msgpack.Decoder()


def episode_of(key: Key) -> EpisodeName:
    """What names an episode among all that one engine serves."""
    return (key.seed, key.iteration, key.group, key.member)


def frame(message: msgspec.Struct) -> bytes:
    """A message as bytes with its length in front."""
    data = _encoder.encode(message)
    if len(data) > MAX_FRAME:
        raise EngineError(f"a message must have at most {MAX_FRAME} bytes, got {len(data)}")
    return HEADER.pack(len(data)) + data


def answer_of(number: int, result: Result) -> Answer | Refusal:
    """What became of a request, as a message."""
    if isinstance(result, Exception):
        why = str(result).encode("utf-8", "backslashreplace").decode()
        return Refusal(number, why, isinstance(result, TimeoutError))
    return Answer(number, result)


def completion_of(answer: Answer | Refusal) -> Completion:
    """The completion in a message.

    Raises:
        TimeoutError: the engine refused because it took too long.
        EngineError: it refused for another reason.
    """
    if isinstance(answer, Refusal):
        raise (TimeoutError if answer.late else EngineError)(answer.error)
    return answer.completion


def decode_answer(data: bytes | memoryview) -> Answer | Refusal:
    """A message of the engine; an answer that is no completion becomes the refusal of its request alone."""
    try:
        return _from_server.decode(data)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        match _anything.decode(data):
            case ["c", int(number), *_]:
                return Refusal(number, f"the engine gave an answer that is no completion: {error}", False)
        raise


decode_request: Callable[[bytes | memoryview], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode
"""A message of a worker."""


class Frames:
    """Bytes as they come, cut into messages.

    Args:
        decode: makes a message of the bytes of one.
        most: bytes of one message, at most.
    """

    def __init__(self, decode: Callable[[bytes | memoryview], Any], most: int = MAX_FRAME) -> None:
        self.most = most
        self._decode = decode
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
                return [self._decode(data[HEADER.size :])]
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
                messages.append(self._decode(view[start:at]))
        del buffer[:at]
        return messages


# --- a worker's end
@dataclass(frozen=True, slots=True)
class Address:
    """Where a shared engine listens, and the secret that it expects."""

    path: str
    token: bytes
    beat: float | None = None  # seconds between a worker's signs of life, where the engine watches for them

    def connect(self, asker: int) -> SocketLink:
        """A link for a worker in another process."""
        try:
            return SocketLink(self, asker)
        except OSError as error:  # it ended while the worker was on its way
            raise LinkLostError(f"the shared engine is gone ({error})") from error


class SocketLink:
    """A worker's connection to the shared engine; any number of threads may ask at once.

    Whoever waits first reads the socket for all, so there is no thread between an answer and its asker. Waiting is
    on bare locks and a thread is woken once a turn: with many envs in a process, waking threads is what costs time.
    """

    def __init__(self, address: Address, asker: int = 0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(address.path)
        except OSError:
            self._socket.close()
            raise
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._writable.register(self._socket, select.POLLOUT)
        self._frames, self._chunk = Frames(decode_answer), memoryview(bytearray(CHUNK))
        self._sending, self._reading, self._state = threading.Lock(), threading.Lock(), threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._ready: deque[_Call] = deque()  # answered, and asleep
        self._numbers = count()  # of requests
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
        deadline = None if timeout is None else time.monotonic() + timeout
        if len(requests) == 1 and self._reading.acquire(blocking=False):
            return [self._ask_and_read(requests[0], deadline)]
        return self._ask_and_wait(requests, deadline)

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

    def _send(self, data: bytes, deadline: float | None = None) -> None:
        """Send as fast as the other side reads."""
        if not (self._sending.acquire(blocking=False) or self._sending.acquire(timeout=_left(deadline))):
            raise TimeoutError(TOO_LATE)
        try:
            sent = 0
            while sent < len(data):
                self._check(None)
                try:
                    sent += self._socket.send(memoryview(data)[sent:] if sent else data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    if self._writable.poll(_milliseconds(deadline)):
                        continue
                    if sent:  # half a message: what follows it could not be read
                        self._end("it did not read a message in time")
                    raise TimeoutError(TOO_LATE) from None
                except OSError as error:
                    raise LinkLostError(f"the shared engine is gone ({error})") from error
        finally:
            self._sending.release()

    def _end(self, why: str) -> None:
        self._broken = why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever reads

    def _beat(self, seconds: float) -> None:
        with contextlib.suppress(EngineError):
            while not self._broken:
                time.sleep(seconds)
                self._send(frame(Alive()))

    def _ask_and_read(self, request: Request, deadline: float | None) -> Completion:
        """The short way: nobody reads, so read for all until the answer is there."""
        try:
            number = next(self._numbers)
            self._send(frame(Ask(number, request)), deadline)
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

    def _ask_and_wait(self, requests: Sequence[Request], deadline: float | None) -> list[Completion]:
        """The way of threads that ask while another one reads, and of several requests."""
        numbers = list(islice(self._numbers, len(requests)))
        call = _Call(numbers)
        with self._state:
            self._calls.update(dict.fromkeys(numbers, call))
        try:
            asks = [frame(Ask(number, request)) for number, request in zip(numbers, requests, strict=True)]
            self._send(b"".join(asks), deadline)
            self._wait(call, deadline)
        finally:
            if not call.done:
                with self._state:
                    for number in numbers:
                        self._calls.pop(number, None)
            call.over = True
            self._wake_others()
        return [completion_of(answer) for answer in call.results()]

    def _check(self, deadline: float | None) -> None:
        if self._broken:
            raise LinkLostError(f"the connection to the shared engine ended: {self._broken}")
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(TOO_LATE)

    def _wait(self, call: _Call, deadline: float | None) -> None:
        while not call.done:
            self._check(deadline)
            if self._reading.acquire(blocking=False):
                try:
                    for message in self._receive(deadline):
                        self._hand_over(message)
                    if self._ready:
                        self._ring_next()
                finally:
                    self._reading.release()
            elif call.bell is None:  # then look once more: what would have woken us may just have happened
                bell = allocate_lock()
                bell.acquire()
                call.bell = bell
            else:
                call.bell.acquire(timeout=_left(deadline))

    # for whoever reads
    def _receive(self, deadline: float | None) -> list[Answer | Refusal]:
        """What the engine sent, once it sent something; nothing when it is too late."""
        try:  # a blocking read would also be woken when the engine has read what we sent; poll is not
            if not self._readable.poll(_milliseconds(deadline)):
                return []
            size = self._socket.recv_into(self._chunk)
            if not size:
                self._broken = self._broken or "the other side closed it"
            return self._frames.feed(self._chunk[:size])
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._broken = self._broken or str(error)
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


TOO_LATE = "the engine did not answer in time"


def _left(deadline: float | None) -> float:
    """Seconds until then, as a lock waits: -1 for ever."""
    return -1 if deadline is None else max(0.0, deadline - time.monotonic())


def _milliseconds(deadline: float | None) -> float | None:
    """Milliseconds until then, as `poll` waits."""
    return None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())


class _Call:
    """Requests that one thread waits for."""

    __slots__ = ("_answers", "_numbers", "bell", "done", "over")

    def __init__(self, numbers: Sequence[int]) -> None:
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
        assert self.bell is not None
        with contextlib.suppress(RuntimeError):  # it rings already
            self.bell.release()

    def results(self) -> list[Answer | Refusal]:
        return [self._answers[number] for number in self._numbers]


# --- the engine's end
class Connections:
    """Sockets that are waited for together: who may connect, how much is read from whom, the bell that ends a wait.

    Everything but `ring` and `serve` belongs to the engine's thread.

    Args:
        on_message: called with a connection and what it said.
        on_end: called with a connection that has ended.
        is_full: whether so much of an asker waits that no more is to be read from it.
        heartbeat_timeout: seconds without a sign of life after which a worker process is killed; None waits for ever.
    """

    def __init__(
        self,
        on_message: Callable[[Connection, Ask | Entered | Left | Alive], None],
        on_end: Callable[[Connection], None],
        is_full: Callable[[Connection], bool],
        heartbeat_timeout: float | None = None,
    ) -> None:
        self._on_message, self._on_end, self._is_full = on_message, on_end, is_full
        self._heartbeat_timeout = heartbeat_timeout
        self.refused = 0
        """Connections that were not accepted, or did not introduce themselves."""
        self._epoll = select.epoll()
        self._bell: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ringing = threading.Lock()
        self._epoll.register(self._bell, READ)
        self._by_descriptor: dict[int, Connection] = {}
        self._dirty: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._paused = self._was_brief = False
        self._folder: Path | None = None
        self._chunk = memoryview(bytearray(CHUNK))
        self._token = secrets.token_bytes(16)

    def __len__(self) -> int:
        """How many there are to be swept."""
        return len(self._by_descriptor) + self._paused

    # from any thread
    def ring(self) -> None:
        """End the present wait, or the next one."""
        with self._ringing, contextlib.suppress(BlockingIOError):
            if self._bell is not None:
                os.eventfd_write(self._bell, 1)

    def serve(self) -> Address:
        """Listen on a Unix socket that only this user's processes with the returned secret can use."""
        if self._listener is None:
            folder = Path(tempfile.mkdtemp(prefix="shoal-"))
            if len(str(folder)) > 90:  # a Unix socket's path has room for 107 bytes
                folder.rmdir()
                folder = Path(tempfile.mkdtemp(prefix="shoal-", dir="/tmp"))
            self._folder = folder
            self._listener = _listen(folder / "engine")
            self._epoll.register(self._listener, READ)
        beat = None if self._heartbeat_timeout is None else min(0.5, self._heartbeat_timeout / 4)
        return Address(self._listener.getsockname(), self._token, beat)

    # from the engine's thread
    def look(self, wait: float | None, awake: bool = False) -> None:
        """Handle what arrived, waiting up to `wait` seconds for something to; None waits as long as it takes.

        With `awake` a wait after a brief one begins without sleep: who asks next need not wake this thread. Not where
        several are connected: they need the cores, and would be served one by one.
        """
        writable = False
        for descriptor, events in self._arrived(wait, awake):
            connection = self._by_descriptor.get(descriptor)
            if connection is not None:
                if events & WRITE:
                    self._dirty.add(connection)
                    writable = True
                if events & ~WRITE:
                    self._receive(connection)
            elif descriptor == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(descriptor)
            elif self._listener is not None and descriptor == self._listener.fileno():
                self._accept(self._listener)
        if writable:
            self.flush()

    def _arrived(self, wait: float | None, awake: bool) -> list[tuple[int, int]]:
        poll, clock = self._epoll.poll, time.perf_counter
        began = clock()
        found: list[tuple[int, int]] = []
        if awake and self._was_brief and len(self._by_descriptor) < 2 and (wait is None or wait > BRIEF):
            while not found and clock() - began < BRIEF:
                found = poll(0)
        found = found or poll(wait)
        # The bell is rung by a thread of this process, which wants the interpreter for itself.
        self._was_brief = bool(found) and found[0][0] != self._bell and clock() - began < BRIEF
        return found

    def flush(self) -> None:
        """Send the answers that were written since the last time."""
        for connection in self._dirty:
            if connection.open:
                if not connection.flush():
                    self.drop(connection)
                elif connection.out or connection.events != READ:
                    self._listen_to(connection)
        self._dirty.clear()

    def sweep(self, now: float, *, excused: bool = False) -> None:
        """End connections that keep us waiting, and workers that give no sign of life; their time may begin anew."""
        if self._paused and self._listener is not None:
            self._epoll.modify(self._listener, READ)
            self._paused = False
        for connection in list(self._by_descriptor.values()):
            if excused:
                connection.since = now
            silent = now - connection.since if connection.events & READ else 0.0  # unread is not silent
            if (connection.asker is None or connection.frames.partial) and silent > MESSAGE_SECONDS:
                self.drop(connection)
            elif self._heartbeat_timeout is not None and silent > self._heartbeat_timeout:
                pid = connection.pid
                logger.warning("worker process %d gave no sign of life for %.3g s and is killed", pid, silent)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """End a connection."""
        if not connection.open:
            return
        connection.open = False
        del self._by_descriptor[connection.descriptor]
        with contextlib.suppress(OSError):
            self._epoll.unregister(connection.descriptor)
        connection.sock.close()
        self._on_end(connection)

    def close(self) -> None:
        """End all connections and remove the socket."""
        for connection in list(self._by_descriptor.values()):
            self.drop(connection)
        if self._listener is not None:
            self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._epoll.close()
        with self._ringing:
            bell, self._bell = self._bell, None
            if bell is not None:
                os.close(bell)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # no descriptor is free, say: whoever wants to connect waits for the next sweep
                logger.warning("a worker cannot connect to the shared engine yet: %s", error)
                self._epoll.modify(listener, 0)
                self._paused = True
                return
            told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, uid, _ = struct.unpack("3i", told)
            if uid != os.getuid() or len(self._by_descriptor) >= MAX_CONNECTIONS:
                self.refused += 1
                sock.close()
                continue
            sock.setblocking(False)
            connection = Connection(sock, pid, self._dirty)
            self._by_descriptor[connection.descriptor] = connection
            self._epoll.register(connection.descriptor, READ)

    def _receive(self, connection: Connection) -> None:
        try:
            size = connection.sock.recv_into(self._chunk)
            if not size:
                self.drop(connection)
                return
            for message in connection.frames.feed(self._chunk[:size]):
                if connection.asker is not None:
                    self._on_message(connection, message)
                else:
                    self._introduce(connection, message)
            connection.since = time.monotonic()
        except BlockingIOError:
            return
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.debug("a connection to the shared engine was ended: %s", error)
            self.refused += connection.asker is None
            self.drop(connection)
            return
        if self._is_full(connection):
            self._listen_to(connection)

    def _introduce(self, connection: Connection, message: object) -> None:
        if not isinstance(message, Hello):
            raise ValueError("the first message must be an introduction")
        if not hmac.compare_digest(message.token, self._token):
            raise ValueError("wrong secret")
        connection.asker = ("socket", message.asker, connection.descriptor)
        connection.frames.most = MAX_FRAME

    def _listen_to(self, connection: Connection) -> None:
        """Wait for what concerns a connection: not for requests while too many of its own wait already."""
        events = 0 if self._is_full(connection) else READ
        events |= WRITE if connection.out else 0
        if events != connection.events:
            self._epoll.modify(connection.descriptor, events)
            if events & ~connection.events & READ:
                connection.since = time.monotonic()
            connection.events = events


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        shutil.rmtree(path.parent, ignore_errors=True)
        raise
    return listener


class Connection:
    """One worker's socket, this side."""

    def __init__(self, sock: socket.socket, pid: int, dirty: set[Connection]) -> None:
        self.sock, self.pid = sock, pid
        self.descriptor = sock.fileno()
        self.open = True
        self.asker: tuple[str, int, int] | None = None
        self.episodes: set[EpisodeName] = set()
        """Those it said to be at play."""
        self.frames = Frames(decode_request, STRANGERS)
        self.out = bytearray()
        self.since = time.monotonic()
        self.events: int = READ
        self._dirty = dirty

    def reply(self, number: int, result: Result) -> None:
        """Queue an answer; it is sent with the others of its batch."""
        self.out += frame(answer_of(number, result))
        self._dirty.add(self)

    def flush(self) -> bool:
        """Send what the other side takes; False when it is gone."""
        try:
            while self.out:
                sent = self.sock.send(self.out)
                del self.out[:sent]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True
