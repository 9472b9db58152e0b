"""Loss and gradient of one batch under each preset, against the formulas of its paper written out here.

Nothing below the first section is of shoal: log-probabilities come from plain passes over one sample at a time.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.records import Exchange, trajectory_of

from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.config import compose_config
from shoal.train.agent.optimizer import split_optimizer, trained_parameters
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.policy import Critic
from shoal.train.agent.run.filters import filter_groups
from shoal.train.agent.update import Learner, Totals, gradient_step, prepare_samples

BUDGET = 9
REWARDS = [(1.0, 0.0, 1.0), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0)]  # by group and member, paid in the last turn
LENGTHS = [
    ((2, 3), (1, 4), (3, 1)),
    ((2, 2), (4, 1), (1, 1)),
    ((2, 1), (3, 3), (1, 2)),
]  # tokens of both turns
STATES = [(("a", "b"), ("a", "b"), ("a", "c")), (("d", "e"), ("d", "d"), ("d", "e")), (("f", "g"),) * 3]


class Episode:
    """What the formulas read of one episode; a turn is a pair of prompt and response."""

    def __init__(self, group, member, append):
        rng = np.random.default_rng([group, member])
        self.group, self.member, self.reward = group, member, REWARDS[group][member]
        self.states, self.turns = STATES[group][member], []
        context = ()
        for length in LENGTHS[group][member]:
            prompt = (*context, *rng.integers(6, 60, 3).tolist())
            response = tuple(rng.integers(6, 60, length).tolist())
            self.turns.append((prompt, response))
            context = (*prompt, *response) if append else ()

    def record(self, policy, rng):
        """As shoal keeps it; the weights that sampled were a little different."""
        exchanges = []
        for k, (prompt, response) in enumerate(self.turns):
            now = logprobs_of(policy, prompt, response).detach().numpy()
            old = tuple((now + rng.normal(0, 0.3, len(now))).astype(np.float32).tolist())
            last = k + 1 == len(self.turns)
            cut = last and (self.group, self.member) == (1, 1)
            exchanges.append(
                Exchange("", prompt, response, old, "", "a", True, self.reward * last, self.states[k],
                         finish="length" if cut else "stop")
            )  # fmt: skip
            self.old = [*getattr(self, "old", []), torch.tensor(old)]
        return trajectory_of(
            "e", 0, self.group, self.member, 0, tuple(exchanges), self.reward > 0, True, False
        )


def logprobs_of(policy, prompt, response):
    ids = torch.tensor([[*prompt, *response]])
    hidden = policy.module.hidden(ids, torch.zeros(1, 1, dtype=torch.int64))
    scores = policy.module.head(hidden)[0].log_softmax(-1)
    places = torch.arange(len(prompt), len(prompt) + len(response))
    return scores[places - 1, ids[0, places]]


def values_of(critic, prompt, response):
    ids = torch.tensor([[*prompt, *response]])
    hidden = critic.model.hidden(ids, torch.zeros(1, 1, dtype=torch.int64))[0]
    places = torch.arange(len(prompt), len(prompt) + len(response))
    return critic.output(hidden[places - 1])[:, 0]


def shoals(name, append):
    """The loss and the gradients of shoal, and what they are of."""
    torch.manual_seed(3)
    policy = policy_of(TinyEngine(["Up"], TinyShape(width=16, layers=1, heads=2, context=64), seed=1))
    reference = policy.copy()
    with torch.no_grad():
        for parameter in reference.module.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    critic = None
    if name == "ppo":
        critic = Critic(policy)
        with torch.no_grad():
            critic.output.weight += 0.1 * torch.randn_like(critic.output.weight)
    # a whole answer ends itself
    config = compose_config("demo", [f"algorithm={name}", "agent_proxy.prompt.closing=''"])
    algorithm, proxy = replace(config.algorithm, max_grad_norm=0), config.agent_proxy
    optimizer = split_optimizer(trained_parameters(policy.module), critic, 0.0, 0.0, 0.0)
    held = reference if algorithm.kl.coef else None
    learner = Learner(policy, optimizer, algorithm, proxy, critic, held, token_budget=BUDGET)
    rng = np.random.default_rng(5)
    episodes = [Episode(group, member, append) for group in range(3) for member in range(3)]
    played = [episode.record(policy, rng) for episode in episodes]
    if algorithm.filter_groups.enable:
        played, _ = filter_groups(played)
        episodes = [e for e in episodes if e.group in {t.group for t in played}]
    totals = Totals()
    gradient_step(learner, prepare_samples(played, learner), totals)
    networks = [policy.module, *([critic] if critic else [])]
    found = [
        torch.cat([p.grad.flatten() for p in trained_parameters(one) if p.grad is not None])
        for one in networks
    ]
    return totals, found, episodes, policy, reference, critic


# --- the formulas
class Batch:
    """Episodes with the log-probabilities of their tokens, all turns together."""

    def __init__(self, episodes, policy, reference):
        self.episodes = episodes
        self.new = [[logprobs_of(policy, *turn) for turn in e.turns] for e in episodes]
        self.old = [e.old for e in episodes]
        with torch.no_grad():
            self.ref = [[logprobs_of(reference, *turn) for turn in e.turns] for e in episodes]

    def rows(self):
        """For each episode: new, old and reference log-probabilities `[tokens]`."""
        for new, old, ref in zip(self.new, self.old, self.ref, strict=True):
            yield torch.cat(new), torch.cat(old), torch.cat(ref)

    def mates(self, i, values):
        """The values of the group of an episode."""
        return [v for v, e in zip(values, self.episodes, strict=True) if e.group == self.episodes[i].group]


def deviation(values):
    return float(np.std(values, ddof=1))


def relative(batch, rewards):
    """GRPO, sec. 4.1.2: (r - mean) / std of the group; 0 where all are equal."""
    found = []
    for i, reward in enumerate(rewards):
        group = batch.mates(i, rewards)
        found.append((reward - np.mean(group)) / deviation(group) if deviation(group) else 0.0)
    return found


def surrogate(ratio, advantage, low=0.2, high=0.2):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def k3(new, ref):
    return (ref - new).exp() - (ref - new) - 1


def grpo(batch, budget):
    rewards = [e.reward for e in batch.episodes]
    terms = [
        (surrogate((new - old).exp(), a) - 0.04 * k3(new, ref)).mean()
        for (new, old, ref), a in zip(batch.rows(), relative(batch, rewards), strict=True)
    ]
    return -sum(terms) / len(terms)


def dr_grpo(batch, budget):
    rewards, total = [e.reward for e in batch.episodes], 0.0
    for i, (new, old, _) in enumerate(batch.rows()):
        total = total + surrogate((new - old).exp(), rewards[i] - np.mean(batch.mates(i, rewards))).sum()
    return -total / (len(rewards) * budget)


def dapo(batch, budget):
    rewards, total, count = [e.reward for e in batch.episodes], 0.0, 0
    for (new, old, _), a, e in zip(batch.rows(), relative(batch, rewards), batch.episodes, strict=True):
        if (e.group, e.member) != (1, 1):  # whose response was cut
            total, count = total + surrogate((new - old).exp(), a, 0.2, 0.28).sum(), count + len(new)
    assert {e.group for e in batch.episodes} == {0, 1}
    return -total / count


def gspo(batch, budget):
    rewards = [e.reward for e in batch.episodes]
    terms = [
        surrogate((new - old).mean().exp(), a, 3e-4, 4e-4)
        for (new, old, _), a in zip(batch.rows(), relative(batch, rewards), strict=True)
    ]
    return -sum(terms) / len(terms)


def cispo(batch, budget):
    rewards, total, count = [e.reward for e in batch.episodes], 0.0, 0
    for (new, old, _), a in zip(batch.rows(), relative(batch, rewards), strict=True):
        total = total + ((new - old).exp().clamp(max=5.0).detach() * a * new).sum()
        count += len(new)
    return -total / count


def of_whole_responses(batch, advantages):
    """-1/N times the sum of A log pi(y | x)."""
    rows = zip(batch.rows(), advantages, strict=True)
    return -sum(a * new.sum() for (new, _, _), a in rows) / len(advantages)


def rloo(batch, budget):
    paid = [
        e.reward - 0.03 * float((old - ref).sum())
        for e, (_, old, ref) in zip(batch.episodes, batch.rows(), strict=True)
    ]
    others = [
        (sum(batch.mates(i, paid)) - own) / (len(batch.mates(i, paid)) - 1) for i, own in enumerate(paid)
    ]
    return of_whole_responses(batch, [own - other for own, other in zip(paid, others, strict=True)])


def reinforce(batch, budget):
    rewards = [e.reward for e in batch.episodes]
    return of_whole_responses(batch, [r - np.mean(rewards) for r in rewards])


def maxrl(batch, budget):
    rewards = [e.reward for e in batch.episodes]
    means = [np.mean(batch.mates(i, rewards)) for i in range(len(rewards))]
    return of_whole_responses(batch, [(r - m) / m for r, m in zip(rewards, means, strict=True)])


def reinforce_pp(batch, budget):
    to_go = []
    for e, (_, old, ref) in zip(batch.episodes, batch.rows(), strict=True):
        kl = old - ref
        to_go.append(e.reward - 0.01 * kl.flip(0).cumsum(0).flip(0))
    every = torch.cat(to_go)
    total = 0.0
    for (new, old, _), own in zip(batch.rows(), to_go, strict=True):
        total = total + surrogate((new - old).exp(), (own - every.mean()) / every.std()).sum()
    return -total / len(every)


def gigpo(batch, budget):
    episodes = relative(batch, [e.reward for e in batch.episodes])
    returns = [[0.95 * e.reward, e.reward] for e in batch.episodes]
    visits = {}
    for i, e in enumerate(batch.episodes):
        for t, state in enumerate(e.states):
            visits.setdefault((e.group, state), []).append(returns[i][t])
    terms = []
    for i, e in enumerate(batch.episodes):
        for t, state in enumerate(e.states):
            alike = visits[e.group, state]
            step = (returns[i][t] - np.mean(alike)) / deviation(alike) if len(set(alike)) > 1 else 0.0
            new, old, ref = batch.new[i][t], batch.old[i][t], batch.ref[i][t]
            terms.append((surrogate((new - old).exp(), episodes[i] + step) - 0.01 * k3(new, ref)).mean())
    return -sum(terms) / len(terms)


def ppo(batch, budget, critic):
    """GAE over tokens with lambda .95 and no discount; the loss of the critic is half its squared error."""
    advantages, returns, known = [], [], []
    for e, (_, old, ref) in zip(batch.episodes, batch.rows(), strict=True):
        paid = -0.02 * (old - ref)
        paid[-1] += e.reward
        values = torch.cat([values_of(critic, *turn) for turn in e.turns])
        known.append(values)
        still, own, ahead = values.detach(), torch.zeros(len(paid)), 0.0
        for t in reversed(range(len(paid))):
            after = still[t + 1] if t + 1 < len(paid) else 0.0
            ahead = paid[t] + after - still[t] + 0.95 * ahead
            own[t] = ahead
        advantages.append(own)
        returns.append(own + still)
    every = torch.cat(advantages)
    white = [(own - every.mean()) / every.std(correction=0) for own in advantages]
    terms = [surrogate((new - old).exp(), a) for (new, old, _), a in zip(batch.rows(), white, strict=True)]
    errors = (torch.cat(known) - torch.cat(returns)) ** 2 / 2
    return -torch.cat(terms).mean(), errors.mean()


FORMULAS = [grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce, reinforce_pp, gigpo, maxrl]


@pytest.mark.parametrize("formula", FORMULAS)
def test_loss_and_gradient_of_a_preset_are_those_of_its_paper(formula):
    totals, (found,), episodes, policy, reference, _ = shoals(formula.__name__, append=formula is not gigpo)
    loss = formula(Batch(episodes, policy, reference), BUDGET)
    gradients = torch.autograd.grad(loss, trained_parameters(policy.module), allow_unused=True)
    expected = torch.cat([g.flatten() for g in gradients if g is not None])
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert totals.loss == pytest.approx(float(loss.detach()), abs=1e-6)


def test_loss_and_gradients_of_ppo_and_its_critic_are_those_of_its_papers():
    totals, found, episodes, policy, reference, critic = shoals("ppo", append=True)
    loss, error = ppo(Batch(episodes, policy, reference), BUDGET, critic)
    for network, value, own in ((policy.module, loss, found[0]), (critic, error, found[1])):
        gradients = torch.autograd.grad(value, trained_parameters(network), allow_unused=True)
        expected = torch.cat([g.flatten() for g in gradients if g is not None])
        assert float(expected.abs().max()) > 1e-3
        torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-5)
    assert totals.loss == pytest.approx(float(loss.detach()), abs=1e-6)
    assert totals.value_loss / totals.tokens == pytest.approx(float(error.detach()), abs=1e-6)
