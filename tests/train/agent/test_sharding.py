"""Networks in shards over two processes are trained as whole ones are, and each process holds half of what it takes."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.train.agent.checkpoints import tensors_of
from tests.train.agent.sharded_updates import IN_SEVERAL_FILES, Trained, large
from tests.train.agent.test_processes import ended_early, launch, same_run
from tests.train.agent.tiny_model import write_tiny_model
from torch import nn

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import verify_folder
from shoal.rollout.samplers.tiny import TinyEngine
from shoal.train.agent.checkpoint import list_checkpoints
from shoal.train.agent.config import compose_config
from shoal.train.agent.distributed import ALONE, Processes, ShardedPolicy, _refuse_mixed, blocks_of
from shoal.train.agent.policy import TinyPolicy, policy_of
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.agent.weights import fill, read_shards, whole_weights, without_twins

pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.timeout(1800),  # processes that start on a busy machine
]
CASES = [
    "tiny",
    "llama",
    "lora",
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
ROUGH = {"llama-autocast", "llama-bfloat16", "lora-bfloat16"}  # eight bits of a sum depend on its order
RARE = {"mixtral"}  # gradients of an expert with a token or two are near Adam's epsilon: their rounding grows


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
    # Threads that outlive the group can abort a process that ends.
    assert [json.loads((folder / f"left-{rank}.json").read_text()) for rank in range(2)] == [[], []]
    return json.loads((folder / "told.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, two_processes(folder, *CASES, "large")


@pytest.fixture(scope="module")
def told(trained):
    return trained[1]


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
        # checkpoints hold the same, in files of each process, and each goes on from that of the other
        check_files(seen["files"], case in IN_SEVERAL_FILES)
        assert seen["file_gap"] <= weights
        assert seen["resumed_gap"] <= weights
        # one that the second process cannot write is told to both, and leaves no trace
        said, untouched = seen["refused"]
        assert "process 1 wrote no shards: OSError: no space left" in said
        assert untouched
        # what this process holds is half, to a row of each parameter: parameters, gradients and optimizer state at
        # the optimizer's step, and parameters between the forward and the backward pass
        for held, whole in seen["held"]:
            assert held == pytest.approx(whole / 2, rel=0.005)
    # the passes of the two were not equally many, and who had nothing left went along
    assert sum(process[case]["idle"] for process in told) > 0
    # before the updates and after, one process generates while the other does not, as a whole network would
    for own, other in told[0][case]["answers"]:
        assert own == other


def check_files(names, several):
    engine = [name for name in names if name.startswith("engine/")]
    assert len(engine) > 1 if several else len(engine) == 1
    shards = [name.split("/") for name in names if name not in engine]
    assert {folder for folder, _ in shards} <= {"optimizer", "critic"}
    for folder in {folder for folder, _ in shards}:
        assert {file.split("-")[1] for name, file in shards if name == folder} == {"00001", "00002"}
    assert any(file.split("-")[3] > "00001" for _, file in shards) == several


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_network_in_shards_is_trained_as_a_whole_one_and_takes_half_the_memory(told, case):
    check(told, case)


@pytest.mark.slow
def test_saving_and_loading_take_a_small_part_of_the_whole_in_each_process(told):
    for seen, part in zip((process["large"] for process in told), (1 / 4, 1 / 10), strict=True):
        assert seen["same"]
        assert seen["whole"] > 200e6
        assert seen["saving"] < part * seen["whole"]  # the first holds a file of the model
        assert seen["loading"] < 0.75 * seen["whole"]


def test_files_of_a_model_are_whole_blocks_up_to_a_size_and_tied_weights_are_in_one(monkeypatch):
    with torch.random.fork_rng():
        policy, _ = large()
    weights = policy.module.state_dict(keep_vars=True)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    monkeypatch.setattr("shoal.train.agent.policy.FILE", 27_000_000)
    # a block has 4 x 512 x 512 + 3 x 512 x 1408 + 2 x 512 numbers of four bytes: 12,849,152 bytes, two in a file
    blocks = [["lm_head", "embed_tokens", "0", "1"], ["2", "3"], ["4", "5", "norm"]]
    found = policy.files()
    assert sorted(name for names in found for name in names) == sorted(weights)
    assert [{re.sub(r"model\.(layers\.)?", "", name).split(".")[0] for name in names} for names in found] == [
        {*names} for names in blocks
    ]


class Trap:
    """A pickle that writes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.slow
def test_one_process_reads_what_two_wrote_and_reads_no_pickle_beside_it(trained, tmp_path):
    checkpoint = tmp_path / "step-000001"
    shutil.copytree(trained[0] / "tiny" / "step-000001", checkpoint)
    for name in ("optimizer", "critic"):  # where FileSystemReader looks; hidden files are in no manifest
        (checkpoint / name / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    verify_folder(checkpoint)
    fresh = Trained("tiny", ALONE, tmp_path / "reference")
    fresh.load(checkpoint)
    own = {**fresh.state(), **{f"optimizer.{name}": value for name, value in fresh.moments().items()}}
    written = tensors_of(checkpoint)
    assert written.keys() == own.keys()
    for name, value in written.items():
        assert torch.equal(own[name], value), name
    assert not (tmp_path / "sprung").exists()
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()


def test_any_cut_of_a_tensor_is_read_and_a_missing_shard_is_named(tmp_path):
    whole = torch.arange(21.0).view(7, 3)
    cuts = [(0, 3), (3, 6), (6, 7), (7, 7)]  # the last of four processes has nothing
    for rank, (begin, end) in enumerate(cuts, 1):
        place = json.dumps({"0.exp_avg": {"saved_offsets": [begin, 0]}})
        file = tmp_path / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        save_file({"0.exp_avg": whole[begin:end].clone()}, file, {"DCP_SHARDING_INFO": place})
    found = read_shards(tmp_path, {"0.exp_avg": torch.nn.Parameter(torch.zeros(7, 3))}.get)
    assert torch.equal(found["0.exp_avg"], whole)
    (tmp_path / "nothing").mkdir()  # of an optimizer that took no step
    assert read_shards(tmp_path / "nothing", {}.get) == {}
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(DataError, match=r"lacks shards of 0\.exp_avg"):
        read_shards(tmp_path, lambda name: None)


def test_processes_that_do_not_see_the_same_folder_are_told(tmp_path):
    """As where each of two machines has a disk of its own under the same name."""
    processes = Processes(1, 2, sharded=True)
    answers = iter([[tmp_path / "elsewhere"]])
    processes.together = lambda work: next(answers, None) or [work()]
    folder = processes.write_folder(tmp_path / "step-000001")
    with pytest.raises(ConfigError, match="process 1 does not see .*must lie where all"), folder:
        raise AssertionError


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
    first, *_, last = list_checkpoints(tmp_path / "1" / "checkpoints")
    one, other = (tensors_of(folder, ["engine"]) for folder in (first, last))
    assert any(not torch.equal(one[name], other[name]) for name in one)  # it was trained
    same_run(tmp_path / "1", tmp_path / "2", 1e-5)


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
    assert whole_weights(one, names=["1.bias"]).keys() == {"1.bias"}
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
