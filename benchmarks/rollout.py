"""How much of the possible speed a rollout reaches: shoal beside a lock, a worker-batched lock and a barrier.

    python benchmarks/rollout.py [--only WORD] [--runs 5] [--envs 64 256] [--quick]

The engine sleeps 20 ms + 1 ms a request, envs sleep before each request as long as seeded draws say, and an
episode has 20 turns; all sleep, so the schedule is measured and not the CPU. Utilisation is the ideal time over
the measured one; the ideal is the larger of all engine work in full batches and the longest env's own chain. The
two locks are plain processes whose envs and engine lock have no transport at all, in their favour; they play fewer
turns where a run would take minutes (the ideal is of the same number of turns). `--quick` takes one run of one case
and saves nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import select
import socket
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Text

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO)]

from benchmarks.driver import AskingHost  # noqa: E402

from shoal import envs  # noqa: E402
from shoal.core.executors import available_cpus  # noqa: E402
from shoal.core.seeding import stream  # noqa: E402
from shoal.envs.actions import Projection  # noqa: E402
from shoal.envs.text import Outcome, TextEnv  # noqa: E402
from shoal.rollout.episode import EpisodeId  # noqa: E402
from shoal.rollout.hosts.host import Hosts  # noqa: E402
from shoal.rollout.plan import Assignment, place_of  # noqa: E402
from shoal.rollout.play import Driver, ParallelRolloutManager  # noqa: E402
from shoal.samplers.asking import Statistics, run_here  # noqa: E402
from shoal.samplers.sampler import Completion, Request, Sampling  # noqa: E402
from shoal.samplers.tokenizers import TinyTokenizer  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "rollout.json"
TURNS, WORKERS = 20, 4
FIXED, PER_ITEM = 0.020, 0.001
COMPUTING = 0.005
"""Seconds of Python a turn in the case "cpu"."""
CASES = ("pareto", "uniform", "log-uniform", "cpu")
rows: list[dict[str, Any]] = []


def latencies(kind: str, seed: int, turns: int = TURNS) -> np.ndarray:
    """Seconds that an env takes before each of its requests: between 1 and 50 ms."""
    uniform = stream(seed, "latencies").random(turns)
    if kind == "cpu":
        return np.full(turns, COMPUTING)
    if kind == "pareto":  # bounded, alpha 1
        return 1 / (1000 - uniform * (1000 - 20))
    if kind == "uniform":
        return 0.001 + 0.049 * uniform
    return 0.001 * 50**uniform


@dataclass(frozen=True)
class SleepConfig:
    """Settings of `SleepEnv`."""

    kind: str = "pareto"
    max_steps: int = TURNS


class SleepEnv(TextEnv[SleepConfig]):
    """Sleeps before every request; its rewards follow from its seed and the actions."""

    Config = SleepConfig
    projection = Projection(lookup={"go": 1})
    action_space = Discrete(1, start=1)
    observation_space = Text(16)
    instructions = "Go."

    def _start(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._latencies = latencies(self.config.kind, self._seed)
        self._wait(self._latencies[0])

    def _advance(self, action: Any) -> Outcome:
        if self._steps + 1 < self.config.max_steps:
            self._wait(self._latencies[self._steps + 1])
        return Outcome(float(self._rng.integers(1000)))

    def _wait(self, seconds: float) -> None:
        if self.config.kind != "cpu":
            return time.sleep(seconds)
        end = time.thread_time() + seconds  # Python that holds the interpreter
        while time.thread_time() < end:
            sum(range(100))
        return None

    def observe(self) -> str:
        return f"step {self._steps}"


class SleepEngine:
    """Takes 20 ms a batch and 1 ms a request."""

    level = "L2"

    def __init__(self) -> None:
        self.tokenizer = TinyTokenizer(["go"])
        self.weights_version = 0
        self.answer = self.tokenizer.encode("<action>go</action>")

    def generate(self, requests: Any) -> list[Completion]:
        time.sleep(FIXED + PER_ITEM * len(requests))
        return [Completion(self.answer, (0.0,) * len(self.answer), "stop", 0) for _ in requests]


def config(kind: str, n_envs: int, schedule: str) -> dict[str, Any]:
    side = {"env_groups": n_envs, "group_size": 1, "env_configs": {"tags": ["Sleep"]}}
    return {
        "custom_envs": {"Sleep": {"env_type": "bench_sleep", "env_config": {"kind": kind}}},
        "es_manager": {"train": side, "val": side},
        "agent_proxy": {
            "parallel_n_jobs": WORKERS,
            "parallel": {"schedule": schedule},
            "prompt": {"history": 0, "first": "{observation}", "later": "{observation}"},
        },
    }


def draws(kind: str, n_envs: int, run: int, turns: int = TURNS) -> np.ndarray:
    return np.array([latencies(kind, place_of(0, run, g, 0).env_seed, turns) for g in range(n_envs)])


def ideal(drawn: np.ndarray, kind: str = "") -> float:
    n_envs, turns = drawn.shape
    if kind == "cpu":
        return float(drawn.sum()) / min(WORKERS, available_cpus())
    engine = turns * FIXED + n_envs * turns * PER_ITEM + drawn[:, 0].min()
    return max(engine, float(drawn.sum(1).max()) + turns * (FIXED + PER_ITEM))


def shoal_run(kind: str, n_envs: int, schedule: str, run: int, expected: Any) -> tuple[float, list[float]]:
    """Utilisation and returns of one rollout; the first of the workers' life is not counted."""
    manager = managers.get((kind, n_envs, schedule))
    if manager is None:
        manager = ParallelRolloutManager(config(kind, n_envs, schedule), SleepEngine(), backend="process")
        managers[kind, n_envs, schedule] = manager
        manager.collect(1000)
    trajectories = manager.collect(run)
    played = [t.reward for t in trajectories]
    assert all(t.status == "ok" and len(t.turns) == TURNS for t in trajectories)
    assert expected is None or played == expected, "a schedule changed a trajectory"
    return ideal(draws(kind, n_envs, run), kind) / manager.report.seconds, played


