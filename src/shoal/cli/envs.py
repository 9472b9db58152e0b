"""`shoal envs`: list, look at, play, check and serve environments."""

from __future__ import annotations

import inspect
import json
import os
import re
import select
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any

from shoal.cli.command import Command, Group, Positional, default_of
from shoal.cli.grammar import (
    EnvKwargs,
    Settings,
    Wrappers,
    arguments_of,
    parse_settings,
    refuse_below,
    wide_console,
)
from shoal.cli.output import harmless
from shoal.core.configuration import field_notes
from shoal.core.errors import ConfigError, ShoalError
from shoal.envs.catalogue import (
    ADAPTERS,
    BUILT_IN,
    SEATS,
    EnvFn,
    find,
    gymnasium_id,
    installed,
    make,
    names,
    resolve,
    resolve_text,
)
from shoal.envs.check import Job, blaming, run_apart
from shoal.envs.text import TextConfig, TextEnv

EXAMPLES = """\
examples:
  shoal envs list
  shoal envs show sokoban                          actions, settings and a first observation
  shoal envs play sokoban num_boxes=2 --seed 7     play it: arrow keys or wasd, h for a hint, q to quit
  shoal envs show ale_py:ALE/Pong-v5               an env of another package, which is imported
  shoal envs check my_package.my_env:MyEnv         check that your env follows the API
  shoal envs serve webshop --port 8000             serve it in the OpenEnv convention
"""


@dataclass(frozen=True)
class ListCommand:
    """List the environments that have a name."""


@dataclass(frozen=True)
class Named:
    """An env that is named on the command line."""

    name: Annotated[str, Positional("NAME")]
    """A name that `shoal envs list` shows, a Gymnasium id, module:Id-v0, module:Class or module:function."""
    settings: Settings = ()
    """Settings of the env; `shoal envs show NAME` lists them."""


@dataclass(frozen=True)
class Made(Named):
    """One that is made as it is elsewhere."""

    env_kwargs: EnvKwargs = ()
    wrappers: Wrappers = ()


@dataclass(frozen=True)
class ShowCommand(Made):
    """Show the rules, actions, settings and a first observation of an environment."""

    seed: int = 0
    """Seed of the episode shown."""


@dataclass(frozen=True)
class PlayCommand(Named):
    """Play an env in the terminal."""

    seed: int = 0
    """Seed of the episode."""
    lines: bool = False
    """Read one action per line instead of single keys (always so if input is not a terminal)."""


@dataclass(frozen=True)
class CheckCommand(Made):
    """Check that an environment follows the API; exit status 1 if it does not."""

    name: Annotated[str, Positional("MODULE:CLASS")]
    """Your env: module my_package.my_env, class MyEnv, is my_package.my_env:MyEnv (or any other name)."""
    episodes: int = 32
    """Episodes to play, each from its own seed."""
    step_timeout: float = 30.0
    """Time limit of one reset or step, in seconds."""


@dataclass(frozen=True)
class ServeCommand(Named):
    """Serve an env on 127.0.0.1 in the OpenEnv convention, a fresh env per session."""

    port: int = 8000
    """Port to listen on; 0 takes a free one."""


def _list(command: ListCommand) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "what it is", "gymnasium id or setting"):
        table.add_column(column, no_wrap=column == "name")
    packaged = installed()
    for name in names():
        if name in {**ADAPTERS, **SEATS} or name in packaged:
            continue
        kind = find(name)
        where = gymnasium_id(name) if name in BUILT_IN else getattr(kind, "__module__", "")
        table.add_row(name, _first_line(kind), where)
    table.add_section()
    for name, example in _ADAPTER_EXAMPLES.items():
        table.add_row(name, _first_line(find(name)), example)
    table.add_section()
    for name, entry in packaged.items():
        try:
            line = _first_line(find(name))
        except ShoalError as error:  # one broken package must not hide the others
            line = str(error)
        table.add_row(name, line, f"of the package {entry.package}")
    wide_console().print(table)
    print("\nshoal envs show NAME tells all about one; shoal envs play NAME plays it.")


