"""What a command is: a dataclass of options and what runs them. How words become options, help and completion."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro

from shoal.cli.output import only_json
from shoal.core.errors import ConfigError, unknown_name

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""An option that is said or not, without a value."""
HELP = ("-h", "--help", "--help-all")
SCREEN = 58
"""Lines that a help may have; a longer one shows the flags most wanted and names the others."""


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        options: a dataclass; its docstring is what `--help` says of the command, those of its fields of the flags.
        run: does it, and returns the exit status, None for 0.
        more: what stands below in the help, as it is written: examples, exit statuses.
        wanted: the flags that the first screen of help shows, where there are more than fit.
        default: the values that options start from, where those depend on the words (a preset's, a run's to resume).
    """

    options: Any
    run: Callable[[Any], int | None]
    more: str = ""
    wanted: tuple[str, ...] = ()
    default: Callable[[list[str]], Any] | None = None


@dataclass(frozen=True)
class Group:
    """Commands of one thing; those of other modules are `(module, a line of help)`, and loaded when they are used."""

    about: str
    commands: Mapping[str, Command | tuple[str, str]]
    more: str = ""


Entry = Command | Group | tuple[str, str]


def loaded(entry: Entry) -> Command | Group:
    """The command itself, of its module's `COMMAND`."""
    if isinstance(entry, tuple):
        found: Command | Group = importlib.import_module(entry[0]).COMMAND
        return found
    return entry


def run(entry: Entry, name: str, words: list[str]) -> int:
    """Run a command, or one of a group, that `name` named with the words that follow; returns its exit status."""
    what = loaded(entry)
    if isinstance(what, Group):
        if not words or words[0] in (*HELP, "help"):
            print(_help_of_group(what, name))
            return 0
        if words[0] not in what.commands:
            raise unknown_name(f"{name} command", words[0], what.commands)
        return run(what.commands[words[0]], f"{name} {words[0]}", words[1:])
    if {*HELP} & {*words}:
        said = [word for word in words if word not in HELP]  # defaults may depend on it
        print(help_of(what, name, said, everything="--help-all" in words))
        return 0
    try:
        options = parsed(what, name, words)
    except SystemExit as end:  # a usage error, which has been printed
        return int(end.code or 0)
    with only_json() if _for_a_program(options) else contextlib.nullcontext():
        return int(what.run(options) or 0)


def _for_a_program(options: Any) -> bool:
    """Whether the result, or each event, is asked for as JSON."""
    asked = any(getattr(options, name, False) for name in ("json", "json_events"))
    return asked or getattr(options, "format", None) == "json"


def parsed(command: Command, name: str, words: list[str]) -> Any:
    """The options that the words say; values of flags and settings may come in any order."""
    settings = _settings(command, words)
    parser = _parser(command, name, settings)
    if words and words[0][:1] != "-" and all(action.option_strings for action in parser._actions):
        meant = f": did you mean --env {words[0]}?" if "--env" in parser._option_string_actions else ""
        raise ConfigError(f"shoal {name} takes options only, got {words[0]!r}{meant}")
    ordered = _positional_first(words, parser)
    try:
        return tyro.cli(command.options, args=ordered, prog=f"shoal {name}", **settings)
    except _NotANumberError as error:
        at = next(i for i, word in enumerate(words) if word == error.word or word.endswith(f"={error.word}"))
        flag = next((word.partition("=")[0] for word in words[at::-1] if word[:2] == "--"), "it")
        raise ConfigError(f"{flag} must be {error.wanted}, got {error.word!r}") from None


def every(entry: Entry, name: str) -> Iterator[tuple[str, Command]]:
    """All commands below an entry, each with the words that name it."""
    what = loaded(entry)
    if isinstance(what, Command):
        yield name, what
        return
    for inner, one in what.commands.items():
        yield from every(one, f"{name} {inner}".strip())


def flags_of(command: Command, name: str) -> list[str]:
    """The long flags of a command, with dashes."""
    actions = _parser(command, name, _settings(command, []))._actions
    return [flag.replace("_", "-") for a in actions for flag in a.option_strings if flag.startswith("--")]


# --- numbers
class _NotANumberError(Exception):
    """Goes through tyro, which would draw a box around a `ValueError`."""

    def __init__(self, word: str, wanted: str) -> None:
        super().__init__(word)
        self.word, self.wanted = word, wanted


def _whole(word: str) -> int:
    """What a word says, also in powers of ten.

    >>> _whole("12"), _whole("1e6")
    (12, 1000000)
    """
    try:
        return int(word)
    except ValueError:
        exact = Decimal(word)
        if exact != exact.to_integral_value() or exact.adjusted() > 100:
            raise ValueError(word) from None
        return int(exact)


