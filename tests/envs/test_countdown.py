"""Countdown's grammar, scores and puzzles, against Python's own parser where the two must agree."""

import ast
import json
import operator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError, UnknownNameError
from shoal.envs import make
from shoal.envs.countdown import LEVELS, load_puzzles, make_puzzle, read_expression, score

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def by_python(node):
    """The value of an expression tree, exactly; the oracle shares nothing with the grammar."""
    if isinstance(node, ast.Expression):
        return by_python(node.body)
    if isinstance(node, ast.UnaryOp):
        return -by_python(node.operand) if isinstance(node.op, ast.USub) else by_python(node.operand)
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](by_python(node.left), by_python(node.right))
    return Fraction(node.value)


numbers = st.integers(0, 999).map(str)
signed = st.tuples(st.sampled_from(["", "-", "+", "- "]), numbers).map("".join)
expressions = st.recursive(
    signed,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", " - ", "*", "/ "]), inner).map("".join),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=12,
)


@given(expressions)
def test_every_expression_has_the_value_that_python_computes(text):
    try:
        expected = by_python(ast.parse(text.strip(), mode="eval"))
    except ZeroDivisionError:
        expected = None
    read = read_expression(text)
    assert read is not None
    assert read.value == expected
    used = [node.value for node in ast.walk(ast.parse(text.strip())) if isinstance(node, ast.Constant)]
    assert sorted(read.numbers) == sorted(used)


@pytest.mark.parametrize(
    ("numbers", "target", "answer"),
    [
        ([3, 5, 2], 8, "3+5#2"),
        ([2, 3, 5], 7, "2*3.5"),
        ([3, 5, 1], 8, "(3,5)[1]+3"),
        ([10, 5], 15, "1_0+5"),
        ([2, 1, 5], 205, "2e1+5"),
        ([3, 5], 1, "3<5"),
        ([3, 2, 5], 4, "3**2-5"),
        ([7, 2], 1, "7%2"),
        ([1], 1, '__import__("os").system("true")'),
        ([3, 5], 8, "3+5=8"),
        ([3, 5], 8, "３+5"),
        ([3, 5], 8, "3\u200b+5"),
        ([3, 5], 8, "03+5"),
        ([3, 5], 8, "3 5"),
        ([3, 5], 8, "3+5" + " " * 2000 + "junk"),
        ([3, 5], 8, ""),
        ([3, 5], 8, "3+"),
        ([3, 5], 8, "3+5)"),
        ([3, 5], 8, "3(5)"),
        ([3, 5], 8, "-----3+5"),
        ([3, 5], 8, None),
        ([3, 5], 8, "3+5+0"),  # a number too many
        ([3, 5, 5], 8, "3+5"),
        ([3, 5], 8, "5+5-2"),
        ([], 0, ""),
    ],
)
def test_no_trick_is_paid(numbers, target, answer):
    assert score(numbers, target, answer) == 0.0


def test_a_solution_is_worth_one_and_the_right_numbers_a_tenth():
    assert score([3, 5, 2], 16, " (3 + 5)*2 ") == 1.0
    assert score([3, 5, 2], 16, "3+5*2") == 0.1
    assert score([3, 5, 2], 4, "(3+5)/2") == 1.0
    assert score([1, 3, 8], Fraction(8, 3), "8*1/3") == 1.0
    assert score([1, 5, 5], 0, "1/(5-5)") == 0.1  # undefined, not an error
    assert score([3, 3], 0, "3-3") == 1.0
    assert score([3, 5], 2, "-3+5") == 1.0
    assert score([7, 3], 2.3333333333333335, "7/3") == 0.1  # exact, not within a tolerance


# Nothing here is timed; at these lengths only a bounded scorer comes back before the test's time is up.
HOSTILE = [
    "9**9**9**9",
    "(" * 500_000 + "1" + ")" * 500_000,
    "-" * 1_000_000 + "1",
    "1" * 1_000_000,
    "999999999*" * 100_000 + "1",
    " " * 1_000_000 + "1",
    "(" * 120 + "1" + ")" * 120,
]


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_score_nothing_and_cost_nothing(answer):
    for _ in range(200):
        assert score([1], 1, answer) == 0.0


@given(st.text(max_size=300), st.lists(st.integers(0, 20), min_size=1, max_size=4), st.integers(0, 50))
def test_any_text_gets_one_of_three_scores(answer, numbers, target):
    assert score(numbers, target, answer) in (0.0, 0.1, 1.0)


