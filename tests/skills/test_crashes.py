"""`kill -9` at named and at random points: nothing committed is lost, nothing is torn, nothing counts twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.skills.conftest import skill

from shoal.skills.graph.launchers import LocalLauncher, job_environment
from shoal.skills.graph.requests import ask_to_cancel, ask_to_stop, reopen
from shoal.skills.graph.store import NewVersion, Store
from shoal.skills.learning.network import Network, decode, encode
from shoal.skills.learning.training import finish_training, prepare_training_run, read_outcome
from shoal.skills.plan import dependencies
from shoal.skills.proposers import knowledge_base
from shoal.skills.scheduler import SkillScheduler
from shoal.skills.spec import load_skills
from shoal.skills.worlds.crafting import CRAFTING

CRASH = Path(__file__).with_name("crash.py")
ENV = {**os.environ, **job_environment(2)}
SKILLS = [replace(skill, horizon=100) for skill in load_skills(knowledge_base("crafting"), CRAFTING)]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CRASH), *arguments],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def events_of(process: subprocess.Popen[str]) -> list[dict]:
    """The durable moments it told of, as whole lines; a test fails on any error but being killed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), err[-2000:]
    return [json.loads(line) for line in out.split("\n")[:-1]]


def points(rng: random.Random, most: dict[str, int]) -> Iterator[str]:
    """Named points and, for every other kill, none: then the parent kills after a random delay."""
    while True:
        name = rng.choice(sorted(most))
        yield f"{name}:{rng.randint(1, most[name])}"
        yield "-"


