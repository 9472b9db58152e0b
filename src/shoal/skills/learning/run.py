"""The folder of one training: what it is given, its checkpoints, and the mark that it is done.

`training_runs/skill_<expert>_<Name>/<expert>.json` says what to train, as data; `<expert>_policies/` holds the
mixture it starts from, `remap.json`, checkpoints and the result. `DONE.json` is written last, by one rename.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import fsync_folder, read_json, write_bytes, write_json
from shoal.core.run_folder import RunFolder
from shoal.skills.jobs.run import leave, run_as_process
from shoal.skills.jobs.store import ExhaustedError, read_done, slug, write_done, write_failure
from shoal.skills.learning.network import (
    Arrays,
    Network,
    build_remapping,
    decode,
    encode,
    join_mixture,
    split_mixture,
)
from shoal.skills.learning.plan import Step, plan_for
from shoal.skills.learning.spec import Features, Skill, check_skill, parse_skill
from shoal.skills.learning.store import Store
from shoal.skills.learning.trainer import Task, Trainer, TrainingConfig
from shoal.skills.learning.worlds import Bank, world_features

KEEP_CHECKPOINTS = 2
_CHECKPOINT = re.compile(r"checkpoint-(\d{8})-([0-9a-f]{16})\.safetensors")


def skill_from_data(name: str, data: Mapping[str, Any], features: Features) -> Skill:
    """A skill from a spec, or from the reference's `skill_with_consumption` (done: one more of what it gains)."""
    if "skill_with_consumption" in data and "done" not in data:
        amounts = data["skill_with_consumption"]
        gain = dict(amounts.get("gain") or {})
        if not gain:
            raise ConfigError(f"skill {name!r}: gain is empty, so nothing says when it is done")
        data = {
            "name": name,
            "requirements": dict(amounts.get("requirements") or {}),
            "consumption": dict(amounts.get("consumption") or {}),
            "gain": gain,
            "done": {"feature": next(iter(gain)), "count": next(iter(gain.values()))},
        }
    data = {key: value for key, value in data.items() if key not in ("skill_name", "execution_plan", "code")}
    return check_skill(parse_skill({"name": name, **data}), features)


def training_plan(name: str, skills: Sequence[Skill], features: Features) -> list[Step]:
    """The plan up to the first application of the skill; its earlier steps only provide start states."""
    plan = plan_for(name, skills, features)
    return plan[: [step.skill for step in plan].index(name) + 1]


def run_folder_of(base_dir: Path, expert: int, name: str) -> Path:
    """Where the training of a skill lives."""
    return base_dir / "training_runs" / f"skill_{expert}_{slug(name)}"


