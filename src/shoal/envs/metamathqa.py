"""MetaMathQA: a question in words, several attempts; each attempt halves what a right answer is worth."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, DataError
from shoal.envs.actions import Projection
from shoal.envs.dice import BulkRandom
from shoal.envs.math_answers import (
    MAX_ANSWER,
    MAX_RESPONSE,
    final_answer,
    is_correct,
    is_numerical,
    words_of,
)
from shoal.envs.records import field, load_records, shared_items
from shoal.envs.spaces import FreeText
from shoal.envs.text import Action, Outcome, TextEnv, check_numbers


# --- questions made by rule: a story and its exact answer; a function of the generator alone
@dataclass(frozen=True, slots=True)
class Question:
    """A question and its final answer."""

    text: str
    answer: str


NAMES = (
    "Ana", "Bilal", "Chen", "Dalia", "Emeka", "Farah", "Goran", "Hana", "Idris", "Jonas", "Kavya", "Liam",
    "Mei", "Nadia", "Omar", "Priya", "Quinn", "Rosa", "Samir", "Tara", "Ulrich", "Vera", "Wei", "Ximena",
    "Yara", "Zoe",
)  # fmt: skip
ITEMS = (
    "apples", "marbles", "stickers", "pencils", "postcards", "beads", "shells", "coins", "buttons",
    "walnuts", "bookmarks", "seeds", "tickets", "cookies", "stamps", "ribbons", "candles", "tiles",
)  # fmt: skip
CONTAINERS = ("boxes", "bags", "baskets", "packs", "jars", "crates")
GOODS = ("notebook", "hat", "lamp", "kettle", "backpack", "puzzle", "chair", "helmet", "blanket", "radio")


def as_text(value: Fraction | int) -> str:
    """An exact number as people write it: an integer, a finite decimal, or a fraction.

    >>> as_text(Fraction(5, 2)), as_text(Fraction(1, 3)), as_text(Fraction(4))
    ('2.5', '1/3', '4')
    """
    over, under = value.numerator, value.denominator
    if under == 1:
        return str(over)
    for places in range(1, 5):
        if 10**places % under == 0:
            sign, digits = (
                "-" if over < 0 else "",
                str(abs(over) * 10**places // under).rjust(places + 1, "0"),
            )
            return f"{sign}{digits[:-places]}.{digits[-places:]}"
    return f"{over}/{under}"


def make_question(rng: np.random.Generator, steps: int) -> Question:
    """A word problem that takes about `steps` operations (1 to 8)."""
    dice = BulkRandom(rng)
    kinds = [kind for kind, (low, high) in KINDS.items() if low <= steps <= high]
    text, answer = dice.choice(kinds)(dice, steps)
    return Question(text, as_text(answer))


Story = tuple[str, Fraction]


def collection(dice: BulkRandom, steps: int) -> Story:
    """One person's things grow and shrink; each event is one operation."""
    name, other, item = dice.choice(NAMES[:13]), dice.choice(NAMES[13:]), dice.choice(ITEMS)
    count = dice.between(4, 40)
    sentences = [f"{name} has {count} {item}."]
    for _ in range(steps):
        kind = dice.between(0, 5)
        parts = [n for n in range(2, 7) if count % n == 0 and count > n]
        if kind == 0 and count > 3:
            lost = dice.between(1, count - 2)
            sentences.append(f"Then {name} gives {lost} of the {item} to {other}.")
            count -= lost
        elif kind == 1 and count <= 200:
            times = dice.between(2, 4)
            word = {2: "twice", 3: "three times", 4: "four times"}[times]
            sentences.append(f"By the next week {name} has {word} as many {item} as before.")
            count *= times
        elif kind == 2 and parts:
            part = dice.choice(parts)
            sentences.append(f"{name} loses 1/{part} of the {item}.")
            count -= count // part
        elif kind == 3:
            packs, each = dice.between(2, 9), dice.between(2, 12)
            sentences.append(f"{name} buys {packs} {dice.choice(CONTAINERS)} with {each} {item} in each.")
            count += packs * each
        else:
            found = dice.between(2, 60)
            sentences.append(f"{other} sends {name} {found} more {item}.")
            count += found
    sentences.append(f"How many {item} does {name} have now?")
    return " ".join(sentences), Fraction(count)


