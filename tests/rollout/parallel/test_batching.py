import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.rollout.parallel.server import Batcher, Pace, Waiting
from shoal.rollout.parallel.transport import episode_of
from shoal.rollout.samplers.sampler import Key, Request


def waiting(asker, number=0, member=0):
    return Waiting(asker, number, Request((1,), Key(0, 0, 0, member, number)), print, None)


def names(items):
    return [(item.asker, item.number) for item in items]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99)), max_size=60), st.integers(1, 7))
def test_everything_put_is_taken_once_and_in_order_within_an_asker(items, limit):
    batcher = Batcher(max_batch=limit)
    for asker, number in items:
        batcher.put(waiting(asker, number))
    taken = []
    while len(batcher):
        before = len(batcher)
        assert batcher.due
        part = batcher.take()
        assert len(part) == min(limit, before)
        taken += names(part)
    assert not batcher.due
    assert sorted(taken) == sorted(items)
    for asker in range(5):
        assert [i for a, i in taken if a == asker] == [i for a, i in items if a == asker]


def test_an_asker_of_one_does_not_wait_for_an_asker_of_many():
    batcher = Batcher(max_batch=2)
    for number in range(100):
        batcher.put(waiting("many", number))
    batcher.put(waiting("one"))
    assert ("one", 0) in names(batcher.take())
    assert batcher.waiting("many") == 99
    assert len(batcher.drop("many")) == 99
    assert not len(batcher)


def test_a_request_that_is_withdrawn_is_not_taken_and_others_are():
    batcher = Batcher()
    items = [waiting("a", 0), waiting("a", 1), waiting("b", 0)]
    for item in items:
        batcher.put(item)
    batcher.remove(items[2])
    batcher.remove(items[0])
    batcher.remove(items[0])
    assert len(batcher) == 1
    assert names(batcher.take()) == [("a", 1)]


@pytest.mark.parametrize(("schedule", "waits"), [("greedy", False), ("adaptive", False), ("barrier", True)])
def test_each_schedule_waits_for_what_it_should(schedule, waits):
    batcher = Batcher(schedule)
    first, second = waiting(0, member=1), waiting(1, member=2)
    batcher.entered([episode_of(item.request.key) for item in (first, second)])
    assert not batcher.due
    batcher.put(first)
    assert batcher.due != waits
    batcher.put(second)
    assert batcher.due


def test_lockstep_waits_for_the_same_episodes_turn_after_turn_until_they_leave():
    batcher = Batcher("barrier")
    episodes = [episode_of(waiting(0, member=m).request.key) for m in range(3)]
    batcher.entered(episodes)
    for turn in range(2):
        for member in range(3):
            assert not batcher.due
            batcher.put(waiting(member, turn, member))
        assert len(batcher.take()) == 3
    batcher.put(waiting(0, 2, 0))
    batcher.left(episodes[1:2])
    assert not batcher.due
    batcher.left(episodes[2:])
    assert batcher.due


def test_lockstep_counts_no_question_twice_and_none_of_who_has_left():
    """One episode asked and left: its question does not stand for that of another one."""
    batcher = Batcher("barrier")
    episodes = [episode_of(waiting(0, member=m).request.key) for m in range(3)]
    batcher.entered(episodes)
    batcher.put(waiting("gone", 0, 0))
    batcher.left(episodes[:1])
    batcher.put(waiting("here", 0, 1))
    batcher.put(waiting("here", 1, 1))
    assert not batcher.due  # the third has not asked, though three questions wait
    batcher.put(waiting("here", 0, 2))
    assert batcher.due


def test_lockstep_launches_a_batch_that_is_full():
    batcher = Batcher("barrier", max_batch=2)
    batcher.entered([episode_of(waiting(0, member=m).request.key) for m in range(9)])
    for member in range(2):
        assert not batcher.due
        batcher.put(waiting(member, 0, member))
    assert batcher.due


@pytest.mark.parametrize("schedule", ["greedy", "barrier"])
def test_requests_at_which_the_engine_hung_are_asked_one_by_one_before_all_others(schedule):
    batcher = Batcher(schedule, max_batch=8)
    suspects = [waiting("a", 1), waiting("b", 2), waiting("b", 3), waiting("c", 4)]
    batcher.entered([episode_of(suspects[0].request.key)])
    for item in suspects:
        item.hangs = 1
        batcher.put(item)
    batcher.put(waiting("a", 5))
    batcher.put(waiting("d", 6))
    batcher.remove(suspects[3])
    assert len(batcher) == 5
    assert names(batcher.drop("b")) == [("b", 2), ("b", 3)]
    assert (batcher.due, names(batcher.take())) == (True, [("a", 1)])
    batcher.left([episode_of(suspects[0].request.key)])
    assert (batcher.due, names(batcher.take())) == (True, [("a", 5), ("d", 6)])
    assert (batcher.due, len(batcher)) == (False, 0)


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="no schedule named 'gready'. Did you mean 'greedy'"):
        Batcher("gready")
    with pytest.raises(ValueError, match="max_batch must be at least 1, got 0"):
        Batcher(max_batch=0)


# --- waiting for those who are on their way
FIXED, EACH = 0.020, 0.001
"""Seconds of a call of the engine below, and of each of its requests."""
DELAYS = {
    "pareto": lambda u: 1 / (1000 - 980 * u),
    "uniform": lambda u: 0.001 + 0.049 * u,
    "log-uniform": lambda u: 0.001 * 50**u,
}
"""From an answer to the next question: 1 to 50 ms, of a number from 0 to 1."""


