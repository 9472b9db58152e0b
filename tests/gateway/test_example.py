"""The example: an agent with the package `openai`, which knows nothing of shoal, learns to cross a frozen lake."""

import importlib.util
import json
from pathlib import Path

import pytest

from shoal.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
AGENT = ROOT / "examples" / "gateway" / "frozen_lake_openai.py"
TRAIN = [
    "train",
    "--config-dir",
    "examples/gateway",
    "--config-name",
    "frozen_lake",
    "trainer.tensorboard=false",
]


def test_the_tutorial_shows_the_example_as_it_is():
    page = (ROOT / "docs" / "tutorials" / "gateway.md").read_text()
    assert f"```python\n# {AGENT.name}\n{AGENT.read_text()}```" in page
    assert "shoal" not in AGENT.read_text().replace('model="shoal"', "")


def test_the_example_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = ["trainer.iterations=1", "es_manager.train.env_groups=2", "es_manager.val.env_groups=2"]
    assert main([*TRAIN, *small, "agent_proxy.parallel_n_jobs=2", f"run_dir={tmp_path / 'run'}"]) == 0
    lines = (tmp_path / "run" / "trajectories" / "train-000001.jsonl").read_text().splitlines()
    assert len(lines) == 16
    assert all(json.loads(line)["status"] == "ok" for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_agent_learns_to_cross_the_lake(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main([*TRAIN, f"run_dir={tmp_path / 'run'}"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["heldout_success"] >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("package", ["anthropic", "agents", "langgraph"])
def test_the_agent_learns_with_other_packages_too(tmp_path, monkeypatch, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    monkeypatch.chdir(ROOT)
    functions = [
        f"custom_envs.{tag}.env_config.function=frozen_lake_{package}:{name}"
        for tag, name in (("Practice", "practise"), ("Walk", "play"))
    ]
    assert main([*TRAIN, *functions, f"run_dir={tmp_path / 'run'}"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["heldout_success"] >= 0.95