_ADAPTER_EXAMPLES = {
    "gymnasium": "id=CartPole-v1",
    "reasoning_gym": "dataset=leg_counting",
    "textarena": "id=FrozenLake-v0",
    "textworld": "quest_length=3",
    "gem": "id=game:GuessTheNumber-v0-easy",
    "aviary": "id=dummy",
    "pettingzoo": "id=pettingzoo.classic.connect_four_v3",
    "openenv": "url=http://127.0.0.1:8000",
    "openenv_tools": "url=http://127.0.0.1:8000",
    "program": "function=my_agent:play",
}


def _show(command: ShowCommand) -> None:
    kind = find(command.name)
    refuse_below(command, seed=0)
    with blaming(command.name):
        if isinstance(kind, type) and issubclass(kind, TextEnv) and not command.wrappers:
            _show_text(command, kind)
        else:
            _show_any(command)


def _show_text(command: ShowCommand, kind: type[TextEnv[Any]]) -> None:
    print(f"{command.name}: {inspect.getdoc(kind)}\n\nSettings ({kind.Config.__name__}):")
    width = max(40, shutil.get_terminal_size((110, 24)).columns)
    stated = {"max_steps": kind.max_steps} if kind.Config is TextConfig else {}
    for line in _describe_config(kind.Config, stated):
        print(textwrap.fill(line, width, subsequent_indent=" " * 6, break_long_words=False))
    try:
        env = make(command.name, **arguments_of(command.settings, command.env_kwargs))
        _, info = env.reset(seed=command.seed)
    except ConfigError as error:
        if command.settings or command.env_kwargs:
            raise
        print(f"\nIt cannot start without settings: {error}")
        return
    told = textwrap.indent(textwrap.fill(env.instructions, width - 2), "  ")
    print(harmless(f"\nWhat the agent is told:\n{told}"))
    seen = textwrap.indent(str(env.observe()), "  ")
    print(harmless(f"\nThe first observation of seed {command.seed}:\n{seen}"))
    actions = f"Actions now: {', '.join(info['available_actions'])}"
    print("\n" + textwrap.fill(actions, width, subsequent_indent="  ", break_long_words=False))
    if "optimal_pushes" in info:
        print(f"info also has {{'optimal_pushes': {info['optimal_pushes']}}}")
    env.close()


def _show_any(command: ShowCommand) -> None:
    """An env that is no text env: what it is made of, and a first observation."""
    env = _resolved(command)()
    kind = type(env.unwrapped)
    print(f"{command.name}: {_described(kind)}\n")
    print(f"class         {kind.__module__}:{kind.__qualname__}")
    if env is not env.unwrapped:
        print(f"wrapped as    {env}")
    for label, name in (("observations", "observation_space"), ("actions     ", "action_space")):
        print(f"{label}  {getattr(env, name, '(not stated)')}")
    if env.spec is not None and env.spec.max_episode_steps is not None:
        print(f"an episode has at most {env.spec.max_episode_steps} steps")
    settings = [one for one in inspect.signature(kind).parameters.values() if one.kind not in _REST]
    if settings:
        print("\nSettings (key=value behind the name):")
    for one in settings:
        value = "(needed)" if one.default is one.empty else repr(one.default)
        kinds = "" if one.annotation is one.empty else f"   {inspect.formatannotation(one.annotation)}"
        print(f"  {one.name} = {value}{kinds}")
    observation, info = env.reset(seed=command.seed)
    seen = textwrap.indent(str(observation), "  ")
    print(harmless(f"\nThe first observation of seed {command.seed}:\n{seen}"))
    if (mask := info.get("action_mask")) is not None:
        allowed = ", ".join(str(at) for at, is_allowed in enumerate(mask) if is_allowed)
        print(f"\nActions allowed now (its info has an action_mask): {allowed}")
    env.close()
    as_text = "Agents see it as text (shoal envs play)."
    try:
        resolve_text(command.name, arguments_of(command.settings, command.env_kwargs))().close()
    except ConfigError as error:
        as_text = f"Agents cannot see it: {error}"
    print(f"\n{as_text}\n`make_vec` and `shoal train-ppo` take it as it is.")


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _described(kind: type) -> str:
    """What a class says of itself; of one with a page of sections, the first section."""
    text = inspect.getdoc(kind) or "(no description)"
    first, *others = re.split(r"^#+ .*\n+", text, flags=re.MULTILINE)
    if not first.strip() and others:
        first, *others = others
    if not others:
        return text
    return f"{first.strip()}\n\n(its docstring has {len(others)} more sections: python -m pydoc {kind.__module__})"


