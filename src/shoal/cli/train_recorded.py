"""`shoal train-recorded`: train a model on recorded trajectories."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from shoal.cli.command import Command
from shoal.cli.grammar import (
    SettingsOptions,
    print_json,
    refuse_device,
    refuse_twice,
    run_folder,
    show_warnings,
)
from shoal.cli.output import program, to_type
from shoal.core.configuration import as_commented_yaml

MORE = """\
examples:
  shoal train-recorded recordings=DIR                 imitate recordings (supervised fine-tuning)
  shoal train-recorded recordings=DIR --config-name recorded-grpo     learn from their rewards
  shoal train-recorded recordings=DIR --cfg           print all settings with their meanings and stop
"""
MOST_USED = ("--config-name", "--out", "--seed", "--device", "--resume", "--cfg", "--json")


@dataclass(frozen=True)
class RecordedOptions(SettingsOptions):
    """Train a model on recorded trajectories: supervised (SFT), or by their rewards (GRPO)."""

    config_name: Literal["recorded", "recorded-grpo"] = "recorded"
    """The config: imitate the recordings, or learn from their rewards."""
    cfg: bool = False
    """Print the composed config as YAML, with the meaning of each setting as a comment, and stop."""
    json_events: bool = False
    """Print one JSON object per event (checkpoint, end) on standard output."""
    resume: bool = False
    """Resume the run in --out, or the newest one of this config (resume=true)."""


def train_recorded(options: RecordedOptions) -> int:
    """Split, train, evaluate."""
    from shoal.train.recorded.run import read_config
    from shoal.train.recorded.run import train_recorded as train

    show_warnings()
    where = [] if options.run_dir is None else [f"run_dir={options.run_dir}"]
    if where:
        refuse_twice("run_dir", options.overrides)
    config = read_config(options.config_name, [*options.settings("device"), *where])
    refuse_device(config.device)
    if options.cfg:
        print(as_commented_yaml(config), end="")
        return 0
    import torch

    torch.set_num_threads(config.threads)
    place = run_folder(config.run_dir, options.config_name, config.resume)
    events = print_json if options.json_events else None
    try:
        summary = train(config, place, on_event=events, say=partial(print, flush=True))
    except KeyboardInterrupt:
        print(f"\ninterrupted; go on with:\n{to_type(_resuming(options, place))}")
        return 130
    if options.json:
        print_json(summary)
    return 0


def _resuming(options: RecordedOptions, place: Path) -> str:
    """The command that goes on."""
    keys = ("run_dir", "resume")
    kept = [word for word in options.settings("device") if word.partition("=")[0] not in keys]
    words = ["--config-name", options.config_name, *kept, f"run_dir={place}", "resume=true"]
    return f"{program()} train-recorded {shlex.join(words)}"


COMMAND = Command(RecordedOptions, train_recorded, MORE, MOST_USED)
