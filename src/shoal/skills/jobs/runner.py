"""Run the jobs of a folder: wake on events, ask `decide`, write rows, then act; and the launchers of processes.

The state is in the store, so this process may die at any moment: jobs go on, and the next runner adopts them. One
runner at a time holds a folder; others ask it by writing requests into the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import select
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from shoal.core.errors import ConfigError, ShoalError, WorkerError, did_you_mean
from shoal.core.executors import available_cpus, available_memory, connect_ray
from shoal.core.files import cache_folder
from shoal.core.run_folder import FolderLock, locked
from shoal.core.workers import command_lines
from shoal.skills.jobs.store import (
    DONE,
    Action,
    AttemptRow,
    Close,
    Ended,
    Event,
    Found,
    JobRow,
    Kill,
    Launch,
    Look,
    Mark,
    Merge,
    MergeFailed,
    NotPrepared,
    Phase,
    Rows,
    Store,
    Tell,
    Update,
    clear_marks,
    decide,
    finished,
    read_failure,
)

logger = logging.getLogger(__name__)
LOCK = "scheduler.lock"
STOP = "stop"  # the setting by which others ask a runner to end
LOOK = 0.5  # most seconds until a request of another process is seen
ENDING_SECONDS = 30.0  # for which jobs that were told to end are waited for
REST = 1.0  # seconds until a job that could not be started is tried again; doubled each time


class Work(Protocol):
    """What the jobs of a graph are: the runner knows their names, needs and ends, and nothing else of them."""

    def prepare(self, job: JobRow, *, resume: bool) -> Path:
        """Lay out the folder of the next launch, or find the one to resume in."""

    module: str  # what a launcher runs, as `python -m MODULE FOLDER --attempt N`

    def session(self, job: JobRow, attempt: int) -> str:
        """A name for this launch, unique in the graph."""

    def environment(self) -> Mapping[str, str]:
        """Variables of every launch."""

    def examine(self, attempt: AttemptRow) -> None:
        """Raise what is wrong with the result of a launch; return if it is whole."""

    def merge(self, attempt: AttemptRow) -> None:
        """Commit the result of a launch; in a thread of its own."""

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
        on_event: called with each durable moment from now on, once it is on disk.
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
        check_limits(slots, max_retries, poll_interval, time_limit)
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
        self._resting: dict[str, float] = {}  # until when on the monotonic clock
        self._busy = threading.Lock()  # of who runs or settles: the lock of the folder knows processes alone
        self._merging: set[int] = set()  # attempts whose merge has not been handled here yet
        self._killed: set[int] = set()
        self._phase: Phase = "run"
        self._settling = False
        self._holders = 0
        self._told = store.last_event()

    # What people call

    def run(self) -> bool:
        """Run until nothing more can be done; True if every job is completed.

        Raises:
            WorkerError: another runner holds this folder.
        """
        with self._held():
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
                self.store.set_setting(STOP, None)
        return all(row.status == "completed" for row in self.store.jobs())

    def settle(self, *, kill: bool = False) -> None:
        """Do what was asked for in a folder that no runner holds, launching nothing; with `kill` end all jobs.

        Results are left to who runs the graph: what becomes of them follows from its options.
        """
        with self._held():
            self._phase, self._settling = "kill" if kill else "drain", True
            self._recover()
            self._look()
            until = time.monotonic() + ENDING_SECONDS
            while self._killed & {a.id for a in self.store.attempts(state="running")}:
                if time.monotonic() > until:
                    raise WorkerError(
                        f"jobs that were told to end are still running{self._whose_end_is_unknown()}"
                    )
                try:
                    self._handle(self._events.get(timeout=0.5))
                except queue.Empty:
                    continue
            self._flush()

    def take(self) -> None:
        """Hold the folder, which nobody but this runner may run then, in one thread.

        Raises:
            WorkerError: another process runs it, or another thread of this one.
        """
        if self._busy.locked():
            raise self._taken()
        self.lock.take()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise self._taken()
        try:
            self.lock.take()
            yield
        finally:
            self._phase, self._settling = "run", False
            self._killed.clear()
            self.lock.release()
            self._busy.release()

    def _taken(self) -> WorkerError:
        return WorkerError(
            f"another thread of this process is running {self.store.root}; stop it or wait for it"
        )

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
        """End the threads, close the store and the launcher."""
        self._merger.shutdown()
        self._shower.shutdown()
        self.store.close()  # first: it is closed whatever a launcher of others raises
        getattr(self.launcher, "close", lambda: None)()

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
                    if seen != self.store.changes() or self._overdue() or self._rested():
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
        self._resting = {name: until for name, until in self._resting.items() if until > time.monotonic()}
        return Rows(
            jobs=self.store.jobs(), running=running, slots=self.slots, max_retries=self.max_retries,
            time_limit=self.time_limit,
            phase=asked if asked in ("drain", "kill") and self._phase == "run" else self._phase,
            growing=self._holders > 0, room=self._room(len(running)), now=time.time(),
            merging=frozenset(self._merging), killed=frozenset(self._killed), ages=self._ages(),
            resting=frozenset(self._resting),
        )  # fmt: skip

    def _overdue(self) -> bool:
        limit = self.time_limit
        return limit is not None and any(
            age > limit for number, age in self._ages().items() if number not in self._killed
        )

    def _rested(self) -> bool:
        return any(until <= time.monotonic() for until in self._resting.values())

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
                    why = f" ({action.reason})" if action.reason else ""
                    logger.warning("launch %d ended: %s%s", action.attempt, action.outcome, why)
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
            self._rest(job)
            self._decided(NotPrepared(name, reason, final=known))
            return
        number = self.store.begin_attempt(name, folder, job.left if job.budget_total else None)
        log = (folder / f"training-{number}.log").resolve()
        try:
            handle = self.launcher.launch(
                [sys.executable, "-m", self.work.module, str(folder.resolve()), "--attempt", str(number)],
                self.work.session(job, number),
                self.work.environment(),
                log,
            )
        except Exception as error:  # whatever keeps it from starting: this job's failure, not the graph's end
            # It may have started, and only the answer been lost.
            try:
                found = self._search(self.store.attempt(number))
            except WorkerError:
                found = None
            if found is None:
                log.unlink(missing_ok=True)  # without these one that starts after all ends at once
                log.with_suffix(".sh").unlink(missing_ok=True)
                reason = f"could not be launched: {type(error).__name__}: {error}"
                self._rest(job)
                self._decided(Ended(self.store.attempt(number), reason=reason))
                return
            self._adopt(number, found)
        else:
            self.store.set_handle(number, self.launcher.name, handle, log)
            self._watch(number, handle, self.launcher)
        logger.info("running %r, launch %d%s", name, number, "" if job.fresh else " (resumed)")

    def _rest(self, job: JobRow) -> None:
        """What is wrong may pass, such as a full disk or a queue that does not answer."""
        self._resting[job.name] = time.monotonic() + REST * 2**job.retries

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

    def _ended(self, number: int, how: str | WorkerError) -> None:
        """A launch is over: what it left says how."""
        if isinstance(how, WorkerError):
            raise how
        self._watched.pop(number, None)
        self._began.pop(number, None)
        attempt = self.store.attempt(number)
        if attempt.state != "running" or number in self._merging:
            return
        if self._settling and number not in self._killed:
            return
        try:
            self.work.examine(attempt)
        except Exception as error:  # whatever a job may leave behind: it is no result
            told, final = read_failure(self.store.root / attempt.run_folder, number)
            self._decided(Ended(attempt, reason=told or f"{how}; {error}", final=final))
            return
        if self._settling and not self.store.job(attempt.job).cancel:
            self._killed.discard(number)  # it was faster, and waits to be merged
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
        self._to_tidy.append(attempt)
        if self.on_complete is not None:
            self.on_complete(attempt.job)

    def _give_up(self, name: str) -> None:
        logger.info("%r is given up: %s", name, self.store.job(name).reason)
        if self.on_given_up is not None:
            self.on_given_up(name)

    def _whose_end_is_unknown(self) -> str:
        watched = [self._watched[number] for number in sorted(self._killed & self._watched.keys())]
        silent = [
            handle["slurm"]
            for handle, launcher in watched
            if isinstance(launcher, SlurmLauncher) and launcher.state(handle) == UNKNOWN
        ]
        told = ", ".join(str(number) for number in silent)
        return f", as far as is known: SLURM does not answer (batch jobs {told})" if silent else ""

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
            self._adopt(attempt.id, handle)
        later = {attempt.job: attempt.id for attempt in self.store.attempts()}
        for attempt in self.store.attempts():
            left = attempt.outcome == "merged" and (self.store.root / attempt.run_folder).exists()
            if left and later[attempt.job] == attempt.id:
                self.work.tidy(attempt)
        self.store.sweep()

    def _adopt(self, number: int, handle: Handle) -> None:
        name = self.store.attempt(number).launcher
        ours = name == self.launcher.name and "session" not in handle
        launcher = self.launcher if ours else adopting_launcher(name, handle)
        if launcher is None:
            self._events.put(("ended", number, "gone"))
        else:
            self._watch(number, handle, launcher)

    def _search(self, attempt: AttemptRow) -> Handle | None:
        """What a launch became that was recorded before we died, or before its start went unanswered."""
        folder = (self.store.root / attempt.run_folder).resolve()
        log = folder / f"training-{attempt.id}.log"
        launcher: Any = self.launcher
        if launcher.name != "slurm" and log.with_suffix(".sh").exists():
            # `stop` does not know what launched it
            launcher = SlurmLauncher()
        find = getattr(launcher, "find", lambda session, log: None)
        handle: Handle | None = find(self.work.session(self.store.job(attempt.job), attempt.id), log)
        if handle is not None:
            self.store.set_handle(attempt.id, launcher.name, handle, log)
            return handle
        for pid, words in command_lines():
            if words[-3:] == [str(folder), "--attempt", str(attempt.id)] and "-m" in words:
                handle = {"pid": pid, "began": start_time(pid)}
                self.store.set_handle(attempt.id, "local", handle, log)
                return handle
        return None


def check_limits(slots: Any, max_retries: Any, poll_interval: Any = LOOK, time_limit: Any = None) -> None:
    """Refuse what no graph can be run with, before anything is made for it."""
    whole = isinstance(slots, Integral) and isinstance(max_retries, Integral)
    times = [poll_interval, 1 if time_limit is None else time_limit]
    if not (whole and slots >= 1 and max_retries >= 0) or not all(
        isinstance(one, SupportsFloat) and float(one) > 0  # NaN never comes
        for one in times
    ):
        raise ConfigError(
            "max_parallel (slots) must be a whole number and at least 1, max_retries at least 0, poll_interval and "
            f"time_limit positive, got {slots!r}, {max_retries!r}, {poll_interval!r} and {time_limit!r}"
        )


def put_away(folder: Path, kept: Path, *also: str) -> None:
    """Move the logs of launches, and the files named, to a folder of their own and remove theirs; safe to repeat."""
    kept.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("training-*.log"), *(folder / name for name in also)]:
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, kept / path.name)
    shutil.rmtree(folder, ignore_errors=True)


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
    until, how = time.monotonic() + patience, "drain" if wait else "kill"
    while is_held(store.root):
        if store.setting(STOP) not in ("kill", how):  # which ends also what others wait for
            store.set_setting(STOP, how)
        if not wait and time.monotonic() > until:
            raise WorkerError(f"the scheduler of {store.root} does not answer; its process may be stopped")
        threading.Event().wait(0.05)
    store.set_setting(STOP, None)
    return True


def condition(store: Store, row: JobRow, *, held: bool) -> str:
    """What is true of a job now, where its status speaks of a process that may be gone."""
    if held or row.status not in ("running", "merging"):
        return row.status
    last = store.attempts(row.name, "running")[-1:]
    if last and alive(last[0].launcher, last[0].handle):
        return "running, no scheduler"
    folder = store.root / last[0].run_folder if last else None
    if folder is not None and (folder / DONE).exists():
        return "done, not merged"
    submitted = folder is not None and not last[0].handle and (folder / f"training-{last[0].id}.sh").exists()
    return "not known" if submitted else "interrupted"  # of a batch job whose number nobody noted


# Where jobs run: local processes, tmux sessions to watch, Ray, SLURM. None gets its command by a shell's parsing.
#
# A launcher starts a command and later says that it ended. All but Ray's outlive the scheduler; a new one adopts them
# by process id and start time, or by the number that SLURM gave. The exit status is a hint only: what counts is the
# mark that a job leaves in its folder.

Handle = dict[str, Any]
OnEnd = Callable[[str | WorkerError], None]
"""Called from another thread with how it ended, in words, or why that cannot be known, which ends the run."""


class Launcher(Protocol):
    """Starts jobs.

    One with a method `room(running, slots)` says itself how many more it has resources for; one with `find(session,
    log)` finds the handle of a launch that `launch` did not return, since it raised or the scheduler died; one with
    `close()` is told when nothing more is to be launched for now.
    """

    name: str

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Start `command`, its output going to `log`; returns plain data that finds it again."""

    def watch(self, handle: Handle, ended: OnEnd) -> bool:
        """Call `ended` when it is over; False if it is not running any more."""

    def kill(self, handle: Handle) -> None:
        """End it and all it started."""


