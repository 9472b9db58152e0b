"""Sokoban, FrozenLake and Bandit beside other libraries: rooms, lakes, episodes and steps a second.

    python benchmarks/environments.py [--ragen CHECKOUT] [--only WORD] [--seconds 0.5] [--quick]

Rooms are proven solvable, and lakes passable, before time is taken. Subjects take turns, a row is the median of
its turns, and a library that is not installed has a row that says so. `gym-sokoban==0.0.6` comes from PyPI;
`--ragen` is a checkout of the RAGEN repository. Results go to `benchmarks/results/environments.json`. `--quick` takes
one turn of a twentieth of a second and saves nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))
warnings.filterwarnings("ignore")

from shoal import envs  # noqa: E402
from shoal.core.seeding import stream  # noqa: E402
from shoal.envs.frozen_lake import FrozenLakeConfig, is_passable, random_lake  # noqa: E402
from shoal.envs.sokoban import generate, solve  # noqa: E402
from shoal.envs.sokoban.levels import level_from_state  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "environments.json"
PACKAGES = ("numpy", "gymnasium", "gym-sokoban", "reasoning_gym", "TextArena")
ROUNDS = 5
quick = False
Work = Callable[[int], Any]  # does the thing number n once
rows: list[dict[str, Any]] = []


def compare(case: str, subjects: dict[str, Work | None], seconds: float, unit: str = "1/s") -> None:
    """Time the subjects in turns and add a row for each; None is a library that is not there."""
    there = {name: work for name, work in subjects.items() if work is not None}
    for work in there.values():
        work(0)
    rates: dict[str, list[float]] = {name: [] for name in there}
    cpu = dict.fromkeys(there, 0.0)
    numbers = {name: itertools.count(1) for name in there}
    rounds = 1 if quick else ROUNDS
    for _ in range(rounds):
        for name, work in there.items():
            used, began, done = time.process_time(), time.perf_counter(), 0
            while (passed := time.perf_counter() - began) < seconds:
                work(next(numbers[name]))
                done += 1
            rates[name].append(done / passed)
            cpu[name] += time.process_time() - used
    for name in subjects:
        found = name in there
        add(
            case,
            name,
            statistics.median(rates[name]) if found else None,
            unit,
            cpu.get(name, 0.0),
            rounds * found,
        )


def add(case: str, subject: str, value: float | None, unit: str, cpu: float = 0.0, runs: int = 0) -> None:
    rows.append(
        {
            "case": case,
            "subject": subject,
            "value": value,
            "unit": unit,
            "cpu_seconds": round(cpu, 3),
            "runs": runs,
        }
    )
    text = "not installed" if value is None else f"{value:,.4g} {unit}"
    print(f"{case:34} {subject:28} {text}", flush=True)


def rooms(height: int, boxes: int, ragen: Any, seconds: float) -> None:
    """Rooms of one size, from every generator that makes them; and how hard those rooms are."""
    case = f"sokoban rooms {height}x{height}, {boxes} box{'es' * (boxes > 1)}"
    dims = (height, height)
    made: dict[str, list[Any]] = {}

    def kept(name: str, make: Callable[[int], Any]) -> Work:
        def work(number: int) -> None:
            made.setdefault(name, []).append(make(number))

        return work

    subjects: dict[str, Work | None] = {
        "shoal": kept("shoal", lambda n: generate(stream(n, "bench"), dims, boxes)),
        "RAGEN": None,
        "gym-sokoban": None,
    }
    if ragen is not None:
        subjects["RAGEN"] = kept("RAGEN", _retried(ragen.generate_room, dims, boxes, {"search_depth": 300}))
    if importlib.util.find_spec("gym_sokoban") is not None:
        from gym_sokoban.envs.room_utils import generate_room

        subjects["gym-sokoban"] = kept("gym-sokoban", _retried(generate_room, dims, boxes, {}))
    compare(case, subjects, seconds, "rooms/s")
    for name, levels in made.items():
        sample = levels[:40]
        solutions = [solve(level if name == "shoal" else level_from_state(*level)) for level in sample]
        assert all(solution is not None for solution in solutions), name
        if name == "shoal":
            reported = [level.optimal_pushes for level in sample]
            assert reported == [solution.pushes for solution in solutions if solution]
        add(
            case,
            name,
            statistics.mean(s.pushes for s in solutions if s),
            "mean optimal pushes",
            runs=len(sample),
        )


def _retried(make: Callable[..., Any], dims: tuple[int, int], boxes: int, more: dict[str, Any]) -> Work:
    """A rival's generator, asked again when it gives up on a draw, as its env does."""
    steps = int(1.7 * sum(dims))

    def work(number: int) -> Any:
        random.seed(number)
        np.random.seed(number)
        while True:
            try:
                fixed, state, *_ = make(dims, num_steps=steps, num_boxes=boxes, **more)
                return np.array(fixed), np.array(state)
            except (RuntimeError, RuntimeWarning):
                continue

    return work


