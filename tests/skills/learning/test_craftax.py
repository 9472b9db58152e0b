"""The same specs and the same code in Craftax-Classic and Craftax; needs the extra "craftax" and some minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import MissingExtraError
from shoal.skills.jobs.runner import job_environment
from shoal.skills.learning.craftax import (
    ACHIEVEMENTS,
    CLASSIC_ACTIONS,
    CraftaxWorld,
    _compass,
    features_of,
)
from shoal.skills.learning.proposers import knowledge_base
from shoal.skills.learning.spec import Step, load_skills, plan_for
from shoal.skills.learning.worlds import Bank

try:
    import craftax  # noqa: F401

    INSTALLED = True
except ImportError:
    INSTALLED = False
needs_craftax = pytest.mark.skipif(not INSTALLED, reason="craftax is not installed")


@pytest.mark.skipif(INSTALLED, reason="craftax is installed")
def test_without_the_extra_the_error_names_it() -> None:
    with pytest.raises(MissingExtraError, match=r"shoal\[craftax\]"):
        CraftaxWorld("craftax-classic", 1)


def test_features_are_known_without_craftax() -> None:
    features = features_of("craftax-classic")
    assert (
        len(features.names) == len(set(features.names)) == 12 + 22 + 2 + 3 + 9
    )  # held, achievements, places, needs, senses
    assert features.holds("wood") == 9
    assert features.holds("place_table") == 1
    full = features_of("craftax")
    assert (
        len(full.names) == len(set(full.names)) == 11 + 2 + 1 + 67 + 2 + 3 + 12
    )  # counted, levels, potions, achievements, places, needs, senses
    assert full.holds("wood") == 99
    assert full.holds("pickaxe") == 4
    assert full.holds("enter_dungeon") == 1
    assert full.holds("calm") == 9


@needs_craftax
def test_the_words_for_achievements_and_actions_are_those_of_craftax() -> None:
    from craftax.craftax.constants import Achievement, Action

    assert list(ACHIEVEMENTS) == [one.name.lower() for one in sorted(Achievement, key=lambda one: one.value)]
    assert list(features_of("craftax").actions) == [action.name.lower() for action in Action]


def test_a_furnace_is_placed_wherever_one_stands_with_a_stone() -> None:
    features = features_of("craftax")
    skills = load_skills(knowledge_base("craftax"), features)
    assert plan_for("Place Furnace", skills, features, hands={"stone": 1}) == [Step("Place Furnace", 1)]


def test_who_waits_or_strolls_does_so_by_actions_of_those_names() -> None:
    assert CLASSIC_ACTIONS[CraftaxWorld.wait] == "noop"
    assert [CLASSIC_ACTIONS[move] for move in CraftaxWorld.moves] == ["left", "right", "up", "down"]


@needs_craftax
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["craftax-classic", "craftax"])
def test_a_world_of_craftax_steps_saves_and_reads_its_features(name: str) -> None:
    import jax
    from craftax.craftax_env import make_craftax_env_from_name

    world = CraftaxWorld(name, 4)
    rng = np.random.default_rng(0)
    bank = world.fresh(6, rng)
    assert len(bank) == 6
    world.load(bank, np.array([5, 1, 2, 3]), np.ones(4, bool))
    assert (world.save().arrays["000"][0] == bank.arrays["000"][5]).all()
    for _ in range(30):
        world.step(rng.integers(0, world.n_actions, 4), rng)
    state = jax.tree.map(jax.numpy.asarray, world.state_of(world.save()))
    env = make_craftax_env_from_name(
        {"craftax": "Craftax-Symbolic-v1", "craftax-classic": "Craftax-Classic-Symbolic-v1"}[name],
        auto_reset=False,
    )
    shown = np.asarray(env.get_obs(state), np.float32)
    behind = 22 if name == "craftax-classic" else 51
    rest = world.feature_columns["wood"] + np.arange(behind)
    np.testing.assert_allclose(world.observe()[0, rest], shown[-behind:], atol=1e-6)
    if name == "craftax-classic":
        assert world.former_sizes == (1345,)
        np.testing.assert_allclose(world.observe()[0, :1345], shown, atol=1e-6)
    see = _compass(name)
    # What stands in the column of a feature moves with that feature and with no other.
    for feature, column in world.feature_columns.items():
        changed = world.save()
        held = state.replace(inventory=state.inventory.replace(**{feature: 3}))
        none = state.replace(inventory=state.inventory.replace(**{feature: 0}))
        moved = np.flatnonzero(np.asarray(see(env.get_obs(held))) != np.asarray(see(env.get_obs(none))))
        assert list(moved) == [column], feature
        assert len(changed) == 4
        assert world._read(held)[world.features.index(feature)] == 3


@needs_craftax
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_skills_of_craftax_classic_are_learned(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "skills", "train", "--env_name", "Craftax-Classic-Symbolic-v1"]
    options = ["--max_nodes", "4", "--max_parallel_skills", "2", "--evaluation-worlds", "128"]
    env = {**os.environ, **job_environment(2), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache" / "jax")}
    subprocess.run(
        [*command, *options, "--graph-path", str(tmp_path / "run"), "--no-film"], check=True, env=env
    )
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert metrics["skills_completed"] == 4
    assert metrics["chain_success"] >= 0.75


@needs_craftax
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_senses_of_craftax_classic_are_what_a_plain_count_gives() -> None:
    from craftax.craftax_classic.constants import BlockType

    world = CraftaxWorld("craftax-classic", 8)
    assert world.action_names == world.features.actions
    rng = np.random.default_rng(1)
    world.load(world.fresh(8, rng), np.arange(8), np.ones(8, bool))
    met = set()
    for _ in range(120):
        world.step(rng.integers(1, 6, 8), rng)
        values, bank = world.values(), world.save()
        for lane in range(0, 8, 3):
            state = world.state_of(bank.take(np.array([lane])))
            near = sight(np.asarray(state.map), np.asarray(state.player_position), BlockType)
            for name, most in (("cow", 3), ("zombie", 5)):
                mobs = getattr(state, f"{name}s")
                away = [
                    (abs(y) + abs(x), int(health))
                    for (y, x), alive, health in zip(
                        np.asarray(mobs.position) - np.asarray(state.player_position), mobs.mask, mobs.health,
                        strict=True,
                    )
                    if alive and abs(y) <= 3 and abs(x) <= 4
                ]  # fmt: skip
                near[f"toward_{name}"] = max((9 - steps + most - health for steps, health in away), default=0)
                if name == "zombie":
                    near["calm"] = min(2 * min((steps for steps, _ in away), default=9), 9)
            near["health"] = int(state.player_health)
            found = {name: values[lane, world.features.index(name)] for name in near}
            assert found == near
            met |= {name for name, value in near.items() if value not in (0, 9)}
    assert {"toward_tree", "toward_water", "toward_cow", "toward_zombie", "calm", "health"} <= met


@needs_craftax
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ways_behind_an_observation_are_what_a_plain_look_at_its_cells_gives() -> None:
    world = CraftaxWorld("craftax-classic", 8)
    (seen,) = world.former_sizes
    rng = np.random.default_rng(3)
    world.load(world.fresh(8, rng), np.arange(8), np.ones(8, bool))
    met, looks = set(), set()
    for _ in range(150):
        world.step(rng.integers(1, 6, 8), rng)
        for observation in world.observe()[::3]:
            cells = observation[: 7 * 9 * 21].reshape(7, 9, 21)
            looking = int(np.flatnonzero(observation[seen - 6 : seen - 2])[0])
            y, x = ((0, -1), (0, 1), (-1, 0), (1, 0))[looking]
            ahead, ways = observation[seen : seen + 21], observation[seen + 21 :].reshape(19, 5)
            assert (ahead == cells[3 + y, 4 + x]).all()
            for kind in range(2, 21):
                places = [(abs(y - 3) + abs(x - 4), y - 3, x - 4) for y, x in np.argwhere(cells[:, :, kind])]
                away = [place for place in places if place[0]] or places
                left, right, up, down, near = ways[kind - 2]
                if not away:
                    assert not ways[kind - 2].any()
                    continue
                steps = min(away)[0]
                assert near == pytest.approx(1 - steps / 9)
                closest = [(y, x) for distance, y, x in away if distance == steps]
                assert [left, right] == [any(x < 0 for _, x in closest), any(x > 0 for _, x in closest)]
                assert [up, down] == [any(y < 0 for y, _ in closest), any(y > 0 for y, _ in closest)]
                met.add(kind)
            looks.add(looking)
    assert looks == {0, 1, 2, 3}
    assert {2, 3, 4, 5, 13, 17, 18} <= met  # grass, water, stone, trees, sand, zombies, cows


@needs_craftax
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["craftax-classic", "craftax"])
def test_a_mirrored_observation_is_one_that_the_mirrored_world_would_show(name: str) -> None:
    world = CraftaxWorld(name, 4)
    channels, behind, looks = (21, 22, 16) if name == "craftax-classic" else (len(KINDS), 51, 31)
    first = 7 * 9 * channels
    rng = np.random.default_rng(4)
    world.load(world.fresh(4, rng), np.arange(4), np.ones(4, bool))
    for _ in range(40):
        world.step(rng.integers(1, 6, 4), rng)
    observations = world.observe()
    cells = observations[:, :first].reshape(4, 7, 9, channels)
    ways = observations[:, first + behind + channels :].reshape(4, -1, 5)
    for (columns, actions), axes, words in zip(
        world.mirrors, ((2,), (1,), (1, 2)), ("left right", "up down", "left right up down"), strict=True
    ):
        mirrored = observations[:, columns]
        assert (mirrored[:, :first].reshape(cells.shape) == np.flip(cells, axes)).all()
        if name == "craftax-classic":
            for one in mirrored:  # what stands behind is what is read from the mirrored cells
                assert (np.asarray(_compass(name)(one[: first + behind])) == one).all()
        swapped = ["left", "right", "up", "down"]
        for pair in (words.split()[i : i + 2] for i in range(0, len(words.split()), 2)):
            at = [swapped.index(word) for word in pair]
            swapped[at[0]], swapped[at[1]] = swapped[at[1]], swapped[at[0]]
        order = [["left", "right", "up", "down"].index(word) for word in swapped]
        assert (
            mirrored[:, first + looks : first + looks + 4] == observations[:, first + looks + np.array(order)]
        ).all()
        assert (mirrored[:, first + behind + channels :].reshape(ways.shape) == ways[:, :, [*order, 4]]).all()
        assert (actions[actions] == np.arange(len(actions))).all()
        moved = [world.action_names[action] for action in np.flatnonzero(actions != np.arange(len(actions)))]
        assert moved == words.split()
        held = list(world.feature_columns.values())
        assert (mirrored[:, held] == observations[:, held]).all()


KINDS = (
    "light out_of_bounds grass water stone tree path coal iron diamond crafting_table furnace sand lava plant "
    "ripe_plant wall darkness chest torch ladder_down ladder_up melee passive ranged projectile"
).split()
SAME = {"fountain": "water", "stalagmite": "stone", "wall_moss": "wall"}
MOBS = {
    "melee_mobs": "melee",
    "passive_mobs": "passive",
    "ranged_mobs": "ranged",
    "mob_projectiles": "projectile",
}


def cells_of(state: Any) -> dict[tuple[int, int], set[str]]:
    """What each cell holds that Craftax shows, by how far down and right it is."""
    from craftax.craftax.constants import BlockType, ItemType

    level, place = int(state.player_level), np.asarray(state.player_position)
    ground, items, light = (
        np.asarray(layer[level]) for layer in (state.map, state.item_map, state.light_map)
    )
    cells: dict[tuple[int, int], set[str]] = {}
    for y in range(-4, 5):
        for x in range(-5, 6):
            row, column = place[0] + y, place[1] + x
            cells[y, x] = set()
            if 0 <= row < 48 and 0 <= column < 48 and light[row, column] > 0.05:
                words = [BlockType(int(ground[row, column])).name, ItemType(int(items[row, column])).name]
                cells[y, x] = {"light", *(SAME.get(word.lower(), word.lower()) for word in words)}
    for group, word in MOBS.items():
        mobs = getattr(state, group)
        for (row, column), alive in zip(mobs.position[level], mobs.mask[level], strict=True):
            where = int(row) - int(place[0]), int(column) - int(place[1])
            if alive and "light" in cells.get(where, ()):
                cells[where].add(word)
    return cells


def in_the_dungeon(state: Any) -> Any:
    """The same state, one floor lower."""
    import jax.numpy as jnp

    return state.replace(player_level=jnp.asarray(1, jnp.int32), player_position=state.up_ladders[1])


@needs_craftax
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_an_expert_sees_and_senses_in_craftax_is_what_a_plain_look_at_its_state_gives() -> None:
    import jax

    world = CraftaxWorld("craftax", 4)
    rng = np.random.default_rng(5)
    world.load(world.fresh(4, rng), np.arange(4), np.ones(4, bool))
    met, sensed, senses = set(), set(), world.features.names[-10:]
    for step in range(120):
        world.step(rng.integers(1, 6, 4), rng)
        if step == 60:  # from here on one floor lower
            banks = [world.save().take(np.array([lane])) for lane in range(4)]
            lower = [jax.tree.leaves(in_the_dungeon(world.state_of(bank))) for bank in banks]
            keys = sorted(banks[0].arrays)
            joined = {
                key: np.stack([np.asarray(leaves[i]) for leaves in lower]) for i, key in enumerate(keys)
            }
            world.load(Bank(joined), np.arange(4), np.ones(4, bool))
        if step % 3:
            continue
        values, bank = world.values(), world.save()
        for lane in range(4):
            state = world.state_of(bank.take(np.array([lane])))
            cells, observation = cells_of(state), world.observe()[lane]
            first = 63 * len(KINDS)
            seen = observation[:first].reshape(7, 9, len(KINDS))
            for (y, x), held in cells.items():
                if abs(y) <= 3 and abs(x) <= 4:
                    assert {kind for kind, there in zip(KINDS, seen[y + 3, x + 4], strict=True) if there} == (
                        held & set(KINDS)
                    )
            looking = int(np.flatnonzero(observation[first + 31 : first + 35])[0])
            ahead = cells[((0, -1), (0, 1), (-1, 0), (1, 0))[looking]]
            compass = observation[first + 51 :]
            assert {kind for kind, there in zip(KINDS, compass, strict=False) if there} == ahead & set(KINDS)
            for kind, (left, right, up, down, near) in zip(
                KINDS[2:], compass[len(KINDS) :].reshape(-1, 5), strict=True
            ):
                away = [(abs(y) + abs(x), y, x) for (y, x), held in cells.items() if kind in held]
                away = [one for one in away if one[0]] or away
                if not away:
                    assert not any((left, right, up, down, near))
                    continue
                steps = min(away)[0] or 10  # what one stands on is as far as can be
                assert near == pytest.approx(1 - min(away)[0] / 10)
                closest = [(y, x) for distance, y, x in away if distance in (steps, 0)]
                assert [left, right] == [any(x < 0 for _, x in closest), any(x > 0 for _, x in closest)]
                assert [up, down] == [any(y < 0 for y, _ in closest), any(y > 0 for y, _ in closest)]
                met.add(kind)
            for sense in senses:
                kind = {"toward_cow": "passive", "toward_zombie": "melee"}.get(sense, sense[7:])
                away = [abs(y) + abs(x) for (y, x), held in cells.items() if kind in held]
                value = values[lane, world.features.index(sense)]
                if kind not in ("passive", "melee"):
                    assert value == max((10 - steps for steps in away), default=0), sense
                elif away:  # nobody was hit so hard that a farther one counts
                    assert 10 - min(away) <= value
                    sensed.add(kind)
                if kind == "melee":
                    assert values[lane, world.features.index("calm")] == min(2 * min(away, default=10), 9)
    assert {"grass", "tree", "wall", "chest", "path", "torch", "ladder_up", "melee", "passive"} <= met
    assert sensed == {"melee", "passive"}


def sight(ground: np.ndarray, place: np.ndarray, blocks: Any) -> dict[str, int]:
    """How near the nearest block of each kind in sight is."""
    near = {f"toward_{name}": 0 for name in ("tree", "stone", "coal", "iron", "water")}
    for y in range(-3, 4):
        for x in range(-4, 5):
            row, column = place[0] + y, place[1] + x
            if 0 <= row < ground.shape[0] and 0 <= column < ground.shape[1]:
                name = f"toward_{blocks(int(ground[row, column])).name.lower()}"
                if name in near:
                    near[name] = max(near[name], 9 - abs(y) - abs(x))
    return near
