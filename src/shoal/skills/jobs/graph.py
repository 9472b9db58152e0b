"""Any function as a job: submit, run, look, and take what was made.

    graph = Graph("runs/mine", slots=2)
    graph.add("a", train, settings={"seed": 0})
    graph.add("b", compare, needs=["a"])
    assert graph.run()

A function is named by its module or file, never pickled, and runs as a process of its own with a `Run`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import write_json
from shoal.skills.jobs.run import Run, name_of, unpack
from shoal.skills.jobs.runner import Launcher, Runner, check_limits, job_environment, make_launcher, put_away
from shoal.skills.jobs.store import AttemptRow, JobRow, NewVersion, Store, mark_of, merge_once, read_result


class Graph:
    """Jobs of one folder, continued if there are some in it already.

    Args:
        folder: of the graph.
        slots: jobs at a time.
        launcher: "local", "tmux", "ray", "slurm" or one of your own.
        max_retries: how often a failed job is launched again; what it saved in its folder is still there.
        time_limit: seconds that one launch may take.
        on_event: called with each durable moment, once it is on disk.
    """

    module = "shoal.skills.jobs.run"

    def __init__(
        self,
        folder: Path | str,
        slots: int = 2,
        *,
        launcher: str | Launcher = "local",
        max_retries: int = 2,
        time_limit: float | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        check_limits(slots, max_retries, time_limit=time_limit)
        self.folder, self.slots = Path(folder), slots
        if isinstance(launcher, str):
            launcher = make_launcher(launcher, slots=slots, folder=folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = Store(self.folder)
        self.runner = Runner(
            self.store, self, launcher, slots=slots, max_retries=max_retries, time_limit=time_limit,
            on_event=on_event,
        )  # fmt: skip

    # What people call

    def add(
        self,
        name: str,
        function: Callable[[Run], Any] | str,
        *,
        needs: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        steps: int = 0,
    ) -> None:
        """Add a job; the same one again changes nothing, another of that name is refused.

        Args:
            name: unique.
            function: called with a `Run` in a process of its own; or `module:function`, `file.py:function`.
            needs: jobs that must be completed before, whose results it is given.
            settings: JSON for the function.
            steps: its budget, as it counts itself; 0: no limit.
        """
        named = function if isinstance(function, str) else name_of(function)
        if not all(named.rpartition(":")[::2]):
            raise ConfigError(f"a job's function is named module:function or file.py:function, got {named!r}")
        self.store.add(name, {"function": named, "settings": dict(settings or {})}, needs, steps)
        self.runner.wake()

    def run(self) -> bool:
        """Run until nothing more can be done; True if every job is completed.

        Raises:
            WorkerError: another process runs this folder.
        """
        return self.runner.run()

    def status(self) -> dict[str, str]:
        """The state of every job."""
        return {row.name: row.status for row in self.store.jobs()}

    def failures(self) -> dict[str, str]:
        """Jobs that are not completed and why."""
        return {row.name: row.reason or "" for row in self.store.jobs("failed", "blocked", "skipped")}

    def numbers(self, name: str) -> dict[str, Any]:
        """The numbers that a completed job finished with."""
        return dict(self.store.job(name).result.get("numbers", {}))

    def result(self, name: str) -> bytes:
        """What a completed job made; a folder comes packed, see `unpack`."""
        row = self.store.job(name)
        head = self.store.head(row.artifact) if row.artifact is not None else None
        if head is None:
            raise DataError(f"{name!r} has made nothing yet: it is {row.status}")
        return self.store.get_blob(head.sha256)

    def unpack(self, name: str, target: Path | str) -> Path:
        """The folder that a job made, at `target`, which must not hold anything else.

        Raises:
            ConfigError: it does, or the job made no folder.
        """
        data = self.result(name)
        if not self.store.job(name).result.get("packed"):
            raise ConfigError(
                f"{name!r} made no folder but {len(data):,} bytes: take them from result({name!r})"
            )
        unpack(data, Path(target))
        return Path(target)

    def close(self) -> None:
        """Close the store."""
        self.runner.close()

    # What the runner asks

    def prepare(self, job: JobRow, *, resume: bool) -> Path:
        """Say in the folder what is to be done; what an earlier launch saved there stays if it is resumed."""
        self.store.number(job.name)
        folder = self.folder / "jobs" / job.slug
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        needs = {}
        for name in job.needs:
            row = self.store.job(name)
            head = self.store.head(row.artifact) if row.artifact is not None else None
            assert head is not None  # it is completed
            path = self.store.blob_path(head.sha256).resolve()
            needs[name] = {"path": str(path), "sha256": head.sha256, **head.note}
        write_json(
            folder / "job.json",
            {"name": job.name, **job.payload, "steps": max(job.left, 0), "needs": needs},
        )
        return folder

    def session(self, job: JobRow, attempt: int) -> str:
        """A name to attach to."""
        return f"{job.slug}_{attempt}"

    def environment(self) -> Mapping[str, str]:
        """Threads and memory of a job; modules are looked for where this process found them."""
        variables = job_environment(self.slots)
        paths = [variables["PYTHONPATH"], *(path for path in sys.path if path and Path(path).is_dir())]
        return {**variables, "PYTHONPATH": os.pathsep.join(paths)}

    def examine(self, attempt: AttemptRow) -> None:
        """Raise unless the result is whole."""
        self._result_of(attempt)

    def _result_of(self, attempt: AttemptRow) -> tuple[dict[str, Any], bytes]:
        folder = self.folder / attempt.run_folder
        return read_result(folder / "result", folder, attempt.id)

    def merge(self, attempt: AttemptRow) -> None:
        """What was made becomes the head of the job's artifact."""
        done, data = self._result_of(attempt)
        number, sha256 = self.store.number(attempt.job), self.store.put_blob(data)
        note = {"packed": done["packed"], "numbers": done["numbers"]}
        result = {**note, "finished_at": done["finished_at"]}

        def commit() -> bool:
            head = self.store.head(number)
            before, steps = (head.id, head.steps) if head else (None, 0)
            version = NewVersion(number, sha256, before, steps + done["steps"], "run", True, None, note)
            return self.store.commit(
                attempt.id, [version], {number: before}, result=result, steps=done["steps"],
                peak_memory=done["peak_memory"], mark=mark_of(self.folder / attempt.run_folder),
            )  # fmt: skip

        merge_once(commit)

    def tidy(self, attempt: AttemptRow) -> None:
        """Keep the log and remove the folder."""
        put_away(self.folder / attempt.run_folder, self.folder / "logs" / self.store.job(attempt.job).slug)

    def show(self) -> None:
        """There is nothing to show but the store."""
