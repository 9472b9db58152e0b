"""`shoal train-ppo`: train a policy on parallel environments; alone it solves CartPole."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.cli.command import Command
from shoal.cli.grammar import (
    Progress,
    Tracker,
    new_folder,
    newest_folder,
    print_json,
    refuse_device,
    show_warnings,
    tracking,
)
from shoal.cli.output import next_steps
from shoal.cli.runs import how_to_go_on, resume_command
from shoal.core.run_folder import refuse_foreign
from shoal.train.ppo.compiled.network import when_compiling
from shoal.train.ppo.config import PPOConfig
from shoal.train.ppo.presets import preset_for
from shoal.train.ppo.run import PPORun, RunOptions, safe_name, saved_options


@dataclass(frozen=True, slots=True)
class Call:
    """Train a policy by PPO on parallel environments.

    Without options it solves CartPole in seconds and leaves curves, a checkpoint and an evaluation in runs/. The
    defaults below are those of the chosen environment's preset.
    """

    run: RunOptions = field(default_factory=RunOptions)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    progress: bool = True
    """Show a progress bar on a terminal."""
    tracker: Tracker | None = None
    """Where curves go besides the run folder (default: tensorboard)."""
    json_events: bool = False
    """Print one JSON line per durable moment (checkpoint, summary) on standard output."""
    resume: bool = False
    """Go on with the run in --out, or the newest of this env: --resume-from with that folder."""
    json: bool = False
    """Print the summary as JSON at the end; the rest goes to standard error."""


MORE = """\
examples:
  shoal train-ppo                                     CartPole, solved in seconds
  shoal train-ppo --env LunarLander-v3 --n-envs 16 --seed 3
  shoal train-ppo --env my_module:MyEnv --total-timesteps 200000 --preset none
  shoal train-ppo --env ale:Pong-v5                   on ale_py's own batch
  shoal train-ppo --resume --total-timesteps 400000   go on with the newest run of CartPole
  shoal train-ppo --resume-from runs/ppo-CartPole-v1
"""
WANTED = (
    "--env", "--n-envs", "--total-timesteps", "--seed", "--device", "--out", "--resume", "--learning-rate",
    "--record-video", "--json",
)  # fmt: skip


def train(call: Call) -> int:
    """Train, report."""
    show_warnings()
    refuse_device(call.run.device)
    if call.run.run_dir is not None:
        refuse_foreign(Path(call.run.run_dir))
    boards, project = tracking(call.tracker, call.run.wandb)
    run_options = replace(
        call.run, run_dir=call.run.run_dir or str(new_folder(_name(call.run.env))), wandb=project,
        tensorboard=call.run.tensorboard if boards is None else boards,
    )  # fmt: skip
    run = PPORun(run_options, call.ppo, print_json if call.json_events else None)
    try:
        _greet(run)
        try:
            with contextlib.closing(run.rows()) as rows:  # type: ignore[type-var]
                _watch(rows, run, call.progress)
        except KeyboardInterrupt:
            print(f"\ninterrupted; {how_to_go_on(run.path)}", flush=True)
            return 130
        _say_results(run)
        if call.json:
            print_json(run.summary)
    finally:
        run.close()
    return 0


def _defaults(given: Mapping[str, Any]) -> Call:
    """The values that options start from: a preset's, or those of the run that is resumed."""
    env, before = given.get("env", RunOptions().env), given.get("resume_from")
    if given.get("resume") and before is None:
        before = given.get("run_dir") or newest_folder(_name(env))
    if before is not None:
        saved, settings = saved_options(str(before))
        return Call(replace(saved, resume_from=str(before)), settings)
    native = given.get("backend") == "native"
    preset = preset_for(env, given.get("preset", RunOptions().preset), native=native)
    if preset is None:
        options, settings = RunOptions(total_timesteps=100_000), PPOConfig()
    else:
        options = RunOptions(
            n_envs=preset.n_envs, total_timesteps=preset.total_timesteps, atari=preset.atari,
            frame_stack=preset.frame_stack, wrapper=preset.wrappers, eval_deterministic=preset.eval_deterministic,
            env_kwargs=tuple(f"{key}={json.dumps(value)}" for key, value in preset.env_kwargs.items()),
        )  # fmt: skip
        settings = PPOConfig(**preset.settings)
    if given.get("num_episodes") is not None:
        options = replace(options, total_timesteps=None)
    return Call(options, settings)


def _name(env: str) -> str:
    """What a run of an env is called where nothing was said."""
    return f"ppo-{safe_name(env)}"


COMPILING = "   compiling the kernels, once on this machine: ten seconds, or minutes on a busy machine"


COMMAND = Command(Call, train, MORE, WANTED, _defaults)


