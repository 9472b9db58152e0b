"""`shoal rescore`: score stored episodes again with a function of your own, without playing."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shoal.cli.command import Command, Flag
from shoal.cli.grammar import print_json, table

MORE = """\
A scorer is a function of a trajectory that gives a number:

  def words(trajectory):                       # in mine.py
      return -sum(len(turn.response.split()) for turn in trajectory.turns)

examples:
  shoal rescore runs/demo --scorer mine:words
  shoal rescore runs/demo --scorer mine:words --file heldout-000040 --json
  shoal rescore runs/demo --scorer mine:words --out scores.jsonl      one line an episode

"differing groups" is the share of groups whose members do not all score the same: only those teach anything.
Episodes that were not played to their end are left out.
"""


@dataclass(frozen=True)
class RescoreOptions:
    """Score the stored episodes of a run again, without playing; the run is not changed."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """a run folder with trajectories/"""
    scorer: Annotated[str, tyro.conf.arg(metavar="MODULE:FUNCTION")]
    """what scores an episode"""
    file: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = ()
    """only this file of trajectories/ (may be given several times)"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """write one JSON line an episode"""
    json: Flag = False
    """print the result as JSON"""


def score(options: RescoreOptions) -> None:
    """Score and print."""
    from shoal.core.files import write_text
    from shoal.testing.replay import load_scorer, rescore

    scored = rescore(options.run, load_scorer(options.scorer), [Path(name).stem for name in options.file])
    if options.out is not None:
        lines = [
            json.dumps(
                {
                    "file": one.recording.name,
                    "iteration": iteration,
                    "group": group,
                    "reward": reward,
                    "score": s,
                }
            )
            for one in scored
            for (iteration, group), reward, s in zip(one.groups, one.rewards, one.scores, strict=True)
        ]
        write_text(options.out, "".join(line + "\n" for line in lines))
    found = [
        {
            "file": one.recording.name,
            "episodes": len(one.scores),
            "reward": statistics.fmean(one.rewards) if one.rewards else 0.0,
            "score": statistics.fmean(one.scores) if one.scores else 0.0,
            "groups_with_signal": one.groups_with_signal(one.rewards),
            "groups_with_signal_now": one.groups_with_signal(one.scores),
        }
        for one in scored
    ]
    if options.json:
        print_json({"run": str(options.run), "scorer": options.scorer, "files": found})
        return
    header = ["file", "episodes", "reward", "score", "differing groups", "with this score"]
    rows = [
        [str(value) if isinstance(value, str | int) else f"{value:.3f}" for value in one.values()]
        for one in found
    ]
    table(f"{options.run}, scored by {options.scorer}", header, rows)
    if options.out is not None:
        print(f"one line an episode: {options.out}")


COMMAND = Command(RescoreOptions, score, MORE)
