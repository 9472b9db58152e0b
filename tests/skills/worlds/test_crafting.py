from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.skills.worlds import crafting
from shoal.skills.worlds.crafting import CRAFTING, CRAFTING_ACTIONS, CraftingWorld

KIND = {".": crafting.GRASS, "T": crafting.TREE, "S": crafting.STONE, "I": crafting.IRON, "~": crafting.WATER}
KIND |= {"t": crafting.TABLE, "p": crafting.PLANT, "#": crafting.EDGE}
AHEAD = {0: (0, -1), 1: (0, 1), 2: (-1, 0), 3: (1, 0)}


class OneWorld:
    """The rules again, one agent at a time and as plainly as they can be said."""

    def __init__(self, cells: np.ndarray, place: np.ndarray, look: int, hands: np.ndarray) -> None:
        self.cells, self.look = cells.copy(), int(look)
        self.row, self.column = int(place[0]), int(place[1])
        self.hands = dict(zip(CRAFTING.names, hands.astype(int), strict=True))

    def step(self, action: str, lucky: bool) -> None:
        hands = self.hands
        if action in ("left", "right", "up", "down"):
            self.look = ("left", "right", "up", "down").index(action)
        row, column = self.row + AHEAD[self.look][0], self.column + AHEAD[self.look][1]
        kind = self.cells[row, column]
        if action in ("left", "right", "up", "down") and kind == crafting.GRASS:
            self.row, self.column = row, column
        elif action == "interact":
            got = {crafting.TREE: "wood", crafting.WATER: "drink"}.get(int(kind))
            if kind == crafting.GRASS and lucky:
                got = "sapling"
            if kind == crafting.STONE and hands["wood_pickaxe"] and hands["stone"] < 9:
                got = "stone"
                self.cells[row, column] = crafting.GRASS
            if kind == crafting.IRON and hands["stone_pickaxe"] and hands["iron"] < 9:
                got = "iron"
                self.cells[row, column] = crafting.GRASS
            if got:
                hands[got] = min(9, hands[got] + 1)
        elif action == "place_table" and kind == crafting.GRASS and hands["wood"] >= 2:
            hands["wood"] -= 2
            hands["table"] = 1
            self.cells[row, column] = crafting.TABLE
        elif action == "plant_sapling" and kind == crafting.GRASS and hands["sapling"]:
            hands["sapling"] -= 1
            hands["plant"] = 1
            self.cells[row, column] = crafting.PLANT
        elif action.startswith("make_"):
            around = self.cells[self.row - 1 : self.row + 2, self.column - 1 : self.column + 2]
            tool = action.removeprefix("make_")
            if (around == crafting.TABLE).any() and not hands[tool] and hands["wood"]:
                if tool == "stone_pickaxe":
                    if not hands["stone"]:
                        return
                    hands["stone"] -= 1
                hands["wood"] -= 1
                hands[tool] = 1