def _resolved(command: ShowCommand | CheckCommand) -> EnvFn:
    kwargs = arguments_of(command.settings, command.env_kwargs)
    return resolve(command.name, env_kwargs=kwargs, wrappers=command.wrappers)


def _play(command: PlayCommand) -> None:
    refuse_below(command, seed=0)
    with blaming(command.name):
        _play_it(command)


def _play_it(command: PlayCommand) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    env = make(command.name, **parse_settings(command.settings))
    keys = sys.stdin.isatty() and not command.lines
    _, info = env.reset(seed=command.seed)
    console.print(harmless(env.instructions), style="bright_black")
    for tool in info.get("tools", ()):
        console.print(harmless(json.dumps(tool, ensure_ascii=False)), style="bright_black", soft_wrap=True)
    total, over = 0.0, False
    while not over:
        _draw(console, env)
        words = info["available_actions"]
        said = _ask(env, words, keys)
        if said is None:
            console.print(f"left after {info['step']} steps, return {total:g}")
            return
        if said == "h" and hasattr(env, "solution"):
            hint = env.expert_action()
            console.print(f"hint: {harmless(str(hint))}" if hint else "hint: this position is lost; q quits")
            continue
        action = env.projection.action_of(said)
        _, reward, terminated, truncated, info = env.step(env.invalid_action if action is None else action)
        total, over = total + reward, terminated or truncated
        note = "" if info["action_is_valid"] else f"   {said!r} is no action here: {', '.join(words)}"
        told = f"step {info['step']}  {said}  reward {reward:g}  return {total:g}{note}"
        console.print(harmless(told), soft_wrap=True)
        for said in info.get("tool_results", ()):
            text = said if isinstance(said, str) else f"Error: {said['error']}"
            console.print(harmless(text), soft_wrap=True)
    _draw(console, env)
    outcome = "solved" if info["success"] else "over" if terminated else "out of steps"
    console.print(f"{outcome} after {info['step']} steps, return {total:g}", style="bold")


def _ask(env: TextEnv[Any], words: list[str], keys: bool) -> str | None:
    """What the player wants: a word of the env, "h" for a hint, None to quit."""
    directions = {word.casefold(): word for word in words}
    if keys and {"up", "down", "left", "right"} <= directions.keys():
        while True:
            key = read_key()
            if key in ("q", "\x04", "\x1b", ""):
                return None
            way = KEYS.get(key.lower() if len(key) == 1 else key)
            if way in directions:
                return directions[way]
            if key == "h":
                return key
    try:
        line = input(f"[{' | '.join(words[:12])}{' | …' if len(words) > 12 else ''}] > ").strip()
    except EOFError:
        return None
    if line in ("q", "quit", "exit"):
        return None
    matching = [word for word in words if word.casefold().startswith(line.casefold())] if line else []
    return matching[0] if len(matching) == 1 else line


def _draw(console: Any, env: TextEnv[Any]) -> None:
    console.print()
    console.print(draw(env.observe()), soft_wrap=True)


def _check(command: CheckCommand) -> int:
    refuse_below(command, episodes=1)
    if not command.step_timeout > 0:
        raise ConfigError(f"--step-timeout must be above 0, got {command.step_timeout:g}")
    job = Job(_resolved(command), command.name, command.episodes, wrapped=bool(command.wrappers))
    report = run_apart(job, command.step_timeout)
    for line in "\n".join(report.lines).splitlines():
        print(harmless(line))
    if report.broken:
        print(harmless("broken  " + report.broken.replace("\n", "\n      ")))
    return int(bool(report.broken))


