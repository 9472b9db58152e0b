"""Merge a finished training: decide the head of each expert it changed, and commit all of it at once."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError, did_you_mean
from shoal.core.seeding import stream
from shoal.skills.jobs.process import DONE
from shoal.skills.jobs.store import NewVersion, Store, VersionRow
from shoal.skills.learning.corrections import correct_spec
from shoal.skills.learning.network import Network, decode, encode
from shoal.skills.learning.plan import Step, dependencies, plan_for
from shoal.skills.learning.spec import Features, Skill, check_skill, parse_skill
from shoal.skills.learning.training import Outcome, Run, read_outcome, training_plan
from shoal.skills.learning.views import export_views, skill_folder
from shoal.skills.learning.worlds import Course, batch_lanes, fresh_worlds, make_world, walk, world_features

logger = logging.getLogger(__name__)
SCORE_EPISODES = 256
MOST_CONTEXTS = 3
Rule = Literal["most-frames", "evaluate"]
RULES: tuple[str, ...] = get_args(Rule)


class Tally(NamedTuple):
    """Evaluation episodes and how many of them succeeded."""

    wins: int
    episodes: int


class Scores(NamedTuple):
    """What the head of an expert, and what a training made of it, scored."""

    version: int  # the head's
    head: Tally
    run: Tally


def process_completed_training(
    run_folder: Path | str,
    skill_name: str,
    global_expert_idx: int,
    base_dir: Path | str,
    total_timesteps: int | None = None,
    *,
    merge: str = "most-frames",
    attempt: int | None = None,
    store: Store | None = None,
    analyse: bool = False,
    keep_run: bool = False,
) -> dict[str, Any]:
    """Merge a finished training into the experts, commit, show it as files, remove the run folder.

    Safe to repeat, and safe in several processes at once: each result counts once, and heads are read, decided and
    written in one transaction.

    Args:
        run_folder: the finished training.
        skill_name: its skill.
        global_expert_idx: that skill's expert.
        base_dir: the folder of the whole run.
        total_timesteps: credits every loaded expert with this many env steps instead of those it acted in.
        merge: "most-frames" (more env steps wins) or "evaluate" (the better success rate); the head keeps ties.
        attempt: the launch that is waited for; by default the latest of this skill.
        store: an open store of `base_dir`, if there is one.
        analyse: correct requirements, consumption and gain by what happened in the evaluation episodes.
        keep_run: leave the run folder in place; else its logs and metrics move to the skill's folder.

    Returns:
        `{"skill_name", "expert_updates": {index: {"action": "updated"|"kept", "frames"}},
        "new_expert": {"global_idx", "frames"}}`.

    Raises:
        DataError: the training is not finished, or its result is broken.
        ConfigError: the folder is that of another skill or expert.
    """
    if merge not in RULES:
        raise ValueError(f"no merge rule named {merge!r}.{did_you_mean(merge, RULES)}")
    base_dir, run_folder = Path(base_dir), Path(run_folder)
    with (
        contextlib.nullcontext(store) if store else contextlib.closing(Store(base_dir, create=True)) as opened
    ):
        try:
            run, outcome = Run.open(run_folder), read_outcome(run_folder, attempt)
            mark = hashlib.sha256((run_folder / DONE).read_bytes()).hexdigest()
        except (DataError, OSError):
            past = opened.attempts(skill_name)
            if run_folder.exists() or not past or past[-1].outcome != "merged":
                raise
            result = None  # another process was faster, and has put it away
        else:
            if (run.spec["skill"], run.expert) != (skill_name, global_expert_idx):
                raise ConfigError(
                    f"{run.folder} is the training of {run.spec['skill']!r} as expert {run.expert}, not of "
                    f"{skill_name!r} as expert {global_expert_idx}"
                )
            if total_timesteps is not None:
                outcome.acted_frames.update(dict.fromkeys(outcome.experts, total_timesteps))
            result = _merge(opened, run, outcome, attempt, merge, analyse, mark)
        export_views(opened)
        if not keep_run:
            put_away(run_folder, base_dir / skill_folder(opened.skill(skill_name)))
    if result is None:
        return {"skill_name": skill_name, "expert_updates": {}, "new_expert": {}, "already_merged": True}
    own = result.pop(global_expert_idx)
    return {
        "skill_name": skill_name,
        "expert_updates": result,
        "new_expert": {"global_idx": global_expert_idx, "frames": own["frames"]},
    }


def put_away(folder: Path, kept: Path) -> None:
    """Move the logs and metrics of a merged training to the folder of its skill, and remove its own; safe to repeat."""
    going = folder.with_name(f".{folder.name}")
    shutil.rmtree(going, ignore_errors=True)  # of one that was killed here
    with contextlib.suppress(FileNotFoundError):  # another may do the same
        os.replace(folder, going)  # at once, so that it is whole or gone
    kept.mkdir(parents=True, exist_ok=True)
    for path in [*going.glob("training-*.log"), *going.glob("metrics.jsonl")]:
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, kept / path.name)
    shutil.rmtree(going, ignore_errors=True)


def _merge(
    store: Store, run: Run, outcome: Outcome, attempt: int | None, rule: str, analyse: bool, mark: str
) -> dict[int, dict[str, Any]] | None:
    """What was done with each expert; None if this very result was committed before.

    Candidates are scored before the transaction that decides, and once more if a head moved meanwhile.
    """
    changed = {
        index: params
        for index, params in outcome.experts.items()
        if outcome.acted_frames.get(index) or str(index) not in run.spec["loaded"] or index == run.expert
    }  # the others were only used, so there is nothing new to keep
    scores: dict[int, Scores] = {}  # by expert
    while True:
        with store.transaction():
            if store.merged(mark) or (attempt is not None and store.attempt(attempt).outcome == "merged"):
                return None
            _register(store, run)
            heads = {index: store.head(index) for index in changed}
            unscored = {
                index: head
                for index, head in heads.items()
                if rule == "evaluate"
                and head is not None
                and not (index in scores and scores[index].version == head.id)
            }
            if not unscored:
                versions = [
                    _version(store, run, outcome, index, rule, head, scores.get(index))
                    for index, head in heads.items()
                ]
                _commit(store, run, outcome, _launch_of(store, run, attempt), versions, analyse, mark)
                break
        for index, head in unscored.items():
            score = make_score(store, run, index)
            present = decode(store.get_blob(head.sha256), f"expert {index}")[0]
            scores[index] = Scores(head.id, score(present), score(changed[index]))
    told: dict[int, dict[str, Any]] = {}
    for version in versions:
        kept = None if version.accepted else heads[version.expert]
        told[version.expert] = {
            "action": "kept" if kept else "updated",
            "frames": kept.frames if kept else version.frames,
        }
    return told


def _register(store: Store, run: Run) -> None:
    """Add the skill of a folder that was prepared by hand, with the expert it was prepared for."""
    name, expert = run.spec["skill"], run.expert
    owner = {row.expert: row.name for row in store.skills()}.get(expert)
    if owner not in (None, name):
        raise ConfigError(f"expert {expert} belongs to {owner!r} in {store.root}, not to {name!r}")
    if name not in {row.name for row in store.skills()}:
        skill = parse_skill(run.spec["skills"][name])
        store.add_skill(skill, [], int(run.spec["config"]["total_timesteps"]))
    if owner is None:
        store.update_skill(name, expert=expert)
    if store.setting("world") is None:
        store.set_setting("world", run.spec["world"])


def _launch_of(store: Store, run: Run, attempt: int | None) -> int:
    """The launch to commit; a folder finished by hand gets one."""
    if attempt is not None:
        return attempt
    running = store.attempts(run.spec["skill"], running=True)
    return running[-1].id if running else store.begin_attempt(run.spec["skill"], run.folder)


def _version(
    store: Store,
    run: Run,
    outcome: Outcome,
    index: int,
    rule: str,
    head: VersionRow | None,
    scores: Scores | None,
) -> NewVersion:
    """What the training made of an expert, kept whether it becomes the head or not."""
    base, acted = run.spec["loaded"].get(str(index)), outcome.acted_frames.get(index, 0)
    frames = (base["frames"] if base else 0) + acted
    if scores is not None:
        better = scores.run.wins > scores.head.wins
    else:
        better = head is None or frames > head.frames
    note = {"skill": run.spec["skill"], "expert": index, "world": run.spec["world"], "kind": "run"}
    blob = store.put_blob(encode(outcome.experts[index], note))
    wins, episodes = scores.run if scores is not None else (None, None)
    return NewVersion(
        index, blob, base["version"] if base else None, frames, acted, "run", better, rule, wins, episodes
    )


def _commit(
    store: Store,
    run: Run,
    outcome: Outcome,
    attempt: int,
    versions: Sequence[NewVersion],
    analyse: bool,
    mark: str,
) -> None:
    result = {**outcome.numbers, "success": outcome.success, "frames": outcome.frames}
    store.commit_training(
        attempt, versions, result=result, frames=outcome.frames, peak_memory=outcome.numbers.get("peak_memory"),
        spec=_corrected(store, run, outcome) if analyse else None, mark=mark,
    )  # fmt: skip
    if analyse:
        _wait_for_all_that_is_planned(store, world_features(run.spec["world"]))


def make_score(store: Store, run: Run, index: int) -> Callable[[Mapping[str, NDArray]], Tally]:
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
