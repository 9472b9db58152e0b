"""What is sold and what is wanted: products in a catalogue with prices and search, goals, and WebShop's own files."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.core.data import MOST_REWARD
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import read_json
from shoal.core.seeding import derive_seed, stream
from shoal.envs.webshop.bm25 import Index, build_index, cached_index

DISK_CACHE_FROM = 2_000
"""Products from which on an index is worth keeping on disk."""
Options = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Review:
    """What a customer wrote."""

    title: str
    score: str
    body: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a shopper asked for: the words, the attributes meant, and the options wanted.

    `options` is a mapping by option name or, for instructions written by people, a list of values; None means
    that each combination of the product's options makes a goal of its own.
    """

    text: str
    attributes: tuple[str, ...]
    options: Mapping[str, str] | tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """One product with all that its pages show."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    prices: tuple[float, ...]  # one, or the two ends of a range
    price_tag: str
    category: str
    query: str  # what a shopper would search for
    product_category: str  # "A › B › C"
    options: Options
    attributes: tuple[str, ...]
    rating: str = "N.A."
    reviews: tuple[Review, ...] = ()
    instructions: tuple[Instruction, ...] = ()

    @property
    def searched(self) -> str:
        """The text that searches look at."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.bullets[:1], options]).lower()


@dataclass(frozen=True, eq=False)
class Catalogue(Mapping[str, Product]):
    """Products by asin, in the order of the file.

    Products sold at a range of prices have a price of their own, which depends on `price_seed` alone.
    """

    products: tuple[Product, ...]
    price_seed: int = 0

    def __post_init__(self) -> None:
        if len(self._by_asin) != len(self.products):
            raise DataError("a catalogue must not have two products with the same asin")

    @cached_property
    def _by_asin(self) -> dict[str, Product]:
        return {product.asin: product for product in self.products}

    def __getitem__(self, asin: str) -> Product:
        return self._by_asin[asin]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_asin)

    def __len__(self) -> int:
        return len(self.products)

    def __reduce__(self) -> tuple[Any, ...]:
        return Catalogue, (self.products, self.price_seed)

    def price(self, asin: str) -> float:
        """What the product costs; drawn uniformly from its range where it has one."""
        prices = self[asin].prices
        if len(prices) == 1:
            return prices[0]
        low, high = prices
        return low + (high - low) * uniform(self.price_seed, "webshop price", asin)

    @cached_property
    def index(self) -> Index:
        """The search index, made on first use and, for large catalogues, kept in the user's cache folder."""
        texts = [product.searched for product in self.products]
        ids = [product.asin for product in self.products]
        return (cached_index if len(ids) >= DISK_CACHE_FROM else build_index)(texts, ids)


def uniform(seed: int, *names: str | int) -> float:
    """A number in [0, 1) that depends on seed and names alone."""
    return derive_seed(seed, *names) / 2**63


def search(catalogue: Catalogue, query: str, k: int = 50) -> list[str]:
    """The asins of at most `k` products for a query, best first, as WebShop's search engine ranks them.

    Only products with a word of the query are found. Equal scores are ordered by asin.
    """
    return [catalogue.products[number].asin for number in catalogue.index.search(query, k).tolist()]


# --- goals
NO_LIMIT = 1_000_000.0
"""The price limit of a goal whose instruction names none."""
MOST_CHOICES = 1_000_000
"""Combinations of a product's options that goals are made of."""
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
            for options, named in _choices(product, instruction):
                goal = Goal(
                    product.asin, f"{instruction.text}{named}{limit}", instruction.attributes, options, upper,
                    product.title, product.query, product.category, product.product_category,
                )  # fmt: skip
                goals.append(goal)
    order = stream(seed, "webshop goals").permutation(len(goals))
    return [goals[number] for number in order.tolist()]


def price_limit(price: float, seed: int, asin: str, number: int = 0) -> float:
    """The larger of two different draws among the next four tens above the price; none above 980."""
    above = [float(tens) for tens in range(_STEP, _DEAREST + 1, _STEP) if tens > price][:_STEPS_ABOVE]
    if len(above) < 2:
        return NO_LIMIT
    pairs = list(itertools.combinations(above, 2))
    return max(pairs[int(uniform(seed, "webshop limit", asin, number) * len(pairs))])


def _choices(
    product: Product, instruction: Instruction
) -> Iterator[tuple[Mapping[str, str] | tuple[str, ...], str]]:
    """The options of each goal of an instruction, and what names them where it does not: every combination there is."""
    if instruction.options is not None:
        yield instruction.options, ""
        return
    names = sorted(product.options)
    n_choices = math.prod(map(len, product.options.values()))
    if n_choices > MOST_CHOICES:
        raise DataError(
            f"product {product.asin} can be had in {n_choices} ways, each a goal of its own; expected at most "
            f"{MOST_CHOICES}: leave options out, or use human_path"
        )
    for values in itertools.product(*(product.options[name] for name in names)):
        pairs = dict(zip(names, values, strict=True))
        named = ", and ".join(f"{name}: {value}" for name, value in pairs.items())
        yield pairs, f" with {named}" if named else ""


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


# --- WebShop's own files
NO_PRICE = 100.0
"""The price of a product whose price is not known, as in WebShop."""