def sokoban_resets(seconds: float) -> None:
    """A reset of a whole env with one box in a 6x6 room, observation as text."""
    env = envs.make("sokoban")
    subjects: dict[str, Work | None] = {
        "shoal": lambda n: env.reset(seed=n),
        "textarena, 3 boxes": None,
        "reasoning_gym, with solution": None,
    }
    if importlib.util.find_spec("textarena") is not None:
        import textarena

        def arena(number: int) -> None:
            game = textarena.make("Sokoban-v0-raw")
            game.reset(num_players=1, seed=number)
            game.get_observation()

        subjects["textarena, 3 boxes"] = arena
    if importlib.util.find_spec("reasoning_gym") is not None:
        import reasoning_gym

        puzzles = reasoning_gym.create_dataset(
            "sokoban", size=10**6, seed=0, min_w=6, max_w=6, min_h=6, max_h=6
        )
        subjects["reasoning_gym, with solution"] = lambda n: puzzles[n]
    compare("sokoban resets", subjects, seconds, "resets/s")


def sokoban_steps(seconds: float) -> None:
    """Steps of a 6x6 room, random actions, restarted at the end of an episode."""
    env = envs.make("sokoban")
    env.reset(seed=0)
    choose = random.Random(0)
    actions = [choose.randint(1, 4) for _ in range(4096)]
    over = True

    def ours(number: int) -> None:
        nonlocal over
        if over:
            env.reset(seed=number)
        _, _, terminated, truncated, _ = env.step(actions[number % 4096])
        over = terminated or truncated

    bare = envs.make("sokoban", max_steps=10**9)
    bare.reset(seed=3)

    def ideal(number: int) -> None:
        bare._advance(actions[number % 4096])
        bare.observe()

    subjects: dict[str, Work | None] = {
        "shoal": ours,
        "ideal: the move and its text alone": ideal,
        "gym-sokoban, tiny picture": None,
        "gym-sokoban, picture": None,
    }
    if importlib.util.find_spec("gym_sokoban") is not None:
        from gym_sokoban.envs.sokoban_env import SokobanEnv

        for name, mode in (("tiny picture", "tiny_rgb_array"), ("picture", "rgb_array")):
            subjects[f"gym-sokoban, {name}"] = _gym_sokoban_steps(SokobanEnv, mode, actions)
    compare("sokoban steps", subjects, seconds, "steps/s")


def _gym_sokoban_steps(kind: Any, mode: str, actions: list[int]) -> Work:
    theirs = kind(dim_room=(6, 6), num_boxes=1, max_steps=100)
    over = False

    def work(number: int) -> None:
        nonlocal over
        if over:
            theirs.reset()
        over = theirs.step(actions[number % 4096], observation_mode=mode)[2]

    return work


