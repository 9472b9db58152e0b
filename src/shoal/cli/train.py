"""`shoal train`: train a language-model agent from a config, with a live view."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.command import Command
from shoal.cli.grammar import (
    AgentOptions,
    Progress,
    Tracker,
    composed,
    print_json,
    refuse_idle,
    refuse_twice,
    run_folder,
    show_warnings,
    table,
    tracking,
)
from shoal.cli.output import next_steps, program
from shoal.cli.runs import how_to_go_on
from shoal.core.run_folder import read_summary
from shoal.viewer.markup import counted, duration

if TYPE_CHECKING:
    from shoal.train.agent.config import AgentConfig
    from shoal.train.agent.trainer import AgentTrainer

MORE = """\
examples:
  shoal train                                         the demo: a tiny model learns FrozenLake in a minute
  shoal train --seed 1 --out runs/mine                another seed, another folder (seed=1 run_dir=runs/mine)
  shoal train --config-name demo algorithm=dapo       the settings of a paper (list: --configs)
  shoal train algorithm.adv_estimator=gigpo trainer.iterations=80       change single settings
  shoal train --config-name demo --resume             resume the newest run of that config
  shoal train --config-name base --cfg                print all settings with their meanings and stop

Settings follow Hydra: key=value changes one, +key=value adds one, ~key removes
one.
"""
MOST_USED = (
    "--config-name", "--config-dir", "--out", "--seed", "--device", "--resume", "--tracker", "--configs", "--cfg",
    "--json",
)  # fmt: skip


RECORDED = ("recorded", "recorded-grpo")
"""Configs of `shoal train-recorded`, which this command takes too."""
LEGEND = (
    "differing groups: the share of groups whose members got different rewards; only these teach the task"
)
"""Of the lines of the live view."""
MOST_WARNINGS = 3
"""At the end of a run."""


@dataclass(frozen=True)
class TrainOptions(AgentOptions):
    """Train a language-model agent with group-relative policy gradients."""

    configs: bool = False
    """List the configs that come with shoal, each with what it is for, and stop."""
    cfg: bool = False
    """Print the composed config as YAML, with the meaning of each setting as a comment, and stop."""
    json_events: bool = False
    """Print one JSON object per event (checkpoint, evaluation, end) on standard output."""
    resume: bool = False
    """Resume the run in --out, or the newest one of this config (resume=true)."""
    tracker: Tracker | None = None
    """Where curves go besides the run folder (default: tensorboard)."""
    wandb: str | None = None
    """Log to this Weights & Biases project (needs the package wandb)."""

    def settings(self, device: str = "engine.device") -> list[str]:
        """As in the base class, with the trackers."""
        words = super().settings(device)
        boards, project = tracking(self.tracker, self.wandb)
        changes: dict[str, str | bool | None] = {
            "trainer.tensorboard": boards,
            "trainer.wandb_project": project,
        }
        if self.tracker is not None or project is not None:
            changes["trainer.wandb"] = project is not None
        for key, value in changes.items():
            if value is not None:
                refuse_twice(key, self.overrides)
                words.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
        return words


def train(options: TrainOptions) -> int:
    """Compose, train, and say what to do next."""
    if options.configs:
        return _list_configs()
    if options.config_name in RECORDED:
        return _train_recorded(options)
    config = composed(options, RECORDED)
    if options.cfg:
        from shoal.core.configuration import as_commented_yaml
        from shoal.train.agent.algorithms.presets import reasons

        print(as_commented_yaml(config, reasons(config)), end="")
        return 0
    show_warnings()
    import torch

    from shoal.train.agent.processes.distributed import Processes
    from shoal.train.agent.run.playing import refuse_broken_envs
    from shoal.train.agent.run.records import finished_iterations, refuse_taken
    from shoal.train.agent.trainer import AgentTrainer

    processes = Processes.join(config.engine.device)
    run_dir = processes.all_gather(
        lambda: str(run_folder(config.run_dir, options.config_name, config.resume))
    )[0]
    config = replace(config, run_dir=run_dir)
    if config.resume and (done := finished_iterations(config)) >= config.trainer.iterations:
        told = f"{run_dir} has done {counted(done, 'iteration')} and trainer.iterations={config.trainer.iterations}"
        print(
            f"{told}: there is nothing to do; ask for more with trainer.iterations={2 * done}",
            file=sys.stderr,
        )
        if options.json:
            print_json(read_summary(Path(run_dir)))
        return 0
    refuse_taken(config)
    if config.trainer.check_envs:
        processes.all_gather(lambda: refuse_broken_envs(config) if processes.first else None)
    torch.set_num_threads(config.engine.threads)
    if not processes.first:
        logging.getLogger("shoal").setLevel(logging.ERROR)  # the first one says it
        with AgentTrainer(config) as trainer:
            for _ in trainer.train():
                pass
        return 0
    begun = False
    try:
        with ExitStack() as ending:
            progress = ending.enter_context(Progress(f"loading the {config.engine.name} engine"))
            events = print_json if options.json_events else None
            trainer = ending.enter_context(AgentTrainer(config, events))
            progress.say(f"{options.config_name}: {trainer.describe()}\nrun folder: {run_dir}\n{LEGEND}")
            progress.doing = trainer.doing
            progress.may_end_early = config.trainer.stop_at_success is not None
            begun = True
            try:
                _watch(trainer.train(), trainer, progress)
            except BaseException as error:
                trainer.records.folder.fail(error)
                raise
    except KeyboardInterrupt:
        if not begun:
            raise
        print(f"\ninterrupted; {how_to_go_on(Path(run_dir))}")  # the last line: all has ended
        return 130
    _say_results(Path(run_dir), config)
    summary = read_summary(Path(run_dir))
    if options.json:
        print_json(summary)
    return 0 if summary["status"] == "completed" else 1


COMMAND = Command(TrainOptions, train, MORE, MOST_USED)


def _list_configs() -> int:
    from shoal.train.agent.algorithms.presets import GROUP, purposes

    rows = [list(row) for row in purposes().items()]
    table("", ["config", "what it is for"], rows, text=(0, 1))
    print("shoal train --config-name CONFIG trains by one; with --cfg it prints all settings and stops.\n")
    presets = [[name, purpose.partition(": ")[0]] for name, purpose in purposes(GROUP).items()]
    table("", ["algorithm", "what it is"], presets, text=(0, 1))
    print(
        "algorithm=NAME sets what the algorithm's paper sets; docs/algorithms.md says what depends on your sizes."
    )
    return 0


def _train_recorded(options: TrainOptions) -> int:
    """`shoal train-recorded`, by its older name."""
    from shoal.cli.train_recorded import RecordedOptions, train_recorded

    refuse_idle(options, f"with --config-name {options.config_name}", "config_dir", "tracker", "wandb")
    names = [field.name for field in fields(RecordedOptions)]
    return train_recorded(RecordedOptions(**{name: getattr(options, name) for name in names}))


def _watch(rows: Iterator[dict[str, Any]], trainer: AgentTrainer, progress: Progress) -> None:
    """Show each row as it comes; of those from before a resume, only where the run goes on."""
    iterations = trainer.config.trainer.iterations
    before: dict[str, Any] = {}  # the row before this one
    held_out, resumed = None, False
    for row in rows:
        at = trainer.resumed_at
        if at is not None and row["iteration"] <= at:
            held_out = row.get("heldout_success", held_out)
        if at is not None and row["iteration"] >= at and not resumed:
            resumed = True
            known = "" if held_out is None else f" (held-out {held_out:.2f})"
            progress.at(at / iterations)
            kept = ""
            if trainer.kept_episodes:
                kept = f"; {counted(trainer.kept_episodes, 'episode')} that ended after it are kept"
            progress.say(f"resumed at {at} of {iterations}{known}{kept}")
        if at is None or row["iteration"] > at:
            played = row.get("episodes", 0) - before.get("episodes", 0)
            _show(row, iterations, played, progress)
        before = row


def _show(row: dict[str, Any], iterations: int, played: int, progress: Progress) -> None:
    """One row: below the bar of a terminal, as a line elsewhere.

    Args:
        row: of metrics.
        iterations: of the whole run.
        played: episodes that the row is about.
        progress: where it is shown.
    """
    line = _line(row, iterations, played)
    progress.at(row["iteration"] / iterations, line)
    if not progress.on_terminal:
        left = progress.left()
        progress.say(f"{line}  ({left})" if left else line)
    elif "heldout_success" in row:
        progress.say(f"iteration {row['iteration']:>4}: held-out success {row['heldout_success']:.2f}")


def _line(row: dict[str, Any], iterations: int, played: int) -> str:
    """One row of metrics in the words of the live view."""
    parts = [f"{row['iteration']:>4}/{iterations}"]
    kl = row.get("kl_to_reference", row.get("kl_to_rollout"))
    if kl is not None:
        row = {**row, "kl": max(0.0, round(kl, 6))}  # an estimate near 0 may lie below it
    for key, label, form in (
        ("success", "success", ".2f"),
        ("reward", "reward", ".2f"),
        ("valid_actions", "valid", ".2f"),
        ("groups_with_signal", "differing groups", ".2f"),
        ("entropy", "entropy", ".2f"),
        ("kl", "KL", ".1g"),
        ("grad_norm", "grad", ".2g"),
        ("learning_rate", "lr", ".2g"),
        ("tokens_per_second", "tok/s", ".0f"),
    ):
        if row.get(key) is not None:
            parts.append(f"{label} {row[key]:{form}}")
    if truncated := _rounded(row.get("truncated")):
        parts.append(f"truncated {truncated:.2f}")
    if row.get("program_errors"):
        parts.append(f"program errors {row['program_errors']:.2f}")
    if row.get("failed_episodes"):
        parts.append(f"failed {row['failed_episodes']:.0f}/{played}")
    if row.get("heldout_success") is not None:
        parts.append(f"| held-out {row['heldout_success']:.2f}")
        if truncated := _rounded(row.get("heldout_truncated")):
            parts.append(f"truncated {truncated:.2f}")
    return "  ".join(parts)


def _rounded(share: float | None) -> float:
    """A share as it is shown: 0 for one of which 0.00 would be seen."""
    return round(share or 0.0, 2)


def _say_results(run: Path, config: AgentConfig) -> None:
    """Where everything is, what to do next, and as the last lines what kept the run from learning."""
    summary = read_summary(run)
    metrics, next_step, enough = summary["metrics"], config.next_step, config.trainer.stop_at_success
    early = ""
    if "error" in summary:
        early = " (ended early by trainer.stop_on_collapse)"
    elif metrics["iterations"] < config.trainer.iterations:
        early = f" (ended early by trainer.stop_at_success={enough})"
    success = metrics.get("heldout_success")  # not there where the rows of metrics were lost
    lines = [
        "",
        f"held-out success {'unknown' if success is None else f'{success:.2f}'} after "
        f"{counted(metrics['iterations'], 'iteration')}, {duration(summary['seconds'])}{early}",
        f"curves      {run / 'curves.png'}",
        f"episodes    {run / 'trajectories'}",
        f"checkpoint  {run / 'checkpoints'}",
    ]
    steps = {"look at an episode": f"{program()} show {shlex.quote(str(run))}"}
    if next_step:
        command, _, why = next_step.partition(" # ")
        command = command.replace("shoal ", f"{program()} ", 1).replace("{run}", shlex.quote(str(run)))
        steps[f"try next ({why.strip()})" if why else "try next"] = command
    lines.append(next_steps(run, steps))
    advice = summary.get("advice", [])
    if advice:
        lines.append("")
    lines += [f"WARNING: {one['title']}. {one['text']}" for one in advice[:MOST_WARNINGS]]
    print("\n".join(lines))
