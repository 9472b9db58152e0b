"""Environments on Ray actors: the same results as in the caller, and failures that show."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from shoal.vector import make_vec
from tests.vector.faulty import CountEnv, Faulty
from tests.vector.scripted import Scripted
from tests.vector.test_equality import same

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize(
    "space", [spaces.Box(-1, 1, (2,)), spaces.Text(9), spaces.Dict(a=spaces.Discrete(3))]
)
def test_ray_gives_what_the_caller_itself_gives(space: Any, mode: str) -> None:
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
    chosen = [np.int64(1), np.int64(2)]
    assert same(
        [tuple(x) for x in far.step_some([1, 3], chosen)], [tuple(x) for x in near.step_some([1, 3], chosen)]
    )
    assert far.call("length") == near.call("length")
    far.close()
    near.close()


@pytest.mark.parametrize("fault", ["exit", "raise", "hang"])
def test_a_failed_actor_is_replaced_and_shows_it(fault: str) -> None:
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
    envs.close()


def test_whichever_actor_is_ready_first_comes_first() -> None:
    envs = make_vec(CountEnv, 4, backend="ray", num_workers=4)
    envs.reset(seed=0)
    envs.send(range(4), [1, 1, 1, 1])
    seen: list[int] = []
    while len(seen) < 4:
        seen += envs.recv(1).ids.tolist()
    assert sorted(seen) == [0, 1, 2, 3]
    envs.close()
