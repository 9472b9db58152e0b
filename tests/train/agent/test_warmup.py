"""The warm-up teaches the format from random play, or an expert's moves from the expert's."""

import json
from dataclasses import replace

import pytest

from shoal.core.errors import ConfigError
from shoal.envs import make
from shoal.rollout.episode import Role
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.rollout.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.config import Warmup, compose_config
from shoal.train.agent.policy import policy_of
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.agent.warmup import _play, warm_up

SOLVED_ENVS = [
    ("sokoban", {"max_pushes": 3}),
    ("countdown", {}),
    ("metamathqa", {}),
    ("webshop", {}),
]


@pytest.mark.parametrize(("name", "settings"), SOLVED_ENVS)
def test_an_env_is_solved_by_its_own_expert(name, settings):
    env = make(name, **settings)
    for seed in range(5):
        _, info = env.reset(seed=seed)
        over = False
        while not over:
            action = env.projection.action_of(env.expert_action())
            _, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
        assert info["success"], (name, seed)


def test_an_env_without_expert_says_none():
    env = make("bandit")
    env.reset(seed=0)
    assert env.expert_action() is None


def test_the_sokoban_expert_gives_up_a_lost_room():
    env = make("sokoban", levels="#####\n#$  #\n#@ .#\n#####")  # the box stands in a corner
    env.reset(seed=0)
    assert env.expert_action() is None


def first_row(folder, *overrides, name="sokoban"):
    settings = ["trainer.iterations=1", "es_manager.val.env_groups=48", "es_manager.train.env_groups=2"]
    with AgentTrainer(compose_config(name, [*settings, f"run_dir={folder}", *overrides])) as trainer:
        next(iter(trainer.train()))
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.slow
def test_imitating_the_expert_starts_where_random_play_does_not(tmp_path):
    steps = "warmup.steps=250"
    imitator = first_row(tmp_path / "expert", steps, "warmup.expert=1")
    random = first_row(tmp_path / "random", steps, "warmup.expert=0")
    assert imitator["heldout_success"] > random["heldout_success"] + 0.08
    assert imitator["warmup_loss"] < 0.8 * random["warmup_loss"]


def test_free_text_needs_an_expert_to_warm_up(tmp_path):
    tiny = [
        "engine.name=tiny",
        "engine.model=null",
        "engine.train_last_layers=null",
        "engine.context=1024",
        "warmup.steps=1",
    ]
    with pytest.raises(ConfigError, match="or warmup.expert=1 where the env has an expert"):
        first_row(tmp_path / "a", *tiny, "warmup.expert=0", name="metamathqa")
    for expert in (0, 1):  # Countdown draws expressions by lot
        row = first_row(tmp_path / str(expert), *tiny, f"warmup.expert={expert}", name="countdown")
        assert row["warmup_loss"] > 0


def test_the_experts_share_is_a_share():
    with pytest.raises(ConfigError, match=r"warmup.expert must be in \[0, 1\], got 2"):
        compose_config("sokoban", ["warmup.expert=2"])


class Endless:
    """An env without end, whose observations grow a prompt by ever more."""

    def __init__(self):
        self.inner = make("frozen_lake", desc="4x4")

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, action):
        _, _, _, _, info = self.inner.step(action)
        _, _ = self.inner.reset(seed=0)
        return "S F H G " * 3, 0.0, False, False, {**info, "success": False}


def test_play_that_fills_the_context_is_cut_before_the_turn_that_does_not_fit():
    """Beside the same play in a context without end: its beginning, as long as fits, and not a turn less."""

    def plays(context, n=6):
        policy = policy_of(TinyEngine(["Down", "Left", "Right", "Up"], TinyShape(16, 1, 2, 4096)))
        policy.module.shape = replace(policy.module.shape, context=context)
        env = Endless()
        role = Role("Lake", "", env.projection, 12)
        prompter = Prompter(PromptConfig(mode="append"), policy.tokenizer)
        samples = _play(policy, env, role, prompter, 0.0, seed=3)
        return [next(samples) for _ in range(n)]

    roomy = plays(4096)
    limit = len(roomy[0].ids) // 2
    for whole, cut in zip(roomy, plays(limit), strict=True):
        assert len(cut.ids) <= limit < len(whole.ids)
        assert cut.ids == whole.ids[: len(cut.ids)]
        ends = [p + 1 for p, q in zip(whole.places, [*whole.places[1:], -1], strict=True) if q != p + 1]
        assert len(cut.ids) == max(end for end in ends if end <= limit)


def test_an_answer_is_what_the_prompt_of_its_kind_of_env_leaves_to_write():
    env = make("frozen_lake")
    own = {"first": "go", "later": "go", "prefill": "<action>", "closing": "</action>"}
    role = Role("Lake", "", env.projection, 9, own)
    policy = policy_of(TinyEngine(env.projection.words()))
    samples = _play(policy, env, role, Prompter(PromptConfig(), policy.tokenizer), 0.0, seed=0)
    for _ in range(5):
        sample = next(samples)
        before, word = sample.ids[: sample.places[0]], sample.ids[sample.places[0] :]
        assert policy.tokenizer.decode(before) == "go<action>"
        assert policy.tokenizer.decode(word) in env.projection.words()


@pytest.mark.parametrize("steps", [1, 3])
def test_envs_are_closed_when_the_warm_up_ends_or_is_left_or_cannot_begin(steps):
    class Counted(Endless):
        def close(self):
            closed.append(self)

    def missing():
        raise ConfigError("no second env")

    closed = []
    policy = policy_of(TinyEngine(make("frozen_lake").projection.words(), TinyShape(16, 1, 2, 512)))
    prompter = Prompter(PromptConfig(first="go", later="go"), policy.tokenizer)
    roles = {tag: Role(tag, "", make("frozen_lake").projection, 9) for tag in "ab"}

    def losses(second):
        makers = {"a": Counted, "b": second}
        return warm_up(policy, makers, roles, prompter, Warmup(steps=steps, batch_size=2), 4096, 0)

    assert len(list(losses(Counted))) == steps
    assert len(closed) == 2
    left = losses(Counted)
    next(left)
    left.close()
    assert len(closed) == 4
    with pytest.raises(ConfigError, match="no second env"):
        next(losses(missing))
    assert len(closed) == 5


def test_a_context_without_room_for_one_turn_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ConfigError, match="do not fit the model's context of 8 tokens"):
        first_row(tmp_path, "warmup.steps=1", "engine.context=8", name="demo")
