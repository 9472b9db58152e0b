"""The agent of `examples/tools`: it learns what nobody does without tools, and repeats from its record without them."""

import importlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.rollout.doubles import until
from tests.train.agent.test_trainer import results

from shoal import AgentTrainer
from shoal.core.data import read_trajectories
from shoal.core.errors import ConfigError
from shoal.train.agent.config import compose_config
from shoal.train.records.replay import Replay, find_episode

FOLDER = Path(__file__).parents[3] / "examples" / "tools"
SMALL = [
    "warmup.steps=30", "warmup.batch_size=16", "warmup.expert=0.5", "trainer.iterations=2", "trainer.eval_every=2",
    "es_manager.train.env_groups=4", "es_manager.train.group_size=2", "es_manager.val.env_groups=8",
    "vector.backend=serial", "trainer.check_envs=false", "trainer.tensorboard=false",
]  # fmt: skip


@pytest.fixture
def vault(monkeypatch):
    """The example as a config, its modules found and forgotten again."""
    pytest.importorskip("mcp")
    monkeypatch.chdir(FOLDER.parents[1])
    monkeypatch.syspath_prepend(str(FOLDER))
    yield lambda *changes: compose_config("vault", [*changes], FOLDER)
    sys.modules.pop("vault", None)


def rows(config):
    """The metrics of a run, but for those that tell the time."""
    with AgentTrainer(config) as trainer:
        found = list(trainer.train())
    slow = ("seconds", "second", "busy", "memory", "rows", "workers", "share_")
    return [{key: row[key] for key in row if not any(word in key for word in slow)} for row in found]


@pytest.mark.slow
def test_an_episode_is_replayed_with_the_recorded_results(vault, tmp_path):
    functions = 'agent_proxy.tools=["vault:search", "vault:multiply"]'
    rows(vault(*SMALL, "warmup.steps=80", f"run_dir={tmp_path}", functions))
    episodes = enumerate(read_trajectories(tmp_path / "trajectories" / "heldout-000000.jsonl"))
    number = next(n for n, e in episodes if e.turns[0].tools and e.turns[0].tools[0].error is None)
    for sampler in ("checkpoint", "recorded"):
        with Replay(tmp_path, sampler) as replay:
            found = find_episode(tmp_path, f"heldout-000000:{number}")
            assert not any(tool.function for tool in replay.tools)
            assert replay.play(found).difference is None
            turn = found.trajectory.turns[0]
            spoiled = replace(turn, tools=(replace(turn.tools[0], result="9 9"), *turn.tools[1:]))
            other = replace(found.trajectory, turns=(spoiled, *found.trajectory.turns[1:]))
            difference = replay.play(replace(found, trajectory=other)).difference
            assert (difference.what, difference.turn) == (
                "observation",
                2,
            )  # what the record says, and no tool


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_that_is_killed_resumes_to_the_end_of_one_that_was_not(vault, tmp_path):
    changes = [*SMALL, "trainer.iterations=3", "trainer.save_every=1"]
    first, killed = (tmp_path / run for run in ("first", "killed"))
    rows(vault(*changes, f"run_dir={first}"))
    assert max(row.get("gradient_steps", 0) for row in results(first)[0]) > 0
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    command = [sys.executable, "-m", "shoal", "train", "--config-dir", str(FOLDER), "--config-name", "vault"]
    run = subprocess.Popen(
        [*command, *changes, f"run_dir={killed}"],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: (killed / "checkpoints" / "step-000001").exists() or run.poll() is not None, 300)
        servers = psutil.Process(run.pid).children(recursive=True)
        assert any("server.py" in " ".join(process.cmdline()) for process in servers)
    finally:
        run.kill()
        run.wait()
    until(lambda: not any(process.is_running() and process.status() != "zombie" for process in servers))
    assert not (killed / "checkpoints" / "step-000003").exists()
    with (killed / "tool_uses.jsonl").open("ab") as record:  # as if it was killed amid a line
        record.write(b'[["Vault",1,2')
    rows(vault(*changes, f"run_dir={killed}", "resume=true"))
    assert results(killed) == results(first)
    recorded = f'agent_proxy.tools=[{{recorded: "{killed}"}}]'
    rows(vault(*changes, f"run_dir={tmp_path}/again", recorded))
    assert results(tmp_path / "again") == results(first)


def test_without_tools_the_doors_can_only_be_guessed(vault):
    vault()
    env = importlib.import_module("vault").Vault()
    doors = Counter()
    for seed in range(2000):
        env.reset(seed=seed)
        doors[env.expert_action()[-1]] += 1
    assert max(doors.values()) < 0.25 * 2000


def test_a_warm_up_that_calls_tools_where_there_are_none_is_refused(vault):
    with (
        pytest.raises(
            ConfigError, match=r"'Vault' calls the tool '\w+', and there are no tools: name them in agent"
        ),
        AgentTrainer(vault(*SMALL, "agent_proxy.tools=[]", "run_dir=null")) as trainer,
    ):
        list(trainer.train())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_agent_learns_to_open_the_vault(vault, tmp_path):
    found = rows(vault(f"run_dir={tmp_path}", "trainer.tensorboard=false"))
    sampled = [
        row["success"] for row in found if "success" in row
    ]  # what is learned from; held out it is greedy
    assert sum(sampled[-3:]) > 1.5 * sum(sampled[:3])
    assert found[-1]["heldout_success"] >= 0.9
