"""One run of CleanRL's `ppo_continuous_action.py`, from its checkout, beside which shoal's scores are shown.

    python benchmarks/ppo_cleanrl.py CHECKOUT --env HalfCheetah-v5 --seed 1 --out runs/cleanrl-HalfCheetah-v5-1

The program is run as it is, on the same gymnasium and the same environment as shoal. Two of its calls are older than
that gymnasium, and are given what they mean today: the space that a transformed observation has, and autoreset in the
same step. `--out` then looks like the folder of a shoal run, and `python benchmarks/ppo.py --scores` reads it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))

import gymnasium as gym  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from gymnasium.vector import AutoresetMode  # noqa: E402

from shoal.core.files import write_json  # noqa: E402

TransformObservation = gym.wrappers.TransformObservation
SyncVectorEnv = gym.vector.SyncVectorEnv


def transform(env: gym.Env, function: Callable[[Any], Any]) -> gym.Env:
    return TransformObservation(env, function, env.observation_space)


def run(program: Path, settings: dict[str, Any], seen: Callable[[int, list[float]], None]) -> None:
    """Run a program of CleanRL's; `seen` is given each vector step's env steps and the returns of episodes it ended."""

    class SameStep(SyncVectorEnv):
        """An episode's end and the first observation of the next come in one step, as CleanRL reads them."""

        def __init__(self, env_fns: Sequence[Callable[[], gym.Env]]) -> None:
            super().__init__(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)

        def step(self, actions: Any) -> tuple[Any, ...]:
            *found, infos = super().step(actions)
            ended = "final_info" in infos
            seen(
                self.num_envs,
                infos["final_info"]["episode"]["r"][infos["_final_info"]].tolist() if ended else [],
            )
            return *found, {}

    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    was = gym.wrappers.TransformObservation, gym.vector.SyncVectorEnv, sys.argv, os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # it writes its event files into ./runs
        gym.wrappers.TransformObservation, gym.vector.SyncVectorEnv = transform, SameStep
        sys.argv = [str(program), "--no-cuda", *options]
        try:
            runpy.run_path(str(program.resolve()), run_name="__main__")
        finally:
            gym.wrappers.TransformObservation, gym.vector.SyncVectorEnv, sys.argv = was[:3]
            os.chdir(was[3])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-envs", type=int, default=8, help="they share CleanRL's 2,048 steps an update")
    parser.add_argument("--total-timesteps", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    torch.set_num_threads(1)
    steps, returns = 0, deque[float](maxlen=100)

    def seen(count: int, ended: list[float]) -> None:
        nonlocal steps
        steps += count
        returns.extend(ended)

    arguments = {
        "env-id": options.env, "seed": options.seed, "num-envs": options.num_envs,
        "num-steps": 2048 // options.num_envs, "total-timesteps": options.total_timesteps,
    }  # fmt: skip
    run(options.checkout / "cleanrl" / "ppo_continuous_action.py", arguments, seen)
    settings = {"program": "CleanRL", "env": options.env, "seed": options.seed, "n_envs": options.num_envs}
    (options.out / "config.yaml").write_text(yaml.safe_dump(settings))
    found = {"steps": steps, "reward_mean": sum(returns) / len(returns)}
    write_json(options.out / "summary.json", {"metrics": found, "cpu_seconds": time.process_time()})


if __name__ == "__main__":
    main()
