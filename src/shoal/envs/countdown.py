"""Countdown: reach a target from given numbers with + - * / and parentheses, each number exactly once.

Answers are read by a grammar of their own and computed on exact fractions; nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import ConfigError, DataError, unknown_name
from shoal.envs.actions import Projection
from shoal.envs.dice import BulkRandom
from shoal.envs.records import field, load_records, shared_items
from shoal.envs.spaces import FreeText
from shoal.envs.text import Action, Outcome, TextEnv, check_numbers

# --- the grammar of answers
MAX_ANSWER = 256
"""Characters of an expression; longer ones score 0."""
MAX_NUMBERS = 16
MAX_DEPTH = 32
MAX_SIGNS = 4
_TOKEN = re.compile(r"[ \t]*(?:([0-9]{1,9})(?![0-9])|([+\-*/()]))", re.ASCII)


class _RefusedError(Exception):
    """The text is not an expression of the grammar."""


class _Reader:
    """Recursive descent over the tokens of one expression; a division by zero makes the value None."""

    def __init__(self, text: str) -> None:
        self.numbers: list[int] = []
        self.tokens: list[int | str] = []
        self.at = 0
        end = 0
        while end < len(text):
            match = _TOKEN.match(text, end)
            if match is None:
                raise _RefusedError("character")
            digits, sign = match.groups()
            if digits and ((digits[0] == "0" and len(digits) > 1) or len(self.numbers) == MAX_NUMBERS):
                raise _RefusedError("number")
            if digits:
                self.numbers.append(int(digits))
            self.tokens.append(int(digits) if digits else sign)
            end = match.end()
        self.tokens.append("end")

    def sum(self, depth: int) -> Fraction | None:
        """Terms joined by + and -."""
        if depth > MAX_DEPTH:
            raise _RefusedError("depth")
        value = self.product(depth)
        while (sign := self.tokens[self.at]) in ("+", "-"):
            self.at += 1
            term = self.product(depth)
            if value is None or term is None:
                value = None
                continue
            value = value + term if sign == "+" else value - term
        return value

    def product(self, depth: int) -> Fraction | None:
        """Factors joined by * and /."""
        value = self.factor(depth)
        while (sign := self.tokens[self.at]) in ("*", "/"):
            self.at += 1
            factor = self.factor(depth)
            if value is None or factor is None or (sign == "/" and factor == 0):
                value = None
            else:
                value = value * factor if sign == "*" else value / factor
        return value

    def factor(self, depth: int) -> Fraction | None:
        """A number or a parenthesis, with up to `MAX_SIGNS` signs before it."""
        negative, signs = False, 0
        while (token := self.tokens[self.at]) in ("+", "-"):
            negative ^= token == "-"
            signs += 1
            self.at += 1
            if signs > MAX_SIGNS:
                raise _RefusedError("signs")
        self.at += 1
        value: Fraction | None
        if isinstance(token, int):
            value = Fraction(token)
        elif token == "(":
            value = self.sum(depth + 1)
            if self.tokens[self.at] != ")":
                raise _RefusedError("parenthesis")
            self.at += 1
        else:
            raise _RefusedError("operand")
        return -value if negative and value is not None else value


class Expression(NamedTuple):
    """What an answer says: its exact value (None when it divides by zero) and the numbers it uses."""

    value: Fraction | None
    numbers: tuple[int, ...]


def read_expression(answer: object) -> Expression | None:
    """The meaning of an answer, or None when it is not an expression of the grammar.

    The grammar has ASCII integers without leading zeros, + - * / and parentheses; at most 256 characters,
    16 numbers, 32 levels and 4 signs in a row.

    >>> read_expression("(3 + 5) * 2")
    Expression(value=Fraction(16, 1), numbers=(3, 5, 2))
    """
    if not isinstance(answer, str) or len(answer) > 4 * MAX_ANSWER:
        return None
    text = answer.strip(" \t\r\n")
    if not text or len(text) > MAX_ANSWER:
        return None
    try:
        reader = _Reader(text)
        value = reader.sum(0)
    except _RefusedError:
        return None
    if reader.tokens[reader.at] != "end" or not reader.numbers:
        return None
    return Expression(value, tuple(reader.numbers))


# --- puzzles
FORMAT_SCORE = 0.1
"""What an expression over the right numbers with a wrong value scores."""


def score(numbers: Sequence[int], target: int | Fraction, answer: object) -> float:
    """1 for an expression that uses each number exactly once and equals the target, else 0.1 or 0.

    0.1 is for the right numbers with a wrong value (or a division by zero); everything else scores 0,
    in a time that does not depend on the length of the answer.

    >>> score([3, 5, 2], 16, "(3 + 5) * 2"), score([3, 5, 2], 16, "3 + 5 * 2"), score([3, 5, 2], 8, "3+5#2")
    (1.0, 0.1, 0.0)
    """
    expression = read_expression(answer)
    if expression is None or sorted(expression.numbers) != sorted(numbers):
        return 0.0
    return 1.0 if expression.value == target else FORMAT_SCORE


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Numbers and target; `solution` is an expression that solves it where one is known."""

    numbers: tuple[int, ...]
    target: int
    solution: str | None = None


