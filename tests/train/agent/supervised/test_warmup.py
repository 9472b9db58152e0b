"""The warm-up teaches the format from random play, or an expert's moves from the expert's."""

import itertools
import json
import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.train.agent.supervised.lakes import Bad, Endless, FrozenLake, Told

from shoal.core.errors import ConfigError, DivergedError, EnvError
from shoal.envs import make
from shoal.rollout.episode import Role
from shoal.rollout.factory import VectorConfig
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.config import Warmup, compose_config
from shoal.train.agent.optimizer import MasterAdamW
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.supervised.warmup import warm_up, warmup_samples
from shoal.train.agent.trainer import AgentTrainer


@pytest.mark.parametrize(("name", "settings"), [("sokoban", {"max_pushes": 3}), ("countdown", {})])
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


def test_a_share_of_an_expert_that_no_env_has_is_refused(tmp_path):
    asked = ["warmup.expert=0.5", "warmup.steps=1", f"run_dir={tmp_path / 'run'}"]
    with pytest.raises(
        ConfigError, match=r"warmup.expert=0.5 needs an env with an expert, and FrozenLakeEnv has no"
    ):
        next(iter(AgentTrainer(compose_config("demo", asked)).train()))
    with AgentTrainer(compose_config("mixed", asked)) as trainer:  # one of its envs has one
        assert trainer.config.warmup.expert == 0.5


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
    steps = ("warmup.steps=250", "warmup.batch_size=256", "warmup.only_expert=false")
    imitator = first_row(tmp_path / "expert", *steps, "warmup.expert=1")
    random = first_row(tmp_path / "random", *steps, "warmup.expert=0")
    assert imitator["heldout_success"] > random["heldout_success"] + 0.08
    assert imitator["warmup_loss"] < 0.8 * random["warmup_loss"]


HERE = VectorConfig(backend="serial")


def samples_of(env, n, policy, prompter, role, config=None, seed=3, vector=HERE, failures=None):
    """The first `n` samples of the warm-up on the envs that `env` makes."""
    kinds = {role.tag: env}, {role.tag: role}
    with warmup_samples(policy, *kinds, prompter, config or Warmup(), seed, vector, failures) as plays:
        return list(itertools.islice(plays[0], n))


def test_play_that_fills_the_context_is_cut_before_the_turn_that_does_not_fit():
    """Beside the same play in a context without end: its beginning, as long as fits, and not a turn less."""

    def plays(context, n=6):
        policy = policy_of(TinyEngine(["Down", "Left", "Right", "Up"], TinyShape(16, 1, 2, 4096)))
        policy.module.shape = replace(policy.module.shape, context=context)
        role = Role("Lake", "", make("frozen_lake").projection, 12)
        prompter = Prompter(PromptConfig(mode="append"), policy.tokenizer)
        return samples_of(Endless, n, policy, prompter, role)

    roomy = plays(4096)
    limit = len(roomy[0].ids) // 2
    for whole, cut in zip(roomy, plays(limit), strict=True):
        assert len(cut.ids) <= limit < len(whole.ids)
        assert cut.ids == whole.ids[: len(cut.ids)]
        ends = [p + 1 for p, q in zip(whole.trained, [*whole.trained[1:], -1], strict=True) if q != p + 1]
        assert len(cut.ids) == max(end for end in ends if end <= limit)


def test_an_answer_is_what_the_prompt_of_its_kind_of_env_leaves_to_write():
    env = make("frozen_lake")
    own = {"first": "go", "later": "go", "prefill": "<action>", "closing": "</action>"}
    role = Role("Lake", "", env.projection, 9, own)
    policy = policy_of(TinyEngine(env.projection.words()))
    prompter = Prompter(PromptConfig(), policy.tokenizer)
    for sample in samples_of(FrozenLake, 5, policy, prompter, role, seed=0):
        before, word = sample.ids[: sample.trained[0]], sample.ids[sample.trained[0] :]
        assert policy.tokenizer.decode(before) == "go<action>"
        assert policy.tokenizer.decode(word) in env.projection.words()


def played(env, n, vector=HERE, failures=None, **settings):
    """Prompts and answers of the first `n` samples of the warm-up, in words."""
    projection = make("frozen_lake").projection
    policy = policy_of(TinyEngine(projection.words(), TinyShape(16, 1, 2, 4096)))
    prompter = Prompter(PromptConfig(first="go", later="{history}", prefill="<action>"), policy.tokenizer)
    role = Role("Lake", "", projection, 8)
    samples = samples_of(env, n, policy, prompter, role, Warmup(**settings), vector=vector, failures=failures)
    ids = [(sample.ids, sample.trained[0]) for sample in samples]
    return [(policy.tokenizer.decode(row[:at]), policy.tokenizer.decode(row[at:])) for row, at in ids]


