from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.core.errors import ConfigError, DataError, DivergedError
from shoal.skills.learning.network import Network, Shape
from shoal.skills.learning.trainer import Task, Trainer, TrainingConfig
from shoal.skills.plan import Step
from shoal.skills.proposers import knowledge_base
from shoal.skills.spec import load_skills
from shoal.skills.worlds.course import Course, walk
from shoal.skills.worlds.crafting import CRAFTING, CRAFTING_ACTIONS, HANDS, CraftingWorld
from shoal.skills.worlds.registry import fresh_worlds

SKILLS = {
    skill.name: replace(skill, horizon=60) for skill in load_skills(knowledge_base("crafting"), CRAFTING)
}


def task(config: TrainingConfig, name: str = "Collect Wood", count: int = 4, seed: int = 0) -> Task:
    return Task("crafting", name, SKILLS, (Step(name, count),), (None,), (0,), seed, config)


def finish(trainer: Trainer, checkpoint=lambda t: None) -> bytes:
    """Everything a training ends with: the best experts, and the last ones."""
    result = trainer.train(lambda row: None, checkpoint)
    return b"".join(net.flat.tobytes() for net in [*result.experts, *trainer.nets])


def test_the_same_seed_gives_the_same_expert_and_another_does_not(quick: TrainingConfig) -> None:
    def train(seed: int) -> bytes:
        trainer = Trainer(task(replace(quick, total_timesteps=1024), seed=seed))
        trainer.prepare()
        return finish(trainer)

    assert train(1) == train(1)
    assert train(1) != train(2)


def test_a_training_resumed_anywhere_ends_with_the_same_bytes(quick: TrainingConfig) -> None:
    # One wood a time: episodes run into their horizon of 60 steps within the 64 that are trained.
    config = replace(quick, success_state_rate=2.0, patience_frames=1e9)
    whole = Trainer(task(config, count=1))
    whole.prepare()
    saved = {}

    def keep(trainer: Trainer) -> None:
        arrays, plain = trainer.state()
        saved[trainer.update] = {key: array.copy() for key, array in arrays.items()}, plain

    expected = finish(whole, keep)
    for stop_at in (1, 3):
        second = Trainer(task(config, count=1))
        second.prepare()
        second.restore(*saved[stop_at])
        assert finish(second) == expected
        assert second.walked == whole.walked > 0  # every env step is counted once


