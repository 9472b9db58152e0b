"""YAML that was written for the projects before shoal trains as it stands, without a line of Hydra in it."""

import json
from pathlib import Path

import pytest
import yaml

from shoal import AgentConfig, make_environments, validate_environment_config
from shoal.cli import main as shoal
from shoal.core.configuration import from_mapping, to_mapping

FOLDER = Path(__file__).parent / "reference"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
SMALL = [
    "engine.width=16", "engine.layers=1", "engine.heads=2", "agent_proxy.max_turn=2", "agent_proxy.max_tokens=4",
    "agent_proxy.prompt.history=0", "trainer.iterations=1", "trainer.tensorboard=false", "engine.context=1024",
    "algorithm.filter_groups.max_num_gen_batches=1",
]  # fmt: skip

BOMB = "custom_envs:\n  a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"  a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40)
)
"""Forty lines that stand for a billion values."""


def written(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def taken_from(config, values):
    """The part of a config that `values` speaks of."""
    if isinstance(values, dict):
        return {key: taken_from(config[key], value) for key, value in values.items()}
    return config


def command(*words):
    return shoal.main(["train", "--config-dir", str(FOLDER), "--config-name", *words])


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_reference_config_reaches_the_settings(name, capsys):
    assert command(name, "--cfg") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert taken_from(printed, written(name)) == written(name)
    changed = to_mapping(from_mapping(AgentConfig, written(name)))
    assert json.loads(json.dumps(changed)) == printed  # what is not written has its default


def test_the_settings_of_a_reference_config_can_be_changed_on_the_command_line(capsys):
    assert command("environments", "es_manager.train.group_size=5", "trainer.iterations=7", "--cfg") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["es_manager"]["train"]["group_size"], printed["trainer"]["iterations"]) == (5, 7)
    assert printed["es_manager"]["train"]["env_groups"] == 4
    assert command("environments", "trainer.iteratons=7") == 2
    assert "Did you mean 'trainer.iterations'" in capsys.readouterr().err


def test_the_envs_of_a_reference_config_are_made():
    config = written("environments")
    checked = validate_environment_config(config)
    assert (
        checked.es_manager.train.group_tags() == ("SokobanEnv",) * 4
    )  # one share of the groups: all of them
    playing, val = make_environments(config)
    try:
        assert (len(playing.tags), playing.group_size) == (4, 3)
        assert (len(val.tags), val.group_size) == (2, 1)
        assert playing.roles["SokobanEnv"].max_turns == 50  # the lesser of 50 and 100
        resets = playing.pool.reset_some(range(12), [1] * 12)
        assert len({observation for observation, _ in resets}) == 1
        rows = resets[0][0].split("\n")
        assert (len(rows), {len(row) for row in rows}) == (6, {6})
    finally:
        playing.pool.close()
        val.pool.close()


def test_a_reference_config_trains(tmp_path):
    run = tmp_path / "run"
    assert command("whole", *SMALL, f"run_dir={run}") == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["metrics"]["episodes"] == 12


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("seed: [1", "is not YAML"),
        ("seed: !!python/object/apply:os.getcwd []", "is not YAML"),
        ("custom_envs:", "custom_envs must be a mapping"),
        (BOMB, "at most 20000 values"),
        ("# " + "x" * 2**20, "at most 1048576 bytes"),
        ("agent_proxi: {}", "Did you mean 'agent_proxy'"),
    ],
)
def test_a_config_that_cannot_be_read_is_told_in_a_line(tmp_path, prints, text, why):
    (tmp_path / "own.yaml").write_text(text)
    told = prints("train", "--config-dir", tmp_path, "--config-name", "own", "--cfg", code=2)
    assert why in told
    assert len(told.splitlines()) == 1


def test_an_empty_config_is_all_defaults(tmp_path, prints):
    (tmp_path / "own.yaml").write_text("# nothing yet\n")
    printed = yaml.safe_load(prints("train", "--config-dir", tmp_path, "--config-name", "own", "--cfg"))
    assert printed == json.loads(json.dumps(to_mapping(AgentConfig())))