LAUNCHERS = ("local", "tmux", "ray", "slurm")
TMUX_TRIES = 20  # while its server, whose last session has ended, is on its way out


def make_launcher(
    name: str,
    *,
    gpus: float = 0.0,
    slots: int = 1,
    folder: Path | str = ".",
    sbatch: Sequence[str] = (),
) -> Launcher:
    """A launcher by name.

    Args:
        name: one of `LAUNCHERS`.
        gpus: per job, for Ray.
        slots: jobs at a time, by which Ray's CPUs are shared out.
        folder: of the graph; its tmux server is named after it.
        sbatch: options for SLURM, such as `--partition=gpu`.
    """
    if name == "local":
        return LocalLauncher()
    if name == "tmux":
        return TmuxLauncher(server_of(folder))
    if name == "ray":
        return RayLauncher(gpus=gpus, slots=slots)
    if name == "slurm":
        return SlurmLauncher(sbatch)
    raise ConfigError(f"no launcher named {name!r}.{did_you_mean(name, LAUNCHERS)}")


def adopting_launcher(name: str | None, handle: Handle) -> Launcher | None:
    """What can watch and end a launch of an earlier scheduler, by what is known of it; None if it ended with that."""
    if "slurm" in handle:
        return SlurmLauncher()
    if "session" in handle and shutil.which("tmux"):
        return TmuxLauncher(str(handle["server"]))
    if "pid" in handle or name != "ray":
        return LocalLauncher()
    return None


