"""PPO beside Stable-Baselines3, sbx and a single-file PPO: steps a second and time to solve CartPole.

    python benchmarks/ppo.py [--quick] [--parts cartpole lunarlander solve pong-batch] [--seconds 2] [--rounds 3]
                             [--cleanrl CHECKOUT]
    python benchmarks/ppo.py --scores runs/ppo-Hopper-v5 ...     notes what finished runs of `shoal train-ppo` reached,
                                                                 and those of benchmarks/ppo_cleanrl.py

Same hyperparameters and threads (one) for all. Steps are counted after a first warm update; subjects
take turns, a row is the median of its rounds. CPU seconds include worker processes: on a machine that does
other work too, compare those. The compiled path is checked against torch autograd before any time is taken.
A rival that is not installed is left out. `--quick` takes one short turn of each and saves nothing.

`--parts pong-batch` is Pong on ale-py's own batch beside the same game in this process, in workers and in
Stable-Baselines3, and beside stepping the batch alone: steps a second, and the shares of the time that stepping,
inference and the update take.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO / "benchmarks")]

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402

import ppo_cleanrl  # noqa: E402
import ppo_single_file  # noqa: E402
from shoal.core.files import read_json, write_json  # noqa: E402
from shoal.train.ppo.envs import EnvFactory  # noqa: E402
from shoal.train.ppo.ppo import PPO  # noqa: E402
from shoal.train.ppo.presets import PRESETS, preset_for  # noqa: E402
from shoal.vector import make_vec  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "ppo.json"
ENVS = {
    "cartpole": "CartPole-v1",
    "lunarlander": "LunarLander-v3",
    "halfcheetah": "HalfCheetah-v5",
    "pong": "ALE/Pong-v5",
}
NEEDS = {"halfcheetah": ("mujoco",), "pong": ("ale_py", "cv2"), "pong-batch": ("ale_py",)}
"""Packages that a part is left out without."""
COUNTS = {"cartpole": (1, 4, 8, 16), "lunarlander": (1, 4, 8, 16), "halfcheetah": (8,), "pong": (8,)}
# The defaults of single-file PPO scripts; 4 minibatches whatever the number of environments.
THROUGHPUT = {
    "n_steps": 128, "n_epochs": 4, "learning_rate": 2.5e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range":
    0.2, "clip_range_vf": 0.2, "ent_coef": 0.01,
}  # fmt: skip
SHOAL = ("shoal", "shoal, 2 workers", "shoal, torch path")
IMAGES = (
    "shoal",
    "shoal, 2 workers",
    "shoal, bfloat16",
    "shoal, bfloat16, 2 workers",
)  # all on the torch path
BATCH, BATCH_ALONE = "shoal, ale-py's batch", "limit: stepping ale-py's batch only"
SB3, SBX, SINGLE, LIMIT = "Stable-Baselines3", "sbx", "single-file PPO", "limit: stepping only"
CLEANRL = "CleanRL"
PROGRAMS = {"cartpole": "ppo.py", "lunarlander": "ppo.py", "halfcheetah": "ppo_continuous_action.py"}
"""Those of CleanRL, run from its checkout."""
LIBRARIES = {SB3: "stable_baselines3", SBX: "sbx"}
"""The latter is the former's algorithms in JAX, with the same interface."""
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

Meter = Callable[[], tuple[float, float]]
Spent = dict[str, float]
"""Wall seconds of each part of PPO."""


def meter() -> tuple[float, float]:
    """(wall, CPU) seconds so far, of this process and its children."""
    cpu = time.process_time()
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
            cpu += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return time.perf_counter(), cpu


class Watch:
    """Steps, wall and CPU seconds from the first call of `stop` that finds enough steps, to the last."""

    def __init__(self, warm: int, seconds: float) -> None:
        self.warm, self.seconds = warm, seconds
        self.begin: tuple[int, float, float] | None = None
        self.end = (0, 0.0, 0.0)

    def stop(self, steps: int) -> bool:
        """Whether enough was seen."""
        if self.begin is None:
            if steps >= self.warm:
                self.begin = (steps, *meter())
            return False
        if time.perf_counter() - self.begin[1] < self.seconds:
            return False
        self.end = (steps, *meter())
        return True

    @property
    def rates(self) -> tuple[float, float, float]:
        """(steps per wall second, steps per CPU second, CPU seconds)."""
        assert self.begin is not None
        steps, wall, cpu = (b - a for a, b in zip(self.begin, self.end, strict=True))
        return steps / wall, steps / cpu, cpu


