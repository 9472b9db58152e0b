"""A batch of answers made by hand, a tiny Llama that scores it, and what shoal makes of them: loss and gradients.

Nothing but `shoals` and `record` is of shoal: log-probabilities come from plain passes over one answer at a time.
"""

import copy
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from tests.records import Exchange, trajectory_of

from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.train.agent.config import compose_config
from shoal.train.agent.optimizer import split_optimizer, trained_parameters
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.run.filters import filter_groups
from shoal.train.agent.update import Learner, prepare_samples, update

GROUP, BUDGET, END = 4, 6, 1
PROMPTS = (5, 2, 7, 3)  # tokens of the prompt of each group
LENGTHS = ((6, 2, 4, 1), (3, 6, 1, 5), (2, 2, 6, 4), (1, 3, 5, 2))  # tokens of the answers
REWARDS = ((1.0, 0.0, 0.25, 0.5), (0.0, 1.0, 0.0, 0.0), (0.5, -0.5, 2.0, 0.75), (1.0, 1.0, 1.0, 1.0))
PLAIN = (
    "agent_proxy.prompt.prefill=",
    "agent_proxy.prompt.closing=",
)  # else no answer is cut: shoal closes it
CUT = {(0, 0), (1, 1)}  # answers that were stopped at BUDGET tokens: all others end


class Answer(NamedTuple):
    """One answer; `old` are its log-probabilities when it was sampled."""

    group: int
    member: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    reward: float
    old: torch.Tensor

    @property
    def cut(self):
        return (self.group, self.member) in CUT


def make_answers(model, vocabulary, noise, temperature=1.0, groups=(0, 1, 2, 3)):
    """Random tokens, and log-probabilities near those of `model`; of each group the prompt is one."""
    answers = []
    for group in groups:
        prompt = tuple(np.random.default_rng([group]).integers(3, vocabulary, PROMPTS[group]).tolist())
        for member in range(GROUP):
            rng, length = np.random.default_rng([group, member]), LENGTHS[group][member]
            response = tuple(rng.integers(3, vocabulary, length).tolist())
            if (group, member) not in CUT:
                response = (*response[:-1], END)
            with torch.no_grad():
                now = logprobs_of(model, prompt, response, temperature)
            old = now + torch.from_numpy(rng.normal(0, noise, length)).float()
            answers.append(Answer(group, member, prompt, response, REWARDS[group][member], old))
    return answers


def logprobs_of(model, prompt, response, temperature=1.0):
    """`[tokens]` of the response."""
    ids = torch.tensor([[*prompt, *response]])
    scores = (model(input_ids=ids, use_cache=False).logits[0] / temperature).log_softmax(-1)
    places = torch.arange(len(prompt), len(prompt) + len(response))
    return scores[places - 1, ids[0, places]]


def moved(model, size=0.02):
    """Another model: the weights of this one and a little more."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return other


def padded(rows, width=BUDGET):
    """`[rows, width]`, with zeros on the right."""
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])


def relative(answers, scale=True):
    """The advantages of GRPO (arXiv:2402.03300, section 4.1.2), and without `scale` those of Dr. GRPO."""
    found = []
    for answer in answers:
        group = np.array([other.reward for other in answers if other.group == answer.group])
        spread = group.std(ddof=1)
        found.append((answer.reward - group.mean()) / (spread if scale and spread else 1.0))
    return found


def record(answer):
    """The episode of an answer, as shoal keeps it."""
    exchange = Exchange(
        "", answer.prompt, answer.response, tuple(answer.old.tolist()), "", "a", True, answer.reward, "",
        finish="length" if answer.cut else "stop",
    )  # fmt: skip
    return trajectory_of(
        "hand", 0, answer.group, answer.member, 0, (exchange,), answer.reward > 0, True, False
    )


def gradients_of(model):
    """One vector, in the order of the parameters."""
    return torch.cat([parameter.grad.flatten() for parameter in trained_parameters(model)])


def shoals(preset, model, reference, tokenizer, answers, *settings):
    """Metrics and gradients of one update with `algorithm=PRESET`, which leaves the weights as they are."""
    model = copy.deepcopy(model)
    config = compose_config(
        "base", [f"algorithm={preset}", f"agent_proxy.max_tokens={BUDGET}", *PLAIN, *settings]
    )
    algorithm = replace(config.algorithm, max_grad_norm=0)  # the gradient as it is
    played = [record(answer) for answer in answers]
    if algorithm.filter_groups.enable:
        played, _ = filter_groups(played)
    optimizer = split_optimizer(trained_parameters(model), None, 0.0, 0.0, 0.0)
    held = policy_of(HuggingFaceEngine(reference, tokenizer)) if algorithm.kl.coef else None
    policy = policy_of(HuggingFaceEngine(model, tokenizer))
    learner = Learner(policy, optimizer, algorithm, config.agent_proxy, reference=held, token_budget=BUDGET)
    samples = prepare_samples(played, learner)
    return update(learner, samples, 0), gradients_of(model), samples


def assert_same(found, expected):
    """Equal to a millionth of the largest part, which float32 allows."""
    assert float(expected.abs().max()) > 1e-3
    gap = float((found - expected).abs().max() / expected.abs().max())
    assert gap <= 1e-6, gap
