"""SmolLM2-135M on six small games of one's own: an env class, three or four lines of YAML, the settings of `smollm2`.

    python benchmarks/real_model.py [GAME …] [--seeds 0 1 2] [--quick] [key=value …]

Each run is the user's own two commands, `shoal train` and `shoal eval` of its last weights in 64 held-out episodes. The
goal is a held-out success of 0.8 within 20 CPU minutes of training, in an evaluation of the run itself, and at its end.
Each finished run is one line of `benchmarks/results/real_model.jsonl`; runs that stand there are not run again, so the
command goes on where it was ended. Settings (`key=value`) make it an experiment: its lines go to standard output alone,
as do those of `--quick`, which plays two iterations of one game.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
from gymnasium.spaces import Discrete, Text

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "benchmarks" / "results" / "real_model.jsonl"
SEEDS = (0, 1, 2)
EPISODES = 64
"""Held-out episodes of the last evaluation."""
HELD_OUT = 1_000_003
GOAL, MINUTES = 0.8, 20


class Game(gymnasium.Env[str, int]):
    """What the games share: words for actions, and text for observations."""

    observation_space = Text(200)
    action_names: ClassVar[tuple[str, ...]]
    own: ClassVar[str] = ""
    """A line of YAML that only this game needs."""
    instructions: str
    max_steps: int

    @property
    def action_space(self) -> Discrete:  # type: ignore[override]
        return Discrete(len(self.action_names))


class Recipe(Game):
    """Four steps in the order that the dish asks for; each right one is paid, a wrong one ends the episode."""

    action_names = ("chop", "boil", "fry", "salt", "serve")
    own = (
        "algorithm: {kl: {target: null}}  # each right step is paid: there is no trap to be held back from\n"
    )
    instructions, max_steps = "Cook the dish: name its next step.", 4
    dishes: ClassVar[dict[str, str]] = {
        "soup": "chop boil salt serve",
        "eggs": "boil chop salt serve",
        "chips": "chop fry salt serve",
        "steak": "salt fry chop serve",
    }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.dish, self.done = str(self.np_random.choice(sorted(self.dishes))), 0
        return self.seen(), {}

    def seen(self) -> str:
        done = self.dishes[self.dish].split()[: self.done]
        return f"Dish: {self.dish}. Done: {', '.join(done) or 'nothing'}."

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = self.dishes[self.dish].split()[self.done] == self.action_names[action]
        self.done += right
        won = self.done == 4
        return self.seen(), 0.25 * right, won or not right, False, {"success": won}


class Maze(Game):
    """From any cell of a fixed maze to its exit."""

    action_names = ("north", "south", "east", "west")
    instructions, max_steps = "Find the exit of the maze: row 4, column 4.", 12
    moves: ClassVar = ((-1, 0), (1, 0), (0, 1), (0, -1))
    walls: ClassVar = {
        ((1, 2), (1, 3)),
        ((2, 1), (2, 2)),
        ((2, 3), (3, 3)),
        ((3, 4), (4, 4)),
        ((3, 2), (4, 2)),
    }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        row, column = divmod(int(self.np_random.integers(15)), 4)
        self.at = (row + 1, column + 1)
        return self.seen(), {}

    def after(self, action: int) -> tuple[int, int]:
        move = self.moves[action]
        to = (self.at[0] + move[0], self.at[1] + move[1])
        inside = all(1 <= x <= 4 for x in to)
        return to if inside and tuple(sorted((self.at, to))) not in self.walls else self.at

    def seen(self) -> str:
        ways = [name for i, name in enumerate(self.action_names) if self.after(i) != self.at]
        return f"Row {self.at[0]}, column {self.at[1]}. Open: {', '.join(ways)}."

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.at = self.after(action)
        won = self.at == (4, 4)
        return self.seen(), float(won), won, False, {"success": won}


class Number(Game):
    """A number from 1 to 9 in five guesses, each answered by higher or lower."""

    action_names = tuple(str(n) for n in range(1, 10))
    instructions, max_steps = "Find the hidden number from 1 to 9.", 5

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number, self.low, self.high = int(self.np_random.integers(1, 10)), 1, 9
        return self.seen(), {}

    def seen(self) -> str:
        return f"It is one of {' '.join(str(n) for n in range(self.low, self.high + 1))}."

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = action + 1
        won = guess == self.number
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        elif guess > self.number:
            self.high = min(self.high, guess - 1)
        return self.seen(), float(won), won, False, {"success": won}


class Garden(Game):
    """Dense rewards: five days, each with its own right deed, and each right one is paid at once."""

    action_names = ("water", "drain", "wait")
    instructions, max_steps = "Care for the garden.", 5
    deeds: ClassVar[dict[tuple[str, str], str]] = {
        ("dry", "sun"): "water",
        ("dry", "rain"): "wait",
        ("wet", "sun"): "wait",
        ("wet", "rain"): "drain",
    }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.day, self.right = 1, 0
        return self.seen(), {}

    def seen(self) -> str:
        states = sorted(self.deeds)
        self.state = states[int(self.np_random.integers(len(states)))]
        return f"Day {self.day} of 5. The soil is {self.state[0]}, the forecast is {self.state[1]}."

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = self.deeds[self.state] == self.action_names[action]
        self.right += right
        self.day += 1
        over = self.day > 5
        return self.seen(), 0.2 * right, over, False, {"success": over and self.right == 5}


class Safe(Game):
    """A trap: two right turns of the dial are paid with 1, a wrong one costs 1, and giving up costs 0.1."""

    action_names = ("red", "green", "blue", "leave")
    instructions, max_steps = "Open the safe: turn its dial to two colours.", 2
    codes: ClassVar[dict[str, str]] = {"star": "red blue", "moon": "green red", "sun": "blue green"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.sign, self.turned = str(self.np_random.choice(sorted(self.codes))), 0
        return self.seen(), {}

    def seen(self) -> str:
        turned = self.codes[self.sign].split()[: self.turned]
        return f"A safe with a {self.sign} on it. Turned: {', '.join(turned) or 'nothing'}."

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        name = self.action_names[action]
        if name == "leave":
            return self.seen(), -0.1, True, False, {"success": False}
        if name != self.codes[self.sign].split()[self.turned]:
            return self.seen(), -1.0, True, False, {"success": False}
        self.turned += 1
        won = self.turned == 2
        return self.seen(), float(won), won, False, {"success": won}


class Kiosk(Game):
    """A trap: five days of orders. One of each day earns well, and never serves all customers without waste."""

    action_names = ("none", "one", "two", "three")
    instructions, max_steps = "Run a kiosk: order as many papers as you will need today.", 5

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.day, self.stock, self.missed = 1, int(self.np_random.integers(2)), 0
        self.wasted, self.customers = 0, int(self.np_random.integers(4))
        return self.seen(), {}

    def seen(self) -> str:
        return f"Day {self.day} of 5. Papers left: {self.stock}. Customers today: {self.customers}."

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        have = self.stock + action
        sold, missed, wasted = (
            min(have, self.customers),
            max(0, self.customers - have),
            max(0, have - self.customers - 1),
        )
        self.missed, self.wasted = self.missed + missed, self.wasted + wasted
        self.stock = min(1, have - sold)  # one paper keeps for a day
        self.day, self.customers = self.day + 1, int(self.np_random.integers(4))
        won = self.day > 5 and not self.missed and not self.wasted
        reward = 0.1 * sold - 0.1 * missed - 0.1 * wasted + float(won)
        return self.seen(), reward, self.day > 5, False, {"success": won}


GAMES = {"recipe": Recipe, "maze": Maze, "number": Number, "garden": Garden, "safe": Safe, "kiosk": Kiosk}
YAML = """\
defaults: [smollm2, _self_]
custom_envs: {{FrozenLakeEnv: null, Mine: {{env_type: "real_model:{game}"}}}}
es_manager: {{train: {{env_configs: {{tags: [Mine]}}}}}}
"""


def shoal(*arguments: str) -> tuple[str, float]:
    """A command of shoal's: its standard output and its CPU seconds. A run that collapsed is a result too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    paths = os.pathsep.join([str(REPO / "src"), str(REPO / "benchmarks")])
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode and "(ended early by trainer.stop_on_collapse)" not in done.stdout:
        raise SystemExit(f"shoal {' '.join(arguments)} ended with {done.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train(name: str, seed: int, run: Path, settings: list[str]) -> dict[str, Any]:
    """One run of a game, and its last weights in held-out episodes, sampled greedily."""
    run.parent.mkdir(parents=True, exist_ok=True)
    (run.parent / f"{name}.yaml").write_text(YAML.format(game=GAMES[name].__name__) + GAMES[name].own)
    _, seconds = shoal(
        "train", "--config-dir", str(run.parent), "--config-name", name, f"seed={seed}", f"run_dir={run}",
        "engine.threads=1", "trainer.tensorboard=false", *settings,
    )  # fmt: skip
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    said, _ = shoal(
        "eval", str(run), "--episodes", str(EPISODES), "--temperature", "0", "--seed", str(HELD_OUT), "--json"
    )
    played = [row for row in rows if "success" in row]
    good = (row["cpu_seconds"] for row in rows if row.get("heldout_success", 0) >= GOAL)
    return {
        "game": name,
        "seed": seed,
        "heldout_success": json.loads(said.splitlines()[0])["success"],
        "cpu_seconds": round(seconds, 1),
        "goal_seconds": next(good, None),
        "iterations": rows[-1]["iteration"],
        "status": json.loads((run / "summary.json").read_text())["status"],
        "success": [round(row["success"], 3) for row in played],
        "entropy": [round(row.get("entropy") or 0.0, 3) for row in played],
        "heldout": [[row["iteration"], row["heldout_success"]] for row in rows if "heldout_success" in row],
        "settings": settings,
        "date": datetime.date.today().isoformat(),
    }


def finished() -> list[dict[str, Any]]:
    """The runs in the file of results."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def say(row: dict[str, Any]) -> None:
    """One run in words."""
    first = row["goal_seconds"]
    reached = row["heldout_success"] >= GOAL and first is not None and first <= 60 * MINUTES
    print(
        f"{row['game']:<7} seed {row['seed']}: held out {row['heldout_success']:.2f} after {row['iterations']} "
        f"iterations, {row['cpu_seconds'] / 60:.1f} CPU minutes{'' if reached else '  MISSED'}",
        flush=True,
    )


def main() -> None:
    """Run the named games, or all, with each seed that has no line yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="GAME or key=value", help=f"games: {', '.join(GAMES)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--quick", action="store_true", help="two iterations of one game, nothing saved")
    parser.add_argument("--keep", type=Path, help="a folder to keep the run folders of experiments in")
    options = parser.parse_intermixed_args()
    settings = [word for word in options.words if "=" in word]
    names = [word for word in options.words if "=" not in word] or list(GAMES)
    if unknown := set(names) - set(GAMES):
        parser.error(f"no game named {', '.join(sorted(unknown))}; there are: {', '.join(GAMES)}")
    if options.quick:
        names, options.seeds, settings = names[:1], options.seeds[:1], [*settings, "trainer.iterations=2"]
    saves = not settings
    known = {(row["game"], row["seed"]) for row in finished()} if saves else set()
    for seed in options.seeds:
        for name in names:
            if (name, seed) in known:
                continue
            with tempfile.TemporaryDirectory() as folder:
                run = (options.keep or Path(folder)) / f"{name}-{seed}"
                row = train(name, seed, run, settings)
            say(row)
            if saves:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            else:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
