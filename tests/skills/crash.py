"""A process to be killed: `crash.py train|merge|schedule POINT …`.

POINT is `name:n`: SIGKILL itself at the n-th time it comes by `name`, one of fsync, replace, replaced, commit,
committed; or `-` for none. Prints one JSON line after each durable moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from shoal.skills.graph.store import Store

seen: Counter[str] = Counter()
armed = ["", 0]


def point(name: str) -> None:
    seen[name] += 1
    if armed[0] == name and seen[name] == armed[1]:
        os.kill(os.getpid(), signal.SIGKILL)


def arm(text: str) -> None:
    """Put the points into the calls that make data durable."""
    if text == "-":
        return
    armed[0], armed[1] = text.split(":")[0], int(text.split(":")[1])
    fsync, replace, transaction = os.fsync, os.replace, Store.transaction

    def watched_fsync(descriptor: int) -> None:
        point("fsync")
        fsync(descriptor)

    def watched_replace(source: str, target: str) -> None:
        point("replace")
        replace(source, target)
        point("replaced")

    @contextlib.contextmanager
    def watched_transaction(self: Store):
        outermost = not self._db.in_transaction
        with transaction(self) as db:
            yield db
            if outermost:
                point("commit")
        if outermost:
            point("committed")

    os.fsync, os.replace, Store.transaction = watched_fsync, watched_replace, watched_transaction  # type: ignore[assignment,method-assign]


def tell(event: dict) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def train(folder: str, attempt: str) -> None:
    from shoal.skills.learning.run import run_training

    run_training(folder, int(attempt))
    tell({"event": "trained"})


def merge(base: str, *numbers: str) -> None:
    """Merge these attempts of finished runs, one after another."""
    from shoal.skills.learning.merge import process_completed_training

    store = Store(base)
    for number in numbers:
        attempt = store.attempt(int(number))
        if attempt.outcome == "merged":
            continue
        row = store.skill(attempt.skill)
        process_completed_training(
            Path(base) / attempt.run_folder, row.name, int(row.expert or 0), base, attempt=attempt.id,
            store=store, keep_run=True,
        )  # fmt: skip
        tell({"event": "merge", "attempt": attempt.id})


def schedule(base: str, config: str) -> None:
    from shoal.skills.learning.trainer import TrainingConfig
    from shoal.skills.scheduler import SkillScheduler

    settings = TrainingConfig(**json.loads(config))
    scheduler = SkillScheduler(
        base,
        2,
        0.2,
        10**6,
        config=settings,
        on_event=tell,
    )
    scheduler.run()  # who looks at the store sees whether all is completed; some skill may have been cancelled


if __name__ == "__main__":
    what, where, *arguments = sys.argv[1:]
    arm(where)
    {"train": train, "merge": merge, "schedule": schedule}[what](*arguments)
