"""A run of 100,000 episodes is opened and paged without a wait: its index, first paints in Chromium, `shoal show`.

Beside each stands what no viewer can be faster than: reading the bytes of the files, painting an empty page of the same
server, starting Python with the packages of the command. `make bench-viewer` installs Chromium where it is missing;
without it first paints are left out. `--quick` takes 5,000 episodes and one turn of each, and saves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.records import Exchange, trajectory_of  # noqa: E402
from tests.viewer.browser import Browser, chromium  # noqa: E402

from shoal.core.data import Trajectory, encode_trajectory  # noqa: E402
from shoal.viewer.index import EpisodeIndex  # noqa: E402

FILES = 100
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def write_run(folder: Path, episodes: int) -> None:
    """A run of agents with `episodes` episodes in `FILES` files, 8 a group."""
    draw = random.Random(0)
    (folder / "trajectories").mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as metrics:
        for file in range(1, FILES + 1):
            lines = [encode_trajectory(_episode(draw, file, number)) for number in range(episodes // FILES)]
            data = b"".join(lines)
            (folder / "trajectories" / f"train-{file:06d}.jsonl").write_bytes(data)
            row = {"iteration": file, "success": file / FILES, "reward": file / FILES, "entropy": 1 / file}
            metrics.write(json.dumps(row) + "\n")
    (folder / "summary.json").write_text(
        json.dumps({"command": "train", "seed": 0, "status": "completed", "metrics": {"success": 1.0}})
    )


def _episode(draw: random.Random, file: int, number: int) -> Trajectory:
    """One to twelve turns of a lake, some of them without a valid action, some episodes broken off."""
    turns = []
    for _ in range(draw.randint(1, 12)):
        prompt = tuple(draw.randrange(300) for _ in range(40))
        said = tuple(draw.randrange(300) for _ in range(8))
        valid = draw.random() > 0.1
        chances = tuple(-draw.random() for _ in said)
        turns.append(
            Exchange("S F F F\nF H F H\nF F F H\nH F F G", prompt, said, chances, "<action>Down</action>",
                 "Down" if valid else None, valid, 0.0, "s", None, "stop")
        )  # fmt: skip
    turns[-1] = turns[-1]._replace(reward=draw.choice((0.0, 0.0, 0.5, 1.0)))
    solved = turns[-1].reward == 1.0
    broken = ("env_error", "RuntimeError: the lake is frozen") if draw.random() < 0.01 else ("ok", None)
    return trajectory_of(
        "Lake", file, number // 8, number % 8, number // 8, tuple(turns), solved, solved, not solved, *broken  # type: ignore[arg-type]
    )  # fmt: skip


def timed(work: Callable[[], Any], runs: int) -> dict[str, Any]:
    """The median of several runs in seconds, with the CPU time of one, children included."""
    seconds, before = [], _cpu()
    for _ in range(runs):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    value = {"value": round(statistics.median(seconds), 4), "max": round(max(seconds), 4), "runs": runs}
    return {**value, "unit": "s", "cpu_seconds": round((_cpu() - before) / runs, 4)}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@contextlib.contextmanager
def served(run: Path, env: dict[str, str]) -> Iterator[str]:
    """`shoal view` of a run; gives its address."""
    words = [sys.executable, "-m", "shoal", "view", str(run)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


def paint(browser: Browser, address: str, runs: int) -> dict[str, Any]:
    """The time from the navigation to the first paint with content, as the browser's own clock has it."""
    found = []
    for _ in range(runs):
        browser.send("Network.clearBrowserCache")
        browser.open("about:blank")
        browser.open(address)
        found.append(float(browser.until(PAINT)) / 1000)
    value = {"value": round(statistics.median(found), 4), "max": round(max(found), 4), "runs": runs}
    return {**value, "unit": "s", "cpu_seconds": None}


