"""WebShop: find what an instruction asks for, choose its options, buy it. Offline, without a server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from shoal.core.errors import ConfigError
from shoal.envs.actions import Projection
from shoal.envs.records import made_once
from shoal.envs.spaces import FreeText
from shoal.envs.text import Action, Outcome, TextEnv, check_numbers
from shoal.envs.webshop.catalogue import (
    Catalogue,
    Goal,
    Product,
    load_catalogue,
    make_goals,
    search,
    split_goals,
)
from shoal.envs.webshop.generator import generate_catalogue
from shoal.envs.webshop.scoring import NounFunction, Reward, reward, spacy_nouns, title_nouns

REWARD_MODES = ("score", "win10")
GENERATED = 3000
"""Products of a generated shop when `num_products` is not given."""
MAX_QUERY = 1024
_ACTION = re.compile(r"\s*(search|click)\s*\[\s*(.*?)\s*\]\s*", re.IGNORECASE | re.DOTALL)


def read_action(text: str) -> str | None:
    """An action in its one spelling, `search[words]` or `click[target]` in lower case, or None.

    >>> read_action(" Search[Red Shoes] "), read_action("click[]"), read_action("buy it")
    ('search[red shoes]', None, None)
    """
    match = _ACTION.fullmatch(text) if len(text) <= MAX_QUERY else None
    if match is None or not match[2]:
        return None
    return f"{match[1].lower()}[{match[2].lower()}]"


@dataclass(frozen=True)
class WebShopConfig:
    """Settings of `WebShopEnv`."""

    source: str = "generated"
    """"generated", or WebShop's file of products (`items_shuffle*.json`)."""
    attributes_path: str = ""
    """With a file of products: WebShop's `items_ins_v2*.json`."""
    human_path: str = ""
    """`items_human_ins.json`: instructions by people instead of made-up ones."""
    reviews_path: str = ""
    """WebShop's file of reviews and ratings."""
    num_products: int | None = None
    """Size of a generated shop (3000), or how many products of the file (all)."""
    catalogue_seed: int = 0
    """Of a generated shop."""
    price_seed: int = 0
    """Of the prices of products that are sold at a range."""
    goal_seed: int = 0
    """Of the goals' price limits and their order."""
    split: str = "all"
    """Goals: all, test (the first 500), val (the next 1000) or train (the others)."""
    goal: int | None = None
    """Always this goal of the split, instead of one drawn from the seed."""
    max_steps: int = 15
    """Steps after which an episode is truncated."""
    page_size: int = 10
    """Products on a page of results."""
    max_results: int = 50
    """Products that a search finds at most."""
    reward_mode: str = "score"
    """"score", the published reward in [0, 1]; or "win10", 10 for a score of 1 and else 0."""
    nouns: str = "rules"
    """How nouns of titles are found: "rules", or "spacy:MODEL" for an installed spaCy model."""
    show_attributes: bool = False
    """Whether item pages have an Attributes page."""
    invalid_penalty: float = 0.0
    """Reward of a response without a usable action."""

    def __post_init__(self) -> None:
        if self.reward_mode not in REWARD_MODES:
            raise ConfigError(f"reward_mode must be one of {REWARD_MODES}, got {self.reward_mode!r}")
        if self.nouns != "rules" and not self.nouns.startswith("spacy:"):
            raise ConfigError(f"nouns must be 'rules' or 'spacy:MODEL', got {self.nouns!r}")
        check_numbers(self, max_steps=1, page_size=1, max_results=1, num_products=1)
        if self.source != "generated" and not self.attributes_path:
            raise ConfigError("a file of products needs attributes_path, WebShop's items_ins_v2*.json")
        for name in ("attributes_path", "human_path", "reviews_path"):
            if self.source == "generated" and getattr(self, name):
                raise ConfigError(f"{name} goes with a file of products; give source too")


def _opened(config: WebShopConfig) -> tuple[Catalogue, list[Goal]]:
    """The catalogue and its goals, in memory once for all envs of the same files and seeds."""
    names = [config.source, config.attributes_path, config.human_path, config.reviews_path]
    named = tuple(name not in ("", "generated") for name in names)
    files = [Path(name).expanduser().resolve() for name, there in zip(names, named, strict=True) if there]
    seeds = (config.num_products, config.catalogue_seed, config.price_seed, config.goal_seed)

    def make() -> tuple[Catalogue, list[Goal]]:
        if config.source == "generated":
            size = config.num_products or GENERATED
            catalogue = generate_catalogue(size, seed=config.catalogue_seed, price_seed=config.price_seed)
        else:
            catalogue = load_catalogue(
                config.source, config.attributes_path, config.human_path or None, price_seed=config.price_seed,
                reviews_path=config.reviews_path or None, limit=config.num_products,
            )  # fmt: skip
        _ = catalogue.index  # made here, where threads wait for each other
        return catalogue, make_goals(catalogue, seed=config.goal_seed)

    return made_once(("webshop", named, seeds), files, make)