def prepare_training_run(
    skill_name: str,
    skill_data: Mapping[str, Any],
    global_expert_idx: int,
    dependency_skill_names: Sequence[str],
    completed_skills: Mapping[str, Mapping[str, Any]],
    base_dir: Path | str,
    initialize_expert_fn: Callable[[], Mapping[str, NDArray]] | None = None,
    env_name: str | None = None,
    *,
    skills: Sequence[Skill] | None = None,
    seed: int = 0,
    config: TrainingConfig | None = None,
    store: Store | None = None,
) -> tuple[Path, Path, Path]:
    """Lay out a training: the plan, the experts it needs under contiguous local numbers, its settings.

    Args:
        skill_name: the skill to train.
        skill_data: its spec, or the reference's `{"skill_with_consumption": …, "execution_plan": …}`.
        global_expert_idx: its expert.
        dependency_skill_names: skills whose experts its plan uses.
        completed_skills: `{name: {"expert_idx": …}}`; their heads are taken from the store in `base_dir`.
        base_dir: the folder of the whole run.
        initialize_expert_fn: gives the parameters of a new expert; by default the training makes them.
        env_name: the world, "crafting" by default.
        skills: all specs, to resolve the plan; without them it is `execution_plan`, or the skill alone.
        seed: run seed.
        config: how to train.
        store: an open store of `base_dir`, if there is one.

    Returns:
        The run folder, the file that says what to train, and the folder of policies.
    """
    base_dir = Path(base_dir)
    world = env_name or "crafting"
    features = world_features(world)
    skill = skill_from_data(skill_name, skill_data, features)
    known = {spec.name: spec for spec in skills or ()} | {skill.name: skill}
    plan = _plan(skill, skill_data, known, features, whole=skills is not None)
    needed = [name for name in dict.fromkeys(step.skill for step in plan) if name != skill_name]
    to_local, to_global = build_remapping(
        [*dependency_skill_names, *needed], global_expert_idx, completed_skills
    )
    opened = store or Store(base_dir)
    try:
        mixture, loaded = _load_mixture(
            opened, to_global, global_expert_idx, completed_skills, initialize_expert_fn
        )
    finally:
        if store is None:
            opened.close()
    experts = {name: int(completed_skills[name]["expert_idx"]) for name in needed} | {
        skill_name: global_expert_idx
    }
    remap = {
        "global_to_local": to_local,
        "local_to_global": to_global,
        "initial_frame_counts": {index: loaded.get(index, {}).get("frames", 0) for index in to_local},
        "skill_name": skill_name,
        "global_expert_idx": global_expert_idx,
        "dependencies": needed,
        "skill_with_consumption": _amounts(skill),
    }
    spec = {
        "skill": skill_name,
        "expert": global_expert_idx,
        "world": world,
        "seed": seed,
        "plan": [{"skill": step.skill, "count": step.count} for step in plan],
        "route": [to_local[experts[step.skill]] for step in plan],
        "skills": {name: known[name].as_dict() for name in experts},
        "loaded": loaded,
        "config": asdict(config or TrainingConfig()),
    }
    return _write(run_folder_of(base_dir, global_expert_idx, skill_name), spec, remap, mixture)


def _amounts(skill: Skill) -> dict[str, dict[str, int]]:
    return {
        "requirements": dict(skill.requirements),
        "consumption": dict(skill.consumption),
        "gain": dict(skill.gain),
    }


def _write(
    folder: Path,
    spec: Mapping[str, Any],
    remap: Mapping[str, Any],
    mixture: Mapping[int, Mapping[str, NDArray]],
) -> tuple[Path, Path, Path]:
    """The files of a training; what says what to train comes last, since a folder without it is none."""
    policies = folder / f"{spec['expert']}_policies"
    policies.mkdir(parents=True, exist_ok=True)
    fsync_folder(policies.parent)
    write_bytes(policies / "mixture.safetensors", encode(join_mixture(mixture)))
    write_json(policies / "remap.json", remap)
    module = folder / f"{spec['expert']}.json"
    write_json(module, spec)
    return folder, module, policies


def _load_mixture(
    store: Store,
    to_global: Mapping[int, int],
    own: int,
    completed_skills: Mapping[str, Mapping[str, Any]],
    initialize: Callable[[], Mapping[str, NDArray]] | None,
) -> tuple[dict[int, Mapping[str, NDArray]], dict[int, dict[str, Any]]]:
    """Parameters by local number, and which version of each expert they are; a new expert has none yet."""
    loaded: dict[int, dict[str, Any]] = {}
    mixture: dict[int, Mapping[str, NDArray]] = {}
    for local, index in to_global.items():
        head = store.head(index)
        if head is not None:
            mixture[local] = decode(store.get_blob(head.sha256), f"expert {index}")[0]
            loaded[index] = {"version": head.id, "sha256": head.sha256, "frames": head.frames}
        elif index != own:
            owner = {int(done["expert_idx"]): name for name, done in completed_skills.items()}
            raise DataError(f"expert {index} ({owner.get(index)!r}) has no version in {store.root}")
        elif initialize is not None:
            mixture[local] = dict(initialize())
    return mixture, loaded


def _plan(
    skill: Skill, data: Mapping[str, Any], known: Mapping[str, Skill], features: Features, *, whole: bool
) -> list[Step]:
    if whole:
        return training_plan(skill.name, list(known.values()), features)
    steps = [
        Step(str(step["skill_name"]), int(step.get("count", 1))) for step in data.get("execution_plan") or ()
    ]
    before = [step for step in steps if step.skill in known and step.skill != skill.name]
    return [*before, Step(skill.name, skill.practice)]


