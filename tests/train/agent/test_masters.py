"""Weights of fewer bits than float32 move as float32 ones do: the optimizer keeps masters of them."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.rollout.samplers.test_huggingface import make_engine

from shoal.train.agent.networks import split_optimizer
from shoal.train.agent.policy import Critic, policy_of, trained_parameters
from shoal.train.agent.update import MasterAdamW
from shoal.train.agent.weights import fill_optimizer, optimizer_tensors

RATE, STEPS = 1e-6, 30


def moved(kind, critic=False):
    """The share of weights whose master differs after updates at a small rate, and the networks after them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        engine = policy_of(make_engine())
        engine.module.to(kind)
        network = Critic(engine) if critic else engine.module
        policy = trained_parameters(engine.module)
        optimizer = split_optimizer(policy, network if critic else None, RATE, RATE, 0.0)
        before = [master.detach().clone() for group in optimizer.param_groups for master in group["params"]]
        parameters = [*policy, *(trained_parameters(network) if critic else [])]
        for step in range(STEPS):
            optimizer.zero_grad()
            for i, parameter in enumerate(parameters):
                noise = torch.Generator().manual_seed(1000 * step + i)
                parameter.grad = torch.randn(parameter.shape, generator=noise).to(kind).to(parameter.dtype)
            optimizer.step()
    after = [master.detach() for group in optimizer.param_groups for master in group["params"]]
    changed = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return changed / sum(a.numel() for a in after), parameters, optimizer


@pytest.mark.parametrize("critic", [False, True])
def test_bfloat16_weights_move_at_a_small_learning_rate(critic):
    share, _, _ = moved(torch.float32, critic)
    share_16, parameters, optimizer = moved(torch.bfloat16, critic)
    assert share_16 >= 0.95 * share > 0.9
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    for parameter, master in zip(parameters, masters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(parameter.detach(), master.detach().to(parameter.dtype))


def test_many_small_steps_add_up_in_a_bfloat16_weight():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([{"params": [weight], "lr": 1e-4}])
    for _ in range(100):  # each step of Adam is about 1e-4, and 1 - 1e-4 rounds to 1 in bfloat16
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.allclose(weight.detach().float(), torch.tensor(0.99), atol=2e-3)


def test_masters_are_kept_in_checkpoints_and_go_on_from_there(tmp_path):
    def steps(weight, optimizer, n):
        for _ in range(n):
            weight.grad = torch.full_like(weight, 0.5)
            optimizer.step()

    made = []
    for _ in range(2):
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        made.append((weight, MasterAdamW([{"params": [weight], "lr": 1e-4}])))
    (straight, optimizer), (resumed, fresh) = made
    steps(straight, optimizer, 7)
    save_file(optimizer_tensors(optimizer), tmp_path / "optimizer.safetensors")
    with torch.no_grad():
        resumed.copy_(straight)
    fill_optimizer(fresh, load_file(tmp_path / "optimizer.safetensors"))
    steps(straight, optimizer, 60)
    steps(resumed, fresh, 60)
    assert torch.equal(straight, resumed)
    assert torch.equal(optimizer.masters()["0.master"], fresh.masters()["0.master"])


def test_float32_weights_are_their_own_masters():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = MasterAdamW([{"params": [weight], "lr": 1e-4}])
    assert optimizer.param_groups[0]["params"][0] is weight
    assert optimizer.masters() == {}
