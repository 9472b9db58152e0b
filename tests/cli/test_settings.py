import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shoal.cli.main import main
from shoal.core.configuration import as_commented_yaml
from shoal.train.agent.algorithms.presets import reasons
from shoal.train.agent.config import AgentConfig, compose_config, config_names

ROOT = Path(__file__).parents[2]


def printed(capsys, *words):
    assert main(["train", *words, "--cfg"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", config_names())
def test_the_settings_that_are_printed_with_comments_read_back_to_the_same_config(name):
    config = compose_config(name)
    assert AgentConfig.read(yaml.safe_load(as_commented_yaml(config))) == config


def test_a_command_prints_the_settings_of_its_config(capsys):
    config = compose_config("demo")
    assert printed(capsys, "--config-name", "demo") == as_commented_yaml(config, reasons(config))


def test_texts_of_several_lines_and_odd_names_read_back_too(capsys, tmp_path):
    first = "a: '{observation}'\n\n  # b {actions}\n | \u2028 \x85 " + "long " * 60
    own = {
        "defaults": ["base", "_self_"],
        "custom_envs": {"A: 1": {"env_type": "bandit", "env_config": {"a": 0.5}}, "yes": {"env_type": "bandit"}},
        "agent_proxy": {"stop": ["#", "\n"], "prompt": {"first": first}},
    }  # fmt: skip
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    values = yaml.safe_load(printed(capsys, "--config-dir", str(tmp_path), "--config-name", "own"))
    config = AgentConfig.read(values)
    assert config == compose_config("own", folder=tmp_path)
    assert config.agent_proxy.prompt.first == own["agent_proxy"]["prompt"]["first"]
    assert set(config.custom_envs) >= {"A: 1", "yes"}


def test_a_config_that_builds_on_no_other_one_is_warned_of_where_it_leaves_settings_out(capsys, tmp_path):
    def warned(text):
        (tmp_path / "own.yaml").write_text(text)
        assert main(["train", "--config-dir", str(tmp_path), "--config-name", "own", "--cfg"]) == 0
        out, err = capsys.readouterr()
        return out, err

    whole, told = warned("algorithm: {gamma: 0.5}\n")
    assert "own.yaml has no `defaults:` list" in told
    assert "trainer" in told
    assert "algorithm" not in told
    assert "`defaults: [base, _self_]`" in told
    assert warned("defaults: [base, _self_]\n")[1] == ""
    assert warned(whole)[1] == ""


def test_each_setting_that_is_printed_has_its_meaning_above_it(capsys):
    lines = printed(capsys, "--config-name", "base").splitlines()
    assert lines[lines.index("  gamma: 1.0") - 1].strip().startswith("# Discount per turn")
    settings = AgentConfig()
    keys = [
        *vars(settings),
        *vars(settings.engine),
        *vars(settings.algorithm.critic),
        *vars(settings.trainer),
    ]
    for key in keys:
        at = [number for number, line in enumerate(lines) if line.strip().startswith(f"{key}:")]
        assert at, key
        assert any(lines[number - 1].strip().startswith("# ") for number in at), f"{key} has no meaning"


@pytest.mark.parametrize(
    ("name", "among"),
    [
        (
            "settings",
            (
                "seed",
                "algorithm.critic.gae_lambda",
                "agent_proxy.prompt.prefill",
                "custom_envs.NAME.env_type",
            ),
        ),
        (
            "commands",
            ("--n-envs N", "--out, --run-dir PATH", "--eval-deterministic, --no-eval-deterministic", "RUN"),
        ),
    ],
)
def test_a_page_of_settings_or_options_is_what_the_source_says(name, among):
    make = f"make_{name}"
    write = f"import sys; sys.path.insert(0, 'docs'); import {make}; sys.stdout.write({make}.page())"
    done = subprocess.run([sys.executable, "-c", write], cwd=ROOT, capture_output=True, text=True, check=True)
    stands = (ROOT / "docs" / f"{name}.md").read_text()
    assert done.stdout == stands, f"docs/{name}.md is of another source: run make settings"
    for setting in among:
        assert f"| `{setting}` |" in stands


def test_a_value_in_the_quotes_that_the_message_shows_is_read(capsys, prints):
    turn = "a {action}, \"b\" 'c' [d]"
    [word] = shlex.split(
        prints("train", f"agent_proxy.prompt.turn={turn}", "--cfg", code=2).partition("of the shell: ")[2]
    )
    assert yaml.safe_load(printed(capsys, word))["agent_proxy"]["prompt"]["turn"] == turn


def test_a_config_in_the_working_directory_is_found_by_the_words_that_the_message_shows(
    capsys, prints, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("key.yaml").write_text("defaults: [base, _self_]\nseed: 5\n")
    words = re.search(
        r"--config-dir \S+ --config-name key", prints("train", "--config-name", "key", "--cfg", code=2)
    )[0].split()
    assert yaml.safe_load(printed(capsys, *words))["seed"] == 5


@pytest.mark.parametrize("command", [["train"], ["train-ppo", "--total-timesteps", "64"]])
def test_a_folder_with_other_files_is_no_place_for_a_run(command, prints, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    assert "holds other files (thesis.tex) and no run" in prints(*command, "--run-dir", tmp_path, code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]


def test_adapters_are_put_on_all_layers_though_a_config_trains_only_some():
    lora = ["model.lora.rank=4"]
    assert compose_config("smollm2").engine.train_last_layers
    assert compose_config("smollm2", lora).engine.train_last_layers is None
