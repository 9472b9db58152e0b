"""What other processes ask of a run of skills, by writing to its store."""

from __future__ import annotations

import time

from shoal.core.errors import ConfigError, WorkerError
from shoal.skills.graph.store import PATIENCE, SkillRow, Store

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
        last = store.attempts(row.name)[-1:]
        if budget is None and not fresh and last and last[0].outcome == "exhausted":
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
