"""Playing the groups of an iteration with all processes of a run."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError, DivergedError, EngineError, EnvError, ShoalError
from shoal.core.executors import Closing, OwnThread
from shoal.envs.check import quick_check
from shoal.rollout.play import TrajectoryCollector
from shoal.rollout.report import RolloutReport
from shoal.samplers.sampler import NO_NUMBERS, Sampling
from shoal.train.agent.config import AgentConfig, FilterType
from shoal.train.agent.optimizer import LOWER
from shoal.train.agent.processes.distributed import Processes
from shoal.train.agent.run.filters import FilterReport, discounted, filter_groups

logger = logging.getLogger(__name__)
CHECKED_SEEDS = 32
"""Episodes of an env that are played before training, as far as ten seconds allow."""


Groups = tuple[list[Trajectory], list[Trajectory], dict[str, float]]


class Played(NamedTuple):
    """The groups of an iteration, by the weights of which version they were played, and in how many seconds."""

    groups: Groups
    version: int
    seconds: float


def play_groups(collector: SharedCollector, iteration: int, config: AgentConfig) -> Groups:
    """Play the groups of an iteration, with dynamic sampling until enough have different rewards.

    Returns:
        All episodes; those to learn from; metrics.
    """
    algorithm, settings = config.algorithm, config.algorithm.filter_groups
    collector.take_metrics()
    sampling, most = config.agent_proxy.sampling(), settings.max_num_gen_batches if settings.enable else 1
    played, kept, report = collect_with_signal(
        collector, iteration, sampling, max_batches=most, gamma=algorithm.gamma
    )
    refuse_all_failed(played, f"iteration {iteration + 1}")
    if settings.max_num_gen_batches > 1 and report.with_signal < len(collector.tags):
        logger.info("iteration %d: %s", iteration + 1, report)
    row = report.metrics() | collector.take_metrics()
    learned = kept if settings.enable else [t for t in played if t.status == "ok"]
    if algorithm.rollout_filter_ratio < 1:
        learned, filtered = best_groups(
            played, learned, algorithm.rollout_filter_ratio, algorithm.rollout_filter_type, algorithm.gamma
        )
        row |= filtered
    return played, learned, row


def collect_with_signal(
    collector: SharedCollector, iteration: int, sampling: Sampling, *, max_batches: int, gamma: float = 1.0
) -> tuple[list[Trajectory], list[Trajectory], FilterReport]:
    """Dynamic sampling: play whole groups, in the order of the plan, until enough of them have different rewards.

    There are at most `max_batches`; further ones are new groups with seeds of their own. For `gamma` see
    `filter_groups`.

    Returns:
        All trajectories played, those to learn from (whole episodes of at most as many groups as the collector has
        tags), and the report.
    """
    wanted = len(collector.tags)
    played: list[Trajectory] = []
    n_groups = wanted
    first, batch = 0, 0
    while True:
        played += collector.collect(iteration, sampling, first_group=first, n_groups=n_groups)
        first, batch = first + n_groups, batch + 1
        kept, report = filter_groups(played, wanted, batch, gamma)
        if report.with_signal >= wanted or batch >= max_batches:
            return played, kept, report
        missing = wanted - report.with_signal
        at_this_rate = math.ceil(missing * report.played / max(1, report.with_signal))
        n_groups = min(wanted, at_this_rate)


def best_groups(
    played: Sequence[Trajectory],
    candidates: Sequence[Trajectory],
    ratio: float,
    how: FilterType,
    gamma: float = 1.0,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Those of `candidates` that are of their best groups, as many as `ratio` of the groups played; and metrics.

    Args:
        played: all trajectories of the iteration.
        candidates: those that may be learned from.
        ratio: share of the groups played, rounded down, at least one; of equal scores the lower group number wins.
        how: the score of a group: the population standard deviation of its returns, or their maximum less their mean.
        gamma: discount a turn.
    """
    returns: dict[int, list[float]] = {}
    for trajectory in played:
        if trajectory.status == "ok":
            returns.setdefault(trajectory.group, []).append(discounted(trajectory, gamma))
    scores = {
        group: statistics.pstdev(values) if how == "std" else max(values) - statistics.fmean(values)
        for group, values in sorted(returns.items())
    }
    n_kept = max(1, int(ratio * len(scores) + 1e-9))
    before = {t.group for t in candidates}
    best = set(sorted(before, key=lambda group: (-scores[group], group))[:n_kept])
    metrics = {
        "rollout_filter_dropped": float(len(before - best)),
        "rollout_filter_score": statistics.fmean(scores.values()) if scores else 0.0,
        "rollout_filter_score_kept": statistics.fmean(scores[group] for group in best) if best else 0.0,
    }
    return [t for t in candidates if t.group in best], metrics


