"""Skills: the whole run from nothing, parallel against sequential, hand-over, the world and the trainer's speed.

Success is asserted before times are kept. Run by `make bench-skills`; results go to
`benchmarks/results/skills.json`. The rival for hand-over is the loop that skill learning is usually driven by:
look every so many seconds whether the session still exists. `--quick` leaves the whole run out, times the rest once
with less work, and saves nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO / "src"), os.environ.get("PYTHONPATH", "")])

import numpy as np  # noqa: E402

from shoal.core.files import write_json  # noqa: E402
from shoal.core.seeding import stream  # noqa: E402
from shoal.skills.graph.store import Store  # noqa: E402
from shoal.skills.learning.trainer import Task, Trainer, TrainingConfig  # noqa: E402
from shoal.skills.plan import Step  # noqa: E402
from shoal.skills.proposers import knowledge_base  # noqa: E402
from shoal.skills.scheduler import SkillScheduler  # noqa: E402
from shoal.skills.spec import load_skills  # noqa: E402
from shoal.skills.worlds.crafting import CRAFTING, CraftingWorld  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "skills.json"
SKILLS = {skill.name: skill for skill in load_skills(knowledge_base("crafting"), CRAFTING)}
rows: list[dict[str, Any]] = []


def add(case: str, subject: str, value: float | None, unit: str, cpu: float = 0.0, runs: int = 1) -> None:
    """One row of the table; a value of None is a rival that is not installed."""
    row = {"case": case, "subject": subject, "value": value, "unit": unit, "cpu_seconds": cpu, "runs": runs}
    rows.append(row)
    print(f"{case:<44} {subject:<34} {'-' if value is None else f'{value:.4g}':>10} {unit}", flush=True)


def children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system + times.user + times.system


def train_graph(folder: str, seed: int, slots: int) -> dict[str, Any]:
    """The command of the README, from nothing to ten skills and their evaluation; what summary.json says of it."""
    subprocess.run(
        [sys.executable, "-m", "shoal", "skills", "train", "--max_parallel_skills", str(slots), "--seed", str(seed),
         "--graph-path", f"{folder}/run", "--no-film"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    metrics: dict[str, Any] = json.loads(Path(folder, "run", "summary.json").read_text())["metrics"]
    assert metrics["skills_completed"] == 10
    assert metrics["chain_success"] >= 0.8
    return metrics


def whole_run(seeds: tuple[int, ...]) -> None:
    """The default graph two at a time and one at a time, in turns; and what its longest way allows at best."""
    for seed in seeds:
        walls, chain, best = {}, 0.0, 0.0
        for slots in (2, 1):
            with tempfile.TemporaryDirectory() as folder:
                cpu, began = children_seconds(), time.perf_counter()
                metrics = train_graph(folder, seed, slots)
                wall, cpu = time.perf_counter() - began, children_seconds() - cpu
                walls[slots], chain = metrics["makespan"], metrics["chain_success"]
                if slots == 1:
                    best = longest_way(Store(f"{folder}/run"))
            name = f"shoal, {slots} at a time, seed {seed}"
            add("ten skills from nothing: seconds in all", name, wall, "s", cpu)
            add("ten skills from nothing: makespan of training", name, walls[slots], "s", cpu)
        add("ten skills from nothing: plan with all on 512 worlds", f"shoal, seed {seed}", chain, "success")
        add("ten skills: speed-up of two at a time", f"shoal, seed {seed}", walls[1] / walls[2], "x")
        add("ten skills: speed-up of two at a time", f"ideal, seed {seed}", min(2.0, walls[1] / best), "x")


def longest_way(store: Store) -> float:
    """Seconds of the longest way through the graph, from the times that its trainings took one at a time."""
    rows = {row.name: row for row in store.skills()}
    took = {attempt.job: (attempt.ended or 0) - attempt.started for attempt in store.attempts()}

    def until(name: str) -> float:
        return took[name] + max((until(before) for before in rows[name].dependencies), default=0.0)

    return max(until(name) for name in rows)


def branches(slots: int, runs: int, budget: float) -> tuple[float, list[float]]:
    """Makespan of two branches of two equal trainings each, and the times between an end and the next start."""
    config = TrainingConfig(
        total_timesteps=budget, success_state_rate=2.0, patience_frames=1e9, min_success=0.0
    )
    walls, gaps = [], []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            scheduler = SkillScheduler(folder, slots, config=config)
            for name in ("Collect Wood", "Place Table", "Collect Sapling", "Plant Sapling"):
                scheduler.add_skill(name, SKILLS[name])
            began = time.perf_counter()
            assert scheduler.run()
            walls.append(time.perf_counter() - began)
            gaps += hand_overs(scheduler.store)
            scheduler.close()
    return statistics.median(walls), gaps


def hand_overs(store: Store) -> list[float]:
    """Seconds from a training's last act to the launch of the skill that waited for it."""
    finished = {row.name: row.result["finished_at"] for row in store.skills()}
    started = {attempt.job: attempt.started for attempt in store.attempts()}
    pairs = (("Collect Wood", "Place Table"), ("Collect Sapling", "Plant Sapling"))
    return [started[after] - finished[before] for before, after in pairs]


