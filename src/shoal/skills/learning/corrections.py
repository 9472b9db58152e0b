"""Correct a skill's spec by what its evaluation episodes show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shoal.skills.learning.network import Bools, Floats
from shoal.skills.learning.spec import Features, Skill

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
