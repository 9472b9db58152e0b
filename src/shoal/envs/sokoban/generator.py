"""Sokoban rooms made backwards: from the solved position, boxes are pulled away as far as they go.

A breadth-first search over (boxes, region of the player) visits positions in order of the pulls that lead to
them; each is solved by the same number of pushes and by no fewer. So a room is solvable and its difficulty is
known before anyone has played it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shoal.core.errors import EnvError, SearchLimitError
from shoal.envs.dice import BulkRandom
from shoal.envs.sokoban.levels import Level, fill
from shoal.envs.sokoban.solver import solve

MAX_ROOMS = 3000
"""Floor plans tried before `generate` says that a difficulty is out of reach."""
MAX_POSITIONS = 1500
"""Positions of one plan that are searched exhaustively."""
MAX_BEAM_POSITIONS = 20_000
BEAM = 48
"""Positions kept per pull beyond that, when a room must be harder than the exhaustive part got."""

_STAMPS = (((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 0), (0, 1), (1, 0)), ((0, 0), (-1, 0), (0, -1), (-1, -1)))
STEPS = 2.8
"""Steps of the digger per row and column."""
_TURN = int(0.35 * 2**16)  # how often, of 2**16 steps, the digger picks its direction anew
_BLOCK = 48  # raw words that a room takes at a time
_Position = tuple[int, int]  # boxes, region of the player


class _Found(NamedTuple):
    boxes: int
    region: int  # of the player
    pushes: int
    exact: bool  # no fewer pushes solve it


def generate(
    rng: np.random.Generator,
    dim_room: tuple[int, int] = (6, 6),
    num_boxes: int = 1,
    *,
    min_pushes: int = 1,
    max_pushes: int | None = None,
) -> Level:
    """A solvable room with `optimal_pushes` in `[min_pushes, max_pushes]`, hard ones preferred.

    Args:
        rng: decides everything; the same stream gives the same room on every machine.
        dim_room: rows and columns, the outer walls included; at least 4 each.
        num_boxes: boxes, none of which starts on a target.
        min_pushes: fewest pushes an optimal solution may have.
        max_pushes: most pushes an optimal solution may have; None for no limit.

    Raises:
        EnvError: when no floor plan in `MAX_ROOMS` gives such a room.
    """
    dice = BulkRandom(rng, _BLOCK)
    plan = _plan(*dim_room)
    limit = math.inf if max_pushes is None else max_pushes
    deepest = 0
    for _ in range(MAX_ROOMS):
        floor = _dig(dice, plan)
        if floor.bit_count() < 2 * num_boxes + 2:
            continue
        targets = 0
        for _ in range(num_boxes):
            targets |= _bit_of(dice, floor & ~targets)
        found = _pull_away(dice, plan.stride, floor, targets, min_pushes, limit)
        if found is None:
            continue
        if found.pushes < min_pushes:
            deepest = max(deepest, found.pushes)
            continue
        boxes, region, pushes, exact = found
        player = _bit_of(dice, region)
        level = plan.level(floor, targets, boxes, player, pushes)
        if not exact:
            level = replace(level, optimal_pushes=_least_pushes(level))
        if level.optimal_pushes and min_pushes <= level.optimal_pushes <= limit:
            return level
        deepest = max(deepest, level.optimal_pushes or 0)
    raise EnvError(
        f"no {dim_room[0]}x{dim_room[1]} room with {num_boxes} boxes needs {min_pushes} to "
        f"{max_pushes or 'any'} pushes among {MAX_ROOMS} rooms (the hardest needed {deepest}); "
        "enlarge dim_room or relax the bounds"
    )


def _pull_away(
    dice: BulkRandom, stride: int, floor: int, targets: int, least: int, most: float
) -> _Found | None:
    """One of the farthest positions with no box on a target, None when there is none."""
    seen: dict[int, list[int]] = {targets: []}
    frontier: list[_Position] = []
    rest = floor & ~targets
    while rest:
        region = fill(rest & -rest, floor & ~targets, stride)
        rest &= ~region
        seen[targets].append(region)
        frontier.append((targets, region))
    best: tuple[list[_Position], int, bool] | None = None
    pulls, positions, exact = 0, 0, True
    while frontier and pulls < most:
        pulls += 1
        room_for = MAX_POSITIONS - positions if exact else math.inf
        frontier = _pulled(frontier, seen, floor, stride, room_for)
        positions += len(frontier)
        away = [position for position in frontier if not position[0] & targets]
        if away:
            best = away, pulls, exact
        if positions >= MAX_POSITIONS:
            # All so far were reached by a shortest way; a beam goes deeper but may miss a shorter one.
            if best is not None and best[1] >= least:
                break
            if positions >= MAX_BEAM_POSITIONS:
                break
            exact = False
            if len(frontier) > BEAM:
                frontier = [dice.choice(frontier) for _ in range(BEAM)]
    return None if best is None else _Found(*dice.choice(best[0]), *best[1:])


def _pulled(
    frontier: list[_Position], seen: dict[int, list[int]], floor: int, stride: int, room_for: float
) -> list[_Position]:
    """The new positions one pull away from `frontier`, at most about `room_for`; adds them to `seen`."""
    found: list[_Position] = []
    for boxes, region in frontier:
        free = floor & ~boxes
        for step in (1, -1, stride, -stride):
            if step > 0:  # boxes with the player on one side and room behind the player
                movable = boxes & (region >> step) & (free >> 2 * step)
            else:
                movable = boxes & (region << -step) & (free << -2 * step)
            while movable:
                box = movable & -movable
                movable ^= box
                if step > 0:
                    place, player = box << step, box << 2 * step
                else:
                    place, player = box >> -step, box >> -2 * step
                moved = boxes ^ box | place
                regions = seen.get(moved)
                if regions is None:
                    regions = seen[moved] = []
                for known in regions:
                    if known & player:
                        break
                else:
                    new = fill(player, floor & ~moved, stride)
                    regions.append(new)
                    found.append((moved, new))
        if len(found) >= room_for:
            break
    return found


def _least_pushes(level: Level) -> int | None:
    try:
        solution = solve(level, optimize="pushes", max_nodes=20_000)
    except SearchLimitError:
        return None
    return None if solution is None else solution.pushes


@dataclass(frozen=True)
class _Plan:
    """Where the digger can go in a room of one size, without its outer walls: these need no bits."""

    rows: int
    columns: int
    neighbours: tuple[tuple[int, ...], ...]  # by direction, from cell to cell
    stamps: tuple[tuple[int, ...], ...]  # by shape, the bitboard that it opens around a cell

    @property
    def stride(self) -> int:
        return self.columns + 1

    def level(self, floor: int, targets: int, boxes: int, player: int, pushes: int) -> Level:
        """The level with its outer walls."""
        wide = [self._widened(board) for board in (floor, targets, boxes, player)]
        return Level(
            self.rows + 2, self.columns + 2, wide[0], wide[1], wide[2], wide[3].bit_length() - 1, pushes
        )

    def _widened(self, board: int) -> int:
        row_mask = (1 << self.stride) - 1
        shift = self.columns + 4  # one row down and one column to the right, in the wider room
        wide = 0
        while board:
            wide |= (board & row_mask) << shift
            board >>= self.stride
            shift += self.columns + 3
        return wide


@lru_cache(maxsize=32)
def _plan(height: int, width: int) -> _Plan:
    rows, columns = height - 2, width - 2
    if rows < 2 or columns < 2:
        raise ValueError(f"dim_room must be at least (4, 4), got {(height, width)}")
    stride = columns + 1
    places = [(place // stride, min(place % stride, columns - 1)) for place in range(rows * stride)]
    neighbours = tuple(
        tuple(
            min(max(row + down, 0), rows - 1) * stride + min(max(column + right, 0), columns - 1)
            for row, column in places
        )
        for down, right in ((1, 0), (0, 1), (-1, 0), (0, -1))
    )
    stamps = tuple(
        tuple(
            sum(
                1 << (row + down) * stride + column + right
                for down, right in shape
                if 0 <= row + down < rows and 0 <= column + right < columns
            )
            for row, column in places
        )
        for shape in _STAMPS
    )
    return _Plan(rows, columns, neighbours, stamps)


def _dig(dice: BulkRandom, plan: _Plan) -> int:
    """A connected floor, dug by a random walk that opens a small shape wherever it stands."""
    steps = int(STEPS * (plan.rows + plan.columns))
    place = dice.below(plan.rows) * plan.stride + dice.below(plan.columns)
    direction = dice.below(4)
    floor = 1 << place
    neighbours, stamps = plan.neighbours, plan.stamps
    for word in dice.words(steps):  # one word decides a step: the turn, the direction, the shape
        if word & 0xFFFF < _TURN:
            direction = word >> 16 & 3
        place = neighbours[direction][place]
        floor |= stamps[word >> 18 & 3][place]
    return fill(1 << place, floor, plan.stride)


def _bit_of(dice: BulkRandom, board: int) -> int:
    """A random cell of a bitboard."""
    for _ in range(dice.below(board.bit_count())):
        board &= board - 1  # without its lowest cell
    return board & -board
