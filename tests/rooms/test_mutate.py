import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rooms.mutate import chosen, mutations_of

SCRIPT = Path(__file__).with_name("mutate.py")
TOY = '''
"""A module: 1 + 1."""

def clamp(x: int | None, low: int = 0, high: int = 9) -> int | None:
    """Between `low` and `high`."""
    if x is None:
        return None
    seen.append(x)
    if x < low or not x <= high:
        x = min(max(x, low), high)
    return x - 0

seen: list[int] = []
'''
TEST = """
from toy.clamp import clamp

assert [clamp(x) for x in (None, -1, 0, 1, 9, 10)] == [None, 0, 0, 1, 9, 9]
"""


@pytest.fixture
def tree(tmp_path):
    for name, text in (("src/toy/clamp.py", TOY), ("src/toy/__init__.py", ""), ("tests/check.py", TEST)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def mutate(tree, *options, command=("tests/check.py",), **popen):
    call = [
        sys.executable,
        str(SCRIPT),
        "src/toy",
        "--out",
        "out.json",
        *options,
        "--",
        sys.executable,
        *command,
    ]
    return subprocess.Popen(
        call, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen
    )


def test_every_kind_of_place_is_found_and_nothing_else():
    found = {(m.kind, m.before.strip(), m.after) for m in mutations_of(TOY.encode(), "f.py")}
    assert {
        ("comparison", "x is None", "(x is not None)"),
        ("comparison", "x < low", "(x <= low)"),
        ("condition", "x is None", "(not (x is None))"),
        ("boolean", "not x <= high", "(x <= high)"),
        ("boolean", "x < low or not x <= high", "(x < low and (not x <= high))"),
        ("arithmetic", "x - 0", "(x + 0)"),
        ("constant", "9", "(10)"),
        ("statement", "seen.append(x)", "pass"),
        ("statement", "return x - 0", "return None"),
    } <= found
    assert not [m for m in found if "|" in m[1] or "module" in m[1] or "list" in m[1]]


def test_every_change_is_valid_python_and_changes_one_place():
    path = SCRIPT.parents[2] / "src" / "shoal" / "core" / "seeding.py"
    source = path.read_bytes()
    for mutation in chosen(path, path.parent, 40, 0):
        changed = mutation.applied_to(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
        assert source[mutation.start : mutation.stop].decode() == mutation.before
        assert changed[: mutation.start] == source[: mutation.start]
        assert changed.endswith(source[mutation.stop :])


def test_the_same_seed_chooses_the_same_places(tree):
    room = tree / "src" / "toy"
    assert chosen(room, tree, 5, 3) == chosen(room, tree, 5, 3)
    assert chosen(room, tree, 5, 3) != chosen(room, tree, 5, 4)
    assert len(chosen(room, tree, 999, 0)) == len(set(chosen(room, tree, 999, 0))) < 40


def test_what_the_tests_do_not_look_at_survives_and_the_tree_stays_as_it_was(tree):
    process = mutate(tree, "--number", "99", "--processes", "2")
    out, err = process.communicate()
    assert process.returncode == 0, err
    result = json.loads((tree / "out.json").read_text())
    survived = {
        (m["line"], m["kind"], m["before"]) for m in result["mutations"] if m["outcome"] == "survived"
    }
    assert result["complete"]
    assert result["survived"] == len(survived)
    assert {(8, "statement", "seen.append(x)"), (11, "arithmetic", "x - 0")} <= survived
    assert not [kind for _, kind, _ in survived if kind == "condition"]
    assert f"noticed {result['noticed']} of {result['noticed'] + result['survived']}" in out
    assert "survived  src/toy/clamp.py:8 statement: seen.append(x) -> pass" in out.split("survived:")[1]
    assert (tree / "src/toy/clamp.py").read_text() == TOY


def test_tests_that_fail_already_are_refused(tree):
    process = mutate(tree, command=("-c", "raise SystemExit(3)"))
    _, err = process.communicate()
    assert process.returncode == 1
    assert "must succeed before anything is changed, it ended with 3" in err
    assert not (tree / "out.json").exists()


def test_a_change_that_hangs_counts_as_noticed(tree):
    hang = "from toy.clamp import clamp\nwhile clamp(1) != 1: pass"
    process = mutate(tree, "--number", "99", "--timeout", "2", "--processes", "4", command=("-c", hang))
    process.communicate()
    outcomes = {m["outcome"] for m in json.loads((tree / "out.json").read_text())["mutations"]}
    assert outcomes >= {"noticed: too slow", "survived"}


def test_interrupted_it_tells_what_is_known_so_far_and_leaves_no_process(tree):
    slow = "import os, time, toy.clamp; print(os.getpid(), file=open('../../pids', 'a')); time.sleep(0.3)"
    temporary = tree / "temporary"
    temporary.mkdir()
    process = mutate(
        tree, "--processes", "2", command=("-c", slow), env={**os.environ, "TMPDIR": str(temporary)}
    )
    assert process.stdout.readline().split()[0] in ("survived", "noticed")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, "")
    result = json.loads((tree / "out.json").read_text())
    assert not result["complete"]
    assert 1 <= len(result["mutations"]) < 20
    assert os.listdir(temporary) == []
