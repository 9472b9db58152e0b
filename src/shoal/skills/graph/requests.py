"""What other processes ask of a run of skills, by writing to its store."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from shoal.core.errors import ConfigError, WorkerError
from shoal.skills.graph.store import PATIENCE, SkillRow, Store
from shoal.skills.plan import dependencies
from shoal.skills.spec import Features, Skill

logger = logging.getLogger(__name__)

STOP = "stop"  # the setting by which others ask a scheduler to end: "drain" or "kill"


def reopen(store: Store, name: str, *, budget: int | None = None, fresh: bool = False) -> list[str]:
    """Give a skill another chance, and what was blocked by it; the names of those opened.

    What failed goes on from its last checkpoint. What runs, or waits, is only given the budget; what is completed
    is trained further with it.

    Args:
        store: of the run.
        name: of the skill.
        budget: env steps that it may use in all from now on.
        fresh: begin anew instead, with other random numbers.

    Raises:
        ConfigError: nothing would be different.
    """
    with store.transaction():
        row = store.skill(name)
        if budget is not None and budget <= row.budget_used:
            raise ConfigError(f"{row.name!r} has used {row.budget_used:,} steps; --budget must be more")
        if budget is not None:
            store.update_skill(row.name, budget_total=budget, allotment=None)
            store.event("budget", row.name, steps=budget)
        if row.status in ("running", "waiting"):
            if budget is None or fresh:
                raise ConfigError(f"{row.name!r} is {row.status}; only its budget can be changed now")
            return []
        if row.status == "completed":
            if budget is None:
                raise ConfigError(f"{row.name!r} is completed; --budget STEPS trains it further")
            store.update_skill(
                row.name, status="waiting", reason=None, retries=0, rounds=row.rounds + 1, fresh=1
            )
            return [row.name]
        if budget is None and not fresh and is_exhausted(store, row.name):
            raise ConfigError(
                f"{row.name!r} would end the same again ({row.reason}): give it more than {row.budget_total:,} steps "
                "with --budget STEPS, or let it begin anew, with other random numbers, with --fresh"
            )
        opened = [row.name]
        for one in opened:  # grows while it is read: what waits for something reopened is reopened
            blocked = store.skills("blocked")
            opened += [r.name for r in blocked if one in r.dependencies and r.name not in opened]
        for one in opened:
            store.update_skill(one, status="waiting", reason=None, retries=0, cancel=0)
        if fresh:
            store.update_skill(row.name, fresh=1, rounds=row.rounds + 1)
        return opened


def is_exhausted(store: Store, name: str) -> bool:
    """Whether the last launch of a skill ended in a way in which the next one would end, too."""
    return [attempt.outcome for attempt in store.attempts(name)[-1:]] == ["exhausted"]


def revise(store: Store, skills: Sequence[Skill], features: Features, budget: int) -> None:
    """Take over changed descriptions of skills that are not trained yet; they begin anew, with `budget` env steps.

    Raises:
        ConfigError: a skill that is trained, or in training, has changed.
    """
    now = {skill.name: skill for skill in skills}
    with store.transaction():
        rows = store.skills()
        changed = [row for row in rows if now.get(row.name, row.spec).as_dict() != row.spec.as_dict()]
        if trained := [row for row in changed if row.status in ("completed", "running")]:
            raise ConfigError(
                f"{trained[0].name!r} is {trained[0].status}, and its description has changed: undo the change, give "
                "the skill another name, or train in another folder"
            )
        left = [row for row in rows if row.status not in ("completed", "running")]
        if gone := [row.name for row in left if row.name not in now]:
            logger.warning(
                "not described any more, but still trained: %s; `shoal skills cancel` gives a skill up",
                ", ".join(map(repr, gone)),
            )
        every = [*skills, *(row.spec for row in rows if row.name not in now)]
        for row in left if changed else ():
            if row.name in now:
                store.update_skill(row.name, dependencies=dependencies(now[row.name], every, features))
        for row in changed:
            spec, total = now[row.name].as_dict(), row.budget_used + budget
            store.update_skill(row.name, spec=spec, budget_total=total, allotment=None, fresh=1)
            if store.skill(row.name).status != "waiting":
                reopen(store, row.name, fresh=True)
            logger.info("the description of %r has changed: it begins anew", row.name)


def ask_to_cancel(store: Store, name: str) -> SkillRow:
    """Ask for a skill to be given up; its scheduler does it, or `SkillScheduler.settle` where none runs."""
    with store.transaction():
        row = store.skill(name)
        if row.status not in ("waiting", "blocked", "running"):
            raise ConfigError(f"{row.name!r} is {row.status}; there is nothing to cancel")
        store.update_skill(row.name, cancel=1)
        return row


def ask_to_stop(store: Store, *, wait: bool) -> bool:
    """Ask the scheduler of a folder to end, and wait until it has; False if there is none.

    Args:
        store: of the run.
        wait: let trainings end first; else they are ended, and go on from their checkpoints when resumed.
    """
    if not store.is_held():
        return False
    until, how = time.monotonic() + PATIENCE, "drain" if wait else "kill"
    while store.is_held():
        if store.setting(STOP) not in ("kill", how):  # which ends also what others wait for
            store.set_setting(STOP, how)
        if not wait and time.monotonic() > until:
            raise WorkerError(f"the scheduler of {store.root} does not answer; its process may be stopped")
        time.sleep(0.05)
    store.set_setting(STOP, None)
    return True
