"""Advantages and losses against references of their own, on 200 random batches each, to 1e-6.

The references follow what verl, verl-agent and TRL compute: rows of tokens with a mask, one loop after the other, in
float64. They share no code with shoal. Where shoal differs by default, the setting that gives the peer's is used.
"""

import statistics
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.records import Exchange, exchanges, trajectory_of

from shoal.train.agent.advantages import (
    critic_advantages,
    graph_step_advantages,
    mean_relative,
    overlong_shaping,
    reverse_kl,
    shaping_of,
    turn_advantages,
)
from shoal.train.agent.config import AgentProxy, Algorithm, Critic, GiGPO, RewardNormalization
from shoal.train.agent.losses import LOSSES, Tokens, aggregation_weights

BATCHES = 200
CLOSE = {"rtol": 0, "atol": 1e-6}


def batch(seed, single_turn=False):
    """Episodes of four groups, each with its tokens a turn; a group may be of one, of equals, and of any length."""
    rng = np.random.default_rng(seed)
    episodes = []
    for group in range(4):
        equal = rng.random() < 0.2
        for member in range(int(rng.integers(1, 6))):
            turns = tuple(
                Exchange("s", (1,), (2,) * int(rng.integers(1, 5)), (), "", "x", bool(rng.random() < 0.7),
                     0.0 if equal else float(rng.integers(0, 3)), f"a{rng.integers(3)}")
                for _ in range(1 if single_turn else int(rng.integers(1, 5)))
            )  # fmt: skip
            episodes.append(trajectory_of("e", 0, group, member, 0, turns, True, True, False))
    return episodes


def flat(advantages, episodes):
    """One number a token, in the order of the episodes."""
    return np.concatenate(
        [np.full(len(turn.response_ids), a)
         for own, t in zip(advantages, episodes, strict=True) for a, turn in zip(own, exchanges(t), strict=True)]
    )  # fmt: skip


def tokens_of(episode):
    """The rewards of an episode on a row of its tokens, each at the last one of its turn."""
    row = []
    for turn in exchanges(episode):
        row += [0.0] * (len(turn.response_ids) - 1) + [turn.reward]
    return row


def verl_outcome(name, episodes):
    """Outcome advantages of verl and TRL: scores are sums, mean and standard deviation (Bessel) of each group."""
    scores = [sum(tokens_of(t)) for t in episodes]
    by_group = defaultdict(list)
    for t, score in zip(episodes, scores, strict=True):
        by_group[t.group].append(score)
    out = []
    for t, score in zip(episodes, scores, strict=True):
        own = torch.tensor(by_group[t.group], dtype=torch.float64)
        if name == "rloo":
            n = len(own)
            value = score * n / (n - 1) - float(own.mean()) * n / (n - 1) if n > 1 else 0.0
        elif len(own) == 1:
            value = 0.0  # verl keeps the score itself, TRL refuses: a group of one says nothing
        elif name == "dr_grpo":
            value = score - float(own.mean())
        else:
            value = (score - float(own.mean())) / (float(own.std()) or 1.0)  # they add 1e-6 to it
        out += [value] * len(tokens_of(t))
    return np.array(out)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_outcome_advantages_are_those_of_verl_and_trl(name):
    for seed in range(BATCHES):
        episodes = batch(seed)
        found = flat(turn_advantages(episodes, Algorithm(adv_estimator=name), AgentProxy()), episodes)
        np.testing.assert_allclose(found, verl_outcome(name, episodes), **CLOSE)


def masked_whiten(values):
    values = np.array(values)
    variance = values.var() * len(values) / max(len(values) - 1, 1)
    return (values - values.mean()) / np.sqrt(variance + 1e-8)


def test_reinforce_pp_tokens_is_verls_reinforce_plus_plus():
    for seed in range(BATCHES):
        episodes = batch(seed)
        to_go = []
        for t in episodes:
            row, running = [], 0.0
            for reward in reversed(tokens_of(t)):
                running = reward + running
                row.append(running)
            to_go += row[::-1]
        found = turn_advantages(episodes, Algorithm(adv_estimator="reinforce_pp_tokens"), AgentProxy())
        np.testing.assert_allclose(flat(found, episodes), masked_whiten(to_go), **CLOSE)


def verl_gae(rewards, values, gae_lambda):
    advantages, running, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + following - value + gae_lambda * running
        following = value
        advantages.append(running)
    return advantages[::-1]


