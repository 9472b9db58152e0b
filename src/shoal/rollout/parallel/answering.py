"""Asking an engine that may fail: again, in halves, and with a new one in its place when it is beyond help."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.core.errors import EngineError
from shoal.rollout.samplers.sampler import Completion, Engine, Request, checked

logger = logging.getLogger(__name__)
Result = Completion | Exception


@dataclass(slots=True)
class Statistics:
    """What a shared engine did so far."""

    requests: int = 0
    batches: int = 0
    engine_seconds: float = 0.0
    failures: int = 0
    restarts: int = 0
    refused_connections: int = 0
    batch_sizes: deque[int] = field(default_factory=lambda: deque(maxlen=4096))


class Answerer:
    """An engine with what is done when it fails.

    Args:
        engine: what answers.
        retries: further attempts for a request that fails alone.
        restart: makes a new engine after a crash or hang.
        max_restarts: of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        retries: int,
        restart: Callable[[], Engine] | None,
        max_restarts: int,
    ) -> None:
        self.engine = engine
        self.statistics = Statistics()
        self.retries = retries
        self._restart, self._restarts_left = restart, max_restarts
        self._hung: str | None = None
        self.restarting = False
        """Whether a new engine is being made just now, which may take longer than any answer."""

    def answer(self, requests: list[Request], abandoned: Callable[[], bool]) -> list[Result]:
        """A completion or an exception for each request, in order.

        Args:
            requests: one batch.
            abandoned: whether nobody waits for the answers any more; then nothing is tried again.
        """
        if self._hung is not None:
            return [EngineError(self._hung)] * len(requests)
        answers = self._ask(requests, abandoned)
        return checked(self.engine, requests, answers)

    def replace(self, why: str) -> None:
        """The engine hangs and its thread was left behind: take another one, or refuse from now on."""
        if not self.restart(why):
            self._hung = f"the engine hangs: {why}"
            logger.error("%s; all further requests are refused", self._hung)

    def restart(self, why: str) -> bool:
        """Put a new engine in the place of the present one; False where that is not possible."""
        if self._restart is None or self._restarts_left <= 0:
            return False
        self._restarts_left -= 1
        logger.warning("the engine is restarted: %s", why)
        self.restarting = True
        try:
            self.engine = self._restart()
        except BaseException:  # whatever it is, it must not end the thread that everybody waits for
            logger.exception("the engine could not be restarted")
            return False
        finally:
            self.restarting = False
        self.statistics.restarts += 1
        return True

    def _ask(self, requests: list[Request], abandoned: Callable[[], bool], attempt: int = 0) -> list[Result]:
        """The engine's answers; when it fails, halves of the batch, so that what cannot be answered fails alone."""
        try:
            each = getattr(self.engine, "generate_each", None)
            completions = self.engine.generate(requests) if each is None else each(requests)
            if len(completions) != len(requests):
                raise EngineError(f"the engine gave {len(completions)} answers to {len(requests)} requests")
            if each is None:  # an engine that gives all or nothing
                return list(completions)
            failed = [i for i, answer in enumerate(completions) if isinstance(answer, Exception)]
            if not failed or attempt >= self.retries or abandoned():
                return list(completions)
            self.statistics.failures += len(failed)
            again = self._ask([requests[i] for i in failed], abandoned, attempt + 1)
            second = dict(zip(failed, again, strict=True))
            return [second.get(i, answer) for i, answer in enumerate(completions)]
        except Exception as error:
            return self._ask_again(requests, abandoned, attempt, error)

    def _ask_again(
        self, requests: list[Request], abandoned: Callable[[], bool], attempt: int, error: Exception
    ) -> list[Result]:
        if abandoned():
            return [error] * len(requests)
        self.statistics.failures += 1
        if not isinstance(error, EngineError):
            self.restart(f"it raised {type(error).__name__}: {error}")
        if len(requests) > 1:
            half = len(requests) // 2
            return self._ask(requests[:half], abandoned) + self._ask(requests[half:], abandoned)
        if attempt < self.retries:
            return self._ask(requests, abandoned, attempt + 1)
        if isinstance(error, EngineError):
            return [error]
        refused = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        refused.__cause__ = error
        return [refused]
