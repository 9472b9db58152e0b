"""Catalogues from WebShop's own files, and the spellings of prices and options in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError
from shoal.core.files import read_json
from shoal.envs.webshop.catalogue import Catalogue, Instruction, Product, Review

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
    if reviews_path is not None:
        reviews = {entry["asin"]: entry for entry in _expect(reviews_path, list)}
    products, seen = [], set()
    for number, item in enumerate(items[:limit]):
        try:
            asin = item["asin"]
            if asin == "nan" or len(asin) > 10 or asin in seen:
                continue
            seen.add(asin)
            about = attributes.get(asin, {})
            asked = _human(human.get(asin, ())) if human is not None else _made_up(about)
            products.append(_product(item, about, asked, reviews.get(asin, {})))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"{items_path}, product {number}: {type(error).__name__}: {error}") from error
    return Catalogue(tuple(products), price_seed)


def _expect(path: Path | str, kind: type) -> Any:
    value = read_json(path)
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
    prices, tag = read_prices(item.get("pricing"))
    return Product(
        asin=item["asin"],
        title=item["name"] or "",
        description=item["full_description"] or "",
        bullets=tuple(bullets) if isinstance(bullets, list) else (bullets or "",),
        prices=prices,
        price_tag=tag,
        category=item["category"] or "",
        query=(item["query"] or "").lower().strip(),
        product_category=item["product_category"] or "",
        options=read_options(item["customization_options"]),
        attributes=tuple(about["attributes"]) if "attributes" in about else ("DUMMY_ATTR",),
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
            raise ValueError(f"expected a price like '$19.99', got {pricing!r}") from error
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
    return (Instruction(about["instruction"], tuple(about["instruction_attributes"])),)


def _human(entries: Sequence[Mapping[str, Any]]) -> tuple[Instruction, ...]:
    """Instructions of people; those without attributes are left out, as in WebShop."""
    return tuple(
        Instruction(
            entry["instruction"].strip("."),
            tuple(entry["instruction_attributes"]),
            _wanted(entry["instruction_options"]),
        )
        for entry in entries
        if entry["instruction_attributes"]
    )


def _wanted(options: Mapping[str, str] | Sequence[str]) -> Mapping[str, str] | tuple[str, ...]:
    return dict(options) if isinstance(options, Mapping) else tuple(options)