def test_moves_by_lot_are_learned_with_the_experts_unless_those_alone_are_asked_for():
    words = Counter(word.partition("<")[0] for _, word in played(Told, 80, expert=1.0))
    assert words == {"Up": 40, "Left": 40}
    alone = played(Told, 40, expert=1.0, only_expert=True)
    assert {word.partition("<")[0] for _, word in alone} == {"Up"}
    assert any("Left" in prompt for prompt, _ in alone)  # they were played: later prompts tell of them


def test_where_a_prompt_goes_on_the_moves_by_lot_are_read_and_not_learned():
    projection = make("frozen_lake").projection
    policy = policy_of(TinyEngine(projection.words(), TinyShape(16, 1, 2, 4096)))
    prompter = Prompter(PromptConfig(mode="append"), policy.tokenizer)
    settings = Warmup(expert=1.0, only_expert=True)
    (sample,) = samples_of(Told, 1, policy, prompter, Role("Lake", "", projection, 6), settings)
    learned = policy.tokenizer.decode(tuple(sample.ids[place] for place in sample.trained))
    assert (learned.count("Up"), learned.count("Left")) == (3, 0)
    # the third is behind the last
    assert policy.tokenizer.decode(sample.ids).count("<action>Left</action>") == 2


def test_of_a_share_only_what_the_expert_was_asked_for_is_learned():
    class Knowing(Told):
        def expert_action(self):
            return "Up"

    words = Counter(word.partition("<")[0] for _, word in played(Knowing, 160, expert=0.5))
    assert 50 <= words["Up"] <= 110
    assert words["Left"] == 160 - words["Up"]
    alone = played(Knowing, 40, expert=0.5, only_expert=True)
    assert {word.partition("<")[0] for _, word in alone} == {"Up"}


def test_an_env_without_expert_is_learned_whole_beside_one_that_has_some():
    class Unknowing(Told):
        def expert_action(self):
            return None

    alone = played(Unknowing, 40, expert=1.0, only_expert=True)
    assert {word.partition("<")[0] for _, word in alone} == {"Left"}


class Failing(FrozenLake):
    """Fails at the second step of some episodes, the first time or each time."""

    def __init__(self, seeds=None, seen=None, made=None):
        super().__init__()
        self.seeds, self.seen, self.closed = seeds, seen, False
        if made is not None:
            made.append(self)

    def step(self, action):
        answer = super().step(action)
        seed, first = self._seed, self.seen is None or self._seed not in self.seen
        if self._steps == 2 and first and (self.seeds is None or seed in self.seeds):
            if self.seen is not None:
                self.seen.append(seed)
            raise SystemExit(3)
        return answer

    def close(self):
        self.closed = True


def test_an_episode_whose_env_fails_is_played_again_in_another_and_then_left_out():
    calm = played(partial(Failing, seeds=()), 60)
    seen, made = [], []
    assert played(partial(Failing, seen=seen, made=made), 60) == calm
    assert all(env.closed for env in made)
    assert len(seen) > 3
    bad = seen[:1]
    left = played(partial(Failing, bad), 40)
    assert any(left == [*calm[:i], *calm[j:]][:40] for i in range(40) for j in range(i + 1, i + 9))


def test_warm_up_in_worker_processes_plays_what_it_plays_in_the_callers(tmp_path):
    assert played(Told, 60, VectorConfig(), expert=0.5) == played(Told, 60, expert=0.5)


@pytest.mark.parametrize(
    ("fault", "told"),
    [("exit", "exited with code 3"), ("hang", r"no answer within 3 s .*step_timeout.*replaced")],
)
def test_an_env_that_ends_its_process_or_hangs_in_the_warm_up_costs_its_episode_alone(fault, told, caplog):
    """And the log says so, in few lines."""
    calm = played(FrozenLake, 400)
    wanted = []
    for sample in played(partial(Bad, fault), 20, VectorConfig(step_timeout=3.0)):
        wanted.append(sample)
        assert sample in calm
    assert len(set(wanted)) > 2
    assert len(caplog.records) < 6
    assert re.search(told, caplog.messages[0])
    assert "left out" in caplog.text


