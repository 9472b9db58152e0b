"""The published reward, against hand-computed cases and a slow oracle over rapidfuzz."""

import random
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import MissingExtraError
from shoal.envs.webshop import Goal, Product, generate_catalogue, make_goals, reward
from shoal.envs.webshop.scoring import (
    COLORS,
    first_color,
    option_hits,
    spacy_nouns,
    title_nouns,
    token_set_ratio,
)


def product_of(title, query="console tables", path="Home › Furniture › Tables", **more):
    return Product("B1", title, prices=(1.0,), price_tag="", category="", query=query, product_category=path,
                   **{"description": "", "bullets": (), "options": {}, "attributes": (), **more})  # fmt: skip


def goal_of(name, path="Home › Furniture › Tables", query="console tables", **more):
    return Goal("B1", "", name=name, query=query, category="", product_category=path,
                **{"attributes": (), "options": {}, "price_upper": 60.0, **more})  # fmt: skip


PRODUCT = product_of(
    "Walnut Console Table",
    description="For the hallway, easy to clean.",
    bullets=("Solid wood top",),
    attributes=("easy assemble", "storage space"),
)
GOAL = goal_of(
    "Walnut Console Table",
    attributes=("assemble easy", "solid wood"),
    options={"color": "light blue", "size": "36 inch"},
)


def test_everything_right_is_worth_one():
    parts = reward(PRODUCT, GOAL, 59.99, {"color": "light blue", "size": "36 inch"})
    assert parts == {"reward": 1.0, "r_type": 1.0, "r_att": 1.0, "r_option": 1.0, "r_price": 1.0}


def test_each_part_counts_once():
    """2 attributes, 2 options and the price: five parts of 0.2."""
    nothing_chosen = reward(PRODUCT, GOAL, 60.0, {})
    assert (nothing_chosen["reward"], nothing_chosen["r_option"]) == (pytest.approx(3 / 5), 0.0)
    too_dear = reward(PRODUCT, GOAL, 60.01, {"color": "light blue", "size": "36 inch"})
    assert (too_dear["reward"], too_dear["r_price"]) == (pytest.approx(4 / 5), 0.0)
    other = replace(GOAL, attributes=("water proof", "solid wood"))
    half = reward(PRODUCT, other, 1.0, {"color": "light blue", "size": "36 inch"})
    assert (half["reward"], half["r_att"]) == (pytest.approx(4 / 5), 0.5)
    plain = replace(GOAL, options={})
    assert reward(PRODUCT, plain, 1.0, {"color": "red"}) == {
        "reward": 1.0, "r_type": 1.0, "r_att": 1.0, "r_option": None, "r_price": 1.0,
    }  # fmt: skip


def test_attributes_are_also_found_in_title_bullets_and_description():
    for text in ("console", "wood top", "the hallway"):
        assert reward(PRODUCT, replace(GOAL, attributes=(text,)), 1, {})["r_att"] == 1.0
    assert reward(PRODUCT, replace(GOAL, attributes=("wood hallway",)), 1, {})["r_att"] == 0.0


@pytest.mark.parametrize(
    ("bought", "wanted", "query", "path", "r_type"),
    [
        ("Walnut Table", "Oak Table", "tables", "A › B › C", 1.0),  # 1 of 2 nouns
        ("Oak Lamp", "Oak Lamp Shade Holder Base Cord", "x", "A › B", 1.0),  # 2 of 6, no query or path needed
        ("Cord", "Oak Lamp Shade Holder Base Cord", "x", "A › B", 0.5),  # 1 of 6
        ("Cord", "Oak Lamp Shade Holder Base Cord", "lamps", "A › B", 1.0),
        ("Cord", "Oak Lamp Shade Holder Base Cord", "x", "Home › Lamps › Z", 1.0),
        (
            "Cord",
            "Oak Lamp Shade Holder Base Cord",
            "x",
            "Lamps › Z",
            0.5,
        ),  # one category in common is not enough
        ("Cord", "Oak Lamp Shade Holder Base Wire Plug Bulb Switch Stand Cord", "lamps", "A", 0.1),  # 1 of 11
        ("Walnut Table", "Oak Lamp", "lamps", "Home › Lamps", 0.0),
        ("Walnut Table", "for the 2 of 3", "x", "A", 0.5),  # no noun at all counts as 0.2
    ],
)
def test_the_kind_of_product_is_judged_by_nouns_query_and_categories(bought, wanted, query, path, r_type):
    goal = goal_of(wanted, "Home › Lamps", "lamps")
    assert reward(product_of(bought, query, path), goal, 1, {})["r_type"] == r_type


