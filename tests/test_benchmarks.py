"""Every benchmark of the Makefile has a quick way that reaches its scripts and leaves the results alone."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TARGETS = re.findall(r"^(bench-[a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
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
    assert len(made) > 6
    for page, name, text in made:
        assert f"<!-- {name} -->\n{text}\n<!-- /{name} -->" in (ROOT / "docs" / page).read_text(), (
            page,
            name,
        )