_NUMBERS = tyro.constructors.ConstructorRegistry()


@_NUMBERS.primitive_rule
def _number(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """How an int or a float is read, or one that may be None."""
    kinds = set(get_args(info.type)) if get_origin(info.type) in (Union, UnionType) else {info.type}
    may_be_none = NoneType in kinds
    kind = (kinds - {NoneType}).pop() if len(kinds - {NoneType}) == 1 else None
    if kind not in (int, float):
        return None
    read, wanted, name = (_whole, "a whole number", "INT") if kind is int else (float, "a number", "FLOAT")

    def from_words(words: list[str]) -> Any:
        if may_be_none and words[0] == "None":
            return None
        try:
            return read(words[0])
        except (ValueError, ArithmeticError):
            raise _NotANumberError(words[0], wanted) from None

    return tyro.constructors.PrimitiveConstructorSpec(
        1,
        f"{{None}}|{name}" if may_be_none else name,
        from_words,
        lambda value: (
            (may_be_none and value is None) or isinstance(value, int if kind is int else int | float)
        ),
        lambda value: [str(value)],
    )


# --- words
def _settings(command: Command, words: list[str]) -> dict[str, Any]:
    default = {} if command.default is None else {"default": command.default(words)}
    return {"config": (tyro.conf.OmitArgPrefixes,), "registry": _NUMBERS, **default}


def _parser(command: Command, name: str, settings: Mapping[str, Any]) -> Any:
    with warnings.catch_warnings():  # what replaces it is not there yet
        warnings.simplefilter("ignore", DeprecationWarning)
        return tyro.extras.get_parser(command.options, prog=f"shoal {name}", **settings)


def _positional_first(words: Sequence[str], parser: Any) -> list[str]:
    """The words with those that belong to no flag in front, where tyro looks for them."""
    takes = {flag.replace("_", "-"): a.nargs for a in parser._actions for flag in a.option_strings}
    first: list[str] = []
    rest: list[str] = []
    at = 0
    while at < len(words):
        flag, equals, _ = words[at].partition("=")
        number = takes.get(flag.replace("_", "-"), 0) if flag.startswith("-") else None
        if number is None:
            first.append(words[at])
            at += 1
            continue
        end = at + 1
        if not equals:
            most = number if isinstance(number, int) else len(words)
            while end < len(words) and end - at - 1 < most and not words[end].startswith("--"):
                end += 1
        rest += words[at:end]
        at = end
    return [*first, *rest]


# --- help
def help_of(command: Command, name: str, words: list[str], *, everything: bool = False) -> str:
    """What `--help` prints: all flags where they fit on a screen, else those most wanted and the names of the others.

    Defaults may depend on the other `words` that were said; `everything` tells of all flags, however many they are.
    """
    width = min(shutil.get_terminal_size((110, 24)).columns, 110)
    flags, places = [], []  # with the names of each
    for action in _parser(command, name, _settings(command, words))._actions:
        names = [
            flag.replace("_", "-")
            for flag in action.option_strings
            if flag[:2] == "--" and (flag[:5] != "--no-" or action.default is True)
        ]
        if not action.option_strings:
            places.append((str(action.metavar or action.dest), action))
        elif names != ["--help"]:
            flags.append((names or [action.option_strings[-1].replace("_", "-")], action))
    of = [place if action.required or place[:1] == "[" else f"[{place}]" for place, action in places]
    about = _reflowed(inspect.getdoc(command.options) or "", width)
    head = [" ".join(["usage: shoal", name, *of, *(["[options]"] if flags else [])]), "", *about, ""]
    tail = command.more.rstrip().splitlines()
    told = [line for place, action in places if action.help for line in _told(place, action, width)]
    told += [
        line for names, action in flags for line in _told(_call(", ".join(names), action), action, width)
    ]
    whole = [*head, *(["options:", *told, ""] if told else []), *tail]
    if everything or len(whole) <= SCREEN or not command.wanted:
        return "\n".join(whole).rstrip()
    by_name = {one: action for names, action in flags for one in names}
    rows = [_told(_call(one, by_name[one]), by_name[one], width, lines=1)[0] for one in command.wanted]
    left = " ".join(names[0] for names, _ in flags if not {*names} & {*command.wanted})
    rest = textwrap.fill(left, width - 4, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    more = ["", f"more (`shoal {name} --help-all` tells all about each):", *rest.splitlines()]
    return "\n".join([*head, *tail, "", "options most wanted:", *rows, *more])


def _help_of_group(group: Group, name: str) -> str:
    lines = {
        verb: entry[1] if isinstance(entry, tuple) else (inspect.getdoc(entry.options) or "").split("\n")[0]
        for verb, entry in group.commands.items()
    }
    width = max(map(len, lines))
    usage = f"usage: shoal {name} COMMAND [options]     (shoal {name} COMMAND --help tells all about one)"
    rows = [f"  {verb:<{width}}  {line}" for verb, line in lines.items()]
    return "\n".join([usage, "", group.about, "", *rows, "", *group.more.rstrip().splitlines()]).rstrip()


def _reflowed(text: str, width: int) -> list[str]:
    """Paragraphs filled to the width; indented lines as they are."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        kept = any(line.startswith(" ") for line in paragraph.split("\n"))
        lines += paragraph.split("\n") if kept else textwrap.wrap(" ".join(paragraph.split()), width)
        lines.append("")
    return lines[:-1]


def _call(names: str, action: Any) -> str:
    kind = re.sub(r"\{None\}\||(?<=\{)None,", "", _plain(action.metavar))
    return f"{names} {kind}".strip()


def _told(call: str, action: Any, width: int, lines: int = 100) -> list[str]:
    """Lines about a flag, with its default where it has one to tell."""
    text = re.sub(
        r"\s*\((default: (None|False|)|required|optional)\)$", "", " ".join(_plain(action.help).split())
    )
    room = max(30, width - 34)
    name = call if len(call) <= 30 or lines > 1 else call.split()[0]
    if lines == 1:
        begin, default, end = text.partition(" (default: ")
        short = textwrap.shorten(begin, max(10, room - len(default + end)), placeholder=" …")
        return [f"  {name:<30}  {short}{default}{end}".rstrip()]
    wrapped = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    if len(name) > 30:
        return [f"  {name}", *(f"{'':<34}{line}" for line in wrapped)]
    return [f"  {name:<30}  {wrapped[0]}".rstrip(), *(f"{'':<34}{line}" for line in wrapped[1:])]


def _plain(text: Any) -> str:
    return re.sub(r"\[/?[a-z_ ]+\]|\x1b\[[0-9;]*m", "", str(text or ""))


# --- `shoal completion SHELL`: commands, their flags, run folders and names of configs
COMPLETION = """\
examples:
  source <(shoal completion bash)                                  now, in this shell
  shoal completion bash > ~/.local/share/bash-completion/completions/shoal
  shoal completion zsh > ~/.zfunc/_shoal
  shoal completion fish > ~/.config/fish/completions/shoal.fish
"""


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script that completes shoal's commands and flags; it is made from what they take."""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """for which it is"""


def complete(options: CompletionOptions) -> None:
    """Print the script."""
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](words()), end="")


