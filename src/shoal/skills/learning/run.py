"""One training from its folder to its merge: what it is given, its checkpoints, its result, and what becomes of it.

`training_runs/skill_<expert>_<Name>/<expert>.json` says what to train, as data; `<expert>_policies/` holds the
mixture it starts from, `remap.json`, checkpoints and the result. `DONE.json` is written last, by one rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError, did_you_mean, reading
from shoal.core.files import fsync_folder, read_json, write_bytes, write_json
from shoal.core.run_folder import RunFolder
from shoal.core.seeding import stream
from shoal.skills.jobs.run import leave, run_as_process
from shoal.skills.jobs.store import (
    DONE,
    AttemptRow,
    ExhaustedError,
    NewVersion,
    clear_marks,
    mark_of,
    merge_once,
    read_done,
    read_result,
    slug,
    steps_used,
    write_done,
)
from shoal.skills.learning.spec import (
    Features,
    Skill,
    SkillRow,
    Step,
    Store,
    VersionRow,
    check_skill,
    dependencies,
    new_version,
    parse_skill,
    plan_for,
)
from shoal.skills.learning.trainer import (
    Arrays,
    Network,
    Task,
    Trainer,
    TrainingConfig,
    arrays_of,
    average,
    build_remapping,
    decode,
    encode,
    join_mixture,
    split_mixture,
)
from shoal.skills.learning.worlds import (
    Bank,
    Bools,
    Course,
    Floats,
    batch_lanes,
    fresh_worlds,
    make_world,
    walk,
    world_features,
)

KEEP_CHECKPOINTS = 2
Steps = Annotated[int, msgspec.Meta(ge=0)]
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
    named = data.get("name", name)
    if named != name:
        raise ConfigError(f"skill {name!r}: its data names it {named!r}")
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
        skill_data: its spec, or the reference's `{"skill_with_consumption": …}`.
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
    skill = skill_from_data(skill_name, skill_data, features)
    known = {spec.name: spec for spec in skills or ()} | {skill.name: skill}
    plan = [Step(skill_name, skill.practice)]
    if skills is not None:
        plan = training_plan(skill_name, list(known.values()), features)
    needed = [name for name in dict.fromkeys(step.skill for step in plan) if name != skill_name]
    to_local, to_global = build_remapping(
        [*dependency_skill_names, *needed], global_expert_idx, completed_skills
    )
    with contextlib.nullcontext(store) if store else contextlib.closing(Store(base_dir)) as opened:
        mixture, loaded = _load_mixture(
            opened, to_global, global_expert_idx, completed_skills, initialize_expert_fn
        )
    experts = {name: int(completed_skills[name]["expert_idx"]) for name in needed}
    experts[skill_name] = global_expert_idx
    remap = {
        "global_to_local": to_local,
        "local_to_global": to_global,
        "initial_frame_counts": {index: loaded.get(index, {}).get("frames", 0) for index in to_local},
        "skill_name": skill_name,
        "global_expert_idx": global_expert_idx,
        "dependencies": needed,
        "skill_with_consumption": amounts(skill),
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
    return _written_training(run_folder_of(base_dir, global_expert_idx, skill_name), mixture, remap, spec)


def _written_training(
    folder: Path,
    mixture: Mapping[int, Mapping[str, NDArray]],
    remap: Mapping[str, Any],
    spec: Mapping[str, Any],
) -> tuple[Path, Path, Path]:
    module, policies = folder / f"{spec['expert']}.json", folder / f"{spec['expert']}_policies"
    policies.mkdir(parents=True, exist_ok=True)
    fsync_folder(folder)
    data = encode(join_mixture(mixture))
    if not _lies_there(module, policies, data, spec):  # checkpoints and results are of another training
        clear_marks(folder)
        Run(folder, spec).clear_checkpoints()
    write_bytes(policies / "mixture.safetensors", data)
    write_json(policies / "remap.json", remap)
    write_json(module, spec)  # comes last, since a folder without it is none
    return folder, module, policies


def _lies_there(module: Path, policies: Path, mixture: bytes, spec: Mapping[str, Any]) -> bool:
    """Whether this very training was laid out before, but for its budget."""
    try:
        before, same = read_json(module), (policies / "mixture.safetensors").read_bytes() == mixture
        plain = json.loads(json.dumps(spec))
        plain["config"]["total_timesteps"] = before["config"]["total_timesteps"]
        return same and before == plain
    except (OSError, DataError, TypeError, KeyError):
        return False


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
            match = _CHECKPOINT.fullmatch(path.name)
            if match and hashlib.sha256(data).hexdigest().startswith(match[2]):
                with contextlib.suppress(DataError):
                    return decode(data, str(path))
        return None

    def clear_checkpoints(self) -> None:
        """Forget checkpoints, so that the next training starts from the mixture."""
        for path in self.checkpoints():
            path.unlink(missing_ok=True)


class _Numbers(TypedDict, total=False):
    seconds: float | None
    peak_memory: int | None
    steps_an_application: float | None


class _Done(TypedDict):
    attempt: int | None
    acted_frames: dict[int, Steps]
    frames: Steps
    success: float | None
    numbers: _Numbers  # and any other


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

    Raises:
        DataError: a result that nothing could be done with; it is not written.
    """
    run = Run.open(run_folder)
    to_global = run.local_to_global
    _check_result(run, experts, acted_frames)
    frames = steps_used(sum(acted_frames.values()) if frames is None else frames, "frames")
    arrays = join_mixture(experts)
    arrays |= {f"expert_{len(to_global)}/episodes/{key}": array for key, array in (episodes or {}).items()}
    data = encode(arrays)
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
    extra = mixture.pop(len(to_global), {})
    _check_result(run, mixture, {})
    return Outcome(
        done["attempt"],
        {to_global[local]: params for local, params in mixture.items()},
        done["acted_frames"],
        done["frames"],
        done["success"],
        told["numbers"],
        arrays_of("episodes", extra),
    )


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
        run.folder, {local: net.params() for local, net in enumerate(result.experts)},
        dict(enumerate(result.acted_frames)), attempt=attempt, frames=result.frames, success=result.success,
        numbers=numbers, episodes=result.episodes,
    )  # fmt: skip
    metrics.event(
        "trained", skill=run.spec["skill"], attempt=attempt, frames=result.frames, success=result.success
    )
    return numbers


