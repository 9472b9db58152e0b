"""`shoal COMMAND …`: finds the command's file, runs it, and turns shoal's errors into one readable line.

A command is a function `main(argv) -> exit code` in a file of its own and one line in `COMMANDS`.
"""

from __future__ import annotations

import importlib
import os
import sys

from shoal import __version__
from shoal.core.errors import ShoalError, explain_import, unknown_name

COMMANDS: dict[str, tuple[str, str]] = {
    "envs": ("shoal.cli.envs", "list, look at, play, check and serve environments"),
    "train": ("shoal.cli.train", "train a language-model agent (the demo if nothing is said)"),
    "train-ppo": ("shoal.cli.train_ppo", "train a policy by PPO on parallel environments"),
    "rollout": (
        "shoal.cli.rollout",
        "play episodes without training; compare sequential with parallel; replay",
    ),
    "show": ("shoal.cli.show", "look at a run: its summary and an episode turn by turn"),
    "eval": ("shoal.cli.eval", "play held-out episodes with a trained run or a model"),
    "export": ("shoal.cli.export", "write the model of a run as a folder of its own"),
    "model": ("shoal.cli.model", "fetch a small language model"),
    "split": ("shoal.cli.split", "turn recorded trajectories into a training batch"),
    "bench": ("shoal.cli.bench", "measure which backend steps an environment fastest here"),
    "skills": ("shoal.cli.skills", "train a graph of skills in parallel"),
}
"""name: (module with a `main(argv)`, one line of help)"""


def usage() -> str:
    """What `shoal --help` prints."""
    width = max(map(len, COMMANDS), default=0)
    lines = [f"  {name:<{width}}  {help_line}" for name, (_, help_line) in COMMANDS.items()]
    return "\n".join(
        [
            f"shoal {__version__}: parallel reinforcement learning of agents",
            "",
            "usage: shoal COMMAND [options]     (shoal COMMAND --help tells all about one)",
            "",
            *lines,
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code (2 for a mistake in the call, 1 for a failed run)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"shoal {__version__}")
        return 0
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that "module:Class" finds the caller's own files
    try:
        if arguments[0] not in COMMANDS:
            raise unknown_name("command", arguments[0], COMMANDS)
        return _run(arguments[0], arguments[1:])
    except (ShoalError, ValueError, FileNotFoundError) as error:
        if os.environ.get("SHOAL_TRACEBACK"):
            raise
        print(f"shoal: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | KeyError | FileNotFoundError) else 1
    except KeyboardInterrupt:
        print("shoal: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(command: str, argv: list[str]) -> int:
    try:
        return int(importlib.import_module(COMMANDS[command][0]).main(argv) or 0)
    except ModuleNotFoundError as error:
        raise explain_import(f"shoal {command}", error) from error


if __name__ == "__main__":
    sys.exit(main())
