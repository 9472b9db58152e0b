import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.rollout.parallel.server import Batcher, Waiting
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
