"""`shoal replay`: a recorded episode again in this process, checked, stopped in a debugger, forked, or compared."""

from __future__ import annotations

from bdb import BdbQuit
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import print_json, refuse_idle
from shoal.cli.output import harmless
from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError
from shoal.viewer.markup import counted

MORE = """\
EPISODE is FILE:N, the N-th episode (from 0) of trajectories/FILE.jsonl; N alone
means the newest held-out file.

examples:
  shoal replay runs/demo                              replay its first held-out episode, token for token
  shoal replay runs/demo train-000010:17              a training episode
  shoal replay runs/demo 5 --turn 3 --pdb             stop in the env's own code at turn 3
  shoal replay runs/demo 5 --turn 3 --action Up       take another action there, and let the model play on
  shoal replay runs/served 0                          a server's run: its recorded tokens are compared
  shoal replay runs/demo 5 --action Up --turn 2 --sampler openai:MODEL
  shoal replay runs/a --diff runs/b                   the first token, env answer or seed in which two runs differ

Without the weights that wrote the episode (a server's, a checkpoint that was
dropped) the recorded tokens are replayed; prompts, env answers and rewards are
compared all the same.
In --json, "equal" is null where nothing was compared: after a fork, or by
another sampler.
Exit status: 0 if everything was as recorded (or was not compared), 1 if
something differs, 2 for a usage error.
"""


@dataclass(frozen=True)
class ReplayOptions:
    """Replay a recorded episode of any run in this process, and compare it with the record."""

    run: Annotated[Path, Positional("RUN")]
    """Run folder with config.yaml and trajectories/."""
    episode: Annotated[str, Positional("EPISODE")] = ""
    """FILE:N or N (default: the first held-out episode)."""
    turn: int | None = None
    """Turn (from 1) to show, debug or fork."""
    pdb: bool = False
    """Stop in the env's own code, at --turn or the first turn."""
    action: str | None = None
    """Fork: take this action at --turn, a word or a whole response."""
    sampler: str = "auto"
    """What plays: auto, checkpoint, recorded, a run, a model folder or name, or openai:MODEL."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """Server of openai:MODEL."""
    device: str | None = None
    """Device of the model (default: the run's)."""
    diff: Path | None = None
    """Compare the records of this run and RUN; nothing is played."""
    json: bool = False
    """Print the result as JSON; turns go to standard error."""


def replay(options: ReplayOptions) -> int:
    """Replay, compare, print; 0 if it is the same."""
    return _replay(options) if options.diff is None else _diff(options, options.diff)


COMMAND = Command(ReplayOptions, replay, MORE)


def _diff(options: ReplayOptions, other: Path) -> int:
    if options.episode:
        raise ConfigError("EPISODE does nothing with --diff, which compares whole runs: leave it out")
    refuse_idle(
        options, "with --diff, which compares whole runs and plays nothing",
        "turn", "pdb", "action", "sampler", "base_url", "device",
    )  # fmt: skip
    from shoal.train.records.compare import first_difference
    from shoal.train.records.read import recordings_of
    from shoal.train.records.replay import explain

    difference = first_difference(options.run, other)
    if difference is None:
        files = len(recordings_of(options.run))
        print(f"{options.run} and {other} recorded the same episodes ({files} files)")
    else:
        print(harmless(f"{options.run} and {other} differ first at\n{difference}"))
        for line in explain(difference)[1:]:
            print(harmless(f"  {line}"))
    if options.json:
        print_json({"equal": difference is None, "difference": difference and difference.as_dict()})
    return int(difference is not None)


def _replay(options: ReplayOptions) -> int:
    from rich.console import Console

    from shoal.cli.show import print_turn
    from shoal.train.records.replay import Replay, explain, find_episode, stops_in_pdb

    if options.sampler == "recorded":
        refuse_idle(options, "with --sampler recorded, which loads no model", "device")
    if not options.sampler.startswith("openai:"):
        refuse_idle(options, "without --sampler openai:MODEL", "base_url")
    found = find_episode(options.run, options.episode)
    record = found.trajectory
    turn = options.turn
    if turn is not None and not 1 <= turn <= max(1, len(record.turns)):
        raise ConfigError(f"{found.name} has turns 1 to {len(record.turns)}, got --turn {turn}")
    fork = None if options.action is None else (turn or 1, options.action)
    console = Console(highlight=False)
    shown = 0

    def told(so_far: Trajectory) -> None:
        nonlocal shown
        shown += 1
        if turn is None or shown == turn or (fork is not None and shown >= turn):
            print_turn(console, so_far, shown - 1, player.tokenizer().decode if turn == shown else None)

    recording = found.recording
    when = f"held out, after {counted(recording.weights, 'iteration')}"
    if not recording.held_out:
        when = f"iteration {record.iteration}"
    print(f"{found.name}: {record.env}, {when}, group {record.group}, member {record.member}, "
          f"env seed {record.env_seed}")  # fmt: skip
    step = None
    if options.pdb:
        import pdb

        step = stops_in_pdb(turn or 1, pdb.Pdb(nosigint=True))
    with Replay(options.run, _sampler(options), options.device) as player:
        try:
            played = player.play(found, fork=fork, told=told, **({} if step is None else {"step": step}))
        except BdbQuit:
            print("left the debugger; the rest of the episode was not played")
            return 0
    again, difference = played.trajectory, played.difference
    print(harmless(f"\n{played.source}\nrecorded: {_outcome(record)}\nnow:      {_outcome(again)}"))
    checked = options.sampler in ("auto", "checkpoint", "recorded")
    if fork is None and difference is None:
        tokens = again.n_tokens
        same = f"the same: {len(again.turns)} turns, {tokens} tokens, every prompt, env answer and reward"
        if not again.turns:
            same = "it ended before its first turn, as it did when it was recorded"
        print(same if checked else "played by another sampler: not compared")
    elif difference is not None:
        print(harmless(f"DIFFERS at {difference}"))
        for line in explain(difference):
            print(harmless(f"  {line}"))
    if options.json:
        print_json({
            "episode": found.name, "source": played.source, "forked": fork is not None,
            "equal": difference is None if fork is None and checked else None,
            "turns": len(again.turns), "reward": again.reward, "success": again.success,
            "recorded_reward": record.reward, "difference": difference and difference.as_dict(),
        })  # fmt: skip
    return int(difference is not None)


def _outcome(trajectory: Any) -> str:
    from shoal.cli.show import outcome

    return f"{outcome(trajectory)}, reward {trajectory.reward:g} in {counted(len(trajectory.turns), 'turn')}"


def _sampler(options: ReplayOptions) -> Any:
    """What `--sampler` names: a word of `Replay`, or a sampler that `shoal eval` would play with."""
    if options.sampler in ("auto", "checkpoint", "recorded"):
        return options.sampler
    from shoal.train.records.models import LOCAL, open_model

    server = replace(LOCAL, url=options.base_url)
    return open_model(options.sampler, device=options.device, server=server).engine
