"""FrozenLake as text: cross the ice to the goal, don't fall into a hole. Random lakes are always passable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, Text

from shoal.core.errors import ConfigError, unknown_name
from shoal.core.seeding import stream
from shoal.envs.actions import Projection
from shoal.envs.pictures import TILE, picture_of
from shoal.envs.text import Action, Outcome, TextEnv, check_numbers

MAPS: dict[str, tuple[str, ...]] = {
    "4x4": ("SFFF", "FHFH", "FFFH", "HFFG"),
    "8x8": (
        "SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF",
        "FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG",
    ),
}  # fmt: skip
"""The two fixed maps that everybody knows from gymnasium: S start, F ice, H hole, G goal."""

ACTIONS = {"Left": 1, "Down": 2, "Right": 3, "Up": 4}
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # (row, column) of actions 1 to 4; neighbours are perpendicular
_RANDOM_TRIES = 100


@dataclass(frozen=True)
class FrozenLakeConfig:
    """Settings of `FrozenLakeEnv`."""

    size: int = 4
    """Rows and columns of a random lake."""
    p: float = 0.8
    """Probability that a cell of a random lake is ice."""
    is_slippery: bool = True
    """Whether a move can go to the left or right of where it was meant."""
    success_rate: float = 1 / 3
    """On slippery ice, the probability of going where one meant; the two sides share the rest."""
    desc: str | tuple[str, ...] | None = None
    """A fixed lake: "4x4", "8x8", or rows of S F H G (a list, or lines of text); None draws one per seed."""
    map_seed: int | None = None
    """Draw the random lake from this seed instead of the episode's: one lake, many episodes."""
    random_start_goal: bool = True
    """Start and goal of a random lake anywhere, instead of in opposite corners."""
    start: tuple[int, int] | None = None
    """(row, column) to start from, instead of the lake's S."""
    goal: tuple[int, int] | None = None
    """(row, column) of the goal, instead of the lake's G."""
    observation: Literal["text", "index", "grid", "rgb"] = "text"
    """Text for language models; or the number of the player's cell, an array of cells, or pixels."""
    max_steps: int = 100
    """Steps after which an episode is truncated."""
    invalid_penalty: float = 0.0
    """Reward of a response without a usable action."""

    def __post_init__(self) -> None:
        check_numbers(self, size=2, max_steps=1)
        if not 0 < self.p <= 1:
            raise ConfigError(f"p must be in (0, 1], got {self.p}")
        if not 0 <= self.success_rate <= 1:
            raise ConfigError(f"success_rate must be in [0, 1], got {self.success_rate}")
        start, goal = self.start, self.goal
        if self.desc is None and not self.random_start_goal:
            start, goal = start or (0, 0), goal or (self.size - 1, self.size - 1)
        if start is not None and start == goal:
            raise ConfigError(f"start and goal must differ, got {start} for both")


