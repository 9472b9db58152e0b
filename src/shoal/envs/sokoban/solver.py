"""A* over pushes for Sokoban: the fewest pushes or the fewest moves, or a proof that there is no way."""

from __future__ import annotations

import heapq
from typing import Literal, NamedTuple

from shoal.core.errors import SearchLimitError
from shoal.envs.sokoban.levels import Level, bits

UP, DOWN, LEFT, RIGHT = 1, 2, 3, 4
_FAR = 10**6
_MATCHED_BOXES = 8  # with more boxes, each goes to its nearest target: a weaker bound, but a quick one
_Key = tuple[int, int]  # boxes, and the player's region (fewest pushes) or cell (fewest moves)


class Solution(NamedTuple):
    """A way to solve a level."""

    actions: tuple[int, ...]  # 1 Up, 2 Down, 3 Left, 4 Right
    pushes: int
    nodes: int  # positions that were expanded to find it


def solve(
    level: Level, *, optimize: Literal["pushes", "moves"] = "pushes", max_nodes: int = 200_000
) -> Solution | None:
    """An optimal solution, or None when there is none.

    Args:
        level: where to start from.
        optimize: what to have fewest of; the other number is not minimal in general.
        max_nodes: positions to expand before giving up.

    Raises:
        SearchLimitError: when `max_nodes` did not decide it.
    """
    if optimize not in ("pushes", "moves"):
        raise ValueError(f"optimize must be 'pushes' or 'moves', got {optimize!r}")
    search = _Search(level)
    by_moves = optimize == "moves"
    start: _Key = (
        level.boxes,
        1 << level.player if by_moves else search.reach(level.boxes, level.player)[-1],
    )
    costs = {start: 0}
    came: dict[_Key, tuple[_Key, int, int]] = {}  # from where, pushed box, direction
    players = {start: level.player}
    bound = search.bound(level.boxes)
    queue = [(bound, 0, 0, start)] if bound < _FAR else []
    done: set[_Key] = set()
    pushed = 0
    while queue:
        _, _, _, key = heapq.heappop(queue)
        if key in done:
            continue
        done.add(key)
        boxes = key[0]
        if boxes == level.targets:
            return search.solution(came, key, len(done))
        if len(done) > max_nodes:
            raise SearchLimitError(
                f"{max_nodes} positions did not decide this {level.rows}x{level.columns} level "
                f"with {level.boxes.bit_count()} boxes; raise max_nodes"
            )
        layers = search.reach(boxes, players[key])
        for box, direction, moved in search.pushes(boxes, layers[-1]):
            cost = costs[key] + 1
            if by_moves:
                spot = search.behind(box, direction)
                cost += next(steps for steps, layer in enumerate(layers) if layer & spot)
            player = box.bit_length() - 1
            after: _Key = (moved, box if by_moves else search.reach(moved, player)[-1])
            if cost < costs.get(after, _FAR):
                costs[after], came[after], players[after] = cost, (key, box, direction), player
                pushed -= 1  # newest first among equals
                queue_bound = search.bound(moved)
                heapq.heappush(queue, (cost + queue_bound, queue_bound, pushed, after))
    return None