def run_shoal(
    subject: str, env: str, n_envs: int, settings: dict[str, Any], watch: Watch, spent: Spent | None = None
) -> None:
    workers = 2 if "workers" in subject else 0
    native = subject == BATCH  # which shows the game as the literature does by itself
    game = {"atari": not native, "frame_stack": 0 if native else 4} if is_game(env) else {}
    precision = {"precision": "bfloat16"} if "bfloat16" in subject else {}
    with PPO(
        env, n_envs=n_envs, backend="native" if native else "process" if workers else "serial",
        num_workers=workers or None,
        path="torch" if "torch" in subject else "auto" if game else "compiled", batch_size=n_envs * 32,
        preset="none", **game, **precision, **settings,
    ) as ppo:  # fmt: skip
        for row in ppo.updates(10**9):
            begun = watch.begin is not None
            if watch.stop(int(row["steps"])):
                return
            if spent is not None and not begun and watch.begin is not None:
                note_parts(ppo, spent)


def note_parts(ppo: PPO, spent: Spent) -> None:
    """From now on add up what collecting, the inference in it, and the update take."""

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                spent[part] = spent.get(part, 0.0) + time.perf_counter() - began

        return call

    collecting: Any = ppo._experience
    agent: Any = ppo.agent
    collecting.collect = timed("collecting", collecting.collect)
    agent.act, agent.improve = timed("inference", agent.act), timed("update", agent.improve)


def is_game(env: str) -> bool:
    """Whether all show it as the literature does: 84x84, grey, four frames a step, the last four of those."""
    return env.startswith("ALE/")


def run_peer(library: str, env: str, n_envs: int, settings: dict[str, Any], watch: Watch) -> None:
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            # Looked at once per rollout, like the others.
            return self.num_timesteps % (128 * n_envs) != 0 or not watch.stop(self.num_timesteps)

    if is_game(env):
        envs = VecFrameStack(make_atari_env(env, n_envs, env_kwargs={"frameskip": 1}), 4)
        policy = "CnnPolicy"
    else:
        policy, envs = "MlpPolicy", make_vec_env(env, n_envs)
    ppo = importlib.import_module(library).PPO
    model = ppo(policy, envs, batch_size=n_envs * 32, device="cpu", seed=0, **settings)
    model.learn(10**9, callback=Stop())
    model.get_env().close()


def run_single(env: str, n_envs: int, settings: dict[str, Any], watch: Watch) -> None:
    ppo_single_file.train(
        env, n_envs, 10**9, {**settings, "batch_size": n_envs * 32, "linear": False}, 0,
        lambda steps, returns: steps % (128 * n_envs) == 0 and watch.stop(steps),
    )  # fmt: skip


class EnoughError(Exception):
    """Seen enough of a program that has no other end."""


def run_cleanrl(program: Path, env: str, n_envs: int, settings: dict[str, Any], watch: Watch) -> None:
    steps = 0

    def seen(count: int, _: list[float]) -> None:
        nonlocal steps
        steps += count
        if steps % (128 * n_envs) == 0 and watch.stop(steps):
            raise EnoughError

    arguments = {
        "env-id": env, "num-envs": n_envs, "num-steps": settings["n_steps"], "num-minibatches": 4,
        "update-epochs": settings["n_epochs"], "learning-rate": settings["learning_rate"], "gamma": settings["gamma"],
        "gae-lambda": settings["gae_lambda"], "clip-coef": settings["clip_range"], "ent-coef": settings["ent_coef"],
        "seed": 0, "total-timesteps": 10**9,
    }  # fmt: skip
    with contextlib.redirect_stdout(None), contextlib.suppress(EnoughError):
        ppo_cleanrl.run(program, arguments, seen)


def run_limit(env: str, n_envs: int, watch: Watch) -> None:
    """Random actions in a plain loop, one core: nothing that steps these environments can be faster on it."""
    if is_game(env):
        envs: list[Any] = [EnvFactory(env, atari=True, frame_stack=4)(i) for i in range(n_envs)]
    else:
        envs = [gym.make(env, disable_env_checker=True) for _ in range(n_envs)]
    for i, one in enumerate(envs):
        one.reset(seed=i)
    space = envs[0].action_space
    space.seed(0)
    actions = [space.sample() for _ in range(4096)]
    steps = 0
    while not watch.stop(steps):
        for _ in range(128):
            for one in envs:
                _, _, terminated, truncated, _ = one.step(actions[steps % 4096])
                steps += 1
                if terminated or truncated:
                    one.reset()


