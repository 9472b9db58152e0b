"""The same specs and the same code in Craftax-Classic; needs the extra "craftax" and some minutes."""

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
from shoal.skills.learning.craftax import CraftaxWorld, _compass, features_of

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
    assert (len(shown), *world.former_sizes) in ((world.obs_size,), (1345, 1345))
    np.testing.assert_allclose(world.observe()[0, : len(shown)], shown, atol=1e-6)
    # What stands in the column of a feature moves with that feature and with no other.
    for feature, column in world.feature_columns.items():
        changed = world.save()
        held = state.replace(inventory=state.inventory.replace(**{feature: 3}))
        none = state.replace(inventory=state.inventory.replace(**{feature: 0}))
        moved = np.flatnonzero(np.asarray(env.get_obs(held)) != np.asarray(env.get_obs(none)))
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
def test_a_mirrored_observation_is_one_that_the_mirrored_world_would_show() -> None:
    world = CraftaxWorld("craftax-classic", 8)
    (seen,) = world.former_sizes
    rng = np.random.default_rng(4)
    world.load(world.fresh(8, rng), np.arange(8), np.ones(8, bool))
    for _ in range(40):
        world.step(rng.integers(1, 6, 8), rng)
    observations = world.observe()
    cells = observations[:, : 7 * 9 * 21].reshape(8, 7, 9, 21)
    behind = _compass()
    for (columns, actions), axes, words in zip(
        world.mirrors, ((2,), (1,), (1, 2)), ("left right", "up down", "left right up down"), strict=True
    ):
        mirrored = observations[:, columns]
        assert (mirrored[:, : 7 * 9 * 21].reshape(cells.shape) == np.flip(cells, axes)).all()
        for one in mirrored:  # what stands behind is what is read from the mirrored cells
            assert (np.asarray(behind(one[:seen])) == one).all()
        assert (actions[actions] == np.arange(len(actions))).all()
        moved = [world.action_names[action] for action in np.flatnonzero(actions != np.arange(len(actions)))]
        assert moved == words.split()
        held = list(world.feature_columns.values())
        assert (mirrored[:, held] == observations[:, held]).all()


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