class _Search:
    """The geometry of one level: what can be reached, pushed, and how far boxes are from home."""

    def __init__(self, level: Level) -> None:
        self.level = level
        stride = level.stride
        self._steps = {UP: -stride, DOWN: stride, LEFT: -1, RIGHT: 1}
        self._distances = [self._pull_distances(target) for target in bits(level.targets)]
        self._alive = 0
        for distances in self._distances:
            for cell in distances:
                self._alive |= cell
        self._bounds: dict[int, int] = {}

    def reach(self, boxes: int, player: int) -> list[int]:
        """Cells within 0, 1, 2, … steps of the player; the last one is the whole region."""
        free, stride = self.level.floor & ~boxes, self.level.stride
        region = 1 << player
        layers = [region]
        while True:
            wider = region | (
                ((region << 1) | (region >> 1) | (region << stride) | (region >> stride)) & free
            )
            if wider == region:
                return layers
            layers.append(wider)
            region = wider

    def behind(self, box: int, direction: int) -> int:
        """The cell from which a box is pushed in a direction."""
        return _shift(box, -self._steps[direction])

    def pushes(self, boxes: int, region: int) -> list[tuple[int, int, int]]:
        """(box, direction, boxes afterwards) of every push that does not spoil the level at once."""
        found = []
        open_cells = self._alive & ~boxes
        for direction, step in self._steps.items():
            for box in bits(boxes & _shift(region, step) & _shift(open_cells, -step)):
                place = _shift(box, step)
                moved = boxes ^ box | place
                if not self._stuck(moved, place):
                    found.append((box, direction, moved))
        return found

    def bound(self, boxes: int) -> int:
        """Pushes needed at least: the cheapest assignment of boxes to targets, each box moved alone."""
        if boxes not in self._bounds:
            rows = [[distances.get(box, _FAR) for distances in self._distances] for box in bits(boxes)]
            self._bounds[boxes] = _assignment(rows)
        return self._bounds[boxes]

    def solution(self, came: dict[_Key, tuple[_Key, int, int]], key: _Key, nodes: int) -> Solution:
        """The actions from the start to `key`, with the shortest walks between pushes."""
        pushes = []
        while key in came:
            key, box, direction = came[key]
            pushes.append((key, box, direction))
        actions: list[int] = []
        player = self.level.player
        for key, box, direction in reversed(pushes):
            actions += self._walk(key[0], player, self.behind(box, direction).bit_length() - 1)
            actions.append(direction)
            player = box.bit_length() - 1
        return Solution(tuple(actions), len(pushes), nodes)

    def _walk(self, boxes: int, start: int, goal: int) -> list[int]:
        layers = self.reach(boxes, start)
        cell = 1 << goal
        distance = next(steps for steps, layer in enumerate(layers) if layer & cell)
        actions = []
        for layer in reversed(layers[:distance]):
            for direction, step in self._steps.items():
                before = _shift(cell, -step)
                if before & layer:
                    actions.append(direction)
                    cell = before
                    break
        return actions[::-1]

    def _pull_distances(self, target: int) -> dict[int, int]:
        """For each cell, the pushes that bring a lone box from there to `target`; other cells are dead."""
        floor = self.level.floor
        distances = {target: 0}
        frontier = [target]
        while frontier:
            cell = frontier.pop(0)
            for step in self._steps.values():
                origin = _shift(cell, step)
                if origin & floor and _shift(origin, step) & floor and origin not in distances:
                    distances[origin] = distances[cell] + 1
                    frontier.append(origin)
        return distances

    def _stuck(self, boxes: int, place: int) -> bool:
        """Whether `place` now belongs to a full 2x2 block in which some box is not on a target."""
        blocked = boxes | ~self.level.floor
        stride = self.level.stride
        for side in (1, -1):
            for vertical in (stride, -stride):
                square = (
                    place | _shift(place, side) | _shift(place, vertical) | _shift(place, side + vertical)
                )
                if not square & ~blocked and square & boxes & ~self.level.targets:
                    return True
        return False


def _shift(board: int, step: int) -> int:
    return board << step if step > 0 else board >> -step


def _assignment(rows: list[list[int]]) -> int:
    """The least total of one entry per row, no column twice (`_FAR` when impossible)."""
    if len(rows) > _MATCHED_BOXES:
        return min(_FAR, sum(min(row) for row in rows))
    best = {0: 0}
    for row in rows:
        wider: dict[int, int] = {}
        for used, total in best.items():
            for column, distance in enumerate(row):
                bit = 1 << column
                if distance < _FAR and not used & bit and total + distance < wider.get(used | bit, _FAR):
                    wider[used | bit] = total + distance
        best = wider
    return min(best.values(), default=_FAR)
