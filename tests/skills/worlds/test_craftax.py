"""The same specs and the same code in Craftax-Classic and Craftax; needs the extra "craftax" and some minutes."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import MissingExtraError
from shoal.skills.graph.launchers import job_environment
from shoal.skills.plan import Step, plan_for
from shoal.skills.proposers import knowledge_base
from shoal.skills.spec import load_skills
from shoal.skills.worlds.craftax import (
    ACHIEVEMENTS,
    CLASSIC_ACHIEVEMENTS,
    CLASSIC_ACTIONS,
    VIEWS,
    ClassicWorld,
    CraftaxWorld,
    _compass,
    _mirrors,
    _Programs,
    _reader,
    _senses,
    features_of,
)
from shoal.skills.worlds.registry import make_world
from shoal.skills.worlds.world import Bank

try:
    import craftax  # noqa: F401

    INSTALLED = True
except ImportError:
    INSTALLED = False
needs_craftax = pytest.mark.skipif(not INSTALLED, reason="craftax is not installed")


@pytest.mark.skipif(INSTALLED, reason="craftax is installed")
def test_without_the_extra_the_error_names_it() -> None:
    with pytest.raises(MissingExtraError, match=r"\[craftax\]"):
        ClassicWorld(1)


def test_features_are_known_without_craftax() -> None:
    for name, wood, levels in (("craftax-classic", 9, 1), ("craftax", 99, 4)):
        features = features_of(name)
        assert len(features.names) == len(set(features.names))
        assert (features.holds("wood"), features.holds("place_table"), features.holds("calm")) == (wood, 1, 9)
        assert features.holds("pickaxe") == levels


@needs_craftax
def test_the_words_for_achievements_and_actions_are_those_of_craftax() -> None:
    from craftax.craftax.constants import Achievement, Action
    from craftax.craftax_classic.constants import Action as ClassicAction

    assert list(ACHIEVEMENTS) == [one.name.lower() for one in sorted(Achievement, key=lambda one: one.value)]
    assert list(features_of("craftax").actions) == [action.name.lower() for action in Action]
    assert list(CLASSIC_ACTIONS) == [action.name.lower() for action in ClassicAction]


def test_a_furnace_is_placed_wherever_one_stands_with_a_stone() -> None:
    features = features_of("craftax")
    skills = load_skills(knowledge_base("craftax"), features)
    assert plan_for("Place Furnace", skills, features, hands={"stone": 1}) == [Step("Place Furnace", 1)]


@needs_craftax
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["craftax-classic", "craftax"])
def test_a_world_of_craftax_steps_saves_and_reads_its_features(name: str) -> None:
    import jax
    from craftax.craftax_env import make_craftax_env_from_name

    world = make_world(name, 4)
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
        assert _reader(world.features, name)(held)[world.features.index(feature)] == 3


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


KINDS = (
    "light out_of_bounds grass water stone tree path coal iron diamond crafting_table furnace sand lava plant "
    "ripe_plant wall darkness chest torch ladder_down ladder_up melee passive ranged projectile"
).split()
SAME = {"fountain": "water", "stalagmite": "stone", "wall_moss": "wall"}


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


def sensed_in(state: Any, blocks: Any) -> dict[str, int]:
    """What is sensed in a state of Craftax-Classic, by a plain count."""
    near = sight(np.asarray(state.map), np.asarray(state.player_position), blocks)
    for name, most in (("cow", 3), ("zombie", 5)):
        mobs = getattr(state, f"{name}s")
        places = np.asarray(mobs.position) - np.asarray(state.player_position)
        away = [
            (abs(y) + abs(x), int(health))
            for (y, x), alive, health in zip(places, mobs.mask, mobs.health, strict=True)
            if alive and abs(y) <= 3 and abs(x) <= 4
        ]
        near[f"toward_{name}"] = max((9 - steps + most - health for steps, health in away), default=0)
        if name == "zombie":
            near["calm"] = min(2 * min((steps for steps, _ in away), default=9), 9)
    near["health"] = int(state.player_health)
    return near


def look_at(observation: np.ndarray, seen: int, shape: tuple[int, ...] = (7, 9, 21)) -> tuple[int, set[int]]:
    """Compare the compass behind an observation with its cells; where one looks, and the kinds that were met."""
    cells = observation[: np.prod(shape)].reshape(shape)
    first = np.prod(shape) + VIEWS["craftax-classic" if shape[2] == 21 else "craftax"].looks
    looking = int(np.flatnonzero(observation[first : first + 4])[0])
    y, x = ((0, -1), (0, 1), (-1, 0), (1, 0))[looking]
    ahead = observation[seen : seen + shape[2]]
    ways = observation[seen + shape[2] :].reshape(shape[2] - 2, 5)
    assert (ahead == cells[3 + y, 4 + x]).all()
    met = set()
    for kind in range(2, shape[2]):
        places = [(abs(y - 3) + abs(x - 4), y - 3, x - 4) for y, x in np.argwhere(cells[:, :, kind])]
        away = [place for place in places if place[0]] or places
        left, right, up, down, near = ways[kind - 2]
        if not away:
            assert not ways[kind - 2].any()
            continue
        steps = min(away)[0]
        assert near == pytest.approx(1 - steps / (9 if shape[2] == 21 else 10))
        closest = [(y, x) for distance, y, x in away if distance == steps]
        assert [left, right] == [any(x < 0 for _, x in closest), any(x > 0 for _, x in closest)]
        assert [up, down] == [any(y < 0 for y, _ in closest), any(y > 0 for y, _ in closest)]
        met.add(kind)
    return looking, met


def numbered(words: str, first: int = 0) -> Any:
    return enum.Enum("Numbered", [(word.upper(), number) for number, word in enumerate(words.split(), first)])


CLASSIC_BLOCKS = (
    "invalid out_of_bounds grass water stone tree wood path coal iron diamond crafting_table furnace sand lava plant "
    "ripe_plant"
)
BLOCKS = f"{CLASSIC_BLOCKS} wall darkness fountain stalagmite fire_tree wall_moss"


@pytest.fixture
def numpy_in_place_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of JAX and of Craftax's words as is asked for outside of compiled programs."""

    def near(state: Any, block: int) -> bool:
        y, x = state.player_position
        return bool((state.map[y - 1 : y + 2, x - 1 : x + 2] == block).any())

    tree = SimpleNamespace(
        map=lambda change, group: SimpleNamespace(**{key: change(leaf) for key, leaf in vars(group).items()})
    )
    cut = SimpleNamespace(
        dynamic_slice=lambda array, at, shape: array[at[0] : at[0] + shape[0], at[1] : at[1] + shape[1]]
    )
    jax = SimpleNamespace(numpy=np, tree=tree, lax=cut)
    logic = SimpleNamespace(is_near_block=near)
    for name, module in {
        "jax": jax, "jax.numpy": np, "craftax": SimpleNamespace(), "craftax.craftax": SimpleNamespace(),
        "craftax.craftax_classic": SimpleNamespace(), "craftax.craftax_classic.game_logic": logic,
        "craftax.craftax.game_logic": logic,
        "craftax.craftax_classic.constants": SimpleNamespace(
            BlockType=numbered(CLASSIC_BLOCKS), Achievement=numbered(" ".join(CLASSIC_ACHIEVEMENTS)),
        ),
        "craftax.craftax.constants": SimpleNamespace(
            BlockType=numbered(BLOCKS), ItemType=numbered("none torch ladder_down ladder_up"),
            Achievement=numbered(" ".join(ACHIEVEMENTS)),
            MOB_TYPE_HEALTH_MAPPING=np.array([[3, 5], [7, 9]]),
        ),
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)


