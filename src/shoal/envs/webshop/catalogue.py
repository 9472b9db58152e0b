"""Products and the catalogue that holds them, with their prices and the search over them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import DataError
from shoal.core.seeding import derive_seed
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
    _by_asin: dict[str, Product] = field(init=False, repr=False)
    _lock: Any = field(init=False, repr=False, default_factory=threading.Lock)
    _index: list[Index] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_asin", {product.asin: product for product in self.products})
        if len(self._by_asin) != len(self.products):
            raise DataError("a catalogue must not have two products with the same asin")

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

    @property
    def index(self) -> Index:
        """The search index, made on first use and, for large catalogues, kept in the user's cache folder."""
        with self._lock:
            if not self._index:
                texts = [product.searched for product in self.products]
                ids = [product.asin for product in self.products]
                make = cached_index if len(ids) >= DISK_CACHE_FROM else build_index
                self._index.append(make(texts, ids))
            return self._index[0]


def uniform(seed: int, *names: str | int) -> float:
    """A number in [0, 1) that depends on seed and names alone."""
    return derive_seed(seed, *names) / 2**63


def search(catalogue: Catalogue, query: str, k: int = 50) -> list[str]:
    """The asins of at most `k` products for a query, best first, as WebShop's search engine ranks them.

    Only products with a word of the query are found. Equal scores are ordered by asin.
    """
    return [catalogue.products[number].asin for number in catalogue.index.search(query, k).tolist()]