@dataclass(frozen=True)
class Run:
    """A training run folder, read."""

    folder: Path
    spec: Mapping[str, Any]

    @staticmethod
    def open(folder: Path | str) -> Run:
        """Read what a run folder says is to be trained."""
        folder = Path(folder)
        files = [path for path in folder.glob("*.json") if path.stem.isdigit()]
        if len(files) != 1:
            raise DataError(f"{folder} is not the folder of a training: it must hold one <expert>.json")
        return Run(folder, read_json(files[0]))

    @property
    def expert(self) -> int:
        """The global index of the expert to train."""
        return int(self.spec["expert"])

    @property
    def policies(self) -> Path:
        """The folder of mixtures and checkpoints."""
        return self.folder / f"{self.expert}_policies"

    @property
    def local_to_global(self) -> dict[int, int]:
        """Global expert of each local one."""
        remapping = read_json(self.policies / "remap.json")["local_to_global"]
        return {int(local): int(index) for local, index in remapping.items()}

    def task(self) -> Task:
        """What to train."""
        data = (self.policies / "mixture.safetensors").read_bytes()
        mixture = split_mixture(decode(data, "mixture.safetensors")[0])
        return Task(
            world=self.spec["world"],
            skill=self.spec["skill"],
            skills={name: parse_skill(spec) for name, spec in self.spec["skills"].items()},
            plan=tuple(Step(step["skill"], step["count"]) for step in self.spec["plan"]),
            experts=tuple(
                Network.from_params(mixture[local]) if local in mixture else None
                for local in self.local_to_global
            ),
            route=tuple(self.spec["route"]),
            seed=int(self.spec["seed"]),
            config=TrainingConfig(**self.spec["config"]),
        )

    def allow(self, steps: float) -> None:
        """Let the training use so many env steps in all."""
        config = {**self.spec["config"], "total_timesteps": float(max(steps, 1))}
        if config != self.spec["config"]:
            write_json(self.folder / f"{self.expert}.json", {**self.spec, "config": config})

    def save_checkpoint(self, update: int, arrays: Arrays, plain: Mapping[str, Any]) -> Path:
        """Write a checkpoint durably; the two newest are kept."""
        data = encode(arrays, plain)
        path = self.policies / f"checkpoint-{update:08d}-{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
        write_bytes(path, data)
        for old in self.checkpoints()[:-KEEP_CHECKPOINTS]:
            old.unlink(missing_ok=True)
        return path

    def checkpoints(self) -> list[Path]:
        """Checkpoint files, oldest first."""
        return sorted(path for path in self.policies.iterdir() if _CHECKPOINT.fullmatch(path.name))

    def load_checkpoint(self) -> tuple[Arrays, dict[str, Any]] | None:
        """The newest checkpoint whose bytes are intact; broken ones are passed over."""
        for path in reversed(self.checkpoints()):
            data = path.read_bytes()
            match = _CHECKPOINT.fullmatch(path.name)
            if match and hashlib.sha256(data).hexdigest().startswith(match[2]):
                with contextlib.suppress(DataError):
                    return decode(data, str(path))
        return None

    def clear_checkpoints(self) -> None:
        """Forget checkpoints, so that the next training starts from the mixture."""
        for path in self.checkpoints():
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Outcome:
    """What a finished training left."""

    attempt: int | None
    experts: dict[int, Arrays]  # by global index
    acted_frames: dict[int, int]  # by global index
    frames: int
    success: float | None
    numbers: dict[str, Any]
    episodes: dict[str, NDArray]