def alive(name: str | None, handle: Handle | None) -> bool:
    """Whether what a launch left in the store still runs, as far as this process can see."""
    if not handle:
        return False
    if "slurm" in handle:
        return SlurmLauncher.state(handle) is not None
    if "pid" in handle:
        return handle.get("began") is not None and start_time(int(handle["pid"])) == handle["began"]
    return name == "ray" and start_time(int(handle.get("driver", 0))) is not None


def job_environment(slots: int, gpu_ids: str | None = None) -> dict[str, str]:
    """Variables that keep `slots` jobs side by side from fighting for cores and GPU memory.

    One thread each, however many run: sums must not depend on the number of slots.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    share = f"{0.9 / slots:.2f}"
    return {
        **dict.fromkeys(names, "1"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": share,
        "PYTHONUNBUFFERED": "1",
        **compilation_cache(),
        **({"CUDA_VISIBLE_DEVICES": gpu_ids} if gpu_ids else {}),
        # The child must find this very package, installed or not.
        "PYTHONPATH": os.pathsep.join(
            filter(
                None, [str(Path(__file__).parents[3]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            )
        ),
    }


def compilation_cache() -> dict[str, str]:
    """Variables that let JAX programs compiled by one process serve the next."""
    wanted = {
        "JAX_COMPILATION_CACHE_DIR": str(cache_folder() / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    return {key: os.environ.get(key, value) for key, value in wanted.items()}


class LocalLauncher:
    """Each job a process of its own session, so that signals to the scheduler do not reach it."""

    name = "local"

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Start a process."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **env}, start_new_session=True,
            )  # fmt: skip
        self._children[process.pid] = process
        return {"pid": process.pid, "began": start_time(process.pid)}

    def watch(self, handle: Handle, ended: OnEnd) -> bool:
        """Wait in a thread, for a child or for an adopted process."""
        child = self._children.get(int(handle["pid"]))
        if child is None:
            return watch_process(handle, ended)

        def wait() -> None:
            code = child.wait()
            kill_rest(child.pid)
            self._children.pop(child.pid, None)
            ended(exit_words(code))

        threading.Thread(target=wait, name=f"wait-{child.pid}", daemon=True).start()
        return True

    def kill(self, handle: Handle) -> None:
        """Kill the job's process group."""
        kill_group(handle)


