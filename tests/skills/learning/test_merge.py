from __future__ import annotations

import numpy as np
import pytest

from shoal.skills.learning.merge_rules import Candidate, Tally, decide


def candidate(kind: str, value: float, frames: int) -> Candidate:
    return Candidate(kind, {"w": np.array([value])}, frames)  # type: ignore[arg-type]


def test_most_frames_keeps_the_run_with_more_and_the_head_on_a_tie() -> None:
    head = candidate("head", 0, 130)
    for frames, kept in ((150, "run"), (130, "head"), (100, "head")):
        assert decide("most-frames", head, candidate("run", 1, frames)).chosen.kind == kept


@pytest.mark.parametrize("rule", ["most-frames", "evaluate"])
def test_a_first_version_is_accepted_without_an_evaluation(rule: str) -> None:
    assert decide(rule, None, candidate("run", 1, 5)).chosen.kind == "run"


def test_evaluate_takes_the_better_success_rate_whatever_the_frames_and_the_head_on_a_tie() -> None:
    head, run = candidate("head", 0, 131_000), candidate("run", 4, 401_000)
    for wins, kept in ((505, "head"), (840, "head"), (841, "run")):
        rates = {0.0: 840, 4.0: wins}
        found = decide("evaluate", head, run, lambda params, of=rates: Tally(of[float(params["w"][0])], 1000))
        assert found.chosen.kind == kept
        assert [tally.wins for tally in found.tallies if tally] == [840, wins]


def test_an_unknown_rule_and_a_missing_score_are_errors() -> None:
    with pytest.raises(ValueError, match="Did you mean 'most-frames'"):
        decide("most_frames", None, candidate("run", 1, 1))
    with pytest.raises(ValueError, match="needs a score"):
        decide("evaluate", candidate("head", 1, 1), candidate("run", 1, 1))
