"""Deterministic algorithms are on while a network is trained, and at no other time."""

import pytest
import torch
from tests.train.agent.run.test_crash_points import SMALL, state_of

from shoal.core.errors import ConfigError
from shoal.testing.determinism import updated_twice
from shoal.train.agent.algorithms.losses import LOSSES, policy_loss
from shoal.train.agent.config import compose_config
from shoal.train.agent.processes.determinism import deterministic
from shoal.train.agent.trainer import AgentTrainer

TWO = [*SMALL, "trainer.iterations=2", "trainer.eval_every=2"]


@pytest.fixture
def in_loss():
    """What is called in each loss of an update."""
    calls, clip = [], LOSSES["clip"].compute

    @policy_loss("clip", replace=True)
    def loss(tokens, config):
        for call in calls:
            call(tokens)
        return clip(tokens, config)

    yield calls
    policy_loss("clip", replace=True)(clip)


def train(folder, *overrides):
    with AgentTrainer(compose_config("demo", [*TWO, f"run_dir={folder}", *overrides])) as trainer:
        for row in trainer.train():
            assert torch.get_deterministic_debug_mode() == 0
            yield row


def test_the_mode_is_on_in_an_update_alone_where_it_is_chosen_and_changes_no_weights_on_a_cpu(
    tmp_path, in_loss
):
    seen = set()
    in_loss.append(lambda _: seen.add(torch.are_deterministic_algorithms_enabled()))
    for chosen, on in (("true", True), ("auto", False)):
        seen.clear()
        list(train(tmp_path / chosen, f"engine.deterministic={chosen}"))
        assert seen == {on}
    assert state_of(tmp_path / "true") == state_of(tmp_path / "auto")


def test_a_mode_that_the_caller_has_set_is_there_again_after_an_update():
    torch.set_deterministic_debug_mode("warn")
    try:
        with deterministic(True):
            assert torch.get_deterministic_debug_mode() == 2
        assert torch.get_deterministic_debug_mode() == 1
    finally:
        torch.set_deterministic_debug_mode("default")


def test_an_operation_without_a_deterministic_algorithm_is_named_with_the_way_out():
    def put():
        torch.zeros(3).put_(torch.tensor([1]), torch.tensor([2.0]))

    with (
        pytest.raises(ConfigError, match=r"put_ does not have .*engine\.deterministic=false"),
        deterministic(True),
    ):
        put()
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(False):
        put()


def test_an_error_of_a_loss_is_not_taken_for_one_of_the_mode():
    with pytest.raises(RuntimeError, match="out of memory"), deterministic(True):
        raise RuntimeError("out of memory")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_same_update_twice_gives_the_same_weights(device):
    one, other = updated_twice(device)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.gpu
def test_a_resumed_run_on_a_gpu_ends_in_the_weights_of_one_that_was_not_interrupted(tmp_path):
    gpu = ["engine.device=cuda", "trainer.iterations=4", "trainer.save_every=2"]
    list(train(tmp_path / "straight", *gpu))
    for row in train(tmp_path / "resumed", *gpu):
        if row["iteration"] == 3:
            break
    list(train(tmp_path / "resumed", *gpu, "resume=true"))
    assert state_of(tmp_path / "resumed") == state_of(tmp_path / "straight")
