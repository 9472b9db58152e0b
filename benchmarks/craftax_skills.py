"""Craftax-Classic and Craftax with one million env steps in all: how many achievements whole episodes come to.

shoal is given what the pixel and symbol learners of the field are not: the specification of the skills
(`shoal/configs/skills/craftax-classic.yaml` and `craftax.yaml`: what each needs, uses up and gives) and the symbolic
observation. In return it has 1 M steps, every one counted: practice, the ways to start states, and evaluations while
training. Run by `make bench-craftax` (needs the extra "craftax"; CASE="classic", "full" or "iron", SEEDS="0 1 2");
results go to `benchmarks/results/craftax.json`. `--quick` trains what the wood pickaxe needs for a few steps, to see
that all of it runs, and saves nothing.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO / "src"), os.environ.get("PYTHONPATH", "")])

from shoal.core.files import write_json  # noqa: E402
from shoal.skills.graph.store import Store  # noqa: E402
from shoal.skills.learning.episodes import EpisodesReport, evaluate_chain, play_episodes  # noqa: E402
from shoal.skills.learning.trainer import default_config  # noqa: E402
from shoal.skills.plan import plan_for  # noqa: E402
from shoal.skills.proposers import knowledge_base  # noqa: E402
from shoal.skills.scheduler import SkillScheduler  # noqa: E402
from shoal.skills.spec import Skill, load_skills  # noqa: E402
from shoal.skills.worlds.craftax import ACHIEVEMENTS, CLASSIC_ACHIEVEMENTS, features_of  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "craftax.json"
UNSEEN = 12345
LONGEST = 2_500  # steps; what an episode of more would still come to is not counted
OTHERS = 14e3


@dataclass(frozen=True)
class Case:
    """A world, and the env steps of practice of each skill; what can be done where one stands takes `OTHERS`."""

    title: str
    world: str
    budgets: Mapping[str, float]
    goal: str | None = None  # all that is worth anything: train what it needs and what upkeep asks for
    episodes: int = 256

    def skills(self) -> list[Skill]:
        """Of the world's specification."""
        features = features_of(self.world)
        known = load_skills(knowledge_base(self.world), features)
        if self.goal is None:
            return known
        needed = {step.skill for step in plan_for(self.goal, known, features)}
        return [skill for skill in known if skill.name in needed or skill.upkeep]


# The ways and evaluations come to 150,000 env steps more.
CLASSIC = {
    "Collect Wood": 60e3, "Collect Stone": 90e3, "Collect Coal": 60e3, "Collect Iron": 60e3, "Collect Sapling": 30e3,
    "Drink Water": 50e3, "Eat Cow": 110e3, "Defeat Zombie": 120e3, "Sleep": 20e3,
    "Make Wood Pickaxe": 30e3, "Make Wood Sword": 30e3, "Make Stone Pickaxe": 24e3, "Make Stone Sword": 24e3,
}  # fmt: skip
FULL = {
    "Collect Wood": 60e3, "Collect Stone": 70e3, "Collect Coal": 40e3, "Collect Sapling": 30e3, "Enter Dungeon": 90e3,
    "Open Chest": 30e3, "Drink Water": 40e3, "Eat Cow": 90e3, "Defeat Zombie": 80e3,
    "Make Wood Pickaxe": 30e3, "Make Wood Sword": 30e3, "Make Stone Pickaxe": 24e3, "Make Stone Sword": 24e3,
}  # fmt: skip
CASES = {
    "classic": Case("Craftax-Classic, 1 M steps", "craftax-classic", CLASSIC),
    "full": Case("Craftax, 1 M steps", "craftax", FULL),
    "iron": Case(
        "Craftax-Classic, what the iron pickaxe needs",
        "craftax-classic",
        {**CLASSIC, "Make Iron Pickaxe": 60e3},
        "Make Iron Pickaxe",
        512,
    ),
}
QUICK = Case(
    "Craftax-Classic, a try",
    "craftax-classic",
    dict.fromkeys(("Collect Wood", "Make Wood Pickaxe"), 4e3),
    "Make Wood Pickaxe",
    8,
)


def train(case: Case, folder: Path, seed: int) -> None:
    """The skills of a case, one after another, within their budgets."""
    config = replace(
        default_config(case.world), update_epochs=10, num_minibatches=16, ent_coef=0.005, evaluation_episodes=48,
        bank_worlds=96, evaluate_every=4, patience_frames=1e9, min_success=0.0,
    )  # fmt: skip
    scheduler = SkillScheduler(
        folder,
        int(os.environ.get("SLOTS", "1")),
        world=case.world,
        seed=seed,
        config=config,
        max_retries=1,
    )
    known = {row.name for row in scheduler.store.skills()}
    for skill in case.skills():
        if skill.name not in known:
            scheduler.add_skill(skill.name, skill)
            budget = int(case.budgets.get(skill.name, OTHERS))
            scheduler.store.update_skill(skill.name, budget_total=budget)
    scheduler.store.set_setting("total_timesteps", int(config.total_timesteps))
    scheduler.run()
    scheduler.close()


