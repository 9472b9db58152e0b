"""`shoal train-recorded`: train a model on recorded trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.cli.command import Command
from shoal.cli.grammar import SettingsOptions

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
    from shoal.cli.recorded import train_recorded

    return train_recorded(options)


COMMAND = Command(RecordedOptions, train_recorded, MORE, MOST_USED)
