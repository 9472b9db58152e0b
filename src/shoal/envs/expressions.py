"""Arithmetic that people type, read by a small grammar and computed on exact fractions."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

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