COMMAND = Command(CompletionOptions, complete, COMPLETION)


def words() -> dict[str, list[str]]:
    """What can follow each command: its flags, or its own commands and theirs (`envs show`)."""
    from shoal.cli.main import COMMANDS

    found: dict[str, list[str]] = {}
    for first, entry in COMMANDS.items():
        with contextlib.suppress(ImportError):  # of an extra, without which the command cannot be called
            for name, command in every(entry, first):
                found[name] = sorted({*flags_of(command, name), "--help", "--help-all"})
                if name != first:
                    found.setdefault(first, []).append(name.removeprefix(f"{first} "))
    return found


def _bash(found: dict[str, list[str]]) -> str:
    commands = " ".join(name for name in found if " " not in name)
    groups = "|".join(dict.fromkeys(name.split()[0] for name in found if " " in name))
    cases = "\n".join(f'    "{name}") words="{" ".join(values)}" ;;' for name, values in found.items())
    return f"""\
_shoal() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words="" first="${{COMP_WORDS[1]}}" second="${{COMP_WORDS[2]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$current")); return
  fi
  local key="$first"
  case "$first" in {groups}) [ "$COMP_CWORD" -gt 2 ] && key="$first $second" ;; esac
  case "$key" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current") $(compgen -d -- "$current"))
}}
complete -o filenames -F _shoal shoal
"""


def _zsh(found: dict[str, list[str]]) -> str:
    return "#compdef shoal\nautoload -U +X bashcompinit && bashcompinit\n" + _bash(found)


def _fish(found: dict[str, list[str]]) -> str:
    names = [name for name in found if " " not in name]
    lines = [f"complete -c shoal -n __fish_use_subcommand -a '{' '.join(names)}'"]
    for name in names:
        flags = [word[2:] for word in found[name] if word.startswith("--")]
        inner = [word for word in found[name] if not word.startswith("--")]
        lines += [f"complete -c shoal -n '__fish_seen_subcommand_from {name}' -l {flag}" for flag in flags]
        if inner:
            lines.append(f"complete -c shoal -n '__fish_seen_subcommand_from {name}' -a '{' '.join(inner)}'")
    return "\n".join(lines) + "\n"
