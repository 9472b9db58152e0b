"""Where one driver bends: 100, 1,000 and 10,000 open episodes, all asking one sampler at once.

    python benchmarks/driver.py [--runs 3] [--quick]

Hosts are processes that ask, are answered and do nothing else; the sampler answers each request 50 ms after it came.
So what is measured is the driver: requests a second, CPU of its process a request, memory, file descriptors and threads
while all episodes are open. An episode has ten turns; the first prompt has 250 tokens, each later one 60 new ones, an
answer has 40. Each case runs in a process of its own. `--quick` takes 100 episodes once, and saves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO)]

from benchmarks.tables import put, results, table  # noqa: E402

from shoal.core.executors import available_cpus  # noqa: E402
from shoal.rollout.episode import EpisodeId  # noqa: E402
from shoal.rollout.hosts import episodes  # noqa: E402
from shoal.rollout.hosts.host import Hosts  # noqa: E402
from shoal.rollout.hosts.processes import PipeHost, streams_of  # noqa: E402
from shoal.rollout.plan import Assignment  # noqa: E402
from shoal.rollout.play import Driver  # noqa: E402
from shoal.rollout.prompts import PromptConfig  # noqa: E402
from shoal.samplers.asking import Statistics, run_here  # noqa: E402
from shoal.samplers.sampler import Completion, Request, Sampling  # noqa: E402
from shoal.samplers.tokenizers import TinyTokenizer  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "driver.json"
CASES = ((100, 8), (1_000, 8), (10_000, 8), (10_000, 128))
"""Open episodes, and the processes that hold them."""
TURNS, FIRST, LATER, ANSWER = 10, 250, 60, 40
ANSWER_SECONDS = 0.05
MEASURES = {
    "requests a second": "1/s",
    "CPU of the driver": "us a request",
    "memory for the episodes": "MiB",
    "file descriptors": "",
    "threads": "",
}


class SlowSampler:
    """Answers each request after the same time, whatever else it is asked."""

    def __init__(self) -> None:
        self.statistics, self.playing = Statistics(), 0
        self.asked = self.at_once = self.most_at_once = 0

    async def sample(self, request: Request) -> Completion:
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(ANSWER_SECONDS)
        self.at_once -= 1
        return Completion(tuple(range(ANSWER)), (-0.5,) * ANSWER, "stop", 0)

    def close(self) -> None:
        """Nothing is held."""


def asks_only(pipe: Any, n_turns: int, first: int, later: int, cpu: Any) -> None:
    """A host whose episodes ask turn after turn, and play nothing; its seconds of CPU go into `cpu`.

    The first prompt has so many tokens, and each later one so many more; with none it is the first one again.
    """
    begins, goes_on = tuple(range(first)), tuple(range(later))
    began = time.process_time()
    turns: dict[int, int] = {}
    records: dict[int, Any] = {}
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            message = episodes.decode_message(pipe.recv_bytes())
            if isinstance(message, episodes.Control):
                pipe.send_bytes(episodes.encode(episodes.Report(message.slot, os.getpid())))
                continue
            slot = message.slot
            if isinstance(message, episodes.Begin):
                turns[slot], records[slot] = 0, message.assignment.place.record("", "ok", "")
            turn = turns[slot]
            turns[slot] += 1
            extends = turn > 0 and later > 0
            event: Any = episodes.Ask(slot, turn, goes_on if extends else begins, extends)
            if turn == n_turns:
                event = episodes.Ended(slot, records.pop(slot))
            pipe.send_bytes(episodes.encode(event))
    cpu.value = time.process_time() - began


class AskingHost:
    """A process with a host that asks only, and how many seconds of CPU it took."""

    def __init__(self, n_turns: int, first: int, later: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self.cpu = context.Value("d")
        self._pipe, theirs = context.Pipe()
        given = theirs, n_turns, first, later, self.cpu
        self._process = context.Process(target=asks_only, args=given, daemon=True)
        self._process.start()
        theirs.close()

    async def start(self) -> PipeHost:
        """The host, when it is there."""
        setup = episodes.Setup({}, {}, PromptConfig(), TinyTokenizer(["go"]))
        self.host = PipeHost(setup, await streams_of(self._pipe))
        await self.host.start(None)
        return self.host

    async def end(self) -> None:
        """End the host and its process."""
        self.host.end()
        self._pipe.close()
        await asyncio.sleep(0)
        self._process.join()


async def play(n_episodes: int, n_hosts: int) -> dict[str, float]:
    """One rollout of all episodes at once; each of `MEASURES`."""
    me, asking = psutil.Process(), [AskingHost(TURNS, FIRST, LATER) for _ in range(n_hosts)]
    free = iter([await one.start() for one in asking])
    sampler, ended = SlowSampler(), list[int]()
    driver = Driver(
        Hosts(lambda: next(free), n_hosts),
        sampler,  # type: ignore[arg-type]
        Sampling(),
        lambda index, end: ended.append(index),
    )
    plan = [Assignment(i, EpisodeId(0, 0, i, 0, 0), "") for i in range(n_episodes)]
    memory = most = me.memory_info().rss
    began, cpu = time.perf_counter(), time.process_time()
    playing = asyncio.create_task(driver.play(plan))
    held = threads = 0
    while not (await asyncio.wait([playing], timeout=0.25))[0]:
        most, held = max(most, me.memory_info().rss), max(held, me.num_fds())
        threads = max(threads, me.num_threads())
    playing.result()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert sorted(ended) == list(range(n_episodes)), "an episode was lost"
    assert sampler.asked == n_episodes * TURNS
    for one in asking:
        await one.end()
    found = (sampler.asked / seconds, 1e6 * cpu / sampler.asked, (most - memory) / 2**20, held, threads)
    return dict(zip(MEASURES, found, strict=True)) | {"asked at once": sampler.most_at_once}


def in_own_process(n_episodes: int, n_hosts: int) -> dict[str, float]:
    """`play` in a fresh process: memory that another case left behind is not counted."""
    command = [sys.executable, __file__, "--one", str(n_episodes), str(n_hosts)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def name_of(n_episodes: int, n_hosts: int) -> str:
    return f"{n_episodes:,} open episodes in {n_hosts} processes"


def write_table() -> None:
    """The table of docs/scaling.md."""
    cases: dict[str, dict[str, float]] = {}
    for row in results("driver")["rows"]:
        cases.setdefault(row["case"], {})[row["subject"]] = row["value"]
    head = ["", *(f"{name}, {unit}" if unit and unit != "1/s" else name for name, unit in MEASURES.items())]
    put(
        "scaling.md",
        "driver",
        table(head, [[n, *(f"{v:,.0f}" for v in c.values())] for n, c in cases.items()]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="100 episodes once, nothing saved")
    parser.add_argument("--table", action="store_true", help="only write the table of docs/scaling.md")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_here(play(*options.one))))
        return
    if options.table:
        return write_table()
    rows = []
    for case in CASES[:1] if options.quick else CASES:
        found = [in_own_process(*case) for _ in range(1 if options.quick else options.runs)]
        for name, unit in MEASURES.items():
            values = [one[name] for one in found]
            row = {
                "case": name_of(*case), "subject": name, "value": round(statistics.median(values), 2),
                "min": round(min(values), 2), "max": round(max(values), 2), "unit": unit, "runs": len(values),
            }  # fmt: skip
            rows.append(row)
            print(f"{row['case']:42} {name:24} {row['value']:10,.1f} {unit}", flush=True)
        print(f"{'':42} {'asked at once, at most':24} {max(one['asked at once'] for one in found):10,.0f}")
    if options.quick:
        return
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "msgspec")}
    machine = {"cores": available_cpus(), "system": platform.platform()}
    saved = {
        "benchmark": "driver",
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "versions": {"python": platform.python_version(), **versions},
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(saved, indent=1) + "\n")
    write_table()


if __name__ == "__main__":
    main()