managers: dict[Any, ParallelRolloutManager] = {}


def lock_run(kind: str, n_envs: int, run: int, turns: int, *, batched: bool) -> float:
    """Workers whose requests queue for one lock: each request alone, or a whole worker's turn at once."""
    drawn = draws(kind, n_envs, run, turns)
    context = multiprocessing.get_context("fork")
    lock, gate = context.Lock(), context.Barrier(WORKERS + 1)
    play = _worker_batched if batched else _one_by_one
    processes = [
        context.Process(target=play, args=([drawn[i] for i in part], lock, gate))
        for part in np.array_split(np.arange(n_envs), WORKERS)
    ]
    for process in processes:
        process.start()
    gate.wait()
    clock = time.perf_counter()
    for process in processes:
        process.join()
    return ideal(drawn) / (time.perf_counter() - clock)


def _worker_batched(part: list[np.ndarray], lock: Any, gate: Any) -> None:
    gate.wait()
    for turn in np.array(part).T:
        time.sleep(turn.max())  # its envs abreast
        with lock:
            time.sleep(FIXED + PER_ITEM * len(part))


def _one_by_one(part: list[np.ndarray], lock: Any, gate: Any) -> None:
    def play(drawn: np.ndarray) -> None:
        for seconds in drawn:
            time.sleep(seconds)
            with lock:
                time.sleep(FIXED + PER_ITEM)

    threads = [threading.Thread(target=play, args=(drawn,)) for drawn in part]
    gate.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def utilisation(kind: str, n_envs: int, runs: int) -> None:
    """All subjects in turns on the same draws."""
    few = 3 if n_envs > 64 else 4
    found: dict[str, list[float]] = {}
    for run in range(runs):
        expected = None
        for subject, schedule in (
            ("shoal", "adaptive"),
            ("barrier (shoal, lockstep)", "barrier"),
        ):
            value, expected = shoal_run(kind, n_envs, schedule, run, expected)
            found.setdefault(subject, []).append(value)
        if kind != "cpu":
            batched = lock_run(kind, n_envs, run, TURNS, batched=True)
            found.setdefault("worker-batched lock", []).append(batched)
        if run == 0 and kind == "pareto":
            found["lock per request"] = [lock_run(kind, n_envs, run, few, batched=False)]
    for subject, values in found.items():
        add(f"utilisation, {kind}, {n_envs} envs", subject, values, "of ideal")
    add(f"utilisation, {kind}, {n_envs} envs", "ideal", [1.0], "of ideal")
    for manager in managers.values():
        manager.close()
    managers.clear()