def load_catalogue(
    items_path: Path | str,
    attributes_path: Path | str,
    human_path: Path | str | None = None,
    *,
    reviews_path: Path | str | None = None,
    limit: int | None = None,
    price_seed: int = 0,
) -> Catalogue:
    """A catalogue from WebShop's own files.

    Args:
        items_path: `items_shuffle*.json`, a list of products.
        attributes_path: `items_ins_v2*.json`, attributes and a made-up instruction by asin.
        human_path: `items_human_ins.json`, instructions written by people by asin; they replace the others.
        reviews_path: a list of `{"asin", "average_rating", "reviews"}`.
        limit: only the first so many products of the file.
        price_seed: of the prices of products that are sold at a range.

    Raises:
        DataError: when a file is broken, with the number of the product.
    """
    items = _expect(items_path, list)
    attributes = _expect(attributes_path, dict)
    human = _expect(human_path, dict) if human_path is not None else None
    reviews = {}
    for number, entry in enumerate(_expect(reviews_path, list) if reviews_path is not None else ()):
        if not isinstance(entry, dict) or not isinstance(entry.get("asin"), str):
            raise DataError(f"{reviews_path}, entry {number} must be an object with an asin")
        reviews[entry["asin"]] = entry
    products, seen = [], set()
    for number, item in enumerate(items[:limit]):
        try:
            asin = _text("asin", item["asin"])
            if asin == "nan" or len(asin) > 10 or asin in seen:
                continue
            seen.add(asin)
            about = attributes.get(asin, {})
            asked = _made_up(about) if human is None else tuple(_human(human.get(asin, ())))
            products.append(_product(item, about, asked, reviews.get(asin, {})))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"{items_path}, product {number}: {type(error).__name__}: {error}") from error
    return Catalogue(tuple(products), price_seed)


def _expect(path: Path | str, kind: type) -> Any:
    value = read_json(Path(path).expanduser())
    if not isinstance(value, kind):
        raise DataError(f"{path} must hold a JSON {kind.__name__}, got {type(value).__name__}")
    return value


def _product(
    item: Mapping[str, Any],
    about: Mapping[str, Any],
    asked: tuple[Instruction, ...],
    reviewed: Mapping[str, Any],
) -> Product:
    bullets = item["small_description"]
    bullets = bullets if isinstance(bullets, list) else [bullets or ""]
    prices, tag = read_prices(item.get("pricing"))
    return Product(
        asin=item["asin"],
        title=_text("name", item["name"]),
        description=_text("full_description", item["full_description"]),
        bullets=_texts("small_description", bullets),
        prices=prices,
        price_tag=tag,
        category=_text("category", item["category"]),
        query=_text("query", item["query"]).lower().strip(),
        product_category=_text("product_category", item["product_category"]),
        options=read_options(item["customization_options"]),
        attributes=_texts("attributes", about["attributes"]) if "attributes" in about else ("DUMMY_ATTR",),
        rating=str(reviewed.get("average_rating", "N.A.")),
        reviews=tuple(
            Review(
                str(review.get("title", "")),
                str(review.get("score", review.get("stars", ""))),
                str(review.get("body", review.get("review", ""))),
            )
            for review in reviewed.get("reviews", ())
        ),
        instructions=asked,
    )


def read_prices(pricing: str | None) -> tuple[tuple[float, ...], str]:
    """The price or price range in a tag like "$19.99 to $27.99", and the tag as pages show it."""
    amounts = []
    for part in (pricing or "").split("$")[1:]:
        try:
            amounts.append(float(Decimal(re.sub(r"[^\d.]", "", part))))
        except InvalidOperation as error:
            raise ValueError(f"expected a price like '$19.99', got {pricing!r:.80}") from error
        if amounts[-1] > MOST_REWARD:
            raise ValueError(f"expected a price like '$19.99', got {pricing!r:.80}")
    if not amounts:
        return (NO_PRICE,), f"${NO_PRICE}"
    if len(amounts) == 1:
        return (amounts[0],), f"${amounts[0]}"
    return (amounts[0], amounts[1]), f"${amounts[0]} to ${amounts[1]}"


def read_options(customization: Mapping[str, Any] | str | None) -> dict[str, tuple[str, ...]]:
    """Option names and values as pages show them: lower case, slashes as bars."""
    options = {}
    for name, contents in (customization or {}).items() if isinstance(customization, Mapping) else ():
        if contents is not None:
            values = (content["value"].strip().replace("/", " | ").lower() for content in contents)
            options[name.lower()] = tuple(values)
    return options


def _made_up(about: Mapping[str, Any]) -> tuple[Instruction, ...]:
    if not about.get("instruction") or not about.get("instruction_attributes"):
        return ()
    attributes = _texts("instruction_attributes", about["instruction_attributes"])
    return (Instruction(_text("instruction", about["instruction"]), attributes),)


def _human(entries: Sequence[Mapping[str, Any]]) -> Iterator[Instruction]:
    """Instructions of people; those without attributes are left out, as in WebShop."""
    for entry in entries:
        if entry["instruction_attributes"]:
            attributes = _texts("instruction_attributes", entry["instruction_attributes"])
            options = entry["instruction_options"]
            values = _texts(
                "instruction_options", [*options.values()] if isinstance(options, dict) else options
            )
            wanted = dict(zip(options, values, strict=True)) if isinstance(options, dict) else values
            yield Instruction(_text("instruction", entry["instruction"]).strip("."), attributes, wanted)


def _text(name: str, value: Any) -> str:
    """The text that a file has there, where None is none."""
    if not isinstance(value, str | None):
        raise ValueError(f"{name} must be text, got {value!r:.80}")
    return value or ""


def _texts(name: str, values: Any) -> tuple[str, ...]:
    """Those that a file has in a list."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} must be a list of texts, got {values!r:.80}")
    return tuple(values)
