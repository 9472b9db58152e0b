"""One engine for many askers: threads of this process, worker processes over a Unix socket, a Ray cluster.

One thread reads all sockets, forms batches and sends answers, while the engine answers in another. So the next batch
is ready when the engine has done one, and is launched before the answers of the last are sent; an engine that answers
at once is asked without that detour. One that hangs is left behind and restarted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

import msgspec

from shoal.core.errors import EngineError, did_you_mean, format_error
from shoal.core.executors import Closing, OwnThread
from shoal.core.processes import STANDSTILL
from shoal.rollout.parallel.transport import (
    Address,
    Alive,
    Ask,
    Connection,
    Connections,
    Entered,
    EpisodeName,
    Left,
    LinkLostError,
    Result,
    Schedule,
    episode_of,
)
from shoal.rollout.samplers.sampler import (
    Completion,
    Engine,
    Key,
    Request,
    generate_each,
    of_inner,
)

logger = logging.getLogger(__name__)
Report = Callable[[Hashable, bytes], None]
QUICK = 1e-3
"""Seconds of an engine call that nothing else need be done meanwhile."""
KNOWN = 8
"""Quick batches after which an engine is known to be quick; a slow one counts for two, on a busy machine any may be."""
LEAST_COST = 4e-3
"""Seconds of a call, whatever is asked, from which on waiting may pay: a wait is of whole milliseconds."""
MEMORY, FEWEST_DELAYS, MOST_OUT = 0.95, 16, 2**14
PARTS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the cost of a call: for how long to wait."""
CAUTION = 1.2
"""How much more than pays must be expected: what was learned is of few calls."""
ENGINE_END_SECONDS = 5.0
"""For which a call that runs when all ends is waited for."""
SWEEP_SECONDS = 1.0


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


class Waiting(msgspec.Struct, eq=False):
    """One request until it is answered."""

    asker: Hashable
    number: int
    request: Request
    reply: Callable[[int, Result], None]
    deadline: float | None
    answered: bool = False
    hangs: int = 0
    """Of the engine, while it was asked for this."""


# --- when a batch is launched, and whose requests go into it
class Pace:
    """How long it pays to wait for questions that are on their way, before the engine is asked for those there are.

    A call costs some seconds whatever is asked, and then some a request; both are learned from the calls. How soon
    an episode asks again is learned from the last ones that did. `n` questions of `N` episodes at play, `w` seconds
    after the engine was free, are served at the rate n / (w + cost + …); what comes in the next `h` seconds raises it
    if they are more than h N / (w + cost), since those who come too late are waiting when the next call is due.
    """

    def __init__(self) -> None:
        self.cost = 0.0
        """Seconds of a call that do not depend on how much is asked; 0 until calls of several sizes were seen."""
        self.pays = False
        """Whether waiting can pay at all."""
        # Sums over the calls of 1, n, seconds, n * n, n * seconds; older ones count less.
        self._count = self._x = self._y = self._xx = self._xy = 0.0
        self._delays: deque[float] = deque(maxlen=512)  # from an answer to the next question, the last ones
        self._sorted: list[float] = []
        self._out: dict[EpisodeName, float] = {}  # when each episode was answered that has not asked since
        self._together: Counter[float] = Counter()  # how many of them were answered at one time
        self._since: float | None = None  # the engine is free and something waits

    def called(self, n: int, seconds: float) -> None:
        """A call for `n` requests took so long."""
        self._count = count = MEMORY * self._count + 1.0
        self._x = x = MEMORY * self._x + n
        self._y = y = MEMORY * self._y + seconds
        self._xx = xx = MEMORY * self._xx + n * n
        self._xy = xy = MEMORY * self._xy + n * seconds
        spread = xx - x * x / count
        self.cost = 0.0
        if spread > 1e-9 * xx:
            slope = max(0.0, (xy - x * y / count) / spread)
            self.cost = max(0.0, (y - slope * x) / count)
        self.pays = self.cost >= LEAST_COST

    def answered(self, episodes: Collection[EpisodeName], now: float) -> None:
        """These, each named once, may ask again."""
        self._sorted = sorted(self._delays)
        self.left(episodes)
        self._out.update(dict.fromkeys(episodes, now))
        self._together[now] += len(episodes)
        while len(self._out) > MOST_OUT:  # whoever asks and never says that the episode is over
            self.left([next(iter(self._out))])

    def asked(self, episode: EpisodeName, now: float) -> None:
        """An episode asks."""
        if episode in self._out:
            self._delays.append(now - self._out[episode])
            self.left([episode])

    def left(self, episodes: Iterable[EpisodeName]) -> None:
        """These will not ask again."""
        for episode in episodes:
            at = self._out.pop(episode, None)
            if at is not None:
                self._together[at] -= 1
                if not self._together[at]:
                    del self._together[at]

    def launched(self) -> None:
        """The engine is at work."""
        self._since = None

    def patience(self, n: int, now: float) -> float:
        """Seconds for which to wait with `n` requests, should no other arrive; 0 if the engine is to be asked now."""
        self._since = since = now if self._since is None else self._since
        waited, known, found = now - since, self._sorted, 0.0
        if not self._out or len(known) < FEWEST_DELAYS or waited >= self.cost:
            return found
        best = CAUTION * (n + len(self._out)) / (waited + self.cost)
        groups = [(now - at, k, bisect_right(known, now - at)) for at, k in self._together.items()]
        for part in PARTS:
            seconds = part * self.cost
            coming = sum(
                k * (bisect_right(known, age + seconds) - past) / (len(known) - past)
                for age, k, past in groups
                if past < len(known)
            )
            if coming / seconds > best:
                best, found = coming / seconds, seconds
        return found