@dataclass(frozen=True)
class Level:
    """What generated puzzles of one difficulty are made of."""

    min_numbers: int
    max_numbers: int
    largest_number: int
    largest_target: int
    operations: str


LEVELS = {
    "easy": Level(3, 3, 20, 60, "+-"),
    "medium": Level(3, 4, 50, 200, "+-*"),
    "hard": Level(4, 5, 99, 999, "+-*/"),
    "expert": Level(5, 6, 99, 999, "+-*/"),
}


def make_puzzle(rng: np.random.Generator, level: Level) -> Puzzle:
    """A puzzle that is solvable by construction: numbers are joined at random until one value is left.

    Intermediate values are positive integers; the target is none of the numbers.
    """
    dice = BulkRandom(rng)
    while True:
        count = dice.between(level.min_numbers, level.max_numbers)
        numbers = tuple(dice.between(1, level.largest_number) for _ in range(count))
        parts = [(number, str(number)) for number in numbers]
        while len(parts) > 1:
            left = parts.pop(dice.below(len(parts)))
            right = parts.pop(dice.below(len(parts)))
            parts.append(_join(dice, left, right, level))
        target, solution = parts[0]
        if target <= level.largest_target and target not in numbers:
            return Puzzle(numbers, target, solution[1:-1])


def _join(dice: BulkRandom, left: tuple[int, str], right: tuple[int, str], level: Level) -> tuple[int, str]:
    """One operation on two parts, drawn among those that give a positive integer of a useful size."""
    if left[0] < right[0]:
        left, right = right, left
    (a, first), (b, second) = left, right
    possible = {
        "+": a + b,
        "-": a - b,
        "*": a * b if b > 1 and a * b <= 4 * level.largest_target else 0,
        "/": a // b if b > 1 and a % b == 0 else 0,
    }
    signs = [sign for sign in level.operations if possible[sign] > 0] or ["+"]
    sign = dice.choice(signs)
    return possible[sign], f"({first} {sign} {second})"


def load_puzzles(path: str) -> list[Puzzle]:
    """Puzzles of a local JSON, JSONL or parquet file with `nums` (or `numbers`) and `target`."""
    puzzles = []
    for number, record in enumerate(load_records(path)):
        where = f"{path}, record {number}"
        numbers, target = field(record, ("nums", "numbers"), where), field(record, ("target",), where)
        if isinstance(numbers, np.ndarray):
            numbers = numbers.tolist()
        good = isinstance(numbers, list) and all(type(n) is int and 0 <= n < 10**9 for n in numbers)
        if not good or not 1 <= len(numbers) <= MAX_NUMBERS or type(target) is not int:
            raise DataError(f"{where}: expected integers, got numbers {numbers!r} and target {target!r}")
        puzzles.append(Puzzle(tuple(numbers), target))
    return puzzles