def test_gae_with_bessels_correction_is_verls():
    for seed in range(BATCHES):
        episodes, rng = batch(seed), np.random.default_rng(seed)
        values = [[rng.normal(size=len(turn.response_ids)) for turn in exchanges(t)] for t in episodes]
        algorithm = Algorithm(adv_estimator="gae", critic=Critic(gae_lambda=0.9, whitening="sample"))
        found, targets = critic_advantages(episodes, values, algorithm, AgentProxy())
        raw, wanted = [], []
        for t, own in zip(episodes, values, strict=True):
            row = np.concatenate(own)
            raw += verl_gae(tokens_of(t), row.tolist(), 0.9)
            wanted += (np.array(raw[-len(row) :]) + row).tolist()
        joined = np.concatenate([turn for own in found for turn in own])
        np.testing.assert_allclose(joined, masked_whiten(raw), **CLOSE)
        np.testing.assert_allclose(np.concatenate([v for own in targets for v in own]), wanted, **CLOSE)


def verl_agent_gigpo(episodes, remove_std, weight):
    """A row is a step: its episode's score is compared over all rows of a group, its return where states are equal."""
    rows = [
        (t.group, turn.anchor, sum(x.reward for x in t.turns), sum(x.reward for x in t.turns[i:]))
        for t in episodes
        for i, turn in enumerate(t.turns)
    ]

    def normalised(keys, scores):
        out = []
        for key, score in zip(keys, scores, strict=True):
            own = torch.tensor(
                [s for k, s in zip(keys, scores, strict=True) if k == key], dtype=torch.float64
            )
            if len(own) == 1:
                out.append(0.0)
            else:
                out.append((score - float(own.mean())) / ((not remove_std and float(own.std())) or 1.0))
        return np.array(out)

    episode = normalised([row[0] for row in rows], [row[2] for row in rows])
    step = normalised([row[:2] for row in rows], [row[3] for row in rows])
    return episode + weight * step


@pytest.mark.parametrize("remove_std", [True, False])
def test_gigpo_with_statistics_over_steps_is_verl_agents(remove_std):
    proxy = AgentProxy(reward_normalization=RewardNormalization(method="mean" if remove_std else "mean_std"))
    algorithm = Algorithm(
        adv_estimator="gigpo",
        step_advantage_weight=0.7,
        gigpo=GiGPO(episode_reward="sum", statistics="steps"),
    )
    for seed in range(BATCHES):
        episodes = batch(seed)
        found = np.concatenate(turn_advantages(episodes, algorithm, proxy))
        expected = verl_agent_gigpo(episodes, remove_std, 0.7)
        np.testing.assert_allclose(found, expected, **CLOSE)


def test_gigpos_episode_part_may_be_the_plain_sum_of_the_paper():
    pair = [batch(0)[0]] * 2
    rewards = ([0.0, 1.0], [1.0, 0.0])  # equal sums, unequal returns
    turn = pair[0].turns[0]
    episodes = [
        trajectory_of("e", 0, 0, m, 0, tuple(Exchange("s", (1,), (2,), (), "", "x", True, r, f"{m}{i}")
                                          for i, r in enumerate(own)), True, True, False)
        for m, own in enumerate(rewards)
    ]  # fmt: skip
    assert turn is not None
    discounted = Algorithm(adv_estimator="gigpo", gamma=0.5)
    plain = Algorithm(adv_estimator="gigpo", gamma=0.5, gigpo=GiGPO(episode_reward="sum"))
    assert abs(np.concatenate(turn_advantages(episodes, discounted, AgentProxy()))).min() > 0.5
    assert not np.concatenate(turn_advantages(episodes, plain, AgentProxy())).any()


def graph_reference(episodes, discount, remove_std):
    """Distances by relaxing all edges again and again; statistics by Python's own module."""
    found = []
    for group in {t.group for t in episodes}:
        own = [t for t in episodes if t.group == group]
        edges = []
        for number, t in enumerate(own):
            names = [turn.anchor for turn in t.turns] + ["GOAL" if t.success else f"END {number}"]
            edges += [(number, k, names[k], names[k + 1]) for k in range(len(t.turns))]
        far = {"GOAL": 0}
        for _ in range(len(edges) + 1):
            for _, _, a, b in edges:
                if b in far:
                    far[a] = min(far.get(a, 10**9), far[b] + 1)
        reached = any(t.success and t.turns for t in own)
        lost = max(far.values()) + 1
        worth = {(n, k): (a, discount ** (1 + far.get(b, lost))) for n, k, a, b in edges}
        for (n, k), (state, value) in worth.items():
            mates = [v for s, v in worth.values() if s == state]
            if not reached or len(mates) < 2 or max(mates) - min(mates) < 1e-12:
                result = 0.0
            else:
                result = value - statistics.fmean(mates)
                result /= 1.0 if remove_std else statistics.stdev(mates)
            found.append((own[n].group, own[n].member, k, result))
    return sorted(found)