class Batcher:
    """The requests that wait for one engine; taken in turns, so that an asker of many does not hold up one of few.

    Args:
        schedule: "greedy" never lets the engine idle while something waits; "adaptive" does, as long as more is
            expected so soon that it pays; "barrier" waits for every episode at play (lockstep).
        max_batch: requests of one batch, at most.
    """

    def __init__(self, schedule: Schedule = "greedy", max_batch: int = 4096) -> None:
        if schedule not in get_args(Schedule):
            raise ValueError(f"no schedule named {schedule!r}.{did_you_mean(schedule, get_args(Schedule))}")
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.schedule, self.max_batch = schedule, max_batch
        self.at_play: set[EpisodeName] = set()
        """Episodes that will ask again."""
        self._silent: set[EpisodeName] = set()  # those of them that have not asked since their last answer
        self._by_asker: OrderedDict[Hashable, deque[Waiting]] = OrderedDict()
        self._suspects: deque[Waiting] = deque()  # the engine hung at them: each is a batch of its own
        self._size = 0
        self.pace = Pace() if schedule == "adaptive" else None

    def __len__(self) -> int:
        """How many requests wait, of all askers."""
        return self._size

    def waiting(self, asker: Hashable) -> int:
        """How many requests of one asker wait."""
        return len(self._by_asker.get(asker, ()))

    def entered(self, episodes: Iterable[EpisodeName]) -> None:
        """Episodes are at play."""
        self.at_play.update(episodes)
        self._silent.update(episodes)

    def left(self, episodes: Iterable[EpisodeName]) -> None:
        """Episodes will not ask again."""
        self.at_play.difference_update(episodes)
        self._silent.difference_update(episodes)
        if self.pace is not None:
            self.pace.left(episodes)

    def put(self, item: Waiting) -> None:
        """Add a request behind the asker's others."""
        items = self._suspects if item.hangs else self._by_asker.get(item.asker)
        if items is None:
            self._by_asker[item.asker] = deque((item,))
        else:
            items.append(item)
        self._size += 1
        if self._silent:
            self._silent.discard(episode_of(item.request.key))
        if self.pace is not None and self.pace.pays:
            self.pace.asked(episode_of(item.request.key), time.monotonic())

    @property
    def due(self) -> bool:
        """Whether there is a batch that may be launched."""
        return (
            self._size >= self.max_batch
            or bool(self._suspects)
            or (self._size > 0 and not (self.schedule == "barrier" and self._silent))
        )

    def patience(self, now: float) -> float | None:
        """Seconds after which a batch is to be launched, should nothing arrive; None if something has to arrive."""
        if not self._size or not self.due:
            return None
        pace = self.pace
        if pace is None or not pace.pays or self._suspects or self._size >= self.max_batch:
            return 0.0
        return pace.patience(self._size, now)

    def take(self, limit: int | None = None) -> list[Waiting]:
        """The next batch: one request of each asker in turn, oldest first within an asker; a suspect alone."""
        limit = self.max_batch if limit is None else limit
        taken: list[Waiting] = []
        if self._suspects:
            taken.append(self._suspects.popleft())
            limit = 1
        elif self._size <= limit:  # all of them: whose turn it is does not matter
            for items in self._by_asker.values():
                taken += items
            self._by_asker.clear()
        while self._by_asker and len(taken) < limit:
            asker, items = self._by_asker.popitem(last=False)
            taken.append(items.popleft())
            if items:
                self._by_asker[asker] = items
        self._size -= len(taken)
        if self.pace is not None:
            self.pace.launched()
        if self.at_play:
            self._silent.update(self.at_play.intersection(episode_of(item.request.key) for item in taken))
        return taken

    def drop(self, asker: Hashable) -> list[Waiting]:
        """Remove and return what an asker still waits for."""
        items = [*self._by_asker.pop(asker, ()), *(item for item in self._suspects if item.asker == asker)]
        self._suspects = deque(item for item in self._suspects if item.asker != asker)
        self._size -= len(items)
        return items

    def remove(self, item: Waiting) -> None:
        """Take out one request, if it still waits."""
        items = self._suspects if item.hangs else self._by_asker.get(item.asker)
        if items is not None and item in items:
            items.remove(item)
            self._size -= 1
            if not items and not item.hangs:
                del self._by_asker[item.asker]