def classic_state(rng: np.random.Generator) -> Any:
    """A small map around an agent, with cows and zombies in and out of sight."""

    def mobs(most: int) -> Any:
        return SimpleNamespace(
            position=rng.integers(0, 16, (3, 2)),
            mask=rng.random(3) < 0.7,
            health=rng.integers(1, most + 1, 3),
        )

    ground = rng.choice([2, 2, 2, 3, 4, 5, 8, 9, 11, 12], (16, 16), p=[0.2, 0.2, 0.2, 0.1, *[0.05] * 6])
    held = SimpleNamespace(
        **{name: int(rng.integers(0, 9)) for name in features_of("craftax-classic").names[:12]}
    )
    return SimpleNamespace(
        map=ground, player_position=rng.integers(1, 15, 2), player_health=int(rng.integers(1, 9)), cows=mobs(3),
        zombies=mobs(5), inventory=held, achievements=rng.random(22) < 0.5, player_food=3, player_drink=4,
        player_energy=5,
    )  # fmt: skip


@pytest.mark.usefixtures("numpy_in_place_of_jax")
def test_the_values_of_a_state_are_what_a_plain_look_at_it_gives() -> None:
    features = features_of("craftax-classic")
    read, rng, met = _reader(features, "craftax-classic"), np.random.default_rng(0), set()
    for _ in range(60):
        state = classic_state(rng)
        found = dict(zip(features.names, read(state), strict=True))
        y, x = state.player_position
        near = state.map[y - 1 : y + 2, x - 1 : x + 2]
        expected = vars(state.inventory) | dict(zip(CLASSIC_ACHIEVEMENTS, state.achievements, strict=True))
        expected |= {"near_table": (near == 11).any(), "near_furnace": (near == 12).any()}
        expected |= {"food": 3, "drink": 4, "energy": 5}
        senses = sensed_in(state, numbered(CLASSIC_BLOCKS))
        assert found == expected | senses
        met |= {name for name, value in senses.items() if value not in (0, 9)}
    assert met == {*senses}


