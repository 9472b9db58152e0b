"""The Sokoban env: push every box onto a target. Rewards and steps are those of gym-sokoban and RAGEN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from gymnasium.spaces import Box, Text

from shoal.core.errors import ConfigError
from shoal.envs.actions import Projection
from shoal.envs.pictures import TILE, picture_of
from shoal.envs.records import Shared, made_once
from shoal.envs.sokoban.generator import generate
from shoal.envs.sokoban.levels import (
    SYMBOLS,
    Level,
    bits,
    level_files,
    level_from_state,
    parse_xsb,
    read_levels,
)
from shoal.envs.sokoban.solver import Solution, solve
from shoal.envs.text import Action, Outcome, TextEnv, check_numbers

ACTIONS = {"Up": 1, "Down": 2, "Left": 3, "Right": 4}


@dataclass(frozen=True)
class SokobanConfig:
    """Settings of `SokobanEnv`."""

    dim_room: tuple[int, int] = (6, 6)
    """Rows and columns of a generated room, outer walls included."""
    num_boxes: int = 1
    """Boxes in a generated room."""
    max_steps: int = 100
    """Steps after which an episode is truncated."""
    search_depth: int = 30
    """Most pulls the generator makes away from the solved room: no room needs more pushes."""
    min_pushes: int = 1
    """Fewest pushes that an optimal solution of a generated room needs."""
    max_pushes: int | None = None
    """Most pushes that an optimal solution may need; None leaves it to `search_depth`."""
    levels: str | tuple[str, ...] | None = None
    """Levels to play instead of generated rooms: XSB text, or paths of XSB files or folders of them."""
    observation: Literal["text", "grid", "rgb"] = "text"
    """Text for language models, or an array of cells or pixels for other policies."""
    penalty_for_step: float = -0.1
    """Reward of every step."""
    penalty_box_off_target: float = -1.0
    """Added for a push of a box off a target."""
    reward_box_on_target: float = 1.0
    """Added for a push of a box onto a target."""
    reward_finished: float = 10.0
    """Added when the last box is on a target, which ends the episode."""
    invalid_penalty: float = 0.0
    """Added to the step penalty for a response without a usable action."""

    def __post_init__(self) -> None:
        if len(self.dim_room) != 2 or not all(4 <= side <= 100 for side in self.dim_room):
            raise ConfigError(f"dim_room must be two numbers from 4 to 100, got {self.dim_room}")
        if self.num_boxes < 1 or 2 * self.num_boxes + 2 > (self.dim_room[0] - 2) * (self.dim_room[1] - 2):
            raise ConfigError(
                f"num_boxes must be at least 1 and fit into {self.dim_room}, got {self.num_boxes}"
            )
        check_numbers(self, max_steps=1)
        if not 1 <= self.min_pushes <= self.most_pushes:
            raise ConfigError(
                f"min_pushes must be in [1, {self.most_pushes}] (max_pushes and search_depth), "
                f"got {self.min_pushes}"
            )

    @property
    def most_pushes(self) -> int:
        """The tighter of `search_depth` and `max_pushes`."""
        return self.search_depth if self.max_pushes is None else min(self.max_pushes, self.search_depth)


class SokobanEnv(TextEnv[SokobanConfig]):
    """Push every box of a room onto a target.

    The room is `#` walls, `_` floor, `O` targets, `X` boxes (`√` on a target) and the player `P` (`S` on
    a target). Actions are 1 Up, 2 Down, 3 Left, 4 Right: walk, or push the box that is in the way; 0 does
    nothing. A step costs 0.1, a box on a target pays 1 (off it costs 1), and the last one pays 10 more
    and ends the episode. `info["optimal_pushes"]` says how hard a generated room is.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": ["ansi", "list", "grid", "rgb_array"],
        "render_fps": 4,
    }
    Config = SokobanConfig
    seed_stream = "SokobanEnv"
    instructions = (
        "Sokoban: push every box X onto a target O. You are P. # is a wall, _ is floor, √ is a box on a "
        "target, S is you on a target. You push one box at a time by walking against it; you cannot pull. "
        "Each turn, move Up, Down, Left or Right by one cell."
    )
    projection = Projection(lookup=ACTIONS)

    def __init__(self, config: SokobanConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._levels = _levels(self.config.levels)
        self._use_shape(self._shape_of_all())

    @classmethod
    def from_state(cls, room_fixed: Any, room_state: Any, max_steps: int = 100, **settings: Any) -> Self:
        """An env that starts every episode from one position; it is ready to be stepped.

        Args:
            room_fixed: 2-d array of what never moves: 0 wall, 1 floor, 2 target.
            room_state: of the same shape, what stands there: 0 wall, 1 floor, 2 target, 3 box on target,
                4 box, 5 player (6 player on target).
            max_steps: steps after which the episode is truncated.
            **settings: further settings of `SokobanConfig`.
        """
        env = cls(max_steps=max_steps, **settings)
        env._levels = (level_from_state(room_fixed, room_state),)
        env._use_shape(env._shape_of_all())
        env.reset(seed=0)
        return env

    @property
    def level(self) -> Level:
        """The present position."""
        level = self._level
        return Level(level.rows, level.columns, level.floor, level.targets, self._boxes, self._player)

    def solution(
        self, optimize: Literal["pushes", "moves"] = "moves", max_nodes: int = 200_000
    ) -> Solution | None:
        """An optimal way to solve the present position (expert actions), or None when it is lost."""
        return solve(self.level, optimize=optimize, max_nodes=max_nodes)

    def expert_action(self) -> str | None:
        """The next move of a solution with the fewest moves; None when the position is lost."""
        solution = self.solution("moves")
        return self.projection.words()[solution.actions[0] - 1] if solution and solution.actions else None

    def _start(self, rng: np.random.Generator) -> None:
        config = self.config
        if self._levels:
            self._level = self._levels[int(rng.integers(len(self._levels)))]
        else:
            self._level = generate(
                rng,
                config.dim_room,
                config.num_boxes,
                min_pushes=config.min_pushes,
                max_pushes=config.most_pushes,
            )
        level = self._level
        self._boxes, self._player = level.boxes, level.player
        self._on_target = (level.boxes & level.targets).bit_count()
        self._steps_of = (0, -level.stride, level.stride, -1, 1)
        self._metrics = {} if level.optimal_pushes is None else {"optimal_pushes": level.optimal_pushes}
        # One symbol per bit, the spare column holds the line breaks: a step changes at most three of them.
        self._bare = _bare_symbols(level)
        self._shown = self._bare.copy()
        for box in bits(level.boxes):
            self._draw_box(box.bit_length() - 1)
        self._draw_player()

    def _advance(self, action: Action) -> Outcome:
        config = self.config
        reward = config.penalty_for_step
        if action == self.invalid_action:
            return Outcome(
                reward + config.invalid_penalty, effective=False, valid=False, metrics=self._metrics
            )
        step = self._steps_of[int(action)]
        place = self._player + step
        if place < 0 or not self._level.floor >> place & 1:
            return Outcome(reward, effective=False, metrics=self._metrics)
        bit = 1 << place
        if self._boxes & bit:
            beyond = place + step
            if beyond < 0 or not (self._level.floor & ~self._boxes) >> beyond & 1:
                return Outcome(reward, effective=False, metrics=self._metrics)
            self._boxes ^= bit | 1 << beyond
            self._draw_box(beyond)
            gained = (self._level.targets >> beyond & 1) - (self._level.targets >> place & 1)
            self._on_target += gained
            if gained:
                reward += config.reward_box_on_target if gained > 0 else config.penalty_box_off_target
        self._shown[self._player] = self._bare[self._player]
        self._player = place
        self._draw_player()
        won = self._on_target == self._level.targets.bit_count()
        if won:
            reward += config.reward_finished
        return Outcome(reward, terminated=won, success=won, metrics=self._metrics)

    def observe(self) -> str:
        """The room, one row a line."""
        return "".join(self._shown)

    def grid(self) -> np.ndarray:
        """The room as `[rows, columns]` int8, with the cell numbers of `from_state` (6 player on target)."""
        return np.array(self.level.grid(), dtype=np.int8)

    def render(self) -> Any:
        """The room as text, as rows of symbols, as an array of cells, or as pixels, by `render_mode`."""
        if self.render_mode == "list":
            return [list(row) for row in self.observe().split("\n")]
        if self.render_mode == "grid":
            return self.grid()
        if self.render_mode == "rgb_array":
            return self._pixels()
        return super().render()

    def _observation(self) -> Any:
        if self.config.observation == "grid":
            return self.grid()
        return self._pixels() if self.config.observation == "rgb" else self.observe()

    def _pixels(self) -> np.ndarray:
        return picture_of(self.observe(), "sokoban")

    def _draw_box(self, place: int) -> None:
        self._shown[place] = SYMBOLS[3] if self._level.targets >> place & 1 else SYMBOLS[4]

    def _draw_player(self) -> None:
        self._shown[self._player] = SYMBOLS[6] if self._level.targets >> self._player & 1 else SYMBOLS[5]

    def _shape_of_all(self) -> tuple[int, int]:
        """Rows and columns of the largest room; arrays need all to be alike."""
        shapes = {(level.rows, level.columns) for level in self._levels} or {self.config.dim_room}
        if len(shapes) > 1 and self.config.observation != "text":
            raise ConfigError(f"array observations need levels of one shape, got {sorted(shapes)}")
        return max(rows for rows, _ in shapes), max(columns for _, columns in shapes)

    def _use_shape(self, shape: tuple[int, int]) -> None:
        rows, columns = shape
        if self.config.observation == "grid":
            self.observation_space = Box(0, 6, (rows, columns), np.int8)
        elif self.config.observation == "rgb":
            self.observation_space = Box(0, 255, (rows * TILE, columns * TILE, 3), np.uint8)
        else:
            self.observation_space = Text(rows * (columns + 1), min_length=1, charset=SYMBOLS + "\n")


def _bare_symbols(level: Level) -> list[str]:
    """A symbol for each bit of a level with walls, floor and targets only; rows end in line breaks."""
    symbols = list((SYMBOLS[0] * level.columns + "\n") * level.rows)[:-1]
    for board, symbol in ((level.floor, SYMBOLS[1]), (level.targets, SYMBOLS[2])):
        for cell in bits(board):
            symbols[cell.bit_length() - 1] = symbol
    return symbols


def _levels(source: str | tuple[str, ...] | None) -> Sequence[Level]:
    """The levels of XSB texts, files and folders, in memory once for all envs of this process."""
    if source is None:
        return ()
    given = (source,) if isinstance(source, str) else source
    if not all(part.strip() for part in given):
        raise ConfigError(f"levels must be XSB text, files or folders, got {source!r}")
    parts = tuple(part if "\n" in part else str(Path(part).expanduser().resolve()) for part in given)
    files = [file for part in parts if "\n" not in part for file in level_files(part)]

    def read() -> Shared[Level]:
        levels: list[Level] = []
        for part in parts:
            levels += parse_xsb(part) if "\n" in part else read_levels(part)
        if not levels:
            raise ConfigError(f"levels must hold at least one level in XSB notation, got {source!r}")
        return Shared.of(levels, _levels, parts)

    return made_once(("sokoban", parts), files, read)
