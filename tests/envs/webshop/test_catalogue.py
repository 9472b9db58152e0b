"""Files, prices, goals and the generated shop."""

import json
import os
import pickle
import statistics
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.envs.webshop import shelf

from shoal.core.errors import ConfigError, DataError
from shoal.envs import make
from shoal.envs.webshop import expert_action, generate_catalogue, load_catalogue, make_goals, reward, search
from shoal.envs.webshop.catalogue import NO_LIMIT, Catalogue, Instruction, Review, price_limit, split_goals
from shoal.envs.webshop.generator import KINDS, OPTIONS


def test_webshops_own_files_are_read_as_its_program_reads_them(tmp_path):
    paths = shelf.write(tmp_path)
    catalogue = load_catalogue(paths["items"], paths["attributes"], reviews_path=paths["reviews"])
    assert list(catalogue) == [
        "B000000001",
        "B000000002",
        "B000000003",
    ]  # repeated and too long asins are left out
    table, oak, dress = catalogue.products
    assert table.options == {"color": ("light walnut", "black | gold"), "size": ("36 inch", "48 inch")}
    assert (table.query, table.prices, table.price_tag) == (
        "console tables",
        (120.0, 180.0),
        "$120.0 to $180.0",
    )
    assert (oak.bullets, oak.options, oak.attributes) == (("One drawer.",), {}, ())
    assert (oak.rating, oak.reviews) == ("4.1", (Review("Fine", "4", "It stands."),))
    assert (dress.prices, dress.price_tag, dress.options) == (
        (100.0,),
        "$100.0",
        {"color": ("navy", "dusty pink")},
    )
    assert search(catalogue, "oak tables") == ["B000000002", "B000000001"]
    assert search(catalogue, "tables", k=1) == ["B000000002"]  # the shorter text
    assert search(catalogue, "dusty") == ["B000000003"]
    assert sorted(search(catalogue, "drawers")) == ["B000000001", "B000000002"]
    assert catalogue["B000000003"] is dress
    assert 120 <= catalogue.price("B000000001") <= 180
    limited = load_catalogue(paths["items"], paths["attributes"], limit=2)
    assert len(limited) == 2


def test_goals_name_every_combination_of_options(tmp_path):
    paths = shelf.write(tmp_path)
    catalogue = load_catalogue(paths["items"], paths["attributes"])
    goals = make_goals(catalogue, seed=3)
    assert Counter(goal.asin for goal in goals) == {"B000000001": 4, "B000000003": 2}
    table = next(goal for goal in goals if goal.options == {"color": "light walnut", "size": "48 inch"})
    assert table.instruction == (
        "Find me easy assemble console tables with color: light walnut, and size: 48 inch, "
        f"and price lower than {table.price_upper:.2f} dollars"
    )
    assert sorted(goal.instruction for goal in make_goals(catalogue, seed=3)) == sorted(
        g.instruction for g in goals
    )
    for goal in goals:
        assert reward(catalogue[goal.asin], goal, catalogue.price(goal.asin), goal.options)["reward"] == 1.0


def test_instructions_by_people_replace_the_made_up_ones(tmp_path):
    paths = shelf.write(tmp_path)
    catalogue = load_catalogue(paths["items"], paths["attributes"], paths["human"])
    (goal,) = make_goals(catalogue)
    assert goal.options == ("navy",)
    assert goal.instruction.startswith("i want a navy dress i can machine wash, and price lower than 1")
    assert reward(catalogue[goal.asin], goal, 100.0, {"color": "navy"})["reward"] == 1.0
    assert reward(catalogue[goal.asin], goal, 100.0, {"color": "dusty pink"})["reward"] == pytest.approx(
        2 / 3
    )


def test_broken_files_are_named(tmp_path):
    paths = shelf.write(tmp_path)
    broken = [dict(item) for item in shelf.ITEMS]
    del broken[1]["product_category"]
    paths["items"].write_text(json.dumps(broken))
    with pytest.raises(DataError, match=r"items\.json, product 1: KeyError: 'product_category'"):
        load_catalogue(paths["items"], paths["attributes"])
    broken[1] = {**shelf.ITEMS[1], "pricing": "$12.3.4"}
    paths["items"].write_text(json.dumps(broken))
    with pytest.raises(DataError, match=r"product 1: .*price"):
        load_catalogue(paths["items"], paths["attributes"])
    paths["items"].write_text("{}")
    with pytest.raises(DataError, match="JSON list"):
        load_catalogue(paths["items"], paths["attributes"])
    with pytest.raises(FileNotFoundError):
        load_catalogue(tmp_path / "nothing.json", paths["attributes"])
    shelf.write(tmp_path)
    for reviews in ([{"average_rating": 4}], [[]], [{"asin": None}]):
        paths["reviews"].write_text(json.dumps(reviews))
        with pytest.raises(DataError, match=r"reviews\.json, entry 0 must be an object with an asin"):
            load_catalogue(paths["items"], paths["attributes"], reviews_path=paths["reviews"])
    product = generate_catalogue(1).products[0]
    with pytest.raises(DataError, match="same asin"):
        Catalogue((product, product))