def lakes(seconds: float) -> None:
    """Random passable lakes, start and goal in the corners as gymnasium's are."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    for size in (4, 8):
        config = FrozenLakeConfig(size=size, random_start_goal=False)
        assert all(is_passable(random_lake(stream(n, "bench"), config)) for n in range(200))
        assert all(is_passable(generate_random_map(size, 0.8, seed=n)) for n in range(50))
        subjects: dict[str, Work | None] = {
            "shoal": lambda n, config=config: random_lake(stream(n, "bench"), config),
            "gymnasium": lambda n, size=size: generate_random_map(size, 0.8, seed=n),
        }
        compare(f"frozen_lake lakes {size}x{size}", subjects, seconds, "lakes/s")


def lake_steps(seconds: float) -> None:
    """Steps on the slippery 4x4 lake; shoal with its text, gymnasium with a cell number or a text drawing."""
    import gymnasium

    def player(env: Any, first: int) -> Work:
        choose = random.Random(0)
        actions = [first + choose.randrange(4) for _ in range(4096)]
        over = True

        def work(number: int) -> None:
            nonlocal over
            if over:
                env.reset(seed=number)
            _, _, terminated, truncated, _ = env.step(actions[number % 4096])
            over = terminated or truncated

        return work

    drawn = gymnasium.make("FrozenLake-v1", render_mode="ansi")
    play_drawn = player(drawn, 0)

    def with_text(number: int) -> None:
        play_drawn(number)
        drawn.render()

    subjects: dict[str, Work | None] = {
        "shoal, text": player(envs.make("frozen_lake", desc="4x4"), 1),
        "shoal, cell number": player(envs.make("frozen_lake", desc="4x4", observation="index"), 1),
        "gymnasium, text drawing": with_text,
        "gymnasium, cell number": player(gymnasium.make("FrozenLake-v1"), 0),
        "gymnasium unwrapped, cell number": player(gymnasium.make("FrozenLake-v1").unwrapped, 0),
    }
    compare("frozen_lake steps", subjects, seconds, "steps/s")


def projections(seconds: float) -> None:
    """Responses of 600 characters with thoughts, projected to actions."""
    projection = envs.make("sokoban").projection
    text = f"<think>{'the box is to the right of me, so I go around it. ' * 11}</think><action>Left</action>"
    assert projection(text).actions == (3,)

    def ideal(number: int) -> None:
        text[text.rfind("<action>") + 8 : text.rfind("</action>")].lower()

    hostile = "<think>" + "<action>up" * 100_000
    assert not projection(hostile).valid
    compare("projections", {"shoal": lambda n: projection(text), "ideal: two finds": ideal}, seconds)
    compare("projections, 1 MB hostile", {"shoal": lambda n: projection(hostile)}, seconds)


def load_ragen(checkout: Path | None) -> Any:
    """RAGEN's room generator as a module of its own, without the packages the rest of RAGEN imports."""
    if checkout is None:
        return None
    spec = importlib.util.spec_from_file_location(
        "ragen_rooms", checkout / "ragen" / "env" / "sokoban" / "utils.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    global quick
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ragen", type=Path, help="checkout of the RAGEN repository")
    parser.add_argument("--only", default="", help="run the parts whose name holds this")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one turn of a subject")
    parser.add_argument("--quick", action="store_true", help="one short turn, nothing saved")
    options = parser.parse_args()
    quick = options.quick
    ragen, turn = load_ragen(options.ragen), 0.05 if quick else options.seconds
    parts: dict[str, Callable[[], None]] = {
        "rooms 6x6/1": lambda: rooms(6, 1, ragen, turn),
        "rooms 6x6/2": lambda: rooms(6, 2, ragen, turn),
        "rooms 6x6/3": lambda: rooms(6, 3, ragen, turn),
        "rooms 8x8/2": lambda: rooms(8, 2, ragen, turn),
        "rooms 10x10/3": lambda: rooms(10, 3, ragen, turn),
        "sokoban resets": lambda: sokoban_resets(turn),
        "sokoban steps": lambda: sokoban_steps(turn),
        "lakes": lambda: lakes(turn),
        "lake steps": lambda: lake_steps(turn),
        "projections": lambda: projections(turn),
    }
    for name, part in parts.items():
        if options.only in name:
            part()
    if not (options.only or quick):
        save()
    return 0


def save() -> None:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = {"cpus": len(os.sched_getaffinity(0)), "processor": platform.machine()}
    result = {"machine": machine, "versions": versions, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
