"""Skills that are proposed one by one while others train."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from shoal.core.errors import ConfigError
from shoal.skills.learning.proposers import Proposer
from shoal.skills.learning.scheduler import OnSkill, SkillScheduler


class Frontier:
    """Proposes skills in a thread of its own, and sleeps while the frontier is blocked.

    A proposed skill that needs one still in training is queued, and nothing more is proposed until all it needs is
    completed or given up: what the next proposal should be depends on how that training ends. A proposer that knows
    all its skills beforehand (`foresees = True`) is not made to wait.

    Args:
        scheduler: where skills go.
        proposer: names the skills.
        max_nodes: most skills in the graph.
        on_complete: called with a completed skill.
        on_failed: called with a failed or cancelled one.
    """

    def __init__(
        self,
        scheduler: SkillScheduler,
        proposer: Proposer,
        max_nodes: int,
        on_complete: OnSkill | None = None,
        on_failed: OnSkill | None = None,
    ) -> None:
        self.scheduler, self.proposer, self.max_nodes = scheduler, proposer, max_nodes
        self.error: BaseException | None = None
        self._growing = False
        self.blocked_on: tuple[str, ...] = ()  # skills that proposing waits for
        self._changed = threading.Condition()
        self._failures = 0
        scheduler.set_callbacks(
            self._passing(on_complete, failed=False), self._passing(on_failed, failed=True)
        )

    def run(self) -> bool:
        """Grow and train to the end; True if every skill is completed.

        Raises:
            WorkerError: another scheduler is running on this folder; nothing was proposed.
            Exception: what the proposer raised, after all that was queued has been trained.
        """
        self.scheduler.take()
        self.error, self._growing = None, True
        self.scheduler.hold()
        thread = threading.Thread(target=self._grow, name="frontier", daemon=True)
        thread.start()
        try:
            finished = self.scheduler.run()
        finally:
            with self._changed:
                self._growing = False  # whatever ended the scheduler, nothing more is proposed
                self._changed.notify_all()
            thread.join(timeout=5)
        if self.error is not None:
            raise self.error
        return finished

    def _grow(self) -> None:
        try:
            while self._propose():
                pass
        except BaseException as error:
            self.error = error
        finally:
            self.scheduler.release()

    def _propose(self) -> bool:
        """Add one skill, and wait until the frontier is open again; False when there are no more."""
        rows = self.scheduler.store.skills()
        if not self._growing or len(rows) >= self.max_nodes:
            return False
        known = [row.spec for row in rows]
        completed = [row.name for row in rows if row.status == "completed"]
        skill = self.proposer.next_skill(known, completed, self.scheduler.get_failed_skills())
        if skill is None or not self._growing:
            return False
        if skill.name in {one.name for one in known}:  # it would be named for ever
            raise ConfigError(f"the proposer named {skill.name!r}, which is among the skills already")
        self.scheduler.add_skill(skill.name, skill)
        if not getattr(self.proposer, "foresees", False):
            self._wait_for(self.scheduler.store.skill(skill.name).dependencies)
        return True

    def _wait_for(self, needed: Sequence[str]) -> None:
        with self._changed:
            failures = self._failures
            while self._growing:
                statuses = {name: self.scheduler.get_status(name) for name in needed}
                self.blocked_on = tuple(
                    n for n, s in statuses.items() if s in ("waiting", "running", "merging")
                )
                if not self.blocked_on or self._failures != failures:
                    self.blocked_on = ()
                    return
                self._changed.wait(timeout=1.0)

    def _passing(self, then: OnSkill | None, *, failed: bool) -> OnSkill:
        def callback(name: str, data: dict[str, Any]) -> None:
            with self._changed:
                self._failures += failed
                self._changed.notify_all()
            if then is not None:
                then(name, data)

        return callback
