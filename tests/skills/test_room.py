"""The room itself: how many files one skill passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.rooms.trace import Tracer

from shoal.skills.jobs.graph import Graph
from shoal.skills.jobs.runner import LocalLauncher
from shoal.skills.learning.crafting import CRAFTING
from shoal.skills.learning.proposers import knowledge_base
from shoal.skills.learning.run import run_training
from shoal.skills.learning.scheduler import SkillScheduler
from shoal.skills.learning.spec import load_skills

LOADED = load_skills(knowledge_base("crafting"), CRAFTING)
SKILLS = {skill.name: replace(skill, horizon=100) for skill in LOADED}


def test_a_job_passes_two_files(tmp_path: Path) -> None:
    with Tracer("shoal", tmp_path) as tracer:
        graph = Graph(tmp_path / "graph", launcher=LocalLauncher())
        graph.add("nothing", "shoal.skills.jobs.run:leave")  # ends at once, and is a failure
        with tracer.piece() as passed:
            assert not graph.run()
        graph.close()
    files = passed.files(leave_out=("core/", "skills/jobs/graph.py"))
    assert files == {"skills/jobs/runner.py", "skills/jobs/store.py"}


def test_a_skill_passes_those_and_four_of_learning(tmp_path: Path, scripted, quick) -> None:
    with Tracer("shoal", tmp_path) as tracer:
        launcher = scripted(lambda folder, attempt: str(run_training(folder, attempt) and "exit status 0"))
        s = SkillScheduler(tmp_path / "skills", launcher=launcher, config=quick)
        s.add_skill("Collect Wood", SKILLS["Collect Wood"])
        with tracer.piece() as passed:
            assert s.run()
        s.close()
    files = passed.files(leave_out=("core/", "maths/", "vector/", "skills/learning/scheduler.py"))
    jobs = {file for file in files if file.startswith("skills/jobs/")}
    assert jobs == {"skills/jobs/runner.py", "skills/jobs/store.py"}
    assert files - jobs == {f"skills/learning/{name}.py" for name in ("spec", "worlds", "trainer", "run")}
