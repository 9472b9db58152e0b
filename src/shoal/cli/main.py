"""`shoal COMMAND …`: finds the command's file, runs it, and turns what goes wrong into one readable line.

A command is `COMMAND` in a file of its own, see `command.py`, and one line in `COMMANDS`. Exit codes: 0 done,
1 a run that failed or a check that did not hold, 2 a usage error, 128 + N ended by signal N (130: Ctrl-C).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from shoal import __version__
from shoal.core.errors import ShoalError, explain_import, unknown_name

COMMANDS: dict[str, tuple[str, str]] = {
    "envs": ("shoal.cli.envs", "list, show, play, check and serve environments"),
    "train": ("shoal.cli.train", "train a language-model agent (without options: a demo)"),
    "train-ppo": ("shoal.cli.train_ppo", "train a policy by PPO on parallel environments"),
    "train-recorded": ("shoal.cli.train_recorded", "train a model on recorded trajectories"),
    "rollout": ("shoal.cli.rollout", "play episodes without training, sequential or parallel"),
    "eval": ("shoal.cli.eval", "play held-out episodes with a trained run or a model"),
    "show": ("shoal.cli.show", "show a run: its summary and an episode turn by turn"),
    "view": ("shoal.cli.view", "show runs in a browser, or write one static page of them"),
    "runs": ("shoal.cli.runs", "list the runs of a folder"),
    "replay": ("shoal.cli.replay", "replay a recorded episode: check, debug or fork it"),
    "prove": ("shoal.cli.prove", "check that a run is the same on every backend"),
    "gateway": ("shoal.cli.gateway", "serve a model by the APIs of OpenAI and Anthropic"),
    "export": ("shoal.cli.export", "write the model of a run to a folder of its own"),
    "model": ("shoal.cli.model", "fetch a small language model"),
    "split": ("shoal.cli.split", "turn recorded trajectories into a training batch"),
    "bench": ("shoal.cli.bench", "measure which backend steps an environment fastest"),
    "skills": ("shoal.cli.skills", "train a graph of skills in parallel"),
    "doctor": ("shoal.cli.doctor", "check the installation and the hardware"),
    "completion": ("shoal.cli.command", "print a completion script for a shell"),
}
"""name: (module with a `COMMAND`, one line of help)"""
USAGE_END = """\
shoal COMMAND --help explains a command. Alike everywhere: --out FOLDER, --resume, --seed N, --device NAME, --json.
Exit status: 0 done, 1 failed or not equal, 2 a usage error, 130 Ctrl-C.
SHOAL_TRACEBACK=1 prints the traceback of an error instead of one line.
"""
AGAIN = "run the same command again (with --resume, if it has it)"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The machine has run out of something; other errors of files are mistakes in the call."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not sys.stderr.isatty():  # before torch and transformers are imported, whose bars read it then
        os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault(
        "HF_HUB_DISABLE_PROGRESS_BARS", "1"
    )  # those of transformers for each weight it loads
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame complains that there is no screen
    if "OMP_WAIT_POLICY" not in os.environ:  # before torch, whose threads spin for long where cores are busy
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # what an encoding has no letter for is written by its number
        sys.stdout.reconfigure(errors="backslashreplace")
    code = _code_of(arguments)
    if code and argv is None:
        # What was broken off may have left a thread in a model's call. Python would stop it there on its way out, for
        # which C++ aborts the process (status 134).
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def _code_of(arguments: list[str]) -> int:
    """Run one command, and print what went wrong."""
    with _signals() as got:
        try:
            if (here := os.getcwd()) not in sys.path and "" not in sys.path:
                sys.path.insert(0, here)  # so that "module:Class" finds the caller's own files
            code = _run(arguments)
            sys.stdout.flush()
            return 128 + got[0] if got and code == 130 else code
        except KeyboardInterrupt as interrupt:
            kept = str(interrupt) or f"what was saved is kept: {AGAIN}"
            print(f"shoal: interrupted; {kept}", file=sys.stderr)
            return 128 + (got[0] if got else signal.SIGINT)
        except BrokenPipeError:  # the reader has enough, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the last flush does not fail
            return 1
        except (ShoalError, ValueError, OSError, MemoryError) as error:
            if os.environ.get("SHOAL_TRACEBACK"):
                raise
            return _tell(error)


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-V", "--version"):
        print(f"shoal {__version__}")
        return 0
    from shoal.cli.command import HELP, Group, app_of, run

    if not arguments or arguments[0] in (*HELP, "help"):
        about = f"shoal {__version__}: parallel reinforcement learning of agents"
        app_of(Group(about, COMMANDS, USAGE_END), "").help_print([])
        return 0
    if arguments[0] not in COMMANDS:
        raise unknown_name("command", arguments[0], COMMANDS)
    try:
        return run(COMMANDS[arguments[0]], arguments[0], arguments[1:])
    except ModuleNotFoundError as error:
        raise explain_import(f"shoal {arguments[0]}", error) from error
    except RuntimeError as error:  # how torch reports too little memory
        if isinstance(error, ShoalError) or not re.search("allocate memory|out of memory", str(error)):
            raise
        raise MemoryError(str(error)) from error


def _tell(error: Exception) -> int:
    """Print one line about what went wrong; returns the exit code."""
    from shoal.cli.output import harmless

    text, code = str(error), 2 if isinstance(error, ValueError | KeyError | FileNotFoundError) else 1
    if isinstance(error, MemoryError):
        text = f"not enough memory: {text or 'of this machine'}"
    if isinstance(error, OSError) and not isinstance(error, ShoalError):
        files = [str(name) for name in (error.filename, error.filename2) if name is not None]
        text = f"{error.strerror or error}" + (f" ({' to '.join(files)})" if files else "")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text += f"; what was saved before is whole: make room and {AGAIN}"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text += "; choose another folder, for a run with --out"
        code = 1 if error.errno in FULL else 2
    print(f"shoal: {harmless(text)}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGTERM, and a terminal that is closed, are like Ctrl-C; yields what came. A second signal ends the process."""
    got: list[int] = []

    def end(number: int, frame: Any) -> None:
        del frame
        if got:
            os._exit(128 + number)
        got.append(number)
        raise KeyboardInterrupt

    changed = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # not nohup's
                changed[number] = signal.signal(number, end)
    try:
        yield got
    finally:
        for number, was in changed.items():
            if not got:  # else the process is about to end, and the next one is the second
                signal.signal(number, was)


if __name__ == "__main__":
    sys.exit(main())
