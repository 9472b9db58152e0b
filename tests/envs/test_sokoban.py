import json
import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError, EnvError, SearchLimitError
from shoal.core.seeding import stream
from shoal.envs.sokoban import SokobanEnv, generate, parse_xsb, read_levels, solve

GOLDEN = Path(__file__).parent / "golden" / "sokoban.json"
MOVES = {1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}


def oracle(grid: list[list[int]], *, push_cost: int, walk_cost: int) -> int | None:
    """Cost of a cheapest solution by search over (player, boxes); shares only cell numbers with shoal."""
    cells = {(r, c): cell for r, row in enumerate(grid) for c, cell in enumerate(row)}
    goals = frozenset(place for place, cell in cells.items() if cell in (2, 3, 6))
    boxes = frozenset(place for place, cell in cells.items() if cell in (3, 4))
    player = next(place for place, cell in cells.items() if cell in (5, 6))
    start = (player, boxes)
    best = {start: 0}
    queue = deque([start])
    answer = None
    while queue:  # label-correcting: with costs 0 and 1 a deque is enough
        state = queue.popleft()
        player, boxes = state
        cost = best[state]
        if boxes == goals:
            answer = cost if answer is None else min(answer, cost)
            continue
        for down, right in MOVES.values():
            there = (player[0] + down, player[1] + right)
            if cells.get(there, 0) == 0:
                continue
            pushed = there in boxes
            beyond = (there[0] + down, there[1] + right)
            if pushed and (cells.get(beyond, 0) == 0 or beyond in boxes):
                continue
            after = (there, boxes - {there} | {beyond} if pushed else boxes)
            price = cost + (push_cost if pushed else walk_cost)
            if price < best.get(after, 10**9):
                best[after] = price
                (queue.append if price > cost else queue.appendleft)(after)
    return answer


ROOMS = st.tuples(
    st.integers(0, 2**32), st.sampled_from([((6, 6), 1), ((6, 6), 2), ((6, 6), 3), ((5, 9), 2), ((8, 7), 2)])
)


@settings(max_examples=100)
@given(ROOMS)
def test_every_room_needs_exactly_the_pushes_that_were_reported(room):
    seed, (dims, boxes) = room
    level = generate(stream(seed, "room"), dims, boxes)
    grid = level.grid()
    assert (len(grid), len(grid[0])) == dims
    assert sum(cell == 4 for row in grid for cell in row) == boxes  # none starts on a target
    assert oracle(grid, push_cost=1, walk_cost=0) == level.optimal_pushes


def test_a_room_harder_than_the_exhaustive_part_is_still_labelled_exactly():
    for seed in range(3):
        level = generate(stream(seed, "hard"), (8, 8), 2, min_pushes=16)
        assert level.optimal_pushes >= 16
        assert oracle(level.grid(), push_cost=1, walk_cost=0) == level.optimal_pushes


def test_a_beam_too_narrow_for_shortest_ways_does_not_spoil_the_labels(monkeypatch):
    from shoal.envs.sokoban import generator

    monkeypatch.setattr(generator, "MAX_POSITIONS", 5)
    monkeypatch.setattr(generator, "BEAM", 1)
    for seed in range(20):
        level = generate(stream(seed, "narrow"), (7, 7), 2, min_pushes=5)
        assert oracle(level.grid(), push_cost=1, walk_cost=0) == level.optimal_pushes >= 5


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_difficulty_stays_within_its_bounds(seed):
    level = generate(stream(seed, "room"), (7, 7), 2, min_pushes=4, max_pushes=6)
    assert 4 <= level.optimal_pushes <= 6


def test_a_difficulty_out_of_reach_says_what_was_reached():
    with pytest.raises(EnvError, match=r"no 5x5 room with 1 boxes needs 20 .*the hardest needed [1-9]"):
        generate(stream(0, "room"), (5, 5), 1, min_pushes=20)