@pytest.mark.parametrize(("name", "largest"), [("easy", 20), ("medium", 50), ("hard", 99), ("expert", 99)])
def test_generated_puzzles_are_solved_by_their_solutions_within_their_level(name, largest):
    level, counts, signs, numbers = LEVELS[name], set(), set(), set()
    for seed in range(300):
        puzzle = make_puzzle(np.random.default_rng(seed), level)
        assert by_python(ast.parse(puzzle.solution, mode="eval")) == puzzle.target
        assert score(puzzle.numbers, puzzle.target, puzzle.solution) == 1.0
        assert puzzle.target not in puzzle.numbers
        assert 0 < puzzle.target <= level.largest_target
        assert all(0 < number <= level.largest_number for number in puzzle.numbers)
        numbers |= set(puzzle.numbers)
        counts.add(len(puzzle.numbers))
        signs |= set(puzzle.solution) & set("+-*/")
    assert max(numbers) == largest
    assert counts == set(range(level.min_numbers, level.max_numbers + 1))
    assert signs == set(level.operations)


def test_a_wrong_answer_can_be_corrected_while_answers_are_left():
    env = make("countdown", max_steps=3, difficulty="easy", invalid_penalty=-0.1)
    observation, _ = env.reset(seed=1)
    puzzle = env.puzzle
    assert observation == f"Numbers: {' '.join(map(str, puzzle.numbers))}\nTarget: {puzzle.target}"
    observation, reward, terminated, truncated, info = env.step("+".join(map(str, puzzle.numbers)) + "*0")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert "each number exactly once" in observation
    _, reward, terminated, _, info = env.step("")
    assert (reward, terminated, info["action_is_valid"]) == (-0.1, False, False)
    _, reward, terminated, _, info = env.step(puzzle.solution)
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_the_last_wrong_answer_ends_the_episode():
    env = make("countdown", difficulty="easy", format_score=0.2)
    env.reset(seed=4)
    wrong = "-".join(map(str, sorted(env.puzzle.numbers)))  # negative or zero, so never the target
    _, reward, terminated, truncated, info = env.step(wrong)
    assert (reward, terminated, truncated, info["success"]) == (0.2, True, False, False)


@given(expressions)
def test_every_expression_is_taken_from_a_response_as_it_stands(text):
    assert make("countdown").projection(f"<answer>{text}</answer>").actions == (text.strip(),)


@given(st.text(max_size=40))
def test_a_response_is_valid_for_the_projection_when_its_answer_is_an_expression_for_the_env(text):
    env = make("countdown", max_steps=2)
    env.reset(seed=0)
    projected = env.projection(f"<answer>{text}</answer>")
    assert env.step(projected.actions[0])[4]["action_is_valid"] == projected.valid


def test_the_projection_takes_expressions_from_either_tag():
    env = make("countdown")
    assert env.projection("<think>3</think><answer>(3 + 5) * 2</answer>").actions == ("(3 + 5) * 2",)
    assert env.projection("<action>3+5</action>").valid
    assert env.projection("3+5").actions == ("",)
    assert not env.projection(f"<action>{'1+' * 200}1</action>").valid


def test_puzzles_come_from_a_local_file(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"nums": [n, 2], "target": n + 2}) + "\n" for n in range(1, 41)))
    assert load_puzzles(str(path))[0].numbers == (1, 2)
    seen = {}
    for split in ("all", "train", "test"):
        env = make("countdown", source=str(path), split=split)
        seen[split] = {env.reset(seed=seed)[0] for seed in range(400)}
        assert env.step(f"{env.puzzle.numbers[0]}+2")[1] == 1.0
    assert {name: len(shown) for name, shown in seen.items()} == {"all": 40, "train": 36, "test": 4}
    assert seen["train"] | seen["test"] == seen["all"]


@pytest.mark.parametrize(
    "record",
    [
        {"nums": [1, "2"], "target": 3},
        {"nums": [], "target": 3},
        {"nums": [1, 2], "target": 3.0},
        {"nums": [True, 2], "target": 3},
        {"nums": [1] * 17, "target": 3},
        {"target": 3},
    ],
)
def test_a_broken_puzzle_is_named(tmp_path, record):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([{"nums": [1, 2], "target": 3}, record]))
    with pytest.raises(DataError, match=r"tasks\.json, record 1"):
        load_puzzles(str(path))


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'easy'"):
        make("countdown", difficulty="eays")
    with pytest.raises(ConfigError, match="split is for files"):
        make("countdown", split="train")


@pytest.mark.parametrize("difficulty", list(LEVELS))
def test_an_action_drawn_by_lot_uses_every_number_once_and_solves_some_puzzles(difficulty):
    env = make("countdown", difficulty=difficulty)
    rng, points = np.random.default_rng(0), []
    for seed in range(300):
        env.reset(seed=seed)
        drawn = env.random_action(rng)
        points.append(score(env.puzzle.numbers, env.puzzle.target, drawn))
    assert 0.0 not in points
    assert difficulty in ("hard", "expert") or 0.02 < points.count(1.0) / 300 < 0.5
    again = np.random.default_rng(0)
    env.reset(seed=0)
    assert env.random_action(again) == env.random_action(np.random.default_rng(0))
    assert len({env.random_action(again) for _ in range(20)}) > 5