def test_many_failures_of_one_kind_are_told_once_and_then_counted(caplog):
    played(Failing, 1)
    first, *more = caplog.messages
    assert re.search(
        r"step\(.\) failed: SystemExit: 3 \(test_warmup.py:\d+ in step\); it is played again", first
    )
    assert len(more) == 1
    assert re.match(r"\d\d more times an episode failed the same way; \d+ episodes are left out", more[0])


def test_an_env_that_always_fails_ends_the_warm_up_with_its_reason():
    class Lost(Failing):
        def reset(self, **how):
            raise ValueError("no world")

    with pytest.raises(
        EnvError, match=r"on 'Lake' failed one after another; the last: reset failed: .*no world"
    ):
        played(Lost, 1)


def test_a_random_action_that_is_no_text_or_raises_ends_the_warm_up_with_its_reason():
    class Numbers(FrozenLake):
        def random_action(self, rng):
            return 3

    class Broken(FrozenLake):
        def random_action(self, rng):
            raise ValueError("no dice")

    with pytest.raises(EnvError, match=r"Numbers\.random_action\(\) must return the action as text.*got 3"):
        played(Numbers, 1)
    with pytest.raises(EnvError, match=r"the last: reset failed: ValueError: no dice"):
        played(Broken, 1)


def steps_of(makers, **settings):
    """The warm-up of a tiny policy on these envs, and the policy."""
    policy = policy_of(TinyEngine(make("frozen_lake").projection.words(), TinyShape(16, 1, 2, 512)))
    prompter = Prompter(PromptConfig(first="go", later="go"), policy.tokenizer)
    roles = {tag: Role(tag, "", make("frozen_lake").projection, 9) for tag in makers}
    config = Warmup(batch_size=2, **settings)
    return warm_up(policy, makers, roles, prompter, config, 4096, 0, vector=HERE), policy


@pytest.fixture
def stepped(monkeypatch):
    """The rate and the length of the gradient of each step."""
    seen, step = [], MasterAdamW.step

    def noted(self, *args):
        every = [parameter.grad.flatten() for group in self.stepped for parameter in group]
        seen.append((self.param_groups[0]["lr"], float(torch.cat(every).norm())))
        return step(self, *args)

    monkeypatch.setattr(MasterAdamW, "step", noted)
    return seen


@pytest.mark.parametrize(
    ("settings", "rates", "norms"),
    [
        ({"lr_schedule": "constant"}, [4, 4, 4, 4], None),
        ({"lr_schedule": "linear", "max_grad_norm": 0.01}, [4, 3, 2, 1], 0.01),
    ],
)
def test_rates_and_gradients_of_the_warm_up_are_as_its_settings_say(settings, rates, norms, stepped):
    steps, _ = steps_of({"a": Endless}, steps=4, learning_rate=0.004, **settings)
    assert len(list(steps)) == 4
    assert [rate for rate, _ in stepped] == pytest.approx([0.001 * rate for rate in rates])
    if norms is None:
        assert min(norm for _, norm in stepped) > 0.1
    else:
        assert [norm for _, norm in stepped] == pytest.approx([norms] * 4, rel=1e-3)


@pytest.mark.parametrize("longest", [None, 1.0])
def test_an_infinite_gradient_of_the_warm_up_is_told_before_a_step_is_made_with_it(longest):
    steps, policy = steps_of({"a": Endless}, steps=3, max_grad_norm=longest)
    next(steps)
    before = {name: weight.clone() for name, weight in policy.module.state_dict().items()}
    next(policy.module.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(DivergedError, match=r"gradient of the policy in warm-up step 2 is (inf|nan)"):
        next(steps)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.module.state_dict().items())


def test_envs_are_closed_when_the_warm_up_ends_or_is_left_or_cannot_begin():
    class Counted(Endless):
        def __init__(self):
            super().__init__()
            made.append(self)

        def close(self):
            closed.append(self)

    def missing():
        raise ConfigError("no second env")

    made, closed = [], []
    whole, _ = steps_of({"a": Counted, "b": Counted}, steps=2)
    assert len(list(whole)) == 2
    assert len(closed) == len(made) > 0
    left, _ = steps_of({"a": Counted, "b": Counted}, steps=2)
    next(left)
    left.close()
    assert len(closed) == len(made)
    with pytest.raises(ConfigError, match="no second env"):
        next(steps_of({"a": Counted, "b": missing}, steps=2)[0])
    assert len(closed) == len(made)


def test_a_context_without_room_for_one_turn_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ConfigError, match="do not fit the model's context of 8 tokens"):
        first_row(tmp_path, "warmup.steps=1", "engine.context=8", name="demo")