def server_of(folder: Path | str) -> str:
    """The name of the tmux server of a folder, so that graphs in different folders cannot meet."""
    return f"shoal-{hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:10]}"


class TmuxLauncher(LocalLauncher):
    """Each job in a tmux session of its own, to attach and watch."""

    name = "tmux"

    def __init__(self, server: str = "shoal") -> None:
        super().__init__()
        self.server = server
        if shutil.which("tmux") is None:
            raise ConfigError("the tmux launcher needs the program tmux; install it or use --launcher local")

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Start a session; the output is also written to `log`."""
        name = session.replace(".", "~2e").replace(":", "~3a")  # both mean something else in a tmux target
        variables = [part for key, value in env.items() for part in ("-e", f"{key}={value}")]
        teed = [sys.executable, "-m", "shoal.skills.jobs.runner", str(log), *command]
        log.touch()
        pid = self._tmux(
            "new-session", "-d", "-P", "-F", "#{pane_pid}", "-s", name, "-x", "180", "-y", "50", *variables, "--",
            *teed,
        )  # fmt: skip
        return {"pid": int(pid), "began": start_time(int(pid)), "session": name, "server": self.server}

    def kill(self, handle: Handle) -> None:
        """End the session."""
        super().kill(handle)
        self._tmux("kill-session", "-t", f"={handle['session']}", check=False, server=str(handle["server"]))

    def _tmux(self, *arguments: str, check: bool = True, server: str | None = None) -> str:
        command = ["tmux", "-L", server or self.server, *arguments]
        for _ in range(TMUX_TRIES):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(f"tmux {arguments[0]} has not answered for {error.timeout:g} s") from error
            if "server exited" not in done.stderr:
                break
        if check and done.returncode:
            raise RuntimeError(f"tmux {arguments[0]} failed: {done.stderr.strip() or done.returncode}")
        return done.stdout.strip()


class RayLauncher:
    """Each job a Ray task; the folder must be reachable from every node. They end with the driver.

    Where the session of Ray ends, its jobs are gone, and the next ones run in another: of the cluster that answers.
    """

    name = "ray"

    def __init__(self, gpus: float = 0.0, cpus: float | None = None, slots: int = 1) -> None:
        self._ray = connect_ray(wanted_by="the Ray launcher")
        self._gpus = gpus
        cluster = float(self._ray.cluster_resources().get("CPU", available_cpus()))
        self._cpus = cpus if cpus is not None else max(1.0, cluster // slots)
        self._tasks: dict[str, Any] = {}
        self._count = 0

    def room(self, running: int, slots: int) -> int:
        """How many more jobs the whole cluster has CPUs and GPUs for, whatever this machine has."""
        if not self._ray.is_initialized():
            return slots - running  # the next launch looks for a cluster, and tells it if there is none
        have = self._ray.cluster_resources()
        fit = [int(float(have.get("CPU", 0)) // self._cpus)] if self._cpus else []
        fit += [int(float(have.get("GPU", 0)) // self._gpus)] if self._gpus else []
        return min([slots, *fit]) - running

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Submit a task that runs the command on some node."""
        if not self._ray.is_initialized():
            self._ray = connect_ray(wanted_by="the Ray launcher")
        # Workers start elsewhere, and must find this very package too.
        found = {"env_vars": {"PYTHONPATH": env.get("PYTHONPATH", "")}}
        remote = self._ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_retries=0, runtime_env=found)(
            _run_command
        )
        self._count += 1
        key = f"{session}-{self._count}"
        self._tasks[key] = remote.remote(list(command), dict(env), str(log.resolve()))
        return {"task": key, "driver": os.getpid()}

    def watch(self, handle: Handle, ended: OnEnd) -> bool:
        """Wait for the task in a thread; tasks of another driver are gone."""
        task = self._tasks.get(str(handle.get("task")))
        if task is None or handle.get("driver") != os.getpid():
            return False

        future = task.future()

        def wait() -> None:
            try:
                while not wait_for([future], timeout=LOOK).done:
                    if not self._ray.is_initialized():  # of whose tasks nothing more is heard
                        raise RuntimeError("the session of Ray ended")
                words = exit_words(int(future.result()))
            except Exception as error:  # whatever Ray says, the job is over
                lines = [line for line in str(error).splitlines() if line.strip()]
                words = f"{type(error).__name__}: {lines[-1] if lines else ''}"
            ended(words)

        threading.Thread(target=wait, name=f"wait-{handle['task']}", daemon=True).start()
        return True

    def kill(self, handle: Handle) -> None:
        """Cancel the task."""
        task = self._tasks.get(str(handle.get("task")))
        if task is not None and self._ray.is_initialized():
            self._ray.cancel(task, force=True)

    def close(self) -> None:
        """Nothing is held: Ray ends with the program."""


