"""Rollouts on a Ray cluster of three nodes, all on this machine."""

import sys
import threading
import time
import types

import pytest
from tests.rollout.doubles import CounterEnv, HashEngine, InterruptingEngine, check_faulty, config, with_env

from shoal import envs
from shoal.rollout.play import ParallelRolloutManager

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def cluster(ray_finds_shoal):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    ray.shutdown()  # what a test before left running
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1, include_dashboard=False)
    ray.init(address=cluster.address, include_dashboard=False, log_to_driver=False)
    envs.register("test_counter", CounterEnv, replace=True)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def play(backend, engine=None, n_jobs=3, **changes):
    settings = config(n_jobs=n_jobs, **changes)
    with ParallelRolloutManager(settings, engine or HashEngine(), backend=backend) as manager:
        return manager.collect(4), manager.report


@pytest.mark.parametrize("schedule", ["adaptive", "barrier"])
def test_trajectories_on_a_cluster_are_the_serial_ones(cluster, schedule):
    assert play("ray", parallel={"schedule": schedule})[0] == play("serial")[0]


def test_lockstep_does_not_wait_for_workers_that_have_no_place_yet(cluster):
    assert play("ray", n_jobs=8, parallel={"schedule": "barrier"})[0] == play("serial")[0]


def test_a_rollout_that_has_begun_is_the_serial_one(cluster):
    with ParallelRolloutManager(config(n_jobs=2), HashEngine(), backend="ray") as manager:
        begun = manager.begin(4)
        assert begun.wait() == play("serial")[0]
        manager.begin(5)  # and closing it ends that


def test_a_rollout_after_an_interrupted_one_is_not_mixed_up_with_it(cluster):
    with ParallelRolloutManager(config(nap=0.02), InterruptingEngine(), backend="ray") as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.collect(3)
        assert manager.collect(4) == play("serial")[0]


def test_a_failing_env_on_a_cluster_ends_its_episode_alone(cluster):
    check_faulty(play("serial")[0], play("ray", fault="raise")[0], "env_error", "KeyError", 2)


def test_a_ray_worker_that_dies_is_replaced_and_nothing_changes(cluster, tmp_path):
    calm = play("serial")[0]
    played, report = play("ray", fault="kill", once=str(tmp_path / "once"))
    assert played == calm
    assert report.worker_deaths == 1


def test_a_node_that_is_lost_costs_time_and_no_episode(cluster):
    calm = play("serial", nap=0.0)[0]
    extra = cluster.add_node(num_cpus=1, include_dashboard=False)
    settings = config(n_jobs=4, nap=0.4)
    with ParallelRolloutManager(settings, HashEngine(), backend="ray") as manager:
        thread = threading.Timer(3.0, cluster.remove_node, (extra,), {"allow_graceful": False})
        thread.start()
        played = manager.collect(4)
        thread.join()
    assert played == calm


def test_a_module_that_only_this_machine_has_is_named(cluster, caplog, monkeypatch):
    alone = types.ModuleType("here_alone")
    alone.Away = type("Away", (CounterEnv,), {"__module__": "here_alone"})
    monkeypatch.setitem(sys.modules, "here_alone", alone)
    settings = with_env(alone.Away, n_jobs=1)
    with ParallelRolloutManager(settings, HashEngine(), backend="ray") as manager:
        assert manager.collect(4) == play("serial")[0]
    assert "No module named 'here_alone' (install it on every node, or call ray.init(" in caplog.text


def test_workers_go_to_nodes_with_the_resources_they_ask_for(cluster):
    cluster.add_node(num_cpus=2, resources={"env": 2}, include_dashboard=False)
    settings = {"ray_options": {"resources": {"env": 1}}}
    assert play("ray", n_jobs=2, parallel=settings)[0] == play("serial")[0]


def test_processes_take_over_where_ray_is_shut_down_before_a_worker_has_started(cluster, caplog):
    """The first test that ends the connection of the others."""
    import ray

    settings = config(n_jobs=2, parallel={"ray_options": {"resources": {"nowhere": 1}}})
    with ParallelRolloutManager(settings, HashEngine(), backend="ray") as manager:
        begun = manager.begin(4)
        time.sleep(1.0)
        ray.shutdown()
        assert begun.wait() == play("serial")[0]
    assert "Ray was shut down before it played anything; a process of this machine takes its" in caplog.text


def test_processes_of_this_machine_take_over_where_ray_is_shut_down(cluster, caplog):
    import ray

    if not ray.is_initialized():
        ray.init(address=cluster.address, include_dashboard=False, log_to_driver=False)
    with ParallelRolloutManager(config(n_jobs=2), HashEngine(), backend="ray") as manager:
        calm = manager.collect(4)
        ray.shutdown()
        assert manager.collect(4) == calm
        while len(manager.worker_pids()) < 2:  # one may still be starting when the other has played all
            assert manager.collect(4) == calm
        assert not ray.is_initialized()
    assert "Ray was shut down; a process of this machine takes its place" in caplog.text
