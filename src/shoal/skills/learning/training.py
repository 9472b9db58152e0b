"""The folder of one training: what it is given, its checkpoints and its result.

`training_runs/skill_<expert>_<Name>/<expert>.json` says what to train, as data; `<expert>_policies/` holds the
mixture it starts from, `remap.json`, checkpoints and the result. `DONE.json` is written last, by one rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError, reading
from shoal.core.files import fsync_folder, read_json, write_bytes, write_json
from shoal.skills.graph.process import DONE, clear_marks, read_result, steps_used, write_done
from shoal.skills.graph.store import Store
from shoal.skills.learning.network import (
    Arrays,
    Network,
    build_remapping,
    decode,
    encode,
    join_mixture,
    split_mixture,
)
from shoal.skills.learning.trainer import Task, TrainingConfig
from shoal.skills.plan import Step, plan_for
from shoal.skills.spec import Features, Skill, check_skill, parse_skill, slug
from shoal.skills.worlds.registry import world_features

KEEP_CHECKPOINTS = 2
Steps = Annotated[int, msgspec.Meta(ge=0)]
_CHECKPOINT = re.compile(r"checkpoint-(\d{8})-([0-9a-f]{16})\.safetensors")


def skill_of(name: str, data: Skill | Mapping[str, Any], features: Features) -> Skill:
    """A checked skill, from the reference's `{"skill_with_consumption": …}` too (done: once more what it gains)."""
    if not isinstance(data, Skill):
        told = data.get("skill_with_consumption") or {}
        gain = dict(told.get("gain") or {})
        if not gain:
            raise ConfigError(f"skill {name!r}: skill_with_consumption must have a gain, got {dict(data)}")
        data = parse_skill(
            {
                "name": name,
                "requirements": dict(told.get("requirements") or {}),
                "consumption": dict(told.get("consumption") or {}),
                "gain": gain,
                "done": {"feature": next(iter(gain)), "count": next(iter(gain.values()))},
            }
        )
    if data.name != name:
        raise ConfigError(f"skill {name!r}: its data names it {data.name!r}")
    return check_skill(data, features)


def training_plan(name: str, skills: Sequence[Skill], features: Features) -> list[Step]:
    """The plan up to the first application of the skill; its earlier steps only provide start states."""
    plan = plan_for(name, skills, features)
    return plan[: [step.skill for step in plan].index(name) + 1]


def run_folder_of(base_dir: Path, expert: int, name: str) -> Path:
    """Where the training of a skill lives."""
    return base_dir / "training_runs" / f"skill_{expert}_{slug(name)}"


