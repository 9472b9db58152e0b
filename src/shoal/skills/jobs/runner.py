"""Run the jobs of a folder: wake on events, ask `decide`, write rows, then act.

The state is in the store, so this process may die at any moment: jobs go on, and the next runner adopts them. One
runner at a time holds a folder; others ask it by writing requests into the store.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from shoal.core.errors import ConfigError, ShoalError, WorkerError
from shoal.core.executors import available_memory
from shoal.core.run_folder import FolderLock
from shoal.skills.jobs.decide import (
    Action,
    Close,
    Ended,
    Event,
    Found,
    Kill,
    Launch,
    Look,
    Mark,
    Merge,
    MergeFailed,
    Phase,
    Rows,
    Tell,
    Update,
    decide,
    finished,
)
from shoal.skills.jobs.launchers import (
    FIRST_GUESS,
    RESERVE,
    Handle,
    Launcher,
    adopting_launcher,
    alive,
    resident_memory,
    start_time,
)
from shoal.skills.jobs.run import DONE, clear_marks, read_failure
from shoal.skills.jobs.store import AttemptRow, JobRow, Store

logger = logging.getLogger(__name__)
LOCK = "scheduler.lock"
STOP = "stop"  # the setting by which others ask a runner to end
LOOK = 0.5  # most seconds until a request of another process is seen


class Work(Protocol):
    """What the jobs of a graph are: the runner knows their names, needs and ends, and nothing else of them."""

    def prepare(self, job: JobRow, *, resume: bool) -> Path:
        """Lay out the folder of the next launch, or find the one to resume in."""

    def command(self, folder: Path, attempt: int) -> list[str]:
        """What a launcher runs."""

    def session(self, job: JobRow, attempt: int) -> str:
        """A name for this launch, unique in the graph."""

    def environment(self) -> Mapping[str, str]:
        """Variables of every launch."""

    def examine(self, attempt: AttemptRow) -> None:
        """Raise what is wrong with the result of a launch; return if it is whole."""

    def merge(self, attempt: AttemptRow) -> None:
        """Commit the result of a launch; in a thread of its own."""

    def merged(self, attempt: AttemptRow) -> None:
        """What a commit changes for jobs that have not begun."""

    def tidy(self, attempt: AttemptRow) -> None:
        """Keep what is to be kept of a committed launch and remove its folder; safe to repeat."""

    def show(self) -> None:
        """Write what is for people."""


class Runner:
    """Runs the jobs of one store.

    Args:
        store: of the graph.
        work: what its jobs are.
        launcher: where they run.
        slots: jobs at a time.
        max_retries: how often a failed job is launched again.
        time_limit: seconds that one launch may take; None: any.
        poll_interval: most seconds between looks for requests of other processes.
        on_event: called with each durable moment, once it is on disk.
        free_memory: bytes that can be had on this machine.
    """

    def __init__(
        self,
        store: Store,
        work: Work,
        launcher: Launcher,
        *,
        slots: int = 1,
        max_retries: int = 2,
        time_limit: float | None = None,
        poll_interval: float = LOOK,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        free_memory: Callable[[], int | None] = available_memory,
    ) -> None:
        late = time_limit is not None and not time_limit > 0  # NaN never comes
        if slots < 1 or max_retries < 0 or not poll_interval > 0 or late:
            raise ConfigError(
                "max_parallel must be at least 1, max_retries at least 0, poll_interval and time_limit positive"
            )
        self.store, self.work, self.launcher = store, work, launcher
        self.slots, self.max_retries, self.time_limit = slots, max_retries, time_limit
        self.poll_interval = min(poll_interval, LOOK)
        self.lock = FolderLock(store.root / LOCK, "another scheduler")
        self.on_complete: Callable[[str], None] | None = None
        self.on_given_up: Callable[[str], None] | None = None
        self.stopped = False  # somebody asked for the end before all was done
        self._on_event, self._free_memory = on_event, free_memory
        self._events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._merger = ThreadPoolExecutor(1, thread_name_prefix="merge")
        self._shower = ThreadPoolExecutor(1, thread_name_prefix="show")
        self._shown: Future[None] | None = None
        self._to_tidy: list[AttemptRow] = []
        self._watched: dict[int, tuple[Handle, Launcher]] = {}
        self._began: dict[int, float] = {}  # on the monotonic clock, of the launches that are watched
        self._merging: set[int] = set()  # attempts whose merge has not been handled here yet
        self._killed: set[int] = set()
        self._phase: Phase = "run"
        self._holders = 0
        self._told = 0

    # What people call

    def run(self) -> bool:
        """Run until nothing more can be done; True if every job is completed.

        Raises:
            WorkerError: another runner holds this folder.
        """
        self.lock.take()
        try:
            self.store.set_setting(STOP, None)
            self.stopped = False
            self._recover()
            for row in self.store.jobs("blocked"):
                self.store.update(row.name, status="waiting", reason=None)
            self._loop()
            self._flush()
            self._tell()
        finally:
            self._phase = "run"
            self._killed.clear()
            self.store.set_setting(STOP, None)
            self.lock.release()
        return all(row.status == "completed" for row in self.store.jobs())

    def settle(self, *, kill: bool = False) -> None:
        """Do what was asked for in a folder that no runner holds, launching nothing; with `kill` end all jobs."""
        self.lock.take()
        try:
            self._phase = "kill" if kill else "drain"
            self._recover()
            self._look()
            until = time.monotonic() + 30
            while self._killed & {a.id for a in self.store.attempts(state="running")}:
                if time.monotonic() > until:
                    raise WorkerError("jobs that were told to end are still running")
                try:
                    self._handle(self._events.get(timeout=0.5))
                except queue.Empty:
                    continue
            self._flush()
        finally:
            self._phase = "run"
            self._killed.clear()
            self.lock.release()

    def stop(self, phase: Phase) -> None:
        """Launch nothing more, and "drain" what runs, "leave" it to go on, or "kill" it."""
        self._phase = phase
        self.wake()

    def wake(self) -> None:
        """Have the rows looked at."""
        self._events.put(("wake",))

    def hold(self) -> None:
        """Keep `run` from ending, since more jobs may come; `release` gives that up."""
        self._holders += 1

    def release(self) -> None:
        """Undo one `hold`."""
        self._holders -= 1
        self.wake()

    def close(self) -> None:
        """End the threads and close the store."""
        self._merger.shutdown()
        self._shower.shutdown()
        self.store.close()

    # The loop

    def _loop(self) -> None:
        while True:
            seen = self.store.changes()
            self._look()
            self._tell()
            self._show()  # after launching: what is for people must not make a job wait
            rows = self._rows()
            if finished(rows):
                self.stopped = rows.phase != "run" or self._phase != "run"
                return
            while True:
                try:
                    self._handle(self._events.get(timeout=self.poll_interval))
                    while not self._events.empty():
                        self._handle(self._events.get_nowait())
                    break
                except queue.Empty:
                    if seen != self.store.changes() or self._overdue():
                        break

    def _look(self) -> None:
        while actions := decide(self._rows(), Look()):
            self._perform(actions)

    def _handle(self, event: tuple[Any, ...]) -> None:
        kind, *rest = event
        if kind == "ended":
            self._ended(*rest)
        elif kind == "merged":
            self._merged(*rest)

    def _rows(self) -> Rows:
        running = self.store.attempts(state="running")
        asked = self.store.setting(STOP)
        return Rows(
            jobs=self.store.jobs(),
            running=running,
            slots=self.slots,
            max_retries=self.max_retries,
            time_limit=self.time_limit,
            phase=asked if asked in ("drain", "kill") and self._phase == "run" else self._phase,
            growing=self._holders > 0,
            room=self._room(len(running)),
            now=time.time(),
            merging=frozenset(self._merging),
            killed=frozenset(self._killed),
            ages=self._ages(),
        )

    def _overdue(self) -> bool:
        limit = self.time_limit
        return limit is not None and any(
            age > limit for number, age in self._ages().items() if number not in self._killed
        )

    def _ages(self) -> dict[int, float]:
        """Seconds that launches have taken, whatever is done to the clock of this machine meanwhile."""
        now = time.monotonic()
        return {number: now - self._began[number] for number in self._watched}

    def _room(self, running: int) -> int | None:
        """Launches for which there are resources: as the launcher sees them, else the memory of this machine."""
        judge = getattr(self.launcher, "room", None)
        if judge is not None:
            return int(judge(running, self.slots))
        free = self._free_memory()
        if free is None:
            return None
        peaks = [row.peak_memory for row in self.store.attempts() if row.peak_memory]
        most = max(peaks, default=FIRST_GUESS)
        held = [resident_memory(int(handle.get("pid", 0))) for handle, _ in self._watched.values()]
        growth = sum(max(0, most - now) for now in held)
        return max(0, int((free * (1 - RESERVE) - growth) // most))

    # Acting

    def _decided(self, event: Event) -> None:
        self._perform(decide(self._rows(), event))

    def _perform(self, actions: Sequence[Action]) -> None:
        """Rows first, in one transaction; then what they speak of."""
        with self.store.transaction():
            for action in actions:
                if isinstance(action, Close):
                    logger.warning("launch %d ended: %s (%s)", action.attempt, action.outcome, action.reason)
                    self.store.end_attempt(action.attempt, action.outcome, action.reason)
                elif isinstance(action, Update):
                    self.store.update(action.job, **action.columns)
                elif isinstance(action, Mark):
                    self.store.set_ending(action.attempt, action.ending)
        for action in actions:
            if isinstance(action, Launch):
                self._launch(action.job)
            elif isinstance(action, Kill):
                self._kill(action.attempt)
            elif isinstance(action, Merge):
                self._merge(action.attempt)
            elif isinstance(action, Tell):
                self._give_up(action.job)

    def _launch(self, name: str) -> None:
        """One attempt is on record before its process exists, so that none runs unknown."""
        job = self.store.job(name)
        if job.retries:
            logger.warning("%r: launch again (%s)", name, job.reason)
        if job.rounds:
            self._flush()  # the folder of the round before must be gone
        try:
            folder = self.work.prepare(job, resume=not job.fresh)
            clear_marks(folder)
        except Exception as error:  # of its files too: this job's failure, not the graph's end
            known = isinstance(error, ShoalError | ValueError)
            reason = f"cannot be set up: {error if known else f'{type(error).__name__}: {error}'}"
            self._perform(
                [Update(name, {"status": "failed", "reason": reason, "ended": time.time()}), Tell(name)]
            )
            return
        number = self.store.begin_attempt(name, folder, job.left if job.budget_total else None)
        log = (folder / f"training-{number}.log").resolve()
        try:
            handle = self.launcher.launch(
                self.work.command(folder, number),
                self.work.session(job, number),
                self.work.environment(),
                log,
            )
        except (
            Exception
        ) as error:  # whatever keeps it from starting is this job's failure, not the graph's end
            reason = f"could not be launched: {type(error).__name__}: {error}"
            self._decided(Ended(self.store.attempt(number), reason=reason))
            return
        self.store.set_handle(number, self.launcher.name, handle, log)
        self._watch(number, handle, self.launcher)
        logger.info("running %r, launch %d%s", name, number, "" if job.fresh else " (resumed)")

    def _watch(self, number: int, handle: Handle, launcher: Launcher) -> None:
        ago = max(0.0, time.time() - self.store.attempt(number).started)  # by an earlier runner, maybe
        self._began[number] = time.monotonic() - ago
        self._watched[number] = (handle, launcher)
        if not launcher.watch(dict(handle), lambda how: self._events.put(("ended", number, how))):
            self._events.put(("ended", number, "gone"))

    def _kill(self, number: int) -> None:
        self._killed.add(number)
        handle, launcher = self._watched.get(number, ({}, self.launcher))
        if handle:
            try:
                launcher.kill(handle)
            except Exception as error:
                logger.warning("launch %d could not be ended: %s", number, error)

    def _ended(self, number: int, how: str) -> None:
        """A launch is over: what it left says how."""
        self._watched.pop(number, None)
        self._began.pop(number, None)
        attempt = self.store.attempt(number)
        if attempt.state != "running" or number in self._merging:
            return
        try:
            self.work.examine(attempt)
        except Exception as error:  # whatever a job may leave behind: it is no result
            told, final = read_failure(self.store.root / attempt.run_folder, number)
            self._decided(Ended(attempt, reason=told or f"{how}; {error}", final=final))
            return
        self._decided(Ended(attempt, done=True))

    def _merge(self, number: int) -> None:
        self._merging.add(number)
        future = self._merger.submit(self.work.merge, self.store.attempt(number))
        future.add_done_callback(lambda done: self._events.put(("merged", number, done.exception())))

    def _merged(self, number: int, error: BaseException | None) -> None:
        self._merging.discard(number)
        attempt = self.store.attempt(number)
        if error is not None:
            reason = f"merge failed: {type(error).__name__}: {error}"
            self._decided(MergeFailed(attempt, reason))
            return
        self.work.merged(attempt)
        self._to_tidy.append(attempt)
        if self.on_complete is not None:
            self.on_complete(attempt.job)

    def _give_up(self, name: str) -> None:
        logger.info("%r is given up: %s", name, self.store.job(name).reason)
        if self.on_given_up is not None:
            self.on_given_up(name)

    # For people

    def _show(self) -> None:
        """Tidy finished folders and write what is for people, in a thread; one at a time is enough."""
        done, self._to_tidy = self._to_tidy, []

        def show() -> None:
            for attempt in done:
                self.work.tidy(attempt)
            self.work.show()

        if done or self._shown is None or self._shown.done():
            self._shown = self._shower.submit(show)

    def _flush(self) -> None:
        if self._shown is not None:
            self._shown.result()
        self._show()
        if self._shown is not None:
            self._shown.result()

    def _tell(self) -> None:
        """Pass on the events that became durable since the last time."""
        if self._on_event is None:
            return
        for event in self.store.events(self._told):
            self._told = event["seq"]
            self._on_event(
                {"event": event["kind"], "step": event["seq"], "skill": event["job"], **event["detail"]}
            )

    # Taking over

    def _recover(self) -> None:
        """Adopt what runs, finish what ended while nobody looked, and tidy what a kill left."""
        for attempt in self.store.attempts(state="running"):
            handle = attempt.handle or self._search(attempt)
            if handle is None and not (self.store.root / attempt.run_folder / DONE).exists():
                self._decided(Found(attempt, "never"))
                continue
            self._decided(Found(attempt, "alive"))
            if handle is None:
                self._events.put(("ended", attempt.id, "gone"))
                continue
            name = self.store.attempt(attempt.id).launcher
            ours = name == self.launcher.name and "session" not in handle
            self._watch(attempt.id, handle, self.launcher if ours else adopting_launcher(name, handle))
        later = {attempt.job: attempt.id for attempt in self.store.attempts()}
        for attempt in self.store.attempts():
            left = attempt.outcome == "merged" and (self.store.root / attempt.run_folder).exists()
            if left and later[attempt.job] == attempt.id:
                self.work.tidy(attempt)
        self.store.sweep()

    def _search(self, attempt: AttemptRow) -> Handle | None:
        """The process of a launch that was recorded when we died before writing down what it is."""
        folder = (self.store.root / attempt.run_folder).resolve()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                parts = entry.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if parts[-4:-1] == [str(folder), "--attempt", str(attempt.id)] and "-m" in parts:
                pid = int(entry.parent.name)
                handle = {"pid": pid, "began": start_time(pid)}
                self.store.set_handle(attempt.id, "local", handle, folder / f"training-{attempt.id}.log")
                return handle
        return None


# What other processes ask of a graph


def is_held(folder: Path) -> bool:
    """Whether a runner lives on the folder."""
    return FolderLock(folder / LOCK).is_taken()


def reopen(store: Store, name: str, *, budget: int | None = None, fresh: bool = False) -> list[str]:
    """Give a job another chance, and what was blocked by it; the names of those opened.

    What failed goes on from its last checkpoint. What runs, or waits, is only given the budget; what is completed
    is worked on further with it.

    Args:
        store: of the graph.
        name: of the job.
        budget: steps that it may use in all from now on.
        fresh: begin anew instead, with other random numbers.

    Raises:
        ConfigError: nothing would be different.
    """
    with store.transaction():
        row = store.job(name)
        if budget is not None and budget <= row.budget_used:
            raise ConfigError(f"{row.name!r} has used {row.budget_used:,} steps; --budget must be more")
        if budget is not None:
            store.update(row.name, budget_total=budget, allotment=None)
            store.event("budget", row.name, steps=budget)
        if row.status in ("running", "merging", "waiting"):
            if budget is None or fresh:
                raise ConfigError(f"{row.name!r} is {row.status}; only its budget can be changed now")
            return []
        if row.status == "completed":
            if budget is None:
                raise ConfigError(f"{row.name!r} is completed; --budget STEPS works on it further")
            store.update(row.name, status="waiting", reason=None, retries=0, rounds=row.rounds + 1, fresh=1)
            return [row.name]
        last = [attempt for attempt in store.attempts(row.name)][-1:]
        if budget is None and not fresh and last and last[0].outcome == "exhausted":
            raise ConfigError(
                f"{row.name!r} used its whole budget of {row.budget_total:,} steps, so the same again would end the "
                f"same ({row.reason}); give it more with --budget STEPS, or other random numbers with --fresh"
            )
        opened = [row.name]
        for one in opened:  # grows while it is read: what waits for something reopened is reopened
            opened += [r.name for r in store.jobs("blocked") if one in r.needs and r.name not in opened]
        for one in opened:
            store.update(one, status="waiting", reason=None, retries=0, cancel=0)
        if fresh:
            store.update(row.name, fresh=1, rounds=row.rounds + 1)
        return opened


def ask_to_cancel(store: Store, name: str) -> JobRow:
    """Ask for a job to be given up; whoever runs the graph does it, or `Runner.settle`."""
    with store.transaction():
        row = store.job(name)
        if row.status not in ("waiting", "blocked", "running"):
            raise ConfigError(f"{row.name!r} is {row.status}; there is nothing to cancel")
        store.update(row.name, cancel=1)
        return row


def ask_to_stop(store: Store, *, wait: bool, patience: float = 60.0) -> bool:
    """Ask the runner of a folder to end; False if there is none.

    Args:
        store: of the graph.
        wait: let jobs in training end first; else they are ended, and go on from their checkpoints when resumed.
        patience: seconds to wait for a runner that is to end its jobs.
    """
    if not is_held(store.root):
        return False
    until = time.monotonic() + patience
    while is_held(store.root):
        if store.setting(STOP) is None:
            store.set_setting(STOP, "drain" if wait else "kill")
        if not wait and time.monotonic() > until:
            raise WorkerError(f"the scheduler of {store.root} does not answer; its process may be stopped")
        threading.Event().wait(0.05)
    store.set_setting(STOP, None)
    return True


def condition(store: Store, row: JobRow, *, held: bool) -> str:
    """What is true of a job now, where its status speaks of a process that may be gone."""
    if row.status not in ("running", "merging"):
        return row.status
    last = store.attempts(row.name, "running")[-1:]
    if last and alive(last[0].launcher, last[0].handle):
        return row.status if held else "running, no scheduler"
    if held:
        return row.status
    done = bool(last) and (store.root / last[0].run_folder / DONE).exists()
    return "done, not merged" if done else "interrupted"
