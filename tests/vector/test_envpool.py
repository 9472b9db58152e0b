"""EnvPool behind `make_vec`: against a double that answers in any order, and against EnvPool where it is installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
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

    def __init__(self, env_id: str, num_envs: int, seed: Any, batch_size: int = 0) -> None:
        self.config = {"max_num_players": 2 if env_id == "Duel" else 1, "batch_size": batch_size or num_envs}
        self.n, self.seeds = num_envs, np.array(seed if isinstance(seed, list) else [seed] * num_envs) % 500
        assert (self.seeds >= 0).all()
        self.t, self.waiting = np.zeros(num_envs, int), []

    def reset(self, ids: Any = None) -> Any:
        ids = np.arange(self.n) if ids is None else ids
        self.t[ids] = 0
        return self.rows(ids[::-1])[:2]

    def async_reset(self) -> None:
        self.t[:], self.waiting = -1, [(i, 0) for i in range(self.n)]

    def rows(self, ids: Any, actions: Any = 0) -> Any:
        obs = np.stack([self.seeds[ids], self.t[ids]], axis=1).astype(np.float32)
        infos = {"env_id": ids.astype(np.int32), "players": {}, "elapsed_step": self.t[ids].copy()}
        return obs, infos, actions * np.ones(len(ids), np.float32), self.t[ids] >= 3 + ids

    def send(self, actions: Any, ids: Any = None) -> None:
        self.waiting += list(zip(np.arange(self.n) if ids is None else ids, actions, strict=True))

    def recv(self) -> Any:
        size = min(self.config["batch_size"], len(self.waiting))
        taken, self.waiting = self.waiting[:size][::-1], self.waiting[size:]
        ids = np.array([i for i, _ in taken])
        over = self.t[ids] >= 3 + ids
        self.t[ids] = np.where(over, 0, self.t[ids] + 1)
        obs, infos, rewards, ended = self.rows(ids, np.array([a for _, a in taken]))
        return obs, rewards, ended, np.zeros(size, bool), infos


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_rows_of_an_envpool_reach_their_environments_in_whatever_order_they_come(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setitem(sys.modules, "envpool", types.SimpleNamespace(make_gymnasium=Shuffled))
    envs = native("envpool:Any-v0", 4, autoreset=mode)
    assert envs.reset(seed=[4, 3, 2, 1])[0][:, 0].tolist() == [4, 3, 2, 1]
    clock = np.zeros(4, int)
    for _ in range(12):
        obs, rewards, terminated, _, infos = envs.step([5, 6, 7, 8])
        over, clock = clock >= 3 + np.arange(4), clock + 1
        if mode == "next_step":
            clock[over] = 0
        assert terminated.tolist() == (clock >= 3 + np.arange(4)).tolist()
        if mode == "same_step":
            for i in np.flatnonzero(terminated).tolist():
                assert infos["final_obs"][i].tolist() == [4 - i, clock[i]]
            clock[terminated] = 0
        assert obs.tolist() == [[4 - i, clock[i]] for i in range(4)]
        assert infos["elapsed_step"].tolist() == clock.tolist()
        assert rewards.tolist() == [5, 6, 7, 8]
    mask = np.array([True, False, True, False])
    obs, infos = envs.reset(options={"reset_mask": mask})
    assert obs[:, 1].tolist() == np.where(mask, 0, clock).tolist()
    assert obs[:, 0].tolist() == [4, 3, 2, 1]
    envs.reset()
    assert hasattr(envs, "send") is (mode == "next_step")
    for step in range(1, 7) if mode == "next_step" else ():
        envs.send([3, 0], [1, 2])
        ready = envs.recv()
        assert ready.ids.tolist() == [0, 3]
        assert ready.rewards.tolist() == [2, 1]
        assert ready.observations.tolist() == [[4, step % 4], [1, step]]
    if mode == "next_step":
        envs.send([3, 0], [1, 2])
        with pytest.raises(EnvError, match=r"environments \[0, 3\] are in flight: recv them before a step"):
            envs.step([1] * 4)
        assert envs.reset()[0][:, 1].tolist() == [0] * 4  # of what was in flight nothing comes later
        assert envs.step([1] * 4)[0][:, 1].tolist() == [1] * 4
    with pytest.raises(ConfigError, match="one player"):
        native("envpool:Duel", 4)
    few = native("envpool:Any-v0", 4, env_kwargs={"batch_size": 2})
    with pytest.raises(EnvError, match=r"answers 2 of 4 at a time; use send_reset\(range"):
        few.reset()
    few.send_reset(range(4))
    assert [few.recv().observations[:, 1].tolist() for _ in range(2)] == [[0, 0], [0, 0]]
    few.send([2], [1])
    with pytest.raises(EnvError, match="needs 2 environments in flight, .* got 1; send more"):
        few.recv()  # EnvPool itself would wait for ever
    with pytest.raises(EnvError, match=r"environments \[2\] are in flight: recv them before send_reset, or"):
        few.send_reset(range(4))
    few.send([0], [1])
    few.send([3, 1], [4, 3])
    pairs = [
        pair
        for _ in range(2)
        for ready in [few.recv()]
        for pair in zip(ready.ids, ready.rewards, strict=True)
    ]
    assert sorted(pairs) == [(0, 1), (1, 3), (2, 1), (3, 4)]
    for ids in ([], [0, 0], [4], [-1]):
        with pytest.raises(ValueError, match=r"must be"):
            few.send(ids, [1] * len(ids))
    with pytest.raises(ValueError, match=r"got others from environments \[3\]"):
        few.send([2, 3], [1, 9])
    with pytest.raises(EnvError, match="needs 2 environments in flight, .* got 0"):
        few.recv()
    with pytest.raises(EnvError, match=r"all at once; use send_reset\(range"):
        few.send_reset([0, 1])
    few.send_reset([3, 2, 1, 0], seeds=[9, 8, 7, 6])
    ready = few.recv()
    assert ready.observations[:, 0].tolist() == [9 - i for i in ready.ids]
    few.send_reset(range(4), seeds=[5] * 4)  # which makes EnvPool anew, whatever is in flight
    assert few.recv().observations.tolist() == [[5, 0], [5, 0]]
    with pytest.raises(ConfigError, match="pass autoreset='next_step'"):
        native("envpool:Any-v0", 4, autoreset="same_step", env_kwargs={"batch_size": 2})
    fresh = native("envpool:Any-v0", 4, autoreset=mode)
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
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_envpool_keeps_seeds_masks_and_episodes(mode: str) -> None:
    pytest.importorskip("envpool")

    def make(**more: Any) -> Any:
        return native("envpool:CartPole-v1", 4, autoreset=mode, env_kwargs={"num_threads": 1, **more})

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
        obs, rewards, terminated, _, infos = envs.step([1, 1, 1, 1])
        clock = np.where(over, 0, clock + 1) if mode == "next_step" else clock + 1
        if mode == "same_step":
            for i in np.flatnonzero(terminated).tolist():
                ends += 1
                assert infos["final_info"]["elapsed_step"][i] == clock[i]
                assert abs(infos["final_obs"][i][2]) > 0.2  # it fell over (12 degrees are 0.2094)
                assert abs(obs[i]).max() <= 0.05  # and stands again
            clock[terminated] = 0
        else:
            assert rewards[over].tolist() == [0.0] * int(over.sum())
            ends += int(terminated.sum())
        assert infos["elapsed_step"].tolist() == clock.tolist()
        over = terminated
    assert ends > 10
    with pytest.raises(ConfigError, match="cannot be made"):
        native("envpool:NoSuch-v1")


@quiet_envpool
def test_envpool_steps_some_and_returns_whichever_are_ready() -> None:
    pytest.importorskip("envpool")
    envs, alone = (native("envpool:CartPole-v1", 4) for _ in range(2))
    envs.reset(seed=[3, 4, 5, 6])
    alone.reset(seed=[3, 4, 5, 6])
    for _ in range(25):
        want = alone.step([1] * 4)
        for ids in ([2, 0], [3, 1]):
            envs.send(ids, [1, 1])
            ready = envs.recv()
            assert ready.ids.tolist() == ids
            assert np.array_equal(ready.observations, want[0][ids])
            assert np.array_equal(ready.rewards, want[1][ids])
            assert np.array_equal(ready.terminated, want[2][ids])
            for k, i in enumerate(ids):
                assert ready.infos[k]["elapsed_step"] == want[4]["elapsed_step"][i]
    envs.send([0, 1], [1, 1])
    envs.send([3], [1])
    assert sorted(envs.recv().ids.tolist()) == [0, 1, 3]
    with pytest.raises(ValueError, match="not in flight"):
        envs.send([0, 0], [1, 1])
    with pytest.raises(EnvError, match="needs 1 environments in flight"):
        envs.recv()


@quiet_envpool
def test_envpool_with_a_batch_size_is_asynchronous_and_never_waits_for_what_was_not_sent() -> None:
    pytest.importorskip("envpool")
    with pytest.raises(ConfigError, match="pass autoreset='next_step'"):
        native("envpool:CartPole-v1", 5, autoreset="same_step", env_kwargs={"batch_size": 2})
    envs = native("envpool:CartPole-v1", 5, env_kwargs={"batch_size": 2})
    for call in (envs.reset, lambda: envs.send_reset([0])):
        with pytest.raises(EnvError, match=r"send_reset\(range"):
            call()
    envs.send_reset(range(5), seeds=[7] * 5)
    first, second = envs.recv(), envs.recv()
    assert len({row.tobytes() for row in [*first.observations, *second.observations]}) == 1  # the same seed
    with pytest.raises(EnvError, match="needs 2 environments in flight, .* got 1"):
        envs.recv()
    steps = np.zeros(5, int)
    envs.send(first.ids, [0, 0])
    ready = second
    for _ in range(30):
        envs.send(ready.ids, [0] * len(ready.ids))
        ready = envs.recv()
        for i, info in zip(ready.ids, ready.infos, strict=True):
            steps[i] += 1
            assert info["elapsed_step"] in (steps[i] - 1, steps[i], 0)
            steps[i] = info["elapsed_step"]
    assert len(ready.ids) == 2
