"""Groups of episodes shared out over the processes of a run; all of them get all trajectories."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from shoal.core.data import Trajectory, decode_trajectory, encode_trajectory
from shoal.core.errors import DivergedError, EngineError, EnvError
from shoal.rollout.collector import TrajectoryCollector
from shoal.rollout.parallel.rollout import ParallelRolloutManager, RolloutReport
from shoal.rollout.samplers.sampler import Sampling
from shoal.train.processes import Processes


class SharedCollector:
    """A collector whose groups are played by all processes, each a share; everyone gets all trajectories.

    Args:
        collector: plays this process's share.
        processes: who takes part.
        ready: entered for as long as they play.
    """

    def __init__(
        self,
        collector: TrajectoryCollector | ParallelRolloutManager,
        processes: Processes,
        ready: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.collector = collector
        self._ready = ready
        self.tags = collector.tags
        self._processes = processes
        # Since the last lap: of each call, one a process that played.
        self._reports: list[list[RolloutReport]] = []

    def collect(
        self, iteration: int, sampling: Sampling, *, first_group: int = 0, n_groups: int | None = None
    ) -> list[Trajectory]:
        """Play groups once; trajectories come group by group, member by member, as from one process."""
        processes = self._processes
        n_groups = len(self.tags) if n_groups is None else n_groups
        cuts = [n_groups * rank // processes.count for rank in range(processes.count + 1)]
        first, last = cuts[processes.rank], cuts[processes.rank + 1]

        def play() -> tuple[list[bytes], RolloutReport | None]:
            if first == last:
                return [], None
            played = self.collector.collect(
                iteration, sampling, first_group=first_group + first, n_groups=last - first
            )
            refuse_no_numbers(played)
            report = self.collector.report if isinstance(self.collector, ParallelRolloutManager) else None
            return [encode_trajectory(trajectory) for trajectory in played], report

        with self._ready():
            everyone = processes.together(play)
        self._reports.append([report for _, report in everyone if report is not None])
        return [decode_trajectory(line) for lines, _ in everyone for line in lines]

    def lap(self) -> dict[str, float]:
        """How parallel rollouts went since the last lap, all calls and processes together; nothing for others."""
        calls, self._reports = self._reports, []
        reports = [report for call in calls for report in call]
        if not reports:
            return {}
        return RolloutReport(
            seconds=sum(report.seconds for report in reports),
            workers=max(sum(report.workers for report in call) for call in calls),
            engine_seconds=sum(report.engine_seconds for report in reports),
            batches=sum(report.batches for report in reports),
            worker_deaths=sum(report.worker_deaths for report in reports),
            replayed_episodes=sum(report.replayed_episodes for report in reports),
        ).metrics()

    def close(self) -> None:
        """End this process's envs and workers."""
        self.collector.close()


def refuse_no_numbers(trajectories: Sequence[Trajectory]) -> None:
    """Check what the engine said of its own tokens.

    Raises:
        DivergedError: NaN or infinity, as from weights that a too large step has spoiled.
    """
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if not all(map(math.isfinite, turn.logprobs)):
                raise DivergedError(
                    f"the engine gave log-probabilities that are no numbers (group {trajectory.group}, member "
                    f"{trajectory.member}): its weights are spoiled. Lower the learning rate (algorithm.learning_rate, "
                    f"or warmup.learning_rate at the start); resume=true goes on from the last checkpoint"
                )


def refuse_all_failed(trajectories: Sequence[Trajectory], what: str) -> None:
    """Check that something can be said and learned of these episodes.

    Raises:
        EngineError: not one was played to its end (`EnvError` if it was the env that failed first).
    """
    if any(trajectory.status == "ok" for trajectory in trajectories):
        return
    first = trajectories[0]
    kind = EnvError if first.status == "env_error" else EngineError
    raise kind(f"all {len(trajectories)} episodes of {what} failed; the first: {first.error or first.status}")
