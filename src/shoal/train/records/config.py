"""The settings of `shoal.evaluate`, which are the options of `shoal eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EvaluationConfig:
    """How episodes are played, of whatever env."""

    episodes: int = 200
    """How many to play (of each env of a panel); more give a narrower interval."""
    seed: int = 0
    """Seed of the evaluation episodes."""
    temperature: float = 0.0
    """0 takes the likeliest token, 1 samples as in training; a run's `top_p`, `top_k` and `min_p` hold. Of a PPO run 0
    acts as its own evaluations did (the likeliest actions, unless its preset draws them)."""
    device: str | None = None
    """Where the model runs, such as cuda:1; where the run was trained, or the CPU, if not given."""
    checkpoint: str = "newest"
    """Checkpoint of a run: newest, best, or an iteration (of a PPO run, its env steps)."""
    max_tokens: int | None = None
    """Tokens of a response; what the run or export was trained with, 64 for another model, 512 for a server."""
    out: Path | None = None
    """Folder for the episodes (`trajectories/eval.jsonl`) and `summary.json`; say the same again after a kill, Ctrl-C
    or full disk, and what was played is kept."""
