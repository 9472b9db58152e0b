"""What `kill -9` cannot show: that data is on disk, not only in the page cache, before it is told of."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.skills.graph.launchers import job_environment
from shoal.skills.graph.store import Store
from shoal.skills.learning.training import prepare_training_run
from shoal.skills.proposers import knowledge_base
from shoal.skills.spec import load_skills
from shoal.skills.worlds.crafting import CRAFTING

CRASH = Path(__file__).with_name("crash.py")
LINE = re.compile(r"^(\d+) +(\w+)\((.*)\) += +(-?\d+)")
WITH_PATH = re.compile(r"^(\d+)<([^>]*)>")
QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def violations(trace: str, root: str) -> tuple[list[str], int]:
    """Breaches of the three rules in a trace of system calls, and how many durable moments it told of.

    1. a file is synced after its last write and before it is renamed into place;
    2. its folder is synced after the rename, and the database after its last write, before the next event;
    3. no existing file is opened to be overwritten from its start.
    """
    found: list[str] = []
    dirty: set[str] = set()  # written, not synced
    unsynced_names: dict[str, str] = {}  # folder -> a name in it that is not on disk yet
    told = 0
    for line in trace.splitlines():
        match = LINE.match(line)
        if not match or int(match[4]) < 0:
            continue
        call, arguments = match[2], match[3]
        at = WITH_PATH.match(arguments)
        path = at[2] if at else ""
        if call in ("write", "pwrite64") and path.startswith(root):
            dirty.add(path)
        elif call == "write" and '\\"event\\"' in arguments:
            told += 1
            found += [
                f"told of an event before {folder} was synced: {n}" for folder, n in unsynced_names.items()
            ]
            found += [f"told of an event before {p} was synced" for p in dirty if p.endswith("state.db-wal")]
        elif call in ("fsync", "fdatasync"):
            dirty.discard(path)
            unsynced_names.pop(path, None)
        elif call in ("rename", "renameat", "renameat2"):
            names = [name for name in QUOTED.findall(arguments) if name.startswith(root)]
            if len(names) == 2 and f"{root}/skills/" not in names[1]:  # skills/ is a view, made again at will
                if names[0] in dirty:
                    found.append(f"renamed before it was synced: {names[1]}")
                unsynced_names[os.path.dirname(names[1])] = names[1]
        elif call == "openat" and "O_TRUNC" in arguments:
            opened = next(iter(QUOTED.findall(arguments)), "")
            if opened.startswith(root) and "O_EXCL" not in arguments:
                found.append(f"opened to be overwritten: {opened}")
    return found, told


def strace(command: list[str], out: Path) -> str:
    calls = "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2"
    # One file for each thread would lose their order; -f writes one, each line with its thread.
    done = subprocess.run(
        ["strace", "-f", "-y", "-s", "200", "-e", f"trace={calls}", "-o", str(out), *command],
        env={**os.environ, **job_environment(1)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip("this system does not let strace trace")
    assert done.returncode == 0, done.stderr[-2000:]
    return out.read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_training_and_its_merge_are_on_disk_before_they_are_told_of(tmp_path: Path, quick) -> None:
    base = tmp_path / "run"
    spec = load_skills(knowledge_base("crafting"), CRAFTING)[0]
    store = Store(base, create=True)
    store.add_skill(spec, [], 10**6)
    store.assign_expert(spec.name)
    folder, _, _ = prepare_training_run(spec.name, spec, 0, [], {}, base, config=quick, store=store)
    attempt = str(store.begin_attempt(spec.name, folder))
    store.close()
    train = [sys.executable, str(CRASH), "train", "-", str(folder), attempt]
    found, told = violations(strace(train, tmp_path / "trace-train"), str(base))
    assert found == []
    assert told >= 4  # checkpoints, and the end told by the training and by the test's process
    merge = [sys.executable, str(CRASH), "merge", "-", str(base), attempt]
    found, told = violations(strace(merge, tmp_path / "trace-merge"), str(base))
    assert found == []
    assert told == 1
    assert Store(base).skill(spec.name).status == "completed"
