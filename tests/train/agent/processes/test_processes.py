"""Two processes train as one does: the same trajectories, and weights that differ by rounding alone."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.records import exchanges
from tests.rollout.doubles import FakeServer
from tests.train.agent.checkpoints import tensors_of

from shoal.core.data import read_trajectories
from shoal.core.errors import ConfigError
from shoal.core.run_folder import read_summary
from shoal.train.agent.processes.distributed import Processes
from shoal.train.agent.run.checkpoint import list_checkpoints

pytest.importorskip("accelerate")
pytestmark = pytest.mark.timeout(600)  # processes that start on a busy machine
SETTINGS = [
    "engine.width=16", "engine.layers=1", "engine.heads=2", "warmup.steps=15", "warmup.learning_rate=0.01",
    "es_manager.train.env_groups=3", "es_manager.train.group_size=5", "es_manager.val.env_groups=3",
    "algorithm.filter_groups.enable=false", "algorithm.entropy_coef=0.05", "algorithm.minibatch_size=37",
    "algorithm.kl.coef=0.01", "algorithm.adv_estimator=gae", "algorithm.weight_decay=0.01",
    "algorithm.rollout_correction.method=truncate", "agent_proxy.format_penalty=0.2", "agent_proxy.max_turn=3",
    "trainer.eval_every=2", "trainer.save_every=1", "trainer.tensorboard=false", "use_parallel_envs=false",
]  # fmt: skip
FINE = 1e-5  # with rewards that differ from the first iteration on: Adam makes whole steps of a gradient of rounding
TIMES = ("seconds", "cpu_seconds", "tokens_per_second", "update_tokens_per_second", "share_", "engine_busy")


def launch(folder, n, *overrides, module="shoal", timeout=280):
    """`torchrun` of n processes, or a plain run."""
    command = ["train", "--config-name", "demo", *SETTINGS, f"run_dir={folder}", *overrides]
    start = [sys.executable, "-m", module]
    if n > 1:
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--log-dir={folder}.logs",  # else it makes a folder beside those of others, and leaves it
            f"--nproc-per-node={n}",
            "-m",
            module,
        ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    return subprocess.run([*start, *command], env=env, capture_output=True, text=True, timeout=timeout)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def ended_early(folder):
    """Whether the run there is not told as completed; of its processes the first, if it lives, tells how it ended.

    It failed with the others, or was interrupted where a launcher ended it before it heard of them.
    """
    return not (folder / "summary.json").exists() or read_summary(folder)["status"] in (
        "failed",
        "interrupted",
    )


def same_run(one, two, atol, parts=("engine", "critic")):
    for row, other in zip(rows_of(one), rows_of(two), strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            if not name.startswith(TIMES):
                assert other[name] == pytest.approx(value, abs=atol), name
    same_weights(one, two, atol, parts)


def same_weights(one, two, atol, parts=("engine", "critic")):
    first, second = (tensors_of(list_checkpoints(folder / "checkpoints")[-1], parts) for folder in (one, two))
    assert first.keys() == second.keys()
    assert {name.partition(".")[0] for name in first} == {*parts}
    for name in first:
        np.testing.assert_allclose(second[name], first[name], atol=atol, err_msg=name)


@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.slow
def test_two_processes_train_as_one_does(alone, tmp_path, sharding):
    two = tmp_path / "two"
    done = launch(two, 2, "trainer.iterations=3", f"trainer.sharding={sharding}")
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    assert ("2 processes (sharded)" in done.stdout) == (sharding == "full")
    assert "Warning" not in done.stderr
    assert done.stdout.count("run folder:") == 1  # one of them speaks
    same_run(alone, two, FINE)
    for name in ("train-000001.jsonl", "heldout-000003.jsonl"):
        told = [list(read_trajectories(folder / "trajectories" / name)) for folder in (alone, two)]
        assert [[turn.response_ids for turn in exchanges(t)] for t in told[0]] == [
            [turn.response_ids for turn in exchanges(t)] for t in told[1]
        ]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_processes_play_ahead_as_one_does(tmp_path, sharding):
    """Playing gathers in a thread of its own, beside the gradients of the updates."""
    lag = ["trainer.lag=2", "agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel.backend=thread"]
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, n, how in ((one, 1, "none"), (two, 2, sharding)):
        done = launch(folder, n, *lag, "trainer.iterations=4", f"trainer.sharding={how}")
        assert done.returncode == 0, done.stderr
    for row, other in zip(rows_of(one), rows_of(two), strict=True):
        assert other.get("reward") == pytest.approx(row.get("reward"), abs=FINE)
        assert other.get("lag") == row.get("lag")
    same_weights(one, two, FINE)


OTHERWISE = {
    "distillation": [
        "algorithm.adv_estimator=distillation", "algorithm.kl.coef=0", "algorithm.epochs=2", "warmup.steps=0",
    ],
    "refilled and filtered groups": [
        "algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true", "algorithm.policy_loss=gspo",
        "algorithm.filter_groups.max_num_gen_batches=3", "algorithm.rollout_filter_ratio=0.5",
        "agent_proxy.max_turn=8", "custom_envs.FrozenLakeEnv.env_config.desc=[SFF,FHF,FFG]",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "sharding"),
    [("distillation", "none"), ("distillation", "full"), ("refilled and filtered groups", "full")],
)
def test_two_processes_train_otherwise_as_one_does(alone, tmp_path, how, sharding):
    settings = [*OTHERWISE[how], "trainer.iterations=2", f"trainer.sharding={sharding}"]
    if how == "distillation":
        settings.append(f"algorithm.teacher={list_checkpoints(alone / 'checkpoints')[-1] / 'engine'}")
    for name, n in (("one", 1), ("two", 2)):
        done = launch(tmp_path / name, n, *settings)
        assert done.returncode == 0, done.stderr
    assert any(row.get("gradient_steps") for row in rows_of(tmp_path / "one"))
    same_run(tmp_path / "one", tmp_path / "two", FINE, parts=("engine",))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_shared_engine_that_answers_workers_trains_the_same(alone, tmp_path, sharding):
    """Requests come from threads, while the parameters of shards are whole."""
    settings = ["agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel.backend=thread"]
    done = launch(tmp_path / "run", 2, "trainer.iterations=3", f"trainer.sharding={sharding}", *settings)
    assert done.returncode == 0, done.stderr
    same_weights(alone, tmp_path / "run", FINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, "none"), (3, "none")), ((2, "full"), (1, "full")), ((1, "none"), (3, "full"))],
)
def test_a_run_goes_on_with_another_number_of_processes_and_other_shards(alone, tmp_path, before, after):
    folder = tmp_path / "run"
    for iterations, (n, sharding), resume in ((2, before, "false"), (3, after, "true")):
        settings = (f"trainer.iterations={iterations}", f"trainer.sharding={sharding}", f"resume={resume}")
        done = launch(folder, n, "trainer.eval_every=1", *settings)
        assert done.returncode == 0, done.stderr
    whole = rows_of(alone)[-1]
    assert rows_of(folder)[-1]["loss"] == pytest.approx(whole["loss"], abs=FINE)
    assert rows_of(folder)[-1]["heldout_reward"] == pytest.approx(whole["heldout_reward"], abs=1e-6)
    same_weights(alone, folder, FINE)


@pytest.mark.slow
def test_an_error_in_one_process_ends_all_with_its_reason(tmp_path, monkeypatch):
    """An env that fails while it is made for the second process alone."""
    (tmp_path / "failing.py").write_text(
        "import os, runpy, sys\n"
        "from shoal.rollout.play import TrajectoryCollector\n"
        "play = TrajectoryCollector.collect\n"
        "def collect(self, *a, **k):\n"
        "    if os.environ.get('RANK') == '1':\n"
        "        raise OSError('the disk is on fire')\n"
        "    return play(self, *a, **k)\n"
        "TrajectoryCollector.collect = collect\n"
        "from shoal.cli.main import main\n"
        "sys.exit(main())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = launch(tmp_path / "run", 2, "trainer.iterations=2", module="failing")
    assert done.returncode != 0
    assert "process 1 of 2 failed: OSError: the disk is on fire" in done.stderr
    assert ended_early(tmp_path / "run")


MEETING = """
import os, signal, sys
import torch, torch.distributed as dist
from shoal.core.errors import EngineError
from shoal.train.agent.processes.distributed import Processes

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
processes, weight = Processes(rank, 2), torch.nn.Parameter(torch.zeros(3))
assert processes.all_gather(lambda: rank) == [0, 1]
for meet in (
    lambda: processes.all_gather(lambda: rank),
    lambda: processes.sum_gradients([weight]),
    lambda: processes.share_weights([weight]),
):
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        meet()
    except EngineError as error:
        print(error)
