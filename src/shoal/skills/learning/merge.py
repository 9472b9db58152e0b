"""After a training: decide for each expert which version is its head, and commit all of it at once."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.seeding import stream
from shoal.skills.jobs.store import DONE, AttemptRow, HeadMovedError, NewVersion, mark_of, read_done
from shoal.skills.learning.network import Network, average, decode, encode
from shoal.skills.learning.plan import Course, Step, plan_for, walk
from shoal.skills.learning.run import Outcome, Run, read_outcome, training_plan
from shoal.skills.learning.spec import Features, Skill, check_skill, parse_skill
from shoal.skills.learning.store import Store, new_version
from shoal.skills.learning.views import export_views
from shoal.skills.learning.worlds import Bools, Floats, batch_lanes, fresh_worlds, make_world, world_features

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
        committed = _committed(opened, run_folder, skill_name, attempt)
        if committed is None:
            run, outcome, mark = Run.open(run_folder), read_outcome(run_folder, attempt), mark_of(run_folder)
            if total_timesteps is not None:
                outcome.acted_frames.update(dict.fromkeys(outcome.experts, total_timesteps))
            _register(opened, run, skill_name, global_expert_idx)
            number = _attempt(opened, run_folder, skill_name, attempt)
            result = _merge_and_commit(opened, run, outcome, number, merge, analyse, mark)
        if show:
            export_views(opened)
        if not keep_run:
            shutil.rmtree(run_folder, ignore_errors=True)
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
    past = store.attempts(skill_name)
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
    spec = _corrected(store, run, outcome) if analyse else None
    while True:
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
        result = {"success": outcome.success, "frames": outcome.frames, **outcome.numbers}
        try:
            committed = store.commit_training(
                attempt, versions, expected, result=result, frames=outcome.frames,
                peak_memory=outcome.numbers.get("peak_memory"), spec=spec, mark=mark,
            )  # fmt: skip
            if not committed and store.attempt(attempt).state == "running":  # another process was faster
                with store.transaction():
                    store.end_attempt(attempt, "lost", "the same result was committed by another process")
                    store.update_skill(run.spec["skill"], status="completed")
            return actions
        except HeadMovedError:
            continue


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
        made.append(
            new_version(
                index,
                store.put_blob(encode(candidate.params, note)),
                base["version"] if base else None,
                candidate.frames,
                acted,
                candidate.kind,
                number == decision.winner,
                rule,
                tally.wins if tally else None,
                tally.episodes if tally else None,
            )
        )
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
