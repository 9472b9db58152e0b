"""Word problems made by rule: a story, its exact answer and the steps between.

A problem is a function of the generator it is given and nothing else; more steps make it harder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np

from shoal.envs.dice import Dice


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its final answer, and a worked solution that ends with it (may be empty)."""

    text: str
    answer: str
    solution: str = ""


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
    dice = Dice(rng)
    kinds = [kind for kind, (low, high) in KINDS.items() if low <= steps <= high]
    text, answer, working = dice.one(kinds)(dice, steps)
    shown = as_text(answer)
    return Question(text, shown, "\n".join([*working, f"The answer is: {shown}"]))


Story = tuple[str, Fraction, list[str]]
N = TypeVar("N", int, Fraction)


def add_up(values: Sequence[N], working: list[str]) -> N:
    """The sum, with a line of working where there is more than one value."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    if len(values) > 1:
        working.append(f"{' + '.join(map(as_text, values))} = {as_text(total)}")
    return total


def collection(dice: Dice, steps: int) -> Story:
    """One person's things grow and shrink; each event is one operation."""
    name, other, item = dice.one(NAMES[:13]), dice.one(NAMES[13:]), dice.one(ITEMS)
    count = dice.between(4, 40)
    sentences, working = [f"{name} has {count} {item}."], []
    for _ in range(steps):
        kind = dice.between(0, 5)
        parts = [n for n in range(2, 7) if count % n == 0 and count > n]
        if kind == 0 and count > 3:
            lost = dice.between(1, count - 2)
            sentences.append(f"Then {name} gives {lost} of the {item} to {other}.")
            new, sum_ = count - lost, f"{count} - {lost}"
        elif kind == 1 and count <= 200:
            times = dice.between(2, 4)
            word = {2: "twice", 3: "three times", 4: "four times"}[times]
            sentences.append(f"By the next week {name} has {word} as many {item} as before.")
            new, sum_ = count * times, f"{count} * {times}"
        elif kind == 2 and parts:
            part = dice.one(parts)
            sentences.append(f"{name} loses 1/{part} of the {item}.")
            new, sum_ = count - count // part, f"{count} - {count} / {part}"
        elif kind == 3:
            packs, each = dice.between(2, 9), dice.between(2, 12)
            sentences.append(f"{name} buys {packs} {dice.one(CONTAINERS)} with {each} {item} in each.")
            new, sum_ = count + packs * each, f"{count} + {packs} * {each}"
        else:
            found = dice.between(2, 60)
            sentences.append(f"{other} sends {name} {found} more {item}.")
            new, sum_ = count + found, f"{count} + {found}"
        working.append(f"{sum_} = {new}")
        count = new
    sentences.append(f"How many {item} does {name} have now?")
    return " ".join(sentences), Fraction(count), working