_WITH_PARENT = """import os, sys
from shoal.core.workers import die_with_parent
die_with_parent()
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"""
LAST_SECONDS = 120.0  # for the launch before to end, which Ray may have taken for gone too early


def _run_command(command: list[str], env: dict[str, str], log: str) -> int:
    """Run on a Ray worker: the process dies with the task, with its worker and with its node, and is alone."""
    node = os.getppid()
    with Path(log).open("ab") as output, Path(log).with_name("running.lock").open("ab") as lock:
        until = time.monotonic() + LAST_SECONDS
        while not locked(lock.fileno(), Path(lock.name)):
            if time.monotonic() > until:
                raise TimeoutError(f"the launch before still runs after {LAST_SECONDS:g} s: end it")
            time.sleep(LOOK)
        child = subprocess.Popen(
            [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *command[1:]], stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env}, process_group=0,
            pass_fds=[lock.fileno()],  # which is held as long as it lives
        )  # fmt: skip
        try:
            while os.getppid() == node:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(LOOK)
            raise WorkerError("this node has left its cluster")
        finally:
            kill_rest(child.pid)  # and itself, if the wait was interrupted


CLUSTERS = "--clusters="
UNKNOWN = "UNKNOWN"
ANSWER_SECONDS = 60.0
"""For which a program of SLURM is waited for."""
SILENT_SECONDS = 3600.0
"""Without news of a batch job after which a graph ends; the job itself goes on, and is found again by the next run."""