@pytest.mark.parametrize("remove_std", [False, True])
def test_graphgpos_step_part_is_that_of_an_independent_graph(remove_std):
    steps = 0
    for seed in range(BATCHES):
        rng = np.random.default_rng(seed)
        episodes = [replace(t, success=bool(rng.random() < 0.4)) for t in batch(seed)]
        rng.shuffle(episodes)
        discount = float(rng.uniform(0.1, 0.9))
        own = graph_step_advantages(
            [[turn.anchor for turn in t.turns] for t in episodes],
            [t.success for t in episodes],
            [t.group for t in episodes],
            discount=discount,
            scale=not remove_std,
        )
        found = sorted(
            (t.group, t.member, k, value)
            for t, values in zip(episodes, own, strict=True)
            for k, value in enumerate(values.tolist())
        )
        expected = graph_reference(episodes, discount, remove_std)
        assert [row[:3] for row in found] == [row[:3] for row in expected]
        np.testing.assert_allclose([row[3] for row in found], [row[3] for row in expected], **CLOSE)
        steps += sum(abs(row[3]) > 0.1 for row in expected)
    assert steps > BATCHES  # most batches have turns that are told apart


def test_graphgpo_pays_a_good_turn_of_a_lost_episode_and_none_of_a_detour():
    """A -> B -> goal is the way; the first episode goes round by C, the second goes to B and is lost."""
    solved, lost = ["A", "C", "B"], ["A", "B"]
    first, second = graph_step_advantages([solved, lost], [True, False], [0, 0], discount=0.5)
    half = np.sqrt(0.5)  # two values, a mean between them, Bessel's correction
    np.testing.assert_allclose(
        first, [-half, 0.0, half]
    )  # to C: 2 turns left; alone at C; from B to the goal
    np.testing.assert_allclose(second, [half, -half])  # to B: 1 turn left; from B nowhere


def test_graphgpo_is_grpo_and_the_step_part_and_far_states_count_as_near_ones():
    long = [f"s{k}" for k in range(12)]
    turns = [tuple(Exchange("s", (1,), (2,), (), "", "x", True, float(name == "s11"), name) for name in names)
             for names in (long, [long[0], "x"])]  # fmt: skip
    episodes = [trajectory_of("e", 0, 0, k, 0, t, k == 0, True, False) for k, t in enumerate(turns)]
    settings = Algorithm(adv_estimator="graphgpo", step_advantage_weight=2.0)
    first, second = turn_advantages(episodes, settings, AgentProxy())
    half = np.sqrt(0.5)  # eleven turns from the goal, 0.1 ** 11 against 0.1 ** 13
    np.testing.assert_allclose(first, [3 * half] + [half] * 11, atol=1e-12)
    np.testing.assert_allclose(second, [-3 * half, -half], atol=1e-12)


def test_maxrl_is_the_mean_of_the_scores_of_successes_less_the_mean_of_all():
    """With rewards of 0 and 1, k successes of n: sum A_i g_i / n = sum over successes g_i / k - sum g_i / n."""
    for seed in range(BATCHES):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 9))
        won, scores = rng.random(n) < 0.4, rng.normal(size=(n, 3))
        advantages = mean_relative(won.astype(float), np.zeros(n))
        found = (advantages[:, None] * scores).mean(0)
        some = won.any() and not won.all()
        expected = scores[won].mean(0) - scores.mean(0) if some else np.zeros(3)
        np.testing.assert_allclose(found, expected, **CLOSE)


def test_maxrl_refuses_rewards_that_it_cannot_divide_by():
    with pytest.raises(ValueError, match="none may be below 0"):
        mean_relative([-1.0, 1.0], [0, 0])


