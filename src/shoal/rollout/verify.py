"""How exactly one set of trajectories repeats another: the level of the guarantee that held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.core.data import Trajectory
from shoal.rollout.samplers.sampler import Level


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison found."""

    level: Level  # L2: everything equal; L1: all but log-probs; L0: something else differs
    episodes: int
    same_episodes: int  # equal in everything but log-probs
    turns: int
    same_logprobs: int  # turns whose log-probs are bit-equal
    largest_difference: float  # of two log-probs of one token, where the tokens are the same
    first: str | None  # where the first difference that matters is

    def __str__(self) -> str:
        told = (
            f"{self.level}: {self.same_episodes} of {self.episodes} episodes have the same tokens, rewards and "
            f"ends; log-probs are bit-equal in {self.same_logprobs} of {self.turns} turns "
            f"(largest difference {self.largest_difference:.2g})"
        )
        return f"{told}\nfirst difference: {self.first}" if self.first else told


def compare(one: Sequence[Trajectory], other: Sequence[Trajectory]) -> Verdict:
    """The level at which `other` repeats `one`, episode by episode in order."""
    turns = same_logprobs = same_episodes = 0
    largest, first = 0.0, None
    if len(one) != len(other):
        first = f"{len(one)} episodes against {len(other)}"
    for a, b in zip(one, other, strict=False):
        difference = _difference(a, b)
        same_episodes += difference is None
        first = first or difference
        for left, right in zip(a.turns, b.turns, strict=False):
            if left.response_ids != right.response_ids:
                break
            turns += 1
            same_logprobs += left.logprobs == right.logprobs
            pairs = zip(left.logprobs, right.logprobs, strict=True)
            largest = max([largest, *(abs(x - y) for x, y in pairs)])
    exact = first is None
    level: Level = "L2" if exact and same_logprobs == turns else "L1" if exact else "L0"
    n_turns = max(turns, sum(len(t.turns) for t in one))
    return Verdict(level, max(len(one), len(other)), same_episodes, n_turns, same_logprobs, largest, first)


def _difference(a: Trajectory, b: Trajectory) -> str | None:
    """Where two records of an episode first differ, log-probs aside."""
    where = f"group {a.group}, member {a.member}"
    for number, (left, right) in enumerate(zip(a.turns, b.turns, strict=False)):
        if replace(left, logprobs=()) != replace(right, logprobs=()):
            names = [n for n in ("prompt_ids", "response_ids", "observation", "reward") if
                     getattr(left, n) != getattr(right, n)]  # fmt: skip
            return f"{where}, turn {number + 1}: {', '.join(names) or 'its record'} differ"
    if replace(a, turns=()) != replace(b, turns=()) or len(a.turns) != len(b.turns):
        return f"{where}: {len(a.turns)} turns, {a.status} against {len(b.turns)} turns, {b.status}"
    return None