@pytest.mark.usefixtures("numpy_in_place_of_jax")
def test_the_senses_of_craftax_are_of_ones_own_floor_and_know_what_is_as_good() -> None:
    rng, senses, words = np.random.default_rng(1), _senses("craftax"), numbered(BLOCKS)
    as_good = {"toward_water": ("water", "fountain"), "toward_stone": ("stone", "stalagmite"),
               "toward_tree": ("tree", "fire_tree")}  # fmt: skip
    met = set()
    for _ in range(60):
        floor = int(rng.integers(0, 2))
        mobs = {
            name: SimpleNamespace(
                position=rng.integers(0, 20, (2, 3, 2)), mask=rng.random((2, 3)) < 0.7,
                health=rng.integers(1, 4, (2, 3)), type_id=rng.integers(0, 2, (2, 3)),
            )
            for name in ("melee_mobs", "passive_mobs")
        }  # fmt: skip
        state = SimpleNamespace(
            map=rng.integers(0, len(words), (2, 20, 20)), item_map=rng.integers(0, 40, (2, 20, 20)), player_level=floor,
            player_position=rng.integers(0, 20, 2), player_health=6, **mobs,
        )  # fmt: skip
        found, place = senses(state), state.player_position
        away = np.abs(np.indices((20, 20)) - place[:, None, None])
        seen, steps = (away[0] <= 4) & (away[1] <= 5), away.sum(0)
        expected = {"health": 6}
        for kind in ("tree", "stone", "coal", "iron", "water", "path", "chest"):
            numbers = [
                words[word.upper()].value
                for word in as_good.get(f"toward_{kind}", (kind,))
                if word != "chest"
            ]
            there = seen & np.isin(state.map[floor], numbers)
            expected[f"toward_{kind}"] = max(10 - steps[there], default=0)
        expected["toward_ladder_down"] = max(10 - steps[seen & (state.item_map[floor] == 2)], default=0)
        for word, group, column in (("cow", "passive_mobs", 0), ("zombie", "melee_mobs", 1)):
            one = mobs[group]
            ways = [
                (int(abs(at - place).sum()), (((3, 5), (7, 9))[kind][column]) - health)
                for at, alive, health, kind in zip(
                    one.position[floor], one.mask[floor], one.health[floor], one.type_id[floor], strict=True
                )
                if alive and abs(at - place)[0] <= 4 and abs(at - place)[1] <= 5
            ]
            expected[f"toward_{word}"] = max((10 - distance + blows for distance, blows in ways), default=0)
            if word == "zombie":
                expected["calm"] = min(2 * min((distance for distance, _ in ways), default=10), 9)
        assert found == expected
        met |= {name for name, value in expected.items() if value}
    assert met == {*expected} - {"toward_chest"}


