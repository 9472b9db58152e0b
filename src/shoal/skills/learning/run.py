"""The process of one training: resume from its folder, train, leave the result there."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from shoal.core.run_folder import RunFolder
from shoal.skills.graph.process import NotLearnedError, leave, run_as_process
from shoal.skills.learning.trainer import Trainer
from shoal.skills.learning.training import Run, finish_training


def run_training(folder: Path | str, attempt: int | None = None) -> dict[str, Any]:
    """Train what a run folder says, resuming if it was begun before; returns what `DONE.json` tells."""
    run = Run.open(folder)
    with RunFolder(run.folder, "skills-training", int(run.spec["seed"]), _print_event) as metrics:
        return _run(run, metrics, attempt)


def _run(run: Run, metrics: RunFolder, attempt: int | None) -> dict[str, Any]:
    began, cpu = time.monotonic(), time.process_time()
    trainer = Trainer(run.task())
    trainer.prepare()
    saved = run.load_checkpoint()
    if saved is not None:
        trainer.restore(*saved)
    metrics.keep_metrics("step", trainer.frames)

    def report(row: dict[str, Any]) -> None:
        metrics.append_metrics({**row, "wall": round(time.monotonic() - began, 3), "time": time.time()})

    def checkpoint(trainer: Trainer) -> None:
        run.save_checkpoint(trainer.update, *trainer.state())
        metrics.event("checkpoint", step=trainer.frames)

    result = trainer.train(report, checkpoint)
    if result.success < trainer.task.config.min_success:
        run.save_checkpoint(trainer.update, *trainer.state())
        raise NotLearnedError(
            f"not learned: success {result.success:.2f} < min_success {trainer.task.config.min_success} "
            f"after {result.frames} env steps"
        )
    numbers = {
        "stopped": result.stopped,
        "seconds": round(time.monotonic() - began, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "steps_in_all": result.frames + result.walked,
        "finished_at": time.time(),
    }
    if result.pace is not None:
        numbers["steps_an_application"] = result.pace
    finish_training(
        run.folder, {local: net.params() for local, net in enumerate(result.experts)},
        dict(enumerate(result.acted_frames)), attempt=attempt, frames=result.frames, success=result.success,
        numbers=numbers,
    )  # fmt: skip
    metrics.event(
        "trained", skill=run.spec["skill"], attempt=attempt, frames=result.frames, success=result.success
    )
    return numbers


def _print_event(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    leave(run_as_process("shoal.skills.learning.run", __doc__, run_training))
