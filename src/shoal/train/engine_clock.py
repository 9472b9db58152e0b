"""How long an engine worked, measured around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shoal.rollout.engine import Completion, Engine, Request


class EngineClock:
    """Adds up the seconds that engines spend on completions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def lap(self) -> float:
        """The seconds since the last lap."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def around(self, engine: Engine) -> Engine:
        """The same engine, timed."""
        return _Timed(engine, self)


class _Timed:
    def __init__(self, engine: Engine, clock: EngineClock) -> None:
        self._engine = engine
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    @property
    def level(self) -> Any:
        return self._engine.level

    @property
    def weights_version(self) -> int:
        return self._engine.weights_version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self._engine.weights_version = version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        began = time.perf_counter()
        try:
            return self._engine.generate(requests)
        finally:
            self._clock.seconds += time.perf_counter() - began
