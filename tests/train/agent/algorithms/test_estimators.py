"""Every registered estimator and loss against loops written from the papers, on batches with all that is odd.

Episodes without turns, turns without tokens, groups of one, equal rewards: the oracles below share no code with shoal.
"""

import math

import numpy as np
import pytest
import torch
from tests.records import Exchange, exchanges, trajectory_of

from shoal.train.agent.algorithms.advantages import (
    ESTIMATORS,
    Estimator,
    critic_advantages,
    teacher_advantages,
    token_gae,
    turn_advantages,
)
from shoal.train.agent.algorithms.losses import (
    LOSSES,
    Loss,
    PolicyLoss,
    Tokens,
    policy_losses,
)
from shoal.train.agent.config import AgentProxy, Algorithm, Critic, GiGPO, RewardNormalization

SEEDS = range(40)


def random_batch(seed):
    rng = np.random.default_rng(seed)
    trajectories = []
    for group in range(int(rng.integers(1, 5))):
        alike = rng.random() < 0.3
        for member in range(int(rng.integers(1, 5))):
            turns, context = [], (1,)
            for _ in range(int(rng.integers(0, 4))):
                written = tuple(rng.integers(5, 9, int(rng.integers(0, 4))).tolist())
                reward = 0.5 if alike else float(rng.choice([0.0, 0.0, 1.0, 0.25]))
                anchor, valid = str(rng.integers(3)), bool(rng.random() < 0.7)
                turns.append(
                    Exchange("", context, written, (-1.0,) * len(written), "", "a", valid, reward, anchor)
                )
                context = (*context, *written, 2)
            env, won = ("lake", "maze")[group % 2], bool(rng.random() < 0.5)
            trajectories.append(trajectory_of(env, 0, group, member, 0, tuple(turns), won, won, not won))
    return trajectories


# --- the definitions, as loops
def mean_of(values):
    return math.fsum(values) / len(values)