def run_batch_alone(env: str, n_envs: int, watch: Watch) -> None:
    """Random actions for ale-py's batch as shoal steps it, without a policy."""
    with make_vec(env, n_envs, backend="native", autoreset="same_step", check_nan=False, copy=False) as envs:
        envs.reset(seed=0)
        envs.action_space.seed(0)
        actions = [envs.action_space.sample() for _ in range(1024)]
        steps = 0
        while not watch.stop(steps):
            for _ in range(128):
                envs.step(actions[steps // n_envs % 1024])
                steps += n_envs


def pong_batch(counts: tuple[int, ...], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Pong on ale-py's batch, in this process, in workers and by a rival; where the time goes."""
    env, rows = ENVS["pong"], []
    gym.register_envs(importlib.import_module("ale_py"))
    for n_envs in counts:
        peers = [] if SB3 in missing() else [SB3]
        subjects = ("shoal", "shoal, 2 workers", BATCH, *peers, BATCH_ALONE)
        rates: dict[str, list[tuple[float, float, float]]] = {subject: [] for subject in subjects}
        spent: dict[str, Spent] = {subject: {} for subject in subjects}
        for _ in range(rounds):
            for subject in subjects:
                watch = Watch(128 * n_envs, seconds)
                if subject == BATCH_ALONE:
                    run_batch_alone(env, n_envs, watch)
                elif subject == SB3:
                    run_peer(LIBRARIES[SB3], env, n_envs, THROUGHPUT, watch)
                else:
                    run_shoal(subject, env, n_envs, THROUGHPUT, watch, spent[subject])
                rates[subject].append(watch.rates)
        for subject, found in rates.items():
            wall, cpu = (statistics.median(rate[place] for rate in found) for place in (0, 1))
            values = {"steps/s": wall, "steps/CPU-s": cpu}
            if parts := spent[subject]:
                whole = parts["collecting"] + parts["update"]
                values |= {
                    "share of stepping": (parts["collecting"] - parts["inference"]) / whole,
                    "share of inference": parts["inference"] / whole,
                    "share of the update": parts["update"] / whole,
                }
            seconds_of_cpu = sum(rate[2] for rate in found)
            case = f"{env} on ale-py's batch, {n_envs} envs"
            rows += [
                row(case, subject, value, unit, seconds_of_cpu, len(found)) for unit, value in values.items()
            ]
            shares = "  ".join(f"{unit} {value:.0%}" for unit, value in values.items() if "share" in unit)
            print(
                f"{env:16} n={n_envs:<3} {subject:36} {wall:>8,.0f} steps/s {cpu:>8,.0f} steps/CPU-s  {shares}",
                flush=True,
            )
    return rows


def throughput(
    env: str, counts: tuple[int, ...], seconds: float, rounds: int, cleanrl: Path | None
) -> list[dict[str, Any]]:
    rows = []
    if is_game(env):
        gym.register_envs(importlib.import_module("ale_py"))
    # The single-file PPO has no images and no continuous actions.
    single = not is_game(env) and hasattr(gym.spec(env).make().action_space, "n")
    for n_envs in counts:
        peers = (SB3, SBX, SINGLE) if single else (SB3,) if is_game(env) else (SB3, SBX)
        own = IMAGES if is_game(env) else SHOAL
        if cleanrl is not None:
            peers = (*peers, CLEANRL)
        peers = tuple(peer for peer in peers if peer not in missing())
        subjects = [*(s for s in own if n_envs > 1 or "workers" not in s), *peers, LIMIT]
        rates: dict[str, list[tuple[float, float, float]]] = {subject: [] for subject in subjects}
        for _ in range(rounds):
            for subject in subjects:
                rates[subject].append(rates_of(subject, env, n_envs, seconds, cleanrl))
        for subject, found in rates.items():
            for place, unit in ((0, "steps/s"), (1, "steps/CPU-s")):
                value = statistics.median(rate[place] for rate in found)
                cpu = sum(rate[2] for rate in found)
                rows.append(row(f"{env}, {n_envs} envs", subject, value, unit, cpu, len(found)))
            wall, cpu = (statistics.median(rate[place] for rate in found) for place in (0, 1))
            numbers = f"{wall:>10,.0f} steps/s {cpu:>10,.0f} steps/CPU-s"
            print(f"{env:16} n={n_envs:<3} {subject:24} {numbers}", flush=True)
    return rows


def missing() -> list[str]:
    """The rivals that are not installed."""
    return [name for name, library in LIBRARIES.items() if not importlib.util.find_spec(library)]


def rates_of(
    subject: str, env: str, n_envs: int, seconds: float, cleanrl: Path | None
) -> tuple[float, float, float]:
    """(steps per wall second, steps per CPU second, CPU seconds) of a subject's turn."""
    # The first update of sbx compiles it.
    watch = Watch(128 * n_envs * {LIMIT: 8, SBX: 2}.get(subject, 1), seconds)
    if subject.startswith("shoal"):
        run_shoal(subject, env, n_envs, THROUGHPUT, watch)
    elif subject == LIMIT:
        run_limit(env, n_envs, watch)
    elif subject == SINGLE:
        run_single(env, n_envs, THROUGHPUT, watch)
    elif subject == CLEANRL:
        assert cleanrl is not None
        run_cleanrl(cleanrl, env, n_envs, THROUGHPUT, watch)
    else:
        run_peer(LIBRARIES[subject], env, n_envs, THROUGHPUT, watch)
    return watch.rates


def solve(quick: bool) -> list[dict[str, Any]]:
    """Time until the mean of 100 episodes reaches 475, with the same published settings for all."""
    seeds = (1,) if quick else (1, 2, 3)
    preset = PRESETS["CartPole-v1"]
    settings, total = dict(preset.settings), preset.total_timesteps
    base = {key: settings[key] for key in ("n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda")}

    def shoal(subject: str, seed: int) -> int:
        with PPO(
            "CartPole-v1", n_envs=8, seed=seed, backend="process" if "workers" in subject else "serial",
            num_workers=2 if "workers" in subject else None,
            path="torch" if "torch" in subject else "compiled",
            preset="none",
            **settings,
        ) as ppo:  # fmt: skip
            for found in ppo.updates(total):
                if len(ppo.log.recent) == 100 and found["reward_mean"] >= 475:
                    return int(found["steps"])
        return -1

    def peer(subject: str, seed: int) -> int:
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.env_util import make_vec_env

        class Stop(BaseCallback):
            solved = -1

            def _on_step(self) -> bool:
                recent = self.model.ep_info_buffer
                if len(recent) == 100 and np.mean([e["r"] for e in recent]) >= 475:
                    self.solved = self.num_timesteps
                return self.solved < 0

        stop = Stop()
        model = importlib.import_module(LIBRARIES[subject]).PPO(
            "MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), device="cpu", seed=seed, ent_coef=0.0,
            learning_rate=lambda left: left * 1e-3, clip_range=lambda left: left * 0.2, **base,
        )  # fmt: skip
        model.learn(total, callback=stop)
        return stop.solved

    def single(_: str, seed: int) -> int:
        def enough(steps: int, returns: deque) -> bool:
            return len(returns) == 100 and float(np.mean(returns)) >= 475

        given = {
            **base,
            "learning_rate": 1e-3,
            "clip_range": 0.2,
            "clip_range_vf": 0.0,
            "ent_coef": 0.0,
            "linear": True,
        }
        steps = ppo_single_file.train("CartPole-v1", 8, total, given, seed, enough)
        return steps if steps < total else -1

    runs: dict[str, Callable[[str, int], int]] = {
        "shoal": shoal, "shoal, 2 workers": shoal, "shoal, torch path": shoal, SINGLE: single
    }  # fmt: skip
    runs |= {name: peer for name in LIBRARIES if name not in missing()}
    if quick:
        runs = {subject: play for subject, play in runs.items() if play is shoal}
        print("solve: with --quick shoal alone, since the others take half a minute each", flush=True)
    rows = []
    for subject, play in runs.items():
        found = []
        for seed in seeds:
            found.append(timed(play, subject, seed))
            print(
                f"solve CartPole  {subject:20} seed {seed}: {found[-1][0]:>7} steps, {found[-1][1]:.2f} s",
                flush=True,
            )
        solved = all(steps > 0 for steps, _, _ in found)
        cpu_seconds = sum(f[2] for f in found)
        for place, unit in ((1, "s"), (0, "env steps")):
            value = statistics.median(f[place] for f in found) if solved else None
            rows.append(row("CartPole-v1 to 475", subject, value, unit, cpu_seconds, len(found)))
    return rows


def timed(play: Callable[[str, int], int], subject: str, seed: int) -> tuple[int, float, float]:
    """(env steps, wall seconds, CPU seconds) of a run."""
    wall, cpu = meter()
    steps = play(subject, seed)
    after = meter()
    return steps, after[0] - wall, after[1] - cpu


def scores(runs: list[Path], quick: bool = False) -> list[dict[str, Any]]:
    """What runs with a preset's settings reached: greedy episodes after training, and the last 100 of training.

    Runs of CleanRL (benchmarks/ppo_cleanrl.py) have the latter alone. With `quick` a run may be shorter than a preset.
    """
    rows = []
    for run in runs:
        config, summary = yaml.safe_load((run / "config.yaml").read_text()), read_json(run / "summary.json")
        found, preset = summary["metrics"], preset_for(config["env"])
        # CleanRL ends with the last whole update.
        rest = preset.total_timesteps % 2048 if preset and "program" in config else 0
        if preset is None or (not quick and found["steps"] < preset.total_timesteps - rest):
            raise SystemExit(f"{run} is not a whole run of a preset")
        case, subject = f"score of {preset.name}", f"{config.get('program', 'shoal')}, seed {config['seed']}"
        for unit, name in (("return", "eval_return_mean"), ("return in training", "reward_mean")):
            if name in found:
                rows.append(row(case, subject, found[name], unit, summary["cpu_seconds"], 1))
                print(f"{case:28} {subject:20} {found[name]:12,.2f} {unit}", flush=True)
    return rows


def check_paths() -> None:
    """The compiled update is autograd's, on recorded experience, before anybody is timed."""
    after = {}
    for path in ("compiled", "torch"):
        with PPO(
            "CartPole-v1",
            n_envs=4,
            seed=0,
            path=path,
            backend="serial",
            batch_size=128,
            preset="none",
            **THROUGHPUT,
        ) as ppo:
            rows = list(ppo.updates(512))
            after[path] = ppo.agent.state()[0]
            assert abs(rows[0]["first_kl"]) < 1e-7, rows[0]
    for name, value in after["compiled"].items():
        gap = float(np.abs(value - after["torch"][name]).max())
        assert gap < 1e-4, f"{name} differs by {gap}"


def row(case: str, subject: str, value: float | None, unit: str, cpu: float, runs: int) -> dict[str, Any]:
    value = None if value is None or not math.isfinite(value) else value
    today = datetime.date.today().isoformat()
    return {
        "case": case, "subject": subject, "value": value, "unit": unit, "cpu_seconds": cpu, "runs": runs, "date": today,
        "cpu": cpu_model(),
    }  # fmt: skip


def save(rows: list[dict[str, Any]], *, timed: bool = True) -> None:
    """Put the rows in place of those with the same case; keep the others, and what is said of times if none are new."""
    before = read_json(RESULTS) if RESULTS.exists() else {"rows": []}
    old = before["rows"]
    cases = {r["case"] for r in rows}
    versions = {"python": platform.python_version()}
    for name in ("numpy", "gymnasium", "torch", "numba", "stable_baselines3", "sbx-rl", "jax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    RESULTS.parent.mkdir(exist_ok=True)
    told = {
        "name": "ppo", "versions": versions,
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)},
        "date": datetime.date.today().isoformat(),
    } if timed else before  # fmt: skip
    write_json(RESULTS, {**told, "rows": [r for r in old if r["case"] not in cases] + rows})


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = [*ENVS, "pong-batch", "solve"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--counts", nargs="+", type=int, help="environments, in place of each part's own")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a subject's turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short turn of each, nothing is saved")
    parser.add_argument("--cleanrl", type=Path, help="a checkout of CleanRL, whose programs are measured too")
    parser.add_argument("--scores", nargs="+", type=Path, default=[])
    options = parser.parse_args()
    keep = (lambda rows, timed=True: None) if options.quick else save
    if options.scores:
        return keep(scores(options.scores, options.quick), timed=False)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if missing():
        print(f"left out, since not installed: {', '.join(missing())}", flush=True)
    check_paths()
    seconds, rounds = (0.3, 1) if options.quick else (options.seconds, options.rounds)
    for part in options.parts:
        if lacking := [name for name in NEEDS.get(part, ()) if not importlib.util.find_spec(name)]:
            print(f"{part} is left out: {', '.join(lacking)} is not installed", flush=True)
        elif part == "solve":
            keep(solve(options.quick))
        elif part == "pong-batch":
            keep(pong_batch(tuple(options.counts or (8,)), seconds, rounds))
        else:
            cleanrl = (
                options.cleanrl / "cleanrl" / PROGRAMS[part] if options.cleanrl and part in PROGRAMS else None
            )
            counts = tuple(options.counts or ((8,) if options.quick else COUNTS[part]))
            keep(throughput(ENVS[part], counts, seconds, rounds, cleanrl))


if __name__ == "__main__":
    main()