def shopping(dice: BulkRandom, steps: int) -> Story:
    """Several goods at their prices, and the change from a round sum."""
    name = dice.choice(NAMES)
    total, parts = Fraction(0), []
    for good in dice.sample(GOODS, max(1, steps - 1)):
        amount, price = dice.between(1, 6), Fraction(dice.between(4, 160), 4)
        parts.append(f"{amount} {good}{'s' if amount > 1 else ''} at ${float(price):.2f} each")
        total += amount * price
    paid = (int(total) // 50 + 1) * 50
    listed = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    text = f"{name} buys {listed}, and pays with ${paid}. How many dollars does {name} get back?"
    return text, paid - total


def discount(dice: BulkRandom, steps: int) -> Story:
    """A price after one or several percentages."""
    good, price = dice.choice(GOODS), Fraction(dice.between(2, 40) * 10)
    sentences = [f"A {good} costs ${price}."]
    for _ in range(steps):
        percent, up = dice.between(1, 10) * 5, dice.between(0, 2) == 0
        sentences.append(f"Its price is then {'raised' if up else 'cut'} by {percent}%.")
        price = price * (100 + (percent if up else -percent)) / 100
    return " ".join([*sentences, "What does it cost in the end, in dollars?"]), price


def journey(dice: BulkRandom, steps: int) -> Story:
    """Legs of a journey at their speeds: the distance, or the mean speed."""
    name, legs = dice.choice(NAMES), max(1, steps - 1)
    distance, hours, sentences = Fraction(0), Fraction(0), []
    for leg in range(legs):
        speed, halves = dice.between(2, 30) * 4, dice.between(1, 8)
        time = Fraction(halves, 2)
        verb = "drives" if leg == 0 else "then drives"
        sentences.append(
            f"{name} {verb} for {as_text(time)} hour{'' if time == 1 else 's'} at {speed} km per hour."
        )
        distance += time * speed
        hours += time
    if legs > 1 and dice.between(0, 1):
        question = "What is the average speed of the whole trip, in km per hour? Give an exact number."
        return " ".join([*sentences, question]), distance / hours
    return " ".join([*sentences, "How many km is that in all?"]), distance


def ages(dice: BulkRandom, steps: int) -> Story:
    """A chain of people, each compared with the one before."""
    people = dice.sample(NAMES, steps + 1)
    age = dice.between(5, 14)
    sentences = [f"{people[0]} is {age} years old."]
    for before, name in itertools.pairwise(people):
        kind, years = dice.between(0, 2), dice.between(2, 9)
        if kind == 0 and age < 60:
            sentences.append(f"{name} is twice as old as {before}.")
            age *= 2
        elif kind == 1 and age > years + 1:
            sentences.append(f"{name} is {years} years younger than {before}.")
            age -= years
        else:
            sentences.append(f"{name} is {years} years older than {before}.")
            age += years
    return " ".join([*sentences, f"How old is {people[-1]}?"]), Fraction(age)


def sharing(dice: BulkRandom, steps: int) -> Story:
    """Things from several containers, divided among children; the share may be a fraction."""
    item, container = dice.choice(ITEMS), dice.choice(CONTAINERS)
    amounts = [(dice.between(2, 8), dice.between(3, 15)) for _ in range(max(1, steps - 1))]
    children = dice.between(2, 8)
    parts = [f"{count} {container} with {each} {item} in each" for count, each in amounts]
    text = (
        f"There are {' and '.join(parts)}. They are divided equally among {children} children, cutting "
        f"where that is needed. How many {item} does each child get? Give an exact number."
    )
    return text, Fraction(sum(count * each for count, each in amounts), children)


KINDS: dict[Callable[[BulkRandom, int], Story], tuple[int, int]] = {
    collection: (1, 8),
    shopping: (2, 8),
    discount: (1, 2),
    journey: (2, 6),
    ages: (1, 8),
    sharing: (2, 4),
}
"""Kinds of stories and the numbers of steps each can have."""


# --- questions of files
def load_questions(path: str) -> list[Question]:
    """Questions of a local JSON, JSONL or parquet file.

    Records have `query` and `response` (MetaMathQA; the answer after "The answer is:") or `question` and
    `answer` (GSM8K; the answer after "####", or the whole field).
    """
    questions = []
    for number, record in enumerate(load_records(path)):
        where = f"{path}, record {number}"
        text = field(record, ("query", "question", "problem"), where)
        solution = field(record, ("response", "answer", "solution"), where)
        answer = final_answer(str(solution))
        if answer is None:
            raise DataError(f"{where}: its answer has no end like 'The answer is: 7' or '#### 7'")
        questions.append(Question(str(text), answer))
    return questions


def read_response(text: str, words: frozenset[str] = frozenset()) -> str | None:
    """The text, when it states a number, a formula, or nothing but such and `words`; None when it does not.

    >>> read_response("12 apples"), read_response("hello"), read_response("Monday", frozenset({"monday"}))
    ('12 apples', None, 'Monday')
    """
    if not 0 < len(text) <= MAX_ANSWER:
        return None
    if is_numerical(text):
        return text
    found = words_of(text)
    return text if found and found <= words else None


def _word_answers(source: str) -> tuple[str, ...]:
    """The words among the answers of a file's questions."""
    answers = {item.answer for item in shared_items(load_questions, source, "all")}
    return tuple(sorted(frozenset().union(*(words_of(a) for a in answers if not is_numerical(a)))))


# --- the env
CHECKERS = ("exact", "math_verify")


@dataclass(frozen=True)
class MetaMathQAConfig:
    """Settings of `MetaMathQAEnv`."""

    source: str = "generated"
    """"generated", or a local .json, .jsonl or .parquet file of questions."""
    min_reasoning: int = 1
    """Fewest operations of a generated question."""
    max_reasoning: int = 4
    """Most operations of a generated question (up to 8)."""
    split: str = "all"
    """Of a file: all, train, or test (every tenth question)."""
    max_steps: int = 5
    """Attempts per question."""
    decay: float = 0.5
    """Factor on the reward of a right answer for each attempt before it."""
    checker: str = "exact"
    """"exact", or "math_verify" to accept also what math-verify calls equal (a process of its own)."""
    check_seconds: float = 2.0
    """CPU seconds that math-verify may take for one answer."""
    invalid_penalty: float = 0.0
    """Reward of a response without a usable answer."""

    def __post_init__(self) -> None:
        if self.checker not in CHECKERS:
            raise ConfigError(f"checker must be one of {CHECKERS}, got {self.checker!r}")
        if not 1 <= self.min_reasoning <= self.max_reasoning <= 8:
            raise ConfigError(
                "expected 1 <= min_reasoning <= max_reasoning <= 8, got "
                f"{self.min_reasoning} and {self.max_reasoning}"
            )
        check_numbers(self, max_steps=1)
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"decay must be in [0, 1], got {self.decay}")
        if self.source == "generated" and self.split != "all":
            raise ConfigError("split is for files; generated questions differ by their seeds")


