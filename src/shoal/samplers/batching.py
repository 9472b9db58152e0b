"""What a driver asks: a sampler whose requests are answered at once, or in batches where it works in batches.

One that works in batches (`generate`) is called in a thread of its own with all that waits. What fails is asked again,
one request at a time, and a failure ends the episode that asked and no other.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from shoal.core.errors import EngineError, did_you_mean, format_error
from shoal.core.executors import Closing, OwnThread
from shoal.samplers.loops import LoopThread
from shoal.samplers.sampler import (
    Completion,
    Request,
    Sampler,
    capabilities_of,
    checked,
    of_inner,
    vocabulary_of,
)

logger = logging.getLogger(__name__)
Schedule = Literal["adaptive", "greedy", "barrier"]
Result = Completion | Exception


@dataclass(frozen=True)
class Asking:
    """How a sampler is asked; see `ParallelConfig`."""

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
    """What was asked of a sampler so far."""

    requests: int = 0
    batches: int = 0
    engine_seconds: float = 0.0
    failures: int = 0
    restarts: int = 0


class Asked(ABC):
    """What a driver asks; `DirectSampler` and `BatchingSampler` say when the sampler is called.

    Args:
        sampler: what answers.
        asking: when it is asked, and what is done when it fails: one that crashes or hangs is restarted, where it can.
    """

    def __init__(self, sampler: Any, asking: Asking = Asking()) -> None:
        self.sampler, self.asking = sampler, asking
        self.statistics = Statistics()
        self._playing, self._news = 0, asyncio.Event()
        self._vocabulary, self._exact = vocabulary_of(sampler), capabilities_of(sampler).trainable

    @property
    def playing(self) -> int:
        """Episodes that may ask; in lockstep a batch waits for all of them."""
        return self._playing

    @playing.setter
    def playing(self, count: int) -> None:
        self._playing = count
        self._news.set()

    @abstractmethod
    def sample(self, request: Request) -> Awaitable[Completion]:
        """The completion of a request.

        Raises:
            EngineError: the sampler could not answer.
            TimeoutError: it hangs.
        """

    def close(self) -> None:  # noqa: B027
        """End its thread, if it has one."""

    def checked(self, request: Request, answer: Any) -> Completion:
        """An answer that can be the one to its request; an `EngineError` if it cannot."""
        return checked(request, answer, self._vocabulary, exact=self._exact)

    def restart(self, why: str) -> bool:
        """Restart the sampler; False where that is not possible."""
        restart = getattr(self.sampler, "restart", None)
        if restart is None or self.statistics.restarts >= self.asking.restarts:
            return False
        self.statistics.restarts += 1
        logger.warning("the sampler is restarted: %s", why)
        try:
            restart()
        except Exception:
            logger.exception("the sampler could not be restarted")
            return False
        return True


def as_sampler(sampler: Any, asking: Asking = Asking(), *, inline: bool = False) -> Asked:
    """How a driver asks a sampler: each request at once where it has `async sample`, else in batches.

    Args:
        sampler: what answers.
        asking: when it is asked, and what is done when it fails.
        inline: whether it is called in the thread of the event loop.
    """
    if inspect.iscoroutinefunction(getattr(sampler, "sample", None)):
        return DirectSampler(sampler, asking)
    return BatchingSampler(sampler, asking, inline=inline)


class DirectSampler(Asked):
    """Asks a sampler for each request at once: a slow answer holds up nobody."""

    def __init__(self, sampler: Any, asking: Asking = Asking()) -> None:
        super().__init__(sampler, asking)
        self._under_way, self._since, self._answered = 0, 0.0, 0
        self._restarting = asyncio.Lock()

    async def sample(self, request: Request) -> Completion:
        """The completion of a request; the sampler is asked again where that fails."""
        for attempt in range(self.asking.retries + 1):
            answered, restarts = self._answered, self.statistics.restarts
            self._enter()
            try:
                async with asyncio.timeout(self.asking.engine_timeout) as limit:
                    answer = await self.sampler.sample(request)
                self._answered += 1
                return self.checked(request, answer)
            except Exception as error:
                failed = as_error(error)
                late = isinstance(error, TimeoutError) and limit.expired()
                if late:
                    failed = TimeoutError(f"the sampler hangs: {_late(self.asking.engine_timeout)}")
                hangs = late and self._answered == answered  # it answered nobody else either
                if hangs or not isinstance(error, EngineError | TimeoutError):
                    await self._restart_once(restarts, str(failed))
                self.statistics.failures += 1
                if attempt == self.asking.retries:
                    raise failed from error
            finally:
                self._leave()
        raise AssertionError

    async def _restart_once(self, restarts: int, why: str) -> None:
        """Restart the sampler unless that was done since there had been so many restarts."""
        async with self._restarting:
            if self.statistics.restarts == restarts:
                await asyncio.to_thread(self.restart, why)

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


class BatchingSampler(Asked):
    """Gathers requests for a sampler that works in batches, and calls it in a thread of its own.

    Args:
        sampler: what answers.
        asking: when it is asked, and what is done when it fails.
        inline: whether it is called in the thread of the event loop.
    """

    def __init__(self, sampler: Sampler, asking: Asking = Asking(), *, inline: bool = False) -> None:
        super().__init__(sampler, asking)
        self._inline = inline
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._task: asyncio.Task[None] | None = None
        self._thread = None if inline else OwnThread("shoal-sampler")
        self._hangs = False

    def sample(self, request: Request) -> Awaitable[Completion]:
        """The completion of a request, in the next batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((request, future))
        self._news.set()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._work())
        return future

    def close(self) -> None:
        """End the sampler's thread after its call; one that hangs is left behind."""
        if self._thread is not None:
            self._thread.end()

    # --- when a batch is launched
    async def _work(self) -> None:
        """Call the sampler as long as something waits; the next batch is launched before answers are given."""
        while self._waiting:
            await self._gather()
            most = self.asking.max_batch
            taken, self._waiting = self._waiting[:most], self._waiting[most:]
            batch = [item for item in taken if not item[1].done()]  # nobody waits for the others any more
            if batch:
                deliver(batch, await self._answers([request for request, _ in batch]))

    async def _gather(self) -> None:
        """In lockstep, wait until all who may ask have asked."""
        if self._inline or self.asking.schedule != "barrier":
            return
        while 0 < len(self._waiting) < min(self.playing, self.asking.max_batch):
            self._news.clear()
            await self._news.wait()

    # --- asking
    async def _answers(self, requests: Sequence[Request]) -> list[Result]:
        """A completion or an exception a request; what failed is asked again, one request at a time."""
        began, statistics = time.perf_counter(), self.statistics
        try:
            results = await self._call(requests)
            failed = [place for place, result in enumerate(results) if isinstance(result, Exception)]
            attempts = self.asking.retries + (len(failed) > 1)  # one may have failed the whole batch
            for place in failed:
                for _ in range(attempts):
                    statistics.failures += 1
                    (results[place],) = await self._call([requests[place]])
                    if isinstance(results[place], Completion):
                        break
            return results
        finally:
            statistics.requests += len(requests)
            statistics.batches += 1
            statistics.engine_seconds += time.perf_counter() - began

    async def _call(self, requests: Sequence[Request]) -> list[Result]:
        """What the sampler answers, in its thread, which is left behind if it does not come back."""
        work, limit = partial(self._ask, tuple(requests)), self.asking.engine_timeout
        if self._thread is None:
            return work()
        late = TimeoutError(f"the sampler hangs: {_late(limit)}")
        if self._hangs:
            return [late] * len(requests)
        running = asyncio.wrap_future(self._thread.submit(work))
        if limit is None:
            return await running
        done, _ = await asyncio.wait([running], timeout=limit)
        if done:
            return running.result()
        running.cancel()
        self._thread.end()
        self._thread = OwnThread("shoal-sampler")
        if not await asyncio.wrap_future(self._thread.submit(partial(self.restart, str(late)))):
            self._hangs = True
            logger.error("%s; all further requests are refused", late)
        return [late] * len(requests)

    def _ask(self, requests: tuple[Request, ...]) -> list[Result]:
        """What the sampler answers, each answer checked; it is restarted if it crashed."""
        try:
            answers = self.sampler.generate(requests)
        except (EngineError, TimeoutError) as error:
            return [error] * len(requests)
        except BaseException as error:  # SystemExit, say: the sampler's own
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C, which comes there alone
            self.restart(format_error(error))
            return [as_error(error)] * len(requests)
        if len(answers) != len(requests):
            returned = f"the sampler returned {len(answers)} completions for {len(requests)} requests"
            return [EngineError(returned)] * len(requests)
        return [self._result(*pair) for pair in zip(requests, answers, strict=True)]

    def _result(self, request: Request, answer: Any) -> Result:
        try:
            return self.checked(request, answer)
        except EngineError as error:
            return error