class FrozenLakeEnv(TextEnv[FrozenLakeConfig]):
    """Cross a frozen lake to the goal without falling into a hole.

    The lake is `_` ice and `O` holes, the player `P` (`X` in a hole, `√` on the goal), the goal `G`.
    Reward 1 on reaching the goal, else 0; the episode terminates on the goal or in a hole. Actions are 1
    Left, 2 Down, 3 Right, 4 Up; 0 does nothing and costs a step.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": ["ansi", "grid", "rgb_array"],
        "render_fps": 4,
    }
    Config = FrozenLakeConfig
    seed_stream = "FrozenLakeEnv"
    instructions = (
        "You are P on a frozen lake. Reach the goal G. _ is ice, O is a hole: falling in ends the game. "
        "X is you in a hole, √ is you on the goal. Each turn, move Left, Down, Right or Up by one cell."
    )
    projection = Projection(lookup=ACTIONS)

    def __init__(self, config: FrozenLakeConfig | None = None, **settings: Any) -> None:
        desc = settings.get("desc")
        if isinstance(desc, list | tuple | np.ndarray):  # rows, or cells as gymnasium has them
            settings["desc"] = tuple("".join(map(_letter, row)) for row in desc)
        super().__init__(config, **settings)
        rows = _rows(self.config.desc)
        self._shape = (len(rows), len(rows[0])) if rows else (self.config.size, self.config.size)
        for name, cell in (("start", self.config.start), ("goal", self.config.goal)):
            if cell is not None and not (0 <= cell[0] < self._shape[0] and 0 <= cell[1] < self._shape[1]):
                raise ConfigError(f"{name} must be inside the {self._shape} lake, got {cell}")
        self._fixed = _fixed_lake(rows, self.config) if rows else None
        self._steps_of = _steps_of(*self._shape)
        self.observation_space = self._space()

    @property
    def desc(self) -> tuple[str, ...]:
        """The present lake as rows of S F H G."""
        return self._lake

    @property
    def position(self) -> tuple[int, int]:
        """(row, column) of the player."""
        return divmod(self._place, self._shape[1] + 1)

    def _start(self, rng: np.random.Generator) -> None:
        if self._fixed is not None:
            self._lake = self._fixed
        else:
            seed = self.config.map_seed
            self._lake = random_lake(rng if seed is None else stream(seed, "frozen_lake"), self.config)
        self._cells = "\n".join(self._lake)
        self._place = self._cells.index("S")
        self._ice = self._cells.translate(_SHOWN)

    def _advance(self, action: Action) -> Outcome:
        if action == self.invalid_action:
            return Outcome(self.config.invalid_penalty, effective=False, valid=False)
        direction = int(action) - 1
        if self.config.is_slippery:
            draw, meant = self._rng.random(), self.config.success_rate
            if draw >= meant:
                direction += 1 if draw < (1 + meant) / 2 else -1
        before, self._place = self._place, self._steps_of[self._place][direction % 4]
        cell = self._cells[self._place]
        success = cell == "G"
        return Outcome(1.0 if success else 0.0, success or cell == "H", success, self._place != before)

    def grid(self) -> np.ndarray:
        """The lake as `[rows, columns]` int8: 0 ice 1 hole 2 goal 3 player 4 player in a hole 5 on goal."""
        rows = self.observe().split("\n")
        return np.array([["_OGPX√".index(cell) for cell in row] for row in rows], np.int8)

    def render(self) -> Any:
        """The lake as text, as an array of cells, or as pixels, by `render_mode`."""
        if self.render_mode == "rgb_array":
            return picture_of(self.observe(), "frozen_lake")
        return self.grid() if self.render_mode == "grid" else super().render()

    def _observation(self) -> Any:
        kind = self.config.observation
        if kind == "text":
            return self.observe()
        if kind == "index":
            return self._place - self._place // (self._shape[1] + 1)  # without the line breaks
        return self.grid() if kind == "grid" else picture_of(self.observe(), "frozen_lake")

    def _space(self) -> Space[Any]:
        rows, columns = self._shape
        kind = self.config.observation
        if kind == "index":
            return Discrete(rows * columns)
        if kind == "grid":
            return Box(0, 5, self._shape, np.int8)
        if kind == "rgb":
            return Box(0, 255, (rows * TILE, columns * TILE, 3), np.uint8)
        length = rows * (columns + 1) - 1
        return Text(length, min_length=length, charset="P_OGX√\n")

    def observe(self) -> str:
        """The lake, one row a line, with the player on it."""
        place = self._place
        return f"{self._ice[:place]}{_PLAYER[self._cells[place]]}{self._ice[place + 1 :]}"


_SHOWN = str.maketrans({"S": "_", "F": "_", "H": "O"})
_PLAYER = {"S": "P", "F": "P", "H": "X", "G": "√"}


@lru_cache(maxsize=64)
def _steps_of(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """For each place in the text of a lake, the places one step to the left, down, right and up."""
    table = []
    for place in range(rows * (columns + 1)):
        row, column = divmod(place, columns + 1)
        ends = ((row + down, column + right) for down, right in _MOVES)
        inside = ((r, c) if 0 <= r < rows and 0 <= c < columns else (row, column) for r, c in ends)
        table.append(tuple(r * (columns + 1) + c for r, c in inside))
    return tuple(table)


def random_lake(rng: np.random.Generator, config: FrozenLakeConfig) -> tuple[str, ...]:
    """A lake of `config.size` with a dry way from start to goal, as rows of S F H G.

    Lakes are drawn until one is passable; where holes are so frequent that none is, a shortest way is opened.
    """
    size = config.size
    for _ in range(_RANDOM_TRIES):
        ice = (rng.random(size * size) < config.p).tolist()
        grid = [["F" if ice[row * size + column] else "H" for column in range(size)] for row in range(size)]
        start, goal = _ends(rng, config)
        lake = _with_ends(grid, start, goal)
        if is_passable(lake):
            return lake
    (row, column), (goal_row, goal_column) = start, goal
    while (row, column) != goal:
        if column == goal_column or (row != goal_row and rng.random() < 0.5):
            row += 1 if goal_row > row else -1
        else:
            column += 1 if goal_column > column else -1
        grid[row][column] = "F"
    return _with_ends(grid, start, goal)


def _ends(rng: np.random.Generator, config: FrozenLakeConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Start and goal of a random lake."""
    size = config.size
    start, goal = (0, 0), (size - 1, size - 1)
    if not config.random_start_goal:
        return config.start or start, config.goal or goal
    while True:
        a, b = rng.integers(size * size, size=2).tolist()
        start, goal = config.start or divmod(a, size), config.goal or divmod(b, size)
        if start != goal:
            return start, goal


