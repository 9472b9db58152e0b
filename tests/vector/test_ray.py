"""Environments in Ray actors: the same results as in the caller, and failures that show."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from shoal.core.errors import MissingExtraError, WorkerDiedError, WorkerTimeoutError
from tests.vector.faulty import CountEnv, Faulty, one_faulty
from tests.vector.same_step import make_vec
from tests.vector.scripted import Scripted, SlowEnv, same


def on_ray(test: Any) -> Any:
    """Marks a test that starts Ray."""
    return pytest.mark.slow(pytest.mark.ray(pytest.mark.filterwarnings("ignore")(test)))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray on this machine, whose workers find shoal as on a user's cluster: installed."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(str(Path(item).resolve()) for item in sys.path if item))
        ray.shutdown()  # what a test before left running
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


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

b = make_vec(lambda: Mine(), 1, backend="ray")
b.reset()
obs, rewards, _, _, infos = b.step([1])
assert rewards.tolist() == [1.0] and infos["pid"][0] != os.getpid()
b.close()
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
    print(type(error).__name__)
d.close()
assert not ray.is_initialized(), "nothing starts it again"
print("done")
"""


@on_ray
def test_ray_is_started_where_it_does_not_run_and_its_end_is_noticed() -> None:
    pytest.importorskip("ray")
    path = os.pathsep.join(str(Path(item).resolve()) for item in sys.path if item)
    ran = subprocess.run(
        [sys.executable, "-c", SESSION],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.stdout.split()[-2:] == ["WorkerDiedError", "done"], ran.stderr[-3000:]


@on_ray
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
    for envs in (far, near):
        envs.set_attr("length", [1, 2, 3, 4, 5])
    assert far.apply(lambda env, k: env.length + k, 10, indices=[4, 1]) == [15, 12]
    far.close()
    near.close()


@on_ray
@pytest.mark.parametrize("fault", ["exit", "raise", "hang", "info"])
def test_a_failed_actor_is_replaced_and_shows_it(cluster: Any, fault: str) -> None:
    fns = one_faulty(fault, 3)
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


@on_ray
def test_deaths_and_hangs_are_named(cluster: Any) -> None:
    envs = make_vec(functools.partial(Faulty, "exit"), 2, backend="ray", num_workers=1)
    envs.reset(seed=0)
    with pytest.raises(WorkerDiedError, match="Ray actor is gone.*or it was the fault of env 1"):
        envs.step([9, 1])
    assert envs.reset(seed=3)[0][:, 0].tolist() == [3, 4]
    envs.close()
    slow = make_vec(functools.partial(SlowEnv, 60.0), 1, backend="ray", step_timeout=0.5)
    slow.reset(seed=0)
    with pytest.raises(WorkerTimeoutError, match=r"no answer within 0\.5 s"):
        slow.step([1])
    slow.close()


@on_ray
def test_whichever_actor_is_ready_first_comes_first(cluster: Any) -> None:
    envs = make_vec([functools.partial(SlowEnv, s) for s in (2.0, 0.0)], backend="ray", num_workers=2)
    envs.reset(seed=0)
    envs.send([0, 1], [1, 1])
    assert envs.recv().ids.tolist() == [1]
    assert envs.recv().ids.tolist() == [0]
    envs.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_cpu": 1}, "Invalid option keyword num_cpu .*num_cpus"),
        ({"scheduling_strategy": "SPRAED"}, "Invalid scheduling_strategy value SPRAED.*SPREAD"),
    ],
)
def test_options_that_ray_does_not_know_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_vec(CountEnv, 1, backend="ray", ray_options=options)


def test_without_ray_the_extra_is_named(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"\[parallel\]"):
        make_vec(CountEnv, 1, backend="ray")
