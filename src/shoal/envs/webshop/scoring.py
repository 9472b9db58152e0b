"""WebShop's reward (Yao et al., 2022, arXiv:2207.01206, sec. 2.3 and appendix A), by its parts.

    reward = r_type * (attribute hits + option hits + [price <= limit]) / (attributes + options + 1)

The parts follow the program that the authors published where it says more than the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from shoal.envs.webshop.catalogue import Product
from shoal.envs.webshop.goals import Goal
from shoal.envs.webshop.loader import read_options, read_prices
from shoal.envs.webshop.nouns import NounFunction, title_nouns
from shoal.envs.webshop.similarity import token_set_ratio

ALIKE = 85
"""Token-set ratios above this are a match."""

# The colour words that option values are reduced to, in the order in which they are looked for.
COLORS = tuple(
    """alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
    burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac
    copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite
    grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light
    lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy
    nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell
    silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
    wheat white wine yellow""".split()
)


class Reward(TypedDict):
    """The reward and its parts, each in [0, 1]."""

    reward: float
    r_type: float
    r_att: float
    r_option: float | None  # None when the goal names no option
    r_price: float


def reward(
    product: Product | Mapping[str, Any],
    goal: Goal | Mapping[str, Any],
    price: float,
    options: Mapping[str, str],
    *,
    noun_fn: NounFunction = title_nouns,
) -> Reward:
    """What buying `product` with `options` at `price` is worth for `goal`.

    Args:
        product: a product, or one as WebShop's files or its program hold it.
        goal: a goal, or one as WebShop's program holds it.
        price: what the product costs.
        options: the chosen value by option name.
        noun_fn: finds the nouns of titles.
    """
    product, goal = as_product(product), as_goal(goal)
    r_type = type_reward(product, goal, noun_fn)
    attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    chosen = option_hits(options.values(), goal.options)
    affordable = price <= goal.price_upper
    total = len(goal.attributes) + len(goal.options) + 1
    return Reward(
        reward=r_type * (attributes + chosen + affordable) / total,
        r_type=r_type,
        r_att=attributes / len(goal.attributes) if goal.attributes else 1.0,
        r_option=chosen / len(goal.options) if goal.options else None,
        r_price=float(affordable),
    )


def type_reward(product: Product, goal: Goal, noun_fn: NounFunction = title_nouns) -> float:
    """Whether it is the kind of thing wanted: 1, 0.5, 0.1 or 0, by query, category and title nouns."""
    wanted, bought = noun_fn(goal.name), noun_fn(product.title)
    title = len(set(wanted) & set(bought)) / len(wanted) if wanted else 0.2
    if title == 0:
        return 0.0
    if title < 0.1:
        return 0.1
    alike = (
        product.query == goal.query
        or len(_categories(product.product_category) & _categories(goal.product_category)) >= 2
        or title > 0.2
    )
    return 1.0 if alike else 0.5


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}


def _has_attribute(product: Product, wanted: str) -> bool:
    """Whether a product attribute is like the wanted one, or the wanted one stands in the product's texts."""
    return (
        any(token_set_ratio(attribute, wanted) > ALIKE for attribute in product.attributes)
        or wanted in product.title.lower()
        or wanted in " ".join(product.bullets).lower()
        or wanted in product.description.lower()
    )


def option_hits(chosen: Any, wanted: Mapping[str, str] | Sequence[str]) -> int:
    """How many wanted options are like one of the chosen values, after both are reduced to their colours."""
    given = [first_color(value) for value in chosen]
    names = (
        [_named(*item) for item in wanted.items()]
        if isinstance(wanted, Mapping)
        else map(first_color, wanted)
    )
    return sum(any(token_set_ratio(value, name) > ALIKE for value in given) for name in names)


def first_color(value: str) -> str:
    """The first colour word that occurs in an option value, or the value itself."""
    return next((color for color in COLORS if color in value), value)


def _named(name: str, value: str) -> str:
    """A wanted option with its name, as the published program compares it: a pair written out as text.

    Only a name or value that is a colour word as a whole is reduced to it there.
    """
    return next((color for color in COLORS if color in (name, value)), str((name, value)))


def as_product(product: Product | Mapping[str, Any]) -> Product:
    """A product from a record of WebShop's files (`name`, …) or of its running program (`Title`, …)."""
    if isinstance(product, Product):
        return product
    bullets = _first(product, ("BulletPoints", "bullets", "small_description"), ())
    options = _first(product, ("options",), None)
    prices, tag = read_prices(product["pricing"]) if isinstance(product.get("pricing"), str) else ((0.0,), "")
    return Product(
        asin=product.get("asin", ""),
        title=_first(product, ("Title", "title", "name"), ""),
        description=_first(product, ("Description", "description", "full_description"), ""),
        bullets=tuple(bullets) if not isinstance(bullets, str) else (bullets,),
        prices=prices,
        price_tag=tag,
        category=product.get("category") or "",
        query=(product.get("query") or "").lower().strip(),
        product_category=product.get("product_category") or "",
        options=options if options is not None else read_options(product.get("customization_options")),
        attributes=tuple(_first(product, ("Attributes", "attributes"), ())),
    )


def as_goal(goal: Goal | Mapping[str, Any]) -> Goal:
    """A goal from a record of WebShop's running program (`goal_options`, `instruction_text`, …)."""
    if isinstance(goal, Goal):
        return goal
    options = _first(goal, ("goal_options", "options", "instruction_options"), ())
    return Goal(
        asin=goal.get("asin", ""),
        instruction=_first(goal, ("instruction_text", "instruction"), ""),
        attributes=tuple(_first(goal, ("attributes", "instruction_attributes"), ())),
        options=dict(options) if isinstance(options, Mapping) else tuple(options),
        price_upper=float(goal.get("price_upper", 1_000_000)),
        name=_first(goal, ("name", "Title", "title"), ""),
        query=(goal.get("query") or "").lower().strip(),
        category=goal.get("category") or "",
        product_category=goal.get("product_category") or "",
    )


def _first(record: Mapping[str, Any], names: Sequence[str], default: Any) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), default)
