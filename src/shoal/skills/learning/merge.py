"""Merge a finished training: decide the head of each expert it changed, and commit all of it at once."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.core.seeding import stream
from shoal.skills.jobs.store import (
    DONE,
    AttemptRow,
    NewVersion,
    mark_of,
    merge_once,
    read_done,
)
from shoal.skills.learning.corrections import correct_spec
from shoal.skills.learning.merge_rules import Candidate, Decision, Score, Tally, decide
from shoal.skills.learning.network import Network, decode, encode
from shoal.skills.learning.plan import Step, dependencies, plan_for
from shoal.skills.learning.spec import Features, Skill, Store, check_skill, new_version, parse_skill
from shoal.skills.learning.training import Outcome, Run, read_outcome, training_plan
from shoal.skills.learning.views import export_views
from shoal.skills.learning.worlds import (
    Course,
    batch_lanes,
    fresh_worlds,
    make_world,
    walk,
    world_features,
)

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
        merge: "most-frames" or "evaluate".
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
        return decide(rule, None, made)
    present = Candidate("head", decode(store.get_blob(head.sha256), f"expert {index}")[0], head.frames)
    return decide(rule, present, made, make_score(store, run, index) if rule == "evaluate" else None)


def _versions(
    store: Store, run: Run, index: int, acted: int, decision: Decision, rule: str
) -> list[NewVersion]:
    """Versions for all candidates that are new; the accepted one comes last, so that it is the newest."""
    base = run.spec["loaded"].get(str(index))
    made = []
    for number, (candidate, tally) in enumerate(zip(decision.candidates, decision.tallies, strict=True)):
        if candidate.kind == "head":
            continue
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