class SlurmLauncher:
    """Each job a batch job of SLURM, in a folder that all nodes share; they outlive the scheduler.

    Args:
        sbatch: options for `sbatch`, such as `--partition=gpu` or `--time=2:00:00`.
        every: seconds between looks at the queue.
    """

    name = "slurm"
    _silent_until = 0.0  # on the monotonic clock, for all: they ask one controller; 0 if it answered

    def __init__(self, sbatch: Sequence[str] = (), every: float = 5.0) -> None:
        self.options, self.every = list(sbatch), every
        self._unwanted: set[str] = set()  # batch jobs that were told to end
        if shutil.which("sbatch") is None:
            raise ConfigError("the slurm launcher needs the program sbatch: run it where jobs are submitted")

    def room(self, running: int, slots: int) -> int:
        """As many as there are slots: SLURM's queue knows what there is."""
        return slots - running

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Submit a script; every word of it is quoted. It does nothing once its file is gone."""
        script = log.with_suffix(".sh")
        lines = [f"export {key}={shlex.quote(value)}" for key, value in env.items()]
        wanted = f"[ -e {shlex.quote(str(script))} ] || exit 0"
        where = [f"# {option}" for option in self.options if option.startswith(CLUSTERS)]  # for `find`
        text = "\n".join(["#!/bin/sh", *where, wanted, *lines, f"exec {shlex.join(command)}"]) + "\n"
        script.write_bytes(os.fsencode(text))  # paths as they are, whatever the locale
        done = self._run(
            "sbatch", "--parsable", f"--job-name={session}", f"--output={str(log).replace('%', '%%')}",
            "--open-mode=append", *self.options, str(script),
        )  # fmt: skip
        number, _, cluster = done.stdout.strip().partition(";")  # named if it was chosen
        if not done.returncode and number.isdecimal():
            return {"slurm": number, "cluster": cluster}
        raise RuntimeError(f"sbatch failed: {done.stderr.strip() or done.stdout.strip() or done.returncode}")

    def find(self, session: str, log: Path) -> Handle | None:
        """A batch job of that name and log in the queue; if none is seen there, one that comes later does nothing.

        Raises:
            WorkerError: the queue cannot be seen, so that it is not known whether the job runs.
        """
        own = log.with_suffix(".sh")
        options = [f"# {option}" for option in self.options]
        said = os.fsdecode(own.read_bytes()).splitlines() if own.exists() else options
        chosen = [line[2:] for line in said if line.startswith(f"# {CLUSTERS}")]
        cluster = "".join(chosen).partition("=")[2]
        done = self._run("squeue", "--noheader", "--format=%i %o", f"--name={session}", *chosen)
        if done.returncode:
            raise WorkerError(
                f"squeue does not answer ({done.stderr.strip() or done.returncode}), so it is not known whether "
                f"{session!r} still runs as a batch job; nothing was launched again, go on when it does"
            )
        for number, _, script in (line.strip().partition(" ") for line in done.stdout.splitlines()):
            if number.isdecimal() and script == str(own):
                return {"slurm": number, "cluster": cluster}
        own.unlink(missing_ok=True)
        return None

    @classmethod
    def state(cls, handle: Handle) -> str | None:
        """What SLURM calls its state while it waits or runs, None when it is over."""
        done = cls._run("squeue", "--noheader", "--format=%T", f"--jobs={handle['slurm']}", *_cluster(handle))
        if done.returncode and "Invalid job id" not in done.stderr:
            return UNKNOWN  # the controller does not answer: what it would say is not known to be the end
        said = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("CLUSTER:")]
        return said[0].strip() if said else None

    def watch(self, handle: Handle, ended: OnEnd) -> bool:
        """Look at the queue now and then, in a thread."""
        if self.state(handle) is None:
            return False

        def wait() -> None:
            heard = time.monotonic()
            while (state := self.state(handle)) is not None:
                heard = time.monotonic() if state != UNKNOWN else heard
                if time.monotonic() - heard > SILENT_SECONDS:
                    ended(WorkerError(
                        f"SLURM has told nothing of batch job {handle['slurm']} for {SILENT_SECONDS:g} s, so it is not "
                        "known whether it still runs; nothing was launched again, go on when squeue answers"
                    ))  # fmt: skip
                    return
                time.sleep(self.every)
                if handle["slurm"] in self._unwanted:  # and was not ended yet: was that heard?
                    self.kill(handle)
            ended("ended")

        threading.Thread(target=wait, name=f"wait-{handle['slurm']}", daemon=True).start()
        return True

    def kill(self, handle: Handle) -> None:
        """Cancel the batch job; who watches it does so again until it is over."""
        self._unwanted.add(handle["slurm"])
        self._run("scancel", *_cluster(handle), str(handle["slurm"]))

    @classmethod
    def _run(cls, *command: str) -> subprocess.CompletedProcess[str]:
        """What a program of SLURM answers; the queue is left alone for a while after it did not."""
        if command[0] != "sbatch" and time.monotonic() < cls._silent_until:
            return subprocess.CompletedProcess(command, 1, "", "SLURM has just not answered")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            said, known = f"no answer for {ANSWER_SECONDS:g} s", cls._silent_until
            cls._silent_until = time.monotonic() + ANSWER_SECONDS
            if not known:
                logger.warning("%s gives %s: SLURM's controller may be down", command[0], said)
            return subprocess.CompletedProcess(command, 1, "", said)
        except OSError as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))
        cls._silent_until = 0.0
        return done


def _cluster(handle: Handle) -> list[str]:
    """The option by which SLURM's programs look where a batch job was sent, not only at home."""
    return [f"--clusters={handle['cluster']}"] if handle.get("cluster") else []