def test_options_are_compared_by_colour_and_likeness():
    assert first_color("dusty light pink") == "light"
    assert option_hits(["navy blue"], ["blue"]) == 1
    assert option_hits(["36 inch"], ["inch 36"]) == 1
    assert option_hits(["x-large"], ["large"]) == 1  # all words of one are in the other
    assert option_hits(["x-large"], {"size": "large"}) == 0  # with the name written out they differ
    assert option_hits(["large"], {"size": "x-large"}) == 1
    assert option_hits(["2005brown"], {"color": "2005brown"}) == 0  # so it is in the published program
    assert option_hits(["2005brown"], ["2005brown"]) == 1
    assert option_hits([], ["blue"]) == 0


def slow_reward(product, goal, price, options, ratio):
    """The formula spelled out; shares only the noun function with its subject."""
    words = [set(title_nouns(text)) for text in (product.title, goal.name)]
    count = len(title_nouns(goal.name))
    title = len(words[0] & words[1]) / count if count else 0.2
    paths = [
        {part.strip() for part in path.split("›")}
        for path in (product.product_category, goal.product_category)
    ]
    r_type = 1.0 if product.query == goal.query or len(paths[0] & paths[1]) > 1 or title > 0.2 else 0.5
    r_type = 0.0 if title == 0 else 0.1 if title < 0.1 else r_type

    def color(text):
        for name in COLORS:
            if name in text:
                return name
        return text

    hits = 0
    for wanted in goal.attributes:
        texts = (product.title, " ".join(product.bullets), product.description)
        hits += any(ratio(have, wanted) > 85 for have in product.attributes) or any(
            wanted in t.lower() for t in texts
        )
    for wanted in goal.options.items():
        written = str(color(wanted))
        hits += any(ratio(color(value), written) > 85 for value in options.values())
    return r_type * (hits + (price <= goal.price_upper)) / (len(goal.attributes) + len(goal.options) + 1)


def test_scores_are_those_of_the_formula_for_right_near_and_wrong_products():
    fuzz = pytest.importorskip("rapidfuzz.fuzz")
    from rapidfuzz.utils import default_process

    def ratio(left, right):
        return round(fuzz.token_set_ratio(left, right, processor=default_process))

    catalogue = generate_catalogue(400, seed=5)
    goals, rng = make_goals(catalogue), random.Random(0)
    by_query = {}
    for product in catalogue.products:
        by_query.setdefault(product.query, []).append(product)
    seen = set()
    for number in range(1500):
        goal = rng.choice(goals)
        pools = ([catalogue[goal.asin]], by_query[goal.query], catalogue.products)
        product = rng.choice(pools[number % 3])
        options = {name: rng.choice(values) for name, values in product.options.items() if rng.random() < 0.8}
        price = catalogue.price(product.asin)
        parts = reward(product, goal, price, options)
        assert parts["reward"] == pytest.approx(slow_reward(product, goal, price, options, ratio), abs=1e-12)
        seen.add(parts["r_type"])
    assert {0.0, 1.0} < seen


tokens = st.sampled_from(
    "easy clean Easy wash dark blue light-blue x-large (12) 3.5 café a_b ½ 日本 women's İ | É".split()
)
lines = st.lists(tokens, max_size=5).map(" ".join)


@given(lines, lines)
def test_likeness_is_that_of_the_library_the_formula_names(left, right):
    fuzz = pytest.importorskip("rapidfuzz.fuzz")
    from rapidfuzz.utils import default_process

    # thefuzz takes the letters of Latin-1 out before it hands the texts on.
    cut = {code: None for code in range(128, 256)}
    expected = fuzz.token_set_ratio(
        default_process(left.translate(cut)), default_process(right.translate(cut))
    )
    assert token_set_ratio(left, right) == round(expected)


def test_nouns_of_titles():
    assert title_nouns("Walnut Console Table with 2 Drawers, for the Hallway") == (
        "walnut", "console", "table", "drawers", "hallway",
    )  # fmt: skip
    assert title_nouns("natural loofah sponge, Very Suitable for Kitchen use") == (
        "loofah", "sponge", "suitable", "kitchen", "use",
    )  # fmt: skip
    assert title_nouns("100% PURE 3-Piece (13.5 Fl Oz.)") == ("pure", "piece", "fl", "oz")
    assert title_nouns("") == ()


def test_another_noun_function_can_be_handed_in():
    goal = Goal("B1", "", (), {}, 10.0, "alpha beta", "q", "c", "A › B")
    product = product_of("beta", "other", "")
    assert reward(product, goal, 1.0, {}, noun_fn=lambda title: ())["r_type"] == 0.5
    assert reward(product, goal, 1.0, {}, noun_fn=lambda title: (title,))["r_type"] == 0.0


def test_spacy_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(MissingExtraError, match=r"\[spacy\]"):
        spacy_nouns()
