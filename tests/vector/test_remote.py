"""Environments on Ray actors: the same results as in the caller, and failures that show."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

import shoal.envs
from shoal.core.errors import ConfigError, MissingExtraError, WorkerDiedError, WorkerError, WorkerTimeoutError
from shoal.vector import make_vec
from shoal.vector import ray as remote
from shoal.vector.env_group import Step
from shoal.vector.process import Limits
from tests.vector.actors import RayError, RuntimeEnvSetupError, ThreadCluster, dead_because
from tests.vector.faulty import CountEnv, Faulty
from tests.vector.living import within
from tests.vector.scripted import Scripted, SlowEnv
from tests.vector.test_equality import same

starts_ray = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),
]


def with_ray(test: Any) -> Any:
    for mark in starts_ray:
        test = mark(test)
    return test


with_actors = pytest.mark.parametrize(
    "cluster", [pytest.param("ray", marks=starts_ray), "threads"], indirect=True
)
"""On Ray, and on threads that stand for its actors."""


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    """Workers of Ray start from its own node processes and find shoal as on the user's cluster: installed."""
    with pytest.MonkeyPatch.context() as patch:
        found = os.pathsep.join(str(Path(item).resolve()) for item in sys.path if item)
        patch.setenv("PYTHONPATH", found)
        yield found


SESSION = """
import os, ray
from shoal import make_vec
import gymnasium

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, ())
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        return 1.0, {}
    def step(self, action):
        return 2.0, float(action), False, False, {"pid": os.getpid()}

a = make_vec(Mine, 2, backend="ray", num_workers=1)
a.reset()
assert ray.is_initialized()
b = make_vec(lambda: Mine(), 1, backend="ray")
a.close()
assert ray.is_initialized(), "another vector env uses it"
b.reset()
obs, rewards, _, _, infos = b.step([1])
assert rewards.tolist() == [1.0] and infos["pid"][0] != os.getpid()
b.close()
assert ray.is_initialized(), "it stays until the program ends"
ray.shutdown()
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
c = make_vec(Mine, 1, backend="ray")
c.close()
assert ray.is_initialized(), "it is the user's"
d = make_vec(Mine, 1, backend="ray")
d.reset()
ray.shutdown()
try:
    d.step([1])
except Exception as error:
    print(type(error).__name__, error)
d.close()
assert not ray.is_initialized(), "nothing starts it again"
print("done")
"""


def of_ray() -> set[str]:
    out = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return {line for line in out.splitlines() if "raylet" in line or "gcs_server" in line or "ray::" in line}


@with_ray
def test_the_ray_that_was_started_for_vector_envs_ends_with_the_program(path: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SESSION)
    before = of_ray()
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert "WorkerDiedError env 0" in done.stdout
    assert "session that it lived in was ended" in done.stdout
    end = time.monotonic() + 10
    while of_ray() - before and time.monotonic() < end:
        time.sleep(0.1)
    assert not of_ray() - before


@contextlib.contextmanager
def threads_of(patch: pytest.MonkeyPatch) -> Iterator[ThreadCluster]:
    with contextlib.closing(ThreadCluster({"CPU": 2}, {"CPU": 2})) as cluster:
        yield cluster.enter(patch)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadCluster]:
    with threads_of(monkeypatch) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two nodes of two CPUs, of Ray or made of threads."""
    if getattr(request, "param", "ray") == "threads":
        with pytest.MonkeyPatch.context() as patch, threads_of(patch) as made:
            yield made
        return
    request.getfixturevalue("path")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2, include_dashboard=False)
    ray.init(address=cluster.address, include_dashboard=False, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def moment(cluster: Any) -> float:
    """Seconds that are long beside an answer: Ray's take a while."""
    return 0.2 if isinstance(cluster, ThreadCluster) else 1.0