@settings(max_examples=25)
@given(ROOMS)
def test_solutions_are_optimal_and_can_be_played(room):
    seed, (dims, boxes) = room
    level = generate(stream(seed, "solve"), dims, boxes)
    for optimize, costs in (("pushes", (1, 0)), ("moves", (1, 1))):
        solution = solve(level, optimize=optimize)
        cost = solution.pushes if optimize == "pushes" else len(solution.actions)
        assert cost == oracle(level.grid(), push_cost=costs[0], walk_cost=costs[1])
        env = SokobanEnv.from_state(*rooms(level.grid()), max_steps=10_000)
        for action in solution.actions:
            *_, terminated, _, info = env.step(action)
        assert terminated
        assert info["success"]


def rooms(grid):
    state = np.array(grid)
    fixed = np.where(state == 0, 0, np.where(np.isin(state, (2, 3, 6)), 2, 1))
    return fixed, state


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(0, 60))
def test_a_position_is_called_lost_only_when_it_is(seed, wandering):
    env = SokobanEnv(num_boxes=2, max_steps=1000)
    env.reset(seed=seed)
    walk = random.Random(seed)
    for _ in range(wandering):
        if env.step(walk.randint(1, 4))[2]:
            return
    solution = env.solution("pushes")
    expected = oracle(env.level.grid(), push_cost=1, walk_cost=0)
    assert (None if solution is None else solution.pushes) == expected


# A row with one box two cells from its target, by hand: 2 pushes, 3 moves.
CORRIDOR = "#######\n#@ $ .#\n#######"
# Two boxes against the bottom wall and targets above it: lost from the start.
LOST = "######\n#@ ..#\n#$  $#\n######"


def test_hand_made_levels_are_solved_by_hand_counted_actions():
    (level,) = parse_xsb(CORRIDOR)
    assert solve(level).actions == (4, 4, 4)
    assert solve(level).pushes == 2
    (lost,) = parse_xsb(LOST)
    assert solve(lost) is None


def test_a_search_that_is_cut_off_says_so():
    level = generate(stream(1, "hard"), (10, 10), 3, min_pushes=10)
    with pytest.raises(SearchLimitError, match="raise max_nodes"):
        solve(level, max_nodes=2)


def test_every_recorded_step_of_gym_sokoban_is_repeated():
    episodes = json.loads(GOLDEN.read_text())["episodes"]
    assert len(episodes) == 36
    for episode in episodes:
        env = SokobanEnv.from_state(episode["room_fixed"], episode["room_state"], episode["max_steps"])
        fixed = np.array(episode["room_fixed"])
        for step in episode["steps"]:
            _, reward, terminated, truncated, info = env.step(step["action"])
            assert reward == pytest.approx(step["reward"], abs=1e-9)
            assert (terminated or truncated) == step["done"]
            assert (info["success"], info["action_is_effective"]) == (step["success"], step["moved"])
            state = np.array(step["room_state"])
            state[(state == 5) & (fixed == 2)] = 6
            assert (env.grid() == state).all()
            assert env.observe() == "\n".join("".join("#_O√XPS"[cell] for cell in row) for row in state)


def test_a_state_that_cannot_be_played_is_refused_with_its_reason():
    fixed = np.array([[0, 0, 0, 0], [0, 1, 2, 0], [0, 0, 0, 0]])
    with pytest.raises(DataError, match="exactly one player"):
        SokobanEnv.from_state(fixed, np.array([[0, 0, 0, 0], [0, 1, 3, 0], [0, 0, 0, 0]]))
    with pytest.raises(DataError, match="as many boxes as targets"):
        SokobanEnv.from_state(fixed, np.array([[0, 0, 0, 0], [0, 5, 2, 0], [0, 0, 0, 0]]))
    with pytest.raises(DataError, match="one 2-d shape"):
        SokobanEnv.from_state(fixed, fixed[:2])
    with pytest.raises(DataError, match="must be 0 to 6"):
        SokobanEnv.from_state(fixed, fixed + 7)


def test_from_state_starts_every_episode_from_the_same_position():
    fixed = [[0, 0, 0, 0, 0], [0, 1, 1, 2, 0], [0, 0, 0, 0, 0]]
    env = SokobanEnv.from_state(fixed, [[0, 0, 0, 0, 0], [0, 5, 4, 2, 0], [0, 0, 0, 0, 0]], max_steps=3)
    # one push: -0.1 for the step, +1 for the box on its target, +10 for all of them
    assert env.step(4)[1:4] == (pytest.approx(10.9), True, False)
    with pytest.raises(EnvError, match="reset"):
        env.step(4)
    assert env.reset(seed=99)[0] == "#####\n#PXO#\n#####"
    assert [env.step(1)[3] for _ in range(3)] == [False, False, True]