def test_the_gradient_of_distillation_is_that_of_the_reverse_kl():
    """Over all tokens of a small vocabulary, sum p A grad log p = -grad KL(student || teacher)."""
    for seed in range(BATCHES):
        rng = torch.Generator().manual_seed(seed)
        logits = torch.randn(5, generator=rng, dtype=torch.float64, requires_grad=True)
        teacher = torch.randn(5, generator=rng, dtype=torch.float64).log_softmax(-1)
        student = logits.log_softmax(-1)
        (expected,) = torch.autograd.grad(
            (student.exp() * (student - teacher)).sum(), logits, retain_graph=True
        )
        advantages = torch.from_numpy(reverse_kl(student.detach().numpy(), teacher.numpy()))
        (found,) = torch.autograd.grad(-(student.detach().exp() * advantages * student).sum(), logits)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_overlong_shaping_is_dapos_by_hand():
    # limit 20, buffer 4: free up to 16, then 1/4 a token, -1 at the limit.
    found = overlong_shaping([1, 16, 17, 18, 20], 20, 4)
    np.testing.assert_allclose(found, [0, 0, -0.25, -0.5, -1.0])


def test_overlong_shaping_is_added_centred_to_the_turns_that_earned_it():
    episodes = [e for e in batch(3) if e.group == 0]
    proxy = AgentProxy(max_tokens=4, overlong_buffer=2, overlong_penalty=0.5)
    found = np.concatenate(shaping_of(episodes, proxy))
    raw = [-0.5 * min(max((len(turn.response_ids) - 2) / 2, 0), 1) for t in episodes for turn in exchanges(t)]
    np.testing.assert_allclose(found, np.array(raw) - np.mean(raw), atol=1e-12)


# --- losses
def rows(seed):
    """Log-probabilities, advantages and lengths of a few sequences."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, int(rng.integers(1, 6))).tolist()
    n = sum(lengths)
    old = rng.normal(-2, 1, n)
    return lengths, old + rng.normal(0, 0.4, n), old, rng.normal(size=n)


def token_loop(name, new, old, advantages, low, high, dual=None):
    out = []
    for p, q, a in zip(new, old, advantages, strict=True):
        ratio = np.exp(p - q)
        if name == "cispo":
            out.append(-min(ratio, 1 + high) * a * p)
            continue
        loss = max(-ratio * a, -min(max(ratio, 1 - low), 1 + high) * a)
        out.append(min(loss, -dual * a) if dual is not None and a < 0 else loss)
    return np.array(out)


def reference_loss(name, how, data, low, high, dual=None, constant=1.0):
    """A number a batch, as verl's `agg_loss` has it: per sequence, then over sequences."""
    lengths, new, old, advantages = data
    losses, begin = [], 0
    for length in lengths:
        part = slice(begin, begin + length)
        p, q, a = new[part], old[part], advantages[part]
        if name == "gspo":
            ratio = np.exp((p - q).mean())
            losses.append(np.array([max(-ratio * x, -min(max(ratio, 1 - low), 1 + high) * x) for x in a]))
        else:
            losses.append(token_loop(name, p, q, a, low, high, dual))
        begin += length
    if how == "token_mean":
        return np.concatenate(losses).sum() / sum(lengths)
    if how == "sequence_mean":
        return np.mean([own.mean() for own in losses])
    return np.mean([own.sum() / constant for own in losses])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "clip"),
        ({"dual_clip": 3.0}, "clip"),
        ({"loss_aggregation": "sequence_mean"}, "clip"),
        ({"adv_estimator": "dr_grpo", "loss_constant": 8.0}, "clip"),
        ({"policy_loss": "gspo"}, "gspo"),
        ({"policy_loss": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.2}, "gspo"),
        ({"policy_loss": "cispo"}, "cispo"),
    ],
)
def test_losses_are_those_of_a_loop_over_sequences_and_tokens(settings, name):
    config = Algorithm(**settings)
    for seed in range(BATCHES):
        lengths, *columns = data = rows(seed)
        new, old, advantages = (torch.from_numpy(column) for column in columns)
        of = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        losses = LOSSES[config.policy_loss].compute(Tokens(new, old, advantages, of), config)[0]
        weights = np.concatenate(aggregation_weights(lengths, config.loss_aggregation, config.loss_constant))
        found = float((losses.numpy() * weights).sum())
        expected = reference_loss(
            name, config.loss_aggregation, data, config.clip_ratio_low, config.clip_ratio_high,
            config.dual_clip, config.loss_constant,
        )  # fmt: skip
        assert found == pytest.approx(expected, abs=1e-6)
