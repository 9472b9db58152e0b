"""Trains the skills of one folder: launch, wait, merge, next; what happened is in the store.

This process may die at any moment: trainings go on, and the next scheduler adopts them. One scheduler at a time holds a
folder; others ask it by writing requests into the store.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, ShoalError, WorkerError
from shoal.core.run_folder import FolderLock
from shoal.core.seeding import derive_seed
from shoal.core.workers import command_lines
from shoal.skills.graph.launchers import (
    LOST,
    Handle,
    Launcher,
    LocalLauncher,
    adopting_launcher,
    job_environment,
    make_launcher,
    process_handle,
)
from shoal.skills.graph.process import DONE, clear_marks, is_full, read_failure
from shoal.skills.graph.requests import STOP, revise
from shoal.skills.graph.schedule import Phase, Plan, finished, plan
from shoal.skills.graph.store import LOCK, AttemptRow, End, SkillRow, Status, Store
from shoal.skills.graph.views import export_state, scheduler_state, with_experts
from shoal.skills.learning.merge import process_completed_training
from shoal.skills.learning.trainer import TrainingConfig
from shoal.skills.learning.training import (
    Run,
    prepare_training_run,
    read_outcome,
    run_folder_of,
    skill_of,
    training_plan,
)
from shoal.skills.plan import dependencies as plan_dependencies
from shoal.skills.proposers import Proposer
from shoal.skills.spec import Skill
from shoal.skills.worlds.registry import check_installed, world_features

logger = logging.getLogger(__name__)
LOOK = 0.05  # seconds between looks at trainings, and at the store for requests
ENDING_SECONDS = 60.0  # for which trainings that were killed are waited for
UNSEEN = "ended while no scheduler watched"
NO_ROOM = "the disk is full"
OnSkill = Callable[[str, dict[str, Any]], None]
OnEvent = Callable[[dict[str, Any]], None]


def check_limits(max_parallel: Any, max_retries: Any, poll_interval: Any, time_limit: Any) -> None:
    """Refuse limits that no run can have, before anything is made for it."""
    for name, value, least in (("max_parallel", max_parallel, 1), ("max_retries", max_retries, 0)):
        if not isinstance(value, Integral) or value < least:
            raise ConfigError(f"{name} must be a whole number and at least {least}, got {value!r}")
    for name, value in (("poll_interval", poll_interval), ("time_limit", time_limit)):
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ConfigError(f"{name} must be a positive number of seconds, got {value!r}")


class SkillScheduler:
    """Runs the trainings of one folder.

    Args:
        base_dir: the folder; what is in it already is continued.
        max_parallel: trainings at a time, whatever the number of GPUs.
        poll_interval: seconds between looks at batch jobs of SLURM; other trainings are noticed when they end.
        max_retries: how often a failed training is launched again, from its last checkpoint; one that is lost with
            its machine always is.
        world: "crafting", "craftax-classic", "craftax", or `module:Class` of your own.
        launcher: "local", "tmux", "ray", "slurm" or one of your own (`shoal.skills.graph.launchers.Launcher`).
        seed: run seed.
        config: how skills are trained; another `total_timesteps` than before is the new budget of open skills.
        on_event: called with each durable moment, once it is on disk.
        time_limit: seconds that one launch of a training may take; a training that is adopted begins anew.
        gpu_ids: `CUDA_VISIBLE_DEVICES` of the trainings.
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
        seed: int = 0,
        config: TrainingConfig | None = None,
        on_event: OnEvent | None = None,
        time_limit: float | None = None,
        gpu_ids: str | None = None,
    ) -> None:
        check_limits(max_parallel, max_retries, poll_interval, time_limit)
        self.base_dir = Path(base_dir)
        self.features = world_features(world)
        if isinstance(launcher, str):
            launcher = make_launcher(launcher, folder=self.base_dir, every=poll_interval)
        self.store = Store(self.base_dir, create=True)
        self.launcher = launcher
        self.world, self.seed = world, seed
        self.max_parallel, self.max_retries, self.gpu_ids = max_parallel, max_retries, gpu_ids
        self.time_limit = time_limit
        self.config = config or TrainingConfig()
        self.stopped = False  # somebody asked for the end before all was done
        self._lock = FolderLock(self.base_dir / LOCK, "another scheduler")
        self._running = False
        self._phase: Phase = "run"
        self._proposer: Proposer | None = None
        self._max_nodes: int | None = None
        self._growing = False  # more skills may be proposed
        self._needed: tuple[str, ...] = ()  # by the newest proposal: the next one waits for them
        self._failure: Exception | None = None  # what the proposer raised
        self._woken = threading.Event()
        # Launches that run, with their begin on the monotonic clock.
        self._watched: dict[int, tuple[Launcher, Handle, float]] = {}
        self._over: dict[int, str] = {}  # how launches ended that the store still has as running
        self._heard: tuple[OnSkill | None, OnSkill | None] = (None, None)
        self._on_event = on_event
        self._told = max((event["seq"] for event in self.store.events()), default=0)

    # What people call

    def add_skill(
        self,
        skill_name: str,
        skill_data: Skill | Mapping[str, Any],
        dependencies: Sequence[str] | None = None,
    ) -> str:
        """Add a skill to train; returns its id, which is the name as used in folders.

        Args:
            skill_name: unique, also after it was made fit for a folder.
            skill_data: a `Skill`, or the reference's `{"skill_with_consumption": …}`.
            dependencies: skills that must be completed before; by default those that its plan uses.
        """
        skill = skill_of(skill_name, skill_data, self.features)
        if dependencies is None:
            rows = {row.name: row for row in self.store.skills()}
            known = rows.pop(skill.name, None)
            specs = [row.spec for row in rows.values()]
            dependencies = (
                known.dependencies if known else plan_dependencies(skill, [*specs, skill], self.features)
            )
        row = self.store.add_skill(skill, dependencies, int(self.config.total_timesteps))
        self._woken.set()
        return row.slug

    def set_callbacks(
        self, on_skill_complete: OnSkill | None = None, on_skill_failed: OnSkill | None = None
    ) -> None:
        """Functions called with a skill's name and its data when it completes, or fails or is cancelled for good."""
        self._heard = on_skill_complete, on_skill_failed

    def enqueue_continuation(self, skill_name: str, extra_timesteps: float) -> int:
        """Train a completed skill further, by at most `extra_timesteps`; returns what it was allotted."""
        if not extra_timesteps >= 1:
            raise ValueError(f"extra_timesteps must be at least 1, got {extra_timesteps}")
        with self.store.transaction():
            row = self.store.skill(skill_name)
            if row.status != "completed":
                raise ValueError(f"only a completed skill can be continued; {row.name!r} is {row.status}")
            allotted = int(min(extra_timesteps, row.budget_total - row.budget_used))
            if allotted < 1:
                raise ValueError(
                    f"the budget of {row.name!r} is used up ({row.budget_used} of {row.budget_total} steps)"
                )
            self.store.update_skill(
                row.name, status="waiting", reason=None, retries=0, rounds=row.rounds + 1, allotment=allotted,
                fresh=1,
            )  # fmt: skip
        self._woken.set()
        return allotted

    def stop(self, *, wait: bool = True, kill: bool = False) -> None:
        """Launch nothing more; running trainings are merged first, or left to go on, or ended with `kill`."""
        self._phase = "kill" if kill else "drain" if wait else "leave"
        self._woken.set()

    def get_status(self, skill_name: str) -> str:
        """The state a skill is in."""
        return self.store.skill(skill_name).status

    def get_running_skills(self) -> list[str]:
        """Names of skills in training."""
        return [row.name for row in self.store.skills("running")]

    def get_completed_skills(self) -> dict[str, dict[str, Any]]:
        """`{name: {"expert_idx", "path", …}}` of the completed skills."""
        completed = {row.name for row in self.store.skills("completed")}
        return {name: data for name, data in with_experts(self.store).items() if name in completed}

    def get_failed_skills(self) -> dict[str, str]:
        """Names of failed, blocked and skipped skills, and why."""
        return {row.name: row.reason or "" for row in self.store.skills("failed", "blocked", "skipped")}

    def get_state(self) -> dict[str, Any]:
        """What `scheduler_state.json` holds."""
        return scheduler_state(self.store, self.max_parallel)

    def take(self) -> None:
        """Hold the folder before anything in it is changed; `run` does it too.

        Raises:
            WorkerError: another scheduler is running on this folder, or this one in another thread.
        """
        if self._running:
            raise WorkerError(
                f"another thread of this process is running {self.base_dir}; stop it or wait for it"
            )
        self._lock.take()

    def run(self, proposer: Proposer | None = None, max_nodes: int | None = None) -> bool:
        """Train until nothing more can be done; True if every skill is completed.

        Args:
            proposer: names more skills while others train. What it proposes next should depend on how the trainings
                end that the newest skill needs, so it is asked again when they have; one that knows all its skills
                beforehand (`foresees = True`) is asked for all at once. A skill in the folder begins anew if its
                description in `skills` of the proposer has changed.
            max_nodes: most skills in the graph.

        Raises:
            WorkerError: another scheduler is running on this folder; nothing was proposed.
            ConfigError: the description of a trained skill has changed.
            MissingExtraError: trainings would run here, where the world cannot be made.
            Exception: what the proposer raised, after all that was queued has been trained.
        """
        with self._held():
            self._remember()
            described = getattr(proposer, "skills", None) if getattr(proposer, "foresees", False) else None
            if described is not None:
                revise(self.store, described, self.features, int(self.config.total_timesteps))
            if isinstance(self.launcher, LocalLauncher):
                check_installed(self.world)
            self.store.set_setting(STOP, None)
            self.stopped, self._proposer, self._max_nodes = False, proposer, max_nodes
            self._growing, self._needed, self._failure = proposer is not None, (), None
            try:
                self._recover()
                while self._step():
                    pass
            finally:
                self.store.set_setting(STOP, None)
            export_state(self.store, self.max_parallel)
        if self._failure is not None:
            raise self._failure
        return all(row.status == "completed" for row in self.store.skills())

    def settle(self, *, kill: bool = False) -> None:
        """Do what was asked for (`cancel`) in a folder without a scheduler; with `kill` end all trainings.

        Nothing is launched, and results wait for the next `run`: what becomes of them follows from its options.
        """
        with self._held():
            self._phase = "kill" if kill else "drain"
            self._recover()
            self._perform(self._plan(self._phase))

    def close(self) -> None:
        """Close the store."""
        self._lock.release()
        self.store.close()

    # The loop

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        self.take()
        self._running = True
        try:
            yield
        finally:
            self._running, self._growing, self._phase = False, False, "run"
            self._watched.clear()
            self._over.clear()
            self._lock.release()

    def _grow(self) -> None:
        """Add what is proposed, until that needs a skill in training; an error ends the proposing."""
        try:
            while self._growing and not any(
                self.get_status(name) in ("waiting", "running") for name in self._needed
            ):
                self._growing = self._propose()
        except Exception as error:
            self._growing, self._failure = False, error

    def _propose(self) -> bool:
        """Add one skill; False when there are no more."""
        rows = self.store.skills()
        if self._proposer is None or (self._max_nodes is not None and len(rows) >= self._max_nodes):
            return False
        known = [row.spec for row in rows]
        completed = [row.name for row in rows if row.status == "completed"]
        skill = self._proposer.next_skill(known, completed, self.get_failed_skills())
        if skill is None:
            return False
        if skill.name in {one.name for one in known}:  # it would be named for ever
            raise ConfigError(f"the proposer named {skill.name!r}, which is among the skills already")
        self.add_skill(skill.name, skill)
        if not getattr(self._proposer, "foresees", False):
            self._needed = self.store.skill(skill.name).dependencies
        return True

    def _step(self) -> bool:
        """Merge what has ended, do what follows, wait for the next change; False if nothing more will happen."""
        seen = self.store.changes()
        for attempt in self.store.attempts(running=True):
            if (how := self._poll(attempt.id)) is not None:
                self._ended(attempt, how)
        asked = self.store.setting(STOP)
        phase = asked if asked in ("drain", "kill") and self._phase == "run" else self._phase
        if phase == "run":
            self._grow()
        todo = self._plan(phase)
        self._perform(todo)
        self._tell()
        if todo != Plan():
            return True
        running = self.store.attempts(running=True)
        if finished(self.store.skills(), running, phase=phase, growing=self._growing):
            self.stopped = phase != "run"
            return False
        while self.store.changes() == seen and not self._woken.wait(LOOK) and not self._overdue():
            if any(self._poll(attempt.id) is not None for attempt in running):
                break
        self._woken.clear()
        return True

    def _plan(self, phase: Phase) -> Plan:
        return plan(
            self.store.skills(), self.store.attempts(running=True), slots=self.max_parallel, phase=phase,
            growing=self._growing, overdue=self._overdue(),
        )  # fmt: skip

    def _perform(self, todo: Plan) -> None:
        for name, (status, reason) in todo.give_up.items():
            self._give_up(name, status, reason)
        for number, end in todo.kill.items():
            self._kill(self.store.attempt(number), end)
        for name in todo.launch:
            self._launch(name)

    def _poll(self, number: int) -> str | None:
        if number not in self._over and number in self._watched:
            launcher, handle, _ = self._watched[number]
            if (how := launcher.poll(handle)) is not None:
                self._over[number] = how
        return self._over.get(number)

    def _overdue(self) -> list[int]:
        limit = math.inf if self.time_limit is None else self.time_limit
        return [n for n, (*_, began) in self._watched.items() if time.monotonic() - began > limit]

    def _tell(self) -> None:
        """Pass on the events that became durable since the last time."""
        if self._on_event is None:
            return
        for event in self.store.events(self._told):
            self._told = event["seq"]
            self._on_event(
                {"event": event["kind"], "step": event["seq"], "skill": event["skill"], **event["detail"]}
            )

    # One training

    def _launch(self, name: str) -> None:
        """One attempt is on record before its process exists, so that none runs unknown."""
        row = self.store.skill(name)
        expert = self.store.assign_expert(name)
        folder = run_folder_of(self.base_dir, expert, name)
        number = self.store.begin_attempt(name, folder, row.left if row.budget_total else None)
        log = (folder / f"training-{number}.log").resolve()
        words = [str(folder.resolve()), "--attempt", str(number)]
        command = [sys.executable, "-m", "shoal.skills.learning.run", *words]
        session = f"shoal_e{expert}_{row.slug}_{number}"
        try:
            self._prepare(row, folder, expert)
            clear_marks(folder)
            handle = self.launcher.launch(
                command, session, job_environment(self.max_parallel, self.gpu_ids), log
            )
        except Exception as error:  # of programs, clusters: the failure of this skill, not the end of the run
            if is_full(error):
                self._finish(self.store.attempt(number), "stopped", NO_ROOM)
                raise
            known = isinstance(error, ShoalError | ValueError)
            reason = f"cannot be launched: {error if known else f'{type(error).__name__}: {error}'}"
            self._finish(self.store.attempt(number), "failed", reason, 0 if known else self.max_retries)
            return
        self.store.set_handle(number, self.launcher.name, handle, log)
        self._watched[number] = self.launcher, handle, time.monotonic()
        export_state(self.store, self.max_parallel)
        logger.info("training %r, launch %d%s", name, number, "" if row.fresh else " (resumed)")

    def _prepare(self, row: SkillRow, folder: Path, expert: int) -> None:
        """Lay out a training, or find the one to go on with and give it its present budget."""
        if not row.fresh and self._can_resume(folder, row):
            Run.open(folder).allow(row.left)
            return
        experts, skills = with_experts(self.store), [other.spec for other in self.store.skills()]
        if {step.skill for step in training_plan(row.name, skills, self.features)} - {row.name, *experts}:
            # A cheaper way was added since, and is not trained yet: go the way that is.
            skills = [skill for skill in skills if skill.name == row.name or skill.name in experts]
        prepare_training_run(
            row.name, row.spec, expert, row.dependencies, experts, self.base_dir,
            env_name=self.world, skills=skills, seed=self._seed(row),
            store=self.store, config=replace(self.config, total_timesteps=float(max(row.left, 1))),
        )  # fmt: skip

    def _can_resume(self, folder: Path, row: SkillRow) -> bool:
        """Whether a training of this skill and seed lies there whole; one that is damaged is laid out anew."""
        try:
            task = Run.open(folder).task()
            return bool(task.experts) and (task.skill, task.seed) == (row.name, self._seed(row))
        except (ValueError, FileNotFoundError, LookupError, TypeError, AttributeError, OverflowError):
            return False

    def _seed(self, row: SkillRow) -> int:
        """Continuations draw from streams of their own; retries from the same as the launch they repeat."""
        return self.seed if row.rounds == 0 else derive_seed(self.seed, "continuation", row.rounds)

    def _ended(self, attempt: AttemptRow, how: str) -> None:
        """A training is over: merge its result, or say why there is none."""
        folder = self.base_dir / attempt.run_folder
        try:
            read_outcome(folder, attempt.id)
        except Exception as error:  # whatever a training may leave behind: it is no result
            failure = read_failure(folder, attempt.id)
            if failure.full:
                self._finish(attempt, "stopped", NO_ROOM)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
            unseen: End = "lost" if how in (UNSEEN, LOST) and failure.reason is None else "failed"
            end = "exhausted" if failure.final else unseen
            self._finish(attempt, end, failure.reason or f"{how}; {error}", self.max_retries)
            return
        try:
            self._merge(attempt)
        except OSError:  # such as a full disk: the result stays, and the next run merges it
            raise
        except Exception as error:
            self._finish(
                attempt, "failed", f"merge failed: {type(error).__name__}: {error}", self.max_retries
            )
            return
        if how.startswith(("killed", "exit status")) and how != "exit status 0":
            logger.warning(
                "%r: launch %d left its result, and then ended: %s", attempt.skill, attempt.id, how
            )
        self._forget(attempt)
        export_state(self.store, self.max_parallel)
        self._call(attempt.skill, 0)

    def _merge(self, attempt: AttemptRow) -> None:
        process_completed_training(
            self.base_dir / attempt.run_folder, attempt.skill, self.store.assign_expert(attempt.skill), self.base_dir,
            attempt=attempt.id, store=self.store,
        )  # fmt: skip

    def _kill(self, attempt: AttemptRow, end: End) -> None:
        """End a training; one that is to be stopped and was faster is left to be merged."""
        if attempt.id in self._watched:
            launcher, handle, _ = self._watched[attempt.id]
            launcher.kill(handle)
            until = time.monotonic() + ENDING_SECONDS
            while self._poll(attempt.id) is None:
                if time.monotonic() > until:
                    raise WorkerError(
                        f"launch {attempt.id} still runs {ENDING_SECONDS:g} s after it was killed"
                    )
                time.sleep(0.01)
        if end == "stopped" and (self.base_dir / attempt.run_folder / DONE).exists():
            return
        reasons = {"limit": f"ran longer than {self.time_limit} s", "stopped": "stopped"}
        self._finish(attempt, end, reasons.get(end))

    def _finish(self, attempt: AttemptRow, end: End, reason: str | None = None, max_retries: int = 0) -> None:
        row = self.store.finish(attempt.id, end, reason, max_retries=max_retries)
        self._forget(attempt)
        what = "launch again" if row.status == "waiting" else row.status
        logger.warning("%r: launch %d %s: %s (%s)", row.name, attempt.id, end, what, reason or end)
        export_state(self.store, self.max_parallel)
        if row.status != "waiting":
            self._call(row.name, 0 if row.status == "completed" else 1)

    def _give_up(self, name: str, status: Status, reason: str | None) -> None:
        if status == "waiting":
            self.store.update_skill(name, status=status, reason=reason)
            return
        self.store.give_up(name, status, reason)
        export_state(self.store, self.max_parallel)
        self._call(name, 1)

    def _forget(self, attempt: AttemptRow) -> None:
        self._watched.pop(attempt.id, None)
        self._over.pop(attempt.id, None)

    def _call(self, name: str, which: int) -> None:
        row = self.store.skill(name)
        data = {"status": row.status, "reason": row.reason, "expert_idx": row.expert, **row.result}
        heard = self._heard[which]
        if heard is not None:
            heard(name, data)

    # Taking over

    def _remember(self) -> None:
        """Keep what later commands need to know; a folder belongs to one world. New budgets become those of skills."""
        known = self.store.setting("world")
        if known is not None and known != self.world:
            raise ConfigError(f"{self.base_dir} holds skills of {known!r}, not of {self.world!r}")
        budget, before = int(self.config.total_timesteps), self.store.setting("total_timesteps")
        with self.store.transaction():
            for row in self.store.skills():  # one that was given a budget of its own keeps it
                if row.budget_total != budget and before in (None, row.budget_total):
                    self.store.update_skill(row.name, budget_total=budget)
            self.store.set_setting("world", self.world)
            self.store.set_setting("seed", self.seed)
            self.store.set_setting("total_timesteps", budget)

    def _recover(self) -> None:
        """Adopt what runs, and finish what a kill interrupted."""
        for attempt in self.store.attempts(running=True):
            handle = attempt.handle or self._search(attempt)
            done = (self.base_dir / attempt.run_folder / DONE).exists()
            if handle is None and not done:
                self._finish(attempt, "lost", "the scheduler died while launching it")
                continue
            ours = attempt.launcher == self.launcher.name
            launcher = self.launcher if ours else adopting_launcher(handle or {}, self.base_dir)
            if handle is None or launcher is None or launcher.poll(handle) is not None:
                self._over[attempt.id] = UNSEEN
            else:
                self._watched[attempt.id] = launcher, handle, time.monotonic()
        latest = {attempt.skill: attempt for attempt in self.store.attempts()}
        for attempt in latest.values():
            if attempt.outcome == "merged" and (self.base_dir / attempt.run_folder).exists():
                self._merge(attempt)  # which was committed, and is only put away

    def _search(self, attempt: AttemptRow) -> Handle | None:
        """The process of a launch that was recorded before its scheduler died."""
        end = [str((self.base_dir / attempt.run_folder).resolve()), "--attempt", str(attempt.id)]
        for pid, words in command_lines():
            if words[-3:] == end and "-m" in words:
                handle = process_handle(pid)
                self.store.set_handle(
                    attempt.id, "local", handle, Path(end[0]) / f"training-{attempt.id}.log"
                )
                return handle
        return None