def prepare_training_run(
    skill_name: str,
    skill_data: Skill | Mapping[str, Any],
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
        skill_data: a `Skill`, or the reference's `{"skill_with_consumption": …}`.
        global_expert_idx: its expert.
        dependency_skill_names: skills whose experts its plan uses.
        completed_skills: `{name: {"expert_idx": …}}`; their heads are taken from the store in `base_dir`.
        base_dir: the folder of the whole run.
        initialize_expert_fn: gives the parameters of a new expert; by default the training makes them.
        env_name: the world, "crafting" by default.
        skills: all specs, to resolve the plan; without them it is the skill alone.
        seed: run seed.
        config: how to train.
        store: an open store of `base_dir`, if there is one.

    Returns:
        The run folder, the file that says what to train, and the folder of policies.
    """
    base_dir, world = Path(base_dir), env_name or "crafting"
    features = world_features(world)
    skill = skill_of(skill_name, skill_data, features)
    known = {spec.name: spec for spec in skills or ()} | {skill.name: skill}
    plan = [Step(skill_name, skill.practice)]
    if skills is not None:
        plan = training_plan(skill_name, list(known.values()), features)
    needed = [name for name in dict.fromkeys(step.skill for step in plan) if name != skill_name]
    to_local, to_global = build_remapping(
        [*dependency_skill_names, *needed], global_expert_idx, completed_skills
    )
    with (
        contextlib.nullcontext(store) if store else contextlib.closing(Store(base_dir, create=True)) as opened
    ):
        owners = {int(done["expert_idx"]): name for name, done in completed_skills.items()}
        mixture, loaded = _load_experts(opened, to_global, global_expert_idx, owners)
    if global_expert_idx not in loaded and initialize_expert_fn is not None:
        mixture[to_local[global_expert_idx]] = dict(initialize_expert_fn())
    experts = {name: int(completed_skills[name]["expert_idx"]) for name in needed}
    experts[skill_name] = global_expert_idx
    remap = {
        "global_to_local": to_local,
        "local_to_global": to_global,
        "initial_frame_counts": {index: loaded.get(index, {}).get("frames", 0) for index in to_local},
        "skill_name": skill_name,
        "global_expert_idx": global_expert_idx,
        "dependencies": needed,
        "skill_with_consumption": skill.amounts(),
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
    folder = run_folder_of(base_dir, global_expert_idx, skill_name)
    module, policies = folder / f"{global_expert_idx}.json", folder / f"{global_expert_idx}_policies"
    policies.mkdir(parents=True, exist_ok=True)
    fsync_folder(folder)
    clear_marks(folder)
    for path in Run(folder, spec).checkpoints():  # they are of another training
        path.unlink(missing_ok=True)
    write_bytes(policies / "mixture.safetensors", encode(join_mixture(mixture)))
    write_json(policies / "remap.json", remap)
    write_json(module, spec)  # comes last, since a folder without it is none
    return folder, module, policies


def _load_experts(
    store: Store, to_global: Mapping[int, int], own: int, owners: Mapping[int, str]
) -> tuple[dict[int, Mapping[str, NDArray]], dict[int, dict[str, Any]]]:
    """Parameters by local number, and which version of each expert they are; the skill's `own` may have none yet."""
    mixture: dict[int, Mapping[str, NDArray]] = {}
    loaded: dict[int, dict[str, Any]] = {}
    for local, index in to_global.items():
        if head := store.head(index):
            mixture[local] = decode(store.get_blob(head.sha256), f"expert {index}")[0]
            loaded[index] = {"version": head.id, "sha256": head.sha256, "frames": head.frames}
        elif index != own:
            raise DataError(f"expert {index} ({owners.get(index)!r}) has no version in {store.root}")
    return mixture, loaded


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

    @property
    def mixture(self) -> dict[int, Arrays]:
        """Parameters of the experts that it starts from, by local number."""
        path = self.policies / "mixture.safetensors"
        return split_mixture(decode(path.read_bytes(), str(path))[0])

    def task(self) -> Task:
        """What to train."""
        mixture = self.mixture
        return Task(
            world=self.spec["world"],
            skill=self.spec["skill"],
            skills={name: parse_skill(spec) for name, spec in self.spec["skills"].items()},
            plan=tuple(Step(step["skill"], step["count"]) for step in self.spec["plan"]),
            experts=tuple(
                Network.from_params(mixture[local], f"expert {index}") if local in mixture else None
                for local, index in self.local_to_global.items()
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
            if hashlib.sha256(data).hexdigest().startswith(path.stem.rpartition("-")[2]):
                with contextlib.suppress(DataError):
                    return decode(data, str(path))
        return None


class _Numbers(TypedDict, total=False):
    seconds: float | None
    steps_an_application: float | None


class _Done(TypedDict):
    acted_frames: dict[int, Steps]
    frames: Steps
    success: float | None
    numbers: _Numbers  # and any other


@dataclass(frozen=True)
class Outcome:
    """What a finished training left."""

    experts: dict[int, Arrays]  # by global index
    acted_frames: dict[int, int]  # by global index
    frames: int
    success: float | None
    numbers: dict[str, Any]


def finish_training(
    run_folder: Path | str,
    experts: Mapping[int, Mapping[str, NDArray]],
    acted_frames: Mapping[int, int],
    *,
    attempt: int | None = None,
    frames: int | None = None,
    success: float | None = None,
    numbers: Mapping[str, Any] | None = None,
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

    Raises:
        DataError: a result that nothing could be done with; it is not written.
    """
    run = Run.open(run_folder)
    to_global = run.local_to_global
    _check_result(run, experts, acted_frames)
    frames = steps_used(sum(acted_frames.values()) if frames is None else frames, "frames")
    data = encode(join_mixture(experts))
    write_bytes(run.policies / "result.safetensors", data)
    return write_done(
        run.folder,
        attempt,
        {
            "sha256": hashlib.sha256(data).hexdigest(),
            "acted_frames": {to_global[local]: int(count) for local, count in acted_frames.items()},
            "frames": frames,
            "success": success,
            "numbers": dict(numbers or {}),
        },
    )


def _check_result(
    run: Run, experts: Mapping[int, Mapping[str, NDArray]], acted_frames: Mapping[int, int]
) -> None:
    """Refuse what would become the head of an expert, or count, and be of no use to anybody."""
    known = run.local_to_global
    if unknown := [local for local in [*experts, *acted_frames] if local not in known]:
        raise DataError(f"{run.folder}: its experts are numbered {sorted(known)} here, got {unknown[0]!r}")
    if run.expert not in {known[local] for local in experts}:
        own = next(local for local, index in known.items() if index == run.expert)
        raise DataError(
            f"{run.folder}: the result has no parameters of the expert that was trained, local {own}"
        )
    for local, params in experts.items():
        Network.from_params(params, f"{run.folder}: expert {local}")
    for local, count in acted_frames.items():
        steps_used(count, f"{run.folder}: acted_frames of expert {local}")


def read_outcome(run_folder: Path | str, attempt: int | None = None) -> Outcome:
    """The result of a finished training; a `DataError` if it is not done, broken, or of another launch."""
    run = Run.open(run_folder)
    result = run.policies / "result.safetensors"
    told, data = read_result(result, run.folder, attempt)
    with reading(run.folder / DONE, "is no mark of a training"):
        done = msgspec.convert(told, _Done, strict=False, str_keys=True)
    to_global = run.local_to_global
    mixture = split_mixture(decode(data, str(result))[0])
    _check_result(run, mixture, {})
    return Outcome(
        {to_global[local]: params for local, params in mixture.items()},
        done["acted_frames"],
        done["frames"],
        done["success"],
        told["numbers"],
    )