def test_an_open_border_does_not_leak_around_the_room():
    fixed = np.array([[1, 1, 1], [1, 1, 2], [1, 1, 1]])
    state = np.array([[5, 1, 1], [1, 4, 2], [1, 1, 1]])
    env = SokobanEnv.from_state(fixed, state)
    for action in (1, 3):  # up and left, out of the board
        assert env.step(action)[4]["action_is_effective"] is False
    env.step(4), env.step(4)
    assert env.observe() == "__P\n_XO\n___"
    assert env.step(4)[4]["action_is_effective"] is False


def test_an_invalid_action_costs_a_step_and_changes_nothing():
    env = SokobanEnv(max_steps=2, invalid_penalty=-0.5)
    before, _ = env.reset(seed=1)
    after, reward, terminated, truncated, info = env.step(0)
    assert (after, reward, terminated, truncated) == (before, pytest.approx(-0.6), False, False)
    assert (info["action_is_valid"], info["action_is_effective"], info["step"]) == (False, False, 1)
    assert env.step(0)[3]


def test_levels_come_from_xsb_files_and_folders(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("; 0\n" + CORRIDOR + "\n\n; 1\n" + CORRIDOR.replace("@ ", " @"))
    (tmp_path / "b.xsb").write_text("Title: outside floor\n   ####\n####  #\n#@ $. #\n########\n")
    levels = read_levels(str(tmp_path))
    assert [level.columns for level in levels] == [7, 7, 8]
    board = (tmp_path / "b.xsb").read_text().partition("\n")[2]
    (tmp_path / "b.xsb").write_text(f"\ufeff{board}")  # as editors of Windows save it
    assert read_levels(str(tmp_path)) == levels
    env = SokobanEnv(levels=str(tmp_path))
    shown = {env.reset(seed=seed)[0] for seed in range(40)}
    assert len(shown) == 3
    assert all(env.observation_space.contains(text) for text in shown)
    assert "###\n####__#" in "\n".join(shown)  # what lies outside became wall
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SokobanEnv(levels="nowhere.xsb")
    with pytest.raises(ConfigError, match="levels must be XSB text, files or folders, got ''"):
        SokobanEnv(levels="")  # not the folder where one happens to be
    with pytest.raises(ConfigError, match="one shape"):
        SokobanEnv(levels=str(tmp_path), observation="grid")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "#P_XO_##" in SokobanEnv(levels="~/b.xsb").reset(seed=0)[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#####\n#@$ #\n#####", "as many boxes as targets"),
        ("#####\n# $.#\n#####", "exactly one player"),
        ("########\n#@#$ . #\n########", "cut off"),
    ],
)
def test_a_broken_level_names_its_line_and_fault(text, reason):
    with pytest.raises(DataError, match=f"level 1 at line 3: .*{reason}"):
        parse_xsb("a title\n\n" + text)


@pytest.mark.parametrize(
    "settings",
    [
        {"dim_room": (3, 6)},
        {"num_boxes": 0},
        {"num_boxes": 20},
        {"min_pushes": 31},
        {"min_pushes": 4, "max_pushes": 3},
        {"observation": "smell"},
        {"num_boxs": 2},
    ],
)
def test_a_config_that_cannot_work_is_refused(settings):
    with pytest.raises(ConfigError):
        SokobanEnv(**settings)


def test_pictures_and_arrays_show_what_the_text_shows():
    env = SokobanEnv(observation="rgb", render_mode="grid")
    pixels, _ = env.reset(seed=4)
    assert env.observation_space.contains(pixels)
    assert env.render().shape == (6, 6)
    text = env.observe().split("\n")
    tiles = {}
    for row in range(6):
        for column in range(6):
            tile = pixels[row * 24 : row * 24 + 24, column * 24 : column * 24 + 24].tobytes()
            assert tiles.setdefault(text[row][column], tile) == tile
    assert len(set(tiles.values())) == len(tiles) >= 5
