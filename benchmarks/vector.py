"""Steps per second of shoal's vector environments beside their rivals, on the same Python environments.

    python benchmarks/vector.py [--cases cartpole,text] [--counts 8,32] [--quick] [--busy-core]

Every case has a process of its own, in which all its subjects live at once. Each is first compared with a plain loop
over the environments; then they are timed in rounds, in turns, each round from the same seeds with the same actions.
A ratio is taken within a round, so what slows the machine slows both sides of it; reported are the median and the
range over the rounds. `--busy-core` repeats shoal, Gymnasium's serial vector and the ideal while another process keeps
one core busy. A rival or an environment that is not installed is left out. `--quick` plays eight environments of some
cases in two short rounds and saves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import vector_envs
from vector_envs import CASES

RESULTS = Path(__file__).parent / "results" / "vector.json"
PACKAGES = (
    "shoal",
    "numpy",
    "gymnasium",
    "stable_baselines3",
    "pufferlib-core",
    "envpool",
    "ale-py",
    "mujoco",
)
CORES = len(os.sched_getaffinity(0))
PYTHON_PEERS = ("gymnasium", "sb3", "pufferlib")
BEST = "shoal / best Python peer"
DROP_IN = "shoal async / gymnasium async"
WHOLE = "the case itself"
RIVALS = {
    "stable_baselines3": ("sb3 dummy", "sb3 subproc"),
    "pufferlib": ("pufferlib 1 worker", "pufferlib 2 workers"),
    "envpool": ("envpool",),
}
"""Packages, and the subjects that are left out where one is not installed."""
NEEDS = {
    "Box2D": ("lunarlander",),
    "mujoco": ("halfcheetah",),
    "minigrid": ("minigrid",),
    "ale_py": ("pong",),
    "cv2": ("pong",),
}
"""Packages, and the cases that are left out where one is not installed."""
QUICK = ("cartpole", "text", "waiting", "lunarlander")
SILENCE = 90.0
"""Seconds after which a subject that says nothing is taken to hang."""
GOALS = {
    **{(f"cartpole n={n}", BEST): goal for n, goal in ((8, 1.3), (32, 1.7), (128, 1.7))},
    **{(f"lunarlander n={n}", BEST): goal for n, goal in ((8, 1.5), (32, 1.75), (128, 1.8))},
    **{(f"images n={n}", BEST): 1.6 for n in (8, 32, 128)},
    **{(f"text n={n}", BEST): 1.3 for n in (8, 32, 128)},
    ("halfcheetah n=8", BEST): 1.5,
    ("cpu200us n=128", "shoal / ideal"): 0.92,
    **{(f"waiting n={n}", "shoal / ideal"): 0.93 for n in (8, 32, 128)},
    **{(f"waiting n={n}", "shoal recv/send / ideal (first ready)"): 0.90 for n in (8, 32, 128)},
}


# ---- one way to drive everything -------------------------------------------------------------------------------


class Subject:
    """Anything with Gymnasium's vector interface, driven by a plan of actions that is the same for all."""

    autoreset: str | None = "next_step"
    """The plain loop that it must equal; None where it is other code or has its own seeds."""
    spins = False
    """Whether its workers keep cores busy between two steps."""

    def __init__(self, vec: Any, plan: list[Any]) -> None:
        self.vec, self.plan, self.n = vec, plan, len(plan[0])

    def start(self, seed: int) -> Any:
        return self.vec.reset(seed=seed)[0]

    def step(self, actions: Any) -> tuple[Any, Any, Any]:
        obs, rewards, terminated, truncated, *_ = self.vec.step(actions)
        return obs, rewards, np.logical_or(terminated, truncated)

    def run(self, seconds: float) -> tuple[int, float]:
        """Step for so long.

        Returns:
            steps of environments, seconds.
        """
        step, plan, count = self.vec.step, itertools.cycle(self.plan), 0
        step(next(plan))
        start = time.perf_counter()
        while (now := time.perf_counter()) - start < seconds:
            step(next(plan))
            count += self.n
        return count, now - start

    def close(self) -> None:
        self.vec.close()


