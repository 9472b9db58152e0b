"""`shoal eval`: play held-out episodes with a trained run, a model, or whatever a server serves, and say how well."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import Progress, episodes_played, print_json, refuse_below, refuse_device, refuse_idle
from shoal.cli.output import harmless, next_steps, program
from shoal.core.errors import ConfigError
from shoal.train.records.config import EvaluationConfig

PROGRAMS = ("program_errors", "refused_requests", "overridden/", "unenforced/")
"""Metrics of programs that are printed where they occur."""


@dataclass(frozen=True)
class EvalOptions:
    """Play held-out episodes and report the success rate with its 95% interval, of a PPO run the return.

    Episodes that failed for a technical reason are counted apart.
    """

    model: Annotated[str, Positional("RUN_OR_MODEL")]
    """A run folder (of agents or PPO), a PPO checkpoint, a folder that `shoal export` wrote, another Hugging Face
    model folder, a name of `shoal model list`, or `openai:MODEL` on a server."""
    env: str | None = None
    """Env to play (`shoal envs list`); the held-out envs of the run, or of an export, if not given."""
    env_config: tuple[str, ...] = ()
    """Settings of the env as key=value; values are JSON or plain text."""
    panel: Literal["core", "all"] | None = None
    """Play pinned episodes of several envs: the same table, to the last digit, for whoever plays the same weights."""
    video: bool = False
    """Of a PPO run: film the first episode as video.gif, in --out or in the run folder."""
    how: EvaluationConfig = field(default_factory=EvaluationConfig)
    base_url: str = "http://127.0.0.1:8000/v1"
    """Of an OpenAI-compatible server, for `openai:MODEL`; `openai:` alone takes the first model it lists."""
    api_key_env: str | None = None
    """Environment variable with the server's key."""
    concurrency: int = 16
    """Requests that the server gets at once."""
    timeout: float = 120.0
    """Seconds that the server has for an answer."""
    retries: int = 4
    """Attempts after the first, where the server is busy or out of reach."""
    json: bool = False
    """Print the result as JSON."""


MORE = """\
examples:
  shoal eval runs/ppo-CartPole-v1 --video            a PPO run: its return, and a film
  shoal eval runs/demo --episodes 400                a run, on its own held-out envs
  shoal eval runs/demo --checkpoint best             its best weights, on the same episodes
  shoal eval my-model                                what shoal export wrote, prompted as in its run
  shoal eval smollm2 --env bandit                    a language model that was never trained here
  shoal eval runs/demo --panel core                  pinned episodes of pinned envs, as a table
  shoal eval openai:MODEL --base-url http://127.0.0.1:8000/v1 --env countdown
"""
WANTED = (
    "--env", "--env-kwargs", "--episodes", "--seed", "--temperature", "--device", "--checkpoint", "--base-url", "--out",
    "--json",
)  # fmt: skip


def evaluate(options: EvalOptions) -> int:
    """Evaluate and print."""
    from shoal.envs.catalogue import parse_env_kwargs
    from shoal.samplers.registry import ServerConfig
    from shoal.train.records.evaluation import evaluate as play
    from shoal.train.records.evaluation import evaluate_panel, is_ppo_run
    from shoal.train.records.models import has_checkpoints, is_server

    how, settings = options.how, asdict(options.how)
    refuse_below(how, episodes=1, max_tokens=1)
    if is_ppo_run(options.model):
        return _play_ppo(options)
    refuse_idle(options, "with an agent: shoal show prints its episodes", "video")
    if options.env_config and options.env is None and options.panel is None:
        raise ConfigError(
            "--env-config sets the env that --env names, and a run's own envs are played: add --env NAME"
        )
    if is_server(options.model):
        refuse_idle(how, "with a server's model", "checkpoint")
    else:
        refuse_idle(
            options, "without openai:MODEL", "base_url", "api_key_env", "concurrency", "timeout", "retries"
        )
        if not has_checkpoints(options.model):
            refuse_idle(how, "with a model, which has only one", "checkpoint")
        refuse_device(how.device or "cpu")
    server = ServerConfig(
        url=options.base_url, api_key_env=options.api_key_env, concurrency=options.concurrency,
        timeout=options.timeout, retries=options.retries,
    )  # fmt: skip
    if options.panel is not None:
        if options.env is not None or options.env_config or settings.pop("seed"):
            raise ConfigError("a panel has its own envs and seed: leave --env, --env-config and --seed out")
        with episodes_played("loading the model", how.out) as progress:
            found = evaluate_panel(options.model, options.panel, server=server, progress=progress, **settings)
        _print_notes(found.notes)
        return _print_panel(options, found.metrics)
    env_config = parse_env_kwargs(options.env_config)
    with episodes_played("loading the model", how.out) as progress:
        found = play(options.model, options.env, env_config, server=server, progress=progress, **settings)
    _print_notes(found.notes)
    if options.json:
        print_json(found.metrics)
    else:
        _print_metrics(found.metrics)
    if how.out is not None:
        worst = f"{program()} show {shlex.quote(str(how.out))} --worst"
        print(next_steps(how.out, {"look at an episode": worst}))
    return 0


