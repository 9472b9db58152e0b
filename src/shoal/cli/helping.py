"""`--help` that fits on a screen: what a command does, examples, the flags most wanted; `--help-all` tells the rest."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

Main = Callable[[list[str]], int]


@dataclass(frozen=True)
class Brief:
    """What the short help of a command shows besides its description."""

    flags: tuple[str, ...]
    examples: str


BRIEFS: Mapping[str, Brief] = {
    "train-ppo": Brief(
        ("--env", "--env-kwargs", "--n-envs", "--num-workers", "--backend", "--total-timesteps", "--num-episodes",
         "--preset", "--seed", "--device", "--run-dir", "--resume", "--resume-from", "--learning-rate", "--gamma",
         "--eval-episodes", "--record-video", "--json"),
        """\
  shoal train-ppo                                     CartPole, solved in seconds
  shoal train-ppo --env LunarLander-v3 --n-envs 16 --seed 3
  shoal train-ppo --env my_module:MyEnv --total-timesteps 200000 --preset none
  shoal train-ppo --resume --total-timesteps 400000   go on with the newest run of CartPole
  shoal train-ppo --resume-from runs/ppo-CartPole-v1""",
    ),
    "split": Brief(
        ("--splitter", "--reader", "--processor", "--rewards", "--ids", "--num-cpus", "--backend", "--out",
         "--window-size", "--stride-size", "--max-prompt-length", "--max-response-length", "--truncation", "--on-error",
         "--html", "--json"),
        """\
  shoal split recordings/ --num-cpus 4 --out runs/batch
  shoal split chats.jsonl --splitter window --window-size 5 --stride-size 3
  shoal split runs/demo --rewards rewards.csv --html       a run of shoal's own; look at runs/split/sample.html""",
    ),
    "eval": Brief(
        ("--env", "--env-config", "--episodes", "--seed", "--temperature", "--device", "--checkpoint", "--max-tokens",
         "--base-url", "--api-key-env", "--concurrency", "--out", "--json"),
        """\
  shoal eval runs/demo --episodes 400                a run, on its own held-out envs
  shoal eval runs/demo --checkpoint 0                its first weights, on the same episodes
  shoal eval smollm2 --env bandit                    a language model that was never trained here
  shoal eval openai:MODEL --base-url http://127.0.0.1:8000/v1 --env countdown""",
    ),
    "bench": Brief(
        ("--num-envs", "--num-workers", "--backends", "--env-kwargs", "--wrapper", "--seconds", "--seed", "--run-dir",
         "--json"),
        """\
  shoal bench CartPole-v1
  shoal bench sokoban dim_room=[7,7] --num-envs 64 --seconds 5
  shoal bench my_module:MyEnv --backends auto serial process --json""",
    ),
    "skills train": Brief(
        ("--graph-path", "--env-name", "--max-nodes", "--max-parallel-skills", "--target-skill", "--skills",
         "--total-timesteps", "--max-retries", "--seed", "--launcher", "--merge", "--llm-name", "--llm-url",
         "--evaluation-worlds", "--resume", "--dry-run", "--json-events", "--json"),
        """\
  shoal skills train --max_parallel_skills 2
  shoal skills train --dry-run                                    what would be trained
  shoal skills train --resume --graph-path runs/skills            go on
  shoal skills train --launcher tmux --skills mine.yaml --run-dir runs/mine""",
    ),
    "skills status": Brief(("--graph-path", "--json"), "  shoal skills status --run-dir runs/skills --json"),
    "skills stop": Brief(("--graph-path", "--wait"), "  shoal skills stop --run-dir runs/skills"),
    "skills retry": Brief(("--graph-path", "--budget", "--fresh"), '  shoal skills retry "Collect Stone" --budget 2e6'),
    "skills cancel": Brief(("--graph-path",), '  shoal skills cancel "Collect Stone"'),
    "skills logs": Brief(("--graph-path", "--follow"), '  shoal skills logs "Collect Wood" --follow'),
    "skills attach": Brief(("--graph-path",), '  shoal skills attach "Collect Wood"'),
    "skills eval": Brief(("--graph-path", "--episodes", "--seed", "--target"), "  shoal skills eval --episodes 1024"),
    "skills history": Brief(("--graph-path",), '  shoal skills history "Collect Wood"'),
    "skills diff": Brief(("--graph-path",), '  shoal skills diff "Collect Wood" 1 3'),
    "skills rollback": Brief(("--graph-path",), '  shoal skills rollback "Collect Wood" 3'),
    "skills export": Brief(("--graph-path",), "  shoal skills export for-others/"),
    "skills migrate": Brief(("--graph-path",), "  shoal skills migrate old-project/"),
    "envs list": Brief((), "  shoal envs list"),
    "envs show": Brief(("--seed", "--env-kwargs", "--wrapper"), "  shoal envs show sokoban dim_room=[7,7] --seed 3"),
    "envs play": Brief(("--seed", "--replay", "--episode", "--lines"),
                       "  shoal envs play sokoban num_boxes=2 --seed 7"),
    "envs check": Brief(("--episodes", "--env-kwargs", "--wrapper"), "  shoal envs check my_module:MyEnv"),
    "envs serve": Brief(("--port",), "  shoal envs serve webshop --port 8000"),
}  # fmt: skip
"""Commands whose whole help is longer than a screen, or has no examples."""


