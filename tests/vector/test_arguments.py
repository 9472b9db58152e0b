"""Wrong arguments are refused as Gymnasium's own vector environments refuse them, and do no harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from shoal.vector import AsyncVectorEnv, make_vec
from tests.vector.faulty import CountEnv

MAKERS: dict[str, Callable[[], Any]] = {
    "gymnasium": lambda: SyncVectorEnv([CountEnv] * 3, autoreset_mode=AutoresetMode.DISABLED),
    "async": lambda: AsyncVectorEnv([CountEnv] * 3, autoreset_mode=AutoresetMode.DISABLED),
    "serial": lambda: make_vec(CountEnv, 3, backend="serial", autoreset="disabled"),
    "process": lambda: make_vec(CountEnv, 3, backend="process", autoreset="disabled"),
}


@pytest.fixture(params=MAKERS)
def envs(request: pytest.FixtureRequest) -> Any:
    made = MAKERS[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("actions", "error"),
    [
        (np.array([1, 1]), ValueError),
        (np.array([1, 1, 1, 1]), ValueError),
        ([1, 1], ValueError),
        (1, TypeError),
        (np.int64(1), TypeError),
    ],
)
def test_actions_that_are_not_one_for_each_env_are_refused(envs: Any, actions: Any, error: Any) -> None:
    envs.reset(seed=0)
    with pytest.raises(error):
        envs.step(actions)
    if not isinstance(envs, SyncVectorEnv):  # (Gymnasium's has stepped some of them by then)
        assert envs.step(np.array([1, 2, 3]))[1].tolist() == [11.0, 21.0, 31.0]


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.array([True]), ValueError, r"must have shape `\(3,\)`, got \(1,\)"),
        (np.array([[True, True, True]]), ValueError, r"must have shape `\(3,\)`, got \(1, 3\)"),
        (np.array([False] * 3), ValueError, r"at least one True value, got reset_mask=\[False False False\]"),
        (np.array([1, 1, 0]), TypeError, r"must have `dtype=np.bool_`, got int64"),
        ([True, True, False], TypeError, "reset_mask"),
    ],
)
def test_masks_that_name_no_env_are_refused_in_gymnasiums_words(
    envs: Any, mask: Any, error: Any, message: str
) -> None:
    envs.reset(seed=0)
    envs.step(np.array([1, 1, 1]))
    with pytest.raises((error, AssertionError), match=message):
        envs.reset(options={"reset_mask": mask})
    assert envs.step(np.array([0, 0, 0]))[1].tolist() == [2.0, 2.0, 2.0]  # nobody was reset