@with_actors
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize(
    "space",
    [spaces.Box(-1, 1, (2,)), spaces.Text(9), spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 1, (2, 2)))],
)
def test_ray_gives_what_the_caller_itself_gives(cluster: Any, space: Any, mode: str) -> None:
    fns = [functools.partial(Scripted, space, spaces.Discrete(4), 4, 4)] * 5
    near = make_vec(fns, backend="serial", autoreset=mode)
    far = make_vec(fns, backend="ray", num_workers=2, autoreset=mode)
    assert same(far.reset(seed=3), near.reset(seed=3))
    for t in range(8):
        actions = np.array([t % 4] * 5)
        assert same(far.step(actions), near.step(actions))
    assert same(
        [tuple(x) for x in far.reset_some([3, 1], [7, 8])],
        [tuple(x) for x in near.reset_some([3, 1], [7, 8])],
    )
    for chosen in ([1, 3], [4, 0, 2], [3]):
        actions = [np.int64(i % 4) for i in chosen]
        assert same(
            [tuple(x) for x in far.step_some(chosen, actions)],
            [tuple(x) for x in near.step_some(chosen, actions)],
        )
    assert far.call("length") == near.call("length")
    for envs in (far, near):
        envs.set_attr("length", [1, 2, 3, 4, 5])
    assert far.apply(lambda env, k: env.length + k, 10, indices=[4, 1]) == [15, 12]
    assert same(far.reset(seed=9), near.reset(seed=9))
    seen: dict[str, dict[int, Any]] = {"far": {}, "near": {}}
    for name, envs in (("far", far), ("near", near)):
        envs.send(range(5), [1] * 5)
        while len(seen[name]) < 5:
            ready = envs.recv()
            for k, i in enumerate(ready.ids.tolist()):
                row = ready.rewards[k], ready.terminated[k], ready.truncated[k], ready.infos[k]
                seen[name][i] = row
    assert all(same(seen["far"][i], seen["near"][i]) for i in range(5))
    far.close()
    near.close()


@with_actors
@pytest.mark.parametrize("options", [{}, {"num_cpus": 0.5}, {"num_cpus": 0}], ids=str)
def test_actors_are_spread_evenly_over_the_nodes(cluster: Any, options: dict[str, Any]) -> None:
    for n in (6, 5):
        envs = make_vec(CountEnv, n, backend="ray", num_workers=n, ray_options=options)
        nodes = collections.Counter(row["node"] for row in envs.stats()["workers"])
        envs.close()
        assert max(nodes.values()) - min(nodes.values()) <= 1
        assert len(nodes) == 2


