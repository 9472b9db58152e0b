"""What two settings that are part of no algorithm do: each is left out of tiny runs, and both.

    python benchmarks/stabilisers.py [--minutes 60] [--only WORD …] [--quick] [--table]

The settings are those of `STABILISERS`: `grpo` and `rloo` run without each, `ppo` without both. All else is as in
`base`: the tiny model, 32 groups of 8, and a warm-up on random actions. Four tasks: the lake of `demo`, a hidden
number to find by feedback, doors of which wrong ones cost more than leaving (a trap), and a maze with many starts.
`rloo` has the loss of `grpo`, which takes several steps a batch; that of its preset has no ratios, and takes one.

A run that is done is one line of `benchmarks/results/stabilisers.jsonl`; those that are there are not run again, so a
stopped benchmark goes on where it was. With `--minutes` no run begins after that many CPU minutes. `--table` only
writes the table of docs/learning.md from the lines. `--quick` runs two iterations of one case, and saves nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO)]

from benchmarks.tables import put, table  # noqa: E402

from shoal.envs.actions import Projection  # noqa: E402
from shoal.envs.spaces import FreeText  # noqa: E402
from shoal.envs.text import Outcome, TextEnv  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "stabilisers.jsonl"
SEEDS = range(4)
HELD_OUT = 128
"""Episodes of the evaluation at the end, played greedily."""


# --- the tasks
class Number(TextEnv[Any]):
    """A number from 1 to 7 is hidden; a wrong guess costs the more the further it is away."""

    instructions = "Find the hidden number from 1 to 7."
    projection = Projection(lookup={str(n): n for n in range(1, 8)})
    observation_space = FreeText(8)
    max_steps = 4

    def _start(self, rng: Any) -> None:
        self.number, self.said = int(rng.integers(1, 8)), "guess"

    def _advance(self, action: Any) -> Outcome:
        if action == self.invalid_action:
            return Outcome(-0.1, valid=False)
        self.said = "higher" if action < self.number else "lower" if action > self.number else "yes"
        won = action == self.number
        return Outcome(1.0 if won else -0.03 * abs(action - self.number), won, won)

    def observe(self) -> str:
        return self.said


class Doors(TextEnv[Any]):
    """A trap: leaving costs 0.1, a wrong door 1, and the right way, by the colour of a lamp, pays 1.

    With a green lamp the way is one door, with the others two: a random player finds it in one of 10 episodes, and
    leaving at once looks best for long.
    """

    instructions = "Find the right doors by the colour of the lamp, or leave."
    projection = Projection(lookup={"left": 1, "middle": 2, "right": 3, "leave": 4})
    observation_space = FreeText(16)
    max_steps = 2
    ways: ClassVar = {"green": (2,), "red": (3, 1), "blue": (2, 2), "white": (1, 3), "black": (3, 2)}

    def _start(self, rng: Any) -> None:
        self.lamp, self.opened = [*self.ways][int(rng.integers(len(self.ways)))], 0

    def _advance(self, action: Any) -> Outcome:
        way = self.ways[self.lamp]
        if action == 4:
            return Outcome(-0.1, terminated=True)
        if action != way[self.opened]:
            return Outcome(-1.0, terminated=True, valid=action != self.invalid_action)
        self.opened += 1
        through = self.opened == len(way)
        return Outcome(float(through), through, through)

    def observe(self) -> str:
        return f"{self.lamp} {self.opened}"


class Maze(TextEnv[Any]):
    """A fixed maze of 4 x 4 cells: it pays 1 to reach the exit from anywhere within ten steps."""

    instructions = "Go to the exit of the maze."
    moves: ClassVar = {"up": -4, "down": 4, "left": -1, "right": 1}
    projection = Projection(lookup={word: number for number, word in enumerate(moves, start=1)})
    observation_space = FreeText(8)
    max_steps = 10
    # passages between cells that are numbered row by row; the exit is 15
    passages = frozenset(
        {(0, 1), (1, 2), (2, 3), (0, 4), (3, 7), (4, 5), (5, 6), (4, 8), (7, 11), (8, 9), (8, 12), (9, 10),
         (12, 13), (13, 14), (11, 15)}
    )  # fmt: skip

    def _start(self, rng: Any) -> None:
        self.cell = int(rng.integers(15))

    def _advance(self, action: Any) -> Outcome:
        if action == self.invalid_action:
            return Outcome(0.0, valid=False)
        there = self.cell + [*self.moves.values()][action - 1]
        if (min(self.cell, there), max(self.cell, there)) in self.passages:
            self.cell = there
        out = self.cell == 15
        return Outcome(float(out), out, out)

    def observe(self) -> str:
        return f"cell{self.cell}"


class Task(NamedTuple):
    """A config to begin with, how long, and what is set besides."""

    config: str
    iterations: int
    overrides: tuple[str, ...]


def own(name: str, iterations: int, *more: str) -> Task:
    """A task of this file, with the settings of `base`."""
    sides = (f"es_manager.{side}.env_configs={{tags: [{name}]}}" for side in ("train", "val"))
    of_env = f"custom_envs.{name}.env_type=benchmarks.stabilisers:{name}"
    return Task("base", iterations, ("custom_envs.FrozenLakeEnv=null", of_env, *sides, *more))


TASKS = {
    "demo": Task("demo", 40, ("algorithm.gamma=0.97",)),
    "doors": own("Doors", 60),
    "number": own(
        "Number", 50,
        "agent_proxy.prompt.history=4", "agent_proxy.prompt.later='{history}\n{observation}'",
        "agent_proxy.prompt.turn='{action} {observation}'",
    ),
    "maze": own("Maze", 100, "algorithm.gamma=0.97"),
}  # fmt: skip

# --- the arms
STABILISERS = {
    "rehearsal": {"warmup.rehearsal": 1.0},
    "target": {"algorithm.entropy_coef": 0.03, "algorithm.entropy_target": 0.4},
}
"""The settings of each, by a short name."""
OFF = {
    "rehearsal": {"warmup.rehearsal": 0.0},
    "target": {"algorithm.entropy_coef": 0.0, "algorithm.entropy_target": "null"},
}
"""What stands there without it."""
NAMES = {"rehearsal": "warmup.rehearsal", "target": "entropy_target"}
ALL, NONE = "all on", "all off"
ARMS = {
    "grpo": (ALL, NONE, "rehearsal", "target"),
    "rloo": (ALL, NONE, "rehearsal", "target"),
    "ppo": (ALL, NONE),
}
"""By algorithm; the name of a stabiliser is the arm without it."""


def settings_of(algorithm: str, arm: str) -> dict[str, Any]:
    """The settings of an arm, beside those that all runs of the algorithm have."""
    found: dict[str, Any] = {"algorithm.minibatch_size": 256, "algorithm.kl.coef": 0.0}  # those of `base`
    if algorithm == "ppo":
        found["algorithm.critic.value_clip"] = 0.5
    if algorithm == "rloo":  # its advantages with the loss of `grpo`, which takes several steps a batch
        found["algorithm.adv_estimator"] = "rloo"
    for name in STABILISERS:
        found |= OFF[name] if arm in (NONE, name) else STABILISERS[name]
    return found


# --- the runs
class Case(NamedTuple):
    """A run by its name; `arm` is the stabiliser that is off, or `ALL` or `NONE`."""

    task: str
    algorithm: str
    arm: str
    seed: int


@dataclass(frozen=True)
class Run:
    """One line of the results."""

    task: str
    algorithm: str
    arm: str
    seed: int
    iterations: int
    heldout: float  # success at the end
    success: list[float]  # of each iteration, in training
    entropy: list[float]  # of each iteration, in nats a token; where nothing was learned that of before
    cpu_seconds: float
    date: str

    @property
    def case(self) -> Case:
        return Case(self.task, self.algorithm, self.arm, self.seed)


def cases() -> Iterator[Case]:
    """All runs, the most telling first: all, none and no rehearsal on the demo and the trap, then the rest."""
    every = [
        Case(task, algorithm, arm, seed)
        for algorithm, arms in ARMS.items()
        for task, arm, seed in itertools.product(TASKS, arms, SEEDS)
    ]

    def rank(case: Case) -> tuple[int, ...]:
        first = case.task in ("demo", "doors") and case.arm in (ALL, NONE, "rehearsal")
        arms, names = ARMS[case.algorithm], tuple(TASKS)
        of_critic = case.algorithm == "ppo"
        return (
            not (first and not of_critic), case.seed, names.index(case.task), of_critic,
            arms.index(case.arm), tuple(ARMS).index(case.algorithm),
        )  # fmt: skip

    yield from sorted(every, key=rank)


def run_case(case: Case, iterations: int | None = None) -> Run:
    """Train one arm."""
    task = TASKS[case.task]
    overrides = [
        f"algorithm={'ppo' if case.algorithm == 'ppo' else 'grpo'}",
        *task.overrides,
        *(f"{name}={value}" for name, value in settings_of(case.algorithm, case.arm).items()),
    ]
    return trained(case, task.config, overrides, iterations or task.iterations)


def trained(case: Case, config: str, overrides: Sequence[str], iterations: int) -> Run:
    """One run of a shipped config with the tiny model, to its last iteration."""
    from shoal.train.agent.config import compose_config
    from shoal.train.agent.trainer import AgentTrainer

    with tempfile.TemporaryDirectory() as folder:
        always = [
            f"seed={case.seed}",
            f"run_dir={folder}/run",
            "use_parallel_envs=false",
            "engine.threads=1",
            f"es_manager.val.env_groups={HELD_OUT}",
            f"trainer.iterations={iterations}",
            f"trainer.eval_every={iterations}",
            f"trainer.save_every={iterations}",
            f"trainer.save_trajectories_every={iterations}",
            "trainer.stop_at_success=null",
            "trainer.stop_on_collapse=false",
            "trainer.tensorboard=false",
        ]
        clock = time.process_time()
        with AgentTrainer(compose_config(config, [*overrides, *always])) as trainer:
            rows = [row for row in trainer.train() if row["iteration"]]
        seconds = time.process_time() - clock
    entropy: list[float] = []
    for row in rows:
        entropy.append(round(row.get("entropy", entropy[-1] if entropy else 0.0), 4))
    success = [round(row["success"], 4) for row in rows]
    held_out = round(rows[-1]["heldout_success"], 4)
    date = time.strftime("%Y-%m-%d")
    return Run(*case, iterations, held_out, success, entropy, round(seconds, 1), date)


def read_runs(path: Path = RESULTS) -> list[Run]:
    """The runs of a file, none if there is no file."""
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


# --- what they say
class Verdict(NamedTuple):
    """What a stabiliser does: runs with all of them beside runs without this one, by task, algorithm and seed."""

    name: str
    pairs: int
    wanted: int
    gain: float  # mean of the differences of held-out success
    low: float  # 95 % bootstrap over the pairs
    high: float
    collapses: tuple[int, int]  # with it, without it

    @property
    def complete(self) -> bool:
        return self.pairs == self.wanted

    @property
    def stays(self) -> bool:
        """Whether it lifts held-out success by 0.05, by more than chance, or prevents collapses."""
        lifts = self.gain >= 0.05 and self.low > 0
        return lifts or self.collapses[0] < self.collapses[1]


def lowest_after(success: Sequence[float], reached: float = 0.95) -> float | None:
    """The lowest success from the first iteration on that reached this; None where none did."""
    first = next((i for i, one in enumerate(success) if one >= reached), None)
    return None if first is None else min(success[first:])


def collapsed(run: Run) -> bool:
    """Whether a policy fell below 0.85 once it had 0.95, or is certain in the end of what mostly fails."""
    lowest = lowest_after(run.success)
    return (lowest is not None and lowest < 0.85) or (run.entropy[-1] < 0.1 and run.success[-1] < 0.5)


def compare(runs: Sequence[Run], arm: str) -> Verdict:
    """What is lost without a stabiliser, or without all (`NONE`), where both runs of a pair are there."""
    by_case = {run.case: run for run in runs}
    wanted = [case for case in cases() if case.arm == arm]
    found = [case for case in wanted if {case, case._replace(arm=ALL)} <= by_case.keys()]
    without = [by_case[case] for case in found]
    beside = [by_case[case._replace(arm=ALL)] for case in found]
    gains = np.array([a.heldout - b.heldout for a, b in zip(beside, without, strict=True)])
    collapses = sum(map(collapsed, beside)), sum(map(collapsed, without))
    if not found:
        return Verdict(arm, 0, len(wanted), np.nan, np.nan, np.nan, collapses)
    drawn = np.random.default_rng(0).integers(len(gains), size=(10_000, len(gains)))
    low, high = np.quantile(gains[drawn].mean(1), (0.025, 0.975))
    return Verdict(arm, len(found), len(wanted), float(gains.mean()), float(low), float(high), collapses)


def tables(runs: Sequence[Run]) -> str:
    """Two tables in Markdown: the held-out success of each arm, and what is lost without each stabiliser."""
    by_arm: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        by_arm.setdefault((run.algorithm, run.arm, run.task), []).append(run.heldout)

    def cell(algorithm: str, arm: str, task: str) -> str:
        found = by_arm.get((algorithm, arm, task))
        return f"{np.mean(found):.2f} ({len(found)})" if found else "·"

    arms = [
        [algorithm, arm if arm in (ALL, NONE) else f"`{NAMES[arm]}` off"]
        + [cell(algorithm, arm, task) for task in TASKS]
        for algorithm, arms in ARMS.items()
        for arm in arms
    ]
    verdicts = []
    for arm in (*STABILISERS, NONE):
        found = compare(runs, arm)
        if found.pairs:
            gain = f"{found.gain:+.2f} ({found.low:+.2f} to {found.high:+.2f})"
            collapses = "{} / {}".format(*found.collapses)
        else:
            gain = collapses = "·"
        name = "both" if arm == NONE else f"`{NAMES[arm]}`"
        verdicts.append([name, gain, collapses, f"{found.pairs} of {found.wanted}"])
    head = ["without", "held-out success lost (95 %)", "collapses with / without", "pairs of runs"]
    return table(["estimator", "arm", *TASKS], arms) + "\n\n" + table(head, verdicts)


def write_tables(path: Path = RESULTS) -> None:
    put("learning.md", "stabilisers", tables(read_runs(path)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of CPU; no run begins later")
    parser.add_argument(
        "--only", nargs="+", default=[], help="tasks, estimators or arms: cases with all of these"
    )
    parser.add_argument("--quick", action="store_true", help="two iterations of one case, nothing saved")
    parser.add_argument("--table", action="store_true", help="write the table of docs/learning.md alone")
    options = parser.parse_args()
    if options.table:
        write_tables()
        return
    warnings.filterwarnings("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)  # advice for runs that are meant to go wrong
    if options.quick:
        say(run_case(Case("doors", "grpo", ALL, 0), 2))
        return
    done = {run.case for run in read_runs()}
    wanted = [case for case in cases() if case not in done and {*options.only} <= {*map(str, case)}]
    print(f"{len(done)} runs are there, {len(wanted)} to do", flush=True)
    for case in wanted:
        if time.process_time() > 60 * options.minutes:
            break
        run = run_case(case)
        with RESULTS.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        say(run)
    write_tables()


def say(run: Run) -> None:
    """One run in words."""
    lowest = lowest_after(run.success)
    after = "never 0.95" if lowest is None else f"lowest after 0.95: {lowest:.2f}"
    words = " COLLAPSED" if collapsed(run) else ""
    print(
        f"{run.task:8s} {run.algorithm:5s} {run.arm:10s} seed {run.seed}: held out {run.heldout:.2f}, {after}, entropy "
        f"{run.entropy[-1]:.2f}, {run.cpu_seconds:.0f} CPU s{words}",
        flush=True,
    )


if __name__ == "__main__":
    main()
