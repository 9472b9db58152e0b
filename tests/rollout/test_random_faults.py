"""Faults of envs and engine, mixed at random: each costs its own episode, and every episode is counted once."""

import contextlib
import os
import random
import re
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from tests.rollout.doubles import ENV_ERRORS, HARMLESS, SHORT, TURNS, FaultyEngine, kinds, of_kind

from shoal import ParallelRolloutManager, derive_seed

BACKENDS = ("serial", "thread", "process")
SEED, ITERATION = 7, 4
PATIENCE = 60
"""Seconds within which what a rollout started has ended."""


def config(n_groups, members, faults, folder, schedule):
    """A rollout of `World` in which all that hangs is given up."""
    env = {"env_type": "tests.rollout.doubles:World", "env_config": {"faults": faults, "folder": str(folder)}}
    limits = {"step_timeout": SHORT, "engine_timeout": SHORT, "engine_restarts": 10_000, "max_deaths": 2}
    proxy = {"max_tokens": 8, "parallel_n_jobs": 3, "parallel": {"schedule": schedule, **limits}}
    return of_kind(env, n_groups, members, "World", SEED, {"later": "{history}{observation}"}, **proxy)


def draw(seed, backend, n_faults):
    """Faults by (group, member), half of them of envs, which meet the whole group; few that hang or kill."""
    rng = random.Random(f"{seed} {backend}")
    known = kinds(backend)
    slow = [kind for kind in known if kind.endswith(("hang", "kill", "kill once"))]
    drawn = [
        rng.choice(slow if slow and rng.random() < 0.08 else [kind for kind in known if kind not in slow])
        for _ in range(n_faults)
    ]
    of_envs = [kind for kind in drawn if kind.startswith("env")][: n_faults // 4]  # each counts twice
    of_engine = [kind for kind in drawn if kind.startswith("engine")]
    of_engine += ["engine: refuse"] * n_faults
    of_engine = of_engine[: n_faults - 2 * len(of_envs)]
    n_groups = len(of_envs) + (len(of_engine) * 3 + 5) // 4 + 1
    groups = rng.sample(range(n_groups), n_groups)
    plan = {}
    for group, kind in zip(groups, of_envs, strict=False):
        at = rng.randrange(TURNS)
        plan[group, 0] = plan[group, 1] = (kind, at)
    seats = [(group, member) for group in groups[len(of_envs) :] for member in range(2)]
    for seat, kind in zip(rng.sample(seats, len(of_engine)), of_engine, strict=True):
        plan[seat] = (kind, rng.randrange(TURNS))
    assert len(plan) == n_faults
    return n_groups, plan


def play(backend, n_groups, members, plan, folder, schedule="adaptive"):
    """The trajectories of one rollout; everything that hangs goes on when it is over."""
    of_envs = {
        str(derive_seed(SEED, "env", ITERATION, group)): f"{kind.removeprefix('env: ')} {at}"
        for (group, _), (kind, at) in plan.items()
        if kind.startswith("env")
    }
    of_engine = {
        seat: (kind.removeprefix("engine: "), at)
        for seat, (kind, at) in plan.items()
        if kind.startswith("engine")
    }
    engine = FaultyEngine(of_engine)
    settings = config(n_groups, members, of_envs, folder, schedule)
    try:
        with ParallelRolloutManager(settings, engine, backend=backend) as manager:
            return manager.collect(ITERATION)
    finally:
        engine.go.set()
        (Path(folder) / "go").touch()


def wanted(kind, at, calm):
    """Status, turns and a pattern for the reason, as one fault must leave its episode; None for any turns."""
    name = kind.partition(": ")[2]
    if kind in HARMLESS or name == "kill once":
        return "ok", calm.turns, None
    if name == "context":
        return "ok", calm.turns[:at], None
    if kind == "env: kill":
        return "env_error", None, "lost"
    if kind == "env: hang":
        return "timeout", (), r"no answer within 1(\.0)? s"
    if name == "hang":
        return "timeout", calm.turns[:at], r"(did not|no) answer within 1(\.0)? s"
    if kind.startswith("env"):
        return "env_error", () if name == "reset" else calm.turns[:at], re.escape(ENV_ERRORS[name])
    return "engine_error", calm.turns[:at], "."


def check(calm, played, plan):
    """Each episode is there once, in its place, with what its fault leaves; the calm ones are those of a calm run."""
    assert [(t.group, t.member) for t in played] == [(t.group, t.member) for t in calm]
    wrong = []
    for before, now in zip(calm, played, strict=True):
        seat = now.group, now.member
        if seat not in plan:
            if now != before:
                wrong.append((seat, "calm", now.status, now.error))
            continue
        kind, at = plan[seat]
        status, turns, why = wanted(kind, at, before)
        told = now.error is None if why is None else re.search(why, now.error or "") is not None
        if (now.status, told) != (status, True) or (turns is not None and now.turns != turns):
            wrong.append((seat, kind, at, now.status, len(now.turns), now.error))
        elif kind == "engine: context":
            assert (now.truncated, now.terminated) == (True, False)
        elif status != "ok":
            assert not now.success
        elif now != before:
            wrong.append((seat, kind, at, "not as in a calm run"))
    assert wrong == []
    expected = Counter(
        wanted(*plan[t.group, t.member], t)[0] if (t.group, t.member) in plan else "ok" for t in calm
    )
    assert Counter(t.status for t in played) == expected


# --- what is left behind
def descendants():
    """Processes that this one started, however far down."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def descriptors():
    """What this process has open, by what it is."""
    found = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[re.sub(r"\d+", "", os.readlink(entry)).partition(":")[0]] += 1
        except OSError:
            continue
    return found


def remains(folder):
    """Everything that a rollout may leave behind."""
    return {
        "processes": descendants(),
        "threads": set(threading.enumerate()),
        "descriptors": descriptors(),
        "temporary files": {path.name for path in folder.iterdir()},
    }


def new_since(before, folder):
    """What is there now and was not before."""
    now = remains(folder)
    return {name: left for name in now if (left := now[name] - before[name])}


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder in which temporary files are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def faults_cost_only_their_own_episodes(backend, seed, n_faults, tmp_path, temporary):
    n_groups, plan = draw(seed, backend, n_faults)
    calm = play("serial", n_groups, 2, {}, tmp_path)
    (tmp_path / "go").unlink()
    play(backend, 2, 2, {}, tmp_path)  # what is kept for the next rollout has been started
    (tmp_path / "go").unlink()
    before = remains(temporary)
    played = play(backend, n_groups, 2, plan, tmp_path, ("barrier", "adaptive")[seed % 2])
    check(calm, played, plan)
    end = time.monotonic() + PATIENCE
    while (left := new_since(before, temporary)) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == {}


# --- the tests
CASES = [
    pytest.param(backend, kind, marks=[pytest.mark.slow] if backend != "serial" else [])
    for backend in BACKENDS
    for kind in kinds(backend)
]


@pytest.mark.parametrize(("backend", "kind"), CASES)
@pytest.mark.flaky(reruns=2)
def test_a_fault_of_any_kind_costs_its_own_episode(backend, kind, tmp_path):
    """Two members of group 1 meet it, at turn 2 (an env) or one of them (an engine)."""
    seats = [(1, 0), (1, 1)] if kind.startswith("env") else [(1, 1)]
    plan = dict.fromkeys(seats, (kind, 2))
    calm = play("serial", 3, 2, {}, tmp_path)
    (tmp_path / "go").unlink()
    check(calm, play(backend, 3, 2, plan, tmp_path), plan)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.flaky(reruns=2)
def test_a_few_faults_cost_their_own_episodes_and_leave_nothing_behind(backend, tmp_path, temporary):
    faults_cost_only_their_own_episodes(backend, 1, 15, tmp_path, temporary)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_hundred_faults_cost_their_own_episodes_and_leave_nothing_behind(
    backend, seed, tmp_path, temporary
):
    faults_cost_only_their_own_episodes(backend, seed, 200, tmp_path, temporary)