os._exit(0)
"""


def test_a_process_killed_amid_work_of_all_is_told_by_those_that_waited_for_it(tmp_path):
    """Without a launcher that would end them."""
    (tmp_path / "meeting.py").write_text(MEETING)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    first, second = (
        subprocess.Popen(
            [sys.executable, str(tmp_path / "meeting.py"), rank, str(tmp_path / "store")],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in "01"
    )  # fmt: skip
    said, wrong = first.communicate(timeout=280)
    second.communicate(timeout=280)
    assert (first.returncode, second.returncode) == (0, -signal.SIGKILL), wrong
    told = "another of the 2 processes ended, or cannot be reached: see what it said; what was saved is whole"
    assert [line.startswith(told) for line in said.splitlines()] == [True, True, True], said + wrong


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 5))
def test_every_item_is_in_one_part_and_parts_are_even(sizes, count):
    parts = Processes(0, count).partition(sizes)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_one_gpu_for_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="each takes its own"):
        Processes.join("cuda:0")


def test_without_a_launcher_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    processes = Processes.join("cpu")
    assert (processes.count, processes.first, processes.device("cuda")) == (1, True, "cuda")
    assert Processes(1, 2, 1).device("cuda") == "cuda:1"
    parameter = torch.nn.Parameter(torch.ones(2))
    processes.sum_gradients([parameter])
    assert parameter.grad is None


REWARDS = """\
from shoal.rollout.rewards.settings import reward