def test_the_pace_of_a_skill_is_what_an_application_took_in_its_best_evaluation(
    quick: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = []

    def measured(*arguments, **options):
        ways.append(walk(*arguments, **options))
        return ways[-1]

    monkeypatch.setattr("shoal.skills.learning.trainer.walk", measured)
    trainer = Trainer(replace(task(quick, count=2), experts=(wood_expert(),)))
    trainer.prepare()
    result = trainer.train(lambda row: None, lambda t: None)
    best = max(ways, key=lambda way: way.success)
    assert best.success > 0
    assert result.pace == pytest.approx(best.length.sum() / best.finished.sum() / 2, abs=0.06)


class Mirrored(CraftingWorld):
    """A world that says that it looks the same with its last two numbers and two of its actions exchanged."""

    columns, acts = np.arange(CraftingWorld.obs_size), np.arange(CraftingWorld.n_actions)
    columns[-2:] = columns[-2:][::-1]
    acts[:2] = acts[:2][::-1]
    mirrors = ((columns, acts),)


def test_where_a_world_has_mirrors_each_step_is_learned_from_once_a_pass_as_it_was_or_mirrored(
    quick: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.skills.worlds.crafting.CraftingWorld", Mirrored)
    config = replace(quick, update_epochs=3)
    trainer = Trainer(task(config))
    trainer.prepare()
    learned, collected = [], []
    gradient, collect = Network.gradient, Trainer._collect

    def seen(net: Network, *arguments, **options):
        learned.append((net.flat.copy(), *arguments))
        return gradient(net, *arguments, **options)

    def kept(self: Trainer, *arguments):
        collected.append((self.nets[0].copy(), collect(self, *arguments)))
        return collected[-1][1]

    monkeypatch.setattr(Network, "gradient", seen)
    monkeypatch.setattr(Trainer, "_collect", kept)
    trainer.step()
    (before, rollout), size = collected[0], config.num_envs * config.num_steps
    observations, actions = (
        array.reshape(size, *array.shape[2:]) for array in (rollout.observations, rollout.actions)
    )
    plain = {(seen.tobytes(), int(act)) for seen, act in zip(observations, actions, strict=True)}
    turned = {
        (np.ascontiguousarray(seen[Mirrored.columns]).tobytes(), int(Mirrored.acts[act]))
        for seen, act in zip(observations, actions, strict=True)
    }
    found = [
        (seen.tobytes(), int(act), logprob, np.float32(value))
        for _, many, acts, old, _, values in learned
        for seen, act, logprob, value in zip(many, acts, old, values, strict=True)
    ]
    assert len(found) == 3 * size
    shares = [sum(row[:2] in group for row in found) / len(found) for group in (plain, turned)]
    assert min(shares) > 0.4
    assert all(row[:2] in plain | turned for row in found)
    # The probability of a mirrored action is what the policy that collected would have given it there.
    for seen_bytes, act, logprob, _ in found[:: size // 50]:
        there = np.frombuffer(seen_bytes, np.float32)[None]
        assert before.forward(there)[0][0, act] == pytest.approx(logprob, abs=1e-5)


def test_an_expert_for_other_observations_is_refused_by_its_skill(quick: TrainingConfig) -> None:
    size = CraftingWorld.obs_size
    small = Network(Shape(size - 1, quick.layer_size, CraftingWorld.n_actions))
    plan = (Step("Collect Wood", 1), Step("Place Table", 1))
    given = Task("crafting", "Place Table", SKILLS, plan, (small, None), (0, 1), 0, quick)
    with pytest.raises(
        DataError, match=rf"'Collect Wood' was made for {size - 1} numbers .* shows {size} and"
    ):
        Trainer(given)


def test_the_identity_of_an_easy_skill_is_learned_in_seconds() -> None:
    # From states with wood in hand and grass ahead, placing a table is one action of eleven.
    config = TrainingConfig(
        num_envs=64, layer_size=32, bank_worlds=256, evaluation_episodes=256, total_timesteps=6e4
    )
    plan = (Step("Collect Wood", 2), Step("Place Table", 1))
    skills = {name: replace(skill, horizon=20) for name, skill in SKILLS.items()}
    trainer = Trainer(Task("crafting", "Place Table", skills, plan, (wood_expert(), None), (0, 1), 0, config))
    trainer.prepare()
    before = trainer.evaluate()
    result = trainer.train(lambda row: None, lambda t: None)
    assert result.success > 0.9 > before + 0.1
    assert result.acted_frames == [0, result.frames]  # the wood expert only made start states


def wood_expert() -> Network:
    """A network that turns until a tree is ahead by chance and always interacts or walks: good enough for a bank."""
    net = Network(Shape(CraftingWorld.obs_size, 4, CraftingWorld.n_actions))
    net.bh[:5] = [1.0, 1.0, 1.0, 1.0, 2.0]
    net.bh[5:11] = -9
    return net


def test_frames_are_counted_only_where_an_expert_acted_and_learned(quick: TrainingConfig) -> None:
    plan = (Step("Collect Wood", 2), Step("Place Table", 1))
    config = replace(quick, train_deps="on", bank_worlds=256, total_timesteps=1024)
    shared = Task("crafting", "Place Table", SKILLS, plan, (wood_expert(), None), (0, 1), 0, config)
    trainer = Trainer(shared)
    trainer.prepare()
    result = trainer.train(lambda row: None, lambda t: None)
    assert result.frames == 1024
    trained = trainer.acted
    assert sum(trained) == 1024
    assert min(trained) > 0  # half of the lanes start from nothing, so both experts act
    frozen = Trainer(replace(shared, config=replace(config, train_deps="off")))
    frozen.prepare()
    before = frozen.nets[0].flat.copy()
    outcome = frozen.train(lambda row: None, lambda t: None)
    assert outcome.acted_frames[0] == 0
    assert (outcome.experts[0].flat == before).all()


def test_a_skill_whose_start_is_never_reached_says_so(quick: TrainingConfig) -> None:
    useless = Network(Shape(CraftingWorld.obs_size, 4, CraftingWorld.n_actions))
    useless.bh[10] = 50  # only ever waits
    plan = (Step("Collect Wood", 2), Step("Place Table", 1))
    trainer = Trainer(Task("crafting", "Place Table", SKILLS, plan, (useless, None), (0, 1), 0, quick))
    with pytest.raises(RuntimeError, match="no start state for 'Place Table'"):
        trainer.prepare()


def test_counters_are_judged_from_the_start_of_a_step_and_tools_absolutely() -> None:
    plan = [Step("Collect Wood", 2), Step("Place Table", 1), Step("Make Wood Pickaxe", 1)]
    course = Course(plan, SKILLS, CRAFTING, [0, 1, 2])
    values = np.zeros((3, len(CRAFTING.names)), np.float32)
    start = values.copy()
    values[:, CRAFTING.index("wood")], start[:, CRAFTING.index("wood")] = [5, 4, 8], [3, 3, 8]
    at = np.zeros(3, np.int64)
    assert list(course.satisfied(at, values, start)) == [True, False, False]  # +2, +1, +0
    values[1, CRAFTING.index("table")] = 1
    assert list(course.skip(np.array([1, 1, 1]), values)) == [
        1,
        2,
        1,
    ]  # a table that stands is not placed again
    values[1, CRAFTING.index("wood_pickaxe")] = 1
    assert list(course.skip(np.array([1, 1, 1]), values)) == [1, 3, 1]
    assert list(course.skip(np.array([0, 0, 0]), values)) == [
        0,
        0,
        0,
    ]  # counters are skipped when they are full


def test_a_step_is_done_when_the_hands_can_hold_no_more_of_what_it_gains() -> None:
    course = Course([Step("Collect Wood", 3)], SKILLS, CRAFTING, [0])
    start, now = (
        np.zeros((5, len(CRAFTING.names)), np.float32),
        np.zeros((5, len(CRAFTING.names)), np.float32),
    )
    wood, at = CRAFTING.index("wood"), np.zeros(5, np.int64)
    start[:, wood] = [0, 0, 7, 7, HANDS]
    now[:, wood] = [2, 3, 8, HANDS, HANDS]
    assert list(course.satisfied(at, now, start)) == [False, True, False, True, True]
    assert list(course.skip(at, now)) == [0, 0, 0, 1, 1]


def test_an_application_may_take_longer_in_a_plan_than_in_practice(quick: TrainingConfig) -> None:
    plan = [Step("Collect Wood", 2), Step("Place Table", 1)]
    assert list(Course(plan, SKILLS, CRAFTING, [0, 1]).horizon) == [120, 60]
    assert list(Course(plan, SKILLS, CRAFTING, [0, 1], 50).horizon) == [100, 50]
    trainer = Trainer(task(replace(quick, practice_horizon=50), count=4))
    assert list(trainer.course.horizon) == [200]


def test_practice_begins_where_other_skills_may_have_ended(quick: TrainingConfig) -> None:
    def facing(stroll: int) -> np.ndarray:
        trainer = Trainer(task(replace(quick, stroll=stroll, bank_worlds=512)))
        trainer.prepare()
        cells, place, look = (trainer.bank.arrays[key] for key in ("cells", "place", "look"))
        ahead = place + np.array([[0, -1], [0, 1], [-1, 0], [1, 0]])[look]
        return cells[np.arange(len(cells)), ahead[:, 0], ahead[:, 1]]

    obstacles = [(facing(stroll) != 0).mean() for stroll in (0, 32)]  # 0 is grass
    assert obstacles[1] > 2 * obstacles[0]


def test_walking_gives_the_same_whether_lanes_are_dropped_or_not() -> None:
    # Shrinking changes which random numbers a lane gets, so compare what does not depend on them: an expert
    # whose actions are certain. It always walks left, so it ends at the left edge or before an obstacle.
    net = Network(Shape(CraftingWorld.obs_size, 4, CraftingWorld.n_actions))
    net.bh[4] = 60  # always interacts
    world = CraftingWorld(300)
    starts = fresh_worlds(world, 300, 0, "test")
    course = Course([Step("Collect Wood", 1)], SKILLS, CRAFTING, [0])
    shrunk = walk("crafting", starts, course, [net], np.random.default_rng(0))
    fixed = walk("crafting", starts, course, [net], np.random.default_rng(0), CraftingWorld(128))
    cells, place, look = (starts.arrays[key] for key in ("cells", "place", "look"))
    ahead = place + np.array([[0, -1], [0, 1], [-1, 0], [1, 0]])[look]
    facing_tree = cells[np.arange(300), ahead[:, 0], ahead[:, 1]] == 1
    assert (shrunk.finished == facing_tree).all()
    assert (fixed.finished == facing_tree).all()
    assert (shrunk.length[facing_tree] == 1).all()
    horizon = SKILLS["Collect Wood"].horizon
    assert (shrunk.length[~facing_tree] == horizon).all()
    assert int(shrunk.acted[0]) == int(fixed.acted[0]) == facing_tree.sum() + horizon * (~facing_tree).sum()
    assert (shrunk.ends.arrays["cells"] == fixed.ends.arrays["cells"]).all()


def test_an_expert_takes_the_actions_of_its_skill_alone(quick: TrainingConfig) -> None:
    words = ("left", "up", "interact")
    skills = {**SKILLS, "Collect Wood": replace(SKILLS["Collect Wood"], actions=words)}
    trainer = Trainer(replace(task(quick), skills=skills))
    trainer.prepare()
    taken: set[int] = set()
    step = trainer.world.step
    trainer.world.step = lambda actions, rng: taken.update(actions.tolist()) or step(actions, rng)  # type: ignore[method-assign]
    for _ in range(3):
        trainer.step()
    assert {CRAFTING_ACTIONS[action] for action in taken} == set(words)


def test_an_action_that_the_world_lacks_is_named(quick: TrainingConfig) -> None:
    skills = {**SKILLS, "Collect Wood": replace(SKILLS["Collect Wood"], actions=("left", "fly"))}
    with pytest.raises(
        ConfigError, match=r"'Collect Wood': crafting has no actions \['fly'\], only \['left'"
    ):
        Trainer(replace(task(quick), skills=skills))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_envs": 0}, "num_envs must be at least 1, got 0"),
        ({"lr": float("nan")}, "lr must be a finite number, got nan"),
        ({"gamma": 1.5}, "gamma must be at most 1, got 1.5"),
        ({"patience_frames": -1}, "patience_frames must be at least 0, got -1"),
        ({"evaluation_episodes": 0}, "evaluation_episodes must be at least 1, got 0"),
        ({"total_timesteps": float("nan")}, "total_timesteps must be a finite number, got nan"),
        ({"total_timesteps": float("inf")}, "total_timesteps must be a finite number, got inf"),
        ({"stroll": -1}, "stroll must be at least 0, got -1"),
        ({"num_envs": 1, "num_steps": 7}, "parts of fewer than 2 steps: 1 num_envs x 7 num_steps are in 4"),
    ],
)
def test_settings_that_no_training_can_be_made_with_are_refused(
    quick: TrainingConfig, wrong, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(quick, **wrong)


class Deadly(CraftingWorld):
    """A world in which every step may be the last, and which remembers what was seen around each."""

    fresh_is_cheap = False

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self.met: list[tuple[np.ndarray, ...]] = []

    def step(self, actions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        before = self.values()
        super().step(actions, rng)
        died = np.random.default_rng(len(self.met)).random(self.lanes) < 0.02
        self.met.append((before, self.values(), self.observe(), died))
        return died


class Broken(CraftingWorld):
    """A world whose observations are no numbers after a while."""

    def observe(self) -> np.ndarray:
        seen = super().observe()
        seen[0] = np.nan
        return seen


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_world_that_gives_no_numbers_is_named_and_not_the_rate(
    quick: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.skills.worlds.crafting.CraftingWorld", Broken)
    trainer = Trainer(task(quick))
    trainer.prepare()
    with pytest.raises(DivergedError, match="update 1: the world gave observations that are no numbers"):
        trainer.step()


def test_what_is_collected_is_what_a_plain_look_at_each_lane_gives(
    quick: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.skills.worlds.crafting.CraftingWorld", Deadly)
    plan, count = (Step("Collect Wood", 2), Step("Place Table", 1)), (2, 1)
    skills = {name: replace(skill, horizon=12) for name, skill in SKILLS.items()}
    config = replace(quick, num_envs=24, num_steps=90, train_deps="on")
    given = (wood_expert(), Network.initial(Shape(CraftingWorld.obs_size, 8, 11), np.random.default_rng(1)))
    trainer = Trainer(Task("crafting", "Place Table", skills, plan, given, (0, 1), 0, config))
    trainer.bank = fresh_worlds(trainer.world, 40, 0, "test")
    trainer.bank.arrays["hands"][:, CRAFTING.index("wood")] = 2
    out = trainer._collect(np.random.default_rng(2), None)
    wood, table = CRAFTING.index("wood"), CRAFTING.index("table")
    ended = succeeded = 0
    met = set()
    for lane in range(24):
        at, elapsed = int(lane % 2), 0  # even lanes begin the whole plan, odd ones its last step
        start = trainer.world.met[0][0][lane]
        for t, (before, after, seen, died) in enumerate(trainer.world.met):
            spec, elapsed = skills[plan[at].skill], elapsed + 1
            if elapsed == 1:
                start = before[lane]
                assert start[wood] == (0 if lane % 2 == at == 0 else start[wood])
            reached = (
                after[lane, wood] >= min(start[wood] + count[0], 9) if at == 0 else after[lane, table] >= 1
            )
            done = bool(reached and not died[lane])
            late = not done and not died[lane] and elapsed >= 12 * count[at]
            weights = spec.reward.weights or {spec.done.feature: 1.0}
            paid = sum(w * (after - before)[lane, CRAFTING.index(f)] for f, w in weights.items())
            paid += spec.reward.bonus * done - spec.reward.step_cost
            assert out.experts[t, lane] == at
            assert out.rewards[t, lane] == pytest.approx(paid, abs=1e-6)
            assert out.terminal[t, lane] == (done or died[lane])
            assert out.ends[t, lane] == (done or died[lane] or late)
            if not out.terminal[
                t, lane
            ]:  # the value of where it stands, also where the rollout or a step ends
                value = trainer.nets[at].forward(seen[lane : lane + 1])[1][0]
                assert out.next_values[t, lane] == pytest.approx(value, abs=1e-5)
            over = done or died[lane] or late
            ended, succeeded = ended + (over and at == 1), succeeded + (done and at == 1)
            met.add((at, done, bool(died[lane]), late))
            if over:
                at, elapsed = (1 if done and at == 0 else lane % 2), 0
    assert (out.ended, out.succeeded) == (ended, succeeded)
    assert len(met) == 8  # both steps went on, were done, died, and ran out of time


def test_an_expert_does_not_see_what_its_skill_does_not_name(quick: TrainingConfig) -> None:
    plan = (Step("Collect Wood", 2), Step("Place Table", 1))
    trainer = Trainer(Task("crafting", "Place Table", SKILLS, plan, (wood_expert(), None), (0, 1), 0, quick))
    trainer.prepare()
    trainer.step()
    spoken = {SKILLS["Place Table"].done.feature, *SKILLS["Place Table"].requirements}
    for feature, column in CraftingWorld.feature_columns.items():
        assert trainer.nets[1].w0[column].any() == (feature in spoken), feature
    assert trainer.nets[1].w0[: min(CraftingWorld.feature_columns.values())].any(1).all()


@pytest.mark.parametrize(
    ("anneal", "shares"), [(True, [1.0, 1 - 0.9 * 0.512, 0.1, 0.1]), (False, [1.0, 1.0, 1.0, 1.0])]
)
def test_the_learning_rate_falls_to_a_tenth_and_the_norm_of_gradients_is_bounded(
    quick: TrainingConfig, monkeypatch: pytest.MonkeyPatch, anneal: bool, shares: list[float]
) -> None:
    taken = []
    monkeypatch.setattr(
        "shoal.skills.learning.trainer.Adam.step", lambda *arguments: taken.append(arguments[3:])
    )
    config = replace(quick, anneal_lr=anneal, anneal_frames=1000, max_grad_norm=0.25, lr=0.01)
    trainer = Trainer(task(config))  # 512 env steps an update
    trainer.prepare()
    for _ in range(4):
        trainer.step()
    each = config.update_epochs * config.num_minibatches
    assert len(taken) == 4 * each
    assert [lr for lr, _ in taken[::each]] == pytest.approx([0.01 * share for share in shares])
    assert {norm for _, norm in taken} == {0.25}


def drawn(trainer: Trainer, scores: dict[int, float]) -> list[int]:
    """Updates at which a training was evaluated, with these successes; the training itself is left out."""
    asked = []

    def step() -> dict[str, float]:
        trainer.update, trainer.frames = trainer.update + 1, trainer.frames + 100
        return {"success": 0.6}

    def evaluate() -> float:
        asked.append(trainer.update)
        score = scores.get(trainer.update, 0.0)
        if score > trainer.best_success:
            trainer.best_success, trainer.best_at = score, trainer.frames
        return score

    trainer.step, trainer.evaluate = step, evaluate  # type: ignore[method-assign]
    trainer.bank = fresh_worlds(trainer.world, 3, 0, "test")
    return asked


def test_a_training_ends_when_it_is_learned_no_longer_improves_or_has_no_budget_left(
    quick: TrainingConfig,
) -> None:
    config = replace(
        quick, total_timesteps=2000, evaluate_every=2, checkpoint_every=3, success_state_rate=0.9,
        patience_frames=600, min_success=0.3, evaluate_from=0.5,
    )  # fmt: skip
    for scores, why, updates, evaluated in (
        ({4: 0.9}, "learned", 4, [2, 4]),
        ({2: 0.3}, "plateau", 8, [2, 4, 6, 8]),
        ({2: 0.29}, "budget", 20, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 20]),
    ):
        trainer = Trainer(task(config))
        kept: list[int] = []
        rows: list[dict[str, float]] = []
        asked = drawn(trainer, scores)
        result = trainer.train(rows.append, lambda one, kept=kept: kept.append(one.update))
        assert (result.stopped, result.frames, len(rows)) == (why, 100 * updates, updates)
        assert asked == evaluated
        assert kept == [update for update in range(3, 21, 3) if update < updates]
        assert rows[1]["evaluated_success"] == scores.get(2, 0.0)
        assert result.success == max(scores.values())
