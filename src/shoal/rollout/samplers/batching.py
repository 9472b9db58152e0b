"""Engines as samplers: requests of many episodes are answered in batches, or each at once where an engine can do that.

An engine that works in batches (`generate`) is called in a thread of its own with all that waits. What an engine does
wrong ends the episode that asked and no other: a batch that fails is asked again, one request at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

from shoal.core.errors import EngineError, did_you_mean, format_error
from shoal.core.executors import Closing, OwnThread
from shoal.rollout.loops import LoopThread
from shoal.rollout.samplers.sampler import Completion, Engine, Request, checked, of_inner, vocabulary_of

logger = logging.getLogger(__name__)
Schedule = Literal["adaptive", "greedy", "barrier"]
Result = Completion | Exception


@dataclass(frozen=True)
class Asking:
    """How an engine is asked; see `ParallelConfig`."""

    schedule: Schedule = "adaptive"
    max_batch: int = 4096
    engine_timeout: float | None = None
    retries: int = 1
    restarts: int = 3

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ValueError(
                f"no schedule named {self.schedule!r}.{did_you_mean(self.schedule, get_args(Schedule))}"
            )
        if self.max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {self.max_batch}")


@dataclass(slots=True)
class Statistics:
    """What a sampler did so far."""

    requests: int = 0
    batches: int = 0
    engine_seconds: float = 0.0
    failures: int = 0
    restarts: int = 0


class Asked(Protocol):
    """What a driver asks: a sampler of an engine, with what it did so far."""

    statistics: Statistics
    playing: int
    """Episodes that may ask; in lockstep the engine waits for all of them."""

    def sample(self, request: Request) -> Awaitable[Completion]:
        """The completion of a request.

        Raises:
            EngineError: the engine could not answer.
            TimeoutError: it hangs.
        """

    def close(self) -> None:
        """End its thread."""


def as_sampler(engine: Any, asking: Asking = Asking(), *, inline: bool = False) -> Asked:
    """The sampler of an engine: its own where it has `async sample`, else one that gathers batches.

    Args:
        engine: what answers.
        asking: when it is asked, and what is done when it fails.
        inline: whether it is called in the thread of the event loop.
    """
    if inspect.iscoroutinefunction(getattr(engine, "sample", None)):
        return DirectSampler(engine, asking)
    return BatchingSampler(engine, asking, inline=inline)


class DirectSampler:
    """Asks an engine for each request at once: a slow answer holds up nobody."""

    def __init__(self, engine: Any, asking: Asking = Asking()) -> None:
        self.engine, self._asking = engine, asking
        self.statistics = Statistics()
        self.playing = 0
        self._under_way, self._since = 0, 0.0

    async def sample(self, request: Request) -> Completion:
        """The engine's completion; it is asked again where that fails."""
        for attempt in range(self._asking.retries + 1):
            self._enter()
            limit = self._asking.engine_timeout
            try:
                async with asyncio.timeout(limit) as scope:
                    return one_of(self.engine, request, await self.engine.sample(request))
            except Exception as error:
                if isinstance(error, TimeoutError) and scope.expired():
                    raise TimeoutError(f"the engine hangs: {_late(limit)}") from error
                self.statistics.failures += 1
                if attempt == self._asking.retries:
                    raise as_error(error) from error
            finally:
                self._leave()
        raise AssertionError

    def _enter(self) -> None:
        self.statistics.requests += 1
        self.statistics.batches += 1
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1

    def _leave(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self.statistics.engine_seconds += time.perf_counter() - self._since

    def close(self) -> None:
        """There is no thread to end."""


class BatchingSampler:
    """Gathers requests for an engine that answers in batches, and calls it in a thread of its own.

    Args:
        engine: what answers.
        asking: when it is asked, and what is done when it fails: one that crashes or hangs is restarted, where it can.
        inline: whether it is called in the thread of the event loop.
    """

    def __init__(self, engine: Engine, asking: Asking = Asking(), *, inline: bool = False) -> None:
        self.engine, self._asking, self._inline = engine, asking, inline
        self.statistics = Statistics()
        self._playing = 0
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._news: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = None if inline else OwnThread("shoal-engine")
        self._hangs: str | None = None

    @property
    def playing(self) -> int:
        """Episodes that may ask."""
        return self._playing

    @playing.setter
    def playing(self, count: int) -> None:
        self._playing = count
        if self._news is not None:
            self._news.set()

    def sample(self, request: Request) -> Awaitable[Completion]:
        """The completion of a request, in the next batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((request, future))
        if self._news is not None:
            self._news.set()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._work())
        return future

    def close(self) -> None:
        """End the engine's thread after its call; one that hangs is left behind."""
        if self._thread is not None:
            self._thread.end()

    # --- when a batch is launched
    async def _work(self) -> None:
        """Call the engine as long as something waits; the next batch is launched before answers are given."""
        batch: list[tuple[Request, asyncio.Future[Completion]]] = []
        try:
            while self._waiting:
                await self._gather()
                if batch := self._take():
                    deliver(batch, await self._answers([request for request, _ in batch]))
        except BaseException as error:  # the loop ends, or Ctrl-C
            deliver([*batch, *self._waiting], [as_error(error)] * (len(batch) + len(self._waiting)))
            self._waiting.clear()
            raise

    async def _gather(self) -> None:
        """In lockstep, wait until all who may ask have asked."""
        if self._inline or self._asking.schedule != "barrier":
            return
        while 0 < len(self._waiting) < min(self._playing, self._asking.max_batch):
            self._news = asyncio.Event()
            await self._news.wait()
        self._news = None

    def _take(self) -> list[tuple[Request, asyncio.Future[Completion]]]:
        """The next batch; nobody waits for some requests any more."""
        most = self._asking.max_batch
        taken, self._waiting = self._waiting[:most], self._waiting[most:]
        return [item for item in taken if not item[1].done()]

    # --- asking
    async def _answers(self, requests: Sequence[Request]) -> list[Result]:
        """A completion or an exception a request, whatever the engine does."""
        began = time.perf_counter()
        try:
            results = await self._call(requests)
            if any(isinstance(result, Exception) for result in results) and self._asking.retries:
                results = [
                    await self._again(request, result, self._asking.retries)
                    if isinstance(result, Exception)
                    else result
                    for request, result in zip(requests, results, strict=True)
                ]
            return results
        except Exception as error:
            attempts = self._asking.retries + (len(requests) > 1)
            return [await self._again(request, as_error(error), attempts) for request in requests]
        finally:
            statistics = self.statistics
            statistics.requests += len(requests)
            statistics.batches += 1
            statistics.engine_seconds += time.perf_counter() - began

    async def _again(self, request: Request, result: Exception, attempts: int) -> Result:
        """One request alone, so often."""
        found: Result = result
        for _ in range(attempts):
            self.statistics.failures += 1
            try:
                (found,) = await self._call([request])
            except Exception as error:
                found = as_error(error)
            if isinstance(found, Completion):
                return found
        return found

    async def _call(self, requests: Sequence[Request]) -> list[Result]:
        """What the engine says, each looked at; in its thread, which is left behind if it does not come back."""
        if self._hangs is not None:
            raise EngineError(self._hangs)
        work, limit = partial(ask, self.engine, tuple(requests)), self._asking.engine_timeout
        if self._thread is None:
            return self._or_restarted(work)
        running = asyncio.wrap_future(self._thread.submit(partial(self._or_restarted, work)))
        if limit is None:
            return await running
        done, _ = await asyncio.wait([running], timeout=limit)
        if done:
            return running.result()
        running.cancel()
        self._thread.end()
        self._thread = OwnThread("shoal-engine")
        why = f"the engine hangs: {_late(limit)}"
        if not await asyncio.wrap_future(self._thread.submit(partial(self._restart, why))):
            self._hangs = why
            logger.error("%s; all further requests are refused", why)
        raise TimeoutError(why)

    def _or_restarted(self, work: Callable[[], list[Result]]) -> list[Result]:
        """`work`, and a restart where the engine crashed."""
        try:
            return work()
        except EngineError as error:
            if error.__cause__ is not None:
                self._restart(str(error))
            raise

    def _restart(self, why: str) -> bool:
        """Restart the engine; False where that is not possible."""
        restart = getattr(self.engine, "restart", None)
        if restart is None or self.statistics.restarts >= self._asking.restarts:
            return False
        logger.warning("the engine is restarted: %s", why)
        try:
            restart()
        except Exception:
            logger.exception("the engine could not be restarted")
            return False
        self.statistics.restarts += 1
        return True


def ask(engine: Any, requests: tuple[Request, ...]) -> list[Result]:
    """What an engine says to a batch, each answer looked at.

    Raises:
        EngineError: it raised something, which is chained, or gave more or fewer answers.
    """
    try:
        each = getattr(engine, "generate_each", None)
        answers = engine.generate(requests) if each is None else each(requests)
    except (EngineError, TimeoutError):
        raise
    except BaseException as error:  # SystemExit, say: the engine's own
        main = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and main:  # Ctrl-C, which comes there alone
            raise
        raise EngineError(f"the engine failed: {format_error(error)}") from error
    if len(answers) != len(requests):
        raise EngineError(f"the engine gave {len(answers)} answers to {len(requests)} requests")
    return checked(engine, requests, answers)


def one_of(engine: Any, request: Request, answer: Any) -> Completion:
    """An answer, looked at."""
    (found,) = checked(engine, (request,), (answer,))
    if isinstance(found, Exception):
        raise found
    return found


def as_error(error: BaseException) -> Exception:
    """What an episode ends with when its engine raised this."""
    if isinstance(error, EngineError | TimeoutError):
        return error
    refused = EngineError(f"the engine failed: {format_error(error)}")
    refused.__cause__ = error
    return refused


def deliver(batch: Sequence[tuple[Request, asyncio.Future[Completion]]], results: Sequence[Result]) -> None:
    """Give each request its answer, if somebody still waits for it."""
    for (_, future), result in zip(batch, results, strict=True):
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _late(seconds: float | None) -> str:
    return f"it did not answer within {seconds} s"


class SharedLLMInferenceManager(Closing):
    """One engine for many threads: an `Engine` itself, which answers in batches what waits together.

    Args:
        engine: what answers.
        schedule: when a batch is launched: "adaptive" or "greedy", as soon as the engine is free and something waits;
            "barrier", when all that are playing have asked.
        max_batch: requests of one batch, at most.
        engine_timeout: seconds of one engine call, after which the engine counts as hung.
        request_timeout: seconds from a request to its answer, after which it is refused.
        retries: further attempts for a request that fails alone.
        max_restarts: of an engine that crashes or hangs and has `restart`.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        schedule: Schedule = "adaptive",
        max_batch: int = 4096,
        engine_timeout: float | None = None,
        request_timeout: float | None = None,
        retries: int = 1,
        max_restarts: int = 3,
    ) -> None:
        self.engine = engine
        asking = Asking(schedule, max_batch, engine_timeout, retries, max_restarts)
        self.sampler = as_sampler(engine, asking)
        self._request_timeout = request_timeout
        self.loop = LoopThread("shoal-inference")

    tokenizer = of_inner("tokenizer", "engine")
    level = of_inner("level", "engine")
    weights_version = of_inner("weights_version", "engine")
    statistics = of_inner("statistics", "sampler")

    @property
    def vocabulary(self) -> int | None:
        """How many tokens the engine's network knows."""
        return vocabulary_of(self.engine)

    @property
    def context(self) -> int | None:
        """Longest prompt and response together, in tokens."""
        return getattr(self.engine, "context", None)

    def generate(self, requests: Sequence[Request], timeout: float | None = None) -> list[Completion]:
        """One completion a request, in order; waits for its batch.

        Raises:
            EngineError: the engine could not answer.
            TimeoutError: no answer within `timeout` or `request_timeout`.
        """
        results = self.generate_each(requests, timeout)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results  # type: ignore[return-value]

    def generate_each(self, requests: Sequence[Request], timeout: float | None = None) -> list[Result]:
        """Like `generate`, with an exception in the place of each request that has no answer."""
        seconds = self._request_timeout if timeout is None else timeout

        async def all_of_them() -> list[Any]:
            asked = (within(seconds, self.sampler, request) for request in requests)
            return await asyncio.gather(*asked, return_exceptions=True)

        return self.loop.run(all_of_them()) if requests else []

    def close(self) -> None:
        """Refuse what waits and end the threads; may be called twice."""
        self.loop.close()
        self.sampler.close()


def within(seconds: float | None, sampler: Asked, request: Request) -> Awaitable[Completion]:
    """The completion of a request; a `TimeoutError` where that takes longer."""
    return sampler.sample(request) if seconds is None else _within(seconds, sampler, request)


async def _within(seconds: float, sampler: Asked, request: Request) -> Completion:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await sampler.sample(request)
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"the engine did not answer within {seconds} s") from error
        raise