@reward("brief", replace=True)
def brief(episodes):
    return [-len(episode.turns) / 20 for episode in episodes]
"""
SCORES = "import json, sys; print([len(e['turns']) / 10 for e in json.loads(sys.stdin.read())['episodes']])"


@pytest.mark.slow
def test_two_processes_are_paid_by_rewards_as_one_is(tmp_path):
    (tmp_path / "own.py").write_text(REWARDS)
    (tmp_path / "score.py").write_text(SCORES)
    program = f"{{command: ['{{python}}', '{tmp_path / 'score.py'}'], weight: 0.1}}"
    one, two = tmp_path / "one", tmp_path / "two"
    with FakeServer("openai") as server:
        server.say = lambda said: f"<score>{sum(map(ord, said)) % 11 / 10}</score>"
        judge = f"{{model: {{base_url: '{server.url}/v1', model: m}}, weight: 0.5}}"
        rewards = f"rewards=[{{name: env}}, {{name: brief}}, {program}, {judge}]"
        for folder, n in ((one, 1), (two, 2)):
            done = launch(folder, n, "trainer.iterations=2", f"imports=[{tmp_path / 'own.py'}]", rewards)
            assert done.returncode == 0, done.stderr
    assert {"score/brief", "score/program", "score/judge"} <= rows_of(two)[-1].keys()
    same_run(one, two, FINE)
    asked = [
        sorted({line for path in run.glob("answers*.jsonl") for line in path.read_bytes().splitlines()})
        for run in (one, two)
    ]
    assert len(asked[0]) > 15
    assert asked[0] == asked[1]
