from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.skills.learning.merge_rules import Candidate, Tally, decide


def candidate(kind: str, value: float, frames: int) -> Candidate:
    return Candidate(kind, {"w": np.array([value])}, frames)  # type: ignore[arg-type]


def score_by(rates: dict[float, int], episodes: int = 1000):
    return lambda params: Tally(rates[float(params["w"][0])], episodes)


def test_most_frames_keeps_the_run_with_more_and_the_head_on_a_tie() -> None:
    head = candidate("head", 0, 130)
    assert decide("most-frames", head, candidate("run", 1, 150), share_base=True).chosen.kind == "run"
    assert decide("most-frames", head, candidate("run", 1, 130), share_base=True).chosen.kind == "head"
    assert decide("most-frames", head, candidate("run", 1, 100), share_base=True).chosen.kind == "head"


def test_a_first_version_is_accepted_without_being_asked() -> None:
    for rule in ("auto", "most-frames", "average", "evaluate"):
        assert decide(rule, None, candidate("run", 1, 5), share_base=False).chosen.kind == "run"


def test_average_is_the_mean_when_both_descend_from_one_version() -> None:
    decision = decide("average", candidate("head", 2, 10), candidate("run", 4, 20), share_base=True)
    assert decision.chosen.kind == "average"
    assert decision.chosen.params["w"][0] == 3
    # Without a common ancestor the mean of two networks is noise, so the run itself is taken.
    assert (
        decide("average", candidate("head", 2, 10), candidate("run", 4, 20), share_base=False).chosen.kind
        == "run"
    )


def test_evaluate_takes_the_best_success_rate() -> None:
    rates = score_by({0.0: 700, 4.0: 650, 2.0: 720})
    decision = decide(
        "evaluate", candidate("head", 0, 10), candidate("run", 4, 99), share_base=True, score=rates
    )
    assert decision.chosen.kind == "average"
    assert [tally.wins for tally in decision.tallies if tally] == [700, 650, 720]


def test_auto_refuses_a_run_that_has_collapsed_however_many_frames_it_has() -> None:
    # The case of the findings: 0.84 at 131k frames, 0.505 at 401k.
    rates = score_by({0.0: 840, 4.0: 505, 2.0: 600})
    decision = decide(
        "auto", candidate("head", 0, 131_000), candidate("run", 4, 401_000), share_base=True, score=rates
    )
    assert decision.chosen.kind == "head"


def test_auto_takes_more_frames_of_two_that_are_as_good() -> None:
    rates = score_by({0.0: 900, 4.0: 895, 2.0: 700})
    decision = decide(
        "auto", candidate("head", 0, 130), candidate("run", 4, 150), share_base=True, score=rates
    )
    assert decision.chosen.kind == "run"


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 10**9), st.integers(0, 10**9))
def test_auto_never_picks_what_is_clearly_worse_than_the_head(a: int, b: int, fa: int, fb: int) -> None:
    rates = score_by({0.0: a, 4.0: b}, 500)
    decision = decide(
        "auto", candidate("head", 0, fa), candidate("run", 4, fb), share_base=False, score=rates
    )
    chosen = decision.tallies[decision.winner]
    assert chosen is not None
    assert chosen.lower_bound >= Tally(a, 500).lower_bound - 0.02


def test_the_lower_bound_is_wilsons() -> None:
    # 90 of 100: (0.9 + 1.9208/100 - 1.96*sqrt(0.9*0.1/100 + 0.9604/100^2)) / (1 + 3.8416/100) = 0.8256
    assert Tally(90, 100).lower_bound == pytest.approx(0.8256, abs=1e-4)
    assert Tally(0, 100).lower_bound == 0.0
    assert Tally(0, 0).lower_bound == 0.0


def test_an_unknown_rule_and_a_missing_score_are_errors() -> None:
    with pytest.raises(ValueError, match="Did you mean 'most-frames'"):
        decide("most_frames", None, candidate("run", 1, 1), share_base=False)
    with pytest.raises(ValueError, match="needs a score"):
        decide("auto", candidate("head", 1, 1), candidate("run", 1, 1), share_base=False)


def test_evaluate_keeps_the_head_where_nothing_was_better_and_a_rate_counts_not_the_wins() -> None:
    head, run = candidate("head", 0, 10), candidate("run", 4, 99)
    assert decide("evaluate", head, run, share_base=False, score=score_by({0.0: 700, 4.0: 700})).winner == 0
    tallies = {0.0: Tally(9, 10), 4.0: Tally(50, 100)}
    best = decide("evaluate", head, run, share_base=False, score=lambda p: tallies[float(p["w"][0])])
    assert best.chosen.kind == "head"
    none = decide("evaluate", head, run, share_base=False, score=lambda p: Tally(0, 0))
    assert none.chosen.kind == "head"


def test_of_two_that_are_as_good_and_as_old_the_better_bound_wins_and_then_the_head() -> None:
    head, run = candidate("head", 0, 100), candidate("run", 4, 100)
    for wins, kind in (
        ({0.0: 900, 4.0: 901}, "run"),
        ({0.0: 901, 4.0: 900}, "head"),
        ({0.0: 900, 4.0: 900}, "head"),
    ):
        assert decide("auto", head, run, share_base=False, score=score_by(wins)).chosen.kind == kind


def test_two_hundredths_apart_is_a_tie_and_more_is_not() -> None:
    # Of 1000: 0.9 has the bound 0.8799, 0.882 has 0.8605, 0.881 has 0.8594.
    for wins, kind in ((882, "run"), (881, "head")):
        rates = score_by({0.0: 900, 4.0: wins})
        found = decide("auto", candidate("head", 0, 1), candidate("run", 4, 9), share_base=False, score=rates)
        assert found.chosen.kind == kind


def test_an_average_counts_the_frames_of_the_longer_line_and_needs_equal_shapes() -> None:
    found = decide("average", candidate("head", 2, 30), candidate("run", 4, 20), share_base=True)
    assert found.chosen.frames == 30
    assert found.tallies == [None, None, None]
    other = Candidate("run", {"w": np.array([4.0, 4.0])}, 20)
    assert decide("average", candidate("head", 2, 30), other, share_base=True).chosen.kind == "run"
