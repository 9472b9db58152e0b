"""What a command is: a dataclass of options and the function that runs it. cyclopts parses words and prints help."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from decimal import Decimal, InvalidOperation
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import cyclopts
from cyclopts import App, Parameter

from shoal.cli.output import only_json
from shoal.core.configuration import field_notes
from shoal.core.errors import ConfigError, unknown_name

HELP = ("-h", "--help")
MOST_USED = cyclopts.Group("Most used options", sort_key=1)
OTHERS = cyclopts.Group("All other options", sort_key=2)
OPTIONS = cyclopts.Group("Options", sort_key=1)
_OUT = ("--out", "--run-dir")
FLAGS = {
    "out": _OUT, "run_dir": _OUT, "graph_path": (*_OUT, "--graph-path"), "source": ("--from",),
    "wrappers": ("--wrapper",), "env_config": ("--env-kwargs", "--env-config"), "follow": ("--follow", "-f"),
}  # fmt: skip
"""Fields with other flags than their names."""


@dataclass(frozen=True)
class Positional:
    """Marks a field that is given by its place, such as RUN in `shoal show RUN`; a tuple takes all other words."""

    name: str


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        options: a dataclass. `--help` prints its docstring, and the line below each field.
        run: runs the command and returns the exit status, None for 0.
        more: text at the end of `--help`: examples, exit statuses.
        most_used: about ten flags that `--help` lists first.
        default: makes the options to start from, where they depend on what is given (a preset, a run to resume); it
            gets what is given, by the names of the fields.
    """

    options: Any
    run: Callable[[Any], int | None]
    more: str = ""
    most_used: tuple[str, ...] = ()
    default: Callable[[Mapping[str, Any]], Any] | None = None


@dataclass(frozen=True)
class Group:
    """Commands about one thing. One in another module is `(module, line of help)` and imported when it is used."""

    about: str
    commands: Mapping[str, Command | tuple[str, str]]
    more: str = ""


Entry = Command | Group | tuple[str, str]


def load(entry: Entry) -> Command | Group:
    """The command, imported from its module's `COMMAND` where needed."""
    if isinstance(entry, tuple):
        found: Command | Group = importlib.import_module(entry[0]).COMMAND
        return found
    return entry


def run(entry: Entry, name: str, words: list[str]) -> int:
    """Run a command, or one of a group, with the words that follow its name; returns the exit status."""
    what = load(entry)
    if isinstance(what, Group):
        if not words or words[0] in (*HELP, "help"):
            app_of(what, name).help_print([])
            return 0
        if words[0] not in what.commands:
            raise unknown_name(f"{name} command", words[0], what.commands)
        return run(what.commands[words[0]], f"{name} {words[0]}", words[1:])
    if {*HELP} & {*words}:
        said = [word for word in words if word not in HELP]  # the defaults may depend on them
        app_of(what, name, said).help_print([])
        return 0
    options = parse(what, name, words)
    as_json = any(getattr(options, name, False) for name in ("json", "json_events"))
    with only_json() if as_json else contextlib.nullcontext():
        return int(what.run(options) or 0)


def parse(command: Command, name: str, words: Sequence[str]) -> Any:
    """The options given by the words.

    Raises:
        ConfigError: the words are no valid options; one line says why.
    """
    given = _given(command, name, words)
    default = None if command.default is None else command.default(given)
    return _filled(command.options, default, given)


def _given(command: Command, name: str, words: Sequence[str]) -> dict[str, Any]:
    """What the words give, by the names of the fields."""
    app = _app_of_command(command, name, None)
    try:
        return dict(app.parse_args(list(words), exit_on_error=False, print_error=False)[1].arguments)
    except cyclopts.UnusedCliTokensError as error:
        word = (error.unused_tokens or [""])[0]
        flags, (key, equals, value) = flags_of(command, name), word.partition("=")
        flag = f"--{key.replace('_', '-')}"
        meant = ""
        if equals and flag in flags:
            meant = f": did you mean {flag} {value}?"
        elif word == words[0] and (named := {"--env", "--skills"} & set(flags)):
            meant = f": did you mean {named.pop()} {word}?"
        raise ConfigError(f"shoal {name} does not take {word!r}{meant}") from None
    except cyclopts.CycloptsError as error:
        told = " ".join(str(error).split())
        dotted = re.search(r"Unknown option: --(\w+\.[\w.]+)", told)
        if dotted and "--config-name" in flags_of(command, name):
            told = f"{told} Settings are given without dashes: {dotted[1]}=VALUE"
        raise ConfigError(told) from None


