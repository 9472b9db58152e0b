"""Skills as jobs of a graph: what is trained, with which experts, and what becomes of the result.

`SkillScheduler` says to the runner how a training is laid out, merged and shown; `Frontier` adds skills while others
train. When things run, end and are given up is the business of `shoal.skills.jobs`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.executors import available_memory
from shoal.core.files import write_json
from shoal.core.seeding import derive_seed
from shoal.skills.jobs.runner import (
    Launcher,
    LocalLauncher,
    Runner,
    check_limits,
    condition,
    is_held,
    job_environment,
    make_launcher,
    put_away,
)
from shoal.skills.jobs.store import AttemptRow, JobRow
from shoal.skills.learning.merge import process_completed_training
from shoal.skills.learning.merge_rules import RULES
from shoal.skills.learning.plan import dependencies as plan_dependencies
from shoal.skills.learning.proposers import Proposer
from shoal.skills.learning.spec import Skill, Store
from shoal.skills.learning.trainer import TrainingConfig
from shoal.skills.learning.training import (
    Run,
    amounts,
    prepare_training_run,
    read_outcome,
    run_folder_of,
    skill_from_data,
    training_plan,
)
from shoal.skills.learning.views import export_views, skill_folder, with_experts
from shoal.skills.learning.worlds import check_installed, world_features

OnSkill = Callable[[str, dict[str, Any]], None]
OnEvent = Callable[[dict[str, Any]], None]


class SkillScheduler:
    """Runs the trainings of one folder.

    Args:
        base_dir: the folder; what is in it already is continued.
        max_parallel: trainings at a time, whatever the number of GPUs.
        poll_interval: most seconds between looks for requests of other processes (`retry`, `cancel`, `stop`), which
            are made twice a second anyway; trainings that end wake the scheduler at once.
        max_retries: how often a failed training is launched again, from its last checkpoint.
        world: "crafting", "craftax-classic", "craftax", or `module:Class` of your own.
        launcher: "local", "tmux", "ray", "slurm" or one of your own.
        merge: rule for experts that several trainings changed.
        seed: run seed.
        config: how skills are trained; another `total_timesteps` than before is the new budget of open skills.
        analyse: correct specs by what really happened.
        on_event: called with each durable moment, once it is on disk.
        available_memory: bytes that can be had; for tests.
        time_limit: seconds that one launch of a training may take.
        gpu_ids: `CUDA_VISIBLE_DEVICES` of the trainings.
    """

    module = "shoal.skills.learning.run"

    def __init__(
        self,
        base_dir: Path | str,
        max_parallel: int = 3,
        poll_interval: float = 30.0,
        max_retries: int = 2,
        *,
        world: str = "crafting",
        launcher: str | Launcher = "local",
        merge: str = "most-frames",
        seed: int = 0,
        config: TrainingConfig | None = None,
        analyse: bool = True,
        on_event: OnEvent | None = None,
        available_memory: Callable[[], int | None] = available_memory,
        time_limit: float | None = None,
        gpu_ids: str | None = None,
    ) -> None:
        check_limits(max_parallel, max_retries, poll_interval, time_limit)
        if merge not in RULES:
            raise ConfigError(f"merge must be one of {', '.join(RULES)}, got {merge!r}")
        self.base_dir = Path(base_dir)
        self.features = world_features(world)
        if isinstance(launcher, str):
            launcher = make_launcher(launcher, slots=max_parallel, folder=self.base_dir)
        self.base_dir.mkdir(parents=True, exist_ok=True)
        self.store = Store(self.base_dir)
        self.world, self.merge_rule, self.seed, self.analyse = world, merge, seed, analyse
        self.max_parallel, self.gpu_ids = max_parallel, gpu_ids
        self.config = config or TrainingConfig()
        self._heard: tuple[OnSkill | None, OnSkill | None] = (None, None)
        self.runner = Runner(
            self.store, self, launcher, slots=max_parallel, max_retries=max_retries, time_limit=time_limit,
            poll_interval=poll_interval, on_event=on_event, free_memory=available_memory,
        )  # fmt: skip
        self.runner.on_complete = lambda name: self._call(name, 0)
        self.runner.on_given_up = lambda name: self._call(name, 1)

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
            skill_data = skill_data.as_dict()
        skill = skill_from_data(skill_name, skill_data, self.features)
        if dependencies is None:
            rows = {row.name: row for row in self.store.skills()}
            known = rows.pop(skill.name, None)
            specs = [row.spec for row in rows.values()]
            dependencies = (
                known.dependencies if known else plan_dependencies(skill, [*specs, skill], self.features)
            )
        row = self.store.add_skill(skill, dependencies, int(self.config.total_timesteps))
        self.runner.wake()
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
        self.runner.wake()
        return allotted

    def stop(self, *, wait: bool = True, kill: bool = False) -> None:
        """Launch nothing more; running trainings are merged first, or left to go on, or ended with `kill`."""
        self.runner.stop("kill" if kill else "drain" if wait else "leave")

    def hold(self) -> None:
        """Keep `run` from ending, since more skills may come; `release` gives that up."""
        self.runner.hold()

    def release(self) -> None:
        """Undo one `hold`."""
        self.runner.release()

    def get_status(self, skill_name: str) -> str:
        """The state a skill is in."""
        return self.store.skill(skill_name).status

    def get_running_skills(self) -> list[str]:
        """Names of skills in training or merging."""
        return [row.name for row in self.store.skills("running", "merging")]

    def get_completed_skills(self) -> dict[str, dict[str, Any]]:
        """`{name: {"expert_idx", "path", …}}` of the completed skills."""
        return {
            name: data
            for name, data in with_experts(self.store).items()
            if self.get_status(name) == "completed"
        }

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
        self.runner.take()

    def run(self) -> bool:
        """Train until nothing more can be done; True if every skill is completed.

        Raises:
            WorkerError: another scheduler is running on this folder.
            MissingExtraError: trainings would run here, where the world cannot be made.
        """
        self.take()
        self._remember()
        if isinstance(self.runner.launcher, LocalLauncher):
            check_installed(self.world)
        return self.runner.run()

    def settle(self, *, kill: bool = False) -> None:
        """Do what was asked for (`cancel`) in a folder without a scheduler; with `kill` end all trainings."""
        self.runner.settle(kill=kill)

    def close(self) -> None:
        """Close the store."""
        self.runner.lock.release()
        self.runner.close()

    # What the runner asks (see `shoal.skills.jobs.runner.Work`)

    def prepare(self, job: JobRow, *, resume: bool) -> Path:
        """Lay out a training, or find the one to go on with and give it its present budget."""
        row = self.store.skill(job.name)
        expert = self.store.assign_expert(row.name)
        folder = run_folder_of(self.base_dir, expert, row.name)
        if resume and self._can_resume(folder, row):
            Run.open(folder).allow(row.left)
            return folder
        experts, skills = with_experts(self.store), [other.spec for other in self.store.skills()]
        if {step.skill for step in training_plan(row.name, skills, self.features)} - {row.name, *experts}:
            # A cheaper way was added since, and is not trained yet: go the way that is.
            skills = [skill for skill in skills if skill.name == row.name or skill.name in experts]
        prepare_training_run(
            row.name, row.spec.as_dict(), expert, row.dependencies, experts, self.base_dir,
            env_name=self.world, skills=skills, seed=self._seed(row),
            store=self.store, config=replace(self.config, total_timesteps=float(max(row.left, 1))),
        )  # fmt: skip
        Run.open(folder).clear_checkpoints()
        return folder

    def session(self, job: JobRow, attempt: int) -> str:
        """A name to attach to."""
        return f"shoal_e{self.store.skill(job.name).expert}_{job.slug}_{attempt}"

    def environment(self) -> Mapping[str, str]:
        """Threads, memory and devices of a training."""
        return job_environment(self.max_parallel, self.gpu_ids)

    def examine(self, attempt: AttemptRow) -> None:
        """Raise unless the result of the training is whole."""
        read_outcome(self.base_dir / attempt.run_folder, attempt.id)

    def merge(self, attempt: AttemptRow) -> None:
        """Decide on the heads of the experts and commit."""
        process_completed_training(
            self.base_dir / attempt.run_folder, attempt.job, self.store.assign_expert(attempt.job), self.base_dir,
            merge=self.merge_rule, attempt=attempt.id, store=self.store, analyse=self.analyse, keep_run=True,
            show=False,
        )  # fmt: skip

    def tidy(self, attempt: AttemptRow) -> None:
        """Move the log to the skill's folder and remove the run folder."""
        kept = self.base_dir / skill_folder(self.store.skill(attempt.job))
        put_away(self.base_dir / attempt.run_folder, kept, "metrics.jsonl")

    def show(self) -> None:
        """Bring the folders and files for people up to date."""
        export_views(self.store)
        export_state(self.store, self.max_parallel)

    def _can_resume(self, folder: Path, row: JobRow) -> bool:
        """Whether a training of this skill and seed lies there whole; one that is damaged is laid out anew."""
        try:
            task = Run.open(folder).task()
            return bool(task.experts) and (task.skill, task.seed) == (row.name, self._seed(row))
        except (ValueError, FileNotFoundError, LookupError, TypeError, AttributeError, OverflowError):
            return False

    def _seed(self, row: JobRow) -> int:
        """Continuations draw from streams of their own; retries from the same as the launch they repeat."""
        return self.seed if row.rounds == 0 else derive_seed(self.seed, "continuation", row.rounds)

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

    def _call(self, name: str, which: int) -> None:
        row = self.store.skill(name)
        data = {"status": row.status, "reason": row.reason, "expert_idx": row.expert, **row.result}
        heard = self._heard[which]
        if heard is not None:
            heard(name, data)


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


