"""Which parameters become the head of an expert that a training changed: one pure function of the candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from numpy.typing import NDArray

from shoal.core.errors import did_you_mean
from shoal.skills.learning.trainer import average

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
