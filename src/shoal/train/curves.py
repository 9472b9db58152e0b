"""A picture of a run: success and reward, format, entropy and signal over iterations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PANELS = (
    ("success rate", ("success", "heldout_success")),
    ("reward per episode", ("reward", "heldout_reward")),
    ("valid actions, groups with signal", ("valid_actions", "groups_with_signal")),
    ("entropy per token (nats)", ("entropy",)),
)
_LABELS = {
    "success": "training, sampled",
    "heldout_success": "held out, greedy",
    "reward": "training, sampled",
    "heldout_reward": "held out, greedy",
    "valid_actions": "valid actions",
    "groups_with_signal": "groups with signal",
    "entropy": "entropy",
}


def write_curves(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the metrics rows of a run into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4))
    figure.subplots_adjust(left=0.06, right=0.98, bottom=0.08, top=0.95, wspace=0.14, hspace=0.3)  # no search
    FigureCanvasAgg(figure)
    for axis, (title, names) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for name in names:
            points = [(row["iteration"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                marker = "o" if name.startswith("heldout") else None
                axis.plot(*zip(*points, strict=True), label=_LABELS[name], marker=marker, markersize=4)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("iteration", fontsize=9)
        axis.grid(alpha=0.3)
        if "success" in title or "valid" in title:
            axis.set_ylim(-0.02, 1.02)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=100, pil_kwargs={"compress_level": 1})