def parallel(runs: int, budget: float = 2.5e5) -> None:
    """The same four trainings one at a time and two at a time."""
    cpu = children_seconds()
    one, _ = branches(1, runs, budget)
    two, gaps_two = branches(2, runs, budget)
    cpu = children_seconds() - cpu
    add("two branches: makespan", "one at a time", one, "s", cpu, runs)
    add("two branches: makespan", "shoal, two at a time", two, "s", cpu, runs)
    add("two branches: speed-up", "shoal, two at a time", one / two, "x", cpu, runs)
    add("two branches: speed-up", "ideal", 2.0, "x")
    add(
        "hand-over: training ended to next launch",
        "shoal",
        statistics.median(gaps_two),
        "s",
        0,
        len(gaps_two),
    )
    # With one slot the skill that waits may have to wait for another training: no hand-over.
    add("hand-over: training ended to next launch", "shoal, worst", max(gaps_two), "s", 0, len(gaps_two))


def polling(interval: float, runs: int) -> None:
    """How late a loop notices that a process ended when it looks every `interval` seconds."""
    rng = np.random.default_rng(0)
    late = []
    for _ in range(runs):
        process = subprocess.Popen(["sleep", str(0.2 + rng.random() * interval)])
        ended: list[float] = []
        import threading

        threading.Thread(target=lambda p=process, e=ended: (p.wait(), e.append(time.perf_counter()))).start()
        while process.returncode is None and not ended:
            time.sleep(interval)
        late.append(time.perf_counter() - ended[0])
    add(
        "hand-over: training ended to next launch",
        f"polling every {interval:g} s",
        statistics.median(late),
        "s",
        0,
        runs,
    )


def rate(work: Callable[[], int], runs: int = 5) -> tuple[float, float]:
    work()
    rates, cpu = [], time.process_time()
    for _ in range(runs):
        began = time.process_time()
        count = work()
        rates.append(count / (time.process_time() - began))
    return statistics.median(rates), time.process_time() - cpu


def world_speed() -> None:
    for lanes in (128, 1024):
        world = CraftingWorld(lanes)
        rng = stream(0, "benchmark")
        world.load(world.fresh(lanes, rng), np.arange(lanes), np.ones(lanes, np.bool_))
        actions = rng.integers(0, world.n_actions, (200, lanes))

        def steps(world: CraftingWorld = world, actions: np.ndarray = actions, rng: Any = rng) -> int:
            for row in actions:
                world.step(row, rng)
                world.observe()
            return actions.size

        value, cpu = rate(steps)
        add(
            "world: steps and observations a CPU second",
            f"shoal crafting, {lanes} lanes",
            value,
            "1/s",
            cpu,
            5,
        )
    if importlib.util.find_spec("craftax") is None:
        add(
            "world: steps and observations a CPU second",
            "Craftax-Classic, 64 lanes (not installed)",
            None,
            "1/s",
        )
        return
    from shoal.skills.worlds.craftax import ClassicWorld

    classic = ClassicWorld(64)
    rng = stream(0, "benchmark")
    classic.load(classic.fresh(64, rng), np.arange(64), np.ones(64, np.bool_))

    def classic_steps() -> int:
        for _ in range(50):
            classic.step(rng.integers(0, 17, 64), rng)
        return 50 * 64

    value, cpu = rate(classic_steps, 3)
    add("world: steps and observations a CPU second", "Craftax-Classic, 64 lanes", value, "1/s", cpu, 3)