def finish_training(
    run_folder: Path | str,
    experts: Mapping[int, Mapping[str, NDArray]],
    acted_frames: Mapping[int, int],
    *,
    attempt: int | None = None,
    frames: int | None = None,
    success: float | None = None,
    numbers: Mapping[str, Any] | None = None,
    episodes: Mapping[str, NDArray] | None = None,
) -> Path:
    """Write the result of a training and then its mark `DONE.json`; any trainer may end this way.

    Args:
        run_folder: what `prepare_training_run` made.
        experts: parameters by local index.
        acted_frames: env steps in which each expert acted while learning, by local index.
        attempt: which launch this is; a scheduler only believes the mark of the launch it waits for.
        frames: env steps in all; default the sum.
        success: success rate of the skill on evaluation episodes.
        numbers: anything else worth showing.
        episodes: start and end features of evaluation episodes, for the analysis.
    """
    run = Run.open(run_folder)
    to_global = run.local_to_global
    arrays = join_mixture({local: params for local, params in experts.items()})
    arrays |= {f"expert_{len(to_global)}/episodes/{key}": array for key, array in (episodes or {}).items()}
    data = encode(arrays)
    write_bytes(run.policies / "result.safetensors", data)
    return write_done(
        run.folder,
        attempt,
        {
            "sha256": hashlib.sha256(data).hexdigest(),
            "acted_frames": {to_global[local]: int(count) for local, count in acted_frames.items()},
            "frames": int(sum(acted_frames.values()) if frames is None else frames),
            "success": success,
            "numbers": dict(numbers or {}),
        },
    )


def read_outcome(run_folder: Path | str, attempt: int | None = None) -> Outcome:
    """The result of a finished training; a `DataError` if it is not done, broken, or of another launch."""
    run = Run.open(run_folder)
    done = read_done(run.folder, attempt)
    result = run.policies / "result.safetensors"
    data = result.read_bytes()
    if hashlib.sha256(data).hexdigest() != done["sha256"]:
        raise DataError(f"{result} is not the file that DONE.json speaks of")
    to_global = run.local_to_global
    mixture = split_mixture(decode(data, str(result))[0])
    extra = mixture.pop(len(to_global), {})
    return Outcome(
        done["attempt"],
        {to_global[local]: params for local, params in mixture.items()},
        {int(index): int(count) for index, count in done["acted_frames"].items()},
        int(done["frames"]),
        done["success"],
        done["numbers"],
        {key.removeprefix("episodes/"): np.asarray(array) for key, array in extra.items()},
    )


def fail_training(run_folder: Path | str, attempt: int | None, reason: str) -> None:
    """Leave the reason of a failed launch where the scheduler finds it."""
    write_failure(Path(run_folder), attempt, reason)


class NotLearnedError(ExhaustedError):
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
        "steps_in_all": result.frames + result.walked,
        "finished_at": time.time(),
    }
    if (pace := result.pace(trainer.task.plan[-1].count)) is not None:
        numbers["steps_an_application"] = pace
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
    spec = {
        **run.spec,
        "config": {**run.spec["config"], "total_timesteps": None},
    }  # a budget may be raised later
    mark = hashlib.sha256(
        (run.policies / "mixture.safetensors").read_bytes() + json.dumps(spec, sort_keys=True).encode()
    ).hexdigest()
    if path.exists():
        arrays, note = decode(path.read_bytes(), str(path))
        banks = {
            name: Bank({k.removeprefix(name + "/"): a for k, a in arrays.items() if k.startswith(name + "/")})
            for name in ("practice", "evaluation")
        }
        sums = {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in sorted(arrays.items())}
        if note.get("mark") == mark and note.get("sha256") == sums:
            trainer.bank, trainer.test_bank = banks["practice"], banks["evaluation"]
            trainer.walked = int(note.get("walked", 0))
            return
    trainer.prepare()
    arrays = {f"practice/{key}": array for key, array in trainer.bank.arrays.items()}
    arrays |= {f"evaluation/{key}": array for key, array in trainer.test_bank.arrays.items()}
    sums = {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in sorted(arrays.items())}
    write_bytes(path, encode(arrays, {"mark": mark, "sha256": sums, "walked": trainer.walked}))


def _print_event(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Run one training as a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m shoal.skills.learning.run", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--attempt", type=int, default=None)
    options = parser.parse_args(argv)
    return run_as_process(
        options.run_folder, options.attempt, lambda: run_training(options.run_folder, options.attempt)
    )


if __name__ == "__main__":
    leave(main())
