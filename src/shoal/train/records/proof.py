"""Whether trainings that should be equal are, by their recorded episodes, and by weights where an engine is exact."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.train.agent.config import DEFAULT_FOLDER, AgentConfig
from shoal.train.agent.processes.determinism import threads
from shoal.train.agent.run.checkpoint import list_checkpoints
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.records.compare import episodes_digest, first_difference, weights_digest


@dataclass
class Row:
    """One training."""

    name: str
    digests: dict[str, str]
    """The sha256 of its "episodes", and of its "weights" where the engine is exact to the bit."""
    seconds: float
    problem: str = ""  # how it differs from the first, or why it failed


def prove(trainings: Iterable[tuple[str, AgentConfig]]) -> Iterator[Row]:
    """Train one config after another, and compare each with the first: `shoal prove` in Python.

    Args:
        trainings: a name and a config for each. Their `run_dir` are folders of their own, and
            `trainer.save_trajectories_every` is 1; what else differs, such as the backend, should change nothing.

    Raises:
        Exception: the first training failed; a later one that fails is a row.
    """
    first: tuple[Path, Row] | None = None
    for name, config in trainings:
        with threads(config.engine.threads):
            row, exact = _trained(name, config, may_fail=first is not None)
        run = Path(config.run_dir or DEFAULT_FOLDER)
        if first is None:
            first = run, row
        elif not row.problem and row.digests != first[1].digests:
            parted = [kind for kind in row.digests if row.digests[kind] != first[1].digests[kind]]
            found = first_difference(first[0], run, tokens_only=not exact)
            row.problem = f"{' and '.join(parted)} differ" + (f"; first: {found}" if found else "")
        yield row


def _trained(name: str, config: AgentConfig, *, may_fail: bool) -> tuple[Row, bool]:
    """What came of a training, and whether its engine is exact to the bit."""
    run, engine, began = Path(config.run_dir or DEFAULT_FOLDER), config.engine, time.monotonic()
    exact = engine.name == "tiny" and engine.device == "cpu" and engine.threads == 1
    try:
        with AgentTrainer(config) as trainer:
            for _ in trainer.train():
                pass
        digests = {"episodes": episodes_digest(run, tokens_only=not exact)}
        if exact:
            digests["weights"] = weights_digest(list_checkpoints(run / "checkpoints")[-1])
        return Row(name, digests, time.monotonic() - began), exact
    except Exception as error:  # a border: a backend that fails is a row; the first one is an error
        if not may_fail:
            raise
        return Row(name, {}, time.monotonic() - began, f"{type(error).__name__}: {error}"), exact
