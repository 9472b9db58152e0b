"""Pong from pixels: Stable-Baselines3 with the settings of shoal's preset, and both learning curves in one picture.

    shoal train-ppo --env ale_py:ALE/Pong-v5 --total-timesteps 2000000 --precision bfloat16 --run-dir runs/pong
    python benchmarks/ppo_pong.py train --out runs/pong-sb3 --total-timesteps 2000000
    python benchmarks/ppo_pong.py draw runs/pong runs/pong-sb3 --out pong.png

`train` may be stopped at any time: its curve is of the steps that it took. Both see the same game (grey, 84x84, four
frames a step, the last four of those, sticky actions), in 8 environments, with one torch thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))

import numpy as np  # noqa: E402

from shoal.core.files import write_json  # noqa: E402
from shoal.train.ppo.presets import PRESETS  # noqa: E402

ENV = "ALE/Pong-v5"
FRAMES = 4
"""Of the game in a step."""


def train(out: Path, total: int, seed: int, device: str = "cpu") -> None:
    """A row of `metrics.jsonl` for each rollout, with the names of shoal's."""
    import ale_py
    import gymnasium
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    began = time.perf_counter()
    torch.set_num_threads(1)
    gymnasium.register_envs(ale_py)
    preset = PRESETS[ENV]
    settings: dict[str, Any] = dict(preset.settings)
    envs = VecFrameStack(
        make_atari_env(ENV, preset.n_envs, seed=seed, env_kwargs={"frameskip": 1}), preset.frame_stack
    )
    rate, clip = settings["learning_rate"], settings["clip_range"]
    model = stable_baselines3.PPO(
        "CnnPolicy", envs, device=device, seed=seed, n_steps=settings["n_steps"], batch_size=settings["batch_size"],
        n_epochs=settings["n_epochs"], ent_coef=settings["ent_coef"],
        learning_rate=lambda left: left * rate, clip_range=lambda left: left * clip,
    )  # fmt: skip

    class Note(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            note(self.num_timesteps, float(np.mean(returns)) if returns else None)

    def note(steps: int, reward: float | None) -> None:
        row = {"steps": steps, "reward_mean": reward, "seconds": time.perf_counter() - began}
        row["cpu_seconds"] = time.process_time()
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    out.mkdir(parents=True)
    write_json(out / "settings.json", {"env": ENV, "seed": seed, "total_timesteps": total, **settings})
    model.learn(total, callback=Note())


def curve(run: Path) -> list[tuple[int, float]]:
    """Env steps and the mean return of the last 100 episodes."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["steps"], row["reward_mean"]) for row in rows if row.get("reward_mean") is not None]


def draw(shoal: Path, peer: Path, out: Path) -> None:
    """Both curves, and what both had reached after as many steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    curves = {"shoal, bfloat16": curve(shoal), "Stable-Baselines3": curve(peer)}
    for name, points in curves.items():
        steps, returns = np.array(points).T
        axes.plot(FRAMES * steps / 1e6, returns, label=name)
    axes.set(
        xlabel="millions of frames",
        ylabel="return, mean of 100 episodes",
        title=f"{ENV}, one seed",
        ylim=(-21.5, 21.5),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)
    last = min(points[-1][0] for points in curves.values())
    for steps in (*range(250_000, last, 250_000), last):
        found = [f"{name} {np.interp(steps, *np.array(points).T):.1f}" for name, points in curves.items()]
        print(f"{FRAMES * steps / 1e6:.1f} M frames: {', '.join(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train", help="Stable-Baselines3")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--total-timesteps", type=int, default=PRESETS[ENV].total_timesteps)
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--device", default="cpu")
    both = commands.add_parser("draw", help="the two curves")
    both.add_argument("shoal", type=Path)
    both.add_argument("peer", type=Path)
    both.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "train":
        train(options.out, options.total_timesteps, options.seed, options.device)
    else:
        draw(options.shoal, options.peer, options.out)


if __name__ == "__main__":
    main()