def every(entry: Entry, name: str) -> Iterator[tuple[str, Command]]:
    """All commands below an entry, each with its full name."""
    what = load(entry)
    if isinstance(what, Command):
        yield name, what
        return
    for inner, one in what.commands.items():
        yield from every(one, f"{name} {inner}".strip())


def flags_of_field(name: str) -> tuple[str, ...]:
    """The flags of a field of some options, with dashes."""
    return FLAGS.get(name, (f"--{name.replace('_', '-')}",))


def flags_of(command: Command, name: str) -> list[str]:
    """The flags of a command, with dashes."""
    found = app_of(command, name).assemble_argument_collection()
    return [flag for argument in found for flag in argument.names if flag.startswith("--")]


def app_of(entry: Entry, name: str, words: Sequence[str] = (), *, nested: bool = False) -> App:
    """The cyclopts application of a command or a group, which prints its help and its completion.

    Args:
        entry: what it is of.
        name: of the command, without `shoal`.
        words: defaults in the help may depend on them.
        nested: also load commands of other modules, whose options completion needs.
    """
    if isinstance(entry, tuple) and not nested:
        return App(_shown_name(name), help=entry[1])
    what = load(entry)
    if isinstance(what, Command):
        given: dict[str, Any] = {}
        with contextlib.suppress(ConfigError):  # help is printed whatever else is wrong
            given = _given(what, name, words) if words else {}
        return _app_of_command(what, name, None if what.default is None else what.default(given))
    app = App(_shown_name(name), help=what.about, help_epilogue=_narrow(what.more), **_LOOK)
    for place, (verb, inner) in enumerate(what.commands.items()):
        one = app_of(inner, f"{name} {verb}", nested=nested)
        one.sort_key = place
        app.command(one, name=verb)
    return app


def _narrow(more: str) -> str:
    """The end of a help, with what is said of an example below it if 80 columns do not hold both."""
    if all(len(line) <= 80 for line in more.splitlines()):
        return more
    return re.sub(r"^(  \S.*?) {2,}(\S.*)$", r"\1\n      \2", more, flags=re.MULTILINE)


_LOOK: dict[str, Any] = {"help_format": "plaintext", "version_flags": (), "help_flags": ()}


def _shown_name(name: str) -> str:
    return f"shoal {name}".strip()


def _app_of_command(command: Command, name: str, default: Any) -> App:
    def call(*args: Any, **kwargs: Any) -> None:
        """Stands for the command; only its signature is used."""

    call.__signature__ = inspect.Signature(list(_parameters(command, default)))  # type: ignore[attr-defined]
    about = "\n\n".join(
        text if "\n " in text else " ".join(text.split())
        for text in (inspect.getdoc(command.options) or "").split("\n\n")
    )
    look = Parameter(negative_iterable=(), consume_multiple=True)
    app = App(
        _shown_name(name), help=about, help_epilogue=_narrow(command.more), default_parameter=look, **_LOOK
    )
    app.default(call)
    return app


# --- from a dataclass to a signature, and from what was given back to the dataclass
@dataclass(frozen=True)
class _Option:
    """A field of the options, or of a dataclass inside them."""

    name: str
    kind: Any
    default: Any
    help: str
    marks: tuple[Any, ...]

    @property
    def place(self) -> str | None:
        """The name of its place, if it has one."""
        return next((mark.name for mark in self.marks if isinstance(mark, Positional)), None)

    @property
    def flags(self) -> tuple[str, ...]:
        """What it is given by, if it has no place."""
        return flags_of_field(self.name)


def _options(kind: Any, default: Any) -> Iterator[_Option]:
    """All fields, with those of dataclasses inside."""
    hints, plain, notes = get_type_hints(kind, include_extras=True), get_type_hints(kind), field_notes(kind)
    for field in fields(kind):
        hint = plain[field.name]  # without the marks of what is inside, too
        marks = getattr(hints[field.name], "__metadata__", ())
        value = getattr(default, field.name) if default is not None else default_of(field)
        if is_dataclass(hint):
            yield from _options(hint, value)
        elif not any(isinstance(mark, Parameter) and mark.parse is False for mark in marks):
            yield _Option(field.name, hint, value, notes.get(field.name, ""), marks)


