"""When a batch is launched and whose requests go into it. Pure: time comes in as numbers.

`barrier` waits for every episode at play (lockstep), `greedy` never lets the engine idle while something is
queued, and `adaptive` waits a little when the requests expected meanwhile are worth more than the idle time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from typing import Generic, Literal, TypeVar

import numpy as np

from shoal.core.errors import did_you_mean

T = TypeVar("T")
Schedule = Literal["adaptive", "greedy", "barrier"]
SCHEDULES = ("adaptive", "greedy", "barrier")
HORIZONS = np.array([0.5e-3, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 10e-3, 15e-3, 20e-3, 30e-3, 50e-3])
"""Seconds of waiting that `adaptive` weighs against launching now."""
DOUBT = 0.4
"""By how much a wait as long as a batch's fixed cost is doubted; found by simulating heavy-tailed latencies."""
LONGEST_WAIT = 0.5
"""Of a batch's fixed cost: an engine is never kept idle for longer."""


class FairQueue(Generic[T]):
    """Waiting items by asker; taken in turns, so that an asker of many does not hold up one of few."""

    def __init__(self) -> None:
        self._by_asker: OrderedDict[Hashable, deque[T]] = OrderedDict()
        self.size = 0
        """How many items wait, of all askers."""

    def __len__(self) -> int:
        return self.size

    def waiting(self, asker: Hashable) -> int:
        """How many items of one asker wait."""
        return len(self._by_asker.get(asker, ()))

    def put(self, asker: Hashable, item: T) -> None:
        """Add an item behind the asker's others."""
        items = self._by_asker.get(asker)
        if items is None:
            self._by_asker[asker] = deque((item,))
        else:
            items.append(item)
        self.size += 1

    def take(self, limit: int) -> list[T]:
        """Up to `limit` items, one of each asker in turn, oldest first within an asker."""
        taken: list[T] = []
        if self.size <= limit:  # all of them: whose turn it is does not matter
            taken.extend(item for items in self._by_asker.values() for item in items)
            self._by_asker.clear()
            self.size = 0
            return taken
        while self._by_asker and len(taken) < limit:
            asker, items = self._by_asker.popitem(last=False)
            taken.append(items.popleft())
            if items:
                self._by_asker[asker] = items
        self.size -= len(taken)
        return taken

    def drop(self, asker: Hashable) -> list[T]:
        """Remove and return what an asker still waits for."""
        items = self._by_asker.pop(asker, deque())
        self.size -= len(items)
        return list(items)


class CostModel:
    """Seconds of a batch as `fixed + per_item * size`: least squares over recent batches, old ones fading."""

    FADE = 0.9

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, n, n², seconds, n·seconds
        self._fit: tuple[float, float] | None = None

    def add(self, size: int, seconds: float) -> None:
        """A batch took so long."""
        self._fit = None
        fade = self.FADE
        count, n, nn, total, products = self._sums
        self._sums = (
            count * fade + 1,
            n * fade + size,
            nn * fade + size * size,
            total * fade + seconds,
            products * fade + size * seconds,
        )

    def seconds(self, size: int) -> float:
        """What a batch of this size is expected to take."""
        fixed, per_item = self.fixed_and_per_item()
        return fixed + per_item * size

    def fixed_and_per_item(self) -> tuple[float, float]:
        """The two coefficients, never negative; (0, 0) before the first batch."""
        if self._fit is None:
            self._fit = self._solve()
        return self._fit

    def _solve(self) -> tuple[float, float]:
        count, n, nn, seconds, n_seconds = self._sums
        if count == 0:
            return 0.0, 0.0
        spread = count * nn - n * n
        if spread < 1e-6 * nn * count:  # all of one size: call half of it fixed
            return seconds / count / 2, seconds / n / 2
        slope = min(max((count * n_seconds - n * seconds) / spread, 0.0), seconds / n)
        return (seconds - slope * n) / count, slope


