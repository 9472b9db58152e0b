"""Networks in shards over two processes are trained as whole ones are, and each process holds half of what it takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.train.agent.test_processes import launch, same_run
from tests.train.agent.tiny_model import write_tiny_model
from torch import nn

from shoal.core.errors import ConfigError, DataError
from shoal.rollout.samplers.tiny import TinyEngine
from shoal.train.agent.checkpoint import list_checkpoints
from shoal.train.agent.config import compose_config
from shoal.train.agent.distributed import Processes, ShardedPolicy, _refuse_mixed, blocks_of
from shoal.train.agent.policy import TinyPolicy, policy_of
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.agent.weights import fill, whole_weights, without_twins

pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.timeout(600),  # processes that start on a busy machine
]
FAST = ["tiny", "llama", "lora"]
SLOW = [
    "llama-critic",
    "llama-checkpointing",
    "llama-autocast",
    "llama-bfloat16",
    "llama-last-layer",
    "mixtral",
    "olmoe",
    "qwen3-moe",
    "paired",
    "lora-bfloat16",
]
ROUGH = {"llama-autocast", "llama-bfloat16"}  # eight bits of a sum depend on its order
RARE = {"mixtral"}  # gradients of an expert with a token or two are near Adam's epsilon: their rounding grows


def two_processes(folder, *cases):
    """What each of two processes saw of its network in shards and of its whole twin."""
    script = Path(__file__).with_name("sharded_updates.py")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    command = [*start, str(script), str(folder), *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    # Threads that outlive the group can abort a process that ends.
    assert [json.loads((folder / f"left-{rank}.json").read_text()) for rank in range(2)] == [[], []]
    return json.loads((folder / "told.json").read_text())


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return two_processes(tmp_path_factory.mktemp("fast"), *FAST)


@pytest.fixture(scope="module")
def told_slowly(tmp_path_factory):
    return two_processes(tmp_path_factory.mktemp("slow"), *SLOW)


def check(told, case):
    tolerance = 3e-3 if case in ROUGH else 2e-5 if case in RARE else 2e-6
    weights = (
        2**-7 if case == "llama-bfloat16" else tolerance
    )  # masters as near as that may round to neighbours
    for seen in (process[case] for process in told):
        assert seen["moved"] > 5e-3
        assert seen["gap"] <= weights
        assert seen["state_gap"] <= tolerance
        for row, other in zip(*seen["metrics"], strict=True):
            assert row == pytest.approx(other, abs=10 * tolerance if case in ROUGH else 1e-5)
        # checkpoints have the same files, and each goes on from that of the other
        assert seen["files"]
        assert seen["file_gap"] <= weights
        assert seen["resumed_gap"] <= weights
        # what this process holds is half, to a row of each parameter: parameters, gradients and optimizer state at
        # the optimizer's step, and parameters between the forward and the backward pass
        for held, whole in seen["held"]:
            assert held == pytest.approx(whole / 2, rel=0.005)
    # the passes of the two were not equally many, and who had nothing left went along
    assert sum(process[case]["idle"] for process in told) > 0
    # before the updates and after, one process generates while the other does not, as a whole network would
    for own, other in told[0][case]["answers"]:
        assert own == other


@pytest.mark.parametrize("case", FAST)
def test_a_network_in_shards_is_trained_as_a_whole_one_and_takes_half_the_memory(told, case):
    check(told, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_every_kind_of_network_is_trained_in_shards_as_a_whole_one(told_slowly, case):
    check(told_slowly, case)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_transformers_model_is_trained_in_shards_as_by_one_process(tmp_path, rank):
    write_tiny_model(tmp_path / "model")
    settings = [
        "engine.name=huggingface", f"engine.model={tmp_path / 'model'}", f"model.lora.rank={rank}",
        "warmup.steps=3", "trainer.iterations=3", "agent_proxy.prompt.first='{observation}'",
        "algorithm.micro_batch_tokens=1500", "algorithm.learning_rate=0.001",
        *(["algorithm.rollout_correction.method=none"] if rank else []),
    ]  # fmt: skip
    for n in (1, 2):
        done = launch(tmp_path / str(n), n, *settings, "trainer.sharding=full")
        assert done.returncode == 0, done.stderr
    files = ("adapter_model.safetensors" if rank else "model.safetensors", "critic.safetensors")
    first, *_, last = list_checkpoints(tmp_path / "1" / "checkpoints")
    one, other = (next(folder.rglob(files[0])).read_bytes() for folder in (first, last))
    assert one != other  # it was trained
    same_run(tmp_path / "1", tmp_path / "2", 1e-5, files)


@pytest.mark.slow
def test_an_error_amid_a_pass_of_all_ends_all(tmp_path, monkeypatch):
    """The second process fails in its backward pass, while the first waits for its shards."""
    (tmp_path / "failing.py").write_text(
        "import os, sys\n"
        "from shoal.train.agent import update\n"
        "loss = update.token_loss\n"
        "def failing(*a, **k):\n"
        "    if os.environ.get('RANK') == '1':\n"
        "        raise OSError('the disk is on fire')\n"
        "    return loss(*a, **k)\n"
        "update.token_loss = failing\n"
        "from shoal.cli.main import main\n"
        "sys.exit(main())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = launch(tmp_path / "run", 2, "trainer.iterations=2", "trainer.sharding=full", module="failing")
    assert done.returncode != 0
    assert "the disk is on fire" in done.stderr
    assert not (tmp_path / "run" / "summary.json").exists()


def test_alone_a_run_with_shards_is_a_run_without(tmp_path):
    config = compose_config(
        "demo", ["trainer.sharding=full", f"run_dir={tmp_path}", "use_parallel_envs=false"]
    )
    with AgentTrainer(config) as trainer:
        assert isinstance(trainer.policy, TinyPolicy)
        assert "sharded" not in trainer.describe()


def test_blocks_are_those_that_the_model_names_or_its_longest_list():
    engine = TinyEngine(["Up"])
    assert blocks_of(engine.model) == list(engine.model.blocks)
    model = nn.Sequential(nn.ModuleList([nn.GELU()]), nn.Linear(2, 2), nn.Linear(2, 2))
    model._no_split_modules = ["Linear"]
    assert blocks_of(model) == [model[1], model[2]]
    assert blocks_of(nn.Linear(2, 2)) == []


def test_parts_that_cannot_be_cut_are_refused_by_name():
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(ConfigError, match="got bfloat16 and float32"):
        _refuse_mixed(nn.Sequential(block), [block])
    block[1].requires_grad_(False)  # what is frozen may be of another kind
    _refuse_mixed(nn.Sequential(block), [block])
    block[0].scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="single number"):
        _refuse_mixed(nn.Sequential(block), [block])


def test_experts_that_are_modules_of_their_own_are_refused():
    block = nn.Module()
    block.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="0.experts has 2 modules"):
        _refuse_mixed(nn.Sequential(block), [block])


@pytest.mark.parametrize("missing", ["reset_iter_state", "set_force_sum_reduction_for_comms"])
def test_a_pytorch_too_old_for_shards_is_refused_before_anything_is_cut(monkeypatch, missing):
    from torch.distributed.fsdp import FSDPModule

    monkeypatch.delattr(FSDPModule, missing)
    engine = TinyEngine(["Up"])
    before = [type(part) for part in engine.model.modules()]
    with pytest.raises(ConfigError, match=r"newer PyTorch than .*: install it, or set trainer.sharding=none"):
        ShardedPolicy(policy_of(engine), Processes(0, 2, sharded=True))
    assert [type(part) for part in engine.model.modules()] == before


def test_weights_of_another_network_are_not_put_in_place():
    one = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    one[1].weight = one[0].weight  # tied
    weights = {name: value + 1 for name, value in whole_weights(one).items()}
    weights["1.weight"] = weights["0.weight"]
    single, twins = without_twins(weights)
    assert twins == {"1.weight": "0.weight"}
    before = {name: value.clone() for name, value in whole_weights(one).items()}
    for wrong in ({**single, "2.bias": torch.ones(3)}, {**single, "0.weight": torch.ones(2, 3)}):
        with pytest.raises(DataError, match="another network"):
            fill(one.state_dict(keep_vars=True), wrong)
        assert all(torch.equal(value, before[name]) for name, value in whole_weights(one).items())
    fill(one.state_dict(keep_vars=True), single)
    assert torch.equal(one[1].weight, weights["0.weight"])
    with pytest.raises(DataError, match="another network"):
        fill(one.state_dict(keep_vars=True), {n: value + 1 for n, value in single.items() if n != "1.bias"})
    assert torch.equal(one[1].weight, weights["0.weight"])
