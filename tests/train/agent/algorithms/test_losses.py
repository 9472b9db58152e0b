import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.agent.algorithms.losses import (
    LOSSES,
    Tokens,
    kl_penalty,
    rollout_correction,
)
from shoal.train.agent.config import Algorithm

LOG = torch.log
ZERO = torch.zeros


@pytest.mark.parametrize(
    ("method", "level", "cap", "floor", "expected"),
    # weights .3/.1 = 3, .6/.4 = 1.5, .05/.5 = .1; of the sample 3 * 1.5 * .1 = .45
    [("truncate", "token", 2.0, 0.0, [2.0, 1.5, 0.1]), ("mask", "token", 2.0, 0.0, [0.0, 1.5, 0.1]),
     ("mask", "token", 2.0, 0.5, [0.0, 1.5, 0.0]), ("truncate", "sequence", 2.0, 0.0, [0.45] * 3),
     ("truncate", "sequence", 0.4, 0.0, [0.4] * 3), ("mask", "sequence", 2.0, 0.0, [0.45] * 3),
     ("mask", "sequence", 0.4, 0.0, [0.0] * 3), ("mask", "sequence", 2.0, 0.5, [0.0] * 3)],
)  # fmt: skip
def test_importance_weights_by_hand(method, level, cap, floor, expected):
    old, sampled = LOG(torch.tensor([0.3, 0.6, 0.05])), LOG(torch.tensor([0.1, 0.4, 0.5]))
    found = rollout_correction(old, sampled, cap, method, level=level, floor=floor)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_a_token_that_the_sampler_held_all_but_impossible_is_masked():
    """Its weight is beyond float32, and infinity times 0 is no number."""
    found = rollout_correction(torch.tensor([0.0, 0.0]), torch.tensor([-100.0, 0.0]), 2.0, "mask")
    assert found.tolist() == [0.0, 1.0]


@given(st.integers(0, 50))
def test_k1_and_k3_estimate_the_true_kl(seed):
    rng = np.random.default_rng(seed)
    p, q = (torch.from_numpy(rng.dirichlet(np.ones(5))) for _ in range(2))
    true = float((p * (p.log() - q.log())).sum())
    for estimator in ("k1", "k3"):  # the expectation over p, exactly
        assert float((p * kl_penalty(p.log(), q.log(), estimator)).sum()) == pytest.approx(true, abs=1e-9)


@given(st.integers(0, 50))
def test_k2_has_the_gradient_of_the_reverse_kl(seed):
    """Of five logits, in expectation over the policy's own samples; k3 points elsewhere."""
    rng = np.random.default_rng(seed)
    logits, reference = torch.from_numpy(rng.normal(size=(2, 5)))
    logits.requires_grad_()

    def gradient(loss):
        return torch.autograd.grad(loss, logits)[0]

    logprobs, q = logits.log_softmax(0), reference.log_softmax(0)
    true = gradient((logprobs.exp() * (logprobs - q)).sum())
    found = {}
    for estimator in ("k2", "k3"):
        logprobs = logits.log_softmax(0)
        found[estimator] = gradient((logprobs.exp().detach() * kl_penalty(logprobs, q, estimator)).sum())
    torch.testing.assert_close(found["k2"], true)
    assert not torch.allclose(found["k3"], true, rtol=1e-3)


@pytest.mark.parametrize("gap", [-1e4, -100.0, -88.0, 88.0, 89.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_no_ratio_is_so_far_off_that_losses_and_gradients_are_not_finite(gap, advantage):
    old, signal, rows = ZERO(2), torch.full((2,), advantage), torch.tensor([0, 0])
    for name in ("clip", "gspo", "cispo"):
        new = torch.full((2,), gap, requires_grad=True)
        losses, _ = LOSSES[name].compute(Tokens(new, old, signal, rows), Algorithm(policy_loss=name))
        (gradient,) = torch.autograd.grad(losses.sum(), new)
        assert torch.isfinite(torch.stack([losses, gradient])).all(), name
    for estimator in ("k1", "k2", "k3"):
        new = torch.full((2,), gap, requires_grad=True)
        penalty = kl_penalty(new, old, estimator)
        (gradient,) = torch.autograd.grad(penalty.sum(), new)
        assert torch.isfinite(torch.stack([penalty, gradient])).all(), estimator
