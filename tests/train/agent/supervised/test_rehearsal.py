"""Rehearsal: stuck groups are tried again, and nothing else is touched."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.records import Exchange, trajectory_of
from tests.train.agent.test_update import learner_of

from shoal.envs.actions import Projection
from shoal.rollout.episode import Role
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.samplers.sampler import Key, Request, Sampling
from shoal.samplers.tiny import TinyEngine
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.supervised.rehearsal import rehearse, stuck_episodes

WORDS = ["Down", "Left", "Right", "Up"]
ROLE = Role("Env", "Walk.", Projection(lookup={word: n for n, word in enumerate(WORDS, 1)}), 3)
FREE = Role("Env", "Say.", Projection(parse=str), 3)
PROMPT = PromptConfig(
    history=0, first="{observation}", later="{observation}", prefill="<action>", closing="</action>"
)
SAMPLING = Sampling(1, 1.0, ())


def episode(engine, group, *, success=False, reward=0.0, logprob=-0.01):
    prompter = Prompter(PROMPT, engine.tokenizer)
    prompt = prompter.tokenizer.start(
        [{"role": "user", "content": f"state {group}"}]
    ) + engine.tokenizer.encode("<action>")
    turn = Exchange(
        observation=f"state {group}", prompt_ids=prompt, response_ids=engine.tokenizer.encode("Up"),
        logprobs=(logprob,), response="<action>Up</action>", action="Up", action_is_valid=True, reward=reward,
        anchor="", image=None, finish="stop",
    )  # fmt: skip
    return trajectory_of(
        env="Env", iteration=0, group=group, member=0, env_seed=0, turns=(turn,), success=success, terminated=True,
        truncated=False, status="ok", error=None,
    )  # fmt: skip


def chances(engine, group):
    """The probability of each word in the state of a group."""
    prompt = episode(engine, group).prompt_ids(0)
    said = [
        engine.generate([Request(prompt, Key(0, (0, 0, 0, n)), SAMPLING)])[0].token_ids[0] for n in range(200)
    ]
    ids = [engine.tokenizer.encode(word)[0] for word in WORDS]
    return np.array([said.count(i) / len(said) for i in ids])


def rehearsed(engine, played, role=ROLE, steps=1, weight=1.0):
    learner = learner_of(policy_of(engine))
    prompter = Prompter(PROMPT, engine.tokenizer)
    for iteration in range(steps):
        row = rehearse(learner, played, {"Env": role}, prompter, SAMPLING, weight, iteration)
    return row


def test_in_stuck_groups_all_words_become_likely_again():
    engine = TinyEngine(WORDS, seed=0)
    played = [episode(engine, 0), episode(engine, 0), episode(engine, 1, success=True, reward=1.0)]
    before = chances(engine, 0).sum()  # of a fresh network: all tokens are alike
    row = rehearsed(engine, played, steps=60)
    after = chances(engine, 0)
    assert before < 0.2 < 0.9 < after.sum()
    assert after.min() > 0.1
    assert row["episodes_stuck"] == pytest.approx(2 / 3)
    assert row["rehearsal_loss"] == pytest.approx(math.log(4), abs=0.3)  # uniform over four words


@pytest.mark.parametrize(
    "change",
    ["nobody succeeds at all", "answers are random", "free text", "rewards differ", "a member succeeds"],
)
def test_nothing_is_rehearsed_where_it_would_do_harm(change):
    engine = TinyEngine(WORDS, seed=0)
    logprob = math.log(1 / 4) if change == "answers are random" else -0.01
    played = [episode(engine, 0, logprob=logprob), episode(engine, 0, logprob=logprob)]
    if change == "rewards differ":
        played[1] = episode(engine, 0, reward=0.5)
    if change == "a member succeeds":
        played[1] = episode(engine, 0, success=True)
    if change != "nobody succeeds at all":
        played.append(episode(engine, 1, success=True, reward=1.0))
    assert rehearsed(engine, played, FREE if change == "free text" else ROLE) == {}


def test_episodes_that_failed_are_not_stuck():
    engine = TinyEngine(WORDS, seed=0)
    played = [episode(engine, 0), episode(engine, 0), episode(engine, 1, success=True, reward=1.0)]
    broken = replace(played[0], status="env_error", error="it broke")
    assert len(stuck_episodes([*played[:2], broken, played[2]])) == 2
