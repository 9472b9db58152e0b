"""`shoal COMMAND …`: finds the command's file, runs it, and turns what goes wrong into one readable line.

A command is `COMMAND` in a file of its own, see `command.py`, and one line in `COMMANDS`. Exit codes: 0 done,
1 a run that failed or a check that did not hold, 2 a usage error, 128 + N ended by signal N (130: Ctrl-C).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from shoal import __version__
from shoal.cli.output import ReaderGoneError, forget, harmless, open_streams, watched_output
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
    "view": ("shoal.cli.view", "look at runs in a browser, or write one static page of them"),
    "runs": ("shoal.cli.runs", "list the runs of a folder"),
    "compare": ("shoal.cli.compare", "compare runs: settings, metrics, curves, first differing token"),
    "replay": ("shoal.cli.replay", "play a recorded episode again: check, debug, fork it"),
    "rescore": ("shoal.cli.rescore", "score stored episodes again without playing"),
    "prove": (
        "shoal.cli.prove",
        "prove here that a run is the same however it is run, and whatever is killed",
    ),
    "eval": ("shoal.cli.eval", "play held-out episodes with a trained run or a model"),
    "gateway": ("shoal.cli.gateway", "serve a model to agents that use the packages of OpenAI and Anthropic"),
    "export": ("shoal.cli.export", "write the model of a run as a folder of its own"),
    "model": ("shoal.cli.model", "fetch a small language model"),
    "split": ("shoal.cli.split", "turn recorded trajectories into a training batch"),
    "bench": ("shoal.cli.bench", "measure which backend steps an environment fastest here"),
    "skills": ("shoal.cli.skills", "train a graph of skills in parallel"),
    "doctor": ("shoal.cli.doctor", "what this machine has, what it lacks, and what to do about it"),
    "completion": ("shoal.cli.command", "print a script that completes commands and flags in a shell"),
}
"""name: (module with a `COMMAND`, one line of help)"""

GOES_ON = ("train", "train-ppo", "rollout", "prove", "eval", "split", "bench", "skills")
"""Commands whose work goes on when nobody reads what they say any more."""
RESUMED = ("train", "train-ppo", "split", "skills train")
"""Those that can go on where they ended."""
ASKED_AGAIN = ("eval", "rollout")
"""Those that go on where they ended when they are asked for again."""
PLACED = {**dict.fromkeys(GOES_ON + RESUMED, "--run-dir (run_dir=)"), "model": "XDG_CACHE_HOME="}
"""How those that write say where."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the machine has run out of; other errors of files are mistakes in the call."""


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
            "",
            "Alike everywhere: --run-dir FOLDER  --resume  --seed N  --device NAME  --json (the result for programs)",
            "Exit status: 0 done, 1 failed or not equal, 2 a usage error, 130 Ctrl-C.",
            "SHOAL_TRACEBACK=1 shows the whole traceback of an error that is told in one line.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    command = arguments[0] if arguments else ""
    open_streams()
    if not sys.stderr.isatty():  # before torch and transformers are imported, whose bars read it then
        os.environ.setdefault("TQDM_DISABLE", "1")
    if "OMP_WAIT_POLICY" not in os.environ:  # before torch, whose threads spin for long where cores are busy
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        here = os.getcwd()
    except FileNotFoundError:
        print("shoal: this folder was removed: go to one that is there", file=sys.stderr)
        return 2
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # so that "module:Class" finds the caller's own files
    try:
        with _signals() as got, watched_output(command in GOES_ON) as lost:
            try:
                code = _run(arguments)
                sys.stdout.flush()
                code = code or int(bool(lost))
            except KeyboardInterrupt:
                kept = "; what went into a --run-dir is kept: say the same again, into the same folder"
                print(f"shoal: interrupted{kept if command in ASKED_AGAIN else ''}", file=sys.stderr)
                code = 130
            return 128 + got[0] if got and code == 130 else code
    except ReaderGoneError:  # it has enough, as `| head` does
        return 0
    except (ShoalError, ValueError, OSError, MemoryError) as error:
        if os.environ.get("SHOAL_TRACEBACK") and not isinstance(error, BrokenPipeError):
            raise
        return _tell(error, " ".join(arguments[:2]) if command == "skills" else command)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"shoal {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        raise unknown_name("command", arguments[0], COMMANDS)
    try:
        from shoal.cli.command import run

        return run(COMMANDS[arguments[0]], arguments[0], arguments[1:])
    except ModuleNotFoundError as error:
        raise explain_import(f"shoal {arguments[0]}", error) from error
    except RuntimeError as error:  # so torch tells of too little memory
        if isinstance(error, ShoalError) or not re.search("allocate memory|out of memory", str(error)):
            raise
        raise MemoryError(str(error)) from error


def _tell(error: Exception, command: str) -> int:
    """One line about what went wrong with a command, and the exit code."""
    if isinstance(error, BrokenPipeError):  # of who writes bytes
        forget(sys.stdout)
        return 0
    text = str(error)
    if isinstance(error, MemoryError):
        text = f"the memory is not enough: {text or 'of this machine'}"
    code = 2 if isinstance(error, ValueError | KeyError | FileNotFoundError) else 1
    if isinstance(error, OSError) and not isinstance(error, ShoalError):
        files = [str(name) for name in (error.filename, error.filename2) if name is not None]
        named = f" ({' to '.join(files)})" if files else ""
        text = f"{error.strerror or error}{named}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and command in RESUMED:
            text += "; what was saved before is whole: make room and go on with --resume (resume=true)"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT) and command in ASKED_AGAIN:
            text += "; the episodes written before are kept: make room and say the same again, into the same folder"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and command in PLACED:
            text += f"; choose another folder with {PLACED[command]}"
        code = 1 if error.errno in FULL else 2
    with contextlib.suppress(OSError):
        print(f"shoal: {harmless(text)}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """A request to end, or a terminal that is closed, is like Ctrl-C: what was done is kept. Yields what came.

    A second one ends the process at once, and so do its workers.
    """
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
            usual = signal.SIG_DFL, signal.default_int_handler
            if signal.getsignal(number) in usual:  # nohup and others who chose are left alone
                changed[number] = signal.signal(number, end)
    try:
        yield got
    finally:
        for number, was in changed.items():
            if not got:  # else the process is about to end, and the next one is the second
                signal.signal(number, was)


if __name__ == "__main__":
    sys.exit(main())
