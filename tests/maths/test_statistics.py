from hypothesis import given
from hypothesis import strategies as st

from shoal.maths.statistics import mean_interval, wilson


def test_the_interval_is_wilsons():
    rate = wilson(8, 10)  # Newcombe (1998) table: 0.4902 to 0.9433
    assert (round(rate.low, 4), round(rate.high, 4)) == (0.4902, 0.9433)
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_rate_and_stays_in_range(pair):
    rate = wilson(*pair)
    assert 0.0 <= rate.low <= rate.value + 1e-12
    assert rate.value - 1e-12 <= rate.high <= 1.0


def test_the_mean_by_hand():
    # 1, 2, 3: mean 2, variance 1, standard error 1/sqrt(3)
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert (mean, round(half, 4)) == (2.0, round(1.959964 / 3**0.5, 4))
