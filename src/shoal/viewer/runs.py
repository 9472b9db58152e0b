"""A run folder as the viewer reads it: kind, metrics, settings, end, skills and samples. Nothing is ever written.

Every file may be missing, half written or replaced while it is read; what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.core.configuration import read_settings
from shoal.core.errors import DataError
from shoal.core.run_folder import LOG, STARTED, UNFINISHED, FolderLock, is_number, latest, whole_rows
from shoal.viewer.index import EpisodeIndex

Kind = Literal["agent", "ppo", "skills", "split"]
PICTURES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
FILMS = {".mp4": "video/mp4", ".webm": "video/webm"}
WRITTEN = (
    LOG,
    "metrics.jsonl",
    "summary.json",
    "config.yaml",
    "state.db",
    "state.db-wal",
    "batch/batch.json",
)
"""Files that change as a run goes on."""
LAST = 500
"""Rows from which the list of runs takes the last value of each metric."""
_LOGGED = 200_000
"""Letters of a log that are shown, its last."""
_LARGEST = 64 * 2**20
"""Bytes of a picture that is shown."""


class Run:
    """One run folder. Safe to use from several threads."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError(
                f"{self.path} is not a run folder; runs are in runs/ unless run_dir= said otherwise"
            )
        self.name = self.path.resolve().name
        self.word = linked(self.name)
        self.index = EpisodeIndex(self.path)
        self.spell: Callable[[Sequence[int]], list[str]] | None = None
        """The text of each token id of a batch, by whoever has its tokenizer; None: that of Qwen is tried."""
        self._known: dict[str, tuple[Any, Any]] = {}
        self._lock = threading.Lock()

    @property
    def kind(self) -> Kind:
        """What made it, by the files that it holds."""
        if (self.path / "state.db").is_file():
            return "skills"
        if self.batch_folder is not None:
            return "split"
        return "ppo" if "ppo" in self.config() else "agent"

    @property
    def x(self) -> str:
        """The metric on the x axis."""
        return "steps" if self.kind == "ppo" else "iteration"

    def _cached(self, name: str, make: Callable[[Path], Any], empty: Any) -> Any:
        """What `make` gives of a file, made again only when the file has changed."""
        path = self.path / name
        try:
            status = path.stat()
            mark = (status.st_ino, status.st_size, status.st_mtime_ns)
            with self._lock:
                known = self._known.get(name)
            if known is not None and known[0] == mark:
                return known[1]
            value, real = empty, self.path_of(name)
            with contextlib.suppress(ValueError, RecursionError):  # what cannot be read is not tried again
                value = make(real)
        except OSError:
            return empty
        with self._lock:
            self._known[name] = (mark, value)
        return value

    def path_of(self, name: str) -> Path:
        """Where a file of the run is.

        Raises:
            OSError: it is not there, a link that leads out of the run, or no plain file: a pipe would be waited for.
        """
        real = Path(os.path.realpath(self.path / name, strict=True))
        if not (real.is_relative_to(self.path.resolve()) and real.is_file()):
            raise OSError(f"{self.path / name} is no file of this run")
        return real

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl` that are whole, one for each step in their order; of skills as they stand."""
        return list(self._cached("metrics.jsonl", self._rows_in, ([], {}))[0])

    def last_values(self) -> dict[str, Any]:
        """The newest number of each metric in the last rows."""
        return dict(self._cached("metrics.jsonl", self._rows_in, ([], {}))[1])

    def _rows_in(self, path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rows = whole_rows(path.read_bytes())
        rows = rows if self.kind == "skills" else latest(rows, self.x)
        return rows, {name: value for row in rows[-LAST:] for name, value in row.items() if is_number(value)}

    def config(self) -> dict[str, Any]:
        """The settings of the run."""
        return dict(self._cached("config.yaml", read_settings, {}))

    def summary(self) -> dict[str, Any]:
        """What the run wrote at its end; empty before."""
        return dict(self._cached("summary.json", _object, {}))

    def log(self) -> str:
        """The end of what the run said, its warnings and errors; empty where nothing was kept."""
        return str(self._cached(LOG, lambda path: path.read_text("utf-8", "replace")[-_LOGGED:], ""))

    def started_by(self) -> str | None:
        """The command line that wrote into the run last, as far as the end of its log goes back."""
        found = re.findall(rf"^\S+ \S+ INFO {STARTED}(.*)$", self.log(), re.MULTILINE)
        return found[-1] if found else None

    def seed(self) -> Any:
        """The seed of the run, None where it is not known."""
        return self.summary().get("seed", self.config().get("seed"))

    def status(self) -> str:
        """`running`, `completed` and so on, or `unfinished` when no file says how it ended."""
        if self.is_running():
            return "running"
        return str(self.summary().get("status") or "unfinished")

    def progress(self) -> tuple[float, float, float | None] | None:
        """How far the last row is on the x axis, where the run ends, and the seconds left at the pace so far."""
        config, rows = self.config(), self.rows()
        trainer = config.get("trainer")
        total: Any = config.get("total_timesteps")
        if self.kind == "agent":
            total = trainer.get("iterations") if isinstance(trainer, dict) else None
        done, seconds = points(rows, "seconds", self.x)[1], points(rows, self.x, "seconds")[1]
        if not is_number(total) or not done:
            return None
        went = done[-1] - done[0]
        left = (total - done[-1]) * (seconds[-1] - seconds[0]) / went if went > 0 else None
        return done[-1], float(total), left

    def seconds(self) -> float | None:
        """How long the whole run took; of an agent that is not at its end, up to its last row."""
        of_rows = points(self.rows(), self.x, "seconds")[1] if self.kind == "agent" else []
        took = self.summary().get("seconds", of_rows[-1] if of_rows else None)
        return float(took) if is_number(took) else None  # type: ignore[arg-type]

    def written(self, *names: str) -> float | None:
        """When the newest of these files, by default any that a run writes as it goes on, was written."""
        times = []
        for name in names or WRITTEN:
            with contextlib.suppress(OSError):
                times.append((self.path / name).stat().st_mtime)
        return max(times, default=None)

    def is_running(self) -> bool:
        """Whether a process holds the folder."""
        with contextlib.suppress(OSError):
            return any(FolderLock(self.path / name).is_taken() for name in (".lock", "scheduler.lock"))
        return False

    def version(self) -> str:
        """A word that changes when something in the run does."""
        digest = hashlib.sha256(self.status().encode())
        trainings = self.path.glob("training_runs/*/metrics.jsonl")  # of skills
        for path in (*(self.path / name for name in WRITTEN), *sorted(trainings)):
            with contextlib.suppress(OSError):
                status, name = path.stat(), path.relative_to(self.path)
                digest.update(f"{name} {status.st_ino} {status.st_size} {status.st_mtime_ns}".encode())
        digest.update(f"{self.index.files()} {self.index.progress} {self.index.count()}".encode())
        return digest.hexdigest()[:20]

    # --- files that are shown
    def file(self, name: str, kinds: Mapping[str, str]) -> tuple[Path, str]:
        """A file inside the run folder, and its media type.

        Raises:
            DataError: it is outside, of another kind, too large, or not there.
        """
        media = kinds.get(Path(name).suffix.lower())
        with contextlib.suppress(OSError, ValueError):
            place = self.path_of(name)
            if media and place.stat().st_size <= _LARGEST:
                return place, media
        raise DataError(f"{name[:200]!r} is no picture or film of this run")

    # --- skills
    def skills(self) -> dict[str, list[dict[str, Any]]]:
        """The tables of the graph's store, each row a dict; empty without one."""
        names = ("skill", "attempt", "version", "head", "event")
        tables: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        path = self.path / "state.db"
        if not path.is_file():
            return tables
        # Where nobody writes there is no -wal, and opening would make one, except of a file declared unchanging.
        live = path.with_name("state.db-wal").exists()
        with contextlib.suppress(sqlite3.Error):
            address = f"{path.resolve().as_uri()}?{'mode=ro' if live else 'immutable=1'}"
            with contextlib.closing(sqlite3.connect(address, uri=True, timeout=5)) as db:
                db.row_factory = sqlite3.Row
                db.execute("begin")
                for name in tables:
                    order = " order by rowid desc limit 500" if name == "event" else " order by rowid"
                    tables[name] = [dict(row) for row in db.execute(f"select * from {name}{order}")]
        return tables

    # --- split samples
    @property
    def batch_folder(self) -> str | None:
        """The folder of the samples that are shown: the batch, or the first shard that has samples."""
        found = [self.path / "batch" / "batch.json", *sorted(self.path.glob("shards/[0-9]*/batch.json"))]
        return next((file.parent.relative_to(self.path).as_posix() for file in found if file.is_file()), None)

    def samples(self) -> list[dict[str, Any]]:
        """The description of each sample in `batch.json`."""
        samples = self._batch().get("samples")
        return [sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []

    def image_sizes(self, traj_index: Any) -> list[Any]:
        """(width, height) of each recorded image of a trajectory of the batch, where they are known."""
        recorded = self._batch().get("pixels", {}).get(str(traj_index), {})
        return list(recorded.get("sizes", ()))

    def _batch(self) -> dict[str, Any]:
        folder = self.batch_folder
        return {} if folder is None else self._cached(f"{folder}/batch.json", _object, {})


def linked(name: str) -> str:
    """A name as a part of an address."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def points(rows: Sequence[Mapping[str, Any]], x: str, name: str) -> tuple[list[float], list[float]]:
    """The curve of a metric: where both it and `x` are finite numbers."""
    xs, ys = [], []
    for row in rows:
        a, b = row.get(x), row.get(name)
        if is_number(a) and is_number(b):
            xs.append(float(a))  # type: ignore[arg-type]
            ys.append(float(b))  # type: ignore[arg-type]
    return xs, ys


def _object(path: Path) -> dict[str, Any]:
    value = msgspec.json.decode(path.read_bytes())
    return value if isinstance(value, dict) else {}


# --- which folders are runs
def folders(root: Path) -> list[Path]:
    """Run folders under `root`, at most two levels down; the inside of a run is not looked at."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: runs are in runs/ unless --out (run_dir=) said otherwise")
    found: list[Path] = []
    for path in _shown(root):
        found += [path] if is_run(path) else filter(is_run, _shown(path))
    return found


def _shown(folder: Path) -> list[Path]:
    """The folders inside, but for hidden ones and where nobody may look."""
    with contextlib.suppress(PermissionError):
        return sorted(path for path in folder.iterdir() if os.path.isdir(path) and path.name[:1] != ".")
    return []


def is_run(path: Path) -> bool:
    """Whether a folder is one of a run."""
    return any(os.path.exists(path / name) for name in PARTS)  # False too where nobody may look


PARTS = ("summary.json", "metrics.jsonl", "config.yaml", "state.db", "trajectories", "batch", UNFINISHED)
"""One of these makes a folder a run."""


def run_folders(asked: Sequence[Path], *, empty: bool = False) -> list[Path]:
    """The run folders that are meant: each as it is, or those inside.

    Raises:
        DataError: one holds none, unless it may be `empty`.
    """
    found: list[Path] = []
    for path in asked:
        inside = [path] if is_run(path) else folders(path)
        if not inside and not empty:
            raise DataError(
                f"{path} holds no run: there is none of {', '.join(PARTS)} in it or in its folders"
            )
        found += [folder for folder in inside if folder.resolve() not in {f.resolve() for f in found}]
    return found


def resume_words(run: Path, command: str) -> list[str] | None:
    """What `shoal` is called with to go on with a run; its settings are those in its folder. None: nothing can.

    Args:
        run: its folder.
        command: that made it.
    """
    place = str(run)
    words = {
        "skills train": ["skills", "train", "--resume", "--out", place],
        "train-ppo": ["train-ppo", "--resume-from", str(_checkpoint_dir(run) or run)],
        "train": ["train", "--config-name", "NAME", f"run_dir={place}", "resume=true"],
        "train-recorded": ["train-recorded", "recordings=DIR", f"run_dir={place}", "resume=true"],
        "skills-training": ["skills", "train", "--resume", "--out", "GRAPH"],
    }
    if (run / "config.yaml").is_file():
        words["train"][1:3] = ["--config-dir", place, "--config-name", "config"]
    if (run / "shards").is_dir():
        words["split"] = ["split", "ROOT", "--shard-size", "N", "--resume", "--out", place]
    return words.get(command)


def has_checkpoint(run: Path, command: str) -> bool:
    """Whether there is something that a run can go on from, in its folder or in one of its `--checkpoint-dir`."""
    folder = _checkpoint_dir(run) or run / "checkpoints"
    return any(folder.glob("step_*" if command == "train-ppo" else "*"))


def _checkpoint_dir(run: Path) -> Path | None:
    """Where a run of `train-ppo` has its checkpoints, if elsewhere than in its folder."""
    elsewhere = Run(run).config().get("checkpoint_dir") if run.is_dir() else None
    return Path(elsewhere) if isinstance(elsewhere, str) else None
