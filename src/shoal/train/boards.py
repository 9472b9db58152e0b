"""Metrics for those who watch: TensorBoard files and Weights & Biases; the same rows stand in `metrics.jsonl`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shoal.core.errors import MissingExtraError, missing_extra
from shoal.core.files import read_json, write_json


class TensorBoard:
    """Writes numbers of metric rows; opened with the first row.

    Args:
        folder: where the event files go.
        enabled: False makes every call do nothing.
    """

    def __init__(self, folder: Path, enabled: bool = True) -> None:
        self._folder = folder
        self._enabled = enabled
        self._writer: Any = None
        if enabled and importlib.util.find_spec("tensorboard") is None:
            raise missing_extra("TensorBoard files", "train")

    def add(self, row: Mapping[str, Any], step: int) -> None:
        """Write the numbers of `row` at `step`; steps at or after the first one written replace older files' ones."""
        if not self._enabled:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close; may be called twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """Sends numbers of metric rows, from the first one on; a resumed run goes on under its old name.

    Args:
        folder: the run folder; the name of the run at W&B is kept in it.
        project: where the run is shown.
        config: the settings of the run.
        enabled: False makes every call do nothing, and asks for no package.
        option: what switched it on, for the message when the package is missing.
    """

    def __init__(
        self,
        folder: Path,
        project: str,
        config: Mapping[str, Any],
        enabled: bool = False,
        option: str = "trainer.wandb=true",
    ) -> None:
        self._run: Any = None
        self._init: Any = None
        if not enabled:
            return
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                f"{option} needs a package that is not installed: run pip install wandb"
            ) from error
        self._init = partial(
            wandb.init, project=project, name=folder.name, dir=str(folder), config=dict(config)
        )
        self._known = folder / "wandb.json"

    def _open(self) -> None:
        """Begin at W&B, which a run that is refused at its start never does."""
        before = read_json(self._known)["id"] if self._known.exists() else None
        self._run = self._init(id=before, resume="allow")
        write_json(self._known, {"id": self._run.id})

    def add(self, row: Mapping[str, Any], step: int) -> None:
        """Send the numbers of `row` at `step`."""
        if self._init is not None:
            if self._run is None:
                self._open()
            self._run.log(_numbers(row), step=step)

    def close(self) -> None:
        """End the run; may be called twice."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
