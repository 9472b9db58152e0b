"""Steps per second of shoal's vector environments beside their rivals, on the same Python environments.

    python benchmarks/vector.py [--cases cartpole text] [--counts 8 32 128]

Every subject is first compared with a plain loop over the environments (rewards, flags and observations of 60
steps), then timed in short windows that alternate between the subjects; a row is the median of its windows.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import vector_envs as envs
from vector_styles import EnvPoolStyle, GymnasiumStyle, PufferStyle, SB3Style, ShoalAsync

RESULTS = Path(__file__).parent / "results" / "vector.json"
CASES = ("cartpole", "cpu200us", "waiting", "images", "text")


def maker(case: str) -> Callable[[], Any]:
    if case == "cpu200us":
        return functools.partial(envs.Burning, envs.rounds_for(200e-6))
    return {"cartpole": envs.cartpole, "waiting": envs.Waiting, "images": envs.Images, "text": envs.Text}[
        case
    ]


def subjects(case: str, n: int) -> dict[str, Callable[[], GymnasiumStyle]]:
    from shoal.vector import make_vec

    fn = maker(case)
    vector = gymnasium.vector
    # Gymnasium's shared memory gives blanks for text, so text goes through its pipes.
    shared = case != "text"
    found: dict[str, Callable[[], GymnasiumStyle]] = {
        "shoal": lambda: GymnasiumStyle(make_vec(fn, n, autoreset="next_step"), n),
        "shoal process": lambda: GymnasiumStyle(make_vec(fn, n, backend="process", autoreset="next_step"), n),
        "gymnasium sync": lambda: GymnasiumStyle(vector.SyncVectorEnv([fn] * n), n),
        "gymnasium async": lambda: GymnasiumStyle(vector.AsyncVectorEnv([fn] * n, shared_memory=shared), n),
    }
    if case == "waiting":
        found["shoal recv/send"] = lambda: ShoalAsync(make_vec(fn, n, autoreset="next_step"), n)
    try:
        from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
    except ImportError:
        found["sb3"] = _missing("stable_baselines3")
    else:
        if case != "text":  # no Text spaces there
            found["sb3 dummy"] = lambda: SB3Style(DummyVecEnv([fn] * n), n)
            found["sb3 subproc"] = lambda: SB3Style(SubprocVecEnv([fn] * n, "fork"), n)
    try:
        import pufferlib.vector  # noqa: F401
    except ImportError:
        found["pufferlib"] = _missing("pufferlib-core")
    else:
        if case != "text":  # no Text spaces there either
            found["pufferlib 1 worker"] = lambda: PufferStyle(_puffer(fn, n, 1), n)
            if case != "waiting" or n <= 32:
                found["pufferlib 2 workers"] = lambda: PufferStyle(_puffer(fn, n, 2), n)
    if case == "cartpole":
        try:
            import envpool
        except (ImportError, OSError) as error:  # its wheels may lack data files that the import wants
            found["envpool (C++)"] = _missing(f"envpool ({str(error).split(';')[0]})")
        else:
            found["envpool (C++)"] = lambda: EnvPoolStyle(
                envpool.make("CartPole-v1", env_type="gymnasium", num_envs=n, num_threads=os.cpu_count()), n
            )
    return found


def _puffer(fn: Callable[[], Any], n: int, workers: int) -> Any:
    import pufferlib.emulation
    import pufferlib.vector

    creator = functools.partial(pufferlib.emulation.GymnasiumPufferEnv, env_creator=fn)
    return pufferlib.vector.make(
        creator, num_envs=n, num_workers=workers, backend=pufferlib.vector.Multiprocessing
    )


def _missing(package: str) -> Callable[[], GymnasiumStyle]:
    def make() -> GymnasiumStyle:
        raise ImportError(f"not installed: {package}")

    return make


def check(subject: GymnasiumStyle, case: str, n: int) -> None:
    """The subject's first steps equal a plain loop over its environments."""
    if isinstance(subject, EnvPoolStyle | PufferStyle):
        return  # other code, or its own seeds
    plain = [maker(case)() for _ in range(n)]
    expected = [env.reset(seed=7 + i)[0] for i, env in enumerate(plain)]
    _same(subject.start(7), expected)
    alive = [True] * n
    for t in range({"waiting": 2, "cpu200us": 10}.get(case, 60)):
        actions = np.array([(t + i) % 2 for i in range(n)])
        obs, rewards, dones = subject.step(actions)
        for i, env in enumerate(plain):
            if alive[i]:
                row, reward, terminated, truncated, _ = env.step(actions[i])
                assert rewards[i] == reward, (i, rewards[i], reward)
                assert bool(dones[i]) == (terminated or truncated)
                alive[i] = not (terminated or truncated)
                if alive[i]:
                    assert np.array_equal(obs[i], row), (t, i, obs[i], row)