class WebShopEnv(TextEnv[WebShopConfig]):
    """Search, look, choose options and buy; the action is `search[words]` or `click[target]`.

    The reward comes with the purchase, which terminates the episode: the published score, whose parts are in
    `info` as `r_type`, `r_att`, `r_option` (when options are asked for) and `r_price`, the whole as
    `task_score`. Success is a score of 1. A click on what the page does not have is invalid: it costs a step.
    """

    Config = WebShopConfig
    seed_stream = "WebShopEnv"
    instructions = (
        "You are shopping in a web shop. Find the product that the instruction asks for, choose the options "
        "it names and buy it for less than the price limit. Actions: search[words] looks for products; "
        "click[target] clicks a button, a product code or an option of the page. The purchase, "
        "click[buy now], ends the episode."
    )
    projection = Projection(parse=read_action, invalid="", tags=("action",))
    action_space = FreeText(65_536, min_length=1)
    observation_space = FreeText(262_144, min_length=1)

    def __init__(self, config: WebShopConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._open()

    def _open(self) -> None:
        """Take from the stock what depends on the config alone."""
        catalogue, goals = _opened(self.config)
        self._goals: Sequence[Goal] = split_goals(goals, self.config.split)
        if self.config.goal is not None and not 0 <= self.config.goal < len(self._goals):
            raise ConfigError(f"goal must be in [0, {len(self._goals)}), got {self.config.goal}")
        self._shop = Shop(catalogue, self.config.page_size, self.config.show_attributes)
        self._nouns: NounFunction = title_nouns
        if self.config.nouns != "rules":
            self._nouns = spacy_nouns(self.config.nouns.removeprefix("spacy:"))

    def __getstate__(self) -> dict[str, Any]:
        shared = ("_goals", "_shop", "_nouns")
        return {name: value for name, value in self.__dict__.items() if name not in shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @property
    def catalogue(self) -> Catalogue:
        """The products of the shop."""
        return self._shop.catalogue

    @property
    def n_goals(self) -> int:
        """Goals of the split."""
        return len(self._goals)

    @property
    def goal(self) -> Goal:
        """What is to be bought, for experts and tests."""
        return self._goal

    @property
    def place(self) -> Place:
        """Where the shopper is."""
        return self._place

    def _start(self, rng: np.random.Generator) -> None:
        number = self.config.goal
        self._goal = self._goals[int(rng.integers(len(self._goals))) if number is None else number]
        self._go(Place())

    def _go(self, place: Place, score: float = 0.0) -> None:
        self._place = place
        self._page: Page = self._shop.page(place, self._goal.instruction, score)

    def _advance(self, action: Action) -> Outcome:
        spelled = read_action(str(action))
        place = self._next(spelled) if spelled is not None else None
        if place is None:
            return Outcome(self.config.invalid_penalty, valid=False, effective=False)
        if place.page == "done":
            return self._buy(place)
        changed = place != self._place
        self._go(place)
        return Outcome(0.0, effective=changed)

    def _next(self, action: str) -> Place | None:
        """Where an action leads, None for one that the page does not offer."""
        kind, _, target = action[:-1].partition("[")
        if kind == "click":
            changes = self._page.clicks.get(target)
            return None if changes is None else replace(self._place, **changes)
        # The search bar stands on the first page; searching from elsewhere works as in the original.
        found = search(self.catalogue, target, self.config.max_results)
        return Place("results", target, tuple(found))

    def _buy(self, place: Place) -> Outcome:
        product = self.catalogue[place.asin]
        parts: Reward = reward(
            product, self._goal, self.catalogue.price(place.asin), place.options, noun_fn=self._nouns
        )
        score = parts["reward"]
        self._go(place, score)
        metrics = {"task_score": score, **{k: v for k, v in parts.items() if v is not None and k != "reward"}}
        won = score == 1.0
        paid = score if self.config.reward_mode == "score" else 10.0 * won
        return Outcome(paid, terminated=True, success=won, metrics=metrics)  # type: ignore[arg-type]

    def available_actions(self) -> list[str]:
        """What can be done on the page; on the first one a pattern, since a query is free text."""
        if self._place.page == "search":
            return ["search[<your query>]"]
        return [f"click[{target}]" for target in self._page.clicks]

    def expert_action(self) -> str:
        """The next step of an expert, which knows the product."""
        return expert_action(self)

    def observe(self) -> str:
        """The texts of the page, joined by ` [SEP] `. Chosen options are not shown, as in the original."""
        return self._page.text

    def anchor(self) -> str:
        """The place with the chosen options, which the page hides, and the words searched for."""
        place = self._place
        options = sorted(place.options.items())
        return f"{place.page} {place.number} {place.asin} {options} {place.query!r} {self._goal.instruction}"


def expert_action(env: WebShopEnv) -> str:
    """The next action of an expert, which knows the product: it scores 1 on every goal that allows it.

    It searches for the instruction, then for the title, turns pages until it sees the product, chooses the
    options and buys.
    """
    place, goal = env.place, env.goal
    size = env.config.page_size
    if place.page == "search":
        found = search(env.catalogue, goal.instruction.lower(), env.config.max_results)
        words = goal.instruction if goal.asin in found[: 3 * size] else goal.name
        return f"search[{words.replace('[', ' ').replace(']', ' ').lower()[:1000]}]"
    if place.page == "results":
        if goal.asin not in place.found:
            return f"click[{BACK.lower()}]"
        page = place.found.index(goal.asin) // size + 1
        if page == place.number:
            return f"click[{goal.asin.lower()}]"
        return f"click[{(NEXT if page > place.number else PREVIOUS).lower()}]"
    if place.page != "item" or place.asin != goal.asin:
        return f"click[{PREVIOUS.lower()}]"
    chosen = set(place.options.values())
    for value in _wanted(env, goal):
        if value not in chosen:
            return f"click[{value}]"
    return "click[buy now]"


def _wanted(env: WebShopEnv, goal: Goal) -> list[str]:
    """The values to click: those wanted, where the product has them."""
    values = goal.options.values() if not isinstance(goal.options, tuple) else goal.options
    offered = {value for of_option in env.catalogue[goal.asin].options.values() for value in of_option}
    return [value for value in values if value in offered]


# --- pages
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


START = asdict(Place())
"""What going back to the search changes: everything."""


class Page(NamedTuple):
    """What a shopper sees: the texts in order, and what a click on a name, in lower case, changes of the place."""

    texts: tuple[str, ...]
    clicks: Mapping[str, Mapping[str, Any]]

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
            return Page(("WebShop", *head, "Search"), {})
        if place.page == "done":
            return Page(
                ("Thank you for shopping with us!", "Your score (min 0.0, max 1.0)", f"{score:.4g}"), {}
            )
        top = (*head, BACK)
        if place.page == "results":
            return self._results(place, top)
        product = self.catalogue[place.asin]
        if place.page == "item":
            return self._item(product, place, top)
        clicks = {BACK.lower(): START, PREVIOUS.lower(): {"page": "item"}}
        return Page((*top, PREVIOUS, *_sub_page(product, place.page)), clicks)

    def _results(self, place: Place, head: tuple[str, ...]) -> Page:
        start = (place.number - 1) * self.page_size
        shown = [self.catalogue[asin] for asin in place.found[start : start + self.page_size]]
        # "Next >" is offered even past the end, as in the original.
        turns = {PREVIOUS: place.number - 1} if place.number > 1 else {}
        turns[NEXT] = place.number + 1
        rows = tuple(text for item in shown for text in (item.asin, item.title, item.price_tag))
        count = f"Page {place.number} (Total results: {len(place.found)})"
        clicks = {BACK.lower(): START, **{turn.lower(): {"number": number} for turn, number in turns.items()}}
        for item in shown:
            clicks.setdefault(item.asin.lower(), {"page": "item", "asin": item.asin})
        return Page((*head, count, *turns, *rows), clicks)

    def _item(self, product: Product, place: Place, head: tuple[str, ...]) -> Page:
        options = tuple(text for name, values in product.options.items() for text in (name, *values))
        pages = SUB_PAGES if self.show_attributes else SUB_PAGES[:3]
        facts = (product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}")
        clicks: dict[str, Mapping[str, Any]] = {
            BACK.lower(): START,
            PREVIOUS.lower(): {"page": "results", "asin": "", "options": {}},
            **{name.lower(): {"page": name.lower()} for name in pages},
            BUY.lower(): {"page": "done"},
        }
        # A value that several options have belongs to the last of them, as in the original.
        names = {value: name for name, values in product.options.items() for value in values}
        for value, name in names.items():
            clicks.setdefault(value, {"options": {**place.options, name: value}})
        return Page((*head, PREVIOUS, *options, *facts, *pages, BUY), clicks)


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
