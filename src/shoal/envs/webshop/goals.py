"""What shoppers want: goals made from a catalogue's instructions, with a price limit, in a fixed order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.errors import ConfigError
from shoal.core.seeding import stream
from shoal.envs.webshop.catalogue import Catalogue, Instruction, Product, uniform

NO_LIMIT = 1_000_000.0
"""The price limit of a goal whose instruction names none."""
SPLITS = ("all", "train", "val", "test")
TEST_GOALS, VAL_GOALS = 500, 1000
"""Sizes of the test and validation splits, as RAGEN has them; at most a tenth and a fifth of all goals."""
_STEP, _DEAREST, _STEPS_ABOVE = 10, 990, 4


@dataclass(frozen=True, slots=True)
class Goal:
    """What a shopper wants: the product that fits, the attributes and options meant, and the price limit."""

    asin: str
    instruction: str  # with options and price limit in words
    attributes: tuple[str, ...]
    options: Mapping[str, str] | tuple[str, ...]
    price_upper: float
    name: str  # title of the product
    query: str
    category: str
    product_category: str


def make_goals(catalogue: Catalogue, *, seed: int = 0) -> list[Goal]:
    """All goals of a catalogue: their price limits and their order depend on `seed`, nothing else.

    Examples of the limits: a product for 23.50 gets one of 40, 50 or 60 dollars.
    """
    goals = []
    for product in catalogue.products:
        price = catalogue.price(product.asin)
        for number, instruction in enumerate(product.instructions):
            upper = price_limit(price, seed, product.asin, number)
            limit = f", and price lower than {upper:.2f} dollars" if upper < NO_LIMIT else ""
            for options in _choices(product, instruction):
                goals.append(_goal(product, instruction, options, upper, limit))
    order = stream(seed, "webshop goals").permutation(len(goals))
    return [goals[number] for number in order.tolist()]


def price_limit(price: float, seed: int, asin: str, number: int = 0) -> float:
    """The larger of two different draws among the next four tens above the price; none above 980."""
    above = [float(tens) for tens in range(_STEP, _DEAREST + 1, _STEP) if tens > price][:_STEPS_ABOVE]
    if len(above) < 2:
        return NO_LIMIT
    pairs = list(itertools.combinations(above, 2))
    return max(pairs[int(uniform(seed, "webshop limit", asin, number) * len(pairs))])


def _choices(product: Product, instruction: Instruction) -> list[Mapping[str, str] | tuple[str, ...]]:
    """The options of each goal of an instruction: those it names, or every combination there is."""
    if instruction.options is not None:
        return [instruction.options]
    names = sorted(product.options)
    combinations = itertools.product(*(product.options[name] for name in names))
    return [dict(zip(names, values, strict=True)) for values in combinations]


def _goal(
    product: Product,
    instruction: Instruction,
    options: Mapping[str, str] | tuple[str, ...],
    upper: float,
    limit: str,
) -> Goal:
    wanted = ""
    if instruction.options is None and isinstance(options, Mapping) and options:
        wanted = " with " + ", and ".join(f"{name}: {value}" for name, value in options.items())
    return Goal(
        asin=product.asin,
        instruction=f"{instruction.text}{wanted}{limit}",
        attributes=instruction.attributes,
        options=options,
        price_upper=upper,
        name=product.title,
        query=product.query,
        category=product.category,
        product_category=product.product_category,
    )


def split_goals(goals: Sequence[Goal], split: str) -> Sequence[Goal]:
    """The goals of a split: the first are for test, the next for validation, the others for training."""
    if split not in SPLITS:
        raise ConfigError(f"split must be one of {SPLITS}, got {split!r}")
    test = min(TEST_GOALS, len(goals) // 10)
    val = min(VAL_GOALS, len(goals) // 5)
    ends = {
        "all": (0, len(goals)),
        "test": (0, test),
        "val": (test, test + val),
        "train": (test + val, len(goals)),
    }
    start, end = ends[split]
    if start == end:
        raise ConfigError(f"split={split!r} has no goal: the catalogue has only {len(goals)} in all")
    return goals[start:end]