class Lucky:
    """A generator whose every draw is `value`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, size: int) -> np.ndarray:
        return np.full(size, self.value)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_many_lanes_follow_the_rules_of_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = CraftingWorld(16)
    bank = world.fresh(16, rng)
    # Tables, tools and full hands from the start, so that every rule is met within a short walk.
    bank.arrays["hands"][:] = rng.integers(0, 10, (16, 10)) * (rng.random((16, 10)) < 0.6)
    bank.arrays["hands"][:, 5:] = np.minimum(bank.arrays["hands"][:, 5:], 1)
    scattered = rng.random(bank.arrays["cells"].shape)
    grass = bank.arrays["cells"] == crafting.GRASS
    for low, kind in (
        (0.9, crafting.TABLE),
        (0.8, crafting.STONE),
        (0.75, crafting.IRON),
        (0.7, crafting.WATER),
    ):
        bank.arrays["cells"][grass & (scattered > low) & (scattered <= low + 0.1)] = kind
    world.load(bank, np.arange(16), np.ones(16, bool))
    singles = [
        OneWorld(*(bank.arrays[key][i] for key in ("cells", "place", "look", "hands"))) for i in range(16)
    ]
    for _ in range(60):
        actions, lucky = rng.integers(0, len(CRAFTING_ACTIONS), 16), bool(rng.random() < 0.5)
        world.step(actions, Lucky(0.0 if lucky else 0.99))  # type: ignore[arg-type]
        for i, single in enumerate(singles):
            single.step(CRAFTING_ACTIONS[actions[i]], lucky)
            assert dict(zip(CRAFTING.names, world.hands[i].astype(int), strict=True)) == single.hands
            assert tuple(world.place[i]) == (single.row, single.column)
            assert (world.cells[i] == single.cells).all()
            assert world.look[i] == single.look


def test_every_new_world_can_be_finished(rng: np.random.Generator) -> None:
    world = CraftingWorld(1)
    bank = world.fresh(2000, rng)
    cells = bank.arrays["cells"]
    for kind in (crafting.TREE, crafting.STONE, crafting.IRON, crafting.WATER):
        assert (cells == kind).any((1, 2)).all()
    rows = np.arange(2000)
    assert (cells[rows, bank.arrays["place"][:, 0], bank.arrays["place"][:, 1]] == crafting.GRASS).all()


def test_the_same_stream_gives_the_same_worlds_and_another_does_not() -> None:
    world = CraftingWorld(1)
    one, same, other = (world.fresh(8, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all((one.arrays[key] == same.arrays[key]).all() for key in one.arrays)
    assert (one.arrays["cells"] != other.arrays["cells"]).any()


def test_an_observation_shows_what_is_around_held_and_looked_at(rng: np.random.Generator) -> None:
    world = CraftingWorld(5)
    world.load(world.fresh(5, rng), np.arange(5), np.ones(5, bool))
    world.hands[:, 0] = [0, 3, 6, 9, 1]
    seen = world.observe()
    for i in range(5):
        row, column = world.place[i]
        around = world.cells[i, row - 3 : row + 4, column - 3 : column + 4]
        one_hot = (around[:, :, None] == np.arange(8)).reshape(-1)
        assert (seen[i, :392] == one_hot).all()
        assert seen[i, 392] == pytest.approx(world.hands[i, 0] / 3)
        assert list(seen[i, 402:406]) == [float(world.look[i] == k) for k in range(4)]
        assert list(seen[i, 406:]) == [(row - 3) / 8 - 1, (column - 3) / 8 - 1]
    assert [world.feature_columns[name] for name in ("wood", "plant")] == [392, 401]


def test_a_picture_shows_cells_the_agent_where_it_looks_and_what_it_holds(rng: np.random.Generator) -> None:
    bank = CraftingWorld(1).fresh(1, rng)
    bank.arrays["place"][0], bank.arrays["look"][0] = (5, 9), 3  # looks down
    bank.arrays["hands"][0] = [0, 3, 9, 0, 0, 1, 0, 0, 0, 0]
    image = CraftingWorld.picture(bank, cell=14)
    assert image.shape == (19 * 14, 18 * 14, 3)  # 16 x 16 cells, an edge around them, and a bar below
    assert image.dtype == np.uint8
    kinds, corners = bank.arrays["cells"][0][2:-2, 2:-2], image[: 18 * 14 : 14, : 18 * 14 : 14]
    colours = {int(kind): tuple(corners[kinds == kind][0]) for kind in np.unique(kinds)}
    assert len(set(colours.values())) == len(colours)
    for kind, colour in colours.items():
        assert (corners[kinds == kind] == colour).all()
    row, column = (5 - 2) * 14, (9 - 2) * 14
    seen = image[row : row + 14, column : column + 14]
    white, red = (seen == 255).all(2), (seen == (200, 40, 40)).all(2)
    assert (white.any(1).argmax(), white.sum()) == (10, 9)  # the nose, below the middle
    assert (red.any(1).argmax(), (red | white)[2:12, 2:12].sum()) == (2, 100)
    bar = (image[18 * 14 :] != 255).any(2).sum(0)
    width = 18 * 14 // 10
    assert [int(bar[i * width + 2]) for i in range(10)] == [0, 5, 13, 0, 0, 2, 0, 0, 0, 0]