COMMAND = Command(EvalOptions, evaluate, MORE, WANTED)


def _print_notes(notes: list[str]) -> None:
    for note in notes:
        print(harmless(note), file=sys.stderr)


def _print_metrics(metrics: dict[str, Any]) -> None:
    low, high = metrics["success_low"], metrics["success_high"]
    print(f"success        {metrics['success']:.3f}   95% interval {low:.3f} to {high:.3f}")
    for name in (name for name in metrics if name.startswith("success/")):
        print(f"  {name.removeprefix('success/')}: {metrics[name]:.3f}")
    print(f"reward         {metrics['reward']:.3f} ± {metrics['reward_half_width']:.3f}")
    print(f"turns          {metrics['turns']:.2f}")
    print(f"valid actions  {metrics['valid_actions']:.3f}")
    print(f"episodes       {metrics['episodes']} whole, {metrics['failed_episodes']} failed")
    for name in (name for name in metrics if name.startswith(PROGRAMS)):
        print(f"{name}  {metrics[name]:g}")


def _print_panel(options: EvalOptions, table: dict[str, Any]) -> int:
    if options.json:
        print_json(table)
        return 0
    print(f"{'env':<14} {'success':>8}  {'95% interval':<18} {'reward':>8}  {'±':>7}  {'episodes':>8}")
    for row in table["rows"]:
        interval = f"{row['success_low']:.4f} to {row['success_high']:.4f}"
        print(
            f"{row['env']:<14} {row['success']:>8.4f}  {interval:<18} {row['reward']:>8.4f}  "
            f"{row['reward_half_width']:>7.4f}  {row['episodes']:>8}"
        )
    if not table["repeatable"]:
        print("not repeatable: a server's batches decide its rounding, and its model may change")
    return 0


OF_AGENTS = (
    "env", "env_config", "panel", "base_url", "api_key_env", "concurrency", "timeout", "retries",
)  # fmt: skip
"""Options without a meaning for a PPO run."""


def _play_ppo(options: EvalOptions) -> int:
    """Evaluate the policy of a PPO run."""
    from shoal.train.ppo.checkpoint import checkpoint_named
    from shoal.train.records.evaluation import evaluate as play

    how = options.how
    refuse_idle(options, "with a PPO run", *OF_AGENTS)
    refuse_idle(how, "with a PPO run", "max_tokens")
    refuse_device(how.device or "cpu")
    video = (how.out or Path(options.model)) / "video.gif" if options.video else None
    with Progress("playing", sys.stderr):
        metrics = play(options.model, video=video, **asdict(how)).metrics
    if options.json:
        print_json(metrics | ({} if video is None else {"video": str(video)}))
        return 0
    acting = "the likeliest actions" if metrics["deterministic"] else "drawn actions"
    mean, std = metrics["eval_return_mean"], metrics["eval_return_std"]
    least, most = metrics["eval_return_min"], metrics["eval_return_max"]
    print(f"return    {mean:.2f} ± {std:.2f}   (least {least:g}, most {most:g})")
    print(f"length    {metrics['eval_length_mean']:.1f}")
    place = checkpoint_named(Path(options.model), how.checkpoint).name
    print(f"episodes  {metrics['episodes']} of {metrics['env']}, {acting}, seed {metrics['seed']}, {place}")
    if video is not None:
        print(f"video     {video}")
    return 0
