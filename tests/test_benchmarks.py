"""Every benchmark of the Makefile has a quick way that reaches its scripts and leaves the results alone."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TARGETS = re.findall(r"^(bench-[a-z-]+):", (ROOT / "benchmarks" / "Makefile").read_text(), re.MULTILINE)
MADE = ("setup", "rivals", ".venv-trl/.installed")
"""What is not asked for here: environments."""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", TARGETS)
def test_quick_reaches_every_script_of_a_benchmark(target):
    old = [word for name in MADE for word in ("-o", name)]
    done = subprocess.run(
        ["make", "-n", *old, target, "QUICK=1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    scripts = [
        line
        for line in done.stdout.splitlines()
        if re.search(r"python benchmarks/|python3 benchmarks/", line)
    ]
    scripts = [line for line in scripts if "ppo_cleanrl" not in line]
    assert scripts
    assert [line for line in scripts if "--quick" not in line] == []
    for line in scripts:
        [script] = re.findall(r"benchmarks/\w+\.py", line)
        assert "--quick" in (ROOT / script).read_text(), script


def test_the_pages_of_results_show_the_last_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("tables")
    made = []
    monkeypatch.setattr(tables, "put", lambda page, name, text: made.append((page, name, text)))
    monkeypatch.setattr(tables, "draw", lambda *_: None)
    tables.write_vector()
    tables.write_learning()
    tables.write_real_model()
    monkeypatch.syspath_prepend(str(ROOT))
    presets = importlib.import_module("benchmarks.presets")
    monkeypatch.setattr(presets, "put", tables.put)
    presets.write_table()
    lag = importlib.import_module("benchmarks.lag")
    monkeypatch.setattr(lag, "put", tables.put)
    lag.write_table()
    driver = importlib.import_module("benchmarks.driver")
    monkeypatch.setattr(driver, "put", tables.put)
    driver.write_table()
    assert len(made) > 6
    for page, name, text in made:
        assert f"<!-- {name} -->\n{text}\n<!-- /{name} -->" in (ROOT / "docs" / page).read_text(), (
            page,
            name,
        )


@pytest.fixture
def stabilisers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.stabilisers")


def test_the_page_of_learning_shows_the_runs_of_stabilisers(stabilisers):
    shown = f"<!-- stabilisers -->\n{stabilisers.tables(stabilisers.read_runs())}\n<!-- /stabilisers -->"
    assert shown in (ROOT / "docs" / "learning.md").read_text()


def test_a_stabiliser_is_judged_by_pairs_of_runs_and_by_collapses(stabilisers):
    """By hand: 1.0 - 0.8, 1.0 - 0.9 and 0.9 - 0.9 are 0.1 in the mean; the fourth run has no partner."""

    def run(arm, seed, heldout, success=(0.5, 1.0), entropy=0.5, task="demo"):
        return stabilisers.Run(
            task, "grpo", arm, seed, 2, heldout, list(success), [1.0, entropy], 1.0, "2026-11-30"
        )

    fell, certain = (0.96, 0.84, 0.97), (0.2, 0.1)
    runs = [
        run("all on", 0, 1.0), run("all on", 1, 1.0), run("all on", 2, 0.9), run("rehearsal", 0, 0.8, fell),
        run("rehearsal", 1, 0.9, certain, 0.05), run("rehearsal", 2, 0.9), run("rehearsal", 0, 0.0, task="maze"),
    ]  # fmt: skip
    found = stabilisers.compare(runs, "rehearsal")
    assert (found.pairs, found.wanted, found.complete) == (3, 32, False)
    assert found.gain == pytest.approx(0.1)
    assert found.collapses == (0, 2)
    assert (found.low, found.high) == pytest.approx(
        (0.0, 0.2)
    )  # 1 of 27 draws is thrice the least, or the most
    assert found.stays  # it prevents collapses, though the interval has 0
    assert not stabilisers.compare([one for one in runs if one.seed == 2], "rehearsal").stays
    assert stabilisers.compare(runs, "target").pairs == 0
    assert "| grpo | `warmup.rehearsal` off | 0.87 (3) | · | · | 0.00 (1) |" in stabilisers.tables(runs)