# --- an engine that may fail or hang
class _Answerer:
    """An engine with what is done when it fails: it is asked again, in halves, and replaced where that helps."""

    def __init__(
        self, engine: Engine, retries: int, restart: Callable[[], Engine] | None, max_restarts: int
    ) -> None:
        self.engine, self.retries = engine, retries
        self.statistics = Statistics()
        self._restart, self._restarts_left = restart, max_restarts
        self._hung: str | None = None
        self.restarting = False
        """Whether a new engine is being made just now, which may take longer than any answer."""

    def answer(self, requests: Sequence[Request], given_up: Callable[[], bool]) -> Sequence[Result]:
        """A completion or an exception for each request, in order, whatever the engine does."""
        if self._hung is not None:
            return [EngineError(self._hung)] * len(requests)
        try:
            return generate_each(
                self.engine, requests, retries=self.retries, on_failure=self._failed, given_up=given_up
            )
        except BaseException as error:  # SystemExit, say: it must not end the thread that everybody waits for
            return [EngineError(f"the engine failed: {format_error(error)}")] * len(requests)

    def _failed(self, requests: int, error: BaseException | None) -> Engine:
        self.statistics.failures += requests
        if error is not None and not isinstance(error, EngineError):
            self.restart(f"it raised {format_error(error)}")
        return self.engine

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


@dataclass(slots=True, eq=False)
class _Call:
    """One batch that the engine is asked for."""

    batch: list[Waiting]
    began: float
    deadline: float | None = None
    given_up: bool = False
    """Nobody waits for the results any more."""
    results: Sequence[Result] = ()
    ended: float = 0.0

    def ask(self, answerer: _Answerer) -> None:
        self.began = time.monotonic()
        self.results = answerer.answer([item.request for item in self.batch], lambda: self.given_up)
        self.ended = time.monotonic()


