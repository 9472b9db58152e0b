"""Metrics as TensorBoard files; the same rows stand in `metrics.jsonl`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import missing_extra


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
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close; may be called twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
