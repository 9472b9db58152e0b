"""Sokoban positions as bitboards, and reading them from XSB text or room arrays.

Cell (row, column) is bit `row * stride + column` with `stride = columns + 1`: the spare column is never
floor, so a shifted board cannot leak from one row into the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
SYMBOLS = "#_O√XPS"
"""How each kind of cell looks in a text observation, by its number."""

MAX_SIDE = 100
MAX_FILE_BYTES = 64 * 1024 * 1024
_XSB_ROW = re.compile(r"[#@+$*.\-_ ]*#[#@+$*.\-_ ]*")
_XSB_CELLS = {
    "#": WALL, " ": FLOOR, "-": FLOOR, "_": FLOOR, ".": TARGET, "*": BOX_ON_TARGET, "$": BOX, "@": PLAYER,
    "+": PLAYER_ON_TARGET,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Level:
    """A position: where the floor, targets, boxes and the player are."""

    rows: int
    columns: int
    floor: int  # bitboard of all that is not wall
    targets: int
    boxes: int
    player: int  # number of the player's bit
    optimal_pushes: int | None = None  # fewest pushes that solve it, where known

    @property
    def stride(self) -> int:
        """Bits from a cell to the one below it."""
        return self.columns + 1

    def grid(self) -> list[list[int]]:
        """Rows of cell numbers 0 to 6."""
        cells = []
        for row in range(self.rows):
            line = []
            for column in range(self.columns):
                place = row * self.stride + column
                bit = 1 << place
                on_target = bool(self.targets & bit)
                if not self.floor & bit:
                    line.append(WALL)
                elif self.boxes & bit:
                    line.append(BOX_ON_TARGET if on_target else BOX)
                elif place == self.player:
                    line.append(PLAYER_ON_TARGET if on_target else PLAYER)
                else:
                    line.append(TARGET if on_target else FLOOR)
            cells.append(line)
        return cells


def level_from_grid(grid: Sequence[Sequence[int]]) -> Level:
    """The level of rows of cell numbers 0 to 6; says what is wrong with one that cannot be played."""
    rows, columns = len(grid), max((len(row) for row in grid), default=0)
    if not 0 < rows <= MAX_SIDE or not 0 < columns <= MAX_SIDE:
        raise DataError(f"a level must have 1 to {MAX_SIDE} rows and columns, got {rows} x {columns}")
    floor = targets = boxes = 0
    players = []
    for row, cells in enumerate(grid):
        for column, cell in enumerate(cells):
            place = row * (columns + 1) + column
            bit = 1 << place
            floor |= bit if cell != WALL else 0
            targets |= bit if cell in (TARGET, BOX_ON_TARGET, PLAYER_ON_TARGET) else 0
            boxes |= bit if cell in (BOX, BOX_ON_TARGET) else 0
            if cell in (PLAYER, PLAYER_ON_TARGET):
                players.append(place)
    if len(players) != 1:
        raise DataError(f"a level must have exactly one player, got {len(players)}")
    if not boxes or boxes.bit_count() != targets.bit_count():
        raise DataError(
            f"a level must have as many boxes as targets, and at least one, "
            f"got {boxes.bit_count()} and {targets.bit_count()}"
        )
    return Level(rows, columns, floor, targets, boxes, players[0])


def level_from_state(room_fixed: Any, room_state: Any) -> Level:
    """The level of two arrays: what never moves (0 wall, 1 floor, 2 target) and what stands there now."""
    fixed, state = np.asarray(room_fixed), np.asarray(room_state)
    if fixed.ndim != 2 or fixed.shape != state.shape:
        raise DataError(f"the rooms must be two arrays of one 2-d shape, got {fixed.shape} and {state.shape}")
    for name, room, highest in (("room_fixed", fixed, TARGET), ("room_state", state, PLAYER_ON_TARGET)):
        if room.size and (int(room.min()) < 0 or int(room.max()) > highest):
            raise DataError(f"cells of {name} must be 0 to {highest}, got {np.unique(room).tolist()}")
    on_target = {FLOOR: TARGET, BOX: BOX_ON_TARGET, PLAYER: PLAYER_ON_TARGET}
    grid = [
        [on_target.get(cell, cell) if base == TARGET else cell for base, cell in zip(*pair, strict=True)]
        for pair in zip(fixed.tolist(), state.tolist(), strict=True)
    ]
    level = level_from_grid(grid)
    painted = sum(base == TARGET for row in fixed.tolist() for base in row)
    if painted != level.targets.bit_count():
        raise DataError("room_state shows a target where room_fixed has none")
    return level


def parse_xsb(text: str) -> list[Level]:
    """The levels of a text in XSB notation (`#` wall, `@` player, `$` box, `.` target, `*`/`+` on target).

    Lines that are no rows (titles, `;` comments, blanks) part the levels. Cells that the player could never
    come near, such as the outside, become wall.
    """
    levels: list[Level] = []
    rows: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if _XSB_ROW.fullmatch(line):
            first = first if rows else number
            rows.append(line)
        elif rows:
            try:
                width = max(map(len, rows))
                levels.append(_walled([[_XSB_CELLS[cell] for cell in row.ljust(width)] for row in rows]))
            except DataError as error:
                raise DataError(f"level {len(levels) + 1} at line {first}: {error}") from error
            rows = []
    return levels


def level_files(path: str) -> list[Path]:
    """The files that `read_levels` reads, in its order."""
    place = Path(path)
    if place.is_dir():
        return sorted(file for file in place.rglob("*") if file.suffix in (".txt", ".xsb", ".sok"))
    if place.is_file():
        return [place]
    raise FileNotFoundError(f"no Sokoban levels at {path}: expected an XSB file or a folder of them")


def read_levels(path: str) -> tuple[Level, ...]:
    """The levels of an XSB file, or of all `.txt`, `.xsb` and `.sok` files below a folder, by path."""
    levels: list[Level] = []
    for file in level_files(path):
        if file.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{file} has {file.stat().st_size} bytes, more than the {MAX_FILE_BYTES} allowed")
        try:
            levels += parse_xsb(file.read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 text: {error}") from error
        except DataError as error:
            raise DataError(f"{file}: {error}") from error
    if not levels:
        raise DataError(f"{path} holds no level in XSB notation")
    return tuple(levels)


def fill(start: int, free: int, stride: int) -> int:
    """The cells of `free` connected with `start` (both bitboards); `start` counts whether free or not."""
    region = start
    while True:
        wider = region | (((region << 1) | (region >> 1) | (region << stride) | (region >> stride)) & free)
        if wider == region:
            return region
        region = wider


def bits(board: int) -> Iterator[int]:
    """Each cell of a bitboard as a bitboard of one."""
    while board:
        lowest = board & -board
        yield lowest
        board ^= lowest


def _walled(grid: list[list[int]]) -> Level:
    """The level of `grid` without the floor that is cut off from the player."""
    level = level_from_grid(grid)
    inside = fill(1 << level.player, level.floor, level.stride)
    if (level.boxes | level.targets) & ~inside:
        raise DataError("a box or a target is cut off from the player by walls")
    return Level(level.rows, level.columns, inside, level.targets, level.boxes, level.player)
