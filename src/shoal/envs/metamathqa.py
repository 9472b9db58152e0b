"""MetaMathQA: a question in words, several attempts; each attempt halves what a right answer is worth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, DataError
from shoal.envs.actions import Projection
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
from shoal.envs.word_problems import Question, make_question

CHECKERS = ("exact", "math_verify")


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
        questions.append(Question(str(text), answer, str(solution)))
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
    """How long math-verify may take for one answer."""
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
            raise ConfigError("split is for files; generated questions are told apart by their seeds")


class MetaMathQAEnv(TextEnv[MetaMathQAConfig]):
    """Answer the question; the action is the answer as text.

    Reward `decay ** attempts_before` for a right answer, else 0. The episode terminates on a right answer and
    with the last wrong one; a response without an answer is an attempt too.
    """

    Config = MetaMathQAConfig
    instructions = (
        "Solve the problem and give the final answer alone: a number, fraction or expression, exact and "
        "not rounded. After a wrong answer you may try again for half the points."
    )
    projection = Projection(parse=read_response, invalid="", tags=("action", "answer"))
    invalid_action = ""
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