def kill_after(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()


def check_files(store: Store) -> None:
    """Every version's file is there and is what its name says; the database is sound."""
    for row in store.versions():
        decode(store.get_blob(row.sha256), row.sha256)
    assert store._query("pragma integrity_check")[0][0] == "ok"


def kill_trainings(tmp_path: Path, quick, kills: int) -> int:
    config = replace(quick, total_timesteps=6 * 512, success_state_rate=2.0, patience_frames=1e9)
    spec = SKILLS[0]

    def prepare(base: Path) -> Path:
        return prepare_training_run(spec.name, spec, 0, [], {}, base, config=config)[0]

    whole = prepare(tmp_path / "whole")
    assert events_of(start("train", "-", str(whole), "1"))
    expected = read_outcome(whole, 1).experts[0]["actor/weight"].tobytes()
    done = finished = 0
    rng = random.Random(0)
    folder = prepare(tmp_path / "0")
    for where in points(rng, {"fsync": 20, "replace": 10, "replaced": 10}):
        if done >= kills:
            break
        process = start("train", where, str(folder), "1")
        if where == "-":
            kill_after(process, rng.uniform(0.2, 1.2))
        told = events_of(process)
        done += process.returncode == -signal.SIGKILL
        if any(event["event"] == "trained" for event in told) or (folder / "DONE.json").exists():
            outcome = read_outcome(folder, 1)  # the mark is never there without the whole result
            assert outcome.experts[0]["actor/weight"].tobytes() == expected
            finished += 1
            folder = prepare(tmp_path / str(finished))
    return finished


def kill_merges(tmp_path: Path, net: Callable[..., Network], kills: int) -> int:
    """Three processes merge runs that all trained one shared expert; each is killed again and again."""
    rng = random.Random(1)
    done = rounds = 0
    while done < kills:
        base = tmp_path / f"merge-{rounds}"
        rounds += 1
        store, attempts = shared_expert(base, net, 12)
        acked: set[int] = set()
        source = points(rng, {"fsync": 12, "replace": 6, "replaced": 6, "commit": 4, "committed": 4})
        while {a.id for a in store.attempts() if a.outcome == "merged"} != set(attempts):
            wheres = [next(source) if done < kills else "-" for _ in range(3)]
            group = [
                start("merge", where, str(base), *map(str, attempts[i::3])) for i, where in enumerate(wheres)
            ]
            for where, process in zip(wheres, group, strict=True):
                if where == "-" and done < kills:
                    kill_after(process, rng.uniform(0.15, 0.6))
            for process in group:
                acked |= {event["attempt"] for event in events_of(process)}
                done += process.returncode == -signal.SIGKILL
            merged = {a.id for a in store.attempts() if a.outcome == "merged"}
            assert acked <= merged  # what was told is there
            check_files(store)
        # Every run made one version of its own expert and one of the shared one, and counted its frames once.
        assert len(store.versions()) == 1 + 2 * len(attempts)
        assert store.versions(0)[0].frames == 50
        assert sorted(row.acted for row in store.versions(0)[1:]) == [100 + i for i in range(len(attempts))]
        head = store.head(0)
        assert head is not None
        assert head.frames == 50 + 100 + len(attempts) - 1  # most frames: the last of the runs
        assert sum(row.budget_used for row in store.skills()) == sum(range(1000, 1000 + len(attempts)))
        store.close()
    return rounds


def shared_expert(base: Path, net: Callable[..., Network], runs: int) -> tuple[Store, list[int]]:
    """Expert 0 with 50 frames, and finished runs that each trained it by 100, 101, … frames."""
    store = Store(base, create=True)
    store.add_skill(skill("Collect Wood", "wood"), [], 10**6)
    store.assign_expert("Collect Wood")
    first = store.put_blob(encode(net("base").params()))
    store.add_version(NewVersion(0, first, None, 50, 50, True))
    store.update_skill("Collect Wood", status="completed")
    attempts = []
    for i in range(runs):
        name = f"Skill {i}"
        spec = skill(name, "stone")
        store.add_skill(spec, ["Collect Wood"], 10**6)
        expert = store.assign_expert(name)
        folder, _, _ = prepare_training_run(
            name,
            spec,
            expert,
            ["Collect Wood"],
            {"Collect Wood": {"expert_idx": 0}},
            base,
            store=store,
        )
        attempt = store.begin_attempt(name, folder)
        finish_training(
            folder, {0: net("wood", i).params(), 1: net("own", i).params()}, {0: 100 + i, 1: 7}, attempt=attempt,
            frames=1000 + i,
        )  # fmt: skip
        attempts.append(attempt)
    return store, attempts


def kill_schedulers(tmp_path: Path, quick, kills: int) -> Counter[str]:
    """A scheduler and its trainings are killed; in the end the experts are those of an undisturbed run.

    Meanwhile somebody cancels skills and opens them again, stops all, and changes budgets: how often is returned.
    """
    config = replace(
        quick,
        total_timesteps=1e5,
        success_state_rate=0.0,
        patience_frames=1e9,
        evaluate_every=2,
        anneal_frames=1000,
    )
    names = ["Collect Wood", "Drink Water", "Collect Sapling"]

    def prepare(base: Path) -> Store:
        s = SkillScheduler(base, config=config)
        for spec in SKILLS:
            if spec.name in names:
                s.add_skill(spec.name, spec, dependencies(spec, SKILLS, CRAFTING))
        s.close()
        return Store(base)

    def results(store: Store) -> dict[str, tuple[int, bytes]]:
        found = {}
        for row in store.skills():
            head = store.head(int(row.expert or 0))
            assert head is not None
            weights = decode(store.get_blob(head.sha256), "x")[0]["actor/weight"].tobytes()
            found[row.name] = (row.budget_used, weights)
        return found

    settings = json.dumps(asdict(config))
    whole = prepare(tmp_path / "whole")
    assert events_of(start("schedule", "-", str(tmp_path / "whole"), settings))
    expected = results(whole)
    rng = random.Random(2)
    happened: Counter[str] = Counter()
    rounds = 0
    while happened["killed"] < kills:
        base = tmp_path / f"schedule-{rounds}"
        rounds += 1
        store = prepare(base)
        acked: set[str] = set()
        source = points(rng, {"fsync": 40, "replace": 20, "commit": 20, "committed": 20})
        until = time.monotonic() + 240
        while any(row.status != "completed" for row in store.skills()):
            assert time.monotonic() < until
            go_on = happened["killed"] < kills
            meddle(store, rng if go_on else None, happened)
            where = next(source) if go_on else "-"
            process = start("schedule", where, str(base), settings)
            if where == "-" and go_on:
                time.sleep(rng.uniform(0.3, 1.2))
                if rng.random() < 0.3:
                    meddle(store, rng, happened)
                if rng.random() < 0.5:
                    happened["stopped"] += ask_to_stop(store, wait=False)
                for attempt in store.attempts(running=True):
                    if attempt.handle and rng.random() < 0.5:
                        LocalLauncher().kill(attempt.handle)
                        happened["killed"] += 1
                process.kill()
            told = events_of(process)
            happened["killed"] += process.returncode == -signal.SIGKILL
            acked |= {event["skill"] for event in told if event["event"] == "merge"}
            assert acked <= {row.name for row in store.skills("completed")}
            check_files(store)
        merged = [attempt.skill for attempt in store.attempts() if attempt.outcome == "merged"]
        assert sorted(merged) == sorted(names)  # each once
        assert [len(store.versions(row.expert)) for row in store.skills()] == [1, 1, 1]
        assert results(store) == expected
        store.close()
    return happened


def meddle(store: Store, rng: random.Random | None, happened: Counter[str]) -> None:
    """Open again what was given up; with `rng` also give up what is not, and change budgets."""
    for row in store.skills():
        if row.status in ("skipped", "failed", "blocked"):
            reopen(store, row.name)
        elif rng is None:
            if row.cancel:
                store.update_skill(row.name, cancel=0)
        elif rng.random() < 0.15 and row.status in ("waiting", "running"):
            ask_to_cancel(store, row.name)
            happened["cancelled"] += 1
        elif rng.random() < 0.2 and row.status != "completed":
            reopen(store, row.name, budget=rng.choice([200_000, 300_000]))
            happened["budgets"] += 1


def test_merges_of_three_killed_processes_lose_nothing_and_count_once(tmp_path: Path, net) -> None:
    assert kill_merges(tmp_path, net, 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["training", "merge", "scheduler"])
def test_thirty_kills_of_each_lose_nothing(tmp_path: Path, quick, net, victim: str) -> None:
    if victim == "training":
        assert kill_trainings(tmp_path, quick, 30)
    elif victim == "merge":
        assert kill_merges(tmp_path, net, 30)
    else:
        assert kill_schedulers(tmp_path, quick, 30)["killed"] >= 30