def _serve(command: ServeCommand) -> None:
    from shoal.core.ports import LOCAL
    from shoal.envs.adapters.openenv_server import serve

    def ready(port: int) -> None:
        print(
            f"serving {command.name} at http://{LOCAL}:{port}  (sessions at /ws; stop with Ctrl-C)",
            flush=True,
        )

    serve(
        command.name,
        lambda: make(command.name, **parse_settings(command.settings)),
        port=command.port,
        on_ready=ready,
    )


def _first_line(kind: Any) -> str:
    return (inspect.getdoc(kind) or "").split("\n")[0]


def _describe_config(config: Any, stated: Mapping[str, Any]) -> list[str]:
    """A line per setting: name, default (what is `stated` goes first) and the sentence below it in the source."""
    notes = field_notes(config)
    lines = []
    for item in fields(config):
        default = default_of(item)
        value = "(needed)" if default is MISSING else repr(stated.get(item.name, default))
        lines.append(f"  {item.name + ' = ' + value:<34} {notes.get(item.name, '')}".rstrip())
    return lines


# --- how envs look in a terminal: grid worlds in color, everything else as it is
_SOKOBAN = {
    "#": ("██", "rgb(122,94,84)"),
    "_": ("  ", ""),
    "O": ("◎ ", "bold red"),
    "√": ("▣ ", "bold green"),
    "X": ("▣ ", "bold yellow"),
    "P": ("☻ ", "bold cyan"),
    "S": ("☻ ", "bold cyan on dark_red"),
}
_FROZEN_LAKE = {
    "_": ("· ", "bright_black"),
    "O": ("● ", "blue"),
    "G": ("⚑ ", "bold yellow"),
    "P": ("☻ ", "bold cyan"),
    "X": ("☻ ", "bold white on blue"),
    "√": ("☻ ", "bold green"),
}


def draw(observation: str) -> Any:
    """An observation for a terminal; which grid world it is shows in its symbols."""
    from rich.text import Text

    symbols = set(observation) - {"\n"}
    for world, sign in ((_SOKOBAN, "#"), (_FROZEN_LAKE, "_")):
        if sign in symbols and symbols <= world.keys():
            drawn = Text()
            for symbol in observation:
                text, style = ("\n", "") if symbol == "\n" else world[symbol]
                drawn.append(text, style)
            return drawn
    return Text(harmless(observation))


KEYS = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left"}
KEYS |= {"w": "up", "s": "down", "d": "right", "a": "left"}
"""What arrow keys send, and the letters for keyboards without them."""
_BEGUN = re.compile(rb"\x1b([\[O][0-9;]*)?|[\xc0-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf7][\x80-\xbf]{0,2}")
"""The first bytes of a key that sends several."""


def read_key() -> str:
    """One key from the terminal, without waiting for Enter; arrow keys come as one."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before: Any = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)  # what was typed ahead is kept
        key = os.read(terminal, 1)
        while _BEGUN.fullmatch(key) and select.select([terminal], [], [], 0.02)[0]:
            key += os.read(terminal, 1)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
    return key.decode("utf-8", "replace")


COMMAND = Group(
    "List, look at, play, check and serve environments.",
    {
        "list": Command(ListCommand, _list, "examples:\n  shoal envs list"),
        "show": Command(ShowCommand, _show, "examples:\n  shoal envs show sokoban dim_room=[7,7] --seed 3"),
        "play": Command(PlayCommand, _play, "examples:\n  shoal envs play sokoban num_boxes=2 --seed 7"),
        "check": Command(CheckCommand, _check, "examples:\n  shoal envs check my_module:MyEnv"),
        "serve": Command(ServeCommand, _serve, "examples:\n  shoal envs serve webshop --port 8000"),
    },
    EXAMPLES,
)
