"""A catalogue made by rule from a seed.

Product `i` depends on `(seed, i)` alone, so that shops of different sizes share their first products.
"""

from __future__ import annotations

import math

from shoal.core.seeding import stream
from shoal.envs.dice import Dice
from shoal.envs.webshop.catalogue import Catalogue, Instruction, Product, Review, read_prices
from shoal.envs.webshop.wares import (
    BLAME,
    BRAND_ENDS,
    BRAND_MIDDLES,
    BRAND_STARTS,
    KINDS,
    OPENINGS,
    OPTIONS,
    PRAISE,
    Kind,
)

_DRAWS = 128  # uniform numbers that a product takes at a time; most need fewer
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SPREAD = 0.55  # of the logarithm of prices
_MISSING, _RANGED = 0.05, 0.3  # shares of products without a price and with a price range


def generate_catalogue(n_products: int = 3000, *, seed: int = 0, price_seed: int = 0) -> Catalogue:
    """A shop with goods of some forty kinds, with prices, options, attributes, reviews and instructions.

    >>> shop = generate_catalogue(100)
    >>> shop.products[7] == generate_catalogue(20).products[7]
    True
    """
    if n_products < 1:
        raise ValueError(f"n_products must be at least 1, got {n_products}")
    products: list[Product] = []
    seen: set[str] = set()
    for number in range(n_products):
        product = make_product(seed, number)
        if product.asin not in seen:  # one pair in 36**8 has the same; the later one is left out
            seen.add(product.asin)
            products.append(product)
    return Catalogue(tuple(products), price_seed)


def make_product(seed: int, number: int) -> Product:
    """Product `number` of the shop of `seed`."""
    dice = Dice(stream(seed, "webshop product", number), _DRAWS)
    asin = "B0" + "".join(_DIGITS[dice.below(36)] for _ in range(8))
    kind = dice.one(KINDS)
    brand = dice.one(BRAND_STARTS) + dice.one(BRAND_MIDDLES) + dice.one(BRAND_ENDS)
    look, name, use = dice.one(kind.looks), dice.one(kind.types), dice.one(kind.uses)
    attributes = tuple(dice.some(kind.attributes, 2 + dice.below(4)))
    options = {}
    for pool in kind.options:
        option, values = OPTIONS[pool]
        chosen = dice.some(range(len(values)), 2 + dice.below(min(7, len(values) - 1)))
        options[option] = tuple(values[i] for i in sorted(chosen))
    if dice.uniform() < 0.15:
        options = {}
    prices, tag = read_prices(_pricing(dice, kind))
    rating = 3 + dice.below(20) / 10
    return Product(
        asin=asin,
        title=_title(dice, brand, look, name, use, attributes),
        description=_description(dice, brand, look, name, use, attributes),
        bullets=_bullets(dice, look, name, use, attributes),
        prices=prices,
        price_tag=tag,
        category=kind.category,
        query=kind.query,
        product_category=f"{kind.path} › {name.title()}",
        options=options,
        attributes=attributes,
        rating=f"{rating:.1f}",
        reviews=_reviews(dice, name, rating),
        instructions=tuple(
            _instruction(dice, name, attributes, options) for _ in range(1 + dice.below(5) // 4)
        ),
    )


def _pricing(dice: Dice, kind: Kind) -> str:
    """A price tag: log-normal around the kind's usual price, a range for some, none for a few."""
    # Box-Muller from two uniforms.
    radius = math.sqrt(-2 * math.log(1 - dice.uniform()))
    normal = radius * math.cos(2 * math.pi * dice.uniform())
    low = max(1.0, kind.price * math.exp(_SPREAD * min(3.0, max(-3.0, normal))))
    draw, width = dice.uniform(), 1.05 + 0.6 * dice.uniform()
    if draw < _MISSING:
        return ""
    low = math.floor(low) + (0.99 if dice.uniform() < 0.7 else 0.5)
    high = math.floor(low * width) + 0.99
    return f"${low:.2f} to ${high:.2f}" if draw < _MISSING + _RANGED and high > low else f"${low:.2f}"


def _title(dice: Dice, brand: str, look: str, name: str, use: str, attributes: tuple[str, ...]) -> str:
    shown = ", ".join(attribute.title() for attribute in dice.some(attributes, 1 + dice.below(2)))
    thing = name.title()
    forms = (
        f"{brand} {look} {thing} for {use}, {shown}",
        f"{brand} {thing}, {look}, {shown}, for {use}",
        f"{look} {thing} by {brand} - {shown} - {use}",
        f"{brand} {shown} {look} {thing} for {use}",
    )
    return dice.one(forms)


def _description(dice: Dice, brand: str, look: str, name: str, use: str, attributes: tuple[str, ...]) -> str:
    first = dice.one(
        (
            f"The {look.lower()} {name} by {brand} is made for {use.lower()}.",
            f"{brand} designed this {name} with {use.lower()} in mind.",
            f"A {name} in {look.lower()} that you will reach for every day.",
        )
    )
    facts = " ".join(
        dice.one(
            (
                f"It is known for: {attribute}.",
                f"Customers like it for {attribute}.",
                f"Feature: {attribute}.",
            )
        )
        for attribute in attributes
    )
    last = dice.one(
        ("Returns are free within 30 days.", "Ships in plain packaging.", "A gift box is included.")
    )
    return f"{first} {facts} {last}"


def _bullets(dice: Dice, look: str, name: str, use: str, attributes: tuple[str, ...]) -> tuple[str, ...]:
    lines = [f"{attribute.capitalize()}: one reason to choose this {name}." for attribute in attributes[:3]]
    lines.append(f"{look} {name} for {use.lower()}.")
    return tuple(dice.some(lines, len(lines)))


def _reviews(dice: Dice, name: str, rating: float) -> tuple[Review, ...]:
    reviews = []
    for _ in range(dice.below(4)):
        good = dice.uniform() * 5 < rating
        score = 4 + dice.below(2) if good else 1 + dice.below(3)
        weeks = 1 + dice.below(20)
        body = f"I have had this {name} for {weeks} week{'s' * (weeks > 1)}."
        reviews.append(Review(dice.one(PRAISE if good else BLAME), f"{score}.0", body))
    return tuple(reviews)


def _instruction(
    dice: Dice, name: str, attributes: tuple[str, ...], options: dict[str, tuple[str, ...]]
) -> Instruction:
    """A wish for this product: some of its attributes and one value of each of its options."""
    wanted = tuple(dice.some(attributes, 1 + dice.below(3)))
    chosen = {option: dice.one(values) for option, values in options.items()}
    text = f"{dice.one(OPENINGS)} {', '.join(wanted)} {name}"
    if chosen:
        text += " with " + ", and ".join(f"{option}: {value}" for option, value in chosen.items())
    return Instruction(text, wanted, chosen)
