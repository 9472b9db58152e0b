"""Weights of fewer bits than float32 move as float32 ones do: the optimizer keeps masters of them."""

import torch
from safetensors.torch import load_file, save_file

from shoal.train.agent.optimizer import MasterAdamW
from shoal.train.agent.processes.weights import fill_optimizer, optimizer_tensors


def test_many_small_steps_add_up_in_a_bfloat16_weight():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([{"params": [weight], "lr": 1e-4}])
    for _ in range(100):  # each step of Adam is about 1e-4, and 1 - 1e-4 rounds to 1 in bfloat16
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.allclose(weight.detach().float(), torch.tensor(0.99), atol=2e-3)
    assert torch.equal(weight.detach(), optimizer.masters()["0.master"].to(torch.bfloat16))


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