class MetaMathQAEnv(TextEnv[MetaMathQAConfig]):
    """Answer the question; the action is the answer as text.

    Reward `decay ** attempts_before` for a right answer, else 0. The episode terminates on a right answer and
    with the last wrong one; a response without an answer is an attempt too.
    """

    Config = MetaMathQAConfig
    seed_stream = "MetaMathQAEnv"
    instructions = (
        "Solve the problem and give the final answer alone: a number, fraction or expression, exact and "
        "not rounded. After a wrong answer you may try again for half the points."
    )
    projection = Projection(parse=read_response, invalid="", tags=("action", "answer"))
    action_space = FreeText(MAX_RESPONSE, min_length=1)
    observation_space = FreeText(MAX_RESPONSE, min_length=1)

    def __init__(self, config: MetaMathQAConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        source, split = self.config.source, self.config.split
        self._questions = None if source == "generated" else shared_items(load_questions, source, split)
        if self._questions and (words := shared_items(_word_answers, source, "all")):
            # Where "Monday" answers a question of the file it is an answer to all of them.
            self.projection = replace(self.projection, parse=partial(read_response, words=frozenset(words)))
        self._verifier = None
        if self.config.checker == "math_verify":
            from shoal.envs.math_verifier import MathVerifier

            self._verifier = MathVerifier(self.config.check_seconds)

    @property
    def question(self) -> Question:
        """The present question with its answer, for experts and tests."""
        return self._question

    def _start(self, rng: np.random.Generator) -> None:
        if self._questions is None:
            steps = int(rng.integers(self.config.min_reasoning, self.config.max_reasoning + 1))
            self._question = make_question(rng, steps)
        else:
            self._question = self._questions[int(rng.integers(len(self._questions)))]
        self._feedback = ""

    def _advance(self, action: Action) -> Outcome:
        answer, last = str(action), self._steps + 1 >= self.config.max_steps
        if answer == self.invalid_action:
            self._feedback = "\nNo answer was found. Think again."
            return Outcome(self.config.invalid_penalty, valid=False, effective=False)
        if self._is_right(answer):
            self._feedback = "\nCorrect."
            return Outcome(self.config.decay**self._steps, terminated=True, success=True)
        stated = (final_answer(answer) or answer)[:MAX_ANSWER]
        self._feedback = f"\nYour last answer, {stated}, is incorrect. Think again."
        return Outcome(0.0, terminated=last)

    def _is_right(self, answer: str) -> bool:
        truth = self._question.answer
        if is_correct(answer, truth):
            return True
        return self._verifier is not None and self._verifier.same(answer, truth)

    def available_actions(self) -> list[str]:
        """A pattern: the answer is free text."""
        return ["<answer>"]

    def expert_action(self) -> str | None:
        """The answer."""
        return self._question.answer

    def observe(self) -> str:
        """The question, and what became of the last answer."""
        return f"{self._question.text}{self._feedback}"

    def close(self) -> None:
        """End the math-verify process, if there is one."""
        if self._verifier is not None:
            self._verifier.close()
        super().close()