# --- the cost of asking
def overhead(n_clients: int, requests: int = 3000, runs: int = 3) -> None:
    """Microseconds of one request of 250 tokens to an engine that answers at once, from a host over its connection.

    Beside it a bare echo of as many bytes over the same kind of socket, in turns: what the machine takes for waking
    processes alone, which varies from hour to hour.
    """
    name = f"request overhead, {n_clients} in flight"
    subjects = ("shoal", "shoal, CPU of the driver", "shoal, CPU of driver and host")
    found: dict[str, list[float]] = {subject: [] for subject in (*subjects, "bare echo")}
    for _ in range(runs):
        for subject, value in zip(subjects, _through_the_driver(n_clients, requests), strict=True):
            found[subject].append(value)
        found["bare echo"].append(float(np.median(_bare_echo(n_clients, requests))) / n_clients)
    for subject, times in found.items():
        add(name, subject, [value * 1e6 for value in times], "us a request")


class _Echo:
    """A sampler that answers at once, in the driver's loop."""

    def __init__(self) -> None:
        self.statistics, self.playing = Statistics(), 0

    async def sample(self, request: Request) -> Completion:
        return Completion((1, 2, 3, 4), (0.0,) * 4, "stop", 0)

    def close(self) -> None:
        pass


def _through_the_driver(n_slots: int, requests: int) -> tuple[float, float, float]:
    """Seconds a request, of CPU in the driver, and in driver and host, with a host that asks and does nothing else."""
    assignments = [Assignment(i, EpisodeId(0, 0, i, 0, 0), "") for i in range(n_slots)]

    async def play() -> tuple[float, float, float]:
        asking = AskingHost(requests, 250, 0)
        host = await asking.start()
        driver = Driver(Hosts(lambda: host), _Echo(), Sampling(), lambda index, ended: None)  # type: ignore[arg-type]
        began, cpu = time.perf_counter(), time.thread_time()
        await driver.play(assignments)
        seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu
        await asking.end()
        total = n_slots * requests
        return seconds / total, cpu / total, (cpu + asking.cpu.value) / total

    return run_here(play())


def _times(n_clients: int, client: Any, address: Any, requests: int) -> np.ndarray:
    """Seconds of each request of all clients, each a process."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    gate = context.Barrier(n_clients)
    clients = [
        context.Process(target=client, args=(address, number, requests, gate, results))
        for number in range(n_clients)
    ]
    for process in clients:
        process.start()
    times = np.concatenate([results.get() for _ in clients])
    for process in clients:
        process.join()
    return times


ASKED, ANSWERED = b"x" * 400, b"y" * 80
"""As many bytes as shoal's messages have here."""


def _bare_echo(n_clients: int, requests: int) -> np.ndarray:
    """One thread that reads what is there and answers, and clients that wait for it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/echo"
        listener.bind(path)
        listener.listen()
        server = threading.Thread(target=_echo, args=(listener, n_clients), daemon=True)
        server.start()
        times = _times(n_clients, _shout, path, requests)
        server.join()
    return times


def _echo(listener: socket.socket, n_clients: int) -> None:
    connections = {}
    poll = select.epoll()
    for _ in range(n_clients):
        connection, _ = listener.accept()
        connections[connection.fileno()] = connection
        poll.register(connection, select.EPOLLIN)
    while connections:
        asked = [descriptor for descriptor, _ in poll.poll()]
        for descriptor in asked:
            if connections[descriptor].recv(2**16):
                connections[descriptor].send(ANSWERED)
            else:
                connections.pop(descriptor).close()
    poll.close()


def _shout(path: str, number: int, requests: int, gate: Any, results: Any) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        times = []
        gate.wait()
        for _ in range(requests):
            began = time.perf_counter()
            connection.sendall(ASKED)
            connection.recv(2**16)
            times.append(time.perf_counter() - began)
    results.put(np.array(times))


def add(case: str, subject: str, values: list[float], unit: str) -> None:
    row = {
        "case": case,
        "subject": subject,
        "value": round(statistics.median(values), 4),
        "unit": unit,
        "cpu_seconds": round(sum(os.times()[:4]), 2),
        "runs": len(values),
    }
    rows.append(row)
    print(f"{case:34} {subject:28} {row['value']:10.3f} {unit}  ({row['runs']} runs)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--envs", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--quick", action="store_true", help="one run of one case, nothing saved")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.envs = 1, options.envs[:1]
    envs.register("bench_sleep", SleepEnv, replace=True)
    if options.only in "overhead":
        for n_clients in (1, 4):
            overhead(n_clients, **({"requests": 500, "runs": 1} if options.quick else {}))
    for kind in CASES[: 1 if options.quick else None]:
        for n_envs in options.envs if kind in ("pareto", "cpu") else options.envs[:1]:
            if options.only in kind:
                utilisation(kind, n_envs, options.runs)
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "gymnasium", "msgspec")}
    found = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "versions": {"python": platform.python_version(), **versions},
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    if not (options.only or options.quick):
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
