"""Real training processes: adopted, killed, resumed, watched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.skills.conftest import wait_for

from shoal.skills.graph.launchers import job_environment, start_time
from shoal.skills.graph.store import Store
from shoal.skills.learning.trainer import TrainingConfig
from shoal.skills.proposers import knowledge_base
from shoal.skills.scheduler import SkillScheduler
from shoal.skills.spec import load_skills
from shoal.skills.worlds.crafting import CRAFTING

LOADED = load_skills(knowledge_base("crafting"), CRAFTING)
SKILLS = {skill.name: replace(skill, horizon=100) for skill in LOADED}
LONG = {"patience_frames": 1e9, "success_state_rate": 2.0, "evaluate_every": 16, "checkpoint_every": 4}
SCHEDULE = """
import json, sys
from shoal.skills.scheduler import SkillScheduler
from shoal.skills.learning.trainer import TrainingConfig
s = SkillScheduler(sys.argv[1], 2, 0.2, config=TrainingConfig(**json.loads(sys.argv[2])),
                   on_event=lambda e: print(json.dumps(e), flush=True))
s.run()
"""


def config_of(quick, **change) -> dict:
    return asdict(replace(quick, **change))


def start(base: Path, config: dict) -> subprocess.Popen[str]:
    env = {**os.environ, **job_environment(2)}
    return subprocess.Popen(
        [sys.executable, "-c", SCHEDULE, str(base), json.dumps(config)],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )


def add_wood(base: Path, config: dict) -> None:
    s = SkillScheduler(base, config=TrainingConfig(**config))
    s.add_skill("Collect Wood", SKILLS["Collect Wood"])
    s.close()


pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def head_sha(base: Path) -> str:
    store = Store(base)
    head = store.head(0)
    store.close()
    assert head is not None
    return head.sha256


def has_checkpoints(run: Path) -> bool:
    return len([*run.glob("0_policies/checkpoint-*")]) > 1


def test_a_training_survives_its_scheduler_and_is_adopted(tmp_path: Path, quick, stand_still) -> None:
    stand_still()
    config = config_of(quick, total_timesteps=7_000, **LONG)
    add_wood(tmp_path, config)
    process = start(tmp_path, config)
    store = Store(tmp_path)
    wait_for(lambda: store.attempts() and store.attempts()[0].handle)
    handle = store.attempts()[0].handle
    assert handle is not None
    wait_for(lambda: has_checkpoints(tmp_path / "training_runs" / "skill_0_Collect_Wood"))
    process.kill()
    process.communicate()
    assert start_time(handle["pid"]) == handle["began"]  # it goes on
    second = start(tmp_path, config)
    os.kill(handle["pid"], signal.SIGCONT)
    second.communicate(timeout=200)
    assert store.skill("Collect Wood").status == "completed"
    assert len(store.attempts()) == 1  # adopted, not launched again
    assert start_time(handle["pid"]) != handle["began"]


def test_a_killed_training_resumes_from_its_checkpoint_and_gives_the_same_expert(
    tmp_path: Path, quick, stand_still
) -> None:
    config = config_of(quick, total_timesteps=7_000, **LONG)
    for name in ("whole", "killed"):
        add_wood(tmp_path / name, config)
    start(tmp_path / "whole", config).communicate(timeout=200)
    stand_still()
    process = start(tmp_path / "killed", config)
    store = Store(tmp_path / "killed")
    run = tmp_path / "killed" / "training_runs" / "skill_0_Collect_Wood"
    wait_for(lambda: has_checkpoints(run) and store.attempts()[0].handle)
    os.kill(store.attempts()[0].handle["pid"], signal.SIGKILL)  # type: ignore[index]
    process.communicate(timeout=200)
    assert [attempt.outcome for attempt in store.attempts()] == ["failed", "merged"]
    assert "killed by signal 9" in (store.attempts()[0].reason or "")
    assert head_sha(tmp_path / "killed") == head_sha(tmp_path / "whole")
    lines = (tmp_path / "killed/skills/0_Collect_Wood/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["update"] for row in rows] == list(range(1, len(rows) + 1))  # no update twice, none missing


@pytest.mark.slow
def test_experts_do_not_depend_on_how_many_train_at_once(tmp_path: Path, quick) -> None:
    def train(slots: int) -> dict[str, str]:
        s = SkillScheduler(tmp_path / str(slots), slots, config=quick)
        for name in ("Collect Wood", "Drink Water", "Collect Sapling"):
            s.add_skill(name, SKILLS[name])
        assert s.run()
        found = {row.name: s.store.head(row.expert).sha256 for row in s.store.skills()}  # type: ignore[arg-type,union-attr]
        s.close()
        return {name: _weights(s.base_dir, sha) for name, sha in found.items()}

    assert train(1) == train(3)


def _weights(base: Path, sha: str) -> str:
    from shoal.skills.learning.network import decode

    arrays, _ = decode((base / "experts" / f"{sha}.safetensors").read_bytes(), sha)
    return "".join(arrays[key].tobytes().hex()[:64] for key in sorted(arrays))


def test_tmux_trainings_can_be_attached_to(tmp_path: Path, quick, tmux) -> None:
    s = SkillScheduler(tmp_path, launcher=tmux(tmp_path), config=quick)
    s.add_skill("Collect Wood", SKILLS["Collect Wood"])
    assert s.run()
    attempt = s.store.attempts()[0]
    assert attempt.handle is not None
    assert attempt.handle["session"] == "shoal_e0_Collect_Wood_1"
    assert '"event": "trained"' in (tmp_path / "skills" / "0_Collect_Wood" / "training-1.log").read_text()


@pytest.mark.slow
@pytest.mark.ray
def test_ray_trainings_are_the_same(tmp_path: Path, quick) -> None:
    ray = pytest.importorskip("ray")
    from shoal.skills.graph.launchers import RayLauncher

    try:
        s = SkillScheduler(tmp_path / "ray", launcher=RayLauncher(), config=quick)
        for name in ("Collect Wood", "Drink Water"):
            s.add_skill(name, SKILLS[name])
        assert s.run()
    finally:
        ray.shutdown()
    local = SkillScheduler(tmp_path / "local", config=quick)
    local.add_skill("Collect Wood", SKILLS["Collect Wood"])
    assert local.run()
    assert head_sha(tmp_path / "ray") == head_sha(tmp_path / "local")
