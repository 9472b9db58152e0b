"""Pages, clicks and purchases, by hand on a shelf of three products."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.envs.webshop import shelf

from shoal.core.errors import ConfigError
from shoal.envs import make
from shoal.envs.webshop import expert_action
from shoal.envs.webshop.env import read_action


@pytest.fixture
def shop(tmp_path):
    paths = shelf.write(tmp_path)

    def open_shop(**settings):
        files = {
            "source": paths["items"],
            "attributes_path": paths["attributes"],
            "reviews_path": paths["reviews"],
        }
        return make("webshop", **{name: str(path) for name, path in files.items()}, **settings)

    return open_shop


def wanted(env, options):
    """The env at the start of the goal with these options."""
    for seed in range(200):
        observation, _ = env.reset(seed=seed)
        if env.goal.options == options:
            return observation
    raise AssertionError("no such goal")


def test_a_purchase_from_search_to_reward(shop):
    env = shop()
    first = wanted(env, {"color": "light walnut", "size": "48 inch"})
    ask = env.goal.instruction
    assert first == f"WebShop [SEP] Instruction: [SEP] {ask} [SEP] Search"
    assert env.available_actions() == ["search[<your query>]"]
    observation, reward, *_, info = env.step("search[Console tables]")
    rows = "B000000002 [SEP] Fern Oak Console Table [SEP] $99.5"
    other = "B000000001 [SEP] Brook Walnut Console Table with 2 Drawers, Easy Assemble [SEP] $120.0 to $180.0"
    head = f"Instruction: [SEP] {ask} [SEP] Back to Search [SEP]"
    assert observation == f"{head} Page 1 (Total results: 2) [SEP] Next > [SEP] {rows} [SEP] {other}"
    assert info["available_actions"] == [
        "click[back to search]", "click[next >]", "click[b000000002]", "click[b000000001]",
    ]  # fmt: skip
    item, *_ = env.step("click[B000000001]")
    assert item == (
        f"{head} < Prev [SEP] color [SEP] light walnut [SEP] black | gold [SEP] size [SEP] 36 inch "
        "[SEP] 48 inch [SEP] Brook Walnut Console Table with 2 Drawers, Easy Assemble [SEP] Price: "
        "$120.0 to $180.0 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    before = env.anchor()
    observation, *_, info = env.step("click[black | gold]")
    assert observation == item
    assert info["action_is_effective"]
    assert env.anchor() != before  # the choice is not on the page, but it is a choice
    env.step("click[light walnut]")
    assert not env.step("click[light walnut]")[4]["action_is_effective"]
    assert env.step("click[features]")[0] == f"{head} < Prev [SEP] Solid wood top. [SEP] Two drawers."
    assert env.step("click[< prev]")[0] == item
    assert env.step("click[description]")[0].endswith(
        "< Prev [SEP] A narrow table for the hallway. Solid wood."
    )
    env.step("click[< prev]")
    assert env.place.options == {"color": "light walnut"}
    env.step("click[48 inch]")
    last, reward, terminated, truncated, info = env.step("click[Buy Now]")
    assert (reward, terminated, truncated, info["success"], info["task_score"]) == (
        1.0,
        True,
        False,
        True,
        1.0,
    )
    assert {name: info[name] for name in ("r_type", "r_att", "r_option", "r_price")} == {
        "r_type": 1.0, "r_att": 1.0, "r_option": 1.0, "r_price": 1.0,
    }  # fmt: skip
    assert last == "Thank you for shopping with us! [SEP] Your score (min 0.0, max 1.0) [SEP] 1"
    assert info["available_actions"] == []


def test_a_wrong_purchase_pays_by_its_parts_and_ten_only_for_all(shop):
    """Of (1 attribute + 2 options + price) the dearer colour is wrong: 3 of 4."""
    for mode, paid in (("score", 0.75), ("win10", 0.0)):
        env = shop(reward_mode=mode)
        wanted(env, {"color": "light walnut", "size": "48 inch"})
        for action in ("search[walnut]", "click[b000000001]", "click[black | gold]", "click[48 inch]"):
            env.step(action)
        _, reward, terminated, _, info = env.step("click[buy now]")
        assert (reward, terminated, info["success"], info["task_score"]) == (paid, True, False, 0.75)
        assert (info["r_option"], info["r_att"]) == (0.5, 1.0)


def test_the_winner_of_ten_wins_ten(shop):
    env = shop(reward_mode="win10")
    env.reset(seed=0)
    over = False
    while not over:
        _, reward, over, _, _ = env.step(expert_action(env))
    assert reward == 10.0


def test_pages_turn_and_forget_as_in_the_original(shop):
    env = shop(page_size=1, max_results=2)
    env.reset(seed=0)
    assert "Page 1 (Total results: 2) [SEP] Next > [SEP] B000000002" in env.step("search[tables]")[0]
    second = env.step("click[next >]")[0]
    assert "Page 2 (Total results: 2) [SEP] < Prev [SEP] Next > [SEP] B000000001" in second
    past, *_, info = env.step("click[next >]")
    assert past.endswith("Page 3 (Total results: 2) [SEP] < Prev [SEP] Next >")
    assert info["action_is_valid"]
    assert env.step("click[< prev]")[0] == second
    env.step("click[b000000001]")
    env.step("click[black | gold]")
    assert env.step("click[< prev]")[0] == second
    env.step("click[b000000001]")
    assert env.place.options == {}  # leaving the item forgets its options
    env.step("click[back to search]")
    assert env.place.page == "search"
    assert "Total results: 0" in env.step("search[xyzzy]")[0]


def test_a_value_of_several_options_is_one_of_the_last_of_them(shop, tmp_path):
    options = {"Color": [{"value": "Oak"}, {"value": "Buy Now"}], "Wood": [{"value": "Oak"}]}
    (tmp_path / "items.json").write_text(json.dumps([{**shelf.ITEMS[0], "customization_options": options}]))
    env = shop()
    env.reset(seed=0)
    env.step("search[table]")
    assert env.step("click[b000000001]")[4]["available_actions"][-1] == "click[oak]"
    env.step("click[oak]")
    assert env.place.options == {"wood": "oak"}
    assert env.step("click[buy now]")[2]


@pytest.mark.parametrize(
    "action",
    [
        "click[buy now]",
        "click[b000000001]",
        "click[< prev]",
        "click[search]",
        "click[next >]",
        "buy",
        "search[]",
        "",
        "click[]",
    ],
)
def test_what_the_page_does_not_offer_costs_a_step_and_changes_nothing(shop, action):
    env = shop(invalid_penalty=-0.1)
    first, _ = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(action)
    assert (observation, reward, terminated, truncated) == (first, -0.1, False, False)
    assert (info["action_is_valid"], info["action_is_effective"], info["step"]) == (False, False, 1)


def test_reviews_and_attributes_have_pages(shop):
    env = shop(show_attributes=True)
    env.reset(seed=0)
    for action in ("search[oak]", "click[b000000002]"):
        env.step(action)
    assert env.step("click[reviews]")[0].endswith('< Prev [SEP] "Fine" [SEP] 4 [SEP] It stands.')
    env.step("click[< prev]")
    assert env.step("click[attributes]")[4]["action_is_valid"]
    plain = shop()
    plain.reset(seed=0)
    for action in ("search[oak]", "click[b000000002]"):
        plain.step(action)
    assert not plain.step("click[attributes]")[4]["action_is_valid"]


def test_a_search_works_from_every_page(shop):
    env = shop()
    env.reset(seed=0)
    for action in ("search[oak]", "click[b000000002]", "click[reviews]", "search[dress]"):
        assert env.step(action)[4]["action_is_valid"]
    assert env.place.found == ("B000000003",)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("search[Red Shoes]", "search[red shoes]"),
        (" CLICK [ Buy Now ] ", "click[buy now]"),
        ("click[size [us]]", "click[size [us]]"),
        ("search[]", None),
        ("search[   ]", None),
        ("search red", None),
        ("buy[now]", None),
        ("click[a] click[b", None),
        ("x click[a]", None),
        ("click[a" + "]" * 5000, None),
    ],
)
def test_actions_have_one_spelling(text, action):
    assert read_action(text) == action


@given(st.text(max_size=200))
def test_no_text_breaks_the_projection(text):
    env_class = make("webshop", num_products=20).__class__
    projected = env_class.projection(f"<action>{text}</action>")
    assert projected.valid == (projected.actions[0] != "")


def test_goals_can_be_fixed_and_split(shop):
    env = shop(goal=2)
    assert len({env.reset(seed=seed)[0] for seed in range(20)}) == 1
    with pytest.raises(ConfigError, match=r"goal must be in \[0, 6\)"):
        shop(goal=6)
    with pytest.raises(ConfigError, match="no goal"):
        shop(split="test")
    train, test = (make("webshop", num_products=100, split=name) for name in ("train", "test"))
    seen = [{one.reset(seed=seed)[0] for seed in range(300)} for one in (train, test)]
    assert not seen[0] & seen[1]
    assert len(seen[1]) == test.n_goals


def test_seeds_of_prices_and_goals_change_what_they_name(shop):
    def shown(**settings):
        env = make("webshop", num_products=60, **settings)
        return [env.reset(seed=seed)[0] for seed in range(30)]

    assert shown() == shown()
    assert shown(goal_seed=1) != shown()
    assert shown(price_seed=1) != shown()
    assert shown(catalogue_seed=1) != shown()


def test_settings_that_cannot_work_are_refused():
    for settings, named in (
        ({"reward_mode": "all"}, "reward_mode"),
        ({"split": "dev"}, "split"),
        ({"nouns": "guess"}, "nouns"),
        ({"page_size": 0}, "page_size"),
        ({"num_products": 0}, "num_products"),
        ({"source": "items.json"}, "attributes_path"),
        ({"human_path": "human.json"}, "human_path goes with a file of products"),
        ({"reviews_path": "reviews.json"}, "reviews_path goes with"),
    ):
        with pytest.raises(ConfigError, match=named):
            make("webshop", **settings)