TEXTS = ("name", "full_description", "category", "query", "product_category")
OTHER_THAN_TEXT = [
    *({name: value} for name in TEXTS for value in (5,)),
    {"small_description": ["x", 5]}, {"small_description": {"a": "b"}}, {"asin": 5},
    {"attributes": "soft"}, {"attributes": [None]}, {"instruction": 5}, {"instruction_attributes": "soft"},
    {"instruction_options": "red"}, {"instruction_options": {"color": 5}},
]  # fmt: skip


@pytest.mark.parametrize("other", OTHER_THAN_TEXT)
def test_what_is_no_text_is_refused_by_name_when_a_file_is_read(tmp_path, other):
    paths = shelf.write(tmp_path)
    asin = shelf.ITEMS[0]["asin"]
    about = {"attributes": ["soft"], "instruction": "a table", "instruction_attributes": ["soft"]}
    paths["items"].write_text(json.dumps([{**shelf.ITEMS[0], **other}]))
    paths["attributes"].write_text(json.dumps({asin: {**about, **other}}))
    paths["human"].write_text(json.dumps({asin: [{**about, "instruction_options": [], **other}]}))
    (name,) = other
    with pytest.raises(
        DataError, match=rf"items\.json, product 0: ValueError: {name} must be (text|a list of texts), got"
    ):
        load_catalogue(paths["items"], paths["attributes"], paths["human"])
    if name.startswith("instruction") and name != "instruction_options":
        with pytest.raises(DataError, match=f"product 0: ValueError: {name} must be"):
            load_catalogue(paths["items"], paths["attributes"])


def test_a_price_beyond_all_numbers_and_options_beyond_all_counting_are_refused(tmp_path):
    paths = shelf.write(tmp_path)
    paths["items"].write_text(json.dumps([{**shelf.ITEMS[0], "pricing": "$1 to $" + "9" * 400}]))
    with pytest.raises(DataError, match="product 0: ValueError: expected a price like"):
        load_catalogue(paths["items"], paths["attributes"])
    values = tuple(map(str, range(10)))
    many = replace(
        generate_catalogue(1).products[0],
        options={f"option {i}": values for i in range(12)}, instructions=(Instruction("a thing", ("soft",)),),
    )  # fmt: skip
    with pytest.raises(DataError, match="can be had in 1000000000000 ways"):
        make_goals(Catalogue((many,)))


def test_price_limits_are_the_larger_of_two_draws_among_the_next_tens():
    """Of the pairs of (30, 40, 50, 60) one has 40 as its larger, two have 50, three have 60."""
    n = 6000
    limits = Counter(price_limit(23.5, seed, "B1") for seed in range(n))
    expected = {40.0: n / 6, 50.0: n / 3, 60.0: n / 2}
    assert limits.keys() == expected.keys()
    chi_square = sum((limits[limit] - expected[limit]) ** 2 / expected[limit] for limit in expected)
    assert chi_square < 13.8  # passed by chance once in 1000 with 2 degrees of freedom; the seeds are fixed
    assert {price_limit(975.0, seed, "B1") for seed in range(50)} == {990.0}
    assert price_limit(985.0, 0, "B1") == price_limit(5000.0, 0, "B1") == NO_LIMIT
    assert {price_limit(40.0, seed, "B1") for seed in range(100)} == {60.0, 70.0, 80.0}


def test_prices_depend_on_their_seed_alone_and_fill_their_range():
    catalogue = generate_catalogue(1500)
    ranged = [product.asin for product in catalogue.products if len(product.prices) == 2]
    places = []
    for asin in ranged:
        low, high = catalogue[asin].prices
        places.append((catalogue.price(asin) - low) / (high - low))
    assert 0 <= min(places) < 0.02 < 0.98 < max(places) < 1
    assert abs(statistics.mean(places) - 0.5) < 0.05
    other = Catalogue(catalogue.products, price_seed=1)
    assert all(catalogue.price(asin) != other.price(asin) for asin in ranged)
    backwards = Catalogue(catalogue.products[::-1])
    assert all(catalogue.price(asin) == backwards.price(asin) for asin in catalogue)