def _same(rows: Any, expected: list[Any]) -> None:
    assert all(np.array_equal(row, want) for row, want in zip(rows, expected, strict=True))


def ideal(case: str, n: int) -> dict[str, float]:
    """What no vector environment can beat here."""
    if case == "waiting":
        rng = np.random.default_rng(0)
        sample = np.array([envs.latency(rng) for _ in range(128 * 1000)]).reshape(-1, n)
        return {
            "limit (all)": n / float(sample.max(1).mean()),
            "limit (first ready)": n / float(sample.mean()),
        }
    env = maker(case)()
    env.reset(seed=0)

    def loop() -> float:
        count, start = 0, time.perf_counter()
        while (now := time.perf_counter()) - start < 0.2:
            for _ in range(20):
                if env.step(0)[2]:
                    env.reset()
            count += 20
        return count / (now - start)

    return {"limit (cores x plain loop)": len(os.sched_getaffinity(0)) * max(loop() for _ in range(3))}


def measure(case: str, n: int, windows: int, seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    name = f"{case} n={n}"
    speeds: dict[str, list[float]] = {}
    everything = subjects(case, n)
    # PufferLib's workers keep the cores busy while they wait, so each of its subjects is alone.
    crowds = [[item for item in everything if not item.startswith("pufferlib")]]
    crowds += [[item] for item in everything if item.startswith("pufferlib")]
    for crowd in crowds:
        made: dict[str, GymnasiumStyle] = {}
        for subject in crowd:
            try:
                made[subject] = everything[subject]()
            except ImportError as error:
                rows.append({"case": name, "subject": subject, "value": None, "note": str(error)})
            else:
                check(made[subject], case, n)
                made[subject].start(0)
        for _ in range(windows):
            for subject, item in made.items():
                speeds.setdefault(subject, []).append(item.run(seconds))
        for item in made.values():
            item.close()
    for subject, value in ideal(case, n).items():
        rows.append({"case": name, "subject": subject, "value": value, "unit": "steps/s", "runs": 1})
    for subject, values in speeds.items():
        rows.append(
            {
                "case": name,
                "subject": subject,
                "value": statistics.median(values),
                "unit": "steps/s",
                "runs": len(values),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--counts", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--only", nargs="+", help="subjects whose name starts with one of these")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    if args.only:
        everything = globals()["subjects"]
        globals()["subjects"] = lambda case, n: {
            k: v for k, v in everything(case, n).items() if k.startswith(tuple(args.only))
        }
    for case in args.cases:
        for n in args.counts:
            fresh = measure(case, n, args.windows, args.seconds)
            limit = max(row["value"] for row in fresh if row["subject"].startswith("limit"))
            for row in fresh:
                value = row["value"]
                text = row.get("note", "") if value is None else f"{value:12,.0f}  {value / limit:6.2f}"
                print(f"{row['case']:16} {row['subject']:26} {text}", flush=True)
            if not args.no_save:
                save(fresh)


def save(rows: list[dict[str, Any]]) -> None:
    """Write the results, keeping rows of cases that did not run now."""
    RESULTS.parent.mkdir(exist_ok=True)
    old = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    ran = {row["case"] for row in rows}
    versions = {
        "python": platform.python_version(),
        "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
    }
    for package in ("stable_baselines3", "pufferlib-core", "envpool"):
        try:
            versions[package] = __import__("importlib.metadata").metadata.version(package)
        except Exception:
            continue
    RESULTS.write_text(
        json.dumps(
            {
                "machine": {"cpus": len(os.sched_getaffinity(0)), "processor": platform.machine()},
                "versions": versions,
                "date": time.strftime("%Y-%m-%d"),
                "rows": [row for row in old if row["case"] not in ran] + rows,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
