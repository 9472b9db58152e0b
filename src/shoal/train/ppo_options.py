"""What a PPO run can be told besides the settings of PPO."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from shoal.core.processes import StartMethod
from shoal.train.ppo_checkpoints import find_checkpoint, load_checkpoint
from shoal.train.ppo_checks import read_config
from shoal.train.ppo_config import PPOConfig


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `shoal train-ppo` can be told besides the settings of PPO."""

    env: str = "CartPole-v1"
    """A Gymnasium id, module:Id-v0, or module:Class or module:function of your own environment."""
    env_kwargs: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = ()
    """Arguments of the environment; values are JSON or plain text."""
    wrapper: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="MODULE:NAME")] = ()
    """Put this around the environment; may be given several times, the first is innermost."""
    preset: str = "auto"
    """Tuned settings: "auto" takes those of the env if there are any, "none" takes none, or a name."""
    n_envs: int = 8
    """Environments stepped in parallel."""
    num_workers: int | None = None
    """Worker processes for them; 0 for none, None for the backend's choice."""
    backend: str = "auto"
    """"serial" in this process, "process" in workers, "auto" measures the environment and chooses."""
    parallel_start_method: StartMethod | None = None
    """How workers start; None for the safe default, forkserver."""
    total_timesteps: int | None = None
    """Stop after this many env steps of all envs together."""
    num_episodes: int | None = None
    """Stop after this many finished episodes."""
    stop_at_reward: float | None = None
    """Stop when the mean reward of the last 100 episodes reaches this."""
    seed: int = 0
    """Of the run: the same one gives the same weights."""
    device: str = "cpu"
    """cpu, cuda, mps, or auto."""
    path: str = "auto"
    """"compiled" kernels, "torch" autograd, or "auto": kernels for perceptrons on the CPU."""
    run_dir: str | None = None
    """Folder of the run; None for runs/ppo-<env>, numbered when taken."""
    checkpoint_dir: str | None = None
    """Folder of its checkpoints; None for <run_dir>/checkpoints."""
    checkpoint_every: int | None = None
    """Env steps between checkpoints; None for a tenth of the run, 0 for only one at the end."""
    keep_checkpoints: int = 3
    """How many of them stay."""
    resume_from: str | None = None
    """Continue exactly from this checkpoint, or the newest one in this folder or run folder."""
    eval_every: int | None = None
    """Env steps between evaluations; None for a tenth of the run, 0 for only one at the end."""
    eval_episodes: int = 10
    """Episodes of an evaluation, on a single environment of its own."""
    record_video: bool = False
    """Record one episode of the trained policy as video.gif (the environment must render)."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    wandb: str | None = None
    """Log to this Weights & Biases project (needs the package wandb)."""
    log_every: int = 10
    """Updates between rows of metrics.jsonl."""


def saved_options(path: str) -> tuple[RunOptions, PPOConfig]:
    """The options and settings of the run that a checkpoint belongs to, for continuing it."""
    folder = find_checkpoint(path)
    saved = load_checkpoint(folder)
    known = {f.name for f in dataclasses.fields(RunOptions)}
    options = {key: value for key, value in saved.training.get("options", {}).items() if key in known}
    options |= {
        "env": saved.policy["env"],
        "seed": saved.training["seed"],
        "n_envs": saved.training["n_envs"],
        "env_kwargs": tuple(f"{k}={json.dumps(v)}" for k, v in saved.policy["env_kwargs"].items()),
        "wrapper": tuple(saved.policy.get("wrappers", ())),
    }
    return RunOptions(**{**options, "resume_from": str(folder)}), read_config(saved.training["config"])


def safe_name(env: str) -> str:
    """An environment's name as a part of a folder's name."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in env)[:48].strip("-.") or "env"
