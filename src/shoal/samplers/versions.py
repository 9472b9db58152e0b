"""Weights of several versions beside each other: each request names those that write its answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from shoal.core.errors import EngineError
from shoal.core.executors import Closing
from shoal.samplers.asking import Loop, RejectedError, SamplerClient, generate
from shoal.samplers.folders import copy_of
from shoal.samplers.registry import close_engine
from shoal.samplers.sampler import Completion, Request, Sampler, capabilities_of, of_inner, vocabulary_of


class Versions(Closing):
    """A sampler that holds the last weights that it was given, each version in a copy of its own."""

    def __init__(self, make: Callable[[], Sampler], held: int) -> None:
        self.copies = [SamplerClient(make(), retries=0) for _ in range(held)]
        self._of: dict[int, SamplerClient] = {}  # by version
        self._open = Counter[int]()
        first = self.first = self.copies[0].engine
        self.capabilities, self.vocabulary = capabilities_of(first), vocabulary_of(first)
        self.context: int | None = getattr(first, "context", None)

    tokenizer = of_inner("tokenizer", "first")
    level = of_inner("level", "first")

    @property
    def weights_version(self) -> int:
        """The newest version; 0 before any weights were given."""
        return max(self._of, default=0)

    async def sample(self, request: Request) -> Completion:
        """The answer of the version that the request names, else of the newest.

        Raises:
            EngineError: its weights are not held.
        """
        version = _wanted(request, self._of)
        self._open[version] += 1
        try:
            return await self._of[version].sample(request)
        finally:
            self._open[version] -= 1

    generate = generate

    def load_weights(self, weights: Any, version: int) -> None:
        """Hold these weights by name, in the place of the oldest ones where there is no room."""
        self._hold(version, "load_weights", weights)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Hold the LoRA adapter of a folder, in the place of the oldest one where there is no room."""
        self._hold(version, "load_adapter", folder)

    def _hold(self, version: int, method: str, what: Any) -> None:
        taken = _replaced(version, self._of, self._open, len(self.copies))
        free = (copy for copy in self.copies if copy not in self._of.values())
        copy = self._of.pop(taken, None) or next(free)
        getattr(copy.engine, method)(what, version)
        self._of[version] = copy

    def close(self) -> None:
        """End the copies."""
        for copy in self.copies:
            copy.close()
            close_engine(copy.engine)


@dataclass
class Held:
    """Weights that one copy can take over."""

    load: Callable[[], None]
    folder: TemporaryDirectory[str] | None = None  # of an adapter
    expected: Sequence[float] | None = None  # log-probabilities, where the sampler can be checked by them