def cpu_seconds() -> float:
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def paid(had: Mapping[str, float]) -> tuple[float, float]:
    """What Craftax pays for achievements, had by these shares of episodes, and the most that it could pay."""
    from craftax.craftax.constants import ACHIEVEMENT_REWARD_MAP, Achievement

    each = {one.name.lower(): float(ACHIEVEMENT_REWARD_MAP[one.value]) for one in Achievement}
    return sum(each[name] * had[name] for name in ACHIEVEMENTS), sum(each.values())


def tell(case: Case, report: EpisodesReport) -> dict[str, float]:
    """What the field reports of a world's episodes, in percent; nothing of a few of its skills."""
    if case.goal is not None:
        return {}
    if case.world == "craftax":
        reward, most = paid(report.had)
        return {"reward": 100 * reward / most}
    names = CLASSIC_ACHIEVEMENTS
    return {"reward": 100 * report.reward(names), "score": 100 * report.score(names)}


def run(case: Case, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Train and play; the rows of one seed. What a folder that was kept holds already is not trained again."""
    train(case, folder, seed)
    store = Store(folder, create=True)
    done = {row.name: row.result for row in store.skills("completed")}
    for name, result in done.items():
        print(f"{name:<20} {result['success']:.2f} after {result['steps_in_all']:>9,} steps", flush=True)
    steps, trained_cpu, trained = (
        sum(result[what] for result in done.values()) for what in ("steps_in_all", "cpu_seconds", "seconds")
    )
    cpu = cpu_seconds()
    worth = None if case.goal is None else {case.goal: 1.0}
    report = play_episodes(store, case.episodes, UNSEEN + seed, most_steps=LONGEST, worth=worth)
    played_cpu = cpu_seconds() - cpu
    rows: list[dict[str, Any]] = []

    def add(words: str, value: float, unit: str, cpu: float = 0.0, runs: int = 1) -> None:
        rows.append(
            {"case": f"{case.title}: {words}", "subject": f"shoal, seed {seed}", "value": value, "unit": unit,
             "cpu_seconds": cpu, "runs": runs}
        )  # fmt: skip
        print(f"{words:<44} {value:>12,.4g} {unit}", flush=True)

    def played(words: str, value: float, unit: str, cpu: float = played_cpu) -> None:
        add(words, value, unit, cpu, case.episodes)

    for words, value in tell(case, report).items():
        played(f"{words}, {case.episodes:,} unseen episodes", value, "%")
    add("env steps of all trainings", steps, "steps", trained_cpu)
    add("skills that were trained", len(done), "of " + str(len(store.skills())), trained_cpu)
    add("wall seconds of all trainings", trained, "s", trained_cpu)
    if case.goal is not None:
        cpu = cpu_seconds()
        chain = evaluate_chain(store, case.episodes, UNSEEN + seed, case.goal)
        played("made by its plan alone, without upkeep", 100 * chain.success, "%", cpu_seconds() - cpu)
        needed = [done[name] for name in chain.skills]
        words = "env steps of the trainings that its plan needs"
        add(
            words,
            sum(result["steps_in_all"] for result in needed),
            "steps",
            sum(r["cpu_seconds"] for r in needed),
        )
    played("mean length of an episode", float(report.lengths.mean()), "steps")
    played("longest episode, cut at 2,500", float(report.lengths.max()), "steps")
    played("episodes that ended by death", 100 * report.died, "%")
    for name in CLASSIC_ACHIEVEMENTS if case.world == "craftax-classic" else ACHIEVEMENTS:
        if name in CLASSIC_ACHIEVEMENTS or report.had[name] > 0:
            played(name, 100 * report.had[name], "%", 0.0)
    return rows


def main() -> None:
    """The case and the seeds named as arguments, by default "classic" and 0; rows of others stay as they were."""
    words = sys.argv[1:]
    if importlib.util.find_spec("craftax") is None:
        raise SystemExit('Craftax is not installed: pip install -e ".[craftax]"')
    if words == ["--quick"]:
        with tempfile.TemporaryDirectory() as folder:
            run(QUICK, 0, Path(folder))
        return
    case = CASES[words.pop(0)] if words and words[0] in CASES else CASES["classic"]
    rows: list[dict[str, Any]] = []
    for seed in [int(word) for word in words] or [0]:
        with tempfile.TemporaryDirectory() as folder:
            rows += run(case, seed, Path(os.environ.get("KEEP", folder)))
    if RESULTS.exists():
        subjects = {row["subject"] for row in rows}
        old = json.loads(RESULTS.read_text())["rows"]
        mine = [
            row for row in old if row["case"].startswith(f"{case.title}: ") and row["subject"] in subjects
        ]
        rows = [row for row in old if row not in mine] + rows
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "jax", "craftax")}
    machine = {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count()}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions["python"] = platform.python_version()
    write_json(RESULTS, {"machine": machine, "versions": versions, "date": date, "rows": rows})


if __name__ == "__main__":
    main()
