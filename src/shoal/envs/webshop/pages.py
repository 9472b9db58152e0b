"""The shop's pages as data: what is written on each and what can be clicked, from where a shopper is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from shoal.envs.webshop.catalogue import Catalogue, Product

SEPARATOR = " [SEP] "
BACK, NEXT, PREVIOUS, BUY = "Back to Search", "Next >", "< Prev", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")

PageName = Literal["search", "results", "item", "description", "features", "reviews", "attributes", "done"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shopper is and what they have chosen so far; all that a page depends on."""

    page: PageName = "search"
    query: str = ""
    found: tuple[str, ...] = ()  # asins, best first
    number: int = 1  # of the page of results
    asin: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


class Page(NamedTuple):
    """What a shopper sees: the texts in order, and what a click can name, in lower case."""

    texts: tuple[str, ...]
    clickables: tuple[str, ...]

    @property
    def text(self) -> str:
        """The texts as one line, as WebShop's text mode joins them."""
        return SEPARATOR.join(text.strip() for text in self.texts if text.strip())


@dataclass(frozen=True, slots=True)
class Shop:
    """A catalogue with the sizes of its pages."""

    catalogue: Catalogue
    page_size: int = 10
    show_attributes: bool = False

    def page(self, place: Place, instruction: str, score: float = 0.0) -> Page:
        """The page at a place."""
        head = ("Instruction:", instruction)
        if place.page == "search":
            return Page(("WebShop", *head, "Search"), ())
        if place.page == "done":
            return Page(
                ("Thank you for shopping with us!", "Your score (min 0.0, max 1.0)", f"{score:.4g}"), ()
            )
        top = (*head, BACK)
        if place.page == "results":
            return self._results(place, top)
        product = self.catalogue[place.asin]
        if place.page == "item":
            return self._item(product, top)
        return Page((*top, PREVIOUS, *_sub_page(product, place.page)), (BACK.lower(), PREVIOUS.lower()))

    def _results(self, place: Place, head: tuple[str, ...]) -> Page:
        start = (place.number - 1) * self.page_size
        shown = [self.catalogue[asin] for asin in place.found[start : start + self.page_size]]
        # "Next >" is offered even past the end, as in the original.
        turns = (PREVIOUS, NEXT) if place.number > 1 else (NEXT,)
        rows = tuple(text for item in shown for text in (item.asin, item.title, item.price_tag))
        count = f"Page {place.number} (Total results: {len(place.found)})"
        clickables = (BACK.lower(), *(turn.lower() for turn in turns), *(item.asin.lower() for item in shown))
        return Page((*head, count, *turns, *rows), clickables)

    def _item(self, product: Product, head: tuple[str, ...]) -> Page:
        options = tuple(text for name, values in product.options.items() for text in (name, *values))
        buttons = (*self._sub_pages(), BUY)
        facts = (product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}")
        values = dict.fromkeys(value for values in product.options.values() for value in values)
        clickables = dict.fromkeys((BACK.lower(), PREVIOUS.lower(), *map(str.lower, buttons), *values))
        return Page((*head, PREVIOUS, *options, *facts, *buttons), tuple(clickables))

    def _sub_pages(self) -> tuple[str, ...]:
        return SUB_PAGES if self.show_attributes else SUB_PAGES[:3]

    def click(self, place: Place, target: str) -> Place | None:
        """Where a click leads; None when nothing on the page is called `target`. Buying leads to "done"."""
        if target == BACK.lower() and place.page not in ("search", "done"):
            return Place()
        if place.page == "results":
            return self._click_results(place, target)
        if place.page == "item":
            return self._click_item(place, target)
        if place.page not in ("search", "done") and target == PREVIOUS.lower():
            return replace(place, page="item")
        return None

    def _click_results(self, place: Place, target: str) -> Place | None:
        if target == NEXT.lower():
            return replace(place, number=place.number + 1)
        if target == PREVIOUS.lower() and place.number > 1:
            return replace(place, number=place.number - 1)
        start = (place.number - 1) * self.page_size
        for asin in place.found[start : start + self.page_size]:
            if asin.lower() == target:
                return replace(place, page="item", asin=asin)
        return None

    def _click_item(self, place: Place, target: str) -> Place | None:
        if target == BUY.lower():
            return replace(place, page="done")
        if target == PREVIOUS.lower():
            return replace(place, page="results", asin="", options={})
        for name in self._sub_pages():
            if target == name.lower():
                return replace(place, page=name.lower())  # type: ignore[arg-type]
        named = [name for name, values in self.catalogue[place.asin].options.items() if target in values]
        # A value that several options have belongs to the last of them, as in the original.
        return replace(place, options={**place.options, named[-1]: target}) if named else None


def _sub_page(product: Product, page: str) -> tuple[str, ...]:
    if page == "description":
        return (product.description,)
    if page == "features":
        return product.bullets
    if page == "attributes":
        return product.attributes
    return tuple(
        text for review in product.reviews for text in (f'"{review.title}"', review.score, review.body)
    )