@contextlib.contextmanager
def _wide(columns: int) -> Iterator[None]:
    with mock.patch.dict("os.environ", {"COLUMNS": str(columns)}):
        yield


def text_of(main: Main, before: Sequence[str], columns: int = 110) -> str:
    """The whole help of a command, without colours."""
    said = io.StringIO()
    with _wide(columns), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([*before, "--help"])
    return re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())


def flags_in(text: str) -> list[str]:
    """The long flags that a help tells of, in order."""
    return list(dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)))


class _SeenError(Exception):
    """Ends a command when its parser is known."""


def _parser(main: Main, before: Sequence[str]) -> tuple[str, Any]:
    """The description and the parser of a command that is made from a dataclass."""
    import warnings

    import tyro

    found: list[Any] = []

    def seen(kind: Any, *, description: str = "", **options: Any) -> None:
        options.pop("args", None)
        with warnings.catch_warnings():  # what replaces it is not there yet
            warnings.simplefilter("ignore", DeprecationWarning)
            found.append((description or kind.__doc__ or "", tyro.extras.get_parser(kind, **options)))
        raise _SeenError

    with mock.patch("tyro.cli", seen), contextlib.suppress(_SeenError):
        main([*before])
    described, parser = found[-1]
    return str(described), parser


def brief(name: str, main: Main, before: Sequence[str]) -> str:
    """The short help of a command that has one.

    Args:
        name: the command with its own command, such as `skills train`.
        main: runs it.
        before: the words that choose its own command.
    """
    told = BRIEFS[name]
    described, parser = _parser(main, before)
    about = inspect.cleandoc(described).partition("\nexamples:")[0].strip()
    flags, positional = {}, []
    for action in parser._actions:
        if not action.option_strings:
            positional.append(str(action.metavar or action.dest))
        for flag in action.option_strings:
            flags[flag.replace("_", "-")] = (flag, action)
    rows = [_row(flag, flags[flag][1]) for flag in told.flags]
    shown = {id(flags[flag][1]) for flag in told.flags}
    rest = [
        f
        for f, (_, a) in flags.items()
        if f[:2] == "--" and id(a) not in shown and f[:5] not in ("--no-", "--hel")
    ]
    usage = " ".join(["usage: shoal", name, *(["[options]"] if flags else []), *positional])
    lines = [usage, "", *about.splitlines(), "", "examples:", *told.examples.splitlines()]
    if rows:
        lines += ["", "options most wanted:", *rows]
    if rest:
        more = textwrap.fill(
            " ".join(rest), 106, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        lines += ["", f"more (`shoal {name} --help-all` tells all about each):", *more.splitlines()]
    return "\n".join(lines)


def _row(flag: str, action: Any) -> str:
    plain = [
        re.sub(r"\[/?[a-z_ ]+\]|\x1b\[[0-9;]*m", "", str(text or ""))
        for text in (action.metavar, action.help)
    ]
    name = f"{flag} {plain[0]}".strip()
    name = name if len(name) <= 30 else flag
    explained = textwrap.shorten(" ".join(plain[1].split()), 108 - 34, placeholder=" …")
    return f"  {name:<30}  {explained}"
