"""What happens when one of four environments dies, hangs or answers nonsense: shoal beside its rivals.

    python benchmarks/faults.py [--libraries shoal "gymnasium async"] [--faults kill hang] [--quick]

Each trial is a process of its own, killed after `--limit` seconds; so a library that hangs shows as "hangs".
Results go to `benchmarks/results/faults.json`. "left" counts processes 3 s after the trial's end. `--quick` tries
three faults on shoal and Gymnasium, and saves nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from faulty_env import Env

RESULTS = Path(__file__).parent / "results" / "faults.json"
FAULTS = {
    "kill": "worker killed (SIGKILL)",
    "exit": "os._exit in step",
    "segv": "segmentation fault",
    "raise": "exception",
    "unpicklable": "exception that does not pickle",
    "hang": "step hangs",
    "stubborn": "hangs and ignores SIGTERM",
    "shape": "observation of another shape",
    "nan": "NaN reward",
    "garbage": "garbage on standard output",
    "late": "step_wait times out, then the next step",
    "parent": "parent killed, one env hung",
    "text": "text observations",
}
LIBRARIES = {
    "shoal": "shoal.vector",
    "shoal restart": "shoal.vector",
    "gymnasium async": "gymnasium",
    "sb3 subproc": "stable_baselines3",
    "pufferlib": "pufferlib",
}
TIMEOUT = 1.0
"""Seconds of `step_timeout` where a library has one."""


def open_library(library: str, fault: str) -> Any:
    fns = [functools.partial(Env, fault, i) for i in range(4)]
    if library.startswith("shoal"):
        from shoal.vector import make_vec

        policy: dict[str, Any] = {"on_failure": "restart"} if library.endswith("restart") else {}
        return make_vec(
            fns, backend="process", num_workers=4, step_timeout=TIMEOUT, autoreset="next_step", **policy
        )
    if library == "gymnasium async":
        return gymnasium.vector.AsyncVectorEnv(fns)
    if library == "sb3 subproc":
        from stable_baselines3.common.vec_env import SubprocVecEnv

        return SubprocVecEnv(fns)
    import pufferlib.emulation
    import pufferlib.vector

    creators = [functools.partial(pufferlib.emulation.GymnasiumPufferEnv, env_creator=fn) for fn in fns]
    return pufferlib.vector.make(
        creators,
        env_args=[[]] * 4,
        env_kwargs=[{}] * 4,
        num_envs=4,
        num_workers=4,
        backend=pufferlib.vector.Multiprocessing,
        overwork=True,
    )


def say(**what: Any) -> None:
    """One line on the third descriptor: standard output belongs to the environments."""
    os.write(3, json.dumps(what).encode() + b"\n")


def trial(library: str, fault: str) -> None:
    """Run in a process of its own."""
    envs = open_library(library, fault)
    envs.reset()
    say(ready=True)
    try:
        for action in (1, 2):
            envs.step(np.full(4, action))
        start = time.monotonic()
        say(fault=True)
        if fault == "late":
            late(envs)
            return
        result = envs.step(np.full(4, 3))
        report(envs, library, fault, result, time.monotonic() - start)
    except BaseException as error:
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        say(
            seconds=time.monotonic() - start,
            outcome=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else '(no message)'}",
            names_env="env 1" in told or "Worker-1" in told,
        )
    start = time.monotonic()
    envs.close()
    say(close_seconds=time.monotonic() - start)


def late(envs: Any) -> None:
    if not hasattr(envs, "step_wait") or "timeout" not in inspect.signature(envs.step_wait).parameters:
        say(outcome="no timeout to wait with")
        return
    envs.step_async(np.full(4, 3))
    try:
        envs.step_wait(timeout=0.1)
    except Exception:
        time.sleep(0.6)
    try:
        rewards = envs.step(np.full(4, 4))[1].tolist()
    except Exception as error:
        if "reset()" not in str(error):
            raise
        say(outcome="asks for a reset")
        return
    say(outcome="right results" if rewards == [4.0] * 4 else f"results of the step before: {rewards}")


def report(envs: Any, library: str, fault: str, result: Any, seconds: float) -> None:
    obs, rewards = result[0], np.asarray(result[1])
    if fault == "text":
        right = list(obs) == ["action3"] * 4
        say(seconds=seconds, outcome="right text" if right else f"wrong text: {obs[1]!r:.20}…")
    elif library == "shoal restart":
        others = rewards[[0, 2, 3]].tolist() == [3.0] * 3
        told = bool(np.asarray(result[3])[1]) and bool(result[4].get("worker_restarted", [0, 0])[1])
        say(
            seconds=seconds,
            outcome="replaced, truncated, the others went on" if told and others else "went on",
            names_env=told,
        )
    else:
        say(seconds=seconds, outcome="went on" + (" with NaN" if np.isnan(rewards).any() else ""))


def run(library: str, fault: str, limit: float) -> dict[str, Any]:
    """Start a trial, watch it, and count what it leaves."""
    read, write = os.pipe()
    command = [sys.executable, "-W", "ignore", __file__, "--trial", library, fault]
    process = subprocess.Popen(
        command,
        pass_fds=[write],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "SHOAL_TRIAL_FD": str(write), "SHOAL_TRIAL": f"{library}/{fault}/{os.getpid()}"},
    )
    os.close(write)
    said: dict[str, Any] = {}
    reader = threading.Thread(target=_listen, args=(read, said), daemon=True)
    reader.start()
    deadline = time.monotonic() + 60
    while not said.get("fault") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if fault == "parent":
        time.sleep(0.5)
        process.kill()
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        said.setdefault("outcome", "hangs")
        if "close_seconds" not in said and said["outcome"] != "hangs":
            said["close_seconds"] = None
        process.kill()
        process.wait()
    end = time.monotonic() + 3.0
    while (left := _left(library, fault)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if fault == "parent":
        said["outcome"] = f"{len(left)} processes live on" if left else "all gone"
    said["left"] = len(left)
    return said


def _listen(read: int, said: dict[str, Any]) -> None:
    with os.fdopen(read, "rb") as lines:
        for line in lines:
            said.update(json.loads(line))


def _left(library: str, fault: str) -> list[int]:
    """Processes of the trial, told by its mark in their environment."""
    mark = f"SHOAL_TRIAL={library}/{fault}/{os.getpid()}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if (
                    mark in (entry / "environ").read_bytes()
                    and b"\nState:\tZ" not in (entry / "status").read_bytes()
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def main() -> None:
    if sys.argv[1:2] == ["--trial"]:
        os.dup2(int(os.environ["SHOAL_TRIAL_FD"]), 3)
        trial(sys.argv[2], sys.argv[3])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, help="all if not given")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, help="all if not given")
    parser.add_argument("--limit", type=float, help="seconds of a trial; 8 if not given")
    parser.add_argument("--quick", action="store_true", help="a few trials, nothing saved")
    args = parser.parse_args()
    libraries = args.libraries or list(LIBRARIES)[: 3 if args.quick else None]
    faults = args.faults or (["kill", "raise", "shape"] if args.quick else list(FAULTS))
    limit = args.limit or (4.0 if args.quick else 8.0)
    absent = [
        library for library in libraries if not importlib.util.find_spec(LIBRARIES[library].partition(".")[0])
    ]
    if absent:
        print(f"left out, since not installed: {', '.join(absent)}", flush=True)
    rows: list[dict[str, Any]] = []
    for fault in faults:
        for library in libraries:
            if library in absent:
                continue
            if fault == "text" and library in ("sb3 subproc", "pufferlib"):
                said: dict[str, Any] = {"outcome": "no text spaces"}
            else:
                said = run(library, fault, limit)
            said.pop("ready", None), said.pop("fault", None)
            rows.append({"case": FAULTS[fault], "subject": library, **said})
            print(f"{FAULTS[fault]:40} {library:16} {said}", flush=True)
    if not args.quick:
        save(rows)


def save(rows: list[dict[str, Any]]) -> None:
    """Write the results, keeping rows that were not measured now."""
    RESULTS.parent.mkdir(exist_ok=True)
    old = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    new = {(row["case"], row["subject"]) for row in rows}
    kept = [row for row in old if (row["case"], row["subject"]) not in new]
    RESULTS.write_text(
        json.dumps(
            {
                "machine": {"cpus": len(os.sched_getaffinity(0)), "processor": platform.machine()},
                "versions": {"python": platform.python_version(), "gymnasium": gymnasium.__version__},
                "date": time.strftime("%Y-%m-%d"),
                "rows": kept + rows,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
