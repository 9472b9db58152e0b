"""What `shoal rollout` prints: metrics of trajectories, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.core.data import Trajectory


def episode_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, Any]:
    """How the episodes went, and how fast."""
    from shoal.train.agent.evaluation import rollout_metrics

    tokens = sum(t.n_tokens for t in trajectories)
    return {
        "episodes": len(trajectories),
        **rollout_metrics(trajectories),
        "seconds_rollout": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def show(value: Any) -> str:
    """A value for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """A table on standard output; the first and the last column are text, the others numbers."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, collapse_padding=True, pad_edge=False)
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if 0 < place < len(header) - 1 else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