def default_of(field: Field[Any]) -> Any:
    """The default of a field, `MISSING` if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _parameters(command: Command, default: Any) -> Iterator[inspect.Parameter]:
    """The parameters of a function with these options: places first, then flags."""
    found, kinds = list(_options(command.options, default)), inspect.Parameter
    for one in found:
        if one.place is not None:
            several = get_origin(one.kind) is tuple  # takes all words that are left, and has no default
            look = Parameter(
                name=one.place, help=one.help, show_default=not several and _is_told(one.default)
            )
            if several:
                yield kinds(one.name, kinds.VAR_POSITIONAL, annotation=Annotated[get_args(one.kind)[0], look])
            else:
                value = kinds.empty if one.default is MISSING else one.default
                kind = kinds.POSITIONAL_ONLY
                yield kinds(one.name, kind, default=value, annotation=Annotated[one.kind, look])
    flags = [one for one in found if one.place is None]
    rank = {flag: place for place, flag in enumerate(command.most_used)}
    for one in sorted(flags, key=lambda one: min(rank.get(flag, len(rank)) for flag in one.flags)):
        group = MOST_USED if {*one.flags} & rank.keys() else OTHERS if rank else OPTIONS
        look = Parameter(
            name=one.flags,
            group=group,
            help=one.help,
            converter=_converter(one.kind),
            allow_repeating=get_origin(one.kind) is not tuple or int not in get_args(one.kind),
            show_default=_is_told(one.default),
        )
        own = (mark for mark in one.marks if isinstance(mark, Parameter))
        yield kinds(
            one.name, kinds.KEYWORD_ONLY, default=one.default, annotation=Annotated[one.kind, look, *own]
        )


def _is_told(default: Any) -> bool:
    """Whether help shows a default: "off" and "none" go without saying."""
    return default is not False and default is not MISSING and default not in (None, "", ())


def _filled(kind: Any, default: Any, given: Mapping[str, Any]) -> Any:
    """The options with what was given, and else the defaults."""
    hints, values = get_type_hints(kind), {}
    for field in fields(kind):
        value = getattr(default, field.name) if default is not None else default_of(field)
        if is_dataclass(hints[field.name]):
            values[field.name] = _filled(hints[field.name], value, given)
        else:
            values[field.name] = given.get(field.name, value)
    return kind(**values)


def _converter(kind: Any) -> Callable[[Any, Sequence[cyclopts.Token]], Any] | None:
    """What reads an int, one that may be None, or several; cyclopts reads all else."""
    parts = {*get_args(kind)} or {kind}
    if parts - {NoneType, Ellipsis} != {int}:
        return None

    def read(_: Any, tokens: Sequence[cyclopts.Token]) -> Any:
        several, values = get_origin(kind) is tuple, []
        for token in tokens:
            for word in token.value.split(",") if several else [token.value]:  # "64,64" is "64 64"
                try:
                    values.append(None if NoneType in parts and word == "None" else whole(word))
                except ValueError as error:
                    raise cyclopts.CoercionError(msg=f"{token.keyword} {error}") from None
        return tuple(values) if several else values[0]

    return read


def whole(word: str) -> int:
    """A whole number, also in powers of ten.

    >>> whole("12"), whole("1e6")
    (12, 1000000)
    """
    try:
        exact = Decimal(word)
        if exact == exact.to_integral_value() and exact.adjusted() < 100:
            return int(exact)
    except (InvalidOperation, OverflowError):
        pass
    raise ValueError(f"must be a whole number, got {word!r}")


# --- `shoal completion SHELL`
COMPLETION = """\
examples:
  shoal completion bash > ~/.local/share/bash-completion/completions/shoal
  shoal completion zsh > ~/.zfunc/_shoal
  shoal completion fish > ~/.config/fish/completions/shoal.fish
"""


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script that completes shoal's commands and options in a shell."""

    shell: Annotated[Literal["bash", "zsh", "fish"], Positional("SHELL")]
    """The shell."""


def complete(options: CompletionOptions) -> None:
    """Print the script."""
    from shoal.cli.main import COMMANDS

    root = App("shoal", version_flags=("--version",))
    for name, entry in COMMANDS.items():
        try:
            root.command(app_of(entry, name, nested=True), name=name)
        except ImportError:  # of an extra, without which the command cannot be called
            continue
    print(root.generate_completion(prog_name="shoal", shell=options.shell), end="")


COMMAND = Command(CompletionOptions, complete, COMPLETION)
