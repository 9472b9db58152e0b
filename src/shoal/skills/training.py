"""The process of one training: `python -m shoal.skills.training RUN_FOLDER --attempt N`.

It needs nothing of the scheduler that launched it and goes on when that one dies. It resumes from its newest
checkpoint, and prints one JSON line at each durable moment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.core.files import write_bytes
from shoal.core.run_folder import RunFolder
from shoal.skills import experts as expert_files
from shoal.skills.runs import Run, fail_training, finish_training
from shoal.skills.trainer import Trainer
from shoal.skills.worlds import Bank


class NotLearnedError(RuntimeError):
    """The budget ran out before the skill was learned well enough to be of use."""


def run_training(folder: Path | str, attempt: int | None = None) -> dict[str, Any]:
    """Train what a run folder says, resuming if it was begun before; returns what `DONE.json` tells."""
    run = Run.open(folder)
    with RunFolder(run.folder, "skills-training", int(run.spec["seed"]), _print_event) as metrics:
        return _run(run, metrics, attempt)


def _run(run: Run, metrics: RunFolder, attempt: int | None) -> dict[str, Any]:
    began, cpu = time.monotonic(), time.process_time()
    trainer = Trainer(run.task())
    _prepare(run, trainer)
    saved = run.load_checkpoint()
    if saved is not None:
        trainer.restore(*saved)
    metrics.keep_metrics(lambda row: row["step"] <= trainer.frames)

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
    usage = resource.getrusage(resource.RUSAGE_SELF)
    numbers = {
        "stopped": result.stopped,
        "seconds": round(time.monotonic() - began, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "peak_memory": usage.ru_maxrss * 1024,
        "bank": result.bank_size,
        "finished_at": time.time(),
    }
    finish_training(
        run.folder,
        {local: net.params() for local, net in enumerate(result.experts)},
        dict(enumerate(result.acted_frames)),
        attempt=attempt,
        frames=result.frames,
        success=result.success,
        numbers=numbers,
        episodes=result.episodes,
    )
    metrics.event(
        "trained", skill=run.spec["skill"], attempt=attempt, frames=result.frames, success=result.success
    )
    return numbers


def _prepare(run: Run, trainer: Trainer) -> None:
    """Make the start states, or read those that an earlier launch made."""
    path = run.policies / "bank.safetensors"
    mark = hashlib.sha256(
        (run.policies / "mixture.safetensors").read_bytes()
        + json.dumps(dict(run.spec), sort_keys=True).encode()
    ).hexdigest()
    if path.exists():
        arrays, note = expert_files.decode(path.read_bytes(), str(path))
        banks = {
            name: Bank({k.removeprefix(name + "/"): a for k, a in arrays.items() if k.startswith(name + "/")})
            for name in ("practice", "evaluation")
        }
        sums = {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in sorted(arrays.items())}
        if note.get("mark") == mark and note.get("sha256") == sums:
            trainer.bank, trainer.test_bank = banks["practice"], banks["evaluation"]
            return
    trainer.prepare()
    arrays = {f"practice/{key}": array for key, array in trainer.bank.arrays.items()}
    arrays |= {f"evaluation/{key}": array for key, array in trainer.test_bank.arrays.items()}
    sums = {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in sorted(arrays.items())}
    write_bytes(path, expert_files.encode(arrays, {"mark": mark, "sha256": sums}))


def _print_event(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None) -> int:
    """Run one training as a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m shoal.skills.training", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--attempt", type=int, default=None)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _stop)
    try:
        run_training(options.run_folder, options.attempt)
    except Exception as error:
        traceback.print_exc()
        fail_training(options.run_folder, options.attempt, f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to clean up, and the scheduler waits for the exit
