"""Warnings about failed episodes: the first of each cause in full, the others as a count."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)
MOST_CAUSES = 3
"""Failures of different causes that are logged in full."""
MOST_NOTES = 10
"""Different notes that are logged."""
PLAYED_AGAIN, LEFT_OUT = "it is played again", "it is left out"
COUNTED = "it counts as unsuccessful, with the reward on_error"


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