def test_splits_are_the_first_goals_and_never_overlap():
    goals = make_goals(generate_catalogue(3000))
    parts = {name: list(split_goals(goals, name)) for name in ("test", "val", "train")}
    assert len(parts["test"]) == len(goals) // 10
    assert len(parts["val"]) == len(goals) // 5
    assert parts["test"] + parts["val"] + parts["train"] == goals
    many = goals * 4
    assert [len(split_goals(many, name)) for name in ("test", "val")] == [500, 1000]
    with pytest.raises(ConfigError, match="no goal"):
        split_goals(goals[:4], "test")
    with pytest.raises(ConfigError, match="split must be"):
        split_goals(goals, "dev")


def test_the_shipped_shop_is_varied_and_priced_like_a_shop():
    catalogue = generate_catalogue()
    products = catalogue.products
    assert len(products) == 3000
    assert {product.query for product in products} == {kind.query for kind in KINDS}
    assert len({product.title for product in products}) > 2950
    assert all(len(set(product.attributes)) == len(product.attributes) >= 2 for product in products)
    assert Counter(len(product.options) for product in products).keys() == {0, 1, 2, 3}
    missing = sum(product.price_tag == "$100.0" for product in products) / len(products)
    assert 0.03 < missing < 0.07
    for kind in KINDS:
        prices = [p.prices[0] for p in products if p.query == kind.query and p.price_tag != "$100.0"]
        assert kind.price / 2 < statistics.median(prices) < kind.price * 2
    for product in products:
        for values in product.options.values():
            assert len(set(values)) == len(values) >= 2
    assert all(pool in OPTIONS for kind in KINDS for pool in kind.options)
    texts = " ".join(p.title + p.description + " ".join(p.bullets) for p in products[:300])
    assert texts.isprintable()


def test_smaller_shops_are_the_beginning_of_larger_ones():
    assert generate_catalogue(50).products == generate_catalogue(120).products[:50]
    assert generate_catalogue(50, seed=1).products != generate_catalogue(50).products


def test_the_expert_scores_one_on_goals_all_over_the_shipped_shop():
    env = make("webshop")
    assert env.n_goals > 3000
    for number in range(0, env.n_goals, 8):
        env.config = replace(env.config, goal=number)
        env.reset(seed=0)
        over = False
        while not over:
            _, points, terminated, truncated, info = env.step(expert_action(env))
            over = terminated or truncated
            assert info["action_is_valid"]
        assert (points, info["success"], terminated) == (1.0, True, True), env.goal


def test_goals_of_the_shipped_shop_are_found_by_their_own_words():
    """The words of the instruction, without the price, bring the product among the 50 that a search shows."""
    catalogue = generate_catalogue()
    for goal in make_goals(catalogue)[::7]:
        assert goal.asin in search(catalogue, goal.instruction.split(", and price")[0])


def fingerprint(seed):
    """Everything a shop of a seed is made of, as text."""
    catalogue = generate_catalogue(200, seed=seed, price_seed=seed)
    goals = make_goals(catalogue, seed=seed)
    found = [search(catalogue, goal.instruction, 10) for goal in goals[:20]]
    return repr((catalogue.products, [catalogue.price(asin) for asin in catalogue], goals, found))


def test_the_same_seed_makes_the_same_shop_everywhere():
    expected = [fingerprint(seed) for seed in range(3)]
    assert len(set(expected)) == 3
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(fingerprint, range(3))) == expected
    code = "from tests.envs.webshop.test_catalogue import fingerprint; print(fingerprint(1))"
    environment = {**os.environ, "PYTHONHASHSEED": "random", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.rstrip("\n") == expected[1], run.stderr


def test_a_catalogue_travels_between_processes():
    catalogue = generate_catalogue(30)
    copy = pickle.loads(pickle.dumps(catalogue))
    assert copy.products == catalogue.products
    assert search(copy, "table") == search(catalogue, "table")


REAL = os.environ.get("SHOAL_WEBSHOP_DATA", "")


@pytest.mark.skipif(not REAL, reason="SHOAL_WEBSHOP_DATA names no folder with WebShop's 1000 products")
def test_webshops_thousand_products_are_loaded_searched_and_bought():
    folder = Path(REAL)
    items, attributes = folder / "items_shuffle_1000.json", folder / "items_ins_v2_1000.json"
    catalogue = load_catalogue(items, attributes)
    assert len(catalogue) == 1000
    goals = make_goals(catalogue)
    assert len(goals) == 6910  # as WebShop itself makes of these files
    found = sum(goal.asin in search(catalogue, goal.instruction) for goal in goals[::10])
    assert found / len(goals[::10]) > 0.8
    env = make("webshop", source=str(items), attributes_path=str(attributes))
    won = 0
    for seed in range(200):
        env.reset(seed=seed)
        over = False
        while not over:
            _, points, terminated, truncated, _ = env.step(expert_action(env))
            over = terminated or truncated
        won += points == 1.0
    assert won / 200 > 0.88  # 458 of the 6910 goals name options that the published formula never matches
