"""The side of a job: what it is given, and how it ends.

`python -m shoal.skills.jobs.run FOLDER --attempt N` runs the function that the folder's `job.json` names.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import io
import json
import os
import resource
import shutil
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import read_json, write_bytes
from shoal.skills.jobs.store import DONE, steps_used, write_done, write_failure
from shoal.skills.jobs.store import ExhaustedError as ExhaustedError


@dataclass(frozen=True)
class Run:
    """What the function of a job is given; its folder lasts over launches, so what it saves there is found again."""

    folder: Path
    attempt: int | None
    name: str
    function: str
    settings: dict[str, Any]
    steps: int  # most it may use, as it counts them itself; 0: no limit
    needs: dict[str, dict[str, Any]]  # by name: what they made, "path", and "numbers"

    @staticmethod
    def open(folder: Path | str, attempt: int | None = None) -> Run:
        """Read the folder of a job."""
        folder = Path(folder).resolve()
        path = folder / "job.json"
        if not path.exists():
            raise DataError(f"{folder} is not the folder of a job: it has no job.json")
        return Run(folder, attempt, **read_json(path))

    def input(self, name: str) -> Path:
        """What a needed job made: its file, or the folder that it packed, unpacked here.

        Raises:
            DataError: it was altered or truncated since.
        """
        if name not in self.needs:
            raise ConfigError(
                f"{self.name!r} does not need {name!r}; it needs {', '.join(self.needs) or 'nothing'}"
            )
        path, sha256 = Path(self.needs[name]["path"]), str(self.needs[name]["sha256"])
        target = self.folder / "inputs" / sha256
        if self.needs[name]["packed"] and target.exists():
            return target
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise DataError(
                f"{path} was altered or truncated: it is not what {name!r} made; restore it, or let that job run again"
            )
        if not self.needs[name]["packed"]:
            return path
        unpack(data, target)
        return target

    def numbers(self, name: str) -> dict[str, Any]:
        """The numbers that a needed job finished with."""
        return dict(self.needs[name]["numbers"])

    def finish(
        self, made: Path | str | bytes = b"", numbers: Mapping[str, Any] | None = None, steps: int = 0
    ) -> None:
        """Say that the job is done, once what it made is safe.

        Args:
            made: bytes, a file or a folder; what needs this job is given it.
            numbers: to show, and for those who need this job.
            steps: that were used.
        """
        steps = steps_used(steps, f"what {self.name!r} used")
        packed = not isinstance(made, bytes) and Path(made).is_dir()
        data = made if isinstance(made, bytes) else pack(Path(made)) if packed else Path(made).read_bytes()
        write_bytes(self.folder / "result", data)
        peak = max(
            resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        fields = {
            "sha256": hashlib.sha256(data).hexdigest(),
            "packed": packed,
            "steps": steps,
            "numbers": dict(numbers or {}),
            "peak_memory": peak * 1024,
            "finished_at": time.time(),
        }
        write_done(self.folder, self.attempt, fields)


def pack(folder: Path) -> bytes:
    """A folder as an uncompressed tar; the same files give the same bytes.

    A link to a file is packed as that file.

    Raises:
        ConfigError: a link that leads to a folder or nowhere, which would be missing.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() and not path.is_file():
                raise ConfigError(f"{path} is a link to a folder or to nothing, which cannot be packed")
            if path.is_file():
                info = tarfile.TarInfo(path.relative_to(folder).as_posix())
                info.size = path.stat().st_size
                if path.stat().st_mode & 0o100:
                    info.mode = 0o755
                with path.open("rb") as file:
                    tar.addfile(info, file)
    return out.getvalue()


def unpack(data: bytes, target: Path) -> None:
    """The files of a tar below `target`, which appears whole or not at all; nothing leaves it.

    Raises:
        ConfigError: `target` is there already, and holds something else.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            tar.extractall(temporary, filter="data")
        os.replace(temporary, target)
    except OSError as error:
        if not target.is_dir() or pack(target) != data:  # else another launch was faster
            raise ConfigError(
                f"{target} cannot be unpacked to: {error.strerror}; name a new folder"
            ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def name_of(function: Callable[[Run], Any]) -> str:
    """`module:function`, or `file.py:function` for one of a script."""
    name = getattr(function, "__qualname__", repr(function))
    if not name.isidentifier():
        raise ConfigError(f"a job's function must stand at the top of a module, got {name!r}")
    if function.__module__ != "__main__":
        return f"{function.__module__}:{name}"
    script = Path(function.__code__.co_filename).resolve()
    if script.suffix != ".py" or not script.is_file():  # a notebook, or what was typed
        raise ConfigError(
            f"a job's function must stand in a .py file, for its process: {name!r} is in {script}"
        )
    return f"{script}:{name}"


def load_function(name: str) -> Callable[[Run], Any]:
    """The function that `name_of` named."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("shoal_job", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["shoal_job"] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function: Callable[[Run], Any] = getattr(module, attribute)
    return function


def run_as_process(module: str, description: str | None, work: Callable[[Path, int | None], object]) -> int:
    """Do `work` as the whole of a process, with the folder and launch that its command line names.

    Its failure is left in the folder, SIGTERM ends it at once.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attempt", type=int, default=None)
    options = parser.parse_args()
    folder = options.folder.resolve()  # work may go elsewhere

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        work(folder, options.attempt)
    except Exception as error:
        traceback.print_exc()
        write_failure(folder, options.attempt, error)
        return 1
    return 0


def run_job(folder: Path, attempt: int | None) -> None:
    """Call the function that the folder of a job names."""
    run = Run.open(folder, attempt)
    os.chdir(run.folder)
    load_function(run.function)(run)
    if not (run.folder / DONE).exists():
        run.finish()
    sys.stdout.write(json.dumps({"event": "finished", "job": run.name, "attempt": run.attempt}) + "\n")


def leave(code: int) -> None:
    """End this process at once: nothing is left to clean up, and the scheduler waits for the exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":  # as the module that jobs import, so that its exceptions are the ones they raise
    from shoal.skills.jobs import run

    leave(run.run_as_process("shoal.skills.jobs.run", __doc__, run.run_job))
