"""Which parameters become the head of an expert that a training changed: one pure function of the candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from numpy.typing import NDArray

from shoal.core.errors import did_you_mean

Rule = Literal["most-frames", "evaluate"]
RULES: tuple[str, ...] = get_args(Rule)
Score = Callable[[Mapping[str, NDArray]], "Tally"]


@dataclass(frozen=True, slots=True)
class Tally:
    """Evaluation episodes and how many of them succeeded."""

    wins: int
    episodes: int


@dataclass(frozen=True)
class Candidate:
    """One possible head of an expert."""

    kind: Literal["head", "run"]
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


def decide(rule: str, head: Candidate | None, run: Candidate, score: Score | None = None) -> Decision:
    """Apply `rule`.

    Args:
        rule: "most-frames" (more frames wins) or "evaluate" (the better success rate); the head keeps ties.
        head: the present head, None for an expert without one.
        run: what the training made.
        score: evaluates parameters; needed by "evaluate" when there is a head.
    """
    if rule not in RULES:
        raise ValueError(f"no merge rule named {rule!r}.{did_you_mean(rule, RULES)}")
    if head is None:
        return Decision(0, [run], [None])
    if rule == "most-frames":
        return Decision(int(run.frames > head.frames), [head, run], [None, None])
    if score is None:
        raise ValueError(f"the merge rule {rule!r} needs a score")
    tallies = [score(head.params), score(run.params)]
    return Decision(int(tallies[1].wins > tallies[0].wins), [head, run], list(tallies))
