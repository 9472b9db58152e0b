"""Craftax-Classic with one million env steps in all: how many of its 22 achievements whole episodes come to.

shoal is given what the pixel and symbol learners of the field are not: the specification of the skills
(`shoal/configs/skills/craftax-classic.yaml`: what each needs, uses up and gives) and the symbolic observation. In
return it has 1 M steps, every one counted: practice, the ways to start states, and evaluations while training.
Run by `make bench-craftax [seed …]` (needs the extra "craftax"); results go to `benchmarks/results/craftax.json`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO / "src"), os.environ.get("PYTHONPATH", "")])

from shoal.core.files import write_json  # noqa: E402
from shoal.skills.learning.craftax import CLASSIC_ACHIEVEMENTS, features_of  # noqa: E402
from shoal.skills.learning.episodes import play_episodes  # noqa: E402
from shoal.skills.learning.proposers import knowledge_base  # noqa: E402
from shoal.skills.learning.scheduler import SkillScheduler  # noqa: E402
from shoal.skills.learning.spec import Store, load_skills  # noqa: E402
from shoal.skills.learning.worlds import default_config  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "craftax.json"
WORLD = "craftax-classic"
EPISODES, UNSEEN = 256, 12345
LONGEST = 2_500  # steps; what an episode of more would still come to is not counted
CASE = "Craftax-Classic, 1 M steps"
# Env steps of practice; what can be done where one stands takes few. The ways and evaluations come to 150,000 more.
BUDGETS = {
    "Collect Wood": 60e3, "Collect Stone": 90e3, "Collect Coal": 60e3, "Collect Iron": 60e3, "Collect Sapling": 30e3,
    "Drink Water": 50e3, "Eat Cow": 110e3, "Defeat Zombie": 120e3, "Sleep": 20e3,
    "Make Wood Pickaxe": 30e3, "Make Wood Sword": 30e3, "Make Stone Pickaxe": 24e3, "Make Stone Sword": 24e3,
}  # fmt: skip
OTHERS = 14e3


def train(folder: Path, seed: int) -> None:
    """All skills of the specification, one after another, within their budgets."""
    config = replace(
        default_config(WORLD), update_epochs=10, num_minibatches=16, ent_coef=0.005, evaluation_episodes=48,
        bank_worlds=96, evaluate_every=4, patience_frames=1e9, min_success=0.0,
    )  # fmt: skip
    scheduler = SkillScheduler(
        folder,
        int(os.environ.get("SLOTS", "1")),
        world=WORLD,
        seed=seed,
        config=config,
        analyse=False,
        max_retries=1,
    )
    known = {row.name for row in scheduler.store.skills()}
    for skill in load_skills(knowledge_base(WORLD), features_of(WORLD)):
        if skill.name not in known:
            scheduler.add_skill(skill.name, skill)
            scheduler.store.update_skill(skill.name, budget_total=int(BUDGETS.get(skill.name, OTHERS)))
    scheduler.store.set_setting("total_timesteps", int(config.total_timesteps))
    scheduler.run()
    scheduler.close()


def cpu_seconds() -> float:
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def run(seed: int, folder: Path) -> list[dict[str, Any]]:
    """Train and play; the rows of one seed."""
    began, cpu = time.monotonic(), cpu_seconds()
    train(folder, seed)
    trained, trained_cpu = time.monotonic() - began, cpu_seconds() - cpu
    store = Store(folder)
    done = {row.name: row.result for row in store.skills("completed")}
    for name, result in done.items():
        print(f"{name:<20} {result['success']:.2f} after {result['steps_in_all']:>9,} steps", flush=True)
    steps = sum(result["steps_in_all"] for result in done.values())
    report = play_episodes(store, EPISODES, UNSEEN + seed, most_steps=LONGEST)
    played_cpu = cpu_seconds() - cpu - trained_cpu
    rows: list[dict[str, Any]] = []

    def add(case: str, value: float, unit: str, cpu: float = 0.0, runs: int = 1) -> None:
        rows.append(
            {"case": f"{CASE}: {case}", "subject": f"shoal, seed {seed}", "value": value, "unit": unit,
             "cpu_seconds": cpu, "runs": runs}
        )  # fmt: skip
        print(f"{case:<44} {value:>12,.4g} {unit}", flush=True)

    add("reward, 256 unseen episodes", 100 * report.reward(CLASSIC_ACHIEVEMENTS), "%", played_cpu, EPISODES)
    add("score, 256 unseen episodes", 100 * report.score(CLASSIC_ACHIEVEMENTS), "%", played_cpu, EPISODES)
    add("env steps of all trainings", steps, "steps", trained_cpu)
    add("skills that were trained", len(done), "of " + str(len(store.skills())), trained_cpu)
    add("wall seconds of all trainings", trained, "s", trained_cpu)
    add("mean length of an episode", float(report.lengths.mean()), "steps", played_cpu, EPISODES)
    add("longest episode, cut at 2,500", float(report.lengths.max()), "steps", played_cpu, EPISODES)
    add("episodes that ended by death", 100 * report.died, "%", played_cpu, EPISODES)
    for name in CLASSIC_ACHIEVEMENTS:
        add(name, 100 * report.had[name], "%", 0.0, EPISODES)
    return rows


def main() -> None:
    """The seeds named as arguments, by default 0; rows of others stay as they were."""
    seeds = [int(word) for word in sys.argv[1:]] or [0]
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            rows += run(seed, Path(os.environ.get("KEEP", folder)))
    if RESULTS.exists():
        mine = {(row["case"], row["subject"]) for row in rows}
        old = json.loads(RESULTS.read_text())["rows"]
        rows = [row for row in old if (row["case"], row["subject"]) not in mine] + rows
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "jax", "craftax")}
    machine = {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count()}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions["python"] = platform.python_version()
    write_json(RESULTS, {"machine": machine, "versions": versions, "date": date, "rows": rows})


if __name__ == "__main__":
    main()
