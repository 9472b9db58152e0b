"""`shoal rollout --verify`: play what a run saved again, one episode after another, and say what was equal."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.cli.rollout import engine_for
from shoal.core.data import Trajectory, read_trajectories
from shoal.core.errors import DataError
from shoal.core.files import read_json, verify_folder
from shoal.core.seeding import derive_seed
from shoal.rollout.collector import place_of
from shoal.rollout.parallel.rollout import ParallelRolloutManager
from shoal.rollout.parallel.worker import Assignment
from shoal.rollout.samplers.sampler import Engine, Level
from shoal.rollout.verify import Verdict, compare
from shoal.testing.recorded_runs import Recording, recordings_of, settings_of


def verify(run: Path, ending: contextlib.ExitStack) -> int:
    """Replay a saved rollout, or what a training run saved; exit code 1 if less held than was promised."""
    from shoal.train.agent.config import AgentConfig

    file = run / "trajectories" / "rollout.jsonl"
    recordings = _recordings(run)
    if not (run / "config.yaml").exists() or not (file.exists() or recordings):
        raise DataError(
            f"{run} is not the folder of a saved rollout or of an agent's training: it needs config.yaml and "
            f"{file.relative_to(run)}, as `shoal rollout` writes them, or trajectories/heldout-N.jsonl with the "
            f"checkpoint of iteration N, as `shoal train` does"
        )
    config = AgentConfig.read(settings_of(run))
    if file.exists():
        engine = engine_for(config, run if (run / "engine").exists() else None, ending)
        return int(not _replay(str(run), config, engine, file, engine.level))
    return int(not _replay_training(run, config, recordings))


def _recordings(run: Path) -> list[tuple[Recording, Path]]:
    """Files of a training run whose weights are still there, oldest first, and the checkpoint that wrote each."""
    found = []
    for recording in recordings_of(run):
        checkpoint = run / "checkpoints" / f"step-{recording.weights:06d}"
        if recording.kind in ("train", "heldout") and checkpoint.is_dir():
            found.append((recording, checkpoint))
    return found


def _replay_training(run: Path, config: Any, recordings: Sequence[tuple[Recording, Path]]) -> bool:
    import torch

    from shoal.train.agent.policy import load_engine

    torch.set_num_threads(config.engine.threads)
    held = []
    for recording, folder in recordings:
        checkpoint = verify_folder(folder)
        engine = load_engine(checkpoint / "engine", device=config.engine.device, config=config.engine)
        engine.weights_version = int(read_json(checkpoint / "state.json")["weights_version"])
        promised: Level = "L0" if config.engine.name in ("vllm", "openai") else engine.level
        name = f"{run}: {recording.file.name} with {checkpoint.name}"
        held.append(_replay(name, config, engine, recording.file, promised, held_out=recording.held_out))
    return all(held)


def _replay(
    name: str, config: Any, engine: Engine, file: Path, promised: Level, *, held_out: bool = False
) -> bool:
    """Play the episodes of a file again and print what held; whether it is what was promised."""
    saved = list(read_trajectories(file))
    seed = derive_seed(config.seed, "held-out") if held_out else config.seed
    sampling = config.agent_proxy.sampling(greedy=held_out)
    side = "val" if held_out else "train"
    with ParallelRolloutManager(config, engine, backend="serial", side=side, seed=seed) as manager:
        assignments = [
            Assignment(
                index,
                place_of(seed, t.iteration, t.group, t.member),
                t.env,
            )
            for index, t in enumerate(saved)
        ]
        replayed = manager.play(assignments, sampling)
    verdict = _compare_whole(saved, replayed)
    print(f"{name}, promised {promised}, held {verdict}")
    failed = sum(t.status != "ok" for t in saved)
    if failed:
        print(f"{failed} episodes had failed when they were saved and are left out")
    return verdict.level >= min(promised, "L1")


def _compare_whole(saved: Sequence[Trajectory], replayed: Sequence[Trajectory]) -> Verdict:
    whole = [k for k, t in enumerate(saved) if t.status == "ok"]
    return compare([saved[k] for k in whole], [replayed[k] for k in whole])
