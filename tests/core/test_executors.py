import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.executors import SerialExecutor, make_executor, map_ordered


def square(x):
    return x * x


def fail_on_three(x):
    if x == 3:
        raise KeyError("three")
    return x


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_every_executor_gives_the_results_of_a_plain_loop(backend):
    with make_executor(backend, 2) as executor:
        assert list(map_ordered(executor, square, range(37))) == [x * x for x in range(37)]


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_an_exception_comes_out_where_its_result_would_have(backend):
    with make_executor(backend, 2) as executor:
        results = map_ordered(executor, fail_on_three, range(9))
        assert [next(results), next(results), next(results)] == [0, 1, 2]
        with pytest.raises(KeyError, match="three"):
            next(results)


@pytest.mark.timeout(30)
def test_a_pool_whose_last_task_was_cancelled_ends():
    executor = make_executor("process", 1)
    assert executor.submit(square, 3).result() == 9
    for _ in range(3):
        executor.submit(square, 4).cancel()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        executor.submit(square, 5)


@given(st.lists(st.integers()), st.integers(1, 5))
@settings(max_examples=30)
def test_order_holds_for_any_bound(items, bound):
    assert list(map_ordered(SerialExecutor(), square, items, in_flight=bound)) == [x * x for x in items]


def test_input_is_read_no_further_ahead_than_the_bound():
    read = []

    def items():
        for x in range(100):
            read.append(x)
            yield x

    results = map_ordered(SerialExecutor(), square, items(), in_flight=3)
    next(results)
    assert read == [0, 1, 2]


def test_tasks_that_have_not_started_are_cancelled_when_one_fails():
    gate, started = threading.Event(), []

    def work(x):
        started.append(x)
        if x == 0:
            raise ValueError("first")
        gate.wait(5)

    with make_executor("thread", 1) as executor:
        with pytest.raises(ValueError, match="first"):
            list(map_ordered(executor, work, range(50), in_flight=50))
        gate.set()
    assert len(started) < 50


@pytest.mark.parametrize("workers", [0, -2])
def test_a_senseless_number_of_workers_is_refused(workers):
    with pytest.raises(ValueError, match=f"at least 1, got {workers}"):
        make_executor("thread", workers)


def test_an_unknown_backend_is_named_with_the_closest_one():
    with pytest.raises(ValueError, match="Did you mean 'thread'"):
        make_executor("threads")