def is_passable(lake: Sequence[str]) -> bool:
    """Whether the goal can be reached from the start without touching a hole."""
    cells, steps_of = "\n".join(lake), _steps_of(len(lake), len(lake[0]))
    todo = [cells.index("S")]
    seen = set(todo)
    while todo:
        place = todo.pop()
        if cells[place] == "G":
            return True
        new = [near for near in steps_of[place] if near not in seen and cells[near] != "H"]
        seen.update(new)
        todo += new
    return False


def _rows(desc: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The rows of a fixed lake, checked; none for None."""
    if desc is None:
        return ()
    if isinstance(desc, str):
        if "\n" not in desc and desc not in MAPS:
            raise unknown_name("FrozenLake map", desc, MAPS)
        desc = MAPS.get(desc) or tuple(desc.split())
    if len({len(row) for row in desc}) != 1 or not set("".join(desc)) <= set("SFHG") or not desc[0]:
        raise ConfigError(f"desc must be equally long rows of S, F, H and G, got {list(desc)}")
    return desc


def _fixed_lake(rows: Sequence[str], config: FrozenLakeConfig) -> tuple[str, ...]:
    """The rows with the start and goal of a config, or else their own."""
    ends = []
    for name, letter, chosen in (("start", "S", config.start), ("goal", "G", config.goal)):
        if chosen is None and sum(row.count(letter) for row in rows) != 1:
            raise ConfigError(
                f"desc must have exactly one {letter} when no {name} is given, got {list(rows)}"
            )
        ends.append(tuple(chosen) if chosen is not None else _find(rows, letter))
    ice = [["F" if cell in "SG" else cell for cell in row] for row in rows]
    if ends[0] == ends[1]:
        raise ConfigError(f"start and goal must differ, got {ends[0]} for both: give the other one too")
    return _with_ends(ice, ends[0], ends[1])


def _letter(cell: Any) -> str:
    return cell.decode("ascii", "replace") if isinstance(cell, bytes) else str(cell)


def _with_ends(grid: list[list[str]], start: tuple[int, ...], goal: tuple[int, ...]) -> tuple[str, ...]:
    grid[start[0]][start[1]], grid[goal[0]][goal[1]] = "S", "G"
    return tuple("".join(row) for row in grid)


def _find(lake: Sequence[str], letter: str) -> tuple[int, int]:
    row = next(number for number, line in enumerate(lake) if letter in line)
    return row, lake[row].index(letter)