def as_error(error: BaseException) -> Exception:
    """What an episode ends with when its sampler raised this."""
    if isinstance(error, EngineError | TimeoutError):
        return error
    failed = EngineError(f"the sampler failed: {format_error(error)}")
    failed.__cause__ = error
    return failed


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
    """One sampler for many threads, and a sampler itself: what waits together is answered in batches.

    Args:
        engine: what answers.
        schedule: when a batch is launched: "adaptive" or "greedy", as soon as the sampler is free and something waits;
            "barrier", when all that are playing have asked.
        max_batch: requests of one batch, at most.
        engine_timeout: seconds of one call, after which the sampler counts as hung.
        request_timeout: seconds from a request to its answer, after which it is refused.
        retries: further attempts for a request that fails alone.
        max_restarts: of a sampler that crashes or hangs and has `restart`.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        engine: Sampler,
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
        """How many tokens the network knows."""
        return vocabulary_of(self.engine)

    @property
    def context(self) -> int | None:
        """Longest prompt and response together, in tokens."""
        return getattr(self.engine, "context", None)

    def generate(self, requests: Sequence[Request], timeout: float | None = None) -> list[Completion]:
        """One completion a request, in order; waits for its batch.

        Raises:
            EngineError: the sampler could not answer.
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


async def within(seconds: float | None, sampler: Asked, request: Request) -> Completion:
    """The completion of a request; a `TimeoutError` where that takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await sampler.sample(request)
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"the sampler did not answer within {seconds} s") from error
        raise