def _greet(run: PPORun) -> None:
    ppo, options = run.ppo, run.options
    lines = [f"Using {ppo.n_envs} parallel environments for training"] if ppo.n_envs > 1 else []
    lines.append(
        "   Backend: the environment's own batch"
        if ppo.factory.native
        else f"   Start method: {options.parallel_start_method or 'default'}"
    )
    preset = preset_for(options.env, options.preset) if options.resume_from is None else None
    if preset is not None:
        lines.append(f"   Settings: preset {preset.name} ({preset.source}), where not given otherwise")
    how = "compiled kernels" if ppo.path == "compiled" else f"torch on {ppo.device}"
    lines.append(f"   {options.env}, {how}, run folder {run.path}")
    if options.resume_from:
        lines.append(f"   continuing after {ppo.log.n_steps} steps from {options.resume_from}")
    print("\n".join(lines), flush=True)


def _watch(rows: Iterator[dict[str, float]], run: PPORun, progress: bool) -> None:
    """A progress bar on a terminal; elsewhere a block of lines, at most one every two seconds."""
    said, since = 0.0, Since()
    with ExitStack() as ending:
        shown = ending.enter_context(Progress("training", bar=progress))
        if run.ppo.path == "compiled":
            ending.enter_context(when_compiling(lambda: shown.say(COMPILING)))
        for row in rows:
            since.add(row)
            share = run.ppo.progress(run.options.total_timesteps, run.options.num_episodes)
            evaluated = "eval_return_mean" in row
            if shown.on_terminal:
                text = f"{int(row['steps']):,} steps  reward {_number(row['reward_mean'])}"
                shown.at(share, f"{text}  {row['steps_per_second']:,.0f}/s")
                if evaluated:
                    shown.say(f"{int(row['steps']):>10,} steps: evaluation {row['eval_return_mean']:.1f}")
            elif time.monotonic() - said >= 2.0 or evaluated:
                shown.at(share, line=_block(row, run, since))
                said, since = time.monotonic(), Since()
            else:
                shown.at(share)


class Since:
    """The episodes that ended since the last block of lines."""

    def __init__(self) -> None:
        self.n, self._rewards, self._lengths = 0, 0.0, 0.0

    def add(self, row: dict[str, float]) -> None:
        """Take the row of an update in."""
        if n := int(row["n_completed_episodes"]):
            self.n += n
            self._rewards += n * row["reward"]
            self._lengths += n * row["length"]

    def __str__(self) -> str:
        if not self.n:
            return "no episode has ended since the last lines"
        return f"Reward: {self._rewards / self.n:.2f}  |  Length: {self._lengths / self.n:.0f}"


def _block(row: dict[str, float], run: PPORun, since: Since) -> str:
    """The reference's lines about the rollouts since the last block."""
    total, episodes = run.options.num_episodes, int(row["episodes"])
    lines = [
        f"Parallel mode: {int(row['n_envs'])} environments" if row["n_envs"] > 1 else "One environment",
        f"Episode {episodes}{f'/{total}' if total and episodes <= total else ''}  "
        f"({int(row['steps'])} steps, {row['steps_per_second']:.0f} steps/s)",
        f"  {since}  |  Mean(100): {_number(row['reward_mean'])}",
        f"  n_completed_episodes: {since.n}  |  n_envs: {int(row['n_envs'])}",
        f"  policy loss {row['policy_loss']:.4f}  value loss {row['value_loss']:.3g}  "
        f"entropy {row['entropy']:.3f}  KL {row['approx_kl']:.4f}  clipped {row['clip_fraction']:.3f}  "
        f"explained variance {_number(row['explained_variance'])}",
    ]
    if "eval_return_mean" in row:
        lines.append(f"  evaluation: {row['eval_return_mean']:.2f} +- {row['eval_return_std']:.2f}")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def _say_results(run: PPORun) -> None:
    metrics = run.summary["metrics"]
    limits = {
        "--total-timesteps": run.options.total_timesteps and 2 * metrics["steps"],
        "--num-episodes": run.options.num_episodes and 2 * metrics["episodes"],
    }
    further = " ".join(f"{option} {limit}" for option, limit in limits.items() if limit)
    lines = [
        *_at_its_end(run, metrics),
        "",
        f"evaluation {metrics['eval_return_mean']:.2f} +- {metrics['eval_return_std']:.2f} over "
        f"{run.options.eval_episodes} episodes, after {metrics['steps']:,} steps in "
        f"{run.summary['seconds']:.1f} s",
        f"curves      {run.path / 'curves.png'}",
        f"checkpoint  {run.checkpoints}",
        next_steps(run.path, {"go on with": f"{resume_command(run.path, 'train-ppo')} {further}"}),
    ]
    print("\n".join(lines), flush=True)


def _at_its_end(run: PPORun, metrics: dict[str, Any]) -> list[str]:
    if run.trained:
        return []
    pairs = (("steps", run.options.total_timesteps), ("episodes", run.options.num_episodes))
    done = [
        f"{metrics[what]} {what} are done already, {asked} were asked for"
        for what, asked in pairs
        if asked and metrics[what] >= asked
    ]
    goal = run.options.stop_at_reward
    if goal is not None and metrics["episodes"] >= 100 and metrics["reward_mean"] >= goal:
        done.append(f"the mean reward is {metrics['reward_mean']:.2f}, --stop-at-reward is {goal:g}")
    return [f"nothing to train: {'; '.join(done)}"]
