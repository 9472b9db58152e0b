import json
import warnings
from collections import Counter

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, UnknownNameError
from shoal.envs.frozen_lake import MAPS, FrozenLakeEnv

# gymnasium counts 0 left, 1 down, 2 right, 3 up; ours are one higher.


def reachable(desc):
    """Cells that can be reached from S over ice, found by repeated sweeps."""
    size = (len(desc), len(desc[0]))
    seen = {(r, c) for r in range(size[0]) for c in range(size[1]) if desc[r][c] == "S"}
    grew = True
    while grew:
        near = {(r + dr, c + dc) for r, c in seen for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        near = {(r, c) for r, c in near if 0 <= r < size[0] and 0 <= c < size[1] and desc[r][c] != "H"}
        grew = not near <= seen
        seen |= near
    return seen


@settings(max_examples=150)
@given(st.integers(0, 2**40), st.integers(2, 8), st.floats(0.05, 1), st.booleans())
def test_every_random_lake_has_one_start_one_goal_and_a_dry_way(seed, size, p, anywhere):
    env = FrozenLakeEnv(size=size, p=p, random_start_goal=anywhere)
    observation, _ = env.reset(seed=seed)
    assert Counter("".join(env.desc))["S"] == Counter("".join(env.desc))["G"] == 1
    goal = next((r, row.index("G")) for r, row in enumerate(env.desc) if "G" in row)
    assert goal in reachable(env.desc)
    assert observation.count("P") == observation.count("G") == 1
    if not anywhere:
        assert (env.position, goal) == ((0, 0), (size - 1, size - 1))


@settings(max_examples=60)
@given(st.integers(0, 2**40), st.lists(st.integers(1, 4), max_size=60))
def test_on_firm_ice_every_step_is_that_of_gymnasium(seed, actions):
    env = FrozenLakeEnv(is_slippery=False, size=5)
    env.reset(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = gymnasium.make("FrozenLake-v1", desc=list(env.desc), is_slippery=False)
    theirs.reset()
    for action in actions:
        _, reward, terminated, _, info = env.step(action)
        place, their_reward, their_end, _, _ = theirs.step(action - 1)
        assert (env.position, reward, terminated) == (divmod(place, 5), their_reward, their_end)
        assert info["success"] == (reward == 1)
        if terminated:
            break


def test_the_fixed_maps_are_those_of_gymnasium():
    from gymnasium.envs.toy_text.frozen_lake import MAPS as THEIRS

    assert {name: list(rows) for name, rows in MAPS.items()} == THEIRS


@pytest.mark.parametrize("success_rate", [1 / 3, 0.7])
def test_slipping_goes_each_way_as_often_as_stated(success_rate):
    """Chi-square with 2 degrees of freedom; 13.8 is passed by chance once in 1000, and the seed is fixed."""
    env = FrozenLakeEnv(desc=("FFF", "FSF", "FFG"), success_rate=success_rate, max_steps=1)
    for action, ways in (
        (1, "left up down"),
        (2, "down left right"),
        (3, "right down up"),
        (4, "up right left"),
    ):
        where = {"left": (1, 0), "down": (2, 1), "right": (1, 2), "up": (0, 1)}
        seen = Counter()
        n = 3000
        for seed in range(n):
            env.reset(seed=seed)
            env.step(action)
            seen[env.position] += 1
        meant, *aside = (where[way] for way in ways.split())
        expected = {meant: n * success_rate, **dict.fromkeys(aside, n * (1 - success_rate) / 2)}
        assert sum((seen[cell] - count) ** 2 / count for cell, count in expected.items()) < 13.8
        assert sum(seen.values()) == n


def test_cells_of_a_random_lake_are_ice_as_often_as_stated():
    """Corners to corners on 8x8, p = 0.9: the accepted lakes are a few per cent icier than 0.9."""
    cells = Counter()
    for seed in range(300):
        env = FrozenLakeEnv(size=8, p=0.9, random_start_goal=False)
        env.reset(seed=seed)
        cells.update("".join(env.desc))
    share = cells["F"] / (cells["F"] + cells["H"])
    assert 0.89 < share < 0.93


def test_the_symbols_of_a_walk_on_a_fixed_lake():
    env = FrozenLakeEnv(desc="4x4", is_slippery=False)
    assert env.reset(seed=0)[0] == "P___\n_O_O\n___O\nO__G"
    for action in (2, 2, 3, 3, 2):
        env.step(action)
    observation, reward, terminated, truncated, info = env.step(3)
    assert (observation, reward, terminated, truncated) == ("____\n_O_O\n___O\nO__√", 1.0, True, False)
    assert info["success"]
    assert info["available_actions"] == []
    env.reset(seed=0)
    env.step(2)
    observation, reward, terminated, _, info = env.step(3)
    assert (observation, reward, terminated) == ("____\n_X_O\n___O\nO__G", 0.0, True)
    assert not info["success"]


def test_start_and_goal_can_be_moved_on_a_fixed_lake():
    env = FrozenLakeEnv(desc=["SFF", "FHF", "FFG"], start=(2, 0), goal=(0, 2), is_slippery=False)
    assert env.reset(seed=1)[0] == "__G\n_O_\nP__"
    assert json.loads(json.dumps(env.desc)) == ["FFG", "FHF", "SFF"]


def test_a_fixed_lake_can_be_given_as_rows_lines_cells_or_gymnasiums_array():
    rows = ["SFF", "FHF", "FFG"]
    array = np.asarray(rows, dtype="c")
    for desc in (rows, tuple(rows), "SFF\nFHF\nFFG\n", [list(row) for row in rows], array):
        assert FrozenLakeEnv(desc=desc).reset(seed=0)[0] == "P__\n_O_\n__G"


def test_map_seed_keeps_the_lake_and_leaves_the_slipping_to_the_episode():
    env = FrozenLakeEnv(map_seed=5)
    lakes, ends = set(), set()
    for seed in range(30):
        env.reset(seed=seed)
        lakes.add(env.desc)
        env.step(3)
        ends.add(env.position)
    assert len(lakes) == 1
    assert len(ends) > 1


def test_array_observations_agree_with_the_text():
    for kind in ("index", "grid", "rgb"):
        env = FrozenLakeEnv(observation=kind, render_mode="ansi", is_slippery=False, size=4)
        observation, _ = env.reset(seed=3)
        for action in (1, 2, 3, 4, 3, 2):
            assert env.observation_space.contains(observation)
            rows = env.render().split("\n")
            if kind == "index":
                assert rows[observation // 4][observation % 4] in "PX√"
            if kind == "grid":
                assert ["".join("_OGPX√"[cell] for cell in row) for row in observation] == rows
            observation, _, terminated, _, _ = env.step(action)
            if terminated:
                break


@pytest.mark.parametrize(
    "settings",
    [
        {"size": 1},
        {"p": 0.0},
        {"success_rate": 2},
        {"desc": ["SF", "F"]},
        {"desc": ["SX", "FG"]},
        {"desc": ["SF", "FF"]},
        {"start": (0, 0), "goal": (0, 0)},
        {"desc": "4x4", "goal": (4, 0)},
        {"desc": "4x4", "goal": (0, 0)},
        {"observation": "smell"},
    ],
)
def test_a_config_that_cannot_work_is_refused(settings):
    with pytest.raises(ConfigError):
        FrozenLakeEnv(**settings)


def test_an_unknown_map_is_named_with_the_known_ones():
    with pytest.raises(UnknownNameError, match="4x4, 8x8"):
        FrozenLakeEnv(desc="5x5")