# --- the server
class SharedLLMInferenceManager(Closing):
    """Batches the requests of many askers for one engine; an `Engine` itself, safe to use from any thread.

    Args:
        engine: what answers.
        schedule: when a batch is launched: "greedy", as soon as the engine is free and something waits; "adaptive",
            as "greedy", but it waits for questions that are expected so soon that it pays; "barrier", when all
            episodes at play have asked.
        max_batch: requests of one batch, at most.
        request_timeout: seconds from a request to its answer, after which it is refused.
        engine_timeout: seconds of one engine call, after which the engine counts as hung.
        retries: further attempts for a request that fails alone.
        restart: makes a new engine after a crash or hang; without it, a hung engine refuses all further requests.
        max_restarts: of the engine.
        max_pending: waiting requests of one connection; beyond it nothing more is read from it.
        silence: seconds without a sign of life after which a worker process that is connected is killed.
        on_report: called with the asker and what it sent at the end of an episode (in the engine's thread).

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        schedule: Schedule = "adaptive",
        max_batch: int = 4096,
        request_timeout: float | None = None,
        engine_timeout: float | None = None,
        retries: int = 1,
        restart: Callable[[], Engine] | None = None,
        max_restarts: int = 3,
        max_pending: int = 1024,
        silence: float | None = None,
        on_report: Report | None = None,
    ) -> None:
        self._answerer = _Answerer(engine, retries, restart, max_restarts)
        self._batcher = Batcher(schedule, max_batch)
        if schedule == "barrier":  # it waits for everybody: whoever is not heard would stop all
            max_pending = sys.maxsize
        self._connections = Connections(self._hear, self._ended, self._is_full, silence)
        self._request_timeout, self._engine_timeout = request_timeout, engine_timeout
        self._max_pending, self._on_report = max_pending, on_report
        self._inbox: deque[Callable[[], None]] = deque()
        self._timed: deque[Waiting] = deque()  # with `request_timeout`: those not answered yet, oldest first
        self._lock = threading.Lock()
        self._running: _Call | None = None
        self._done: list[_Call] = []  # answered, but the answers are not sent yet
        self._closed, self._why = False, "the shared engine was closed"
        self._wound_up = False
        self.failed = False
        """Whether its thread failed, so that nothing is answered any more."""
        self._next_sweep = 0.0
        self._quick_calls = 0  # of recent ones, at most `KNOWN`
        self._engine_thread = OwnThread("shoal-engine")  # for calls that take their time
        self._thread = threading.Thread(target=self._run, daemon=True, name="shoal-inference")
        self._thread.start()

    # --- an engine itself
    @property
    def engine(self) -> Engine:
        """What answers now; another one after a restart."""
        return self._answerer.engine

    @property
    def statistics(self) -> Statistics:
        """What it did so far."""
        found = self._answerer.statistics
        found.refused_connections = self._connections.refused
        return found

    tokenizer = of_inner("tokenizer", "engine")
    level = of_inner("level", "engine")
    weights_version = of_inner("weights_version", "engine")

    @property
    def schedule(self) -> Schedule:
        """When batches are launched."""
        return self._batcher.schedule

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
        results: dict[int, Result] = {}
        done = threading.Event()

        def reply(number: int, result: Result) -> None:
            results[number] = result
            if len(results) == len(requests):
                done.set()

        if not requests:
            return []
        items = self.submit(threading.get_ident(), requests, reply)
        if not done.wait(timeout):
            self._withdraw(items)
            raise TimeoutError(f"the engine did not answer within {timeout} s")
        return [results[number] for number in range(len(requests))]

    def submit(
        self, asker: Hashable, requests: Sequence[Request], reply: Callable[[int, Result], None]
    ) -> list[Waiting]:
        """Queue requests; `reply(place, result)` is called for each from the engine's thread and must not wait."""
        deadline = self._deadline()
        items = [Waiting(asker, n, request, reply, deadline) for n, request in enumerate(requests)]

        def put() -> None:
            for item in items:
                self._put(item)

        self._post(put)
        return items

    def _withdraw(self, items: Sequence[Waiting]) -> None:
        """Nobody waits for these any more: the engine need not be asked for those that still wait."""

        def withdraw() -> None:
            for item in items:
                item.answered = True
                self._batcher.remove(item)

        with contextlib.suppress(EngineError):
            self._post(withdraw)

    # --- which episodes there are
    def entered(self, keys: Sequence[Key]) -> None:
        """The episodes of these keys are at play until they leave; the barrier schedule waits for all of them."""
        episodes = [episode_of(key) for key in keys]
        self._post(lambda: self._batcher.entered(episodes))

    def connect(self, asker: int) -> SharedLLMInferenceManager:
        """A link for a worker in this process: this object."""
        return self

    def left(self, key: Key, report: bytes = b"") -> None:
        """An episode is over, or its worker lost: it does not ask again until it enters again."""
        asker = threading.get_ident()
        self._post(lambda: self._leave(asker, episode_of(key), report))

    # --- other processes
    def serve(self) -> Address:
        """Listen on a Unix socket that only this user's processes with the returned secret can use."""
        with self._lock:
            if self._closed:
                raise self._gone()
            address = self._connections.serve()
        self._connections.ring()
        return address

    # --- the end
    def close(self) -> None:
        """Refuse what waits, end the threads and remove the socket; may be called twice, and from a `reply`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._connections.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * ENGINE_END_SECONDS)
            self._wind_up()

    def _wind_up(self) -> None:
        """Answer everybody; by the thread, or by who closes where the thread hangs in the engine."""
        with self._lock:
            if self._wound_up:
                return
            self._wound_up = True
        self._engine_thread.end()  # one that hangs stays behind
        while self._inbox:
            with contextlib.suppress(Exception):
                self._inbox.popleft()()
        self._deliver()
        left: list[Waiting] = []
        while len(self._batcher):
            left += self._batcher.take(sys.maxsize)
        if self._running is not None:  # the engine hangs
            self._running.given_up = True
            left += self._running.batch
        for item in left:
            self._reply(item, self._gone())
        self._connections.close()

    def _gone(self) -> EngineError:
        """Why nothing is answered any more; a thread that failed says nothing of the episodes at play."""
        return (LinkLostError if self.failed else EngineError)(self._why)

    def _post(self, action: Callable[[], None]) -> None:
        with self._lock:  # `close` does what came before it
            if self._closed:
                raise self._gone()
            self._inbox.append(action)
        self._connections.ring()

    # --- all from here on belongs to the thread
    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
            patience = time.monotonic() + ENGINE_END_SECONDS
            while self._running is not None and (now := time.monotonic()) < patience:
                self._look(patience - now, now)
        except BaseException as error:  # whatever it is: nobody is to wait for this thread any more
            with self._lock:
                was_open = not self._closed
                if was_open:
                    self._closed = self.failed = True
                    self._why = f"the shared engine's thread failed: {error!r}"
            if was_open:
                logger.exception("the shared engine's thread failed; all further requests are refused")
        self._wind_up()

    def _turn(self) -> None:
        """Take in what arrived, launch a batch, send the answers of the last one."""
        batcher, now = self._batcher, time.monotonic()
        self._look(batcher.patience(now) if self._running is None else None, now)
        if self._done and batcher.pace is not None and batcher.pace.pays:
            self._deliver()  # they may ask again so soon that it pays to wait for them
        if self._running is None and batcher.patience(now := time.monotonic()) == 0.0:
            self._launch(batcher.take(), now)
        if self._done:
            self._deliver()

    def _look(self, wait: float | None, now: float) -> None:
        """Take in what arrived, waiting up to `wait` seconds for something to, or until a deadline."""
        until = math.inf if wait is None else now + wait
        if self._next_sweep < until and len(self._connections):
            until = self._next_sweep
        while self._timed and self._timed[0].answered:
            self._timed.popleft()
        if self._timed:
            until = min(until, self._timed[0].deadline or now)
        running = self._running
        if running is not None and running.deadline is not None:
            until = min(until, running.deadline)
        # else the engine would share the interpreter with a busy wait
        awake = running is None and self._is_quick
        self._connections.look(None if until == math.inf else max(0.0, until - now), awake)
        while self._inbox:
            self._inbox.popleft()()
        if until <= (now := time.monotonic()):
            self._keep_time(now)

    def _keep_time(self, now: float) -> None:
        if now >= self._next_sweep:
            still = now - self._next_sweep >= STANDSTILL  # the workers may have stood still too
            self._next_sweep = now + SWEEP_SECONDS
            self._connections.sweep(now, excused=still)
        late = 0
        while self._timed and (self._timed[0].answered or now >= (self._timed[0].deadline or now)):
            item = self._timed.popleft()
            if not item.answered:
                late += 1
                self._batcher.remove(item)
                self._reply(item, TimeoutError(f"no answer within {self._request_timeout} s"))
        running = self._running
        if running is not None and running.deadline is not None and now >= running.deadline:
            self._engine_hangs(running, now)
            late += 1
        if late:
            self._connections.flush()

    def _launch(self, batch: list[Waiting], now: float) -> None:
        """Ask the engine: here if it answers at once, else in a thread, while requests go on being read."""
        timeout = self._engine_timeout
        call = _Call(batch, now, None if timeout is None else now + timeout)
        self._running = call
        if self._is_quick and timeout is None and self._request_timeout is None:
            call.ask(self._answerer)
            self._finish(call)
        else:
            self._start(call, lambda: call.ask(self._answerer))

    @property
    def _is_quick(self) -> bool:
        """Whether the engine is known to answer at once."""
        return self._quick_calls >= KNOWN - 2

    def _start(self, call: _Call, work: Callable[[], None]) -> None:
        """Do the `work` of a call in the engine's thread, and finish the call in this one."""

        def run() -> None:
            work()
            self._inbox.append(lambda: self._finish(call))
            self._connections.ring()

        self._engine_thread.submit(run)

    def _finish(self, call: _Call) -> None:
        """The engine has answered; it may be asked again before the answers are sent."""
        if call.given_up:
            return
        self._running = None
        self._done.append(call)
        size, seconds, statistics = len(call.batch), call.ended - call.began, self._answerer.statistics
        if size:
            quick = self._quick_calls + (1 if seconds < QUICK else -2)
            self._quick_calls = min(max(quick, 0), KNOWN)
            statistics.requests += size
            statistics.batches += 1
            statistics.engine_seconds += seconds
            statistics.batch_sizes.append(size)
            if self._batcher.pace is not None:
                self._batcher.pace.called(size, seconds)

    def _deliver(self) -> None:
        done, self._done = self._done, []
        pace = self._batcher.pace
        for call in done:
            if pace is not None and pace.pays:
                pace.answered({episode_of(item.request.key) for item in call.batch}, time.monotonic())
            for item, result in zip(call.batch, call.results, strict=True):
                self._reply(item, result)
        self._connections.flush()

    def _reply(self, item: Waiting, result: Result) -> None:
        """Answer once; what goes wrong meanwhile costs this request alone."""
        if item.answered:
            return
        item.answered = True
        try:
            item.reply(item.number, result)
        except BaseException as error:  # an answer that cannot be sent, say
            logger.exception("an answer of the engine could not be given")
            with contextlib.suppress(BaseException):
                item.reply(item.number, EngineError(f"its answer could not be given: {error}"))

    def _engine_hangs(self, call: _Call, now: float) -> None:
        """Leave the engine's thread behind, and take another engine, which is asked for these one by one."""
        if self._answerer.restarting:
            call.deadline = now + (self._engine_timeout or 0.0)
            return
        call.given_up = True
        why = f"it did not answer within {self._engine_timeout} s"
        self._engine_thread.end()
        self._engine_thread = OwnThread("shoal-engine")
        self._running = again = _Call([], now)
        self._start(again, lambda: self._answerer.replace(why))
        for item in call.batch:
            item.hangs += 1
            if len(call.batch) == 1 and item.hangs > self._answerer.retries:
                self._reply(item, TimeoutError(f"the engine hangs: {why}"))
            elif not item.answered:
                self._batcher.put(item)

    # what askers and workers say
    def _deadline(self) -> float | None:
        return None if self._request_timeout is None else time.monotonic() + self._request_timeout

    def _put(self, item: Waiting) -> None:
        self._batcher.put(item)
        if item.deadline is not None:
            self._timed.append(item)

    def _hear(self, connection: Connection, message: Ask | Entered | Left | Alive) -> None:
        if isinstance(message, Ask):
            asker, reply = connection.asker, connection.reply
            self._put(Waiting(asker, message.number, message.request, reply, self._deadline()))
        elif isinstance(message, Entered):
            connection.episodes.update(message.episodes)
            self._batcher.entered(message.episodes)
        elif isinstance(message, Left):
            connection.episodes.discard(message.episode)
            self._leave(connection.asker, message.episode, message.report)

    def _leave(self, asker: Hashable, episode: EpisodeName, report: bytes) -> None:
        self._batcher.left((episode,))
        if report and self._on_report is not None:
            try:
                self._on_report(asker, report)
            except BaseException:  # it must not end the thread that everybody waits for
                logger.exception("what was to be done with a report failed")

    def _is_full(self, connection: Connection) -> bool:
        """Whether so much of a worker waits that no more is to be read from it."""
        most = self._max_pending
        return len(self._batcher) >= most and self._batcher.waiting(connection.asker) >= most

    def _ended(self, connection: Connection) -> None:
        """A worker's connection is gone: nobody waits for its answers any more."""
        self._batcher.left(connection.episodes)
        if connection.asker is not None:
            for item in self._batcher.drop(connection.asker):
                item.answered = True