def paints(
    browser: Browser, address: str, episodes: int, runs: int, add: Callable[[str, str, dict[str, Any]], None]
) -> None:
    """First paints of the pages of a run."""
    browser.size(1280)
    whole = f"document.querySelector('.pager').textContent.includes('of {episodes:,}')"
    browser.open(f"{address}run/0/episodes")
    while not browser.run(whole):  # the index is being made
        browser.open(f"{address}run/0/episodes")
    add("first paint", "ideal: a page of nothing", paint(browser, f"{address}nothing", runs))
    name = f"train-{FILES // 2:06d}:{episodes // FILES // 2}"
    for what, path in (
        ("all runs", ""),
        ("the run", "run/0"),
        ("episodes, unfiltered", "run/0/episodes"),
        ("episodes, the worst that ran out of turns", "run/0/episodes?outcome=truncated&order=worst"),
        ("episodes with a text, one that all have", "run/0/episodes?text=f+h+f"),
        ("episodes, the last page", f"run/0/episodes?page={episodes // 50 - 1}"),
        ("a group", f"run/0/group?name={name}"),
        ("an episode", f"run/0/episode?name={name}"),
    ):
        browser.open(address + path)
        assert "there is no" not in str(browser.run("document.body.textContent")).lower(), path
        add(f"first paint: {what}", "shoal view", paint(browser, address + path, runs))


def main() -> int:
    """Measure and write `benchmarks/results/viewer.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where the run is kept for another time; made if it is not there"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "viewer.json")
    parser.add_argument("--quick", action="store_true", help="a small run, nothing saved")
    options = parser.parse_args()
    if options.quick:
        options.episodes, options.runs = 5_000, 1
    rows: list[dict[str, Any]] = []

    def add(case: str, subject: str, measured: dict[str, Any]) -> None:
        rows.append({"case": case, "subject": subject, **measured})
        print(f"{case:<56}{subject:<28}{measured['value']:8.3f} s, at most {measured['max']:.3f}", flush=True)

    with tempfile.TemporaryDirectory(prefix="shoal-viewer-") as place:
        folder, cache = options.folder or Path(place) / "run", Path(place) / "cache"
        if not folder.exists():
            write_run(folder, options.episodes)
        size = sum(file.stat().st_size for file in (folder / "trajectories").iterdir())
        print(f"{options.episodes:,} episodes, {size / 2**20:.0f} MiB")
        env = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT / "src")}
        files = sorted((folder / "trajectories").iterdir())

        def lines() -> None:
            assert sum(file.read_bytes().count(b"\n") for file in files) == options.episodes

        add("an index from nothing", "ideal: count the lines", timed(lines, options.runs))
        index = EpisodeIndex(folder)
        add("an index from nothing", "shoal", timed(index.refresh, 1))
        assert index.count() == options.episodes
        add("an index that is up to date", "shoal", timed(index.refresh, options.runs))
        if chromium() is None:
            print("left out, since Chromium is not installed: first paints", flush=True)
        else:
            with served(folder, env) as address, Browser() as browser:
                paints(browser, address, options.episodes, options.runs, add)

        def command(*words: str) -> Callable[[], None]:
            return lambda: subprocess.run(
                [sys.executable, *words], env=env, check=True, stdout=subprocess.DEVNULL
            ).check_returncode()

        add(
            "shoal show",
            "ideal: start Python, rich",
            timed(command("-c", "import rich.console"), options.runs),
        )
        show = ("-m", "shoal", "show", str(folder))
        add("shoal show", "shoal", timed(command(*show), options.runs))
        add("shoal show --worst", "shoal", timed(command(*show, "--worst"), options.runs))
        named = ("--file", files[FILES // 2].stem, "--episode", "17")
        add("shoal show --file --episode", "shoal", timed(command(*show, *named), options.runs))
    if options.quick:
        return 0
    result = {
        "benchmark": "viewer",
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": _processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "load": round(os.getloadavg()[0], 1),
        },
        "versions": {"python": platform.python_version()},
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