def deviation(values):
    if len(values) < 2 or max(values) - min(values) < 1e-9:
        return 0.0
    mean = mean_of(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def returns_of(trajectory, gamma):
    paid = [turn.reward for turn in trajectory.turns]
    return [math.fsum(gamma ** (k - t) * paid[k] for k in range(t, len(paid))) for t in range(len(paid))]


def mates(values, baseline_groups, i):
    return [v for v, cell in zip(values, baseline_groups, strict=True) if cell == baseline_groups[i]]


def compared(values, baseline_groups, method):
    """`method` of `reward_normalization`, episode by episode."""
    found = []
    for i, value in enumerate(values):
        group = mates(values, baseline_groups, i)
        spread = deviation(group)
        if method == "identity":
            found.append(value)
        elif spread == 0:
            found.append(0.0)
        else:
            less = value - mean_of(group)
            scaled = less if method == "mean" else less / spread
            found.append(min(max(scaled, -1.0), 3.0) if method == "asym_clip" else scaled)
    return found


def cells_of(trajectories, grouping):
    return [{"state": t.group, "inductive": t.env, "batch": 0}[grouping] for t in trajectories]


def per_turn(trajectories, values):
    return [[value] * len(t.turns) for t, value in zip(trajectories, values, strict=True)]


def by_visits(trajectories, worths, method):
    """GiGPO's step part: turns of a group that met one state, compared by what each was worth."""
    places = [(i, t, turn.anchor) for i, tr in enumerate(trajectories) for t, turn in enumerate(tr.turns)]
    found = [[0.0] * len(tr.turns) for tr in trajectories]
    for i, t, anchor in places:
        same = [worths[j][u] for j, u, other in places
                if other == anchor and trajectories[j].group == trajectories[i].group]  # fmt: skip
        spread = deviation(same)
        if spread:
            found[i][t] = (worths[i][t] - mean_of(same)) / (1.0 if method == "mean" else spread)
    return found


def added(episodes, steps, weight):
    return [[e + weight * s for s in own] for e, own in zip(episodes, steps, strict=True)]


def expected_turns(name, trajectories, algorithm, proxy):
    settings = proxy.reward_normalization
    method, gamma = settings.method, algorithm.gamma
    baseline_groups = cells_of(trajectories, settings.grouping)
    all_returns = [returns_of(t, gamma) for t in trajectories]
    first = [r[0] if r else 0.0 for r in all_returns]
    if name == "grpo":
        return per_turn(trajectories, compared(first, baseline_groups, method))
    if name == "dr_grpo":
        return per_turn(trajectories, compared(first, baseline_groups, "mean"))
    if name == "rloo":
        found = []
        for i, value in enumerate(first):
            group = mates(first, baseline_groups, i)
            others = len(group) - 1
            found.append(value - (math.fsum(group) - value) / others if others else 0.0)
        return per_turn(trajectories, found)
    if name == "maxrl":
        found = []
        for i, value in enumerate(first):
            group = mates(first, baseline_groups, i)
            mean = mean_of(group)
            found.append((value - mean) / mean if deviation(group) else 0.0)
        return per_turn(trajectories, found)
    if name == "reinforce":
        return per_turn(trajectories, [value - mean_of(first) for value in first])
    if name == "reinforce_pp_baseline":
        first = [value - mean_of(mates(first, baseline_groups, i)) for i, value in enumerate(first)]
        return per_turn(trajectories, compared(first, [0] * len(first), "mean_std"))
    if name == "reinforce_pp":
        tokens = [r for t, own in zip(trajectories, all_returns, strict=True)
                  for turn, r in zip(exchanges(t), own, strict=True) for _ in turn.response_ids]  # fmt: skip
        mean, variance = (mean_of(tokens), deviation(tokens) ** 2) if tokens else (0.0, 0.0)
        return [[(r - mean) / math.sqrt(variance + 1e-8) for r in own] for own in all_returns]
    assert name == "gigpo"
    steps = by_visits(trajectories, all_returns, method)
    if algorithm.gigpo.episode_reward == "sum":
        first = [math.fsum(turn.reward for turn in t.turns) for t in trajectories]
    if algorithm.gigpo.statistics == "episodes":
        episodes = compared(first, baseline_groups, method)
    else:  # as over a list in which each episode stands once a turn
        copies = [(i, v) for i, v in enumerate(first) for _ in trajectories[i].turns]
        flat = compared([v for _, v in copies], [baseline_groups[i] for i, _ in copies], method)
        of = {i: a for (i, _), a in zip(copies, flat, strict=True)}
        episodes = [of.get(i, 0.0) for i in range(len(first))]
    return added(episodes, steps, algorithm.step_advantage_weight)


PLAIN = sorted(name for name in ESTIMATORS if ESTIMATORS[name].needs == "nothing")


def variants(name):
    methods = ["mean_std", "mean", "asym_clip", "identity"] if ESTIMATORS[name].normalized else ["mean_std"]
    groupings = ["state", "inductive", "batch"] if ESTIMATORS[name].grouped else ["state"]
    kinds = (
        [GiGPO(r, s) for r in ("return", "sum") for s in ("episodes", "steps")]
        if name == "gigpo"
        else [GiGPO()]
    )
    return [(m, g, kind) for m in methods for g in groupings for kind in kinds]


def test_every_estimator_is_examined_here():
    assert {*PLAIN, "gae", "distillation"} == {
        name for name in ESTIMATORS if ESTIMATORS[name].compute.__module__.startswith("shoal.")
    }


@pytest.mark.parametrize("name", PLAIN)
def test_an_estimator_is_what_its_paper_says(name):
    for seed in SEEDS:
        trajectories = random_batch(seed)
        for method, grouping, kind in variants(name)[seed % 3 :: 3] or variants(name):
            algorithm = Algorithm(
                adv_estimator=name, gamma=(1.0, 0.9)[seed % 2], gigpo=kind, step_advantage_weight=0.7
            )
            proxy = AgentProxy(reward_normalization=RewardNormalization(grouping, method))
            found = turn_advantages(trajectories, algorithm, proxy)
            wanted = expected_turns(name, trajectories, algorithm, proxy)
            for turns, own, t in zip(found, wanted, trajectories, strict=True):
                said = [bool(turn.response_ids) or name != "reinforce_pp" for turn in exchanges(t)]
                np.testing.assert_allclose(
                    np.array(turns)[said],
                    np.array(own)[said],
                    rtol=1e-6,
                    atol=1e-6,
                    err_msg=f"{seed} {method}",
                )


def test_long_responses_cost_before_episodes_are_compared():
    """DAPO, eq. 13: from 2 of 4 tokens on, to -1 at 4, here times 0.5."""
    rewards, lengths = [1.0, 1.0, 0.0], [2, 4, 3]
    turns = [
        Exchange("", (1,), (5,) * n, (-1.0,) * n, "", "a", True, r, "")
        for r, n in zip(rewards, lengths, strict=True)
    ]
    group = [trajectory_of("lake", 0, 0, i, 0, (turn,), True, True, False) for i, turn in enumerate(turns)]
    proxy = AgentProxy(max_tokens=4, overlong_buffer=2, overlong_penalty=0.5)
    found = turn_advantages(group, Algorithm(), proxy)
    paid = [1.0, 0.5, -0.25]
    expected = [(r - mean_of(paid)) / deviation(paid) for r in paid]
    np.testing.assert_allclose(np.concatenate(found), expected)


# --- critics
def random_episode(rng):
    counts = [int(rng.integers(0, 4)) for _ in range(int(rng.integers(1, 7)))]
    return rng.normal(size=len(counts)).tolist(), [rng.normal(size=n) for n in counts]


def test_token_gae_is_the_sum_of_decayed_errors_over_turns_without_tokens_too():
    rng = np.random.default_rng(2)
    for _ in range(100):
        rewards, values = random_episode(rng)
        gamma, decay = rng.uniform(0.5, 1), rng.uniform()
        steps = [(t, k) for t, known in enumerate(values) for k in range(len(known))]
        advantages, targets = token_gae(rewards, values, gamma, decay)
        found = np.concatenate(advantages)
        np.testing.assert_allclose(np.concatenate(targets), found + np.concatenate(values))
        errors, factors = [], []
        for number, (t, k) in enumerate(steps):
            after, ahead = (steps[number + 1] if number + 1 < len(steps) else (len(values), 0)), 0.0
            if after[0] < len(values):
                ahead = values[after[0]][after[1]]
            paid = math.fsum(gamma ** (j - t) * rewards[j] for j in range(t, after[0]))
            factors.append(gamma ** (after[0] - t))
            errors.append(paid + factors[-1] * ahead - values[t][k])
        for first in range(len(steps)):
            total, factor = 0.0, 1.0
            for number in range(first, len(steps)):
                total, factor = total + factor * errors[number], factor * factors[number] * decay
            assert found[first] == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("whitening", ["population", "sample"])
def test_advantages_of_a_critic_are_whitened_over_the_tokens_of_the_batch(whitening):
    for seed in SEEDS:
        trajectories = random_batch(seed)
        rng = np.random.default_rng(seed)
        values = [[rng.normal(size=len(turn.response_ids)) for turn in exchanges(t)] for t in trajectories]
        algorithm = Algorithm(adv_estimator="gae", gamma=0.9, critic=Critic(0.75, whitening=whitening))
        raw = [token for t, known in zip(trajectories, values, strict=True)
               for tokens in token_gae([turn.reward for turn in t.turns], known, 0.9, 0.75)[0]
               for token in tokens]  # fmt: skip
        if len(raw) < 2:
            continue
        found, _ = critic_advantages(trajectories, values, algorithm, AgentProxy())
        flat = [token for turns in found for tokens in turns for token in tokens]
        spread = deviation(raw) * (1.0 if whitening == "sample" else math.sqrt((len(raw) - 1) / len(raw)))
        np.testing.assert_allclose(flat, [(r - mean_of(raw)) / (spread + 1e-8) for r in raw], atol=1e-7)


# --- losses
def of_played(algorithm):
    turn = Exchange("", (1,), (2,), (-1.0,), "", "a", True, 1.0, "s")
    pair = [trajectory_of("lake", 0, 0, member, 0, (turn, turn), True, True, False) for member in range(2)]
    turn_advantages(pair, algorithm, AgentProxy())


def of_values(algorithm):
    turn = Exchange("", (1,), (2, 3), (-1.0, -1.0), "", "a", True, 1.0, "s")
    one = [trajectory_of("lake", 0, 0, 0, 0, (turn,), True, True, False)]
    critic_advantages(one, [[np.zeros(2)]], algorithm, AgentProxy())


def of_logprobs(algorithm):
    teacher_advantages([[np.zeros(2)]], [[np.zeros(2)]], algorithm)


@pytest.mark.parametrize(
    ("compute", "gives"),
    [
        (of_played, lambda played: [np.zeros(1) for _ in played.trajectories]),
        (of_played, lambda played: [math.nan for _ in played.trajectories]),
        (of_played, lambda played: [[0.0] * (len(t.turns) + 1) for t in played.trajectories]),
        (of_played, lambda played: [1e39 for _ in played.trajectories]),
        (of_values, lambda rewards, values, _: ([known[:1] for known in values], values)),
        (of_values, lambda rewards, values, _: ([known * math.nan for known in values], values)),
        (of_logprobs, lambda ours, theirs: np.sum(theirs - ours)),
        (of_logprobs, lambda ours, theirs: (theirs - ours)[:1]),
        (of_logprobs, lambda ours, theirs: ours * math.nan),
    ],
)
def test_an_estimator_of_the_users_own_that_gives_something_else_is_named(compute, gives, monkeypatch):
    monkeypatch.setitem(ESTIMATORS._items, "mine", Estimator(gives))
    with pytest.raises(ValueError, match="adv_estimator=mine must give one finite number"):
        compute(Algorithm(adv_estimator="mine"))


def test_an_estimator_cannot_change_whose_advantages_are_whose(monkeypatch):
    """One that sorted the episodes in place gave each the advantages of another."""
    monkeypatch.setitem(ESTIMATORS._items, "mine", Estimator(lambda played: played.trajectories.reverse()))
    turn = Exchange("", (1,), (2,), (-1.0,), "", "a", True, 1.0, "s")
    pair = [trajectory_of("lake", 0, 0, member, 0, (turn,), True, True, False) for member in range(2)]
    with pytest.raises(AttributeError, match="no attribute 'reverse'"):
        turn_advantages(pair, Algorithm(adv_estimator="mine"), AgentProxy())


def test_an_estimator_may_use_its_memory_again_for_the_next_episode_or_turn(monkeypatch):
    """What it had given before was overwritten."""
    memory = np.zeros(2)

    def fill(value):
        memory[:] = value
        return memory

    turn = Exchange("", (1,), (2, 3), (-1.0, -1.0), "", "a", True, 1.0, "s")
    several = [trajectory_of("lake", 0, 0, member, 0, (turn, turn), True, True, False) for member in range(2)]
    known = [[np.zeros(2), np.full(2, 2.0)], [np.ones(2), np.full(2, 3.0)]]
    teacher = Estimator(lambda ours, theirs: fill(ours), needs="teacher")
    critic = Estimator(lambda rewards, values, _: (values, [fill(values[0])] * 2), needs="critic")
    monkeypatch.setitem(ESTIMATORS._items, "teaching", teacher)
    monkeypatch.setitem(ESTIMATORS._items, "critical", critic)
    taught = teacher_advantages(known, known, Algorithm(adv_estimator="teaching"))
    assert np.concatenate([*taught[0], *taught[1]]).tolist() == [0, 0, 2, 2, 1, 1, 3, 3]
    _, targets = critic_advantages(several, known, Algorithm(adv_estimator="critical"), AgentProxy())
    assert [turns[0].tolist() for turns in targets] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    "gives",
    [
        lambda tokens: PolicyLoss(tokens.logprobs[:, None], tokens.logprobs > 0),
        lambda tokens: PolicyLoss(tokens.logprobs.mean(), tokens.logprobs > 0),
        lambda tokens: PolicyLoss(tokens.logprobs, 0.0),
        lambda tokens: tokens.logprobs,
        lambda tokens: None,
    ],
)
def test_a_loss_of_the_users_own_that_gives_something_else_is_named(gives, monkeypatch):
    monkeypatch.setitem(LOSSES._items, "mine", Loss(lambda tokens, config: gives(tokens)))
    tokens = Tokens(torch.zeros(2), torch.zeros(2), torch.ones(2), torch.arange(2))
    with pytest.raises(
        ValueError, match=r"policy_loss=mine must give PolicyLoss\(losses, clipped\), each of one"
    ):
        policy_losses(tokens, Algorithm(policy_loss="mine"))


@pytest.mark.parametrize(
    "gives", [torch.Tensor.detach, torch.Tensor.long, lambda loss: loss.detach().numpy()]
)
def test_a_loss_of_the_users_own_without_gradients_is_named(gives, monkeypatch):
    """With an entropy bonus or a KL penalty beside it, a training went on by those alone."""
    mine = Loss(lambda tokens, _: PolicyLoss(gives(-tokens.logprobs), tokens.logprobs > 0))
    monkeypatch.setitem(LOSSES._items, "mine", mine)
    logprobs = torch.zeros(2, requires_grad=True)
    tokens = Tokens(logprobs, torch.zeros(2), torch.ones(2), torch.arange(2))
    with pytest.raises(ValueError, match="policy_loss=mine must give losses with the gradients"):
        policy_losses(tokens, Algorithm(policy_loss="mine"))