def shopping(dice: Dice, steps: int) -> Story:
    """Several goods at their prices, and the change from a round sum."""
    name = dice.one(NAMES)
    goods = dice.some(GOODS, max(1, steps - 1))
    costs: list[Fraction] = []
    parts, working = [], []
    for good in goods:
        amount, price = dice.between(1, 6), Fraction(dice.between(4, 160), 4)
        parts.append(f"{amount} {good}{'s' if amount > 1 else ''} at ${float(price):.2f} each")
        costs.append(amount * price)
        working.append(f"{amount} * {as_text(price)} = {as_text(costs[-1])}")
    total = add_up(costs, working)
    paid = (int(total) // 50 + 1) * 50
    working.append(f"{paid} - {as_text(total)} = {as_text(paid - total)}")
    listed = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    text = f"{name} buys {listed}, and pays with ${paid}. How many dollars does {name} get back?"
    return text, paid - total, working


def discount(dice: Dice, steps: int) -> Story:
    """A price after one or several percentages."""
    good, price = dice.one(GOODS), Fraction(dice.between(2, 40) * 10)
    sentences, working = [f"A {good} costs ${price}."], []
    for _ in range(steps):
        percent, up = dice.between(1, 10) * 5, dice.between(0, 2) == 0
        sentences.append(f"Its price is then {'raised' if up else 'cut'} by {percent}%.")
        new = price * (100 + (percent if up else -percent)) / 100
        working.append(f"{as_text(price)} * {100 + (percent if up else -percent)} / 100 = {as_text(new)}")
        price = new
    return " ".join([*sentences, "What does it cost in the end, in dollars?"]), price, working


def journey(dice: Dice, steps: int) -> Story:
    """Legs of a journey at their speeds: the distance, or the mean speed."""
    name, legs = dice.one(NAMES), max(1, steps - 1)
    distances: list[int] = []
    hours, sentences, working = Fraction(0), [], []
    for leg in range(legs):
        speed, halves = dice.between(2, 30) * 4, dice.between(1, 8)
        time = Fraction(halves, 2)
        verb = "drives" if leg == 0 else "then drives"
        sentences.append(
            f"{name} {verb} for {as_text(time)} hour{'' if time == 1 else 's'} at {speed} km per hour."
        )
        working.append(f"{as_text(time)} * {speed} = {as_text(time * speed)}")
        distances.append(int(time * speed))
        hours += time
    distance = add_up(distances, working)
    if legs > 1 and dice.between(0, 1):
        working.append(f"{distance} / {as_text(hours)} = {as_text(Fraction(distance) / hours)}")
        question = "What is the average speed of the whole trip, in km per hour? Give an exact number."
        return " ".join([*sentences, question]), Fraction(distance) / hours, working
    return " ".join([*sentences, "How many km is that in all?"]), Fraction(distance), working


def ages(dice: Dice, steps: int) -> Story:
    """A chain of people, each compared with the one before."""
    people = dice.some(NAMES, steps + 1)
    age = dice.between(5, 14)
    sentences, working = [f"{people[0]} is {age} years old."], []
    for before, name in itertools.pairwise(people):
        kind, years = dice.between(0, 2), dice.between(2, 9)
        if kind == 0 and age < 60:
            sentences.append(f"{name} is twice as old as {before}.")
            new, sum_ = 2 * age, f"2 * {age}"
        elif kind == 1 and age > years + 1:
            sentences.append(f"{name} is {years} years younger than {before}.")
            new, sum_ = age - years, f"{age} - {years}"
        else:
            sentences.append(f"{name} is {years} years older than {before}.")
            new, sum_ = age + years, f"{age} + {years}"
        working.append(f"{sum_} = {new}")
        age = new
    return " ".join([*sentences, f"How old is {people[-1]}?"]), Fraction(age), working


def sharing(dice: Dice, steps: int) -> Story:
    """Things from several containers, divided among children; the share may be a fraction."""
    item, container = dice.one(ITEMS), dice.one(CONTAINERS)
    amounts = [(dice.between(2, 8), dice.between(3, 15)) for _ in range(max(1, steps - 1))]
    children = dice.between(2, 8)
    parts = [f"{count} {container} with {each} {item} in each" for count, each in amounts]
    working = [f"{count} * {each} = {count * each}" for count, each in amounts]
    total = add_up([count * each for count, each in amounts], working)
    working.append(f"{total} / {children} = {as_text(Fraction(total, children))}")
    text = (
        f"There are {' and '.join(parts)}. They are divided equally among {children} children, cutting "
        f"where that is needed. How many {item} does each child get? Give an exact number."
    )
    return text, Fraction(total, children), working


KINDS: dict[Callable[[Dice, int], Story], tuple[int, int]] = {
    collection: (1, 8),
    shopping: (2, 8),
    discount: (1, 2),
    journey: (2, 6),
    ages: (1, 8),
    sharing: (2, 4),
}
"""Kinds of stories and the numbers of steps each can have."""
