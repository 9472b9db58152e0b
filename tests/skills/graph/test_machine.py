"""Any order of adding, finishing, failing, cancelling, stopping, killing, resuming and changing budgets.

The processes of trainings are pretended and live on when a scheduler is killed, which happens between any two things
that it does to the store or to a process. What is asserted is counted outside of shoal.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.skills.conftest import skill, some_net

from shoal.core.errors import ConfigError, WorkerError
from shoal.skills.graph.process import NotLearnedError, write_failure
from shoal.skills.graph.requests import ask_to_cancel, reopen
from shoal.skills.graph.store import Store
from shoal.skills.learning.trainer import TrainingConfig
from shoal.skills.learning.training import Run, finish_training
from shoal.skills.scheduler import SkillScheduler

SLOTS, RETRIES, BUDGET = 2, 1, 1000
NAMES = ("a", "b", "c", "d", "e")
NET = some_net("of all").params()


class Killed(BaseException):
    """The scheduler's process is no more."""


class Machine(RuleBasedStateMachine):
    alive: dict[int, Path]  # pretended processes, by attempt: the folder each works in

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.left: int | None = None  # things to be done until the scheduler is killed
        self.alive = {}
        self.scheduler: SkillScheduler | None = None
        self.cancelled: set[str] = set()
        self.store = Store(self.folder, create=True)  # of the other process, which is never killed
        self.store._db.execute("pragma synchronous=off")
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("os.fsync", lambda descriptor: None)  # nobody pulls the plug here
        place = "shoal.skills.scheduler."
        self.patch.setattr(place + "Store", self.mined())
        self.patch.setattr(place + "command_lines", self.command_lines)
        self.patch.setattr(place + "process_handle", lambda number: {"attempt": number})
        self.patch.setattr(place + "adopting_launcher", lambda handle, folder: self)

    def tick(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed

    def mined(self) -> type[Store]:
        """A store in which the scheduler may be killed before and after every commit."""
        tick = self.tick

        class Mined(Store):
            @contextlib.contextmanager
            def transaction(self) -> Iterator[Any]:
                outermost = not self._db.in_transaction
                with super().transaction() as db:
                    yield db
                    if outermost:
                        tick()
                if outermost:
                    tick()

        return Mined

    # The launcher of all schedulers

    name = "local"

    def launch(self, command, session, env, log) -> dict[str, Any]:
        self.tick()
        self.alive[int(command[-1])] = Path(command[-3])
        self.tick()
        return {"attempt": int(command[-1])}

    def command_lines(self) -> list[tuple[int, list[str]]]:
        return [(n, ["-m", str(folder), "--attempt", str(n)]) for n, folder in self.alive.items()]

    def poll(self, handle) -> str | None:
        return None if handle["attempt"] in self.alive else "ended"

    def kill(self, handle) -> None:
        self.tick()
        self.alive.pop(handle["attempt"], None)

    # The scheduler's side

    def living(self, work) -> None:
        """Do something as the scheduler; it may be the last thing it does."""
        try:
            work()
        except Killed:
            self.lose()

    def lose(self) -> None:
        self.left = None
        if self.scheduler is not None:
            self.scheduler.close()
        self.scheduler = None

    def begin(self) -> None:
        self.scheduler = SkillScheduler(
            self.folder, SLOTS, max_retries=RETRIES, launcher=self,  # type: ignore[arg-type]
            config=TrainingConfig(total_timesteps=BUDGET),
        )  # fmt: skip
        self.scheduler.store._db.execute("pragma synchronous=off")
        self.scheduler.take()
        self.scheduler._recover()
        self.steps()

    def steps(self) -> None:
        """Go on until there is nothing to do but wait."""
        s = self.scheduler
        assert s is not None
        before = -1
        while before != (before := s.store.changes()):
            s._woken.set()
            s._step()

    # What happens

    @precondition(lambda self: self.scheduler is None)
    @rule(left=st.one_of(st.none(), st.integers(0, 30)))
    def a_scheduler_starts(self, left) -> None:
        self.left = left
        self.living(self.begin)

    @precondition(lambda self: self.scheduler is not None)
    @rule()
    def it_goes_on(self) -> None:
        self.living(self.steps)

    @precondition(lambda self: self.scheduler is not None)
    @rule()
    def it_is_killed(self) -> None:
        self.lose()

    @precondition(lambda self: self.scheduler is not None)
    @rule(left=st.integers(0, 20))
    def it_will_be_killed(self, left) -> None:
        self.left = left

    @precondition(lambda self: self.scheduler is not None)
    @rule(kill=st.booleans())
    def it_is_told_to_stop(self, kill) -> None:
        self.scheduler.stop(kill=kill)  # type: ignore[union-attr]
        self.living(self.steps)
        if self.scheduler is not None:
            assert not (kill and self.alive)
            self.lose()

    @precondition(lambda self: self.scheduler is not None)
    @rule()
    def a_second_scheduler_is_refused(self) -> None:
        second = SkillScheduler(self.folder, launcher=self)  # type: ignore[arg-type]
        with pytest.raises(WorkerError, match="another scheduler"):
            second.run()
        second.store.close()

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def a_skill_is_added(self, name, data) -> None:
        before = [row.name for row in self.store.skills()]
        needs = data.draw(st.lists(st.sampled_from(before), unique=True)) if before else []
        self.store.add_skill(skill(name, "wood"), [] if name in before else needs, BUDGET)

    def chosen(self, data) -> tuple[int, Path]:
        return data.draw(st.sampled_from(sorted(self.alive.items())))

    def finish(self, attempt: int, folder: Path) -> None:
        run = Run.open(folder)
        own = next(local for local, index in run.local_to_global.items() if index == run.expert)
        finish_training(folder, {own: NET}, {own: 10 + attempt}, attempt=attempt)
        del self.alive[attempt]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_training_finishes(self, data) -> None:
        self.finish(*self.chosen(data))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), how=st.sampled_from(["fails", "exhausted", "vanishes"]))
    def a_training_ends_badly(self, data, how) -> None:
        attempt, folder = self.chosen(data)
        if how == "fails":
            write_failure(folder, attempt, RuntimeError("nan"))
        elif how == "exhausted":
            write_failure(folder, attempt, NotLearnedError("not learned"))
        del self.alive[attempt]

    @rule(data=st.data())
    def somebody_cancels(self, data) -> None:
        rows = self.store.skills("waiting", "blocked", "running")
        if rows:
            name = data.draw(st.sampled_from([row.name for row in rows]))
            ask_to_cancel(self.store, name)
            self.cancelled.add(name)

    @rule(name=st.sampled_from(NAMES), budget=st.one_of(st.none(), st.integers(1, 3000)), fresh=st.booleans())
    def somebody_retries_or_changes_a_budget(self, name, budget, fresh) -> None:
        with contextlib.suppress(ValueError, ConfigError):
            for opened in reopen(self.store, name, budget=budget, fresh=fresh):
                self.cancelled.discard(opened)

    # What must hold

    @invariant()
    def no_skill_has_two_processes_and_there_are_no_more_than_slots(self) -> None:
        assert len(set(self.alive.values())) == len(self.alive) <= SLOTS

    @invariant()
    def every_result_is_counted_once(self) -> None:
        merged = [attempt for attempt in self.store.attempts() if attempt.outcome == "merged"]
        used = Counter[str]()
        for attempt in merged:
            assert attempt.frames == 10 + attempt.id
            used[attempt.skill] += attempt.frames
        assert used == Counter({row.name: row.budget_used for row in self.store.skills() if row.budget_used})
        assert len(self.store.versions()) == len(merged)

    @invariant()
    def what_runs_is_known(self) -> None:
        running = self.store.attempts(running=True)
        assert set(self.alive) <= {attempt.id for attempt in running}
        assert sorted(a.skill for a in running) == sorted(row.name for row in self.store.skills("running"))

    def teardown(self) -> None:
        """Nobody interferes any more: everything comes to an end, and to the right one."""
        self.lose()
        self.begin()
        while self.alive:
            self.finish(*min(self.alive.items()))
            self.steps()
        rows = {row.name: row for row in self.store.skills()}
        for row in rows.values():
            assert row.status in ("completed", "failed", "blocked", "skipped"), row
            if row.status == "blocked":
                assert any(rows[need].status != "completed" for need in row.dependencies), row
            if row.status == "skipped":
                assert row.name in self.cancelled
        self.every_result_is_counted_once()
        self.lose()
        self.store.close()
        self.patch.undo()
        shutil.rmtree(self.folder)


def run(examples: int, steps: int, **options: Any) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps,
            suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink), **options,
        ),
    )  # fmt: skip


def test_any_of_10_orders_of_events_ends_well() -> None:
    run(10, 25)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_of_500_orders_of_events_ends_well() -> None:
    run(500, 50, derandomize=False)
