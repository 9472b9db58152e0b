"""Train a graph of skills side by side: launch what is ready, wake on events, commit, go on.

    waiting ──launch──> running ──DONE.json──> merging ──commit──> completed
       ^  │                │ failed, retries left
       │  └─dependency──> blocked(reason)       │ none left ──> failed        cancelled ──> skipped
       └───────────────────┘

The state is in the store; this process may die at any moment. Trainings go on, and the next scheduler adopts them.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, DataError, ShoalError
from shoal.core.run_folder import FolderLock
from shoal.skills.jobs import launchers as memory
from shoal.skills.jobs.decide import launchable, obstacles
from shoal.skills.jobs.launchers import Launcher, make_launcher, training_command, training_environment
from shoal.skills.jobs.records import AttemptRow, SkillRow
from shoal.skills.jobs.store import Store
from shoal.skills.learning.merge import RULES, process_completed_training
from shoal.skills.learning.plan import dependencies
from shoal.skills.learning.plan import dependencies as plan_dependencies
from shoal.skills.learning.proposers import Proposer
from shoal.skills.learning.run import (
    Run,
    failure_reason,
    prepare_training_run,
    read_outcome,
    run_folder_of,
    skill_from_data,
)
from shoal.skills.learning.spec import Skill
from shoal.skills.learning.trainer import TrainingConfig
from shoal.skills.learning.views import export_state, export_views
from shoal.skills.learning.worlds import world_features

logger = logging.getLogger(__name__)
OnSkill = Callable[[str, dict[str, Any]], None]
OnEvent = Callable[[dict[str, Any]], None]
PROGRAMS = {
    "shoal.skills.learning.run",
    "shoal.skills.training",
}  # what launches run, the second in older folders


class SkillScheduler:
    """Runs the trainings of one folder.

    Args:
        base_dir: the folder; what is in it already is continued.
        max_parallel: trainings at a time, whatever the number of GPUs.
        poll_interval: seconds between looks for requests of other processes (`retry`, `cancel`); trainings
            that end wake the scheduler at once.
        max_retries: how often a failed training is launched again, from its last checkpoint.
        world: "crafting", "craftax-classic" or "craftax".
        launcher: "local", "tmux", "ray" or one of your own.
        merge: rule for experts that several trainings changed.
        seed: run seed.
        config: how skills are trained.
        analyse: correct specs by what really happened.
        on_event: called with each durable moment, once it is on disk.
        available_memory: bytes that can be had; for tests.
    """

    def __init__(
        self,
        base_dir: Path | str,
        max_parallel: int = 3,
        poll_interval: float = 30.0,
        max_retries: int = 2,
        *,
        world: str = "crafting",
        launcher: str | Launcher = "local",
        merge: str = "auto",
        seed: int = 0,
        config: TrainingConfig | None = None,
        analyse: bool = True,
        on_event: OnEvent | None = None,
        available_memory: Callable[[], int | None] = memory.available_memory,
    ) -> None:
        if max_parallel < 1 or max_retries < 0 or poll_interval <= 0:
            raise ConfigError(
                "max_parallel must be at least 1, max_retries at least 0, poll_interval positive"
            )
        if merge not in RULES:
            raise ConfigError(f"merge must be one of {', '.join(RULES)}, got {merge!r}")
        self.base_dir = Path(base_dir)
        self.base_dir.mkdir(parents=True, exist_ok=True)
        self.store = Store(self.base_dir)
        self.features = world_features(world)
        self.world, self.merge, self.seed, self.analyse = world, merge, seed, analyse
        self.max_parallel, self.poll_interval, self.max_retries = max_parallel, poll_interval, max_retries
        self.config = config or TrainingConfig()
        self.launcher = make_launcher(launcher, slots=max_parallel) if isinstance(launcher, str) else launcher
        self._available_memory = available_memory
        self._on_event = on_event
        self._on_complete: OnSkill | None = None
        self._on_failed: OnSkill | None = None
        self._events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._merger = ThreadPoolExecutor(1, thread_name_prefix="merge")
        self._shower = ThreadPoolExecutor(1, thread_name_prefix="show")
        self._shown: Future[None] | None = None
        self._to_clean: list[AttemptRow] = []
        self._watched: dict[int, Mapping[str, Any]] = {}
        self._stopping: str | None = None
        self._holders = 0
        self._lock = FolderLock(self.base_dir / "scheduler.lock", "another scheduler")
        self._told = 0
        self._merging: set[int] = set()  # attempts whose merge has not been handled here yet

    # What people call

    def add_skill(
        self,
        skill_name: str,
        skill_data: Mapping[str, Any] | Skill,
        dependencies: Sequence[str] | None = None,
    ) -> str:
        """Add a skill to train; returns its id, which is the name as used in folders.

        Args:
            skill_name: unique, also after it was made fit for a folder.
            skill_data: a `Skill`, a spec as a dict, or the reference's `{"skill_with_consumption": …}`.
            dependencies: skills that must be completed before; by default those that its plan uses.
        """
        if isinstance(skill_data, Skill):
            skill = skill_from_data(skill_name, skill_data.as_dict(), self.features)
        else:
            skill = skill_from_data(skill_name, skill_data, self.features)
        if dependencies is None:
            specs = [row.spec for row in self.store.skills() if row.name != skill.name]
            dependencies = plan_dependencies(skill, [*specs, skill])
        row = self.store.add_skill(skill, dependencies, int(self.config.total_timesteps))
        self._wake()
        return row.slug

    def set_callbacks(
        self, on_skill_complete: OnSkill | None = None, on_skill_failed: OnSkill | None = None
    ) -> None:
        """Functions called with a skill's name and its data when it completes or fails for good."""
        self._on_complete, self._on_failed = on_skill_complete, on_skill_failed

    def enqueue_continuation(self, skill_name: str, extra_timesteps: float) -> int:
        """Train a completed skill further, by at most `extra_timesteps`; returns what it was allotted."""
        row = self.store.skill(skill_name)
        if row.status != "completed":
            raise ValueError(f"only a completed skill can be continued; {row.name!r} is {row.status}")
        allotted = int(min(extra_timesteps, row.budget_total - row.budget_used))
        if allotted < 1:
            raise ValueError(
                f"the budget of {row.name!r} is used up ({row.budget_used} of {row.budget_total} steps)"
            )
        self.store.update_skill(
            row.name, status="waiting", reason=None, retries=0, rounds=row.rounds + 1, allotment=allotted
        )
        self._wake()
        return allotted

    def stop(self, *, wait: bool = True) -> None:
        """Launch nothing more. With `wait` running trainings are merged first, else they are left to go on."""
        self._stopping = "wait" if wait else "leave"
        self._wake()

    def hold(self) -> None:
        """Keep `run` from ending, since more skills may come; `release` gives that up."""
        self._holders += 1

    def release(self) -> None:
        """Undo one `hold`."""
        self._holders -= 1
        self._wake()

    def get_status(self, skill_name: str) -> str:
        """The state a skill is in."""
        return self.store.skill(skill_name).status

    def get_running_skills(self) -> list[str]:
        """Names of skills in training or merging."""
        return [row.name for row in self.store.skills("running", "merging")]

    def get_completed_skills(self) -> dict[str, dict[str, Any]]:
        """`{name: {"expert_idx", "path", …}}` of the completed skills."""
        return {
            name: data for name, data in self._with_experts().items() if self.get_status(name) == "completed"
        }

    def get_failed_skills(self) -> dict[str, str]:
        """Names of failed, blocked and skipped skills, and why."""
        return {row.name: row.reason or "" for row in self.store.skills("failed", "blocked", "skipped")}

    def get_state(self) -> dict[str, Any]:
        """What `scheduler_state.json` holds."""
        from shoal.skills.learning.views import scheduler_state

        return scheduler_state(self.store, self.max_parallel)

    def run(self) -> bool:
        """Train until nothing more can be done; True if every skill is completed.

        Raises:
            WorkerError: another scheduler is running on this folder.
        """
        self._lock.take()
        try:
            self._remember()
            self._recover()
            self._loop()
            self._flush()
            export_views(self.store)
            export_state(self.store, self.max_parallel)
            self._tell()
        finally:
            self._lock.release()
        return all(row.status == "completed" for row in self.store.skills())

    def close(self) -> None:
        """Close the store."""
        self._merger.shutdown()
        self._shower.shutdown()
        self.store.close()

    # The loop

    def _loop(self) -> None:
        seen = self.store.changes()
        while True:
            self._apply_requests()
            if self._stopping is None:
                self._unblock()
                self._launch_ready()
            self._tell()
            self._show()  # after launching: what is for people must not make a training wait
            if self._finished():
                return
            try:
                event = self._events.get(timeout=self.poll_interval)
                self._handle(event)
                while not self._events.empty():
                    self._handle(self._events.get_nowait())
            except queue.Empty:
                if seen == self.store.changes():
                    continue
            seen = self.store.changes()

    def _show(self) -> None:
        """Tidy finished run folders and write what is for people, in a thread; one at a time is enough."""
        done, self._to_clean = self._to_clean, []

        def show() -> None:
            for attempt in done:
                self._clean(attempt)
            if done:
                export_views(self.store)
            export_state(self.store, self.max_parallel)

        if done or self._shown is None or self._shown.done():
            self._shown = self._shower.submit(show)

    def _flush(self) -> None:
        self._show()
        if self._shown is not None:
            self._shown.result()

    def _finished(self) -> bool:
        if self._stopping == "leave":
            return True
        if self._watched or self._merging or self.store.skills("merging"):
            return False
        return self._stopping is not None or (not self._holders and not self._launchable())

    def _handle(self, event: tuple[Any, ...]) -> None:
        kind, *rest = event
        if kind == "ended":
            self._training_ended(*rest)
        elif kind == "merged":
            self._merged(*rest)

    def _wake(self) -> None:
        self._events.put(("wake",))

    def _launchable(self) -> list[SkillRow]:
        return launchable(self.store.skills())

    def _unblock(self) -> None:
        """Say of each waiting skill what keeps it from ever starting, and take it back when that is gone."""
        rows = self.store.skills()
        busy = self._watched or self._merging or self._holders or launchable(rows)
        progress = bool(busy or any(row.status == "merging" for row in rows))
        now = {row.name: row for row in rows}
        for name, reason in obstacles(rows, progress=progress).items():
            if reason is None and now[name].status == "blocked":
                self.store.update_skill(name, status="waiting", reason=None)
            elif reason is not None and (now[name].status, now[name].reason) != ("blocked", reason):
                self.store.update_skill(name, status="blocked", reason=reason)
            else:
                continue
            self._wake()

    def _launch_ready(self) -> None:
        for row in self._launchable():
            if (
                len(self._watched) + max(len(self._merging), len(self.store.skills("merging")))
                >= self.max_parallel
            ):
                return
            if self._watched and not self._fits_memory():
                return
            self._launch(row)

    def _fits_memory(self) -> bool:
        peaks = [attempt.peak_memory for attempt in self.store.attempts() if attempt.peak_memory]
        held = [memory.resident_memory(int(handle.get("pid", 0))) for handle in self._watched.values()]
        return memory.fits(max(peaks, default=memory.FIRST_GUESS), held, self._available_memory())

    def _launch(self, row: SkillRow) -> None:
        """One attempt is on record before its process exists, so that none runs unknown."""
        if row.rounds:
            self._flush()  # the run folder of the round before must be gone
        expert = self.store.assign_expert(row.name)
        folder = run_folder_of(self.base_dir, expert, row.name)
        left = row.budget_total - row.budget_used if row.allotment is None else row.allotment
        resumed = row.retries > 0 and self._can_resume(folder, row)
        if not resumed:
            others = [other.spec for other in self.store.skills()]
            try:
                prepare_training_run(
                    row.name, row.spec.as_dict(), expert, row.dependencies, self._with_experts(), self.base_dir,
                    env_name=self.world, skills=others, seed=self._seed(row), store=self.store,
                    config=replace(self.config, total_timesteps=float(max(left, 1))),
                )  # fmt: skip
            except (ShoalError, ValueError) as error:
                self.store.update_skill(
                    row.name, status="failed", reason=f"cannot be set up: {error}", ended=time.time()
                )
                self._call(self._on_failed, row.name)
                self._wake()
                return
            Run.open(folder).clear_checkpoints()
        for mark in ("DONE.json", "FAILED.json"):
            (folder / mark).unlink(missing_ok=True)
        attempt = self.store.begin_attempt(row.name, folder)
        log = (folder / f"training-{attempt}.log").resolve()
        session = f"shoal_e{expert}_{row.slug}"
        handle = self.launcher.launch(
            training_command(folder, attempt), session, training_environment(self.max_parallel), log
        )
        self.store.set_handle(attempt, self.launcher.name, handle, log)
        self._watch(self.store.attempt(attempt), handle)
        logger.info("training %r, launch %d%s", row.name, attempt, " (resumed)" if resumed else "")

    def _can_resume(self, folder: Path, row: SkillRow) -> bool:
        try:
            run = Run.open(folder)
            return run.spec["skill"] == row.name and int(run.spec["seed"]) == self._seed(row)
        except (DataError, FileNotFoundError):
            return False

    def _seed(self, row: SkillRow) -> int:
        """Continuations draw from streams of their own; retries from the same as the launch they repeat."""
        from shoal.core.seeding import derive_seed

        return self.seed if row.rounds == 0 else derive_seed(self.seed, "continuation", row.rounds)

    def _watch(self, attempt: AttemptRow, handle: Mapping[str, Any]) -> None:
        self._watched[attempt.id] = handle
        if not self.launcher.watch(dict(handle), lambda how: self._events.put(("ended", attempt.id, how))):
            self._events.put(("ended", attempt.id, "gone"))

    def _training_ended(self, number: int, how: str) -> None:
        """A training is over: merge it if it says so itself, else retry or fail."""
        self._watched.pop(number, None)
        attempt = self.store.attempt(number)
        row = self.store.skill(attempt.skill)
        folder = self.base_dir / attempt.run_folder
        if row.cancel:
            with self.store.transaction():
                self.store.end_attempt(number, "cancelled")
                self.store.update_skill(
                    row.name, status="skipped", reason="cancelled", cancel=0, ended=time.time()
                )
            return
        try:
            read_outcome(folder, number)
        except (ShoalError, OSError, ValueError, KeyError) as error:
            reason = failure_reason(folder, number) or f"{how}; {error}"
            self._failed(attempt, row, reason)
            return
        self.store.update_skill(row.name, status="merging")
        self._merging.add(number)
        self._merger.submit(self._merge, attempt).add_done_callback(
            lambda future: self._events.put(("merged", number, future.exception()))
        )

    def _merge(self, attempt: AttemptRow) -> None:
        row = self.store.skill(attempt.skill)
        process_completed_training(
            self.base_dir / attempt.run_folder, attempt.skill, int(row.expert or 0), self.base_dir,
            merge=self.merge, attempt=attempt.id, store=self.store, analyse=self.analyse, keep_run=True,
            show=False,
        )  # fmt: skip

    def _merged(self, number: int, error: BaseException | None) -> None:
        self._merging.discard(number)
        attempt = self.store.attempt(number)
        row = self.store.skill(attempt.skill)
        if error is not None:
            self._failed(attempt, row, f"merge failed: {type(error).__name__}: {error}")
            return
        if self.analyse:
            self._recheck_dependencies()
        self._to_clean.append(attempt)
        self._call(self._on_complete, row.name)

    def _clean(self, attempt: AttemptRow) -> None:
        """Move the log to the skill's folder and remove the run folder; safe to repeat."""
        import shutil

        row = self.store.skill(attempt.skill)
        folder = self.base_dir / attempt.run_folder
        kept = self.base_dir / "skills" / f"{row.expert}_{row.slug}"
        kept.mkdir(parents=True, exist_ok=True)
        for path in [*folder.glob("training-*.log"), folder / "metrics.jsonl"]:
            if path.exists():
                os.replace(path, kept / path.name)
        shutil.rmtree(folder, ignore_errors=True)

    def _recheck_dependencies(self) -> None:
        """Corrected specs may change what waiting skills need."""
        rows = self.store.skills()
        specs = [row.spec for row in rows]
        for row in rows:
            if row.status in ("waiting", "blocked"):
                try:
                    needed = plan_dependencies(row.spec, specs)
                except ConfigError:
                    continue
                if not set(needed) <= set(row.dependencies):
                    self.store.update_skill(
                        row.name, dependencies=list(dict.fromkeys([*row.dependencies, *needed]))
                    )

    def _failed(self, attempt: AttemptRow, row: SkillRow, reason: str) -> None:
        """Open the skill for another launch, or give it up: one transaction with the end of this launch."""
        again = row.retries < self.max_retries
        with self.store.transaction():
            self.store.end_attempt(attempt.id, "failed", reason)
            if again:
                self.store.update_skill(row.name, status="waiting", reason=reason, retries=row.retries + 1)
            else:
                self.store.update_skill(row.name, status="failed", reason=reason, ended=time.time())
        if again:
            logger.warning("training %r failed (%s); launch again", row.name, reason)
            return
        logger.error("training %r failed: %s", row.name, reason)
        self._call(self._on_failed, row.name)

    def _apply_requests(self) -> None:
        """Do what `shoal skills cancel` asked for; `retry` changes the store itself."""
        for row in self.store.skills():
            if not row.cancel:
                continue
            if row.status in ("waiting", "blocked"):
                self.store.update_skill(
                    row.name, status="skipped", reason="cancelled", cancel=0, ended=time.time()
                )
                self._wake()
            elif row.status == "running":
                for attempt in self.store.attempts(row.name, "running"):
                    if attempt.handle:
                        self.launcher.kill(attempt.handle)
            else:
                self.store.update_skill(row.name, cancel=0)

    # Starting and ending

    def _recover(self) -> None:
        """Adopt what runs, finish what ended while nobody looked, and tidy what a kill left."""
        for attempt in self.store.attempts(state="running"):
            row = self.store.skill(attempt.skill)
            if row.status == "merging":
                self.store.update_skill(row.name, status="running")
            if attempt.handle is None:
                self._lost(attempt, row)
                continue
            launcher = self.launcher
            if attempt.launcher != launcher.name:
                launcher = make_launcher(attempt.launcher or "local", slots=self.max_parallel)
            self._watched[attempt.id] = attempt.handle
            ended = _Notify(self._events, attempt.id)
            if launcher.watch(attempt.handle, ended):
                logger.info("adopted the training of %r", row.name)
            else:
                ended("gone")
        for attempt in self.store.attempts():
            if attempt.outcome == "merged" and (self.base_dir / attempt.run_folder).exists():
                later = [a for a in self.store.attempts(attempt.skill) if a.id > attempt.id]
                if not later:
                    self._clean(attempt)
        for row in self.store.skills("failed", "blocked"):
            if row.status == "blocked":
                self.store.update_skill(row.name, status="waiting", reason=None)
        self.store.sweep()
        export_views(self.store)

    def _lost(self, attempt: AttemptRow, row: SkillRow) -> None:
        """A launch that was recorded but whose process is unknown: we died in between.

        If it did start, it is still writing to the run folder; its processes are found by their command line.
        """
        for pid in _processes_of(attempt.id, self.base_dir / attempt.run_folder):
            from shoal.skills.jobs.launchers import start_time

            handle = {"pid": pid, "began": start_time(pid)}
            log = self.base_dir / attempt.run_folder / f"training-{attempt.id}.log"
            self.store.set_handle(attempt.id, "local", handle, log)
            self._watch(self.store.attempt(attempt.id), handle)
            return
        if (self.base_dir / attempt.run_folder / "DONE.json").exists():
            self._watched[attempt.id] = {}
            self._events.put(("ended", attempt.id, "gone"))
            return
        with self.store.transaction():
            self.store.end_attempt(attempt.id, "lost", "the scheduler died while launching it")
            self.store.update_skill(row.name, status="waiting", reason=None)

    def _remember(self) -> None:
        """Keep what later commands need to know; a folder belongs to one world."""
        known = self.store.setting("world")
        if known is not None and known != self.world:
            raise ConfigError(f"{self.base_dir} holds skills of {known!r}, not of {self.world!r}")
        self.store.set_setting("world", self.world)
        self.store.set_setting("seed", self.seed)

    def _with_experts(self) -> dict[str, dict[str, Any]]:
        """Skills whose expert has a version, as the reference describes completed skills."""
        found = {}
        for row in self.store.skills():
            head = self.store.head(row.expert) if row.expert is not None else None
            if head is not None:
                found[row.name] = {
                    "expert_idx": row.expert,
                    "path": f"skills/{row.expert}_{row.slug}",
                    "total_frames": head.frames,
                    "metrics": row.result,
                }
        return found

    def _call(self, callback: OnSkill | None, name: str) -> None:
        if callback is not None:
            row = self.store.skill(name)
            callback(
                name, {"status": row.status, "reason": row.reason, "expert_idx": row.expert, **row.result}
            )

    def _tell(self) -> None:
        """Pass on the events that became durable since the last time."""
        if self._on_event is None:
            return
        for event in self.store.events(self._told):
            self._told = event["seq"]
            self._on_event(
                {"event": event["kind"], "step": event["seq"], "skill": event["skill"], **event["detail"]}
            )


