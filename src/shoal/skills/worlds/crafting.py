"""A small crafting world in NumPy, stepped by the hundred: trees, a quarry with iron, water, and tools to make.

Every world can be finished: it has trees, stone, iron and water. The agent sees 7x7 cells around it, what it holds,
where it looks and where it is.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from shoal.skills.spec import Features
from shoal.skills.worlds.world import Bank, Bools, Floats, Ints

GRASS, TREE, STONE, IRON, WATER, TABLE, PLANT, EDGE = range(8)
KINDS = 8
SIZE = 16
REACH = 3  # cells seen in each direction
HANDS = 9  # most of any counter
SAPLING_CHANCE = 0.25

COUNTERS = ("wood", "stone", "iron", "sapling", "drink")
TOOLS = ("table", "wood_pickaxe", "stone_pickaxe", "wood_sword", "plant")
CRAFTING_ACTIONS = (
    "left", "right", "up", "down", "interact", "place_table", "make_wood_pickaxe", "make_stone_pickaxe",
    "make_wood_sword", "plant_sapling", "wait",
)  # fmt: skip
CRAFTING = Features(
    world="crafting", names=(*COUNTERS, *TOOLS), capacity={name: HANDS for name in COUNTERS},
    counters=frozenset(COUNTERS), actions=CRAFTING_ACTIONS,
)  # fmt: skip
WOOD, STONES, IRONS, SAPLING, DRINK, HAS_TABLE, PICKAXE, STONE_PICKAXE, SWORD, HAS_PLANT = range(10)
MOVES = np.array([[0, -1], [0, 1], [-1, 0], [1, 0]])
VIEW = (2 * REACH + 1) ** 2
_STATE = ("cells", "place", "look", "hands")
OBS_SIZE = VIEW * KINDS + len(CRAFTING.names) + 4 + 2


class CraftingWorld:
    """`lanes` crafting worlds; see `shoal.skills.worlds.world.World`."""

    features = CRAFTING
    n_actions = len(CRAFTING_ACTIONS)
    obs_size = OBS_SIZE
    action_names = CRAFTING_ACTIONS
    fresh_is_cheap = True
    training = MappingProxyType({"practice_horizon": 150})
    moves = (0, 1, 2, 3)
    wait = CRAFTING_ACTIONS.index("wait")
    feature_columns = MappingProxyType({name: VIEW * KINDS + i for i, name in enumerate(CRAFTING.names)})

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        side = SIZE + 2 * REACH
        self.cells = np.full((lanes, side, side), EDGE, np.uint8)
        self.place = np.full((lanes, 2), REACH, np.int64)
        self.look = np.zeros(lanes, np.int64)
        self.hands = np.zeros((lanes, len(CRAFTING.names)), np.float32)
        self._lane = np.arange(lanes)
        offsets = np.arange(-REACH, REACH + 1)
        self._window = (offsets[:, None] * side + offsets).reshape(-1)  # flat offsets of the cells seen
        self._one_hot = np.eye(KINDS, dtype=np.float32)
        self._looks = np.eye(4, dtype=np.float32)

    def fresh(self, count: int, rng: np.random.Generator) -> Bank:
        """New worlds: grass with scattered trees, a quarry holding iron, a pond."""
        side = SIZE + 2 * REACH
        kinds = np.where(rng.random((count, SIZE, SIZE)) < 0.08, TREE, GRASS).astype(np.uint8)
        row, column = np.mgrid[:SIZE, :SIZE]

        def distance(centre: NDArray) -> NDArray:
            steps: NDArray = np.abs(row - centre[:, :1, None]) + np.abs(column - centre[:, 1:, None])
            return steps

        quarry = rng.integers(3, SIZE - 3, (count, 2))
        pond = (quarry + rng.integers(6, SIZE - 6, (count, 2))) % SIZE
        ore = rng.random((count, SIZE, SIZE)) < 0.12
        kinds = np.where(distance(pond) <= 2, WATER, kinds)
        kinds = np.where(distance(quarry) <= 3, np.where(ore, IRON, STONE), kinds).astype(np.uint8)
        every = np.arange(count)
        kinds[every, quarry[:, 0], quarry[:, 1]] = IRON
        grove = rng.integers(0, SIZE, (count, 2))  # at least one tree
        grove = np.where(
            distance(quarry)[every, grove[:, 0], grove[:, 1]][:, None] <= 3, (quarry + 8) % SIZE, grove
        )
        kinds[every, grove[:, 0], grove[:, 1]] = TREE
        # Start on a cell that is grass: the largest of random numbers that are zero elsewhere.
        score = rng.random((count, SIZE, SIZE)) * (kinds == GRASS)
        start = score.reshape(count, -1).argmax(1)
        cells = np.full((count, side, side), EDGE, np.uint8)
        cells[:, REACH:-REACH, REACH:-REACH] = kinds
        place = np.stack([start // SIZE, start % SIZE], 1) + REACH
        hands = np.zeros((count, len(CRAFTING.names)), np.float32)
        state = cells, place.astype(np.int64), rng.integers(0, 4, count), hands
        return Bank(dict(zip(_STATE, state, strict=True)))

    def load(self, bank: Bank, rows: Ints, mask: Bools) -> None:
        """Put state `rows[i]` of `bank` into lane `i` where `mask[i]`."""
        chosen = rows[mask]
        for name in _STATE:
            getattr(self, name)[mask] = bank.arrays[name][chosen]

    def save(self) -> Bank:
        """The states of all lanes, copied."""
        return Bank({name: getattr(self, name).copy() for name in _STATE})

    def _seen(self) -> NDArray[np.uint8]:
        side = self.cells.shape[1]
        flat = (self._lane * side + self.place[:, 0]) * side + self.place[:, 1]
        return self.cells.reshape(-1)[flat[:, None] + self._window]

    def observe(self) -> Floats:
        """`[lanes, obs_size]`: one-hot cells, hands, look, place."""
        out = np.empty((self.lanes, OBS_SIZE), np.float32)
        out[:, : VIEW * KINDS] = self._one_hot[self._seen()].reshape(self.lanes, -1)
        rest = out[:, VIEW * KINDS :]
        held = len(CRAFTING.names)
        np.multiply(self.hands, 1 / 3, out=rest[:, :held])
        rest[:, held : held + 4] = self._looks[self.look]
        rest[:, held + 4 :] = (self.place - REACH) / (SIZE / 2) - 1
        return out

    def values(self) -> Floats:
        """`[lanes, features]`, copied."""
        return self.hands.copy()

    def step(self, actions: Ints, rng: np.random.Generator) -> Bools:
        """Act in every lane; nobody dies here."""
        lane, hands = self._lane, self.hands
        moving = actions < 4
        self.look = np.where(moving, actions, self.look)
        ahead = self.place + MOVES[self.look]
        kind = self.cells[lane, ahead[:, 0], ahead[:, 1]]
        self.place = np.where((moving & (kind == GRASS))[:, None], ahead, self.place)
        interact = actions == CRAFTING_ACTIONS.index("interact")
        luck = rng.random(self.lanes) < SAPLING_CHANCE
        self._collect(interact & (kind == TREE), WOOD)
        self._collect(interact & (kind == WATER), DRINK)
        self._collect(interact & (kind == GRASS) & luck, SAPLING)
        stone = interact & (kind == STONE) & (hands[:, PICKAXE] > 0) & (hands[:, STONES] < HANDS)
        iron = interact & (kind == IRON) & (hands[:, STONE_PICKAXE] > 0) & (hands[:, IRONS] < HANDS)
        self._collect(stone, STONES)
        self._collect(iron, IRONS)
        self._put(stone | iron, ahead, GRASS)
        table = (actions == CRAFTING_ACTIONS.index("place_table")) & (kind == GRASS) & (hands[:, WOOD] >= 2)
        hands[table, WOOD] -= 2
        hands[table, HAS_TABLE] = 1
        self._put(table, ahead, TABLE)
        plant = (
            (actions == CRAFTING_ACTIONS.index("plant_sapling")) & (kind == GRASS) & (hands[:, SAPLING] >= 1)
        )
        hands[plant, SAPLING] -= 1
        hands[plant, HAS_PLANT] = 1
        self._put(plant, ahead, PLANT)
        crafting = np.flatnonzero((actions >= 6) & (actions <= 8) & (hands[:, WOOD] >= 1))
        if len(crafting):
            self._craft(crafting, actions[crafting])
        return np.zeros(self.lanes, np.bool_)

    def _collect(self, who: Bools, item: int) -> None:
        self.hands[:, item] = np.minimum(self.hands[:, item] + who, HANDS)

    def _put(self, who: Bools, where: Ints, kind: int) -> None:
        index = np.flatnonzero(who)
        self.cells[index, where[index, 0], where[index, 1]] = kind

    def _craft(self, who: Ints, actions: Ints) -> None:
        """Make tools in lanes `who`, which have wood; a table must stand in the eight cells around."""
        around = self._seen()[who].reshape(len(who), 2 * REACH + 1, 2 * REACH + 1)
        near = (around[:, REACH - 1 : REACH + 2, REACH - 1 : REACH + 2] == TABLE).any((1, 2))
        for action, tool in ((6, PICKAXE), (7, STONE_PICKAXE), (8, SWORD)):
            able = who[near & (actions == action) & (self.hands[who, tool] == 0)]
            if tool == STONE_PICKAXE:
                able = able[self.hands[able, STONES] >= 1]
                self.hands[able, STONES] -= 1
            self.hands[able, WOOD] -= 1
            self.hands[able, tool] = 1

    @staticmethod
    def picture(bank: Bank, cell: int = 14) -> NDArray[np.uint8]:
        """`[height, width, 3]` of the first state of a bank: cells, the agent, what it holds."""
        palette = np.array(
            [
                [176, 214, 140], [46, 110, 52], [140, 140, 140], [214, 150, 90],
                [90, 150, 220], [150, 96, 48], [120, 220, 90], [40, 40, 40],
            ],
            np.uint8,
        )  # fmt: skip
        cells = bank.arrays["cells"][0][REACH - 1 : -REACH + 1, REACH - 1 : -REACH + 1]
        image = np.kron(palette[cells], np.ones((cell, cell, 1), np.uint8))
        row, column = (bank.arrays["place"][0] - REACH + 1) * cell
        image[row + 2 : row + cell - 2, column + 2 : column + cell - 2] = (200, 40, 40)
        nose = np.array([row, column]) + cell // 2 + MOVES[int(bank.arrays["look"][0])] * (cell // 2 - 3)
        image[nose[0] - 1 : nose[0] + 2, nose[1] - 1 : nose[1] + 2] = (255, 255, 255)
        bar = np.full((cell, image.shape[1], 3), 255, np.uint8)
        shades = np.linspace(40, 220, len(CRAFTING.names)).astype(np.uint8)
        for number, amount in enumerate(bank.arrays["hands"][0].astype(int)):
            left = number * (image.shape[1] // len(CRAFTING.names)) + 2
            height = min(amount, 9) * (cell - 2) // 9 + (amount > 0)
            bar[cell - height :, left : left + 12] = (shades[number], 90, 255 - shades[number])
        return np.concatenate([image, bar])