class SharedCollector:
    """A collector whose groups are played by all processes, each a share; everyone gets all trajectories.

    `ready` is entered for as long as they play.
    """

    def __init__(
        self,
        collector: TrajectoryCollector,
        processes: Processes,
        ready: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.collector = collector
        self._ready = ready
        self.tags = collector.tags
        self._processes = processes
        # Since `take_metrics`: of each call, one a process that played.
        self._reports: list[list[RolloutReport]] = []

    def collect(
        self, iteration: int, sampling: Sampling, *, first_group: int = 0, n_groups: int | None = None
    ) -> list[Trajectory]:
        """Play groups once; trajectories come group by group, member by member, as from one process."""
        processes, own = self._processes, self._own_groups(first_group, n_groups)

        def play() -> tuple[list[Trajectory], RolloutReport | None]:
            if not own:
                return [], None
            played = self.collector.collect(iteration, sampling, first_group=own.start, n_groups=len(own))
            return played, self.collector.report

        with self._ready():
            everyone = processes.all_gather(play)
        self._reports.append([report for _, report in everyone if report is not None])
        return [trajectory for part, _ in everyone for trajectory in part]

    def _own_groups(self, first: int, count: int | None) -> range:
        """The groups of `count` from `first` on that this process plays."""
        count = len(self.tags) if count is None else count
        rank, n = self._processes.rank, self._processes.count
        return range(first + count * rank // n, first + count * (rank + 1) // n)

    def take_metrics(self) -> dict[str, float]:
        """How parallel rollouts went since the last call, all calls and processes together; nothing for others."""
        calls, self._reports = self._reports, []
        reports = [report for call in calls for report in call]
        if not reports:
            return {}
        added = ("seconds", "engine_seconds", "batches", "worker_deaths", "replayed_episodes")
        sums = {name: sum(getattr(report, name) for report in reports) for name in added}
        workers = max(sum(report.workers for report in call) for call in calls)
        return RolloutReport(workers=workers, **sums).metrics()

    def close(self) -> None:
        """End this process's envs and workers."""
        self.collector.close()


class Ahead(Closing):
    """Plays one iteration after another, by `play`, beside the caller's thread."""

    def __init__(self, play: Callable[[int], Played]) -> None:
        self._play = play
        self._thread = OwnThread("shoal-player")
        self._begun: dict[int, Future[Played]] = {}

    def begin(self, iteration: int) -> None:
        """Play this iteration after those that were begun before, unless it is one of them."""
        if iteration not in self._begun:
            self._begun[iteration] = self._thread.submit(partial(self._play, iteration))

    def take(self, iteration: int) -> Played:
        """What came of an iteration that was begun, once it is over."""
        return self._begun.pop(iteration).result()

    def close(self) -> None:
        """Begin nothing more; what is played now is its owner's to break off."""
        for future in self._begun.values():
            future.cancel()
        self._thread.end()


def whole_episodes(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], list[str]]:
    """The episodes that came to an end, and a line about the others if there are any.

    Raises:
        EngineError: all failed; it has the reason of the first.
    """
    whole = [t for t in trajectories if t.status == "ok"]
    failures = [f"{t.status}: {t.error}" for t in trajectories if t.status != "ok"]
    if not whole:
        raise EngineError(f"none of {len(trajectories)} episodes came to an end; the first: {failures[0]}")
    if not failures:
        return whole, []
    return whole, [f"{len(failures)} episodes failed and are not counted; the first: {failures[0]}"]


def refuse_all_failed(trajectories: Sequence[Trajectory], what: str) -> None:
    """Check that something can be said and learned of these episodes.

    Raises:
        EngineError: not one was played to its end (`EnvError` if it was the env that failed first).
        DivergedError: the same, because the engine's log-probabilities are no numbers.
    """
    if any(trajectory.status == "ok" for trajectory in trajectories):
        return
    first = trajectories[0]
    if first.status == "engine_error" and NO_NUMBERS in (first.error or ""):
        raise DivergedError(
            f"the engine gave log-probabilities that are no numbers (group {first.group}, member {first.member}): its "
            f"weights are spoiled. {LOWER}"
        )
    kind = EnvError if first.status == "env_error" else EngineError
    raise kind(f"all {len(trajectories)} episodes of {what} failed; the first: {first.error or first.status}")


def refuse_broken_envs(config: AgentConfig) -> None:
    """Play a few episodes of the envs of a config, which a fault of them would end later, or spoil.

    Raises:
        EnvError: says which env breaks which promise, and where.
        ConfigError: one cannot be made.
    """
    sides = config.es_manager.train, config.es_manager.val
    for tag in sorted({tag for side in sides for tag in side.group_tags()} & config.custom_envs.keys()):
        kind = config.custom_envs[tag]
        try:
            limit = config.vector.step_timeout or math.inf
            quick_check(kind.env_type, kind.env_config, seeds=CHECKED_SEEDS, seconds=limit)
        except EnvError as error:
            off = "trainer.check_envs=false trains all the same"
            raise EnvError(f"custom_envs.{tag}: {error}\n{off}") from error
        except (ShoalError, ImportError, AttributeError) as error:
            raise ConfigError(f"custom_envs.{tag}: {error}") from error