class SB3(Subject):
    """Stable-Baselines3's interface, which resets within the step that ends an episode."""

    autoreset = "same_step"

    def start(self, seed: int) -> Any:
        self.vec.seed(seed)
        return self.vec.reset()

    def step(self, actions: Any) -> tuple[Any, Any, Any]:
        return self.vec.step(actions)[:3]


class Puffer(Subject):
    """PufferLib: its own seeds, and workers that look at memory without a pause while they wait.

    It is reset once: with environments that tell something in their infos, a second `async_reset` waits for ever.
    """

    autoreset = None
    spins = True

    def __init__(self, vec: Any, plan: list[Any]) -> None:
        super().__init__(vec, plan)
        vec.async_reset(0)
        vec.recv()

    def start(self, seed: int) -> None:
        """It goes on where it was."""


class Batch(Subject):
    """A batch with code of its own instead of the Python environments."""

    autoreset = None


class EnvPool(Batch):
    """EnvPool takes seeds only when it is made."""

    def start(self, seed: int) -> Any:
        return self.vec.reset()[0]


class SendRecv(Subject):
    """`send` and `recv` of whichever environments are ready first."""

    autoreset = None

    def run(self, seconds: float) -> tuple[int, float]:
        vec, plan, count = self.vec, itertools.cycle(self.plan), 0
        vec.send(range(self.n), next(plan))
        start = time.perf_counter()
        while (now := time.perf_counter()) - start < seconds:
            ready = vec.recv(max(1, self.n // 8))
            count += len(ready.ids)
            vec.send(ready.ids, next(plan)[ready.ids])
        left = self.n
        while left:
            left -= len(vec.recv(left).ids)
        return count, now - start


class PlainLoop(Subject):
    """Environments in a list, times the number of cores: no vector environment moves its data for nothing."""

    def __init__(self, fn: Callable[[], Any], plan: list[Any]) -> None:
        super().__init__(None, plan)
        self.envs = [fn() for _ in range(self.n)]
        self.done = [False] * self.n

    def start(self, seed: int) -> Any:
        self.done = [False] * self.n
        return [env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)]

    def step(self, actions: Any, same_step: bool = False) -> tuple[Any, Any, Any]:
        """Reference for all: `done` environments restart in the next step, or in the same one."""
        rows, rewards, done = [], [], self.done
        for i, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            if done[i]:
                row, reward, done[i] = env.reset()[0], 0.0, False
            else:
                row, reward, terminated, truncated, _ = env.step(action)
                done[i] = terminated or truncated
            rows.append(row)
            rewards.append(reward)
        ended = list(done)
        if same_step:
            for i in np.flatnonzero(ended):
                rows[i], done[i] = self.envs[i].reset()[0], False
        return rows, rewards, ended

    def run(self, seconds: float) -> tuple[int, float]:
        self.vec = self
        count, took = super().run(seconds)
        return CORES * count, took

    def close(self) -> None:
        for env in self.envs:
            env.close()


class WaitingLimit(Subject):
    """What nobody can beat who waits for all, or for whichever are first: from the same draws as the environments."""

    def __init__(self, plan: list[Any], first_ready: bool) -> None:
        super().__init__(None, plan)
        self.first_ready = first_ready

    def start(self, seed: int) -> None:
        self.seed = seed

    def run(self, seconds: float) -> tuple[int, float]:
        streams = [np.random.default_rng(self.seed + i) for i in range(self.n)]
        steps = range(1 + int(seconds / 0.001))
        draws = np.array([[vector_envs.latency(rng) for _ in steps] for rng in streams])[:, 1:]
        if self.first_ready:
            return self.n * draws.shape[1], float(draws.sum(1).mean())
        until = np.cumsum(draws.max(0))
        k = int(np.searchsorted(until, seconds))
        return self.n * (k + 1), float(until[k])

    def close(self) -> None:
        """Nothing is open."""


# ---- who is measured -------------------------------------------------------------------------------------------


def subjects(name: str, n: int, busy: bool) -> tuple[Callable[[], Any], dict[str, Callable[[Any], Subject]]]:
    """What makes an environment of the case, and what makes each subject from a plan of actions.

    Those that fork come first: children of a process without threads, and without copies of others' pipes.
    """
    case = CASES[name]
    fn = case.prepare()
    vector = gymnasium.vector

    def sb3(kind: str, *args: Any) -> Any:
        import stable_baselines3.common.vec_env as vec_env

        return getattr(vec_env, kind)([fn] * n, *args)

    def puffer(workers: int) -> Any:
        import pufferlib.emulation
        import pufferlib.vector

        creator = functools.partial(pufferlib.emulation.GymnasiumPufferEnv, env_creator=fn)
        backend = pufferlib.vector.Multiprocessing
        return pufferlib.vector.make(creator, num_envs=n, num_workers=workers, backend=backend)

    def shoal(**options: Any) -> Any:
        from shoal.vector import make_vec

        return make_vec(options.pop("env", fn), n, autoreset="next_step", **options)

    def drop_in() -> Any:
        from shoal.vector import AsyncVectorEnv

        return AsyncVectorEnv([fn] * n)

    def entry_point() -> Any:
        return gymnasium.make_vec(case.batch, num_envs=n, vectorization_mode="vector_entry_point")

    def envpool() -> Any:
        import envpool

        return envpool.make(case.envpool, env_type="gymnasium", num_envs=n, num_threads=CORES)

    found: dict[str, Callable[[Any], Subject]] = {}
    found["gymnasium sync"] = lambda plan: Subject(vector.SyncVectorEnv([fn] * n), plan)
    if not busy:
        # Gymnasium's shared memory gives blanks for text, so text goes through its pipes.
        shared = name != "text"
        found["gymnasium async"] = lambda plan: Subject(
            vector.AsyncVectorEnv([fn] * n, shared_memory=shared), plan
        )
        if name != "text":  # Stable-Baselines3 and PufferLib have no Text spaces
            found["sb3 dummy"] = lambda plan: SB3(sb3("DummyVecEnv"), plan)
            found["sb3 subproc"] = lambda plan: SB3(sb3("SubprocVecEnv", "fork"), plan)
            found["pufferlib 1 worker"] = lambda plan: Puffer(puffer(1), plan)
            found["pufferlib 2 workers"] = lambda plan: Puffer(puffer(2), plan)
    found["shoal"] = lambda plan: Subject(shoal(), plan)
    if not busy:
        for backend in case.forced:
            found[f"shoal {backend}"] = lambda plan, backend=backend: Subject(shoal(backend=backend), plan)
        found["shoal async"] = lambda plan: Subject(drop_in(), plan)
        if case.waits:
            found["shoal recv/send"] = lambda plan: SendRecv(shoal(), plan)
        if case.batch:
            found["shoal native"] = lambda plan: Batch(shoal(env=case.batch, backend="native"), plan)
            found["vector entry point"] = lambda plan: Batch(entry_point(), plan)
        if case.envpool:
            found["envpool"] = lambda plan: EnvPool(envpool(), plan)
    if case.waits:
        found["ideal"] = lambda plan: WaitingLimit(plan, False)
        found["ideal (first ready)"] = lambda plan: WaitingLimit(plan, True)
    else:
        found["ideal"] = lambda plan: PlainLoop(fn, plan)
    return fn, found


def plan_of(fn: Callable[[], Any], n: int) -> list[Any]:
    """64 random actions for all environments, the same for every subject."""
    env = fn()
    space, rng = env.action_space, np.random.default_rng(0)
    env.close()
    if isinstance(space, gymnasium.spaces.Discrete):
        return list(rng.integers(space.n, size=(64, n)))
    return list(rng.uniform(space.low, space.high, (64, n, *space.shape)).astype(space.dtype))


def reference(fn: Callable[[], Any], plan: list[Any], steps: int, same_step: bool) -> list[Any]:
    """What a plain loop sees."""
    plain = PlainLoop(fn, plan)
    told: list[Any] = [plain.start(7)]
    for actions in itertools.islice(itertools.cycle(plan), steps):
        told.append(plain.step(actions, same_step))
    plain.close()
    return told


def check(subject: Subject, told: list[Any]) -> None:
    """The subject's first steps equal those of the plain loop."""
    _equal("observation after reset", subject.start(7), told[0])
    for t, (actions, expected) in enumerate(zip(itertools.cycle(subject.plan), told[1:], strict=False)):
        for what, got, want in zip(
            ("observation", "reward", "done"), subject.step(actions), expected, strict=True
        ):
            _equal(f"{what} of step {t}", got, want)


def _equal(what: str, got: Any, wanted: list[Any]) -> None:
    for i, (row, want) in enumerate(zip(got, wanted, strict=True)):
        if not np.array_equal(row, np.asarray(want, getattr(row, "dtype", None))):
            raise AssertionError(f"wrong {what}, env {i}: {row!s:.60} instead of {want!s:.60}")


# ---- the measurement of one case, in a process of its own -------------------------------------------------------


def descendants() -> set[int]:
    """The processes below this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it ended meanwhile
                continue
    found, last = set[int](), {os.getpid()}
    while last := {pid for pid, parent in parents.items() if parent in last}:
        found |= last
    return found


def cpu_seconds(pids: set[int]) -> float:
    """CPU time of this process and of these, all their threads included, in nanosecond steps."""
    return time.process_time() + sum(time.clock_gettime(((~pid) << 3) | 2) for pid in pids)


def measure(name: str, n: int, options: dict[str, Any], say: Callable[..., None]) -> None:
    """Make, check and time the subjects of a case; `say` tells a watching process how far this is."""
    say(doing=WHOLE)
    if options["busy"]:
        loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))"
        subprocess.Popen([sys.executable, "-c", loop])
    fn, makers = subjects(name, n, options["busy"])
    plan = plan_of(fn, n)
    told = functools.cache(lambda same_step: reference(fn, plan, CASES[name].checked, same_step))
    made: dict[str, Subject] = {}
    workers: dict[str, set[int]] = {}
    for subject, make in makers.items():
        if subject in options["skip"] or not subject.startswith(tuple(options["only"])):
            continue
        say(doing=subject)
        before = descendants()
        try:
            made[subject] = make(plan)
            workers[subject] = descendants() - before
            if made[subject].autoreset and not subject.startswith("ideal"):
                check(made[subject], told(made[subject].autoreset == "same_step"))
        except Exception as error:
            made.pop(subject, None)
            say(failed=subject, error=f"{type(error).__name__}: {error!s:.300}")
        else:
            pause(made[subject], workers[subject], signal.SIGSTOP)
    for number in range(options["rounds"]):
        for subject, item in list(made.items()):
            say(doing=subject)
            seconds = options["seconds"] * (2 if CASES[name].waits else 1)
            try:
                steps, took, cpu = timed(item, workers[subject], number, seconds)
            except Exception as error:
                del made[subject]
                say(failed=subject, error=f"{type(error).__name__}: {error!s:.300}")
            else:
                say(subject=subject, steps=steps, seconds=took, cpu=cpu)
    say(complete=True)


def timed(item: Subject, workers: set[int], seed: int, seconds: float) -> tuple[int, float, float]:
    """Steps, seconds and CPU seconds of one turn; workers that would take cores from the others stand still after."""
    pause(item, workers, signal.SIGCONT)
    try:
        item.start(seed)
        cpu = cpu_seconds(workers)
        steps, took = item.run(seconds)
        return steps, took, cpu_seconds(workers) - cpu
    finally:
        pause(item, workers, signal.SIGSTOP)


def pause(subject: Subject, pids: set[int], number: int) -> None:
    """Stop workers that would take cores from the others between their turns, and let them go on."""
    if subject.spins:
        for pid in pids:
            os.kill(pid, number)


# ---- all cases -------------------------------------------------------------------------------------------------


def missing(packages: dict[str, Any]) -> list[str]:
    """Those that are not installed."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


def watch(name: str, n: int, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a case says, from a process that is killed with all it started when it ends, crashes or hangs."""
    read, write = os.pipe()
    told = [str(write), name, str(n), json.dumps(options)]
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--child", *told]
    doing, rest = WHOLE, b""
    with (
        tempfile.TemporaryDirectory() as folder,  # some simulators write logs where they are
        tempfile.TemporaryFile() as complaints,
        open(read, "rb", buffering=0) as channel,
    ):
        process = subprocess.Popen(
            command,
            pass_fds=[write],
            start_new_session=True,
            stderr=complaints,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "src")},
        )
        os.close(write)
        try:
            while True:
                if not select.select([channel], [], [], SILENCE)[0]:
                    yield {"crashed": doing, "error": f"hangs: nothing for {SILENCE:g} s"}
                    return
                data = channel.read(65536)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    doing = said.get("doing", doing)
                    yield said
                    if "complete" in said:
                        return
                ended = process.poll() is not None and not select.select([channel], [], [], 0.2)[0]
                if ended or not data:
                    complaints.seek(0)
                    last = complaints.read().decode(errors="replace").strip().rpartition("\n")[2]
                    yield {
                        "crashed": doing,
                        "error": f"the process ended with {process.wait()}: {last:.200}",
                    }
                    return
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of them are gone already
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_case(name: str, n: int, options: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows and ratios of a case; a subject that takes the process along is left out and named."""
    case = f"{name} n={n}" + (", a core busy" if options["busy"] else "")
    failed: dict[str, str] = {}
    while True:
        rounds: dict[str, list[dict[str, Any]]] = {}
        for said in watch(name, n, {**options, "skip": [*options["skip"], *failed]}):
            if "steps" in said:
                rounds.setdefault(said["subject"], []).append(said)
            elif "failed" in said:
                failed[said["failed"]] = said["error"]
                rounds.pop(said["failed"], None)
            elif "complete" in said:
                return report(case, rounds, failed)
            elif "crashed" in said:
                again = said["crashed"] in failed or said["crashed"] == WHOLE
                failed[said["crashed"]] = said["error"]
                if again:
                    return {"rows": _failures(case, failed), "ratios": []}


def report(case: str, rounds: dict[str, list[dict[str, Any]]], failed: dict[str, str]) -> dict[str, Any]:
    """What is saved of a case."""
    speeds = {subject: [r["steps"] / r["seconds"] for r in said] for subject, said in rounds.items()}
    rows: list[dict[str, Any]] = []
    for subject, values in speeds.items():
        row = {"case": case, "subject": subject, **_summary(values), "unit": "steps/s"}
        if not subject.startswith("ideal"):
            row["cpu_seconds"] = round(sum(said["cpu"] for said in rounds[subject]), 3)
            row["steps"] = sum(said["steps"] for said in rounds[subject])
        rows.append(row)
    rows += _failures(case, failed)
    return {"rows": rows, "ratios": list(ratios(case, speeds))}


def _failures(case: str, failed: dict[str, str]) -> list[dict[str, Any]]:
    return [{"case": case, "subject": subject, "value": None, "error": e} for subject, e in failed.items()]


def _summary(values: list[float]) -> dict[str, Any]:
    digits = 0 if statistics.median(values) > 100 else 3
    low, middle, high = (round(f(values), digits) for f in (min, statistics.median, max))
    return {"value": middle, "min": low, "max": high, "runs": len(values)}


def ratios(case: str, speeds: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Within each round: shoal to each peer, to the best of them, to its own backends, and the drop-ins."""
    peers = [name for name in speeds if name.startswith(PYTHON_PEERS)]
    forced = [f"shoal {backend}" for backend in ("process", "thread", "serial")]
    batches = ["vector entry point", "envpool"]
    pairs = [("shoal", peer, [peer]) for peer in peers]
    pairs += [
        ("shoal", "best Python peer", peers),
        ("shoal", "best of its backends", forced),
        ("shoal", "ideal", ["ideal"]),
        ("shoal recv/send", "ideal (first ready)", ["ideal (first ready)"]),
        ("shoal async", "gymnasium async", ["gymnasium async"]),
        *(("shoal native", batch, [batch]) for batch in batches),
    ]
    for subject, label, against in pairs:
        there = [speeds[name] for name in against if name in speeds]
        if subject not in speeds or not there:
            continue
        values = [mine / max(others) for mine, *others in zip(speeds[subject], *there, strict=True)]
        name = f"{subject} / {label}"
        row = {"case": case, "ratio": name, **_summary(values)}
        if goal := goal_of(case, name):
            row |= {"goal": goal, "met": row["value"] >= goal}
        yield row


def goal_of(case: str, ratio: str) -> float | None:
    if case.endswith("busy"):
        return 0.97 if ratio == "shoal / gymnasium sync" else None
    return 0.97 if ratio == DROP_IN else GOALS.get((case, ratio))


def show(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if row["value"] is None:
            print(f"{row['case']:26} {row['subject']:22} {row['error']}")
        else:
            cpu = f"{1e6 * row['cpu_seconds'] / row['steps']:9.1f} us CPU a step" if "steps" in row else ""
            spread = f"({row['min']:,.0f} to {row['max']:,.0f})"
            print(f"{row['case']:26} {row['subject']:22} {row['value']:12,.0f} {spread:24} {cpu}")
    for row in result["ratios"]:
        goal = f"goal {row['goal']:g}: {'met' if row['met'] else 'NOT MET'}" if "goal" in row else ""
        print(
            f"{row['case']:26} {row['ratio']:42} {row['value']:6.2f} ({row['min']:.2f} to {row['max']:.2f}) {goal}",
            flush=True,
        )


def save(fresh: dict[str, Any]) -> None:
    """Write the results, keeping those of cases that did not run now."""
    RESULTS.parent.mkdir(exist_ok=True)
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    ran = {row["case"] for row in fresh["rows"]}
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    whole = {
        "machine": {
            "cpu": cpu[0].partition(": ")[2],
            "cores": CORES,
            "system": platform.platform(),
            "load": round(os.getloadavg()[0], 1),
        },
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }
    for part in ("rows", "ratios"):
        whole[part] = [row for row in old.get(part, []) if row["case"] not in ran] + fresh[part]
    RESULTS.write_text(json.dumps(whole, indent=1) + "\n")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        channel, name, n, options = sys.argv[2:]
        os.set_inheritable(int(channel), False)
        measure(name, int(n), json.loads(options), lambda **said: _write(int(channel), said))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help=f"some of {','.join(CASES)}; all if not given")
    parser.add_argument("--counts", help="numbers of environments, with commas; default: those of the case")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one subject in one round")
    parser.add_argument("--only", default="", help="subjects that start so, with commas")
    parser.add_argument("--busy-core", action="store_true", help="another process keeps one core busy")
    parser.add_argument("--quick", action="store_true", help="two short rounds of some cases, nothing saved")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    rounds, seconds = (2, 0.1) if args.quick else (args.rounds, args.seconds)
    options = {
        "rounds": rounds,
        "seconds": seconds,
        "busy": args.busy_core,
        "only": args.only.split(","),
        "skip": [subject for rival in missing(RIVALS) for subject in RIVALS[rival]],
    }
    names = args.cases.split(",") if args.cases else list(QUICK if args.quick else CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"no case named {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if absent := [*missing(RIVALS), *missing(NEEDS)]:
        print(f"left out, since not installed: {', '.join(absent)}", flush=True)
    names = [name for name in names if not any(name in NEEDS[package] for package in missing(NEEDS))]
    if args.counts:
        counts = {name: tuple(map(int, args.counts.split(","))) for name in names}
    else:
        counts = {name: CASES[name].counts[:1] if args.quick else CASES[name].counts for name in names}
    broken = False
    for name in names:
        for n in counts[name]:
            result = run_case(name, n, options)
            show(result)
            broken |= any(
                row["value"] is None and row["subject"].startswith(("shoal", WHOLE)) for row in result["rows"]
            )
            if not (args.quick or args.no_save):
                save(result)
    return int(broken)


def _write(channel: int, said: dict[str, Any]) -> None:
    os.write(channel, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