class _Notify:
    """Puts the end of an adopted training on the queue."""

    def __init__(self, events: queue.SimpleQueue[tuple[Any, ...]], attempt: int) -> None:
        self.events, self.attempt = events, attempt

    def __call__(self, how: str) -> None:
        self.events.put(("ended", self.attempt, how))


def _processes_of(attempt: int, folder: Path) -> list[int]:
    """Ids of processes that were started as this launch of this folder."""
    found = []
    wanted = [str(folder.resolve()), "--attempt", str(attempt)]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parts = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if parts[-4:-1] == wanted and PROGRAMS.intersection(parts):
            found.append(int(entry.parent.name))
    return found


logger = logging.getLogger(__name__)


class Frontier:
    """Proposes skills in a thread of its own, and sleeps while the frontier is blocked.

    A proposed skill that needs one still in training is queued, and nothing more is proposed until all it needs
    is completed, or something failed: what the next proposal should be depends on how that training ends.

    Args:
        scheduler: where skills go; its callbacks are taken over and passed on.
        proposer: names the skills.
        max_nodes: most skills in the graph.
        on_complete: called with a completed skill.
        on_failed: called with a failed one.
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
        self.blocked_on: tuple[str, ...] = ()  # skills that proposing waits for
        self._changed = threading.Condition()
        self._failures = 0
        scheduler.set_callbacks(
            self._passing(on_complete, failed=False), self._passing(on_failed, failed=True)
        )

    def run(self) -> bool:
        """Grow and train to the end; True if every skill is completed.

        Raises:
            Exception: what the proposer raised, after all that was queued has been trained.
        """
        self.scheduler.hold()
        thread = threading.Thread(target=self._grow, name="frontier", daemon=True)
        thread.start()
        finished = self.scheduler.run()
        with self._changed:
            self.max_nodes = 0  # the scheduler was stopped: propose no more
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
        if len(rows) >= self.max_nodes:
            return False
        known = [row.spec for row in rows]
        completed = [row.name for row in rows if row.status == "completed"]
        skill = self.proposer.next_skill(known, completed, self.scheduler.get_failed_skills())
        if skill is None:
            return False
        try:
            needed = dependencies(skill, [*known, skill])
        except ConfigError as error:
            logger.warning("%s cannot be reached yet: %s", skill.name, error)
            needed = []
        self.scheduler.add_skill(skill.name, skill)
        self._wait_for(needed)
        return True

    def _wait_for(self, needed: list[str]) -> None:
        with self._changed:
            failures = self._failures
            while self.max_nodes:
                statuses = {name: self.scheduler.get_status(name) for name in needed}
                self.blocked_on = tuple(
                    n for n, s in statuses.items() if s in ("waiting", "running", "merging")
                )
                if not self.blocked_on or self._failures != failures:
                    self.blocked_on = ()
                    return
                self._changed.wait()

    def _passing(self, then: OnSkill | None, *, failed: bool) -> Callable[[str, dict[str, Any]], None]:
        def callback(name: str, data: dict[str, Any]) -> None:
            with self._changed:
                self._failures += failed
                self._changed.notify_all()
            if then is not None:
                then(name, data)

        return callback
