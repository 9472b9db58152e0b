"""Whole episodes: the next skill is chosen from what the hands hold, again after each one."""

from __future__ import annotations

import itertools
import math
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from shoal.core.errors import ConfigError, DataError, MissingExtraError
from shoal.skills.graph.store import NewVersion, Store
from shoal.skills.learning import episodes
from shoal.skills.learning.episodes import (
    Chooser,
    EpisodesReport,
    Memory,
    draw_chain,
    evaluate_chain,
    play_episodes,
    record_chain,
)
from shoal.skills.learning.network import Network, Shape, encode
from shoal.skills.plan import Step
from shoal.skills.spec import Features, Skill, check_skills, parse_skill
from shoal.skills.worlds.gymnasium_world import GymnasiumWorld

FEATURES = Features(
    "smithy",
    ("ore", "sword", "anvil", "full", "gem"),
    {"ore": 3, "full": 9},
    frozenset({"ore"}),
    frozenset({"anvil"}),
)
WAIT, DIG, BUILD, FORGE, EAT = range(5)


def skill(name: str, gain: str, **extra: Any) -> Skill:
    return parse_skill({"name": name, "gain": {gain: 1}, "done": {"feature": gain}, "horizon": 5, **extra})


SKILLS = check_skills(
    [
        skill("Dig", "ore"),
        skill("Build", "anvil", requirements={"ore": 1}, consumption={"ore": 1}),
        skill("Forge", "sword", requirements={"ore": 1, "anvil": 1}, consumption={"ore": 1}),
        skill("Eat", "full", upkeep={"full": 3}),
        skill("Wish", "gem"),
    ],
    FEATURES,
)
ACTS = {"Dig": DIG, "Build": BUILD, "Forge": FORGE, "Eat": EAT, "Wish": WAIT}


class Smithy(gymnasium.Env):
    """An anvil is left behind by digging; who has not eaten for ten steps dies; no gem can be had."""

    observation_space, action_space = Box(0, 9, (5,), np.float32), Discrete(5)
    acts: ClassVar[list[int]] = []  # of all there ever were

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.has = dict(zip(FEATURES.names, (0, 0, 0, 9, 0), strict=True))
        return self.look(), {}

    def look(self):
        return np.array(list(self.has.values()), np.float32)

    def step(self, action):
        has = self.has
        has["full"] -= 1
        if action == DIG:
            has["ore"], has["anvil"] = min(has["ore"] + 1, 3), 0
        elif action == BUILD and has["ore"]:
            has["ore"], has["anvil"] = has["ore"] - 1, 1
        elif action == FORGE and has["ore"] and has["anvil"]:
            has["ore"], has["sword"] = has["ore"] - 1, 1
        elif action == EAT:
            has["full"] = min(has["full"] + 3, 9)
        self.acts.append(action)
        return self.look(), 0.0, has["full"] < 0, False, {}


class SmithyWorld(GymnasiumWorld):
    features: ClassVar[Features] = FEATURES
    most_lanes: ClassVar[int | None] = 2

    def make(self):
        return Smithy()

    def read(self, env):
        return list(env.has.values())


