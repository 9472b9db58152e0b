import numpy as np
import pytest
import torch

from shoal.train.agent.algorithms.advantages import (
    ESTIMATORS,
    Played,
    group_relative,
    has_signal,
    normalize_rewards,
    reverse_kl,
    token_whitened,
)
from shoal.train.agent.config import AgentProxy, Algorithm


def found(name, rewards, groups):
    """The advantages of episodes of one turn each."""
    played = Played((), [[reward] for reward in rewards], groups, Algorithm(), AgentProxy())
    return ESTIMATORS[name].compute(played)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1e12 / 3, 1e12 + 0.1, 7.7e30])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_rewards_that_are_equal_are_no_signal_though_their_mean_rounds(reward, size):
    rewards, groups = [reward] * size, [0] * size
    for scale in (True, False):
        assert not group_relative(rewards, groups, scale=scale).any()
        assert not group_relative(rewards, groups, scale=scale, counts=[3] * size).any()
    assert not has_signal(rewards, groups).any()
    assert not found("rloo", rewards, groups).any()
    assert not found("maxrl", rewards, groups).any()
    whitened = token_whitened([[reward], [reward] * size, [0.0]], [[3], [1] * size, [0]])
    assert not np.concatenate(whitened[:2]).any()
    mixed = [*rewards, 1.0, 2.0]  # the scale of the batch is that of the group that differs
    cells = [*groups, 1, 1]
    want = found("reinforce_pp_baseline", [0.0] * size + [1.0, 2.0], cells)
    np.testing.assert_array_equal(found("reinforce_pp_baseline", mixed, cells), want)


def test_asymmetric_clipping_keeps_a_rare_success_above_common_failures():
    rewards = [1.0] + [0.0] * 63  # 63/64 over std 1/8 = 7.9 clips to 3
    assert normalize_rewards(rewards, [0] * 64, "asym_clip")[0] == 3.0


def test_maxrl_refuses_rewards_that_it_cannot_divide_by():
    with pytest.raises(ValueError, match="none may be below 0"):
        found("maxrl", [-1.0, 1.0], [0, 0])


def test_the_gradient_of_distillation_is_that_of_the_reverse_kl():
    """Over all tokens of a small vocabulary, sum p A grad log p = -grad KL(student || teacher)."""
    for seed in range(50):
        rng = torch.Generator().manual_seed(seed)
        logits = torch.randn(5, generator=rng, dtype=torch.float64, requires_grad=True)
        teacher = torch.randn(5, generator=rng, dtype=torch.float64).log_softmax(-1)
        student = logits.log_softmax(-1)
        (expected,) = torch.autograd.grad(
            (student.exp() * (student - teacher)).sum(), logits, retain_graph=True
        )
        advantages = torch.from_numpy(reverse_kl(student.detach().numpy(), teacher.numpy()))
        (ours,) = torch.autograd.grad(-(student.detach().exp() * advantages * student).sum(), logits)
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=0)
