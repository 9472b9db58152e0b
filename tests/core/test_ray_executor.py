import os
import threading
import time

import pytest

from shoal.core.errors import WorkerDiedError
from shoal.core.executors import map_ordered
from shoal.core.sharing import Shared

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def executor():
    from shoal.core.ray_executor import RayExecutor

    with RayExecutor(2) as made:
        yield made
    ray.shutdown()


def double_or_fail(number):
    if number == 3:
        raise KeyError("three")
    return 2 * number


def die(_):
    os._exit(7)


def test_results_come_in_order_and_exceptions_with_their_own_type(executor):
    assert list(map_ordered(executor, double_or_fail, [5, 1, 4])) == [10, 2, 8]
    results = map_ordered(executor, double_or_fail, [1, 3, 2])
    assert next(results) == 2
    with pytest.raises(KeyError, match="three"):
        next(results)


def test_no_more_tasks_run_than_workers(executor):
    def overlap(_):
        start = time.time()
        time.sleep(0.2)
        return start, time.time()

    spans = list(map_ordered(executor, overlap, range(6), in_flight=6))
    for start, _ in spans:
        assert sum(begin <= start < end for begin, end in spans) <= 2


def test_a_worker_that_dies_is_an_error_of_its_task_alone(executor):
    doomed, well = executor.submit(die, 0), executor.submit(double_or_fail, 4)
    assert well.result(timeout=100) == 8
    with pytest.raises(WorkerDiedError, match="did not come back"):
        doomed.result(timeout=100)


def test_arguments_that_cannot_travel_fail_their_own_task(executor):
    lock = executor.submit(double_or_fail, threading.Lock())
    with pytest.raises(TypeError):
        lock.result(timeout=60)
    assert executor.submit(double_or_fail, 1).result(timeout=60) == 2


def test_shared_values_go_through_the_object_store(executor):
    shared = executor.share({"name": "x"})
    assert isinstance(shared, Shared)
    assert executor.submit(lambda item: item.get()["name"], shared).result(timeout=60) == "x"


def test_a_closed_executor_takes_no_tasks():
    from shoal.core.ray_executor import RayExecutor

    made = RayExecutor(1)
    made.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        made.submit(double_or_fail, 1)
    with pytest.raises(ValueError, match="workers must be"):
        RayExecutor(0)