class Threaded(CountEnv):
    """Tells the thread that made it, steps it and closes it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = {threading.get_ident()}

    def step(self, action: Any) -> Any:
        self.threads.add(threading.get_ident())
        return super().step(action)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        if out := os.environ.get("SHOAL_TEST_OUT"):
            Path(out).write_text(str(len(self.threads)))


@with_ray
def test_an_environment_lives_in_one_thread(cluster: Any, tmp_path: Path) -> None:
    out = tmp_path / "threads"
    options = {"runtime_env": {"env_vars": {"SHOAL_TEST_OUT": str(out)}}, "num_cpus": 1}
    envs = make_vec(Threaded, 1, backend="ray", ray_options=options)
    envs.reset()
    for _ in range(20):
        envs.step([1])
    envs.close()
    assert out.read_text() == "1"


FAULTS = ["raise", "hang", "unpicklable", "info"]


@pytest.mark.parametrize(
    ("cluster", "fault"),
    [
        *(pytest.param("ray", fault, marks=starts_ray) for fault in ["exit", *FAULTS]),
        *(("threads", fault) for fault in FAULTS),
    ],
    indirect=["cluster"],
)
@pytest.mark.flaky(reruns=2)
def test_a_failed_actor_is_replaced_and_shows_it(cluster: Any, fault: str) -> None:
    fns = [
        functools.partial(Faulty, fault) if i == 1 else functools.partial(CountEnv, 1000) for i in range(3)
    ]
    timeout = 1.0 if fault == "hang" else None
    envs = make_vec(fns, backend="ray", num_workers=3, on_failure="restart", step_timeout=timeout)
    envs.reset(seed=0)
    _, rewards, _, truncated, infos = envs.step([1, 9, 1])
    assert truncated.tolist() == [False, True, False]
    assert infos["worker_restarted"].tolist() == [False, True, False]
    assert rewards.tolist() == [11.0, 0.0, 11.0]
    assert envs.step([1, 1, 1])[1].tolist() == [12.0, 11.0, 12.0]
    assert envs.stats()["restarts"] == [0, 1, 0]
    envs.close()


def test_the_death_of_an_actor_blames_all_envs_that_it_may_have_been_at() -> None:
    backend: Any = types.SimpleNamespace(ray=None, connected=lambda: False)
    worker = remote.RayWorker(backend, 4, [CountEnv] * 3, Limits())
    worker.command = Step(None, 0, {}, [1, 2, 3])
    worker.sight = remote.Sight(at=1)
    worker._die("it was killed", "told by Ray")
    assert worker.lost is not None
    assert (worker.lost.env, worker.lost.kind, worker.lost.trace) == (5, "died", "told by Ray")
    said = "the Ray actor of envs 4 to 6 is gone: it was killed (or it was the fault of env 4, 6)"
    assert worker.lost.summary == said
    alone = remote.RayWorker(backend, 4, [CountEnv], Limits())
    alone.command = worker.command
    alone._die("it was killed")
    assert alone.lost is not None
    assert alone.lost.summary == "the Ray actor of env 4 is gone: it was killed"


def test_what_a_gone_actor_cannot_tell_or_be_told_is_left_out(
    threads: ThreadCluster, monkeypatch: Any
) -> None:
    def kill(_: Any) -> None:
        raise RayError("it is gone already")

    envs = make_vec(functools.partial(Faulty, "hang"), 2, backend="ray", num_workers=2, on_failure="restart")
    envs.reset(seed=0)
    worker: Any = envs.workers[0]
    worker.ask_stack()
    threads.actors[0].end(dead_because("it was told to"))
    assert worker.stack() == ""
    assert np.isnan(envs.stats()["step_p50"][0])
    monkeypatch.setattr(threads, "kill", kill)
    assert envs.step([1, 1])[3].tolist() == [True, False]
    envs.close()


def test_who_is_lost_is_not_waited_for(threads: ThreadCluster, monkeypatch: Any) -> None:
    waited: list[Any] = []
    envs = make_vec(CountEnv, 2, backend="ray", num_workers=2)
    workers: Any = envs.workers
    envs.reset(seed=0)
    envs.step_async([1, 1])
    replies = [worker.reply for worker in workers]
    workers[0].lost = workers[0].failure("died", "it was told to")
    with monkeypatch.context() as patch:
        patch.setattr(threads, "wait", lambda references, **_: waited.append(references))
        workers[0].backend.wait_for(workers, 1.0)
    assert waited == [replies[1:]]
    envs.close()


def test_a_scheduling_strategy_that_ray_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'SPRAED'. Did you mean 'SPREAD'"):
        make_vec(CountEnv, 1, backend="ray", ray_options={"scheduling_strategy": "SPRAED"})


@with_ray
def test_a_death_names_the_envs_of_the_actor(cluster: Any) -> None:
    fns = [functools.partial(Faulty, "exit")] * 4
    envs = make_vec(fns, backend="ray", num_workers=2)
    envs.reset()
    with pytest.raises(
        WorkerDiedError, match=r"env 2 .*the Ray actor of envs 2 to 3 is gone: its worker process has died"
    ):
        envs.step([1, 1, 1, 9])
    envs.reset()
    with pytest.raises(WorkerDiedError, match=r"env 3 .* with action 9"):
        envs.step_some([3], [9])
    assert envs.reset(seed=3)[0][:, 0].tolist() == [3, 4, 5, 6]
    envs.close()


@with_actors
@pytest.mark.flaky(reruns=2)
def test_the_time_limit_is_for_each_env_and_hangs_are_waited_for_side_by_side(cluster: Any) -> None:
    slow = [functools.partial(SlowEnv, 0.5)] * 4
    envs = make_vec(slow, backend="ray", num_workers=1, step_timeout=1.2)
    envs.reset()
    assert envs.step([1] * 4)[1].tolist() == [11.0] * 4  # two seconds in all
    assert all(0.4 < seconds < 1.2 for seconds in envs.stats()["step_p50"])
    envs.close()
    fns = [functools.partial(Faulty, "hang")] * 6
    envs = make_vec(fns, backend="ray", num_workers=3, step_timeout=1.0)
    envs.reset()
    with (
        within(1.0, 1.5),
        pytest.raises(
            WorkerTimeoutError, match=r"env 1 \(pid \d+\) failed in step with action .*9"
        ) as caught,
    ):
        envs.step([1, 9, 1, 9, 1, 9])
    assert "misbehave" in str(caught.value.__cause__)
    assert [note.split(" (")[0] for note in caught.value.__notes__] == ["also: env 3", "also: env 5"]
    envs.close()


class HangsWhenMade(CountEnv):
    def __init__(self) -> None:
        time.sleep(3600)


@with_ray
@pytest.mark.flaky(reruns=2)
def test_a_constructor_that_hangs_is_named_in_time(cluster: Any) -> None:
    begun = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match=r"env 1 .*failed in make: no answer within 1 s"):
        make_vec([CountEnv, HangsWhenMade], backend="ray", num_workers=1, make_timeout=1.0)
    assert time.monotonic() - begun < 30


class DiesWhenMade(CountEnv):
    def __init__(self) -> None:
        os._exit(3)


@with_ray
def test_a_constructor_that_ends_its_process_is_told_and_not_tried_for_long(cluster: Any) -> None:
    with pytest.raises(WorkerDiedError, match="env 0 .*failed in make"):
        make_vec(DiesWhenMade, 1, backend="ray")


@with_actors
def test_what_can_never_be_placed_is_told_in_time(
    cluster: Any, moment: float, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(remote, "REPORT_SECONDS", 0.5 * moment)
    begun = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(
            WorkerError, match=r"env 0 failed in make: .*waiting for 64 CPUs.*the cluster has 4 CPUs"
        ),
    ):
        make_vec(
            CountEnv, 2, backend="ray", num_workers=1, ray_options={"num_cpus": 64}, make_timeout=2.0 * moment
        )
    assert time.monotonic() - begun < 60
    assert "waiting for 64 CPUs: 1 of 1 actors have no place yet (envs 0 to 1)" in caplog.text


@with_actors
def test_an_actor_waits_for_its_cpus_and_says_so(
    cluster: Any, moment: float, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(remote, "REPORT_SECONDS", 0.5 * moment)
    first = make_vec(CountEnv, 4, backend="ray", ray_options={"num_cpus": 1})
    assert len(first.stats()["workers"]) == 4  # as many as there is room for
    threading.Timer(5 * moment, first.close).start()
    with caplog.at_level(logging.WARNING):
        second = make_vec(CountEnv, 1, backend="ray", ray_options={"num_cpus": 1})
    assert "waiting for 1 CPU: 1 of 1 actors have no place yet (env 0)" in caplog.text
    assert second.reset(seed=1)[0][0, 0] == 1
    second.close()


@with_actors
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nun_cpus": 1}, "ray_options has no 'nun_cpus'. Did you mean 'num_cpus'?"),
        ({"max_restarts": 3}, "ray_options has no 'max_restarts'"),
        ({"num_cpus": -1}, "Ray refuses ray_options={'num_cpus': -1}: "),
        ({"num_gpus": "one"}, "Ray refuses ray_options={'num_gpus': 'one'}: "),
    ],
)
def test_options_that_ray_does_not_know_are_refused(cluster: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_vec(CountEnv, 1, backend="ray", ray_options=options)


@with_actors
def test_calls_bring_no_rows(cluster: Any, monkeypatch: Any) -> None:
    landed = []
    monkeypatch.setattr(remote, "land", lambda *args: landed.append(args))
    envs = make_vec(CountEnv, 4, backend="ray", num_workers=2)
    assert envs.call("length") == (5, 5, 5, 5)
    envs.set_attr("length", 7)
    assert envs.apply(lambda env: env.length) == [7, 7, 7, 7]
    assert not landed
    envs.reset()
    assert len(landed) == 2
    rows = landed[0][0]
    assert [part.shape for part in rows[0]] == [(2, 4)]
    assert not rows[4]  # nothing ended: no final observations
    envs.close()


@with_actors
def test_a_command_that_cannot_be_sent_harms_nobody(cluster: Any) -> None:
    envs = make_vec(CountEnv, 2, backend="ray", num_workers=2)
    envs.reset()
    with pytest.raises(TypeError):
        envs.call("observe", threading.Lock())
    assert envs.step([1, 1])[1].tolist() == [11.0, 11.0]
    envs.close()


@with_actors
def test_whichever_actor_is_ready_first_comes_first(cluster: Any, moment: float) -> None:
    envs = make_vec([functools.partial(SlowEnv, s) for s in (5 * moment, 0.0)], backend="ray", num_workers=2)
    envs.reset(seed=0)
    envs.send([0, 1], [1, 1])
    assert envs.recv(1).ids.tolist() == [1]
    envs.send([1], [2])
    assert envs.recv(1).rewards.tolist() == [22.0]
    ready = envs.recv(1)
    assert ready.ids.tolist() == [0]
    assert ready.rewards.tolist() == [11.0]
    envs.close()


@with_actors
def test_a_late_answer_is_never_the_next_one(cluster: Any, moment: float) -> None:
    envs = make_vec([functools.partial(SlowEnv, s) for s in (moment, 0.0)], backend="ray", num_workers=2)
    envs.reset(seed=0)
    envs.step_async([1, 1])
    with pytest.raises(TimeoutError):
        envs.step_wait(timeout=0.0)
    assert envs.step([2, 2])[1].tolist() == [22.0, 22.0]
    envs.close()


class OfThisTest(CountEnv):
    def step(self, action: Any) -> Any:
        return self.observe(action), 5.0, False, False, {}


@with_actors
def test_names_that_a_script_registered_are_known_to_actors(cluster: Any) -> None:
    shoal.envs.register("of_this_test", OfThisTest, replace=True)
    envs = make_vec("of_this_test", 1, backend="ray")
    envs.reset()
    assert envs.step([1])[1].tolist() == [5.0]
    envs.close()


@with_ray
@pytest.mark.parametrize("noticed", [True, False])
def test_an_actor_of_a_node_that_is_lost_goes_to_another(
    cluster: Any, caplog: Any, monkeypatch: Any, noticed: bool
) -> None:
    if not noticed:  # then Ray does after a while
        monkeypatch.setattr(remote.RayBackend, "_is_up", lambda backend, node: True)
    doomed = cluster.add_node(num_cpus=20, include_dashboard=False)
    envs = make_vec(functools.partial(CountEnv, 1000), 2, backend="ray", num_workers=1, on_failure="restart")
    envs.reset(seed=0)
    assert envs.stats()["workers"][0]["node"] == doomed.node_id
    cluster.remove_node(doomed, allow_graceful=False)
    end = time.monotonic() + 100
    while not envs.step([1, 1])[3].any():
        assert time.monotonic() < end
    assert envs.stats()["workers"][0]["node"] != doomed.node_id
    assert ("died before it served" in caplog.text) is not noticed
    assert envs.step([1, 1])[1].tolist() == [11.0, 11.0]
    envs.close()


def test_without_ray_the_extra_is_named(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"shoal\[parallel\]"):
        make_vec(CountEnv, 1, backend="ray")


@pytest.mark.parametrize("noticed", [True, False])
def test_the_envs_of_a_lost_node_begin_again_where_somebody_answers(
    threads: ThreadCluster, noticed: bool
) -> None:
    doomed = threads.add_node({"CPU": 20})
    envs = make_vec(functools.partial(CountEnv, 1000), 2, backend="ray", num_workers=1, on_failure="restart")
    envs.reset(seed=0)
    assert envs.stats()["workers"] == [{"pid": os.getpid(), "node": doomed, "restarts": 0}]
    threads.lose_node(doomed, noticed)
    _, rewards, _, truncated, infos = envs.step([1, 1])
    assert (rewards.tolist(), truncated.tolist()) == ([0.0, 0.0], [True, True])
    assert "the Ray actor of envs 0 to 1 is gone: its node has died (or" in infos["worker_error"][1]
    assert envs.stats()["workers"] == [{"pid": os.getpid(), "node": "n0", "restarts": 1}]
    threads.kill(threads.actors[-1])
    assert envs.step([1, 1])[3].all()
    assert envs.stats()["workers"][0]["node"] == "n0"  # an actor died there, the node did not
    assert envs.step([1, 1])[1].tolist() == [11.0, 11.0]
    envs.close()


def test_an_actor_that_dies_on_its_way_is_started_again_for_a_while(
    threads: ThreadCluster, caplog: Any, monkeypatch: Any
) -> None:
    threads.stillborn = [RayError("lost"), RayError("lost again")]
    with contextlib.closing(make_vec(CountEnv, 1, backend="ray")) as envs:
        assert envs.reset(seed=4)[0].tolist() == [[4, 1, 0, 0]]
    said = "the actor for env 0 died before it served ({}); starting another"
    assert caplog.messages == [said.format("lost"), said.format("lost again")]
    broken = RayError("its class raises")
    broken.actor_init_failed = True  # type: ignore[attr-defined]
    for error in (broken, RuntimeEnvSetupError("no such package")):  # it would end like this every time
        threads.stillborn = [error]
        with pytest.raises(WorkerDiedError, match=f"failed in make: the Ray actor of env 0 is gone: {error}"):
            make_vec(CountEnv, 1, backend="ray")
    monkeypatch.setattr(remote, "RETRY_SECONDS", -1.0)
    threads.stillborn = [RayError("lost")]
    with pytest.raises(WorkerDiedError, match="the Ray actor of env 0 is gone: lost"):
        make_vec(CountEnv, 1, backend="ray")
    assert len(caplog.messages) == 2


def test_many_actors_that_die_on_their_way_for_one_reason_are_told_once_and_given_up(
    threads: ThreadCluster, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(remote, "RETRY_SECONDS", 1.0)
    starts: list[Any] = []

    class Endless(list[RayError]):
        def pop(self, *_: Any) -> RayError:
            starts.append(1)
            return RayError("it cannot start here")

        def __bool__(self) -> bool:
            return True

    threads.stillborn = Endless()
    again = r"gone: it cannot start here; so did \d+ before it, and no other is tried"
    with pytest.raises(WorkerDiedError, match=again):
        make_vec(CountEnv, 4, backend="ray", num_workers=4)
    assert caplog.messages == [
        "the actor for env 0 died before it served (it cannot start here); starting another"
    ]
    assert 4 < len(starts) <= 4 * 7  # at once, and after 0.1, 0.2, 0.4 and 0.8 s
    monkeypatch.setattr(remote, "REPORT_SECONDS", 0.0)
    backend = remote.RayBackend.__new__(remote.RayBackend)
    backend._losses = {"why": (time.monotonic(), 41)}
    backend.tell_lost("env 3", "why")
    assert caplog.messages[-1].endswith(
        "env 3 died before it served (why); starting another; 42 since this was said last"
    )


def test_a_session_that_is_ended_ends_its_actors_and_is_left_alone(threads: ThreadCluster) -> None:
    envs = make_vec(CountEnv, 2, backend="ray", num_workers=1)
    envs.reset(seed=0)
    envs.step([1, 1])
    threads.shutdown()
    with pytest.raises(WorkerDiedError, match="env 0 .*the Ray session that it lived in was ended"):
        envs.step([1, 1])
    envs.close()
    assert not any(actor.death for actor in threads.actors)


@pytest.mark.parametrize(
    ("options", "n_actors"),
    [({}, 4), ({"num_cpus": 1}, 4), ({"num_cpus": 0.5}, 6), ({"num_cpus": 2}, 2), ({"num_cpus": 0}, 4),
     ({"num_cpus": 9}, 1), ({"resources": {"sim": 1}}, 1), ({"num_cpus": 0, "resources": {"sim": 1}}, 3)],
    ids=str,
)  # fmt: skip
def test_there_are_as_many_actors_as_the_cluster_has_room_for(
    threads: ThreadCluster, options: dict[str, Any], n_actors: int
) -> None:
    threads.add_node({"CPU": 0.5, "sim": 3})
    threads.resources["n1"] = {"CPU": 2, "sim": 1}
    threads.resources["n2"] = {"CPU": 0.5, "sim": 2}
    backend = remote.RayBackend([CountEnv] * 6, None, Limits(), options)
    assert len(backend.workers) == n_actors
    assert backend.hopeless() is (options == {"num_cpus": 9})


def test_where_actors_go_is_wished_for_unless_the_caller_says_it(threads: ThreadCluster) -> None:
    for options, soft in (({}, True), ({"num_cpus": 1}, True), ({"num_cpus": 0}, False)):
        make_vec(CountEnv, 2, backend="ray", num_workers=2, ray_options=options).close()
        wishes = [actor.kind.strategy for actor in threads.actors[-2:]]
        assert [(wish.node_id, wish.soft) for wish in wishes] == [("n0", soft), ("n1", soft)]
    make_vec(CountEnv, 1, backend="ray", ray_options={"scheduling_strategy": "SPREAD"}).close()
    assert threads.actors[-1].kind.strategy is None
    assert threads.actors[-1].kind.given["scheduling_strategy"] == "SPREAD"
    assert len({id(actor) for actor in threads.actors if actor.death}) == len(threads.actors) == 7


class Closes(CountEnv):
    """Tells, when it is closed, whether the actors live."""

    told: ClassVar[list[bool]] = []

    def close(self) -> None:
        self.told.append(not any(actor.death for actor in sys.modules["ray"].actors))


def test_envs_are_closed_in_their_actors_before_those_are_killed(threads: ThreadCluster) -> None:
    make_vec([Closes, Closes], backend="ray", num_workers=1).close()
    assert Closes.told == [True, True]
    assert "it was killed" in str(threads.actors[0].death)


def test_a_command_that_an_actor_cannot_read_is_told_and_the_next_is_done(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", ["a", os.getcwd()])
    host = remote.Host(3, ["a", os.sep, "no such folder", os.getcwd()])
    assert sys.path == ["a", os.getcwd(), os.sep]
    data, rows = host.run(b"no pickle")
    (failure,) = remote.unpacked(data)[1].failures
    assert (failure.env, failure.doing, failure.pid, rows) == (3, "reading its command", os.getpid(), None)
    data, rows = host.run(remote.dumps(remote.Make(3, [CountEnv]))[0])
    assert len(remote.unpacked(data)[1].value) == 1
    assert rows is None
    assert host.run(remote.dumps(remote.Close())[0]) == (b"", None)
    host.thread.join(60)
    assert not host.thread.is_alive()


def refused() -> None:
    """Loads what `Unloadable` is."""
    raise ModuleNotFoundError("no such thing here")


class Unloadable:
    """An action that can be sent and not be read."""

    def __reduce__(self) -> Any:
        return refused, ()


def test_a_step_that_an_actor_cannot_read_is_one_of_none_of_its_envs(threads: ThreadCluster) -> None:
    envs = make_vec(CountEnv, 3, backend="ray", num_workers=1, on_failure="restart")
    envs.reset(seed=0)
    envs.step([1, 1, 1])
    envs.step_async_each([1, Unloadable(), 1])
    obs, rewards, _, truncated, infos = envs.step_wait()
    assert (obs[:, 2].tolist(), rewards.tolist(), truncated.tolist()) == ([0] * 3, [0.0] * 3, [True] * 3)
    assert [final[2] for final in infos["final_obs"]] == [1] * 3
    envs.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (str(dead_because("its node died")), "its node died"),
        ("  indented\none\n\ttwo\nthree", "three"),
        ("", "RayError"),
        ("x" * 400, "x" * 300),
    ],
)
def test_the_reason_of_a_death_is_one_line(text: str, reason: str) -> None:
    assert remote._reason(RayError(text)) == reason
