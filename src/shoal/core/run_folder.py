"""The folder that a command leaves behind: metrics while it runs, a summary when it ends.

`metrics.jsonl` has one object per report; `summary.json` is what a script reads after any command that runs
something. Both are safe against `kill -9`: a half-written last line of metrics is dropped on reopening.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.core.files import write_bytes, write_json

Event = Callable[[dict[str, Any]], None]
VERSIONS_OF = ("shoal", "numpy", "gymnasium", "torch", "transformers", "ray")


def installed_versions() -> dict[str, str]:
    """Versions of Python, shoal and the packages that change its results, of those installed."""
    versions = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


class RunFolder:
    """`runs/<name>/` of one run.

    Args:
        path: the folder; made if it is not there.
        command: what ran, for the summary.
        seed: its run seed.
        on_event: called with `{"event": …, "step": …}` after a durable moment, once the data is safe.
    """

    def __init__(self, path: Path | str, command: str, seed: int, on_event: Event | None = None) -> None:
        self.path = Path(path)
        self.command = command
        self.seed = seed
        self._on_event = on_event
        self._wall, self._cpu = time.monotonic(), _cpu_seconds()
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def metrics_path(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one row; numbers that JSON has no word for (NaN, infinity) are written as null."""
        with self.metrics_path.open("ab") as file:
            file.write(json.dumps(_finite(dict(row))).encode() + b"\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The whole rows written so far."""
        if not self.metrics_path.exists():
            return []
        lines = self.metrics_path.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines[:-1]]

    def keep_metrics(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the rows that `wanted` refuses, and a torn last line: what a resumed run will write again."""
        if self.metrics_path.exists():
            rows = [row for row in self.read_metrics() if wanted(row)]
            write_bytes(self.metrics_path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))

    def event(self, event: str, **fields: Any) -> None:
        """Tell the listener of a durable moment; call it only when the data is on disk."""
        if self._on_event is not None:
            self._on_event({"event": event, **fields})

    def finish(self, metrics: Mapping[str, Any], status: str = "completed") -> dict[str, Any]:
        """Write `summary.json` and return what it holds."""
        summary = {
            "command": self.command,
            "seed": self.seed,
            "status": status,
            "seconds": round(time.monotonic() - self._wall, 3),
            "cpu_seconds": round(_cpu_seconds() - self._cpu, 3),
            "versions": installed_versions(),
            "metrics": _finite(dict(metrics)),
        }
        write_json(self.path / "summary.json", summary)
        self.event("summary", path=str(self.path / "summary.json"))
        return summary


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