# What people see of the graph


def scheduler_state(store: Store, max_parallel: int) -> dict[str, Any]:
    """What `scheduler_state.json` holds: the layout of the reference, skills under their slug."""
    skills: dict[str, Any] = {}
    rows = store.skills()
    attempts = store.attempts()
    held = is_held(store.root)
    for row in rows:
        last = next((attempt for attempt in reversed(attempts) if attempt.job == row.name), None)
        handle: Mapping[str, Any] = (last.handle if last else None) or {}
        skills[row.slug] = {
            "skill_name": row.name,
            "skill_data": {
                "skill_name": row.name,
                "skill_with_consumption": amounts(row.spec),
                "spec": row.spec.as_dict(),
            },
            "status": row.status,
            "reason": row.reason,
            "dependencies": list(row.dependencies),
            "expert_idx": row.expert,
            "started_at": row.started,
            "completed_at": row.ended,
            "retry_count": row.retries,
            "run_folder": last.run_folder if last else None,
            "skill_folder": skill_folder(row) if row.expert is not None else None,
            "tmux_session": handle.get("session"),
            "pid": handle.get("pid"),
            "condition": condition(store, row, held=held),
            "budget_total": row.budget_total,
            "budget_remaining": row.budget_total - row.budget_used,
            "processing_results": row.result,
        }
    assignments = {row.name: row.expert for row in rows if row.expert is not None}
    return {
        "skills": skills,
        "max_parallel": max_parallel,
        "currently_running": [row.slug for row in rows if row.status in ("running", "merging")],
        "next_expert_idx": max((expert for expert in assignments.values() if expert is not None), default=-1)
        + 1,
        "expert_assignments": assignments,
    }


def export_state(store: Store, max_parallel: int) -> None:
    """Replace `scheduler_state.json` by the present state."""
    write_json(store.root / "scheduler_state.json", scheduler_state(store, max_parallel))
