"""EnvPool behind `make_vec`: against a double that answers in any order, and against EnvPool where it is installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode

from shoal.core.errors import ConfigError, EnvError, MissingExtraError
from tests.vector.test_native import check_seeds, native

quiet_envpool = pytest.mark.filterwarnings("ignore:.*precision lowered")  # by spaces that EnvPool makes


@pytest.mark.skipif(importlib.util.find_spec("envpool") is not None, reason="EnvPool is here")
def test_a_package_that_is_missing_is_named_with_its_command() -> None:
    with pytest.raises(MissingExtraError, match='envpool envs need a package: run pip install "envpool"'):
        native("envpool:Pong-v5")


class Shuffled:
    """What `envpool.make_gymnasium` gives, as far as it is used here: rows come in any order, with `env_id`."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    render_mode = None
    observation_space = spaces.Box(-1, 999, (2,), np.float32)
    action_space = spaces.Discrete(9)

    def __init__(self, env_id: str, num_envs: int, seed: Any) -> None:
        self.config = {"max_num_players": 2 if env_id == "Duel" else 1}
        self.n, self.seeds = num_envs, np.array(seed if isinstance(seed, list) else [seed] * num_envs) % 500
        assert (self.seeds >= 0).all()
        self.t, self.waiting = np.zeros(num_envs, int), []

    def reset(self, ids: Any = None) -> Any:
        ids = np.arange(self.n) if ids is None else ids
        self.t[ids] = 0
        return self.rows(ids[::-1])[:2]

    def rows(self, ids: Any, actions: Any = 0) -> Any:
        obs = np.stack([self.seeds[ids], self.t[ids]], axis=1).astype(np.float32)
        infos = {"env_id": ids.astype(np.int32), "players": {}, "elapsed_step": self.t[ids].copy()}
        return obs, infos, actions * np.ones(len(ids), np.float32), self.t[ids] >= 3 + ids

    def send(self, actions: Any, ids: Any = None) -> None:
        self.waiting += list(zip(np.arange(self.n) if ids is None else ids, actions, strict=True))

    def recv(self) -> Any:
        taken, self.waiting = self.waiting[::-1], []
        ids = np.array([i for i, _ in taken])
        over = self.t[ids] >= 3 + ids
        self.t[ids] = np.where(over, 0, self.t[ids] + 1)
        obs, infos, rewards, ended = self.rows(ids, np.array([a for _, a in taken]))
        return obs, rewards, ended, np.zeros(len(ids), bool), infos


def test_rows_of_an_envpool_reach_their_environments_in_whatever_order_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "envpool", types.SimpleNamespace(make_gymnasium=Shuffled))
    envs = native("envpool:Any-v0", 4)
    assert envs.reset(seed=[4, 3, 2, 1])[0][:, 0].tolist() == [4, 3, 2, 1]
    clock = np.zeros(4, int)
    for _ in range(12):
        obs, rewards, terminated, _, infos = envs.step([5, 6, 7, 8])
        over, clock = clock >= 3 + np.arange(4), clock + 1
        clock[over] = 0
        assert terminated.tolist() == (clock >= 3 + np.arange(4)).tolist()
        assert obs.tolist() == [[4 - i, clock[i]] for i in range(4)]
        assert infos["elapsed_step"].tolist() == clock.tolist()
        assert rewards.tolist() == [5, 6, 7, 8]
    mask = np.array([True, False, True, False])
    obs, infos = envs.reset(options={"reset_mask": mask})
    assert obs[:, 1].tolist() == np.where(mask, 0, clock).tolist()
    assert obs[:, 0].tolist() == [4, 3, 2, 1]
    envs.reset()
    envs.step_async([1] * 4)
    with pytest.raises(AlreadyPendingCallError):
        envs.reset()
    envs.step_wait()
    with pytest.raises(ConfigError, match="one player"):
        native("envpool:Duel", 4)
    with pytest.raises(ConfigError, match="all environments are stepped at once: leave batch_size out"):
        native("envpool:Any-v0", 4, env_kwargs={"batch_size": 2})
    fresh = native("envpool:Any-v0", 4)
    fresh.reset(seed=7)
    assert fresh.reset(seed=[1, 2, 2**31, -5])[0][:2, 0].tolist() == [1, 2]
    for wrong in ({"options": {"speed": 2}}, {"options": {"reset_mask": mask}, "seed": 3}):
        with pytest.raises(EnvError, match="ValueError: expected a reset_mask or a seed, got"):
            fresh.reset(**wrong)
        fresh.reset()
    large = [5, 2**31, 2**31 + 1, -1]  # EnvPool knows seeds of 31 bits
    assert fresh.reset(seed=large)[0][0, 0] == 5
    assert len(set(fresh.reset(seed=large)[0][:, 0].tolist())) == 4


@quiet_envpool
def test_envpool_keeps_seeds_masks_and_episodes() -> None:
    pytest.importorskip("envpool")

    def make(**more: Any) -> Any:
        return native("envpool:CartPole-v1", 4, env_kwargs={"num_threads": 1, **more})

    check_seeds(make, 2)
    envs = make()
    assert envs.action_space.shape == (4,)  # batched, unlike EnvPool's own
    envs.reset(seed=0)
    before, *_ = envs.step([0, 1, 0, 1])
    after, infos = envs.reset(options={"reset_mask": np.array([False, True, False, True])})
    assert [np.array_equal(after[i], before[i]) for i in range(4)] == [True, False, True, False]
    assert infos["_elapsed_step"].tolist() == [False, True, False, True]
    with pytest.raises(ValueError, match="expected actions"):
        envs.step([0, 0, 0])  # inside, this would end the process
    clock, ends, over = np.zeros(4, int), 0, np.zeros(4, bool)
    envs.reset(seed=0)
    for _ in range(60):
        _, rewards, terminated, _, infos = envs.step([1, 1, 1, 1])
        clock = np.where(over, 0, clock + 1)
        assert rewards[over].tolist() == [0.0] * int(over.sum())
        ends += int(terminated.sum())
        assert infos["elapsed_step"].tolist() == clock.tolist()
        over = terminated
    assert ends > 10
    with pytest.raises(ConfigError, match="cannot be made"):
        native("envpool:NoSuch-v1")
