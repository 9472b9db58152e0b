"""The picture of a PPO run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward per episode", (("reward", "finished in the rollout"), ("reward_mean", "mean of the last 100"),
                            ("eval_return_mean", "evaluation, greedy"))),
    ("episode length", (("length_mean", "mean of the last 100"),)),
    ("entropy, explained variance",
     (("entropy", "entropy (nats)"), ("explained_variance", "explained variance"))),
    ("size of the updates", (("approx_kl", "KL"), ("clip_fraction", "clipped fraction"))),
)  # fmt: skip


def write_ppo_curves(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the metrics of a run over its env steps into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    for axis, (name, lines) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for key, label in lines:
            points = [(row["steps"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                style: dict[str, Any] = {"alpha": 0.35, "linewidth": 0.8} if key == "reward" else {}
                style |= {"marker": "o", "markersize": 4} if key.startswith("eval") else {}
                axis.plot(*zip(*points, strict=True), label=label, **style)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("environment steps", fontsize=9)
        axis.grid(alpha=0.3)
        if name.startswith("entropy"):
            axis.set_ylim(bottom=max(-1.05, axis.get_ylim()[0]))
        if axis.lines:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
