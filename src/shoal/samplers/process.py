"""A sampler in a process of its own on this machine, which computes while the caller does something else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from safetensors.torch import load_file, save_file

from shoal.core.errors import EngineError, format_error
from shoal.core.executors import Closing
from shoal.core.streams import Streams, framed, received, streams_of
from shoal.core.workers import WorkerProcess, dumps, ended_how
from shoal.samplers.asking import Loop, RetryPolicy, SamplerClient, as_error, generate, retried
from shoal.samplers.folders import copy_of, folder_for
from shoal.samplers.sampler import Completion, Facts, Request, Sampler, facts_of

WEIGHTS = "weights.safetensors"
"""In the folder by which whole weights travel; without it the folder is a LoRA adapter."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Complete this."""

    number: int
    request: Request


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Take over the weights or the LoRA adapter in a folder."""

    number: int
    version: int
    folder: str


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What came of a message of this number: a completion, nothing, or what failed."""

    number: int
    completion: Completion | None = None
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Ask | Load] = msgspec.msgpack.Decoder(Ask | Load).decode
_decode_answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode


class ProcessSampler(Closing):
    """Completes prompts by a sampler in a process of its own; one that dies is replaced, with the weights it had.

    Args:
        make: makes the sampler there; anything that cloudpickle can send.
        held: versions of the weights that it holds, see `Versions`.
    """

    def __init__(self, make: Callable[[], Sampler], held: int = 1) -> None:
        self._make, self._held = dumps(make), held
        self.retry_policy = RetryPolicy(None, 2, 0.0, 0.0)
        self.weights_version = 0
        self._loop, self._lock = Loop(), asyncio.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Completion | None]] = {}
        self._loaded: dict[int, TemporaryDirectory[str]] = {}  # by version, the last ones
        self._streams: Streams | None = None
        self._process: WorkerProcess
        self.tokenizer, self.level, self.capabilities, self.context, self.vocabulary = self._begin()

    generate = generate

    def _begin(self) -> Facts:
        """Start a process; what its sampler says of itself."""
        self._process = WorkerProcess(serve, (self._make,))
        try:
            said = pickle.loads(self._process.pipe.recv_bytes())  # of our own process
        except EOFError as error:
            raise EngineError(f"the sampler's process {self._end()} before it began") from error
        if isinstance(said, str):
            self._process.close()
            raise EngineError(f"the sampler could not begin in its process: {said}")
        return said  # type: ignore[no-any-return]

    def _end(self) -> str:
        """End the process; how it ended."""
        how = ended_how(self._process)
        self._process.close()
        return how

    async def sample(self, request: Request) -> Completion:
        """The answer of the sampler there.

        Raises:
            EngineError: it could not answer, or its process is gone.
        """
        answer = await self._loop.within(self._told(partial(Ask, request=request)))
        assert answer is not None
        return answer

    async def _told(self, message: Callable[[int], Ask | Load]) -> Completion | None:
        """Send a message with a number of its own; what comes of it."""
        async with self._lock:
            if self._streams is None:
                self._streams = await self._opened()
        return await self._sent(message, self._streams)

    async def _sent(self, message: Callable[[int], Ask | Load], streams: Streams) -> Completion | None:
        number = next(self._numbers)
        future: asyncio.Future[Completion | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        streams[1].write(framed(_encode(message(number))))
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    async def _opened(self) -> Streams:
        """Streams to the process, which is a new one where it has ended, with the weights that it had."""
        new = not self._process.alive()
        if new:
            await asyncio.to_thread(self._process.close)
            await asyncio.to_thread(self._begin)
        streams = await streams_of(self._process.pipe)
        self._loop.spawn(self._read(streams))
        for version, folder in self._loaded.items() if new else ():
            await self._sent(partial(Load, version=version, folder=folder.name), streams)
        return streams

    async def _read(self, streams: Streams) -> None:
        """Settle what is answered, up to the end of the process."""
        try:
            while True:
                answer = _decode_answer(await received(streams[0]))
                future = self._waiting.get(answer.number)
                if future is not None and not future.done():
                    if answer.error:
                        future.set_exception(EngineError(answer.error))
                    else:
                        future.set_result(answer.completion)
        except (OSError, EOFError):
            how = await asyncio.to_thread(self._end)
        finally:
            self._streams = None
            streams[1].transport.abort()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(EngineError(f"the sampler's process {how}"))

    # --- weights
    def load_weights(self, weights: dict[str, Any], version: int) -> None:
        """Take over weights by name; of tied ones, one travels."""
        single = {id(tensor): (name, tensor.contiguous()) for name, tensor in reversed(weights.items())}
        folder = folder_for(sum(tensor.nbytes for _, tensor in single.values()))
        save_file(dict(single.values()), Path(folder.name) / WEIGHTS)
        self._load(folder, version)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Take over the LoRA adapter of a folder."""
        self._load(copy_of(folder), version)

    def _load(self, folder: TemporaryDirectory[str], version: int) -> None:
        before = self._loaded
        others = [one for one in before if one != version]
        kept = others[max(0, len(others) - self._held + 1) :]
        self._loaded = {one: before[one] for one in kept} | {version: folder}
        try:
            told = partial(self._told, partial(Load, version=version, folder=folder.name))
            self._loop.run(retried(told, self.retry_policy, "weights", version))
        except BaseException:
            self._loaded = before
            folder.cleanup()
            raise
        for one in before.keys() - kept:
            before[one].cleanup()
        self.weights_version = version

    # --- the end
    def pids(self) -> list[int]:
        """The process."""
        return [self._process.pid]

    def close(self) -> None:
        """End the process; may be called twice."""
        self._loop.close()
        self._process.close()
        for folder in self._loaded.values():
            folder.cleanup()


# --- the process
def serve(pipe: Any, made_by: bytes) -> None:
    """Be the process, until the caller is gone."""
    try:
        inner: Any = pickle.loads(made_by)()
        facts = dumps(facts_of(inner))
    except Exception as error:
        pipe.send_bytes(dumps(format_error(error)))
        return
    pipe.send_bytes(facts)
    client, lock = SamplerClient(inner, retries=0), threading.Lock()

    def tell(answer: Answer) -> None:
        with lock, contextlib.suppress(OSError):  # the caller is gone, which the loop below sees
            pipe.send_bytes(_encode(answer))

    def sampled(number: int, future: Future[Completion]) -> None:
        if (error := future.exception()) is not None:
            tell(Answer(number, error=str(as_error(error))))
        else:
            tell(Answer(number, future.result()))

    with contextlib.suppress(EOFError, OSError):
        while True:
            message = _decode(pipe.recv_bytes())
            if isinstance(message, Ask):
                asked = client.loop.submit(client.sample(message.request))
                asked.add_done_callback(partial(sampled, message.number))
            else:
                tell(_loaded(inner, message))
    os._exit(0)


def _loaded(inner: Any, message: Load) -> Answer:
    folder = Path(message.folder)
    try:
        if (folder / WEIGHTS).is_file():
            inner.load_weights(load_file(folder / WEIGHTS), message.version)
        else:
            inner.load_adapter(folder, message.version)
    except Exception as error:
        return Answer(message.number, error=format_error(error))
    return Answer(message.number)
