"""The optimizers of `shoal.train` step as torch's do, and import less."""

import subprocess
import sys
import textwrap

import pytest
import torch

from shoal.train.optimizers import Adam, AdamW

PAIRS = [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_every_step_is_that_of_torch(ours, theirs, fused):
    start = torch.arange(12.0).reshape(3, 4) / 7
    trained = []
    for kind in (ours, theirs):
        weights = torch.nn.Parameter(start.clone())
        settings = {"lr": 0.1, "weight_decay": 0.01, "fused": fused}
        optimizer, hooked, losses = kind([weights], **settings), [], []
        for step in range(4):
            if step == 2:  # goes on as a new one from the state of the first
                state, optimizer = optimizer.state_dict(), kind([weights], **settings)
                optimizer.load_state_dict(state)
                optimizer.register_step_post_hook(lambda *_, hooked=hooked: hooked.append("stepped"))

            def loss(optimizer=optimizer, weights=weights):
                optimizer.zero_grad()
                value = (weights.sin() ** 2).sum()
                value.backward()
                return value

            losses.append(optimizer.step(loss).item())
        assert hooked == ["stepped"] * 2
        trained.append((weights.detach(), losses))
    assert torch.equal(trained[0][0], trained[1][0])
    assert trained[0][1] == trained[1][1]


def test_an_update_begins_without_torchs_compiler():
    code = """
        import sys
        import numpy as np, torch
        from gymnasium import spaces
        from shoal.train.ppo.arrays.spaces import ActionRows, ObservationRows
        from shoal.train.agent.optimizer import MasterAdamW
        from shoal.train.ppo.config import PPOConfig
        from shoal.train.ppo.learner import TorchLearner
        from shoal.train.ppo.networks import build_network

        actions = ActionRows(spaces.Discrete(2))
        for space in (spaces.Box(-1, 1, (3,)), spaces.Box(0, 255, (12, 12, 3), np.uint8)):
            network = build_network(ObservationRows(space), actions, PPOConfig(), seed=0)
            rows = torch.zeros(2, ObservationRows(space).size)
            for optimizer in (
                TorchLearner(network, actions).optimizer,
                MasterAdamW([{"params": list(network.parameters()), "lr": 0.1}]),
            ):
                optimizer.zero_grad()
                (network.policy(rows).sum() + network.value(rows).sum()).backward()
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
        print(*[name for name in ("torch._dynamo", "sympy") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")