def trainer_speed() -> None:
    plan = (Step("Collect Wood", 4),)
    config = TrainingConfig()
    trainer = Trainer(Task("crafting", "Collect Wood", SKILLS, plan, (None,), (0,), 0, config))
    trainer.prepare()

    def updates() -> int:
        for _ in range(8):
            trainer.step()
        return 8 * config.num_envs * config.num_steps

    value, cpu = rate(updates)
    add("trainer: PPO frames a CPU second", "shoal (NumPy, one thread)", value, "1/s", cpu, 5)
    try:
        add(
            "trainer: PPO frames a CPU second", "the same in PyTorch (one thread)", torch_speed(), "1/s", 0, 5
        )
    except ImportError:
        add("trainer: PPO frames a CPU second", "PyTorch (not installed)", None, "1/s")


def torch_speed() -> float:
    """The same network, batch and number of updates with autograd and torch's Adam."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    config = TrainingConfig()
    lanes, steps = config.num_envs, config.num_steps
    world = CraftingWorld(lanes)
    rng = stream(0, "benchmark")
    world.load(world.fresh(lanes, rng), np.arange(lanes), np.ones(lanes, np.bool_))
    body = nn.Sequential(nn.Linear(world.obs_size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    head = nn.Linear(64, world.n_actions + 1)
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-3, eps=1e-5)

    def update() -> None:
        seen, acts, old, values = [], [], [], []
        for _ in range(steps):
            observation = torch.from_numpy(world.observe())
            with torch.no_grad():
                out = head(body(observation))
                logprobs = out[:, :-1].log_softmax(1)
                action = torch.multinomial(logprobs.exp(), 1)[:, 0]
            seen.append(observation)
            acts.append(action)
            old.append(logprobs.gather(1, action[:, None])[:, 0])
            values.append(out[:, -1])
            world.step(action.numpy(), rng)
        batch = [torch.cat(part) for part in (seen, acts, old)]
        gain = torch.randn(lanes * steps)
        target = torch.cat(values) + gain
        for _ in range(config.update_epochs):
            for chunk in torch.randperm(lanes * steps).chunk(config.num_minibatches):
                out = head(body(batch[0][chunk]))
                logprobs = out[:, :-1].log_softmax(1)
                ratio = (logprobs.gather(1, batch[1][chunk][:, None])[:, 0] - batch[2][chunk]).exp()
                surrogate = torch.min(ratio * gain[chunk], ratio.clamp(0.8, 1.2) * gain[chunk]).mean()
                value = (out[:, -1] - target[chunk]).pow(2).mean()
                entropy = -(logprobs.exp() * logprobs).sum(1).mean()
                optimizer.zero_grad()
                (-surrogate + 0.5 * value - 0.01 * entropy).backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()

    def updates() -> int:
        for _ in range(8):
            update()
        return 8 * lanes * steps

    return rate(updates)[0]


PARTS: dict[str, Callable[[], None]] = {
    "world": world_speed,
    "trainer": trainer_speed,
    "parallel": lambda: parallel(3),
    "polling": lambda: [polling(0.5, 4), polling(5.0, 4)][0],
    "whole": lambda: whole_run((0, 1, 2)),
}
QUICK: dict[str, Callable[[], None]] = {
    "world": world_speed,
    "trainer": trainer_speed,
    "parallel": lambda: parallel(1, 2e4),
    "polling": lambda: polling(0.5, 2),
}


def main() -> None:
    """All parts, or those named as arguments; rows of the others stay as they were."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all if not given"
    )
    parser.add_argument("--quick", action="store_true", help="less work and no whole run, nothing saved")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part named {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.quick:
        for part in options.parts or QUICK:
            QUICK.get(part, PARTS[part])()
        return
    for part in options.parts or PARTS:
        PARTS[part]()
    cases = {(row["case"], row["subject"]) for row in rows}
    if RESULTS.exists():
        old = json.loads(RESULTS.read_text())["rows"]
        rows[:] = [row for row in old if (row["case"], row["subject"]) not in cases] + rows
    versions = {"python": platform.python_version()}
    for name in ("numpy", "torch", "jax", "craftax"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count()}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    write_json(RESULTS, {"machine": machine, "versions": versions, "date": date, "rows": rows})


if __name__ == "__main__":
    main()
