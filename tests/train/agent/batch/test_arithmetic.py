import sys
import types

import numpy as np
import pytest
import torch
from tests.samplers.huggingface.test_huggingface import make_engine

from shoal.core.errors import MissingExtraError
from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.batch.packing import micro_batches
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.policy import score, training_mode
from shoal.train.boards import WandB


def gradient(engine, samples, checkpointing=False, precision="float32"):
    engine.module.zero_grad()
    with training_mode(engine.module, checkpointing, 0):
        for micro in micro_batches(samples, 1000, 0, "cpu", "packed"):
            score(engine, micro, 1.0, precision).logprobs.mean().backward()
    return torch.cat([p.grad.flatten() for p in engine.module.parameters()])


@pytest.mark.parametrize("kind", ["tiny", "huggingface"])
def test_checkpointed_layers_are_computed_twice_and_give_the_same_gradients(kind):
    engine = policy_of(
        make_engine() if kind == "huggingface" else TinyEngine(["Up"], TinyShape(16, 2, 2, 64))
    )
    layers = engine.module.model.layers if kind == "huggingface" else engine.module.blocks
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            tuple(rng.integers(6, 40, n).tolist()),
            np.array([1, n - 1]),
            {"advantages": np.ones(2, np.float32)},
        )
        for n in (5, 9, 3)
    ]
    gradient(engine, samples)  # the engine looks at its head once
    calls = []
    inner = layers[0].up if kind == "tiny" else layers[0].mlp.up_proj
    inner.register_forward_hook(lambda *_: calls.append(1))
    plain = gradient(engine, samples)
    n_plain = len(calls)
    checkpointed = gradient(engine, samples, checkpointing=True)
    assert len(calls) == 3 * n_plain  # once before, twice now
    torch.testing.assert_close(checkpointed, plain, atol=1e-7, rtol=1e-6)
    assert not any(part.training for part in engine.module.modules())
    low = gradient(engine, samples, precision="bfloat16")
    assert torch.isfinite(low).all()
    assert not torch.equal(low, plain)
    assert torch.nn.functional.cosine_similarity(low, plain, dim=0) > 0.99


def test_rows_go_to_wandb_and_a_resumed_run_keeps_its_name(tmp_path, monkeypatch):
    seen, logged = [], []

    class Run:
        id = "abc"

        def log(self, row, step):
            logged.append((row, step))

        def finish(self):
            logged.append("finished")

    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda **settings: seen.append(settings) or Run()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    for _ in range(2):
        board = WandB(tmp_path, "shoal", {"seed": 1}, enabled=True)
        board.add({"success": 0.5, "name": "x", "done": True}, 3)
        board.close()
        board.close()
    assert [settings["id"] for settings in seen] == [None, "abc"]
    assert logged == [({"success": 0.5}, 3), "finished"] * 2


def test_a_run_that_never_begins_is_never_shown_at_wandb(tmp_path, monkeypatch):
    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda **_: pytest.fail("nothing has happened yet")
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    WandB(tmp_path, "shoal", {"seed": 1}, enabled=True).close()
    assert not (tmp_path / "wandb.json").exists()


def test_wandb_is_off_by_default_and_its_absence_is_explained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    WandB(tmp_path, "shoal", {}).add({"success": 1.0}, 1)
    with pytest.raises(MissingExtraError, match="pip install wandb"):
        WandB(tmp_path, "shoal", {}, enabled=True)
