"""How samplers are asked: one event loop, one rule for retries, one adapter for engines that work in batches.

A request has one `RetryPolicy`: that of its engine (servers, replicas), else that of the rollout. A request that fails
ends the episode that asked and no other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from shoal.core.configuration import check_settings
from shoal.core.errors import EngineError, did_you_mean, format_error
from shoal.core.executors import Closing, OwnThread
from shoal.core.seeding import Name, stream
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
T = TypeVar("T")
Schedule = Literal["adaptive", "barrier"]
END_SECONDS = 5.0
"""For which what runs is waited for when its owner is closed."""


class RejectedError(EngineError):
    """The request would be rejected again: it is not retried.

    Args:
        message: what is wrong with it.
        code: what a server calls it, such as "context_length_exceeded"; empty if it does not say.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


# --- one event loop
class Loop(Closing):
    """What an owner runs in the event loop of this process; closing it cancels that, and nothing of other owners.

    Driver, HTTP and judges share that loop, a daemon thread's, so none of them waits for another thread.

    Args:
        own: the name of a thread with a loop of its own, for code that may block.
    """

    def __init__(self, own: str | None = None) -> None:
        self._own, self._found = own, None if own is None else _started(own)
        self._lock, self._closed = threading.Lock(), False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, which starts when it is first needed."""
        self._found = self._found or _shared_loop()
        return self._found

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run `work` in the loop, from any thread.

        Raises:
            RejectedError: this was closed.
        """
        with self._lock:
            self._check_open(work)
            return asyncio.run_coroutine_threadsafe(self._noted(work), self.loop)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` as a task, from inside the loop; raises like `submit`."""
        self._check_open(work)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """What `work` returns; it is cancelled where that takes longer than `timeout` or this thread is interrupted."""
        future = self.submit(work)
        try:
            return future.result(timeout)
        except concurrent.futures.CancelledError as error:
            raise RejectedError("the sampler was closed before it answered") from error
        except BaseException:
            future.cancel()
            raise

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, for a coroutine of any event loop."""
        here = asyncio.get_running_loop() is self.loop
        running = self.spawn(work) if here else asyncio.wrap_future(self.submit(work))
        try:
            return await running
        except asyncio.CancelledError as error:
            if not self._closed:
                raise
            raise RejectedError("the sampler was closed before it answered") from error

    async def _noted(self, work: Coroutine[Any, Any, T]) -> T:
        return await self.spawn(work)

    def _check_open(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._closed:
            work.close()
            raise RejectedError("the sampler was closed")

    def close(self) -> None:
        """Cancel what runs, and wait for its end; may be called twice."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed or self._found is None:
            return
        if asyncio._get_running_loop() is self._found:
            for task in self._tasks - {asyncio.current_task()}:  # type: ignore[arg-type]
                task.cancel()
        else:
            with contextlib.suppress(concurrent.futures.TimeoutError, RuntimeError):
                asyncio.run_coroutine_threadsafe(self._cancel(), self._found).result(END_SECONDS)
        if self._own is not None:
            self._found.call_soon_threadsafe(self._found.stop)

    async def _cancel(self) -> None:
        tasks = self._tasks if self._own is None else asyncio.all_tasks() - {asyncio.current_task()}
        for task in (running := [task for task in tasks if task is not None]):
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=END_SECONDS / 2)


def _started(name: str) -> asyncio.AbstractEventLoop:
    """An event loop that runs in a daemon thread until it is stopped."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_forever()
        loop.run_until_complete(asyncio.sleep(0))  # connections that were closed
        loop.close()

    threading.Thread(target=run, daemon=True, name=name).start()
    return loop


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _shared_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        _loop = _loop or _started("shoal-loop")
        return _loop


def _forget_loop() -> None:
    """In a process that was forked there is no thread of it."""
    global _lock, _loop
    _lock, _loop = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_loop)


def run_here(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, run in the caller's thread; in another one where the caller is in an event loop itself.

    The first Ctrl-C waits for the step that is under way, a second one does not.
    """
    if asyncio._get_running_loop() is None:
        with asyncio.Runner() as runner:
            runner.get_loop().set_exception_handler(_without_ctrl_c)
            return runner.run(work)
    with Loop("shoal-rollout") as aside:
        return aside.run(work)


def _without_ctrl_c(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what a task of the loop raised, but not Ctrl-C, which its caller gets."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


# --- one rule for retries
@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a request is asked, and how long is waited."""

    timeout: float | None = 120.0  # seconds of one attempt
    retries: int = 4  # attempts after the first
    backoff: float = 0.25  # seconds before the first retry; doubled for each further one
    max_backoff: float = 8.0  # seconds between two attempts at most, also where the server asks for more
    patience: float | None = None  # seconds in which further attempts begin, in the place of `retries`

    def __post_init__(self) -> None:
        check_settings(self, ["timeout", "patience"], retries=0, backoff=0, max_backoff=self.backoff)

    def pause(self, attempt: int, *name: Name) -> float:
        """Seconds after an attempt: doubled each time, and spread so that clients do not come back together."""
        base = min(self.backoff * 2.0 ** min(attempt - 1, 99), self.max_backoff)
        return base * (0.5 + 0.5 * float(stream(0, "retry", *name, attempt).random())) if base else 0.0


async def retried(attempt: Callable[[], Awaitable[T]], policy: RetryPolicy, *name: Name) -> T:
    """What an attempt gives, which is made again after an `EngineError` or a timeout.

    Args:
        attempt: makes it; an error may have `retry_after`, the seconds that a server asks for.
        policy: how often.
        *name: of the noise of its pauses.

    Raises:
        RejectedError: there is no use in a further one.
        EngineError: none succeeded.
        TimeoutError: the last one took too long.
    """
    began, number = time.monotonic(), 0
    while True:
        number += 1
        try:
            return await attempt()
        except RejectedError:
            raise
        except (EngineError, TimeoutError) as error:
            asked_for = min(getattr(error, "retry_after", 0.0), policy.max_backoff)
            pause, used = max(asked_for, policy.pause(number, *name)), time.monotonic() - began
            if number > policy.retries if policy.patience is None else used + pause > policy.patience:
                if number == 1:
                    raise
                message = f"no answer in {number} attempts over {used:.1f} s; the last: {error}"
                raise (TimeoutError if isinstance(error, TimeoutError) else EngineError)(message) from error
            if pause:
                logger.warning("%s; attempt %d in %.2f s", error, number + 1, pause)
        await asyncio.sleep(pause)


# --- one door
@dataclass(slots=True)
class Statistics:
    """What was asked of a sampler so far."""

    requests: int = 0
    batches: int = 0
    engine_seconds: float = 0.0
    restarts: int = 0


class SamplerClient(Closing):
    """Asks one sampler for many threads and coroutines: retries, checks answers, restarts one that crashed or hangs.

    Args:
        engine: what answers.
        schedule: when an engine that works in batches runs: "adaptive", as soon as it is free and something waits;
            "barrier", when all that are playing have asked.
        max_batch: requests of one batch, at most.
        engine_timeout: seconds of one call, after which the engine counts as hung. Like `retries`, it is not of engines
            that have a `retry_policy`.
        retries: attempts after the first.
        max_restarts: of an engine that crashes or hangs and has `restart`.
        inline: whether an engine that works in batches is called in the thread of the event loop.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        engine: Sampler,
        *,
        schedule: Schedule = "adaptive",
        max_batch: int = 4096,
        engine_timeout: float | None = None,
        retries: int = 1,
        max_restarts: int = 3,
        inline: bool = False,
    ) -> None:
        if schedule not in get_args(Schedule):
            raise ValueError(f"no schedule named {schedule!r}.{did_you_mean(schedule, get_args(Schedule))}")
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.engine, self.loop, self.statistics = engine, Loop(), Statistics()
        own = getattr(engine, "retry_policy", None)
        self._policy = own or RetryPolicy(engine_timeout, retries, 0.0, 0.0)
        self._timeout = None if own else engine_timeout
        self._most_restarts, self._restarting = max_restarts, threading.Lock()
        self.vocabulary, self._exact = vocabulary_of(engine), capabilities_of(engine).trainable
        self.context: int | None = getattr(engine, "context", None)
        self._playing = self._under_way = self._answered = 0
        self._since = 0.0
        self._batched: Batched | None = None
        if not inspect.iscoroutinefunction(getattr(engine, "sample", None)):
            barrier = schedule == "barrier" and not inline
            self._batched = Batched(self, max_batch, engine_timeout, barrier=barrier, inline=inline)

    tokenizer = of_inner("tokenizer", "engine")
    level = of_inner("level", "engine")
    weights_version = of_inner("weights_version", "engine")

    @property
    def playing(self) -> int:
        """Episodes that may ask; with `schedule="barrier"` a batch waits for all of them."""
        return self._playing

    @playing.setter
    def playing(self, count: int) -> None:
        self._playing = count
        if self._batched is not None:
            self._batched.look()

    async def sample(self, request: Request) -> Completion:
        """The completion of a request; in one event loop at a time.

        Raises:
            EngineError: the sampler could not answer.
            TimeoutError: it hangs.
        """
        self.statistics.requests += 1
        return await retried(
            partial(self._attempt, request), self._policy, request.key.seed, *request.key.path
        )

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order; raises the first failure after all have ended."""

        async def all_of_them() -> list[Completion | BaseException]:
            return await asyncio.gather(*map(self.sample, requests), return_exceptions=True)

        results = self.loop.run(all_of_them())
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]

    def close(self) -> None:
        """Refuse what waits and end the engine's thread; may be called twice."""
        self.loop.close()
        if self._batched is not None:
            self._batched.close()

    # --- one attempt
    async def _attempt(self, request: Request) -> Completion:
        ask = self._ask if self._batched is None else self._batched.sample
        return checked(request, await ask(request), self.vocabulary, exact=self._exact)

    async def _ask(self, request: Request) -> Any:
        """What an engine answers that is asked for each request at once."""
        statistics, engine = self.statistics, self.engine
        answered, restarts = self._answered, statistics.restarts
        statistics.batches += 1
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1
        try:
            async with asyncio.timeout(self._timeout) as limit:
                answer = await engine.sample(request)  # type: ignore[attr-defined]
        except Exception as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            failed = _late(self._timeout) if late else as_error(error)
            hangs = late and self._answered == answered  # it answered nobody else either
            if hangs or not isinstance(error, EngineError | TimeoutError):
                await asyncio.to_thread(self.restart, str(failed), restarts)
            raise failed from error
        finally:
            self._under_way -= 1
            if not self._under_way:
                statistics.engine_seconds += time.perf_counter() - self._since
        self._answered += 1
        return answer

    def restart(self, why: str, since: int | None = None) -> bool:
        """Restart the engine, unless that was done since there had been so many restarts; False where it cannot be."""
        restart = getattr(self.engine, "restart", None)
        with self._restarting:
            if since is not None and self.statistics.restarts != since:
                return True
            if restart is None or self.statistics.restarts >= self._most_restarts:
                return False
            self.statistics.restarts += 1
            logger.warning("the sampler is restarted: %s", why)
            try:
                restart()
            except Exception:
                logger.exception("the sampler could not be restarted")
                return False
            return True


SharedLLMInferenceManager = SamplerClient


def generate(sampler: Any, requests: Sequence[Request]) -> list[Completion]:
    """One completion a request, in order, of any sampler; a method of those that have `async sample`."""
    with SamplerClient(sampler) as client:
        return client.generate(requests)


class Batched:
    """The door of an engine that works in batches: what waits is answered together, in a thread of the engine's own.

    Where a batch fails as a whole, each of its requests is asked alone.

    Args:
        client: whose engine answers, by `generate`.
        max_batch: requests of one batch, at most.
        timeout: seconds of one call; one that takes longer is left behind in its thread.
        barrier: whether a batch waits until all that are playing have asked.
        inline: whether the engine is called in the thread of the event loop.
    """

    def __init__(
        self, client: SamplerClient, max_batch: int, timeout: float | None, *, barrier: bool, inline: bool
    ) -> None:
        self._client, self._most, self._timeout, self._barrier = client, max_batch, timeout, barrier
        self._news = asyncio.Event()
        self._waiting: list[tuple[Request, asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None
        self._thread = None if inline else OwnThread("shoal-sampler")
        self._hangs: Exception | None = None

    async def sample(self, request: Request) -> Any:
        """What the engine answers, in the next batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((request, future))
        self._news.set()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._work())
        return await future

    def look(self) -> None:
        """Look again whether all have asked."""
        self._news.set()

    def close(self) -> None:
        """End the engine's thread after its call, or leave one behind that hangs; what waits is refused."""
        if self._thread is not None:
            self._thread.end()
        if self._task is not None and not self._task.done():
            with contextlib.suppress(RuntimeError):  # its loop has ended
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def _work(self) -> None:
        """Call the engine as long as something waits; the next batch is launched before answers are given."""
        batch: list[tuple[Request, asyncio.Future[Any]]] = []
        try:
            while self._waiting:
                while self._barrier and 0 < len(self._waiting) < min(self._client.playing, self._most):
                    self._news.clear()
                    await self._news.wait()
                taken, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                batch = [item for item in taken if not item[1].done()]  # nobody waits for the others any more
                if batch:
                    answers = await self._answers([request for request, _ in batch])
                    for (_, future), answer in zip(batch, answers, strict=True):
                        _settle(future, answer)
        finally:
            for _, future in (*batch, *self._waiting):
                _settle(future, RejectedError("the sampler was closed before it answered"))

    async def _answers(self, requests: Sequence[Request]) -> list[Any]:
        """An answer or an exception a request."""
        began = time.perf_counter()
        try:
            answers = await self._call(requests)
            if not isinstance(answers, Exception):
                return answers
            if len(requests) == 1:
                return [answers]
            found: list[Any] = []
            for request in requests:
                alone = await self._call([request])
                found += [alone] if isinstance(alone, Exception) else alone
            return found
        finally:
            self._client.statistics.batches += 1
            self._client.statistics.engine_seconds += time.perf_counter() - began

    async def _call(self, requests: Sequence[Request]) -> list[Any] | Exception:
        """What the engine answers, in its thread; an exception where it answers nobody."""
        work = partial(self._generate, tuple(requests))
        if self._thread is None or self._hangs:
            return self._hangs or work()
        running = asyncio.wrap_future(self._thread.submit(work))
        done, _ = await asyncio.wait([running], timeout=self._timeout)
        if done:
            return running.result()
        running.cancel()
        self._thread.end()
        self._thread, late = OwnThread("shoal-sampler"), _late(self._timeout)
        if not await asyncio.wrap_future(self._thread.submit(partial(self._client.restart, str(late)))):
            self._hangs = late
            logger.error("%s; all further requests are refused", late)
        return late

    def _generate(self, requests: tuple[Request, ...]) -> list[Any] | Exception:
        restarts = self._client.statistics.restarts
        try:
            answers = list(self._client.engine.generate(requests))  # type: ignore[attr-defined]
        except (EngineError, TimeoutError) as error:
            return error
        except BaseException as error:  # SystemExit, say: the engine's own
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C, which comes there alone
            # once: a call that hangs and is left behind may fail after the restart
            self._client.restart(format_error(error), restarts)
            return as_error(error)
        if len(answers) != len(requests):
            return EngineError(
                f"the sampler returned {len(answers)} completions for {len(requests)} requests"
            )
        return answers


def _settle(future: asyncio.Future[Any], answer: Any) -> None:
    """Give an answer or an exception to who still waits for it."""
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def as_error(error: BaseException) -> Exception:
    """What an episode ends with when its sampler raised this."""
    if isinstance(error, EngineError | TimeoutError):
        return error
    failed = EngineError(f"the sampler failed: {format_error(error)}")
    failed.__cause__ = error
    return failed


def _late(seconds: float | None) -> TimeoutError:
    return TimeoutError(f"the sampler hangs: it did not answer within {seconds} s")