@pytest.fixture(autouse=True)
def smithy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world under its name."""
    monkeypatch.setitem(sys.modules, "smithy", types.SimpleNamespace(SmithyWorld=SmithyWorld))


def trained(folder: Path, *names: str) -> Store:
    """A store whose experts each do the one thing that their skill takes."""
    store = Store(folder, create=True)
    store.set_setting("world", "smithy:SmithyWorld")
    for spec in (spec for spec in SKILLS if spec.name in names):
        store.add_skill(spec, [], 1000)
        net = Network(Shape(5, 2, 5))
        net.bh[ACTS[spec.name]] = 50.0
        sha = store.put_blob(encode(net.params()))
        store.add_version(NewVersion(store.assign_expert(spec.name), sha, None, 1, 1, True))
        store.update_skill(spec.name, status="completed")
    return store


def test_all_that_can_be_had_is_had_and_what_cannot_is_tried_till_the_last_step(tmp_path: Path) -> None:
    report = play_episodes(trained(tmp_path, *ACTS), episodes=3, most_steps=40)
    assert report.had == {"ore": 1.0, "sword": 1.0, "anvil": 1.0, "full": 1.0, "gem": 0.0}
    assert report.applied == {"Dig": 1.0, "Build": 1.0, "Forge": 1.0, "Eat": 1.0, "Wish": 0.0}
    assert report.lengths.tolist() == [40, 40, 40]  # it ate, so that it lived
    assert report.died == 0
    assert report.reward(["sword", "gem"]) == 0.5


def test_upkeep_goes_on_until_it_is_nearly_full(tmp_path: Path) -> None:
    store = trained(tmp_path, "Eat", "Wish")
    Smithy.acts.clear()
    play_episodes(store, episodes=1, most_steps=40)
    runs = [len(list(run)) for act, run in itertools.groupby(Smithy.acts) if act == EAT]
    assert runs[0] == 3  # 3 - 1 + 3 = 5, 7, and with 9 no more than one is missing
    assert len(runs) >= 3


def test_an_episode_ends_when_all_was_done(tmp_path: Path) -> None:
    report = play_episodes(trained(tmp_path, "Dig", "Build", "Forge"), episodes=2, most_steps=9)
    assert set(report.applied.values()) == {1.0}
    assert report.lengths.tolist() == [4, 4]  # Dig, Dig, Build, Forge: digging leaves the anvil
    assert report.died == 0


def test_who_does_not_eat_dies_and_what_was_done_before_counts(tmp_path: Path) -> None:
    report = play_episodes(trained(tmp_path, "Dig", "Build", "Forge", "Wish"), episodes=2, most_steps=60)
    assert report.died == 1.0
    assert report.lengths.tolist() == [10, 10]  # 9, 8, … 0 and then no more
    assert report.had["anvil"] == 1.0


def test_what_is_done_in_the_step_of_its_death_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Smithy.step
    monkeypatch.setattr(Smithy, "step", lambda self, action: (*step(self, action)[:2], True, False, {}))
    report = play_episodes(trained(tmp_path, "Dig"), episodes=1)
    assert report.applied == {"Dig": 0.0}  # as in a plan
    assert report.had["ore"] == 1.0
    assert report.died == 1.0


def values(**has: int) -> np.ndarray:
    return np.array([has.get(name, 0) for name in FEATURES.names], np.float32)


def fresh_memory() -> Memory:
    return Memory(np.zeros(len(SKILLS), np.bool_), np.zeros(len(SKILLS), np.int64))


def test_the_way_to_a_goal_goes_on_from_what_the_hands_hold() -> None:
    chooser = Chooser(SKILLS, FEATURES)
    memory = fresh_memory()
    memory.applied[:] = [True, True, False, True, True]  # the sword alone is open

    def chosen(**has: int) -> str:
        memory.plan.clear()
        index = chooser.choose(values(**has), memory)
        assert index is not None
        return SKILLS[index].name

    assert chosen() == "Dig"
    assert chosen(ore=1) == "Dig"  # one for the anvil and one for the sword, before the anvil is built
    assert chosen(ore=2) == "Build"
    assert chosen(ore=1, anvil=1) == "Forge"
    memory.plan.clear()
    assert chooser.choose(values(sword=1), memory) is None


def test_what_the_next_goals_need_is_fetched_at_one_go_and_nothing_twice() -> None:
    chooser = Chooser(SKILLS[:3], FEATURES)
    memory = Memory(np.zeros(3, np.bool_), np.zeros(3, np.int64))
    assert chooser.choose(values(), memory) == 0
    assert [SKILLS[i].name for i in memory.plan] == ["Dig", "Dig", "Build", "Forge"]
    assert chooser.choose(values(ore=1), memory) == 0  # the plan is followed, whatever would be nearest now
    memory.plan = []
    assert chooser.choose(values(ore=3), memory) == 1
    assert [SKILLS[i].name for i in memory.plan] == ["Build", "Forge", "Dig"]


def test_what_ran_out_of_time_comes_after_what_did_not() -> None:
    chooser = Chooser(SKILLS, FEATURES)
    memory = fresh_memory()
    first = chooser.choose(values(full=9), memory)
    assert first is not None
    memory.late[first] = 1
    memory.plan.clear()
    second = chooser.choose(values(full=9), memory)
    assert second not in (first, None)
    memory.late[:] = 1
    memory.plan.clear()
    assert chooser.choose(values(full=9), memory) == first


def test_of_several_upkeeps_the_one_named_last_comes_first() -> None:
    both = [*SKILLS[:4], parse_skill({**SKILLS[4].as_dict(), "upkeep": {"ore": 2}})]
    chooser = Chooser(both, FEATURES)
    lanes = np.stack(
        [values(full=9, ore=3), values(full=3, ore=3), values(full=3, ore=1), values(full=0, ore=1)]
    )
    chosen, short = chooser.pressing(lanes)
    assert chosen.tolist() == [-1, 3, 4, 4]
    assert [FEATURES.names[column] for column in short[1:]] == ["full", "ore", "ore"]
    assert short[0] == -1


def test_goals_of_more_worth_come_first_and_those_of_none_only_where_they_are_needed(tmp_path: Path) -> None:
    memory = fresh_memory()
    memory.applied[:] = [True, True, True, False, False]  # to eat and to wish, each its horizon of 5 away
    eat, wish = 3, 4
    for worth, first in (
        ({"Eat": 1, "Wish": 1.5}, wish),
        ({"Eat": 1.5, "Wish": 1}, eat),
        ({"Wish": 1}, wish),
        ({"Eat": 1, "Wish": 0}, eat),
        ({"Forge": 1}, None),  # it was done
    ):
        memory.plan.clear()
        assert Chooser(SKILLS, FEATURES, worth=worth).choose(values(), memory) == first
    memory.plan.clear()
    slow = Chooser(SKILLS, FEATURES, {"Wish": 9.0}, {"Wish": 2, "Eat": 1})
    assert slow.choose(values(), memory) == wish  # 9 / 2 < 5

    Smithy.acts.clear()
    store = trained(tmp_path, *ACTS)
    report = play_episodes(store, episodes=1, most_steps=40, worth={"Forge": 1})
    assert Smithy.acts == [DIG, DIG, BUILD, FORGE]  # nothing is eaten, and the sword is all
    assert report.lengths.tolist() == [4]


def test_what_comes_next_is_judged_by_the_steps_that_it_adds() -> None:
    # With an anvil on the way, a sword adds 10 steps and the gem 15: 10 / 2 is 15 / 3, and the anvil is soon left.
    # By all steps of the plan it would be 20 / 2 against 25 / 3.
    wish = parse_skill({**SKILLS[4].as_dict(), "horizon": 15})
    skills = check_skills([*SKILLS[:3], wish], FEATURES)
    for worth, order in ((3.0, ["Forge", "Wish"]), (3.1, ["Wish", "Forge"])):
        chooser = Chooser(skills, FEATURES, worth={"Build": 9, "Forge": 2, "Wish": worth})
        memory = Memory(np.zeros(4, np.bool_), np.zeros(4, np.int64))
        chooser.choose(values(), memory)
        assert [skills[index].name for index in memory.plan if index > 1] == order


@pytest.mark.parametrize(
    ("worth", "message"),
    [({"Forg": 1.0}, "'Forg'.*mean 'Forge'"), ({"Forge": -1.0}, "'Forge' must be at least 0, got -1")],
)
def test_a_worth_that_means_nothing_is_refused(tmp_path: Path, worth: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        play_episodes(trained(tmp_path, "Dig", "Build", "Forge"), episodes=1, worth=worth)


def test_upkeep_that_needs_something_fetches_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cook = parse_skill({**SKILLS[3].as_dict(), "requirements": {"anvil": 1}, "upkeep": {"full": 8}})
    wish = parse_skill({**SKILLS[4].as_dict(), "horizon": 1})  # the nearest goal, so that it is tried first
    monkeypatch.setitem(globals(), "SKILLS", check_skills([*SKILLS[:3], cook, wish], FEATURES))
    Smithy.acts.clear()
    play_episodes(trained(tmp_path, "Dig", "Build", "Eat", "Wish"), episodes=1, most_steps=6)
    assert Smithy.acts[:4] == [WAIT, DIG, BUILD, EAT]


def test_an_upkeep_that_is_named_later_interrupts_one_that_is_being_seen_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Digging keeps the hands full of ore, and takes a while; hunger that comes meanwhile is seen to at once.
    dig = parse_skill({**SKILLS[0].as_dict(), "upkeep": {"ore": 1}, "horizon": 20})
    monkeypatch.setitem(globals(), "SKILLS", check_skills([dig, *SKILLS[1:]], FEATURES))
    store = trained(tmp_path, "Dig", "Eat", "Wish")
    monkeypatch.setattr(Smithy, "step", slow_digging(Smithy.step))
    Smithy.acts.clear()
    play_episodes(store, episodes=1, most_steps=20)
    hungry = Smithy.acts.index(EAT)
    assert Smithy.acts[:hungry] == [DIG] * 6  # 9, 8, … 3 is left
    assert DIG in Smithy.acts[hungry:]  # and then it goes on


def test_a_plan_that_upkeep_interrupts_is_made_again_from_what_is_held_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eat = parse_skill({**SKILLS[3].as_dict(), "upkeep": {"full": 8}})  # after every other step
    monkeypatch.setitem(globals(), "SKILLS", check_skills([*SKILLS[:3], eat], FEATURES))
    Smithy.acts.clear()
    play_episodes(trained(tmp_path, "Dig", "Build", "Forge", "Eat"), episodes=1, most_steps=7)
    assert Smithy.acts == [DIG, EAT, DIG, EAT, BUILD, EAT, FORGE]


def test_upkeep_that_ran_out_of_time_lets_other_things_be_done_before_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = parse_skill({**SKILLS[4].as_dict(), "upkeep": {"gem": 0}})  # it always wants what cannot be had
    monkeypatch.setitem(globals(), "SKILLS", check_skills([SKILLS[0], SKILLS[3], wish], FEATURES))
    Smithy.acts.clear()
    report = play_episodes(trained(tmp_path, "Dig", "Eat", "Wish"), episodes=1, most_steps=20)
    assert Smithy.acts[:7] == [WAIT, WAIT, WAIT, WAIT, WAIT, DIG, WAIT]  # five are its horizon
    assert report.applied["Wish"] == 0.0
    assert report.applied["Dig"] == 1.0


def test_goals_are_ranked_by_what_an_evaluation_measured(tmp_path: Path) -> None:
    store = trained(tmp_path, "Dig", "Wish")
    for steps, first in ((4.0, WAIT), (6.0, DIG)):  # digging takes its horizon, 5
        store.update_skill("Wish", result={"steps_an_application": steps})
        Smithy.acts.clear()
        play_episodes(store, episodes=1, most_steps=1)
        assert Smithy.acts == [first]


def test_an_expert_that_was_made_for_another_world_is_refused(tmp_path: Path) -> None:
    store = trained(tmp_path, "Dig")
    sha = store.put_blob(encode(Network(Shape(7, 2, 5)).params()))
    store.add_version(NewVersion(store.assign_expert("Dig"), sha, None, 1, 2, True))
    with pytest.raises(DataError, match="expert of 'Dig' was made for 7 numbers .* this world shows 5"):
        play_episodes(store, episodes=1)


def slow_digging(step: Any) -> Any:
    """Ore comes with the twelfth blow alone."""

    def slow(self: Smithy, action: int) -> Any:
        ore = self.has["ore"]
        found = step(self, action)
        self.has["ore"] = ore + (self.acts.count(DIG) % 12 == 0) if action == DIG else self.has["ore"]
        return (self.look(), *found[1:])

    return slow


def test_the_score_is_the_geometric_mean_of_crafter() -> None:
    report = EpisodesReport({"a": 1.0, "b": 0.0}, {}, np.zeros(1, np.int64), 0.0)
    assert report.score(["a"]) == pytest.approx(1.0)
    assert report.score(["a", "b"]) == pytest.approx(
        (101**0.5 - 1) / 100
    )  # exp((ln 101 + ln 1) / 2) - 1, in percent


def test_a_goal_is_not_given_up_because_the_hands_are_full_of_what_it_gains() -> None:
    skills = check_skills([SKILLS[0], skill("Show", "sword", requirements={"ore": 1})], FEATURES)
    full = np.array([3, 1, 0, 0, 0], np.float32)  # as much ore as can be held, before any was dug
    assert Chooser(skills, FEATURES).choose(full, Memory(np.array([False, True]), np.zeros(2, int))) == 0


def test_a_skill_that_no_world_got_to_has_no_success(tmp_path: Path) -> None:
    """Wishes are never granted, so nothing after them is tried; what was done before is told as it was."""
    store = trained(tmp_path, "Dig", "Wish", "Eat")
    plan = [Step("Dig", 1), Step("Wish", 1), Step("Dig", 2), Step("Eat", 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episodes, "plan_of", lambda *_: (store.setting("world"), plan))
        report = evaluate_chain(store, 4)
    assert report.reached == [1.0, 0.0, 0.0, 0.0]
    assert (report.skills["Dig"], report.skills["Wish"]) == (1.0, 0.0)
    assert math.isnan(report.skills["Eat"])


@pytest.mark.parametrize("play", [play_episodes, evaluate_chain])
def test_no_episodes_at_all_are_refused(tmp_path: Path, play: Any) -> None:
    with pytest.raises(ConfigError, match="episodes must be at least 1, got 0"):
        play(trained(tmp_path, "Dig"), episodes=0)
    play(trained(tmp_path, "Dig"), episodes=1)


def test_what_has_no_world_or_no_expert_is_not_played(tmp_path: Path) -> None:
    empty = Store(tmp_path / "empty", create=True)
    with pytest.raises(ConfigError, match="has not been trained in: it names no world"):
        play_episodes(empty)
    empty.set_setting("world", "smithy:SmithyWorld")
    empty.add_skill(SKILLS[0], [], 1000)
    with pytest.raises(ConfigError, match="holds no trained skill yet"):
        evaluate_chain(empty)
    with pytest.raises(DataError, match="skill 'Dig' has no expert yet: it is waiting"):
        episodes.load_experts(empty, ["Dig"], SmithyWorld(1))


def test_a_chain_is_told_step_by_step_with_the_steps_that_it_took(tmp_path: Path) -> None:
    store = trained(tmp_path, "Dig", "Build", "Forge", "Eat")
    report = evaluate_chain(store, 5, target="Forge")
    assert report.plan == [Step("Dig", 2), Step("Build", 1), Step("Forge", 1)]
    assert (report.reached, report.success, report.mean_steps, report.episodes) == (
        [1.0, 1.0, 1.0],
        1.0,
        4.0,
        5,
    )
    assert report.skills == {"Dig": 1.0, "Build": 1.0, "Forge": 1.0}
    assert evaluate_chain(store, 5, only=["Dig"]).plan == [Step("Dig", 1)]
    assert {step.skill for step in evaluate_chain(store, 5).plan} == {"Dig", "Build", "Forge", "Eat"}


def test_a_film_shows_every_state_with_the_step_that_it_belongs_to(tmp_path: Path) -> None:
    store = trained(tmp_path, "Dig", "Build", "Forge")
    film, plan, steps, finished = record_chain(store)
    assert plan == [Step("Dig", 3), Step("Build", 1), Step("Build", 1), Step("Forge", 1)]
    assert steps == [0, 0, 0, 1, 3, 3]  # what is to be done next; the anvil stands, so none is built again
    assert finished
    world = SmithyWorld(1)
    seen = []
    for bank in film:
        assert len(bank) == 1
        world.load(bank, np.zeros(1, np.int64), np.ones(1, np.bool_))
        seen.append(world.values()[0, :3].tolist())
    assert seen == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0], [2, 0, 1], [1, 1, 1]]


def test_a_film_of_a_plan_that_fails_is_of_the_world_that_got_furthest(tmp_path: Path) -> None:
    film, plan, steps, finished = record_chain(trained(tmp_path, "Dig", "Wish"))
    assert [step.skill for step in plan] == ["Dig", "Wish"]
    assert not finished
    assert steps == [0, *[1] * 6]  # one for Dig, five that Wish may take
    assert len(film) == 7


def test_a_gif_has_a_frame_a_state_and_leaves_out_what_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    with pytest.raises(MissingExtraError, match="draws no pictures of itself"):
        draw_chain(trained(tmp_path / "store", "Dig", "Build", "Forge"), tmp_path / "film.gif")

    def picture(bank: Any) -> np.ndarray:
        return np.full((20, 30, 3), 40 * int((bank.arrays["played"] >= 0).sum()), np.uint8)

    monkeypatch.setattr(SmithyWorld, "picture", staticmethod(picture), raising=False)
    store = Store(tmp_path / "store", create=True)
    for most, frames in ((400, 6), (6, 6), (5, 3)):
        monkeypatch.setattr(episodes, "MOST_FRAMES", most)
        assert draw_chain(store, tmp_path / "film.gif")
        with image.open(tmp_path / "film.gif") as film:
            assert (film.size, film.n_frames) == ((30, 36), frames)
            durations = []
            for number in range(frames):
                film.seek(number)
                durations.append(film.info["duration"])
                shade = film.convert("RGB").getpixel((29, 35))[0]
                assert shade == pytest.approx(40 * number * (2 if most == 5 else 1), abs=3)
            assert durations == [90] * (frames - 1) + [1500]
            assert film.info["loop"] == 0
