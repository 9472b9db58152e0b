"""The link of episodes that are played in the caller, one after another, without a shared engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import EngineError
from shoal.rollout.samplers.sampler import Completion, Key, checked


@dataclass
class LocalLink:
    """A link without a queue, for one episode at a time: the engine is called by the worker itself."""

    engine: Any
    on_report: Callable[[Any, bytes], None]
    retries: int = 1
    failures: int = field(default=0)

    def connect(self, asker: int) -> LocalLink:
        """This object."""
        del asker
        return self

    def generate(self, requests: Any, timeout: float | None = None) -> list[Completion]:
        """Ask the engine, again if it fails."""
        del timeout
        for attempt in range(self.retries + 1):
            try:
                answers = checked(self.engine, requests, self.engine.generate(requests))
                for answer in answers:
                    if isinstance(answer, Exception):
                        raise answer
                return answers  # type: ignore[return-value]
            except Exception as error:
                self.failures += 1
                if attempt < self.retries:
                    continue
                if isinstance(error, EngineError):
                    raise
                raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error
        raise AssertionError

    def entered(self, keys: Any) -> None:
        """Nobody waits for others here."""

    def left(self, key: Key, report: bytes = b"") -> None:
        """An episode is over."""
        del key
        self.on_report(0, report)
