import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.rollout.parallel.batching import (
    HORIZONS,
    Batcher,
    CostModel,
    FairQueue,
    Latencies,
    worthwhile_wait,
)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers()), max_size=60), st.integers(1, 7))
def test_everything_put_is_taken_once_and_in_order_within_an_asker(items, limit):
    queue = FairQueue()
    for asker, item in items:
        queue.put(asker, (asker, item))
    taken = []
    while len(queue):
        before = len(queue)
        part = queue.take(limit)
        assert len(part) == min(limit, before)
        taken += part
    assert sorted(taken) == sorted(items)
    for asker in range(5):
        assert [i for a, i in taken if a == asker] == [i for a, i in items if a == asker]


def test_an_asker_of_one_does_not_wait_for_an_asker_of_many():
    queue = FairQueue()
    for item in range(100):
        queue.put("many", item)
    queue.put("one", "x")
    assert "x" in queue.take(2)
    assert queue.waiting("many") == 99
    assert len(queue.drop("many")) == 99
    assert not len(queue)


@given(st.floats(1e-4, 1), st.floats(0, 0.1), st.lists(st.integers(1, 300), min_size=3, max_size=30))
def test_the_cost_of_a_batch_is_found(fixed, per_item, sizes):
    model = CostModel()
    for size in sizes:
        model.add(size, fixed + per_item * size)
    found = model.fixed_and_per_item()
    assert min(found) >= 0
    predicted = found[0] + found[1] * sizes[-1]
    assert predicted == pytest.approx(fixed + per_item * sizes[-1], rel=0.3)
    if len(set(sizes[-4:])) == 4:
        assert found == pytest.approx((fixed, per_item), rel=1e-3, abs=1e-5)


def test_expected_arrivals_are_the_conditional_frequencies():
    latencies = Latencies()
    for k, seconds in enumerate([0.01, 0.02, 0.03, 0.04]):
        latencies.answered([k], 0.0)
        latencies.asked(k, seconds)
    latencies.answered(["a"], 1.0)
    latencies.answered(["b"], 1.0)
    # after 25 ms two of four latencies are left, one of which ends within 10 ms: a half for each of two
    found = latencies.expected(1.025, np.array([0.001, 0.010, 0.020]))
    assert found.tolist() == [0.0, 1.0, 2.0]
    latencies.left("a")
    assert latencies.expected(1.025, np.array([0.020])).tolist() == [1.0]
    assert latencies.expected(1.5, np.array([0.020])).tolist() == [0.0]  # longer than any known: no hope


def test_each_schedule_waits_for_what_it_should():
    for schedule, expected in (("greedy", 0.0), ("barrier", None), ("adaptive", 0.0)):
        batcher = Batcher(schedule)
        batcher.at_play = {"x", "y"}
        assert batcher.wait(0.0) is None
        batcher.queue.put(0, "x")
        assert batcher.wait(0.0) == expected
        batcher.queue.put(1, "y")
        assert batcher.wait(0.0) == 0.0


def busy_batcher(outstanding, latency):
    """An engine of 20 ms + 1 ms a request that became idle at 2.0 with one request waiting."""
    batcher = Batcher("adaptive")
    for size in (1, 5, 9, 20):
        batcher.cost.add(size, 0.020 + 0.001 * size)
    for k in range(20):
        batcher.latencies.answered([k], 0.0)
        batcher.latencies.asked(k, latency)
    for k in range(outstanding):
        batcher.latencies.answered([("out", k)], 2.0)
    batcher.queue.put(0, "x")
    batcher.idle(2.0)
    return batcher


def adaptive(outstanding, latency):
    return busy_batcher(outstanding, latency).wait(2.0)


def test_adaptive_waits_for_many_who_come_soon_and_not_for_few_or_late_ones():
    assert adaptive(30, 0.002) >= 0.002
    assert adaptive(0, 0.002) == 0.0
    assert adaptive(2, 0.100) == 0.0
    assert adaptive(30, 0.100) == 0.0


def arrivals(**by_horizon_ms):
    """So many have come from each horizon on."""
    found = np.zeros(len(HORIZONS))
    for name, count in by_horizon_ms.items():
        found[int(name.removeprefix("ms")) * 1e-3 - 1e-9 <= HORIZONS] = count
    return found


def test_a_wait_is_worth_it_when_its_doubted_rate_is_higher():
    engine = {"fixed": 0.020, "per_item": 0.001, "waited": 0.0}
    # now: 10 / (20 + 10) = 0.333 a millisecond. In 5 ms: 20 / (20 + 20 + 5) / (1 + 0.4 * 5 / 20) = 0.404
    assert worthwhile_wait(10, arrivals(ms5=10), **engine) == 0.005
    # with 4 more: 14 / (20 + 14 + 5) / 1.1 = 0.326, less than 0.333, though 14 / 39 = 0.359 is more
    assert worthwhile_wait(10, arrivals(ms5=4), **engine) == 0.0
    # 2 in 1 ms: 12 / (20 + 12 + 1) / 1.02 = 0.357; all 8 in 10 ms: 18 / (20 + 18 + 10) / 1.2 = 0.3125
    assert worthwhile_wait(10, arrivals(ms1=2, ms10=8), **engine) == 0.001
    # time already lost counts for both: now 10 / 40 = 0.25, with the 4 in 5 ms 14 / (20 + 14 + 10 + 5) / 1.1 = 0.26
    assert worthwhile_wait(10, arrivals(ms5=4), **(engine | {"waited": 0.010})) == 0.005
    assert worthwhile_wait(10, arrivals(), **engine) == 0.0


def test_an_engine_is_never_idle_for_longer_than_half_the_fixed_cost():
    batcher = busy_batcher(outstanding=30, latency=0.0005)
    assert batcher.wait(2.0) > 0
    for k in range(30):  # they should have been back at once, and are not: hope for others like them stays
        batcher.latencies.left(("out", k))
        batcher.latencies.answered([("new", k)], 2.0101)
    assert batcher.wait(2.0095) > 0
    assert batcher.wait(2.0101) == 0.0  # 0.5 * 20 ms


def test_a_request_counts_from_its_answer_to_when_it_was_ready_again():
    latencies = Latencies()
    latencies.answered(["a"], 1.0)
    latencies.asked("a", 1.004)  # however late it is read
    latencies.asked("c", 1.004)  # had no answer yet: nothing to learn from
    assert latencies.known == 1
    latencies.answered(["b"], 3.0)
    assert latencies.expected(3.0, np.array([0.003, 0.005])).tolist() == [0.0, 1.0]


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="no schedule named 'gready'. Did you mean 'greedy'"):
        Batcher("gready")