class Latencies:
    """How long episodes take between an answer and their next question, and how long those out have been."""

    def __init__(self, keep: int = 512) -> None:
        self._recent: deque[float] = deque(maxlen=keep)
        self._sorted: np.ndarray | None = None
        self._since: dict[Hashable, float] = {}

    def answered(self, episodes: Iterable[Hashable], now: float) -> None:
        """The episodes have their answers and act."""
        self._since.update(dict.fromkeys(episodes, now))

    def asked(self, episode: Hashable, now: float) -> None:
        """The episode is back: it had what it asked ready at `now`."""
        since = self._since.pop(episode, None)
        if since is not None:
            self._recent.append(max(0.0, now - since))
            self._sorted = None

    def left(self, episode: Hashable) -> None:
        """The episode is over."""
        self._since.pop(episode, None)

    @property
    def known(self) -> int:
        """How many latencies are remembered."""
        return len(self._recent)

    def expected(self, now: float, horizons: np.ndarray) -> np.ndarray:
        """How many of those out will be back within each of `horizons`, given how long they have been out."""
        if not self._since or not self._recent:
            return np.zeros(len(horizons))
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._recent))
        ages = now - np.fromiter(self._since.values(), float, len(self._since))
        known = len(self._sorted)
        before = np.searchsorted(self._sorted, ages, side="right")
        within = np.searchsorted(self._sorted, ages[:, None] + horizons, side="right")
        longer = (known - before)[:, None]
        share = np.where(longer > 0, (within - before[:, None]) / np.maximum(longer, 1), 0.0)
        return np.asarray(share.sum(0))


class Batcher(Generic[T]):
    """The queue of one engine and the rule that says when to launch.

    Args:
        schedule: "adaptive", "greedy" or "barrier".
        max_batch: requests of one batch, at most.
        least_fixed: an engine whose batches have a smaller fixed cost, in seconds, is never kept waiting.
    """

    def __init__(
        self, schedule: Schedule = "adaptive", max_batch: int = 4096, least_fixed: float = 2e-3
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"no schedule named {schedule!r}.{did_you_mean(schedule, SCHEDULES)}")
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.schedule = schedule
        self.max_batch = max_batch
        self.queue: FairQueue[T] = FairQueue()
        self.cost = CostModel()
        self.latencies = Latencies()
        self.at_play: set[Hashable] = set()
        """Episodes that will ask again; `barrier` waits for all of them."""
        self._least_fixed = least_fixed
        self._idle_since = 0.0

    def idle(self, now: float) -> None:
        """The engine has nothing to do from now on."""
        self._idle_since = now

    def wait(self, now: float) -> float | None:
        """Seconds to wait unless something happens before: 0 launches now, None means for as long as it takes."""
        queued = self.queue.size
        if not queued:
            return None
        if queued >= self.max_batch or self.schedule == "greedy":
            return 0.0
        if self.schedule == "barrier":
            return None if queued < len(self.at_play) else 0.0
        return self._worthwhile(now, queued)

    def _worthwhile(self, now: float, queued: int) -> float:
        fixed, per_item = self.cost.fixed_and_per_item()
        if fixed < self._least_fixed or self.latencies.known < 8:
            return 0.0
        waited = max(0.0, now - self._idle_since)
        if waited >= LONGEST_WAIT * fixed:
            return 0.0
        arriving = np.minimum(self.latencies.expected(now, HORIZONS), self.max_batch - queued)
        return worthwhile_wait(queued, arriving, fixed=fixed, per_item=per_item, waited=waited)


def worthwhile_wait(
    queued: int, arriving: np.ndarray, *, fixed: float, per_item: float, waited: float
) -> float:
    """The wait that gives the most answers per second of the engine, idle time included; 0 to launch now.

    Forecasts are optimistic: what arrives also has to be read, and its answers held up by those that come late
    are asked back late. So the gain of a wait is doubted, the more the longer it is beside the fixed cost.

    Args:
        queued: requests that wait.
        arriving: how many more are expected within each of `HORIZONS`.
        fixed: seconds of a batch of any size.
        per_item: further seconds for each request.
        waited: seconds that the engine has been idle.
    """
    size = queued + arriving
    later = size / (fixed + per_item * size + waited + HORIZONS) / (1 + DOUBT * HORIZONS / fixed)
    best = int(later.argmax())
    at_once = queued / (fixed + per_item * queued + waited)
    return float(HORIZONS[best]) if later[best] > at_once else 0.0