def cells_seen(name: str, rng: np.random.Generator) -> np.ndarray:
    """`[rows, columns, words]` as Craftax shows them: one block a cell, and sometimes somebody on it."""
    if name == "craftax-classic":
        cells = np.eye(21, dtype=np.float32)[rng.choice([2, 3, 4, 5, 8, 11], (7, 9), p=[0.7, *[0.06] * 5])]
        cells[..., 17:] = rng.random((7, 9, 4)) < 0.02
        return cells
    blocks, words = len(BLOCKS.split()), len(BLOCKS.split()) + 4 + 5 * 8 + 1
    cells = np.eye(words, dtype=np.float32)[rng.integers(0, blocks, (9, 11))]
    for first, kinds in ((blocks, 4), *((first, 8) for first in range(blocks + 4, words - 1, 8))):
        cells[..., first + rng.integers(0, kinds)] = rng.random((9, 11)) < 0.05  # one of a kind in a cell
    cells[..., -1] = 1  # light
    return cells


def plain_kinds() -> np.ndarray:
    """`[words, kinds]` of the words above."""
    words = [
        *(SAME.get(word, {"fire_tree": "tree"}.get(word, word)) for word in BLOCKS.split()),
        *"none torch ladder_down ladder_up".split(),
        *(mob for mob in ("melee", "passive", "ranged", "projectile", "its own") for _ in range(8)), "light",
    ]  # fmt: skip
    return np.array([[word == kind for kind in KINDS] for word in words], np.float32)


@pytest.mark.usefixtures("numpy_in_place_of_jax")
@pytest.mark.parametrize("name", ["craftax-classic", "craftax"])
def test_the_compass_says_what_the_cells_in_front_of_it_do(name: str) -> None:
    see, rng, view = _compass(name), np.random.default_rng(2), VIEWS[name]
    looks, met = set(), set()
    for _ in range(60):
        raw, rest = cells_seen(name, rng), rng.random(view.behind).astype(np.float32)
        rest[view.looks : view.looks + 4] = np.eye(4)[rng.integers(0, 4)]
        seen = see(np.concatenate([raw.ravel(), rest]))
        shown = raw if name == "craftax-classic" else (raw @ plain_kinds())[1:-1, 1:-1]
        assert seen[: shown.size].tolist() == shown.ravel().tolist()
        assert (seen[shown.size : shown.size + view.behind] == rest).all()
        if name == "craftax":  # whose compass looks as far as Craftax shows, beyond what an expert sees
            raw[0] = raw[-1] = raw[:, 0] = raw[:, -1] = 0
            seen = see(np.concatenate([raw.ravel(), rest]))
        looking, kinds = look_at(seen, shown.size + view.behind, shown.shape)
        looks.add(looking)
        met |= kinds
        assert len(seen) == view.cells + view.behind + view.compass
    assert looks == {0, 1, 2, 3}
    assert len(met) >= 9


@pytest.mark.usefixtures("numpy_in_place_of_jax")
@pytest.mark.parametrize("name", ["craftax-classic", "craftax"])
def test_a_mirrored_observation_is_the_one_of_the_mirrored_cells(name: str) -> None:
    see, rng, view = _compass(name), np.random.default_rng(3), VIEWS[name]
    mirrors = _mirrors(view, 17)
    assert len(mirrors) == 3
    for (columns, actions), axes, order in zip(
        mirrors, ((1,), (0,), (0, 1)), ([1, 0, 2, 3], [0, 1, 3, 2], [1, 0, 3, 2]), strict=True
    ):
        assert actions.tolist() == [0, *(1 + one for one in order), *range(5, 17)]
        for _ in range(10):
            raw, rest = cells_seen(name, rng), rng.random(view.behind).astype(np.float32)
            looking = rng.integers(0, 4)
            rest[view.looks : view.looks + 4] = np.eye(4)[looking]
            there = rest.copy()
            there[view.looks : view.looks + 4] = np.eye(4)[order[looking]]
            seen, other = see(np.append(raw, rest)), see(np.append(np.flip(raw, axes), there))
            np.testing.assert_array_equal(seen[columns], other)