class OneCopy(Closing):
    """A sampler with one copy of its weights that answers by several versions, one after the other.

    A request waits until no answer of another version is under way, nor was for as long as the last change took: what
    is played beside it by other weights is not interrupted at each pause. For vLLM and servers.

    Args:
        inner: answers; it is closed with this one.
        held: how many versions are kept. They are kept as they were given, so they may not change afterwards.
    """

    def __init__(self, inner: Any, held: int) -> None:
        self.inner, self._count = inner, held
        self._of: dict[int, Held] = {}  # by version
        self._open = Counter[int]()
        self._now: int | None = None  # what the copy has; None while it changes
        self._changes: dict[int, asyncio.Task[None]] = {}
        self._loop, self._turn, self._quiet = Loop(), asyncio.Lock(), asyncio.Event()
        self._under_way, self._quiet_since, self._seconds = 0, 0.0, 0.0
        self._loading = threading.Lock()
        self.capabilities, self.vocabulary = capabilities_of(inner), vocabulary_of(inner)
        if hasattr(inner, "confirm"):
            self.confirm = self._confirm

    tokenizer, level, context = of_inner("tokenizer"), of_inner("level"), of_inner("context")
    retry_policy, restart, probe = of_inner("retry_policy"), of_inner("restart"), of_inner("probe")

    @property
    def weights_version(self) -> int:
        """The newest version; 0 before any weights were given."""
        return max(self._of, default=0)

    async def sample(self, request: Request) -> Completion:
        """The answer of the version that the request names, else of the newest; from any event loop.

        Raises:
            EngineError: its weights are not held, or the copy does not take them.
        """
        return await self._loop.within(self._answer(request))

    generate = generate

    async def _answer(self, request: Request) -> Completion:
        version = _wanted(request, self._of)
        self._open[version] += 1
        try:
            while self._now != version:
                await asyncio.shield(self._change(version))
            self._under_way += 1
            self._quiet.clear()
            try:
                return await self.inner.sample(request)  # type: ignore[no-any-return]
            finally:
                self._under_way -= 1
                self._rest()
        finally:
            self._open[version] -= 1

    def _rest(self) -> None:
        if not self._under_way:
            self._quiet_since = time.monotonic()
            self._quiet.set()

    def _change(self, version: int) -> asyncio.Task[None]:
        """What lets the copy have a version, which all requests of it wait for."""
        if version not in self._changes:
            self._changes[version] = self._loop.spawn(self._take_over(version))
        return self._changes[version]

    async def _take_over(self, version: int) -> None:
        try:
            async with self._turn:
                while (left := self._quiet_since + self._seconds - time.monotonic()) > 0 or self._under_way:
                    await (self._quiet.wait() if self._under_way else asyncio.sleep(left))
                self._now, began = None, time.monotonic()
                await asyncio.to_thread(self._load, version)
                self._now, self._seconds = version, time.monotonic() - began
                self._rest()
        finally:
            del self._changes[version]

    def _load(self, version: int) -> None:
        held = self._of[version]
        with self._loading:
            held.load()
            if held.expected is not None:
                self.inner.confirm(held.expected)

    # --- weights
    def load_weights(self, weights: Any, version: int) -> None:
        """Hold these weights by name, in the place of the oldest ones where there is no room."""
        self._hold(version, Held(partial(self.inner.load_weights, weights, version)))

    def load_adapter(self, folder: Path, version: int) -> None:
        """Hold a copy of the LoRA adapter of a folder, in the place of the oldest one where there is no room."""
        copied = copy_of(folder)
        self._hold(version, Held(partial(self.inner.load_adapter, Path(copied.name), version), copied))

    def _hold(self, version: int, new: Held) -> None:
        """The first ones are taken over at once, so that a copy that takes none is known from the start."""
        taken = _replaced(version, self._of, self._open, self._count)
        first = not self._of
        self._forget(self._of.pop(taken, None))
        self._of[version] = new
        if self._now == version:  # others before, of the same number
            self._now = None
        if first:
            self._loop.run(self._at_once(version))

    async def _at_once(self, version: int) -> None:
        await self._change(version)

    def _confirm(self, expected: Sequence[float]) -> None:
        """Have the copy checked, now or when it takes over the newest weights, and whenever it may have lost them."""
        newest = self.weights_version
        self._of[newest].expected = expected
        with self._loading:
            if self._now == newest:
                self.inner.confirm(expected)

    @staticmethod
    def _forget(held: Held | None) -> None:
        if held is not None and held.folder is not None:
            held.folder.cleanup()

    def close(self) -> None:
        """End the copy."""
        self._loop.close()
        close_engine(self.inner)
        for held in self._of.values():
            self._forget(held)


def _wanted(request: Request, held: Mapping[int, Any]) -> int:
    """The version that answers a request."""
    version = max(held, default=0) if request.version is None else request.version
    if version not in held:
        raise RejectedError(f"weights of version {version} are not held, only {sorted(held)}")
    return version


def _replaced(version: int, held: Mapping[int, Any], answering: Mapping[int, int], count: int) -> int:
    """The version whose place a new one takes."""
    taken = version if version in held or len(held) < count else min(held)
    if answering[taken]:
        raise EngineError(
            f"weights of version {version} cannot replace those of version {taken}, which {answering[taken]} "
            f"requests are still answered by"
        )
    return taken


class At:
    """A sampler as it is at one version of its weights, `weights_version`, which may be set."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.weights_version = inner, 0

    tokenizer, level = of_inner("tokenizer"), of_inner("level")
    capabilities, vocabulary, context = of_inner("capabilities"), of_inner("vocabulary"), of_inner("context")
    retry_policy, restart = of_inner("retry_policy"), of_inner("restart")

    async def sample(self, request: Request) -> Completion:
        """The answer of this version."""
        return await self.inner.sample(replace(request, version=self.weights_version))  # type: ignore[no-any-return]

    generate = generate
