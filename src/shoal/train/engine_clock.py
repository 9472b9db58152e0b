"""How long an engine worked, measured around it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shoal.rollout.samplers.sampler import Completion, Engine, EngineAround, Request


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


class _Timed(EngineAround):
    def __init__(self, engine: Engine, clock: EngineClock) -> None:
        super().__init__(engine)
        self._clock = clock

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        began = time.perf_counter()
        try:
            return super().generate(requests)
        finally:
            self._clock.seconds += time.perf_counter() - began