def _prepare(run: Run, trainer: Trainer) -> None:
    """Make the start states, or read those that an earlier launch made."""
    path = run.policies / "bank.safetensors"
    spec = {**run.spec, "config": {**run.spec["config"], "total_timesteps": None}}  # it may be raised later
    mark = hashlib.sha256(
        (run.policies / "mixture.safetensors").read_bytes() + json.dumps(spec, sort_keys=True).encode()
    ).hexdigest()
    with contextlib.suppress(FileNotFoundError, DataError):  # one that is damaged is made again
        arrays, note = decode(path.read_bytes(), str(path))
        sums = {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in sorted(arrays.items())}
        if note.get("mark") == mark and note.get("sha256") == sums:
            trainer.bank, trainer.test_bank = (Bank(arrays_of(n, arrays)) for n in ("practice", "evaluation"))
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


# After a training: decide for each expert which version is its head, and commit all of it at once

logger = logging.getLogger(__name__)
SCORE_EPISODES = 256
MOST_CONTEXTS = 3


def process_completed_training(
    run_folder: Path | str,
    skill_name: str,
    global_expert_idx: int,
    base_dir: Path | str,
    total_timesteps: int | None = None,
    use_file_lock: bool = True,
    *,
    merge: str = "most-frames",
    attempt: int | None = None,
    store: Store | None = None,
    analyse: bool = False,
    keep_run: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Merge a finished training into the experts, commit, show it as files, remove the run folder.

    Safe to repeat: a training that was committed before is not counted again. Merges of several processes may
    run at once: the commit compares the heads it was decided against, and decides again if one moved.

    Args:
        run_folder: the finished training.
        skill_name: its skill.
        global_expert_idx: that skill's expert.
        base_dir: the folder of the whole run.
        total_timesteps: credits every loaded expert with this many env steps instead of those it acted in.
        use_file_lock: accepted for older callers; nothing is locked.
        merge: "most-frames", "average", "evaluate" or "auto".
        attempt: the launch that is waited for; by default the latest of this skill.
        store: an open store of `base_dir`, if there is one.
        analyse: correct requirements, consumption and gain by what happened in the evaluation episodes.
        keep_run: leave the run folder in place.
        show: bring the folders for people up to date.

    Returns:
        `{"skill_name", "expert_updates": {index: {"action": "updated"|"kept", "frames"}},
        "new_expert": {"global_idx", "frames"}}`.
    """
    base_dir, run_folder = Path(base_dir), Path(run_folder)
    opened = store or Store(base_dir)
    try:
        try:
            committed = _committed(opened, run_folder, skill_name, attempt)
            if committed is None:
                run, outcome = Run.open(run_folder), read_outcome(run_folder, attempt)
                mark = mark_of(run_folder)
        except (DataError, OSError):  # another may have committed and removed it meanwhile
            committed = _committed(opened, run_folder, skill_name, attempt)
            if committed is None:
                raise
        if committed is None:
            if total_timesteps is not None:
                outcome.acted_frames.update(dict.fromkeys(outcome.experts, total_timesteps))
            with opened.transaction():  # so that there is no other launch than the one that is committed
                committed = opened.merged(mark)
                if committed is None:
                    _register(opened, run, skill_name, global_expert_idx)
                    number = _attempt(opened, run_folder, skill_name, attempt)
        if committed is None:
            result = _merge_and_commit(opened, run, outcome, number, merge, analyse, mark)
        if show:
            export_views(opened)
        if not keep_run:
            going = run_folder.with_name(f".{run_folder.name}")
            shutil.rmtree(going, ignore_errors=True)  # of one that was killed here
            with contextlib.suppress(OSError):  # others may do the same
                os.replace(run_folder, going)  # at once, since who repeats this must find it whole or gone
            shutil.rmtree(going, ignore_errors=True)
    finally:
        if store is None:
            opened.close()
    if committed is not None:
        return {"skill_name": skill_name, "expert_updates": {}, "new_expert": {}, "already_merged": True}
    updates = {index: update for index, update in result.items() if index != global_expert_idx}
    own = result[global_expert_idx]
    return {
        "skill_name": skill_name,
        "expert_updates": updates,
        "new_expert": {"global_idx": global_expert_idx, "frames": own["frames"]},
    }


def _committed(store: Store, run_folder: Path, skill_name: str, attempt: int | None) -> AttemptRow | None:
    """The launch as which this very result was committed before, by whomever."""
    if attempt is not None and store.attempt(attempt).outcome == "merged":
        return store.attempt(attempt)
    if (run_folder / DONE).exists():
        own = read_done(run_folder).get("attempt")
        known = [row for row in store.attempts(skill_name) if row.id == own and row.outcome == "merged"]
        return known[0] if known else store.merged(mark_of(run_folder))
    past = [row for row in store.attempts(skill_name) if row.outcome != "lost"]
    gone = not run_folder.exists() and past and past[-1].outcome == "merged"
    return past[-1] if gone else None


def _register(store: Store, run: Run, skill_name: str, expert: int) -> None:
    """Add the skill of a folder that was prepared by hand, with the expert it was prepared for."""
    if (run.spec["skill"], run.expert) != (skill_name, expert):
        raise ConfigError(
            f"{run.folder} is the training of {run.spec['skill']!r} as expert {run.expert}, not of {skill_name!r} as "
            f"expert {expert}"
        )
    with store.transaction():
        owner = {row.expert: row.name for row in store.skills()}.get(expert)
        if owner not in (None, skill_name):
            raise ConfigError(f"expert {expert} belongs to {owner!r} in {store.root}, not to {skill_name!r}")
        if skill_name not in {row.name for row in store.skills()}:
            skill = parse_skill(run.spec["skills"][skill_name])
            store.add_skill(skill, [], int(run.spec["config"]["total_timesteps"]))
        if owner is None:
            store.update_skill(skill_name, expert=expert)
        if store.setting("world") is None:
            store.set_setting("world", run.spec["world"])


def _attempt(store: Store, run_folder: Path, skill_name: str, attempt: int | None) -> int:
    """The launch to commit; a folder finished by hand gets one."""
    if attempt is not None:
        return attempt
    past = store.attempts(skill_name)
    if past and past[-1].state == "running":
        return past[-1].id
    return store.begin_attempt(skill_name, run_folder)


def _merge_and_commit(
    store: Store, run: Run, outcome: Outcome, attempt: int, rule: str, analyse: bool, mark: str
) -> dict[int, dict[str, Any]]:
    def commit() -> dict[int, dict[str, Any]]:
        versions: list[NewVersion] = []
        expected: dict[int, int | None] = {}
        actions: dict[int, dict[str, Any]] = {}
        for index, params in outcome.experts.items():
            acted = outcome.acted_frames.get(index, 0)
            base = run.spec["loaded"].get(str(index))
            if not acted and base is not None and index != run.expert:
                continue  # it was only used, so there is nothing new to keep
            head = store.head(index)
            expected[index] = head.id if head else None
            decision = _decide(store, run, index, params, acted, rule)
            versions += _versions(store, run, index, acted, decision, rule)
            kept = decision.chosen.kind == "head"
            actions[index] = {"action": "kept" if kept else "updated", "frames": decision.chosen.frames}
        result = {**outcome.numbers, "success": outcome.success, "frames": outcome.frames}
        with store.transaction():
            spec = _corrected(store, run, outcome) if analyse else None
            store.commit_training(
                attempt, versions, expected, result=result, frames=outcome.frames,
                peak_memory=outcome.numbers.get("peak_memory"), spec=spec, mark=mark,
            )  # fmt: skip
            if analyse:
                _wait_for_all_that_is_planned(store, world_features(run.spec["world"]))
        return actions

    return merge_once(commit)


def _decide(
    store: Store, run: Run, index: int, params: Mapping[str, NDArray], acted: int, rule: str
) -> Decision:
    base = run.spec["loaded"].get(str(index))
    made = Candidate("run", params, (base["frames"] if base else 0) + acted)
    head = store.head(index)
    if head is None:
        return decide(rule, None, made, share_base=False)
    present = Candidate("head", decode(store.get_blob(head.sha256), f"expert {index}")[0], head.frames)
    share = base is not None and base["version"] in store.ancestors(head.id)
    score = make_score(store, run, index) if rule in ("auto", "evaluate") else None
    return decide(rule, present, made, share_base=share, score=score)


def _versions(
    store: Store, run: Run, index: int, acted: int, decision: Decision, rule: str
) -> list[NewVersion]:
    """Versions for all candidates that are new; the accepted one comes last, so that it is the newest."""
    base = run.spec["loaded"].get(str(index))
    made = []
    for number, (candidate, tally) in enumerate(zip(decision.candidates, decision.tallies, strict=True)):
        if candidate.kind == "head":
            continue
        if candidate.kind == "average" and number != decision.winner:
            continue  # it can be made again from the versions that are kept
        note = {
            "skill": run.spec["skill"],
            "expert": index,
            "world": run.spec["world"],
            "kind": candidate.kind,
        }
        won, played = (tally.wins, tally.episodes) if tally else (None, None)
        sha256 = store.put_blob(encode(candidate.params, note))
        version = new_version(
            index, sha256, base["version"] if base else None, candidate.frames, acted, candidate.kind,
            number == decision.winner, rule, won, played,
        )  # fmt: skip
        made.append(version)
    return sorted(made, key=lambda version: version.accepted)


def make_score(store: Store, run: Run, index: int) -> Score:
    """Evaluate an expert where it is used: in its own skill, in this run's, and in other completed ones.

    Every candidate plays the same seeded worlds with the same other experts.
    """
    world_name = run.spec["world"]
    features = world_features(world_name)
    rows = [row for row in store.skills() if row.expert is not None]
    skills: list[Skill] = [row.spec for row in store.skills()]
    expert_of = {row.name: int(row.expert or 0) for row in rows}
    owner = next(row.name for row in rows if row.expert == index)
    heads: dict[int, Network] = {}
    for row in rows:
        head = store.head(expert_of[row.name])
        if head is not None:
            params = decode(store.get_blob(head.sha256), row.name)[0]
            heads[expert_of[row.name]] = Network.from_params(params)
    contexts: list[list[Step]] = []
    names = [owner, run.spec["skill"], *(row.name for row in rows if row.status == "completed")]
    for name in dict.fromkeys(names):
        try:
            plan = training_plan(name, skills, features)
        except ConfigError:
            continue  # a spec that was changed since; what cannot be planned cannot be played
        used = [at for at, step in enumerate(plan) if step.skill == owner]
        if used and all(expert_of.get(step.skill) in heads for step in plan[: used[-1] + 1]):
            contexts.append(plan[: used[-1] + 1])
    contexts = contexts[:MOST_CONTEXTS]
    world = make_world(world_name, batch_lanes(world_name, SCORE_EPISODES))
    starts = fresh_worlds(world, SCORE_EPISODES, int(run.spec["seed"]), "merge", index)
    fixed = None if world.fresh_is_cheap else world

    def score(params: Mapping[str, NDArray]) -> Tally:
        nets = heads | {index: Network.from_params(params)}
        wins = 0
        for number, plan in enumerate(contexts):
            order = list(nets)
            course = Course(
                plan, {skill.name: skill for skill in skills}, features,
                [order.index(expert_of[step.skill]) for step in plan],
            )  # fmt: skip
            rng = stream(int(run.spec["seed"]), "merge", index, number)
            wins += int(walk(world_name, starts, course, [nets[i] for i in order], rng, fixed).finished.sum())
        return Tally(wins, SCORE_EPISODES * len(contexts))

    return score


def _corrected(store: Store, run: Run, outcome: Outcome) -> Skill | None:
    """The spec as the evaluation episodes say it is, if they say something else."""
    if not outcome.episodes:
        return None
    skill = store.skill(run.spec["skill"]).spec
    count = int(run.spec["plan"][-1]["count"])
    features = world_features(run.spec["world"])
    corrected, findings = correct_spec(
        skill, features, outcome.episodes["start"], outcome.episodes["before"],
        outcome.episodes["end"], outcome.episodes["success"] > 0, count,
    )  # fmt: skip
    if corrected == skill:
        return None
    try:
        check_skill(corrected, features)
    except ConfigError as error:
        logger.warning("the correction of %r is not made: %s (%s)", skill.name, error, findings)
        return None
    others = [row.spec for row in store.skills() if row.name != skill.name]
    if _lost_ways([*others, skill], [*others, corrected], features):
        logger.warning("the correction of %r would leave skills out of reach: %s", skill.name, findings)
        return None
    store.event("corrected", skill.name, findings=findings)
    return corrected


def _wait_for_all_that_is_planned(store: Store, features: Features) -> None:
    """Have skills that have not begun wait for what their plans, which a corrected spec may change, use now."""
    rows = store.skills()
    for row in rows:
        if row.status in ("waiting", "blocked"):
            with contextlib.suppress(ConfigError):
                needed = dependencies(row.spec, [other.spec for other in rows], features)
                if not set(needed) <= set(row.dependencies):
                    both = list(dict.fromkeys([*row.dependencies, *needed]))
                    store.update_skill(row.name, dependencies=both)


def _lost_ways(before: Sequence[Skill], after: Sequence[Skill], features: Features) -> bool:
    """Whether some skill that had a plan would have none after a correction."""

    def reachable(skills: Sequence[Skill]) -> set[str]:
        found = set()
        for skill in skills:
            with contextlib.suppress(ConfigError):
                plan_for(skill.name, skills, features)
                found.add(skill.name)
        return found

    return not reachable(before) <= reachable(after)


Rule = Literal["auto", "most-frames", "average", "evaluate"]
RULES: tuple[str, ...] = get_args(Rule)
MARGIN = 0.02  # evaluations closer than this are a tie

Score = Callable[[Mapping[str, NDArray]], "Tally"]


@dataclass(frozen=True, slots=True)
class Tally:
    """Evaluation episodes and how many of them succeeded."""

    wins: int
    episodes: int

    @property
    def lower_bound(self) -> float:
        """The lower end of the 95 % Wilson interval of the success rate."""
        if not self.episodes:
            return 0.0
        z, n, rate = 1.96, self.episodes, self.wins / self.episodes
        centre = rate + z * z / (2 * n)
        spread = z * (rate * (1 - rate) / n + z * z / (4 * n * n)) ** 0.5
        return max(0.0, float((centre - spread) / (1 + z * z / n)))


@dataclass(frozen=True)
class Candidate:
    """One possible head of an expert."""

    kind: Literal["head", "run", "average"]
    params: Mapping[str, NDArray]
    frames: int  # env steps this expert acted in while learning, over its whole line


@dataclass(frozen=True)
class Decision:
    """The winner, all candidates, and what they scored (None: the rule did not ask)."""

    winner: int
    candidates: list[Candidate]
    tallies: list[Tally | None]

    @property
    def chosen(self) -> Candidate:
        """The winning candidate."""
        return self.candidates[self.winner]


def decide(
    rule: str, head: Candidate | None, run: Candidate, *, share_base: bool, score: Score | None = None
) -> Decision:
    """Apply `rule`.

    Args:
        rule: "most-frames" (more frames wins, the head keeps ties), "average" (the mean of both),
            "evaluate" (best success rate), or "auto": of the candidates whose lower confidence bound is not
            clearly below the head's, the best; among ties the one with more frames of its own.
        head: the present head, None for an expert without one.
        run: what the training made.
        share_base: whether both descend from one version, so that averaging them means something.
        score: evaluates parameters; needed by "auto" and "evaluate" when there is a head.
    """
    if rule not in RULES:
        raise ValueError(f"no merge rule named {rule!r}.{did_you_mean(rule, RULES)}")
    if head is None:
        return Decision(0, [run], [None])
    if rule == "most-frames":
        return Decision(int(run.frames > head.frames), [head, run], [None, None])
    candidates = [head, run]
    if share_base and {k: a.shape for k, a in head.params.items()} == {
        k: a.shape for k, a in run.params.items()
    }:
        candidates.append(
            Candidate("average", average(head.params, run.params), max(head.frames, run.frames))
        )
    if rule == "average":
        return Decision(len(candidates) - 1, candidates, [None] * len(candidates))
    if score is None:
        raise ValueError(f"the merge rule {rule!r} needs a score")
    tallies = [score(candidate.params) for candidate in candidates]
    if rule == "evaluate":
        rates = [tally.wins / max(tally.episodes, 1) for tally in tallies]
        return Decision(rates.index(max(rates)), candidates, list(tallies))
    bounds = [tally.lower_bound for tally in tallies]
    top = max(bounds)
    tied = [i for i, bound in enumerate(bounds) if bound >= top - MARGIN]  # none is clearly below the head
    winner = max(tied, key=lambda i: (candidates[i].frames, bounds[i], -i))
    return Decision(winner, candidates, list(tallies))


AGREE = 0.9  # share of successful episodes that must show a change
ENOUGH = 20  # episodes below which nothing is concluded


def correct_spec(
    skill: Skill,
    features: Features,
    start: Floats,
    before: Floats,
    end: Floats,
    success: Bools,
    count: int = 1,
) -> tuple[Skill, list[str]]:
    """The spec that the episodes support, and what was changed, in words.

    Args:
        skill: the spec as believed.
        features: of the world.
        start: `[E, F]` feature values when each episode began.
        before: `[E, F]` before the action that ended it, which in a success is the one that got it done.
        end: `[E, F]` when it ended.
        success: `[E]`.
        count: applications of the skill in one episode.
    """
    if int(success.sum()) < ENOUGH:
        return skill, []
    gain, consumption = _changes(skill, features, start[success], before[success], end[success], count)
    requirements = dict(skill.requirements)
    for item in set(skill.consumption) - set(consumption):  # what was thought to be used up is only held
        requirements[item] = max(1, skill.held(item))
    for item, amount in consumption.items():
        held = max(0, skill.held(item)) if item in skill.consumption else 0
        requirements[item] = max(requirements.get(item, 0), amount + held)
    rate = float(success.mean())
    for name in features.names:
        has = start[:, features.index(name)] >= 1
        if has.sum() < ENOUGH or (~has).sum() < ENOUGH:
            if name in requirements and (~has).sum() < ENOUGH:
                continue
            if name not in requirements:
                continue
        without = float(success[~has].mean()) if (~has).any() else 0.0
        if name in requirements and name not in consumption and without >= AGREE * rate:
            del requirements[name]
        elif name not in requirements and has.any() and success[has].mean() >= 0.5 and without <= 0.05:
            requirements[name] = 1
    corrected = replace(skill, requirements=requirements, consumption=consumption, gain=gain)
    return corrected, _words(skill, corrected)


def _changes(
    skill: Skill, features: Features, start: Floats, before: Floats, end: Floats, count: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Gain and consumption per application, in the successful episodes.

    The last action is looked at first: over a whole episode, what was used up may have been found again.
    """
    gain: dict[str, int] = {}
    consumption: dict[str, int] = {}
    for name in features.names:
        column = features.index(name)
        room = start[:, column] + count <= features.holds(name)  # full hands cannot show a gain
        last, whole = (end - before)[:, column], (end - start)[:, column]
        up = _amount(last[room], 1) or _amount(whole[room], count)
        down = _amount(-last, 1) or _amount(-whole, count)
        if up:
            gain[name] = up
        elif down:
            consumption[name] = down
        elif name in skill.gain and room.sum() < ENOUGH:
            gain[name] = skill.gain[name]  # never seen with room for it: nothing learned
    if skill.done.op == ">=" and skill.done.feature in skill.gain:
        gain.setdefault(skill.done.feature, skill.gain[skill.done.feature])
    return gain or dict(skill.gain), consumption


def _amount(changes: Floats, count: int) -> int:
    """The usual increase per application, 0 if there usually is none."""
    if len(changes) < ENOUGH or (changes > 0).mean() < AGREE:
        return 0
    return max(1, round(float(np.median(changes)) / count))


def _words(before: Skill, after: Skill) -> list[str]:
    findings = []
    for where in ("requirements", "consumption", "gain"):
        old, new = getattr(before, where), getattr(after, where)
        for item in sorted(set(old) | set(new)):
            if old.get(item, 0) != new.get(item, 0):
                findings.append(
                    f"{where} of {item!r}: {old.get(item, 0)} was believed, {new.get(item, 0)} is seen"
                )
    return findings


# The store as folders and JSON for people, `jq` and older tools: written from the store, never read back


def skill_folder(row: SkillRow) -> str:
    """Where a skill is shown, relative to the store."""
    return f"skills/{row.expert}_{row.slug}"


def migrate_folder(source: Path | str, target: Path | str) -> list[str]:
    """Refused: experts of the original project are networks of another shape, which nothing here can train on."""
    raise ConfigError(
        f"{source} is not imported: networks of the original project have another shape than experts here, so they "
        f"could be neither evaluated nor trained on; train its skills anew from their specs with --skills FILE"
    )


def with_experts(store: Store) -> dict[str, dict[str, Any]]:
    """Skills whose expert has a version, as the reference describes completed skills."""
    found: dict[str, Any] = {}
    for row in store.skills():
        head = store.head(row.expert) if row.expert is not None else None
        if head is not None:
            found[row.name] = {
                "expert_idx": row.expert,
                "skill_with_consumption": amounts(row.spec),
                "path": skill_folder(row),
                "total_frames": head.frames,
                "metrics": row.result,
            }
    return found


def export_views(store: Store) -> None:
    """Bring the folders and files up to date; what is right already is not touched."""
    completed = with_experts(store)
    for row in map(store.skill, completed):
        if row.expert is not None and (head := store.head(row.expert)):
            _export_skill(store, row, head)
    folder = store.root / "checkpoints"
    folder.mkdir(exist_ok=True)
    _write_if_new(folder / "global_latest.json", {"skills": completed})


def amounts(skill: Skill) -> dict[str, dict[str, int]]:
    """Requirements, consumption and gain under the names of the reference."""
    return {where: dict(getattr(skill, where)) for where in ("requirements", "consumption", "gain")}


def _export_skill(store: Store, row: SkillRow, head: VersionRow) -> None:
    folder = store.root / skill_folder(row)
    policy = folder / f"expert_{row.expert}_policy"
    policy.mkdir(parents=True, exist_ok=True)
    _copy(store.blob_path(head.sha256), policy / "params.safetensors")
    _write_if_new(
        policy / "metadata.json",
        {
            "skill_name": row.name,
            "global_expert_idx": row.expert,
            "total_frames": head.frames,
            "version": head.id,
            "sha256": head.sha256,
            "updated_at": head.created,
        },
    )
    _write_if_new(folder / "metadata.json", {"skill_name": row.name, "spec": row.spec.as_dict()})
    _write_if_new(folder / "metrics.json", row.result)


def _copy(source: Path, target: Path) -> None:
    """Make `target` a copy of `source`: what people do to it must not reach the store."""
    data = source.read_bytes()
    if not target.is_file() or target.samefile(source) or target.read_bytes() != data:
        write_bytes(target, data)


def _write_if_new(path: Path, value: Any) -> None:
    try:
        if json.loads(path.read_bytes()) == json.loads(json.dumps(value)):
            return
    except (OSError, ValueError):
        pass
    write_json(path, value)


if __name__ == "__main__":
    leave(run_as_process("shoal.skills.learning.run", __doc__, run_training))
