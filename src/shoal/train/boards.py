"""Metrics for those who watch: TensorBoard, Weights & Biases, curves; the same rows stand in `metrics.jsonl`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
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
        where = {"project": project, "name": folder.name, "dir": str(folder)}
        self._init = partial(wandb.init, **where, config=dict(config))
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


Panels = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
"""Of four panels the title, and of each of its lines the metric and what it is called."""


def draw_curves(
    rows: Sequence[Mapping[str, Any]], panels: Panels, x: str, label: str, title: str = "", faint: str = ""
) -> tuple[Any, list[Any]]:
    """Metrics of a run over `x`, evaluations with dots, those of `faint` thin: the figure and its four axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), dpi=100)
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    axes = list(figure.subplots(2, 2).flat)
    for axis, (name, lines) in zip(axes, panels, strict=True):
        for key, called in lines:
            points = [(row[x], row[key]) for row in rows if row.get(key) is not None]
            if points:
                style: dict[str, Any] = {"alpha": 0.35, "linewidth": 0.8} if key == faint else {}
                style |= {"marker": "o", "markersize": 4} if key.startswith(("eval", "heldout")) else {}
                axis.plot(*zip(*points, strict=True), label=called, **style)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(label, fontsize=9)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    # room for the longest numbers, without the search that a layout of matplotlib is
    numbers = [axis.yaxis.get_tightbbox(canvas.get_renderer()) for axis in axes]  # type: ignore[attr-defined]
    left = max(0.07, (max(box.width for box in numbers if box is not None) + 12) / figure.bbox.width)
    gap, right, top = left, 0.98, 0.89 if title else 0.95
    figure.subplots_adjust(
        left=left, right=right, bottom=0.08, top=top, wspace=2 * gap / (right - left - gap), hspace=0.32
    )
    return figure, axes
