"""Any order of submitting, finishing, failing, cancelling, stopping, killing, resuming and changing budgets.

The processes of jobs are pretended and live on when a runner is killed, which happens between any two things that
it does to the store or to a process. What is asserted is counted outside of shoal.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import tempfile
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from shoal.skills.jobs.runner import Runner

from shoal.core.errors import ConfigError, WorkerError
from shoal.skills.jobs.process import ExhaustedError, read_done, write_done, write_failure
from shoal.skills.jobs.requests import ask_to_cancel, reopen
from shoal.skills.jobs.store import NewVersion, Store, mark_of, merge_once

SLOTS, RETRIES = 2, 1
NAMES = ("a", "b", "c", "d", "e")


class Killed(BaseException):
    """The runner's process is no more."""


class Bomb:
    """Goes off at the n-th thing that is done."""

    def __init__(self) -> None:
        self.left: int | None = None

    def tick(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


class Mined(Store):
    """A store in which the bomb may go off before and after every commit."""

    bomb: Bomb

    @contextlib.contextmanager
    def transaction(self):
        outermost = not self._db.in_transaction
        with super().transaction() as db:
            yield db
            if outermost:
                self.bomb.tick()
        if outermost:
            self.bomb.tick()


class Processes:
    """The launcher of all runners, and the machine's side of it."""

    name = "pretended"

    def __init__(self, bomb: Bomb) -> None:
        self.bomb = bomb
        self.alive: dict[int, Path] = {}  # by attempt: the folder it works in
        self.watchers: dict[int, Any] = {}
        self.begun: Counter[str] = Counter()

    def launch(self, command, session, env, log):
        folder, attempt = Path(command[-3]), int(command[-1])
        self.bomb.tick()
        self.alive[attempt] = folder
        self.begun[folder.name] += 1
        self.bomb.tick()
        return {"attempt": attempt}

    def watch(self, handle, ended) -> bool:
        if handle["attempt"] not in self.alive:
            return False
        self.watchers[handle["attempt"]] = ended
        return True

    def kill(self, handle) -> None:
        self.bomb.tick()
        self.end(handle["attempt"])

    def end(self, attempt: int) -> None:
        self.alive.pop(attempt, None)
        ended = self.watchers.pop(attempt, None)
        if ended is not None:
            ended("ended")


class Jobs:
    """Work that makes its own name."""

    module = "none"

    def __init__(self, store: Store) -> None:
        self.store = store

    def prepare(self, job, *, resume):
        folder = self.store.root / "jobs" / job.name
        folder.mkdir(parents=True, exist_ok=True)
        self.store.number(job.name)
        return folder

    def session(self, job, attempt):
        return f"{job.name}-{attempt}"

    def environment(self):
        return {}

    def examine(self, attempt):
        read_done(self.store.root / attempt.run_folder, attempt.id)

    def merge(self, attempt):
        folder = self.store.root / attempt.run_folder
        done, number = read_done(folder, attempt.id), self.store.number(attempt.job)
        sha256 = self.store.put_blob(f"{attempt.job} {done['id']}".encode())

        def commit():
            head = self.store.head(number)
            before = head.id if head else None
            version = NewVersion(number, sha256, before, done["steps"], "run", True, None, {})
            return self.store.commit(
                attempt.id, [version], {number: before}, result={}, steps=done["steps"], mark=mark_of(folder)
            )

        merge_once(commit)

    def tidy(self, attempt):
        shutil.rmtree(self.store.root / attempt.run_folder, ignore_errors=True)

    def show(self):
        pass


class AtOnce:
    """An executor that works in the caller's thread; only being killed is not its task's own business."""

    def submit(self, work, *arguments):
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self):
        pass


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.bomb = Bomb()
        self.processes = Processes(self.bomb)
        self.runner: Runner | None = None
        self.phase = "run"
        self.finished: Counter[str] = Counter()  # steps of whole results by job, as their processes left them
        self.cancelled: set[str] = set()
        self.store = Store(self.folder)  # the other process, which is never killed
        self.store._db.execute("pragma synchronous=off")

    def make(self) -> Runner:
        store = Mined(self.folder)
        store._db.execute("pragma synchronous=off")
        store.bomb = self.bomb
        runner = Runner(
            store, Jobs(store), self.processes, slots=SLOTS, max_retries=RETRIES, free_memory=lambda: None
        )
        runner._merger.shutdown()
        runner._shower.shutdown()
        runner._merger = runner._shower = AtOnce()  # type: ignore[assignment]

        def search(row):
            if row.id not in self.processes.alive:
                return None
            store.set_handle(row.id, self.processes.name, {"attempt": row.id}, self.folder / "log")
            return {"attempt": row.id}

        runner._search = search  # type: ignore[method-assign]
        return runner

    def living(self, work) -> None:
        """Do something as the runner; it may be the last thing it does."""
        try:
            work()
        except Killed:
            self.lose()

    def lose(self) -> None:
        assert self.runner is not None
        self.bomb.left = None
        self.processes.watchers.clear()
        self.runner.lock.release()
        self.runner.store.close()
        self.runner = None

    def steps(self) -> None:
        runner = self.runner
        assert runner is not None
        while True:
            runner._look()
            runner._show()
            try:
                runner._handle(runner._events.get_nowait())
            except queue.Empty:
                return

    # What happens

    @precondition(lambda self: self.runner is None)
    @rule(bomb=st.one_of(st.none(), st.integers(0, 30)))
    def a_runner_starts(self, bomb) -> None:
        self.bomb.left, self.phase = bomb, "run"
        try:
            self.runner = self.make()
        except Killed:
            self.bomb.left = None
            return

        def begin() -> None:
            self.runner.lock.take()  # type: ignore[union-attr]
            self.runner._recover()  # type: ignore[union-attr]
            self.steps()

        self.living(begin)

    @precondition(lambda self: self.runner is not None)
    @rule()
    def it_goes_on(self) -> None:
        self.living(self.steps)

    @precondition(lambda self: self.runner is not None)
    @rule()
    def it_is_killed(self) -> None:
        self.lose()

    @precondition(lambda self: self.runner is not None)
    @rule(bomb=st.integers(0, 20))
    def it_will_be_killed(self, bomb) -> None:
        self.bomb.left = bomb

    @precondition(lambda self: self.runner is not None)
    @rule(phase=st.sampled_from(["drain", "kill"]))
    def it_is_told_to_stop(self, phase) -> None:
        self.phase = phase
        self.runner._phase = phase  # type: ignore[union-attr]
        self.living(self.steps)
        if self.runner is not None and phase == "kill":
            assert not self.processes.alive
        if self.runner is not None:
            self.runner._phase = self.phase = "run"

    @precondition(lambda self: self.runner is not None)
    @rule()
    def a_second_runner_is_refused(self) -> None:
        with contextlib.closing(Store(self.folder)) as store:
            second = Runner(store, Jobs(store), self.processes)
            with pytest.raises(WorkerError, match="another scheduler"):
                second.lock.take()
            second._merger.shutdown()
            second._shower.shutdown()

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def a_job_is_submitted(self, name, data) -> None:
        if name not in {row.name for row in self.store.jobs()}:
            before = [row.name for row in self.store.jobs()]
            needs = data.draw(st.lists(st.sampled_from(before), unique=True)) if before else []
            self.store.add(name, {"is": name}, needs, 100)
        else:
            self.store.add(name, {"is": name}, [], 100)  # again: changes nothing

    def chosen(self, data) -> tuple[int, Path]:
        return data.draw(st.sampled_from(sorted(self.processes.alive.items())))

    @precondition(lambda self: self.processes.alive)
    @rule(data=st.data())
    def a_process_finishes(self, data) -> None:
        attempt, folder = self.chosen(data)
        write_done(folder, attempt, {"steps": 10 + attempt})
        self.processes.end(attempt)

    @precondition(lambda self: self.processes.alive)
    @rule(data=st.data(), how=st.sampled_from(["fails", "exhausted", "vanishes"]))
    def a_process_ends_badly(self, data, how) -> None:
        attempt, folder = self.chosen(data)
        if how == "fails":
            write_failure(folder, attempt, RuntimeError("nan"))
        elif how == "exhausted":
            write_failure(folder, attempt, ExhaustedError("not learned"))
        self.processes.end(attempt)

    @rule(data=st.data())
    def somebody_cancels(self, data) -> None:
        rows = self.store.jobs("waiting", "blocked", "running")
        if rows:
            name = data.draw(st.sampled_from([row.name for row in rows]))
            ask_to_cancel(self.store, name)
            self.cancelled.add(name)

    @rule(name=st.sampled_from(NAMES), budget=st.one_of(st.none(), st.integers(1, 1000)), fresh=st.booleans())
    def somebody_retries_or_changes_a_budget(self, name, budget, fresh) -> None:
        with contextlib.suppress(ValueError, ConfigError):
            for opened in reopen(self.store, name, budget=budget, fresh=fresh):
                self.cancelled.discard(opened)

    # What must hold

    @invariant()
    def no_job_has_two_processes(self) -> None:
        folders = Counter(folder.name for folder in self.processes.alive.values())
        assert all(count == 1 for count in folders.values()), folders

    @invariant()
    def there_are_no_more_processes_than_slots(self) -> None:
        assert len(self.processes.alive) <= SLOTS

    @invariant()
    def every_result_is_counted_once(self) -> None:
        merged = [attempt for attempt in self.store.attempts() if attempt.outcome == "merged"]
        assert len({attempt.mark for attempt in merged}) == len(merged)
        used = Counter[str]()
        for attempt in merged:
            used[attempt.job] += attempt.steps or 0
            assert attempt.steps == 10 + attempt.id
        assert used == Counter({row.name: row.budget_used for row in self.store.jobs() if row.budget_used})
        assert len(self.store.versions()) == len(merged)

    @invariant()
    def what_runs_is_known(self) -> None:
        running = {attempt.id for attempt in self.store.attempts(state="running")}
        assert set(self.processes.alive) <= running
        open_jobs = [attempt.job for attempt in self.store.attempts(state="running")]
        assert len(open_jobs) == len(set(open_jobs))

    def teardown(self) -> None:
        """Nobody interferes any more: everything comes to an end, and to the right one."""
        self.bomb.left = None
        if self.runner is not None:
            self.lose()
        self.runner = self.make()
        self.runner.lock.take()
        self.runner._recover()
        for _ in range(200):
            self.steps()
            if not self.processes.alive:
                break
            attempt, folder = sorted(self.processes.alive.items())[0]
            write_done(folder, attempt, {"steps": 10 + attempt})
            self.processes.end(attempt)
        statuses = {row.name: row.status for row in self.store.jobs()}
        needs = {row.name: row.needs for row in self.store.jobs()}
        assert not {"waiting", "running", "merging"} & set(statuses.values()), statuses
        for name, status in statuses.items():
            badly = [need for need in needs[name] if statuses[need] != "completed"]
            if status == "blocked":
                assert badly, name
            if status == "skipped":
                assert name in self.cancelled
        assert not self.store.attempts(state="running")
        self.every_result_is_counted_once()
        self.runner.lock.release()
        self.runner.store.close()
        self.store.close()
        shutil.rmtree(self.folder)


def run(examples: int, steps: int, **options: Any) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps,
            suppress_health_check=list(HealthCheck), **options,
        ),
    )  # fmt: skip


def test_any_of_20_orders_of_events_ends_well() -> None:
    run(20, 25)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_of_1500_orders_of_events_ends_well() -> None:
    run(1500, 50, derandomize=False)
