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
from shoal.skills.jobs.launchers import job_environment
from shoal.skills.learning.craftax import CraftaxWorld, features_of

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
    from craftax.craftax_env import make_craftax_env_from_name

    world = CraftaxWorld(name, 4)
    rng = np.random.default_rng(0)
    bank = world.fresh(6, rng)
    assert len(bank) == 6
    world.load(bank, np.array([5, 1, 2, 3]), np.ones(4, bool))
    assert (world.save().arrays["000"][0] == bank.arrays["000"][5]).all()
    for _ in range(30):
        world.step(rng.integers(0, world.n_actions, 4), rng)
    state = world.state_of(world.save())
    env = make_craftax_env_from_name(
        {"craftax": "Craftax-Symbolic-v1", "craftax-classic": "Craftax-Classic-Symbolic-v1"}[name],
        auto_reset=False,
    )
    np.testing.assert_allclose(world.observe()[0], np.asarray(env.get_obs(state), np.float32), atol=1e-6)
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
                    near["calm"] = min((steps for steps, _ in away), default=9)
            near["health"] = int(state.player_health)
            found = {name: values[lane, world.features.index(name)] for name in near}
            assert found == near
            met |= {name for name, value in near.items() if value not in (0, 9)}
    assert {"toward_tree", "toward_water", "toward_cow", "toward_zombie", "calm", "health"} <= met


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
