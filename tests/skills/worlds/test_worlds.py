from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from shoal.core.errors import ConfigError, EnvError, UnknownNameError
from shoal.skills.graph.launchers import job_environment
from shoal.skills.learning.trainer import TrainingConfig, default_config
from shoal.skills.spec import Features
from shoal.skills.worlds.crafting import CraftingWorld
from shoal.skills.worlds.gymnasium_world import GymnasiumWorld
from shoal.skills.worlds.registry import batch_lanes, make_world, world_features, world_of
from shoal.skills.worlds.world import Bank
from shoal.testing import check_world

REPO = Path(__file__).parents[3]
PAGE = (REPO / "docs" / "own-world.md").read_text()


@pytest.fixture
def corridor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page, beside each other."""
    blocks = dict(re.findall(r"```(python|yaml)\n(.*?)```", PAGE, re.DOTALL))
    (tmp_path / "corridor.py").write_text(blocks["python"])
    (tmp_path / "corridor.yaml").write_text(blocks["yaml"])
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("corridor", None)


def test_the_worlds_that_come_with_shoal_keep_the_promises() -> None:
    check_world(CraftingWorld)


def test_the_world_of_the_page_keeps_the_promises_and_is_found_by_its_name(corridor: Path) -> None:
    assert world_of("corridor:CorridorWorld") == "corridor:CorridorWorld"
    assert world_features("corridor:CorridorWorld").names == ("key", "door")
    assert default_config("corridor:CorridorWorld").num_envs == 32
    check_world(lambda lanes: make_world("corridor:CorridorWorld", lanes))
    assert len(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()) <= 40  # type: ignore[index]


@pytest.mark.slow
def test_the_page_on_ones_own_world_does_what_it_says(corridor: Path) -> None:
    command = re.search(r"```bash\nshoal (.*?)\n```", PAGE)[1].split()  # type: ignore[index]
    env = {**os.environ, **job_environment(2)}
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *command, "--evaluation-worlds", "64"],
        cwd=corridor, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    share = re.search(r"([0-9.]+)  of all worlds: the whole chain", done.stdout)
    assert share
    assert float(share[1]) >= 0.9
    assert "draws no pictures" in done.stderr


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("craftnig", UnknownNameError, "Did you mean 'crafting'"),
        ("nosuch:World", ConfigError, "no world 'nosuch:World'"),
        ("corridor:Nothing", ConfigError, "no world 'corridor:Nothing'"),
        ("corridor:Corridor", ConfigError, "needs `features = Features"),
    ],
)
def test_a_world_that_is_none_is_refused_by_name(corridor: Path, name: str, error, message: str) -> None:
    with pytest.raises(error, match=message):
        world_of(name)


def test_settings_and_sizes_of_a_world_are_known_without_making_it() -> None:
    assert default_config("crafting") == TrainingConfig(practice_horizon=150)
    for name in ("craftax", "craftax-classic"):
        config = default_config(name)
        assert (config.num_envs, config.layer_size, config.gamma, config.stroll) == (64, 128, 0.98, 8)
        assert (batch_lanes(name, 500), batch_lanes(name, 7)) == (64, 7)
    assert batch_lanes("crafting", 500) == 500
    for long, short in (
        ("Craftax-Classic-Symbolic-v1", "craftax-classic"),
        ("Craftax-Symbolic-v1", "craftax"),
    ):
        assert world_of(long) == world_of(short) == short


def broken(**change):
    return type("Broken", (CraftingWorld,), change)


def _forgetful(self, bank: Bank, rows, mask) -> None:
    CraftingWorld.load(self, Bank({**bank.arrays, "hands": bank.arrays["hands"] * 0}), rows, mask)


def _lucky(self, actions, rng):
    return CraftingWorld.step(self, np.random.default_rng().permutation(actions), rng)


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        ({"wait": 99}, "`wait` must be an action"),
        ({"moves": ()}, "`moves` must be actions"),
        ({"observe": lambda self: CraftingWorld.observe(self)[:, :-1]}, "must have shapes"),
        ({"values": lambda self: self.hands.astype(np.float64)}, "must be float32"),
        ({"values": lambda self: self.hands + 10}, "must not be more than can be held"),
        (
            {"load": lambda self, bank, rows, mask: CraftingWorld.load(self, bank, rows, mask | True)},
            "outside its mask",
        ),
        (
            {"mirrors": ((range(CraftingWorld.obs_size), [0] * CraftingWorld.n_actions),)},
            "`mirrors` must be pairs",
        ),
        ({"mirrors": ((range(3), range(CraftingWorld.n_actions)),)}, "`mirrors` must be pairs"),
        ({"load": _forgetful}, "must look the same in another world"),
        ({"step": _lucky}, "must be a function of state, action and random numbers"),
        ({"fresh": lambda self, n, rng: CraftingWorld.fresh(self, n + 1, rng)}, "must give n states"),
        (
            {"fresh": lambda self, n, rng: CraftingWorld.fresh(self, n, np.random.default_rng())},
            "a function of its",
        ),
    ],
)
def test_a_broken_promise_is_named(change: dict, promise: str) -> None:
    with pytest.raises(AssertionError, match=promise):
        check_world(broken(**change), steps=60)


class Steps(gymnasium.Env):
    """Counts its steps from a number that its seed gives."""

    observation_space, action_space = Box(0, 1e6, (1,), np.float32), Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(1000))
        return self.look(), {}

    def look(self):
        return np.array([self.number], np.float32)

    def step(self, action):
        self.number += int(action)
        return self.look(), 0.0, False, False, {}


class FiveSteps(GymnasiumWorld):
    """Its envs are over after five steps."""

    features = Features("steps", ("far",), {}, frozenset())

    def make(self):
        return gymnasium.wrappers.TimeLimit(Steps(), 5)

    def read(self, env):
        return [env.unwrapped.number >= 1000]


class Copied(FiveSteps):
    """As the page says: an env that can copy its state overrides `freeze` and `thaw`."""

    def make(self):
        return Steps()

    def freeze(self, lane):
        return {"number": np.int64(self._envs[lane].number)}

    def thaw(self, lane, state):
        self._envs[lane].number = int(state["number"])
        return self._envs[lane].look()


def lanes_of(world, bank: Bank) -> np.ndarray:
    world.load(bank, np.arange(world.lanes), np.ones(world.lanes, np.bool_))
    return world.observe()[:, 0]


def test_an_env_that_is_over_stays_so_when_its_state_is_put_back(rng) -> None:
    world, other = FiveSteps(2), FiveSteps(2)
    starts = world.fresh(2, rng)
    begin = lanes_of(world, starts)
    for _ in range(6):
        world.step(np.ones(2, np.int64), rng)
    end = world.save()
    for one in (world, other):
        assert lanes_of(one, end).tolist() == (begin + 5).tolist()
        one.step(np.ones(2, np.int64), rng)
        assert one.observe()[:, 0].tolist() == (begin + 5).tolist()
        assert lanes_of(one, starts).tolist() == begin.tolist()
        one.step(np.ones(2, np.int64), rng)
        assert one.observe()[:, 0].tolist() == (begin + 1).tolist()


def test_a_world_that_copies_its_states_has_new_worlds_and_never_stands_still(rng) -> None:
    check_world(Copied)
    world = Copied(2)
    starts = world.fresh(2, rng)
    begin = lanes_of(world, starts)
    assert begin[0] != begin[1]
    for _ in range(2500):  # more than a state may be away that is put back by playing again
        world.step(np.ones(2, np.int64), rng)
    assert world.observe()[:, 0].tolist() == (begin + 2500).tolist()
    world.fresh(2, rng)  # leaves the lanes as they are
    world.step(np.ones(2, np.int64), rng)
    assert world.observe()[:, 0].tolist() == (begin + 2501).tolist()


class CopiedUntilFive(Copied):
    """Copies its state, of which that it is over is no part."""

    def make(self):
        env = Steps()
        env.step = lambda action: (*Steps.step(env, action)[:2], env.number % 1000 >= 5, False, {})  # type: ignore[method-assign]
        return env

    def fresh(self, count, rng):
        bank = super().fresh(count, rng)
        return Bank({**bank.arrays, "number": bank.arrays["number"] * 0})


def test_an_env_that_was_over_is_so_again_where_a_world_copies_its_states(rng) -> None:
    world, other = CopiedUntilFive(2), CopiedUntilFive(2)
    starts = world.fresh(2, rng)
    assert lanes_of(world, starts).tolist() == [0, 0]
    died = [world.step(np.array([1, t % 2]), rng).tolist() for t in range(6)]
    assert died == [[False, False]] * 4 + [[True, False], [False, False]]
    end = world.save()
    for one in (world, other):
        assert lanes_of(one, end).tolist() == [5, 3]
        one.step(np.ones(2, np.int64), rng)
        assert one.observe()[:, 0].tolist() == [5, 4]
    assert lanes_of(world, starts).tolist() == [0, 0]
    world.step(np.ones(2, np.int64), rng)
    assert world.observe()[:, 0].tolist() == [1, 1]


def test_a_world_that_reads_too_little_is_refused(rng) -> None:
    class Short(FiveSteps):
        features = Features("steps", ("far", "near"), {}, frozenset())

    world = Short(1)
    with pytest.raises(
        ConfigError, match=r"Short.read must give a number for each of far, near, got \[False\]"
    ):
        world.load(world.fresh(1, rng), np.zeros(1, np.int64), np.ones(1, np.bool_))


class EndsInWords(FiveSteps):
    def make(self):
        env = Steps()
        env.step = lambda action: (*Steps.step(env, action)[:2], "False", False, {})  # type: ignore[method-assign]
        return env


def test_an_end_in_words_is_refused_when_a_world_steps_and_when_it_plays_again(rng) -> None:
    world = EndsInWords(1)
    start = world.fresh(1, rng)
    lanes_of(world, start)
    with pytest.raises(EnvError, match="terminated must be True or False, got 'False'"):
        world.step(np.zeros(1, np.int64), rng)
    other = FiveSteps(1)
    lanes_of(other, start)
    other.step(np.zeros(1, np.int64), rng)
    with pytest.raises(EnvError, match="terminated must be True or False, got 'False'"):
        lanes_of(world, other.save())


class FromTwo(FiveSteps):
    """Its actions are 2, 3 and 4."""

    def make(self):
        env = Steps()
        env.action_space = Discrete(3, start=2)
        return env


def test_a_world_of_an_env_knows_its_actions_from_nought_and_what_suits_it(rng) -> None:
    world = FromTwo(3)
    assert (world.n_actions, world.obs_size, world.wait, list(world.moves)) == (3, 1, 0, [0, 1, 2])
    assert world.action_names == ("0", "1", "2")
    begin = lanes_of(world, world.fresh(3, rng))
    assert not world.step(np.array([0, 1, 2]), rng).any()
    assert (world.observe()[:, 0] - begin).tolist() == [2, 3, 4]
    assert (FromTwo.most_lanes, FromTwo.training["num_envs"], FromTwo.training["num_steps"]) == (64, 32, 64)
    boxes = type("Boxes", (FiveSteps,), {"make": lambda self: SimpleNamespace(
        action_space=Box(0, 1, (1,)), observation_space=Steps.observation_space)})  # fmt: skip
    with pytest.raises(ConfigError, match=r"needs Discrete actions, Boxes has Box\(0"):
        boxes(1)


@pytest.mark.parametrize(("reward", "terminated", "died"), [(0.0, True, True), (-1.0, True, True), (0.5, True, False),
                                                            (-1.0, False, False)])  # fmt: skip
def test_who_ends_unrewarded_has_died(reward: float, terminated: bool, died: bool) -> None:
    assert FiveSteps(1).death(Steps(), reward, terminated) == died


def test_a_state_that_is_played_again_stays_within_what_can_be_kept(rng) -> None:
    class Endless(FiveSteps):
        def make(self):
            return Steps()

    world = Endless(1)
    begin = lanes_of(world, world.fresh(1, rng))
    for _ in range(2003):
        world.step(np.ones(1, np.int64), rng)
    assert world.observe()[:, 0].tolist() == (begin + 2000).tolist()  # where it stands still
    other = Endless(1)
    assert lanes_of(other, world.save()).tolist() == (begin + 2000).tolist()
