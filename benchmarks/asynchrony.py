"""What a lag of one iteration brings: the same training with and without it, in turns.

    python benchmarks/asynchrony.py [--rounds 3] [--quick]

The tiny model learns on an env that waits 5 ms a step, and on one that only computes. Each run is a process of its own:
`trainer.lag` 0; 1 with the copies of the weights in threads; and 1 with them in a process. What is compared is the
wall-clock of the iterations after the second, a median over rounds, as a ratio to lag 0. Results go to
`benchmarks/results/asynchrony.json`, and the table of docs/asynchrony.md is written from them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO)]

from benchmarks.tables import put, table  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "asynchrony.json"
MODES = {
    "lag 0": ["trainer.lag=0"],
    "lag 1, threads": ["trainer.lag=1", "engine.copy=thread"],
    "lag 1, process": ["trainer.lag=1", "engine.copy=process"],
}
CASES = {"waits 5 ms a step": 0.005, "computes": 0.0}
SETTINGS = [
    "custom_envs.FrozenLakeEnv=null", "+custom_envs.Naps={env_type: 'benchmarks.asynchrony:Naps'}",
    "es_manager.train.env_configs.tags=[Naps]", "es_manager.val.env_configs.tags=[Naps]",
    "es_manager.train.env_groups=16", "es_manager.train.group_size=8", "es_manager.val.env_groups=4",
    "warmup.steps=20", "agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel.backend=process",
    "agent_proxy.parallel_n_jobs=1", "trainer.tensorboard=false",
    "trainer.stop_at_success=null", "trainer.stop_on_collapse=false", "trainer.eval_every=1000",
    "trainer.save_every=1000", "trainer.save_trajectories_every=1000",
]  # fmt: skip


def naps() -> type:
    """An env of ten steps, each with a nap."""
    import time
    from dataclasses import dataclass

    from shoal.envs.frozen_lake import FrozenLakeConfig, FrozenLakeEnv

    @dataclass(frozen=True)
    class NapsConfig(FrozenLakeConfig):
        nap: float = 0.0

    class Napping(FrozenLakeEnv):
        Config = NapsConfig

        def _advance(self, action: Any) -> Any:
            time.sleep(self.config.nap)
            return super()._advance(action)

    return Napping


def __getattr__(name: str) -> Any:
    if name == "Naps":
        return naps()
    raise AttributeError(name)


def run(case: str, mode: str, iterations: int) -> dict[str, float]:
    """Seconds of an iteration, and how much of playing was beside learning."""
    with tempfile.TemporaryDirectory() as folder:
        nap = f"custom_envs.Naps.env_config={{nap: {CASES[case]}, is_slippery: false, max_steps: 10}}"
        command = [
            sys.executable,
            "-m",
            "shoal",
            "train",
            "--config-name",
            "base",
            *SETTINGS,
            *MODES[mode],
            f"+{nap}",
        ]
        command += [f"trainer.iterations={iterations}", f"run_dir={folder}/run"]
        env = {**os.environ, "PYTHONPATH": f"{REPO / 'src'}{os.pathsep}{REPO}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        rows = [
            json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    first, last = rows[2], rows[-1]  # the second iteration is the first that is played ahead
    count = last["iteration"] - first["iteration"]
    return {
        "seconds": (last["seconds"] - first["seconds"]) / count,
        "cpu_seconds": (last["cpu_seconds"] - first["cpu_seconds"]) / count,
        "rollout": statistics.fmean(row["seconds_rollout"] for row in rows[3:]),
        "update": statistics.fmean(row["seconds_update"] for row in rows[3:]),
        "overlap": statistics.fmean(row.get("overlap", 0.0) for row in rows[3:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of four iterations, nothing saved")
    options = parser.parse_args()
    rounds, iterations = (1, 5) if options.quick else (options.rounds, 12)
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        case: {mode: [] for mode in MODES} for case in CASES
    }
    for number in range(rounds):
        for case, modes in found.items():
            for mode, rows in modes.items():
                rows.append(run(case, mode, iterations))
                print(
                    number, case, mode, {key: round(value, 3) for key, value in rows[-1].items()}, flush=True
                )
    if options.quick:
        return
    saved = {"date": datetime.date.today().isoformat(), "iterations": iterations, "cases": found}
    RESULTS.write_text(json.dumps(saved, indent=1) + "\n")
    write_table(found)


def write_table(found: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    """The table of the page: medians, and ratios within each round with their range."""
    lines = []
    for case, modes in found.items():
        base = modes["lag 0"]
        for mode, rows in modes.items():
            ratios = [row["seconds"] / other["seconds"] for row, other in zip(rows, base, strict=True)]
            middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            times = [
                f"{1000 * middle[key]:.0f} ms" for key in ("seconds", "rollout", "update", "cpu_seconds")
            ]
            lines.append([case, mode, *times, f"{middle['overlap']:.2f}", ratio])
    head = ["the env", "training", "an iteration", "its rollout", "its update", "CPU", "overlap", "to lag 0"]
    put("asynchrony.md", "speed", table(head, lines))


if __name__ == "__main__":
    main()
