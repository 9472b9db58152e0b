"""Weights of several versions beside each other: each request names those that write its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from shoal.core.errors import EngineError
from shoal.core.executors import Closing
from shoal.samplers.asking import RejectedError, SamplerClient, generate
from shoal.samplers.registry import close_engine
from shoal.samplers.sampler import Completion, Request, Sampler, capabilities_of, of_inner, vocabulary_of


class Versions(Closing):
    """A sampler that holds the last weights that it was given, each version in a copy of its own.

    Args:
        make: makes one copy.
        held: how many there are.
    """

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
        version = self.weights_version if request.version is None else request.version
        if version not in self._of:
            raise RejectedError(f"weights of version {version} are not held, only {sorted(self._of)}")
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
        taken = version if version in self._of or len(self._of) < len(self.copies) else min(self._of)
        if self._open[taken]:
            raise EngineError(
                f"weights of version {version} cannot replace those of version {taken}, which {self._open[taken]} "
                f"requests are still answered by"
            )
        free = (copy for copy in self.copies if copy not in self._of.values())
        copy = self._of.pop(taken, None) or next(free)
        getattr(copy.engine, method)(what, version)
        self._of[version] = copy

    def close(self) -> None:
        """End the copies."""
        for copy in self.copies:
            copy.close()
            close_engine(copy.engine)


class At:
    """A sampler as it is at one version of its weights, `weights_version`, which may be set.

    Args:
        inner: holds weights by version.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self.weights_version = inner, 0

    tokenizer, level = of_inner("tokenizer"), of_inner("level")
    capabilities, vocabulary, context = of_inner("capabilities"), of_inner("vocabulary"), of_inner("context")
    retry_policy, restart = of_inner("retry_policy"), of_inner("restart")

    async def sample(self, request: Request) -> Completion:
        """The answer of this version."""
        return await self.inner.sample(replace(request, version=self.weights_version))  # type: ignore[no-any-return]

    generate = generate
