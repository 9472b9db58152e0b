"""What is printed first, and the exit code, of calls that a user makes; a table to look at when one changes."""

import json
import shlex

import pytest

from shoal.cli.main import main

TABLE = [
    ("--version", 0, "shoal "),
    ("--help", 0, "Usage: shoal COMMAND"),
    ("nosuch", 2, "shoal: no command named 'nosuch'. Known: bench, completion, doctor, "),
    ("envs", 0, "Usage: shoal envs COMMAND"),
    ("envs show sokoban --seed 3", 0, "sokoban: Push every box of a room onto a target."),
    ("envs show CartPole-v1", 0, "CartPole-v1: This environment corresponds to"),
    ("envs check bandit --episodes 2", 0, "ok      shoal's check_text_env: 2 episodes"),
    ("envs play bandit --port 3", 2, "shoal: Unknown option: --port."),
    ("train --cfg", 0, "# Seed of the whole run: "),
    ("train --config-name nosuch", 2, "shoal: no config named 'nosuch'. Known: aviary, bandit, base, "),
    ("train --config-name recorded recordings=x --cfg", 0, "# The folder or file of recordings."),
    ("train-recorded --cfg", 2, "shoal: recordings= must name the folder or file to train on"),
    ("train-ppo --n-envs 0", 2, "shoal: n_envs must be at least 1, got 0"),
    ("train-ppo --atari maybe", 2, "shoal: shoal train-ppo does not take 'maybe'"),
    ("train-ppo --hidden 4 --hidden 5", 2, "shoal: Parameter --hidden specified multiple times."),
    (
        "rollout --backend nosuch",
        2,
        'shoal: Invalid value "nosuch" for --backend. Choose from: "auto", "serial", ',
    ),
    ("eval", 2, "shoal: Parameter RUN_OR_MODEL requires an argument."),
    ("show run --json", 0, '{"command": "eval", "status": "completed", "seed": 0, "seconds": 1.5, '),
    ("runs . --status failed", 0, "0 runs in ."),
    (
        "runs . --json",
        0,
        '[{"run": "run", "command": "eval", "status": "completed", "seed": 0, "seconds": 1.5, ',
    ),
    ("replay run", 2, "shoal: run recorded no episodes: there is no trajectories/*.jsonl in it"),
    ("model list", 0, "smollm2 "),
    ("model get nosuch", 2, "shoal: no model named 'nosuch'. Known: smollm2"),
    ("skills train --dry-run", 0, "Collect Wood: needs nothing; plan Collect Wood x4"),
    ("skills nosuch", 2, "shoal: no skills command named 'nosuch'. Known: "),
    ("completion tcsh", 2, 'shoal: Invalid value "tcsh" for SHELL. Choose from: "bash", "zsh", "fish".'),
]


@pytest.mark.parametrize(("words", "code", "first"), TABLE, ids=[words for words, _, _ in TABLE])
def test_a_call_ends_with_its_code_and_its_first_line(words, code, first, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    summary = {
        "command": "eval",
        "status": "completed",
        "seed": 0,
        "seconds": 1.5,
        "metrics": {"success": 0.5},
    }
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    assert main(shlex.split(words)) == code
    printed = capsys.readouterr()
    assert (printed.out if code == 0 else printed.err).lstrip("\n").startswith(first)
    assert not (tmp_path / "runs").exists()
