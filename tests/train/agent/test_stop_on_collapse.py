"""A run whose policy has collapsed ends early, as a failed one, unless it is asked to go on."""

import gymnasium
import pytest
from gymnasium.spaces import Discrete, Text

from shoal.cli import main as shoal
from shoal.core.run_folder import read_summary
from shoal.train.agent.config import compose_config
from shoal.train.agent.run.checkpoint import list_checkpoints
from shoal.train.agent.trainer import AgentTrainer


class Doors(gymnasium.Env):
    """One of eight doors wins, behind each of the others stands a loss; leaving costs little, and never wins."""

    observation_space, action_space = Text(20), Discrete(9)
    action_names, instructions, max_steps = (*"abcdefgh", "leave"), "Choose a door.", 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.right = int(self.np_random.integers(8))
        return "Doors.", {}

    def step(self, action):
        won = action == self.right
        return "It is over.", 1.0 if won else -0.1 if action == 8 else -1.0, True, False, {"success": won}


class Solved(Doors):
    """The same doors, but leaving is what wins."""

    def step(self, action):
        won = action == 8
        return "It is over.", float(won), True, False, {"success": won}


def settings(folder, *overrides, env="Doors"):
    kind = f"tests.train.agent.test_stop_on_collapse:{env}"
    return [
        "custom_envs.FrozenLakeEnv=null", f"+custom_envs.A={{env_type: '{kind}'}}",
        "es_manager.train.env_configs.tags=[A]", "es_manager.val.env_configs.tags=[A]",
        "es_manager.train.env_groups=8", "es_manager.train.group_size=8", "es_manager.val.env_groups=8",
        "engine.width=16", "engine.layers=1", "engine.heads=2", "warmup.steps=60", "warmup.learning_rate=0.006",
        "warmup.rehearsal=0", "agent_proxy.format_penalty=1", "algorithm.learning_rate=0.02",
        "use_parallel_envs=false", "trainer.tensorboard=false", "trainer.iterations=40", "trainer.eval_every=50",
        "trainer.save_every=50", "trainer.keep_checkpoints=9", f"run_dir={folder}", *overrides,
    ]  # fmt: skip


def train(folder, *overrides, env="Doors"):
    with AgentTrainer(compose_config("demo", settings(folder, *overrides, env=env))) as trainer:
        return [
            {name: row.get(name) for name in ("iteration", "entropy", "reward")} for row in trainer.train()
        ]


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collapsed") / "run"
    assert shoal.main(["train", "--config-name", "demo", *settings(folder)]) == 1
    return folder


def iterations(folder):
    return read_summary(folder)["metrics"]["iterations"]


def test_a_run_that_collapsed_ends_early_with_an_evaluation_a_checkpoint_and_a_summary_that_says_why(
    collapsed,
):
    summary = read_summary(collapsed)
    assert summary["status"] == "failed"
    assert 10 < iterations(collapsed) < 40
    assert summary["metrics"]["heldout_success"] < 0.5
    assert list_checkpoints(collapsed / "checkpoints")[-1].name == f"step-{iterations(collapsed):06d}"
    assert "trainer.stop_on_collapse=false resume=true goes on" in summary["error"]
    assert summary["advice"][0]["title"] == "Entropy has collapsed"


def test_a_run_that_is_broken_off_and_resumed_collapses_at_the_same_iteration(collapsed, tmp_path):
    end = iterations(collapsed)
    train(tmp_path / "run", f"trainer.iterations={end - 4}")
    assert read_summary(tmp_path / "run")["status"] == "completed"
    rows = train(tmp_path / "run", "resume=true")
    assert [row["iteration"] for row in rows] == list(range(end + 1))
    assert read_summary(tmp_path / "run")["status"] == "failed"
    assert train(tmp_path / "run", "resume=true") == rows  # nothing is played
    assert read_summary(tmp_path / "run")["status"] == "failed"
    more = ["resume=true", "trainer.stop_on_collapse=false", f"trainer.iterations={end + 2}"]
    assert train(tmp_path / "run", *more)[-1]["iteration"] == end + 2
    assert read_summary(tmp_path / "run")["status"] == "completed"


def test_the_command_says_that_it_ended_early_and_what_to_change(collapsed, capsys):
    again = ["train", "--config-name", "demo", *settings(collapsed), "resume=true"]
    assert shoal.main(again) == 1
    said = capsys.readouterr().out
    assert "(ended early by trainer.stop_on_collapse)" in said
    assert said.splitlines()[-1].startswith("WARNING: Entropy has collapsed.")
    assert "Lower algorithm.learning_rate to a third (it is 0.02)" in said.splitlines()[-1]


def test_a_run_that_has_solved_its_task_goes_on_though_nothing_is_left_to_learn(tmp_path):
    rows = train(tmp_path / "run", env="Solved")
    assert rows[-1]["iteration"] == 40
    assert read_summary(tmp_path / "run")["metrics"]["heldout_success"] == 1.0
    assert all(row["entropy"] is None or row["entropy"] < 0.1 for row in rows[-12:])
