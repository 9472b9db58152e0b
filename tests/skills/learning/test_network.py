from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import DataError
from shoal.maths.distributions import sample
from shoal.skills.learning.network import Adam, Network, Shape

torch = pytest.importorskip("torch")
SHAPE = Shape(7, 5, 4)


def torch_loss(flat, net: Network, batch, clip: float, entropy_coef: float, value_coef: float):
    """The PPO loss from its definition, in another library."""
    views, at = [], 0
    for layer in SHAPE.layers:
        size = int(np.prod(layer))
        views.append(flat[at : at + size].reshape(layer))
        at += size
    w0, b0, w1, b1, wh, bh = views
    seen, acts, old, gain, returns = (torch.from_numpy(np.asarray(part, None)) for part in batch)
    heads = torch.relu(torch.relu(seen.double() @ w0 + b0) @ w1 + b1) @ wh + bh
    distribution = torch.distributions.Categorical(logits=heads[:, :-1])
    ratio = (distribution.log_prob(acts) - old.double()).exp()
    surrogate = torch.min(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    value = (heads[:, -1] - returns.double()).pow(2)
    return -surrogate.mean() + value_coef * value.mean() - entropy_coef * distribution.entropy().mean()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_the_gradient_by_hand_is_the_one_of_autograd(seed: int) -> None:
    rng = np.random.default_rng(seed)
    net = Network.initial(SHAPE, rng)
    net.flat += rng.normal(0, 0.5, net.flat.shape).astype(np.float32)
    batch = (
        rng.normal(size=(16, 7)).astype(np.float32),
        rng.integers(0, 4, 16),
        np.log(rng.uniform(0.05, 0.9, 16)).astype(np.float32),
        rng.normal(size=16).astype(np.float32),
        rng.normal(size=16).astype(np.float32),
    )
    ours, losses = net.gradient(*batch, clip=0.2, entropy_coef=0.03, value_coef=0.7)
    flat = torch.from_numpy(net.flat.astype(np.float64)).requires_grad_()
    loss = torch_loss(flat, net, batch, 0.2, 0.03, 0.7)
    loss.backward()
    np.testing.assert_allclose(ours, flat.grad.numpy(), atol=2e-5, rtol=2e-4)
    total = losses.policy + 0.7 * losses.value - 0.03 * losses.entropy
    assert total == pytest.approx(loss.item(), abs=1e-4, rel=1e-4)


def test_adam_takes_the_steps_of_its_paper() -> None:
    """arXiv:1412.6980, algorithm 1, in float64; the gradient's norm is clipped to 0.5 before."""
    rng = np.random.default_rng(0)
    flat = rng.normal(size=20).astype(np.float32)
    theirs, mean, square = flat.astype(np.float64), np.zeros(20), np.zeros(20)
    ours = Adam(20)
    for t in range(1, 51):
        gradient = rng.normal(size=20).astype(np.float32)
        clipped = gradient.astype(np.float64) * min(1, 0.5 / np.linalg.norm(gradient))
        mean, square = 0.9 * mean + 0.1 * clipped, 0.999 * square + 0.001 * clipped**2
        theirs -= 0.01 * (mean / (1 - 0.9**t)) / (np.sqrt(square / (1 - 0.999**t)) + 1e-5)
        ours.step(flat, gradient, 0.01, 0.5)
    np.testing.assert_allclose(flat, theirs, atol=2e-6)


def test_sampling_follows_the_probabilities() -> None:
    probs = np.array([0.1, 0.0, 0.6, 0.3], np.float32)
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.tile(probs, (20_000, 1)))
    drawn = sample(logprobs, np.random.default_rng(0).random(20_000, np.float32))
    shares = np.bincount(drawn, minlength=4) / 20_000
    assert shares[1] == 0
    np.testing.assert_allclose(shares, probs, atol=0.015)  # four standard deviations of 20 000 draws
    assert sample(np.log(np.full((1, 4), 0.25, np.float32)), np.array([1.0], np.float32))[0] == 3


def test_params_go_to_a_file_and_back() -> None:
    net = Network.initial(SHAPE, np.random.default_rng(0))
    net.flat[:] = np.arange(net.flat.size)
    assert (Network.from_params(net.params()).flat == net.flat).all()