class Counting:
    """In place of what is compiled: states are a count and a number of their own, in JAX's trees by their names."""

    tree = SimpleNamespace(
        leaves=lambda state: [state[key] for key in sorted(state)], structure=lambda state: sorted(state),
        unflatten=lambda structure, leaves: dict(zip(structure, leaves, strict=True)),
    )  # fmt: skip

    @staticmethod
    def eval_shape(function: Any, keys: Any) -> Any:
        return function(keys)

    @staticmethod
    def fresh(keys: np.ndarray) -> dict[str, np.ndarray]:
        return {"count": np.zeros(len(keys), np.int64), "own": keys[:, 0]}

    @staticmethod
    def look(state: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        size = len(state["count"])
        return np.full((size, 3), state["count"][:, None]), np.full((size, 57), state["count"][:, None])

    @classmethod
    def step(cls, keys: np.ndarray, state: dict[str, np.ndarray], actions: np.ndarray) -> Any:
        after = {**state, "count": state["count"] + actions}
        return cls.look(after)[0], after, after["count"] > 5, cls.look(after)[1]


def test_states_of_a_world_are_kept_loaded_and_stepped_lane_by_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = _Programs(Counting, Counting.fresh, Counting.look, Counting.step)
    monkeypatch.setattr("shoal.skills.worlds.craftax._programs", lambda name: programs)
    world, rng = ClassicWorld(4), np.random.default_rng(0)
    assert (world.n_actions, world.obs_size) == (17, 1323 + 22 + 116)
    assert (world.feature_columns["wood"], world.feature_columns["iron_sword"]) == (1323, 1334)
    bank = world.fresh(6, rng)
    assert len(bank) == 6
    assert len(set(bank.arrays["001"].tolist())) == 6  # each world is another
    assert (world.fresh(6, np.random.default_rng(0)).arrays["001"] == bank.arrays["001"]).all()
    every = np.ones(4, np.bool_)
    world.load(bank, np.array([5, 1, 2, 3]), every)
    assert (world.save().arrays["001"] == bank.arrays["001"][[5, 1, 2, 3]]).all()
    assert not world.step(np.array([1, 2, 3, 4]), rng).any()
    saved = world.save()
    assert world.step(np.array([0, 0, 3, 2]), rng).tolist() == [False, False, True, True]
    assert world.observe()[:, 0].tolist() == world.values()[:, 0].tolist() == [1, 2, 6, 6]
    assert saved.arrays["000"].tolist() == [1, 2, 3, 4]  # it is a copy
    world.load(saved, np.array([3, 2, 1, 0]), np.array([True, False, True, False]))
    assert world.observe()[:, 0].tolist() == world.values()[:, 0].tolist() == [4, 2, 2, 6]
    world.values()[:] = 0  # and so are the values
    assert world.values()[0, 0] == 4
    assert world.state_of(saved)["count"] == 1


def test_a_picture_is_what_craftax_draws_in_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(state_of=lambda bank: bank.arrays["000"][0])
    for kind, drawn in ((ClassicWorld, [0.0, 0.5, 1.0]), (CraftaxWorld, [0.0, 127.5, 300.0])):
        pixels = np.array(drawn, np.float32)
        painter = (world, lambda state, pixels=pixels: state * pixels)
        monkeypatch.setattr("shoal.skills.worlds.craftax._painter", lambda name, painter=painter: painter)
        image = kind.picture(Bank({"000": np.ones((2, 1), np.float32)}))
        assert (image.dtype, image.tolist()) == (np.uint8, [0, 127, 255])
