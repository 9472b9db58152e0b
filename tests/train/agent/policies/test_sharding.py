"""Networks in shards over two processes are trained as whole ones are, and each process holds half of what it takes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.train.agent.checkpoints import tensors_of
from tests.train.agent.policies.sharded_updates import CASES
from tests.train.agent.processes.test_processes import ended_early, launch, same_run
from tests.train.agent.tiny_model import write_tiny_model
from torch import nn

from shoal.core.errors import DataError
from shoal.train.agent.config import compose_config
from shoal.train.agent.policies.policy import TinyPolicy
from shoal.train.agent.processes.weights import fill, without_tied
from shoal.train.agent.run.checkpoint import list_checkpoints
from shoal.train.agent.trainer import AgentTrainer

pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.timeout(1800),  # processes that start on a busy machine
]
ROUGH = {"llama-autocast", "llama-bfloat16", "lora-bfloat16"}  # eight bits of a sum depend on its order
FINE = 5e-5  # some CPUs add in an order that depends on the shape, and Adam lets the rounding of small gradients grow


CUT = """
import sys
import torch
from shoal.core.errors import ConfigError
from shoal.samplers.tiny import TinyEngine
from shoal.train.agent.processes.distributed import Processes
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.sharding import ShardedPolicy

torch.distributed.init_process_group("gloo")
policy = policy_of(TinyEngine(["Up"]))
if sys.argv[1] == "bfloat16":
    policy.module.blocks[0].extra = torch.nn.Parameter(torch.ones(2).bfloat16())
elif sys.argv[1] == "experts":
    policy.module.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
else:
    policy.module.scale = torch.nn.Parameter(torch.tensor(1.0))
try:
    ShardedPolicy(policy, Processes(0, 1, sharded=True))
except ConfigError as error:
    print(error)
torch.distributed.destroy_process_group()
"""


def two_processes(folder, *cases):
    """What each of two processes saw of its network in shards and of its whole twin."""
    script = Path(__file__).with_name("sharded_updates.py")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    start.append(f"--log-dir={folder / 'logs'}")
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # memory that is let go is seen to be so
    env = {
        **os.environ,
        **returned,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path),
    }
    command = [*start, str(script), str(folder), *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "told.json").read_text())


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return two_processes(tmp_path_factory.mktemp("trained"), *CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_network_in_shards_is_trained_as_a_whole_one_and_takes_half_the_memory(told, case):
    tolerance = 3e-3 if case in ROUGH else FINE
    # masters as near as that may round to neighbours
    weights = 2**-7 if case == "llama-bfloat16" else tolerance
    for seen in (process[case] for process in told):
        assert seen["moved"] > 5e-3
        assert seen["gap"] <= weights
        assert seen["state_gap"] <= tolerance
        for row, other in zip(*seen["metrics"], strict=True):
            assert row == pytest.approx(other, abs=10 * tolerance if case in ROUGH else 1e-5)
        # checkpoints are the same, and each goes on from that of the other
        assert seen["files"][0] == seen["files"][1]
        assert seen["file_gap"] <= weights
        assert seen["resumed_gap"] <= weights
        # what this process holds is half, to a row of each parameter: parameters, gradients and optimizer state at
        # the optimizer's step, and parameters between the forward and the backward pass
        for held, whole in seen["held"]:
            assert held == pytest.approx(whole / 2, rel=0.005)
    # the passes of the two were not equally many, and who had nothing left went along
    assert sum(process[case]["idle"] for process in told) > 0
    # before the updates, after them and after another one under the same version, one process generates while the
    # other does not, as a whole network would
    for own, other in told[0][case]["answers"]:
        for (tokens, logprobs), (other_tokens, other_logprobs) in zip(own, other, strict=True):
            same = next((i for i in range(len(tokens)) if tokens[i] != other_tokens[i]), len(tokens))
            assert case in ROUGH or tokens == other_tokens  # among rough numbers near-ties are common
            assert same
            assert logprobs[:same] == pytest.approx(other_logprobs[:same], abs=10 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_transformers_model_is_trained_in_shards_as_by_one_process(tmp_path, rank):
    write_tiny_model(tmp_path / "model")
    settings = [
        "engine.name=huggingface", f"engine.model={tmp_path / 'model'}", f"model.lora.rank={rank}",
        "warmup.steps=3", "trainer.iterations=3", "agent_proxy.max_tokens=auto",
        "agent_proxy.prompt.first='{observation}'",
        "algorithm.micro_batch_tokens=1500", "algorithm.learning_rate=0.0001", "warmup.learning_rate=0.0001",
        *(["algorithm.rollout_correction.method=none"] if rank else []),
    ]  # fmt: skip
    for n in (1, 2):
        done = launch(tmp_path / str(n), n, *settings, "trainer.sharding=full")
        assert done.returncode == 0, done.stderr
    first, *_, last = list_checkpoints(tmp_path / "1" / "checkpoints")
    one, other = (tensors_of(folder, ["engine"]) for folder in (first, last))
    assert any(not torch.equal(one[name], other[name]) for name in one)  # it was trained
    # some gradients are near Adam's epsilon: their rounding grows
    same_run(tmp_path / "1", tmp_path / "2", 5e-4)


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
    assert ended_early(tmp_path / "run")


def test_alone_a_run_with_shards_is_a_run_without(tmp_path):
    config = compose_config(
        "demo", ["trainer.sharding=full", f"run_dir={tmp_path}", "use_parallel_envs=false"]
    )
    with AgentTrainer(config) as trainer:
        assert isinstance(trainer.policy, TinyPolicy)
        assert "sharded" not in trainer.describe()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("bfloat16", "cannot cut this network.*float32 if dtypes differ"),
        ("scalar", "cannot cut this network.*scalar"),
        ("experts", "miss one of the 1 modules of model.experts"),
    ],
)
def test_a_network_that_cannot_be_cut_is_refused(tmp_path, fault, message):
    script = tmp_path / "cut.py"
    script.write_text(CUT)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    command = [*start, f"--log-dir={tmp_path / 'logs'}", str(script), fault]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert re.search(message, done.stdout), done.stdout + done.stderr


def test_weights_of_another_network_are_not_put_in_place():
    one = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    one[1].weight = one[0].weight  # tied
    own = one.state_dict(keep_vars=True)
    weights = {name: value + 1 for name, value in own.items()}
    weights["1.weight"] = weights["0.weight"]
    single, tied = without_tied(weights)
    assert tied == {"1.weight": "0.weight"}
    before = {name: value.clone() for name, value in one.state_dict().items()}
    for wrong in ({**single, "2.bias": torch.ones(3)}, {**single, "0.weight": torch.ones(2, 3)}):
        with pytest.raises(DataError, match="another network"):
            fill(one.state_dict(keep_vars=True), wrong)
        assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())
    fill(one.state_dict(keep_vars=True), single)
    assert torch.equal(one[1].weight, weights["0.weight"])
    with pytest.raises(DataError, match="another network"):
        fill(one.state_dict(keep_vars=True), {n: value + 1 for n, value in single.items() if n != "1.bias"})
    assert torch.equal(one[1].weight, weights["0.weight"])