def seconds_of(schedule, kind, n_envs, turns=40, seed=0):
    """How long a rollout takes, in made-up time: envs that ask, think and ask again, and one engine."""
    rng, batcher = random.Random(seed), Batcher(schedule)
    coming = [(DELAYS[kind](rng.random()), env, 0) for env in range(n_envs)]
    heapq.heapify(coming)
    now = 0.0
    while coming or len(batcher):
        free = True
        while free:
            while coming and coming[0][0] <= now:
                came, env, turn = heapq.heappop(coming)
                if batcher.pace is not None:
                    batcher.pace.asked((0, 0, 0, env), came)
                batcher.put(waiting(env, turn, env))
            patience = batcher.patience(now)
            if patience == 0.0:
                free = False
            else:
                times = ([coming[0][0]] if coming else []) + ([now + patience] if patience else [])
                now = min(times)
        batch = batcher.take()
        took = FIXED + EACH * len(batch)
        now += took
        for item in batch:
            if item.number + 1 < turns:
                heapq.heappush(coming, (now + DELAYS[kind](rng.random()), item.asker, item.number + 1))
        if batcher.pace is not None:
            batcher.pace.called(len(batch), took)
            batcher.pace.answered([episode_of(i.request.key) for i in batch if i.number + 1 < turns], now)
    return now


@pytest.mark.parametrize(
    ("kind", "n_envs", "gain"),
    [("pareto", 64, 1.04), ("pareto", 16, 1.1), ("uniform", 64, 0.985), ("log-uniform", 64, 0.985)],
)
def test_waiting_for_questions_on_their_way_gains_where_they_come_soon_and_costs_nothing_elsewhere(
    kind, n_envs, gain
):
    assert seconds_of("greedy", kind, n_envs) / seconds_of("adaptive", kind, n_envs) >= gain


def learned(cost=FIXED, delay=0.002, n=64):
    """A pace that saw calls of several sizes, and episodes that ask again after `delay`."""
    pace = Pace()
    for size in range(1, 40):
        pace.called(size, cost + EACH * size)
    names = [(0, 0, 0, member) for member in range(n)]
    pace.answered(names, 0.0)
    for name in names:
        pace.asked(name, delay)
    pace.answered(names, 1.0)
    return pace, names


def test_what_a_call_costs_is_told_from_what_a_request_costs():
    pace, _ = learned()
    assert pace.cost == pytest.approx(FIXED)
    pace = Pace()
    for _ in range(50):  # always as many: it may all be the requests'
        pace.called(8, 0.1)
    assert pace.cost == pytest.approx(0.0, abs=1e-9)
    for _ in range(400):  # an engine that became quick
        pace.called(8, 1e-4)
        pace.called(1, 1e-4)
    assert not pace.pays


def test_the_engine_is_asked_at_once_when_nothing_is_worth_waiting_for():
    pace, names = learned()
    assert pace.patience(1, 1.0) > 0  # all the others are about to ask
    pace.left(names)
    pace.launched()
    assert pace.patience(1, 1.0) == 0.0
    pace, _ = learned(cost=1e-3)  # a call costs less than the shortest wait
    assert pace.patience(1, 1.0) == 0.0
    pace, _ = learned(delay=5.0)  # they come much later
    assert pace.patience(1, 1.0) == 0.0
    pace, _ = learned()  # they should have come long ago
    assert pace.patience(1, 1.5) == 0.0


def test_a_batcher_waits_only_where_a_call_costs_more_than_the_shortest_wait():
    for cost, waits in ((3e-3, False), (20e-3, True)):
        batcher = Batcher("adaptive")
        batcher.pace, _ = learned(cost=cost, delay=1e-4)  # all the others are about to ask
        batcher.put(waiting("a", 0, 1))
        assert (batcher.patience(1.0) > 0.0) == waits


def test_it_waits_no_longer_than_a_call_costs():
    pace, _ = learned()
    pace.answered([(0, 0, 1, member) for member in range(10_000)], 1.0)
    now, looks = 1.0, 0
    while (seconds := pace.patience(1, now)) > 0:
        now, looks = now + seconds, looks + 1
        pace.answered(
            [(0, 0, looks, member) for member in range(10_000)], now
        )  # always more, always just about to ask
    assert 1.0 < now <= 1.0 + FIXED + FIXED / 2
    pace.launched()
    assert pace.patience(1, now) > 0  # another batch, another wait


def test_a_batch_that_is_full_and_requests_at_which_the_engine_hung_wait_for_nobody():
    batcher = Batcher("adaptive", max_batch=2)
    batcher.pace, _ = learned()
    assert batcher.patience(1.0) is None
    batcher.put(waiting("a", 0, 1))
    assert batcher.patience(1.0) > 0
    batcher.put(waiting("b", 0, 2))
    assert batcher.patience(1.0) == 0.0
    batcher.take()
    suspect = waiting("a", 1, 1)
    suspect.hangs = 1
    batcher.put(suspect)
    assert batcher.patience(1.0) == 0.0


def test_those_who_never_say_that_they_left_are_forgotten_in_the_end():
    pace, _ = learned()
    for group in range(40):
        pace.answered([(0, 1, group, member) for member in range(1000)], 2.0)
    assert len(pace._out) == sum(pace._together.values()) == 2**14
    pace.left(list(pace._out))
    assert not pace._together
