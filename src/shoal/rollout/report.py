"""The report of a rollout: how it went, and warnings about failed episodes, the first of each cause in full."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from shoal.core.data import INVALID_JSON
from shoal.rollout.hosts.episodes import Ended

logger = logging.getLogger(__name__)
MOST_CAUSES = 3
"""Failures of different causes that are logged in full."""
MOST_NOTES = 10
"""Different notes that are logged."""
PLAYED_AGAIN, LEFT_OUT = "it is played again", "it is left out"
COUNTED = "it counts as unsuccessful, with the reward on_error"


@dataclass(slots=True)
class RolloutReport:
    """How a rollout went."""

    seconds: float = 0.0
    workers: int = 0
    """Hosts with envs of their own; none where a vector env was stepped."""
    engine_seconds: float = 0.0
    batches: int = 0
    worker_deaths: int = 0
    replayed_episodes: int = 0

    def metrics(self) -> dict[str, float]:
        """As numbers for `metrics.jsonl`."""
        found = {"engine_busy": round(self.engine_seconds / self.seconds if self.seconds else 0.0, 4)}
        if self.workers:
            found["rollout_workers"] = float(self.workers)
            found["rollout_batches"] = float(self.batches)
            found["worker_deaths"] = float(self.worker_deaths)
            found["replayed_episodes"] = float(self.replayed_episodes)
        return found


class FailureLog:
    """Warns of episodes that fail: the first failures in full, later ones as a count that comes ever more rarely."""

    def __init__(self) -> None:
        self._causes: dict[bool, set[str]] = {False: set(), True: set()}  # True of those that count
        self._notes = set[str]()
        self._failures = self._left_out = self._unsaid = 0
        self._enough = 1

    def add(self, what: str, why: str, then: str) -> None:
        """Record a failed episode, or a lost worker; `then` says what follows."""
        self._failures += 1
        self._left_out += then == LEFT_OUT
        cause = re.sub(r"\d+", "", why.partition(" failed: ")[2] or why)
        causes = self._causes[then == COUNTED]
        if cause in causes or len(causes) == MOST_CAUSES:
            self._unsaid += 1
            return
        causes.add(cause)
        logger.warning("%s: %s; %s", what, why, then)

    def note(self, what: str) -> None:
        """Warn once of what is no failure; it is the same whatever numbers are in it."""
        kind = re.sub(r"[\d.]+", "", what)
        if kind not in self._notes and len(self._notes) < MOST_NOTES:
            self._notes.add(kind)
            logger.warning("%s", what)

    def sum_up(self) -> None:
        """At the end of a rollout: how many more failed, if there are four times as many as at the last count."""
        if self._unsaid and self._failures >= 4 * self._enough:
            counted = "%d more times an episode failed the same way; %d episodes are left out so far"
            logger.warning(counted, self._unsaid, self._left_out)
            self._unsaid, self._enough = 0, self._failures


def report_failures(log: FailureLog, index: int, ended: Ended) -> None:
    """Warn of what the tries at an episode failed with, the last one included."""
    trajectory = ended.trajectory
    episode = f"episode {index} of {trajectory.env}"
    for why in ended.failed:
        log.add(episode, why, PLAYED_AGAIN)
    if trajectory.status != "ok":
        log.add(episode, trajectory.error or trajectory.status, LEFT_OUT)
    elif trajectory.program_failed:
        log.add(episode, str(trajectory.error), COUNTED)
    if trajectory.requests:
        for setting in trajectory.requests.overridden:
            log.note(f"a program asks for {setting.what}: the run decides it, so the run's own value is used")
        for wish in (one.what for one in trajectory.requests.unenforced if one.what != INVALID_JSON):
            log.note(
                f"a program asks for {wish}: the model is told so where words can say it, nothing enforces it"
            )
        for refused in () if trajectory.truncated else trajectory.requests.refused:
            log.note(f"the gateway refused a request of a program: {refused.what}")