def test_an_experts_arrays_have_the_names_and_places_of_their_layers() -> None:
    net = Network(Shape(2, 3, 4))
    net.flat[:] = np.arange(net.flat.size)
    heads = np.arange(21, 36).reshape(
        3, 5
    )  # behind 2 x 3 + 3 and 3 x 3 + 3 numbers; the critic's column is the last
    expected = {
        "torso/0/weight": np.arange(6).reshape(2, 3), "torso/0/bias": [6, 7, 8],
        "torso/1/weight": np.arange(9, 18).reshape(3, 3), "torso/1/bias": [18, 19, 20],
        "actor/weight": heads[:, :4], "actor/bias": [36, 37, 38, 39],
        "critic/weight": heads[:, 4:], "critic/bias": [40],
    }  # fmt: skip
    found = net.params()
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].flags.c_contiguous


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("actor/bias"), "wrong: actor/bias"),
        (lambda p: p.update(extra=np.zeros(1)), "wrong: extra"),
        (lambda p: p.update({"torso/1/weight": np.zeros((3, 3), np.float32)}), "must have shape"),
        (lambda p: p.update({"torso/0/weight": np.zeros(3, np.float32)}), "must be a matrix"),
        (lambda p: p.update({"actor/bias": np.zeros((4, 1), np.float32)}), "actor bias a vector"),
    ],
)
def test_a_file_that_is_no_expert_is_refused(change, message: str) -> None:
    params = Network.initial(SHAPE, np.random.default_rng(0)).params()
    change(params)
    with pytest.raises(DataError, match=message):
        Network.from_params(params)


def test_a_network_does_not_react_to_masked_inputs() -> None:
    net = Network.initial(SHAPE, np.random.default_rng(0))
    mask = net.mask_inputs([2, 5])
    seen = np.random.default_rng(1).normal(size=(6, 7)).astype(np.float32)
    other = seen.copy()
    other[:, [2, 5]] += 100
    assert (net.forward(seen)[0] == net.forward(other)[0]).all()
    assert mask.sum() == mask.size - 2 * SHAPE.hidden


def test_an_excluded_action_is_never_taken_and_never_comes_back() -> None:
    rng = np.random.default_rng(3)
    net, other = Network.initial(SHAPE, rng), Network.initial(SHAPE, np.random.default_rng(3))
    net.exclude_actions([1, 3])
    seen = rng.normal(size=(64, 7)).astype(np.float32)
    adam = Adam(net.flat.size)
    for _ in range(20):
        logprobs, _ = net.forward(seen)
        acts = sample(logprobs, rng.random(64, np.float32))
        assert set(acts.tolist()) == {0, 2}
        assert np.exp(logprobs[:, [1, 3]]).max() == 0
        old = logprobs[np.arange(64), acts]
        gain, returns = rng.normal(size=(2, 64)).astype(np.float32)
        gradient, losses = net.gradient(
            seen, acts, old, gain, returns, clip=0.2, entropy_coef=0.1, value_coef=0.5
        )
        assert not gradient[np.isin(np.arange(net.flat.size), _columns_of(net, [1, 3]))].any()
        assert np.isfinite(losses).all()
        adam.step(net.flat, gradient, 0.05, 0.5)
    # Among the actions that are left the odds begin as they would have been.
    free, _ = other.forward(seen)
    begun = Network.initial(SHAPE, np.random.default_rng(3))
    begun.exclude_actions([1, 3])
    bound, _ = begun.forward(seen)
    np.testing.assert_allclose(free[:, 0] - free[:, 2], bound[:, 0] - bound[:, 2], atol=1e-6)


def _columns_of(net: Network, actions: list[int]) -> np.ndarray:
    """Where in `flat` the weights and biases of these actions stand."""
    marks = Network(net.shape)
    marks.wh[:, actions] = 1
    marks.bh[actions] = 1
    return np.flatnonzero(marks.flat)


def test_a_new_expert_begins_with_orthogonal_weights_and_a_nearly_uniform_policy() -> None:
    net = Network.initial(Shape(9, 6, 4), np.random.default_rng(0))

    def lengths(matrix: np.ndarray) -> np.ndarray:
        return np.linalg.svd(matrix.astype(np.float64), compute_uv=False)

    for weights, gain in ((net.w0, 2**0.5), (net.w1, 2**0.5), (net.wh[:, :-1], 0.01), (net.wh[:, -1:], 1.0)):
        np.testing.assert_allclose(lengths(weights), gain, rtol=1e-5)
    assert not any(bias.any() for bias in (net.b0, net.b1, net.bh))
    logprobs, _ = net.forward(np.random.default_rng(1).normal(size=(20, 9)).astype(np.float32))
    np.testing.assert_allclose(np.exp(logprobs), 0.25, atol=0.02)