def start_time(pid: int) -> str | None:
    """When a process began, in words that another process with the same id would not share; None if gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:  # no /proc on this system: the id must do
        os.kill(pid, 0)
    except OSError:
        return None
    return "unknown"


def watch_process(handle: Handle, ended: OnEnd) -> bool:
    """Wait in a thread for a process that is not ours to reap; False if it is gone already."""
    pid, began = int(handle["pid"]), handle.get("began")
    if began is None or start_time(pid) != began:
        return False

    def wait() -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError):
            descriptor = -1
        if descriptor >= 0 and start_time(pid) == began:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        while start_time(pid) == began:  # only where the system cannot tell us
            time.sleep(0.05)
        if descriptor >= 0:
            os.close(descriptor)
        kill_rest(pid)
        ended("ended")

    threading.Thread(target=wait, name=f"wait-{pid}", daemon=True).start()
    return True


def kill_group(handle: Handle) -> None:
    """SIGKILL to a job's process group, if it is still that job."""
    pid = int(handle["pid"])
    if handle.get("began") is not None and start_time(pid) == handle["began"]:
        try:
            os.killpg(os.getpgid(pid), 9)
        except ProcessLookupError:
            return


def kill_rest(pid: int) -> None:
    """SIGKILL to what a job that was watched to its end left of its process group: the next launch is alone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, 9)


def exit_words(code: int) -> str:
    """An exit status for people."""
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


FIRST_GUESS = 256 << 20  # bytes, before any launch has been measured
RESERVE = 0.1  # share of the available memory left alone


def resident_memory(pid: int) -> int:
    """Bytes a process holds now; 0 if it cannot be seen."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
    except OSError:
        return 0
    return 0


def tee(log: str, command: Sequence[str]) -> int:
    """Run a command, its output both here and at the end of a file that is there; returns its exit status.

    It ends with the command, also if others that the command left still hold its output.
    """
    with Path(log).open("r+b", buffering=0) as file:
        file.seek(0, os.SEEK_END)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0)
        assert process.stdout is not None
        over = False
        while not over:
            over = process.poll() is not None  # one more read takes all that a pipe holds
            if select.select([process.stdout], [], [], 0 if over else 0.1)[0]:
                chunk = process.stdout.read(65536)
                file.write(chunk)
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
                over = over or not chunk
        return process.wait()


if __name__ == "__main__":
    sys.exit(tee(sys.argv[1], sys.argv[2:]))