# --- the env
@dataclass(frozen=True)
class CountdownConfig:
    """Settings of `CountdownEnv`."""

    source: str = "generated"
    """"generated", or a local .json, .jsonl or .parquet file with `nums` and `target`."""
    difficulty: str = "medium"
    """Of generated puzzles: easy, medium, hard or expert."""
    split: str = "all"
    """Of a file: all, train, or test (every tenth puzzle)."""
    max_steps: int = 1
    """Answers per puzzle; a wrong one can be corrected until they are spent."""
    format_score: float = FORMAT_SCORE
    """Reward of an expression over the right numbers with a wrong value."""
    invalid_penalty: float = 0.0
    """Reward of a response without a usable action."""

    def __post_init__(self) -> None:
        if self.difficulty not in LEVELS:
            raise unknown_name("Countdown difficulty", self.difficulty, LEVELS)
        check_numbers(self, max_steps=1)
        if self.source == "generated" and self.split != "all":
            raise ConfigError("split is for files; generated puzzles differ by their seeds")


class CountdownEnv(TextEnv[CountdownConfig]):
    """Make the target from the numbers; the action is the expression.

    Reward 1 for a solution, `format_score` for the right numbers with a wrong value, else 0. The episode
    terminates on a solution and with the last wrong answer; a response without an answer only costs a step.
    """

    Config = CountdownConfig
    seed_stream = "CountdownEnv"
    instructions = (
        "Use each of the given numbers exactly once, with + - * / and parentheses, so that the result is "
        "the target. Answer with the expression alone, for example (1 + 2) * 3."
    )
    projection = Projection(
        parse=lambda text: None if read_expression(text) is None else text,
        invalid="",
        tags=("action", "answer"),
    )
    action_space = FreeText(65_536, min_length=1)
    observation_space = FreeText(1_024, min_length=1)

    def __init__(self, config: CountdownConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        source, split = self.config.source, self.config.split
        self._puzzles = None if source == "generated" else shared_items(load_puzzles, source, split)

    @property
    def puzzle(self) -> Puzzle:
        """The present puzzle; its solution is for experts and tests."""
        return self._puzzle

    def _start(self, rng: np.random.Generator) -> None:
        if self._puzzles is None:
            self._puzzle = make_puzzle(rng, LEVELS[self.config.difficulty])
        else:
            self._puzzle = self._puzzles[int(rng.integers(len(self._puzzles)))]
        self._feedback = ""

    def _advance(self, action: Action) -> Outcome:
        answer, last = str(action), self._steps + 1 >= self.config.max_steps
        expression = read_expression(answer)
        if expression is None:
            self._feedback = "\nThat is not an expression of numbers, + - * / and parentheses."
            if answer == self.invalid_action:
                return Outcome(self.config.invalid_penalty, valid=False, effective=False)
            return Outcome(0.0, terminated=last, valid=False)
        points = score(self._puzzle.numbers, self._puzzle.target, answer)
        if points == 1.0:
            self._feedback = "\nCorrect."
            return Outcome(1.0, terminated=True, success=True)
        value = "undefined" if expression.value is None else expression.value
        self._feedback = f"\nYour last answer: {answer.strip()} = {value}."
        if points == 0.0:
            self._feedback += " It does not use each number exactly once."
        return Outcome(self.config.format_score if points else 0.0, terminated=last)

    def available_actions(self) -> list[str]:
        """A pattern: the answer is free text."""
        return ["<expression>"]

    def expert_action(self) -> str | None:
        """The solution of the puzzle, where one is known."""
        return self._puzzle.solution

    def random_action(self, rng: np.random.Generator) -> str:
        """All numbers in a random order, with random signs between them."""
        level = LEVELS[self.config.difficulty]
        numbers = [str(self._puzzle.numbers[i]) for i in rng.permutation(len(self._puzzle.numbers))]
        signs = [level.operations[int(i)] for i in rng.integers(len(level.operations), size=len(numbers) - 1)]
        return numbers[0] + "".join(
            f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=True)
        )

    def observe(self) -> str:
        """Numbers, target, and what became of the last answer."""
        numbers = " ".join(map(str, self._puzzle.numbers))
        return f"Numbers: {numbers}\nTarget: {self._puzzle.target}{self._feedback}"
