"""What commands share: folders of runs, results as JSON, progress, and the words for envs and for agents' configs.

On a terminal work shows a bar with its ETA; elsewhere lines, and one of a heartbeat where nothing else was said.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from shoal.cli.command import Positional, default_of, flags_of_field
from shoal.cli.output import harmless, json_stream
from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError
from shoal.core.run_folder import finite, refuse_foreign
from shoal.viewer.markup import counted, duration

terminal = logging.getLogger("shoal.terminal")
HEARTBEAT = 30.0
"""Seconds without a word, off a terminal, after which a command says that it is still at work."""
FIRST_HEARTBEAT = 10.0
"""The same before there is a first result: whoever has just started something waits for a sign."""


def new_folder(name: str) -> Path:
    """`runs/<name>`, with a number behind it when that is taken."""
    first = Path("runs") / name
    number, path = 1, first
    while path.exists():
        number += 1
        path = first.with_name(f"{name}-{number}")
    return path


def newest_folder(name: str) -> Path:
    """The newest of `runs/<name>`, `runs/<name>-2`, …, to go on with.

    Raises:
        ConfigError: there is none.
    """
    first = Path("runs") / name
    numbered = re.compile(rf"{re.escape(name)}(-[0-9]+)?")
    inside = first.parent.iterdir() if first.parent.is_dir() else ()
    taken = [path for path in inside if numbered.fullmatch(path.name) and path.is_dir()]
    if not taken:
        raise ConfigError(
            f"there is no run {first} to go on with: start without --resume, or name it by --out"
        )
    return max(taken, key=lambda path: path.stat().st_mtime)


def run_folder(wanted: Path | str | None, name: str, resume: bool) -> Path:
    """The folder asked for; else `runs/<name>`, numbered when taken, or the newest of that name to resume.

    Raises:
        ConfigError: it holds files and no run.
    """
    if wanted is not None:
        refuse_foreign(Path(wanted))
        return Path(wanted)
    return newest_folder(name) if resume else new_folder(name)


def print_json(value: Any) -> None:
    """One line of JSON on standard output: an event of `--json-events`, or the result of `--json`."""
    print(json.dumps(finite(value), allow_nan=False), file=json_stream(), flush=True)


def came_to_an_end(trajectories: Sequence[Trajectory]) -> None:
    """Print how many episodes failed; that all did is an error."""
    from shoal.train.agent.run.playing import whole_episodes

    for note in whole_episodes(trajectories)[1]:
        print(harmless(note), file=sys.stderr)


def refuse_idle(options: Any, why: str, *names: str) -> None:
    """Raise a `ConfigError` that tells of an option that was said and would do nothing.

    Args:
        options: of a command, a dataclass.
        why: it does nothing, such as "with --diff".
        names: of its fields; one that is at its default was not said.
    """
    defaults = {field.name: field for field in fields(options)}
    for name in names:
        if getattr(options, name) != default_of(defaults[name]):
            called = "key=value" if name in ("overrides", "settings") else flags_of_field(name)[0]
            raise ConfigError(f"{called} does nothing {why}: leave it out")


def refuse_below(options: Any, **least: int) -> None:
    """Raise a `ConfigError` that names the flag of the first number that is less than its field may be."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise ConfigError(f"{flags_of_field(name)[0]} must be at least {bound}, got {value}")


class Progress:
    """How far a command is: a bar with its ETA on a terminal, plain lines and a heartbeat elsewhere.

    Args:
        what: the work in a word or two, such as "training".
        out: where it is said.
        heartbeat: seconds of silence, off a terminal, after which it is said that the work goes on.
        bar: False shows lines on a terminal too.
    """

    def __init__(
        self, what: str, out: Any = None, heartbeat: float | None = None, *, bar: bool = True
    ) -> None:
        self.what, self.out, self._wants_bar = what, out or sys.stdout, bar
        self.heartbeat = HEARTBEAT if heartbeat is None else heartbeat
        self.share = 0.0
        self.may_end_early = False
        """Whether the work can be done before its share is 1: what is left is then a limit."""
        self._began = self._said = time.monotonic()
        # when the first share was known: what came before is start-up
        self._since: tuple[float, float] | None = None
        self._bar: Any = None
        self._done = threading.Event()
        self.doing: Callable[[], str] = lambda: self.what  # what it is at now, which may change any time

    def __enter__(self) -> Progress:
        from rich.console import Console

        console = Console(file=self.out)
        if console.is_terminal and self._wants_bar:
            from rich.progress import BarColumn, ProgressColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar
            from rich.text import Text

            class Described(Bar):
                def get_renderables(bar) -> Iterator[Any]:  # noqa: N805
                    yield from super().get_renderables()
                    for task in bar.tasks:  # below it, where a narrow terminal breaks lines
                        yield Text(task.description or self.doing())

            class Left(ProgressColumn):
                def render(column, task: Any) -> Text:  # noqa: N805
                    seconds = self._seconds_left()
                    left = "-:--:--" if seconds is None else timedelta(seconds=round(seconds))
                    return Text(f"ETA {left}", style="progress.remaining")

            self._bar = Described(
                BarColumn(bar_width=16), TimeElapsedColumn(), Left(), console=console, transient=True,
                redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty(),
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0)
        else:
            self._thread = threading.Thread(target=self._beat, daemon=True, name="shoal-heartbeat")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._bar is not None:
            self._bar.stop()
        else:
            self._thread.join()

    @property
    def on_terminal(self) -> bool:
        """Whether there is a bar."""
        return self._bar is not None

    def at(self, share: float, description: str = "", line: str = "") -> None:
        """The work has come so far.

        Args:
            share: of the whole, from 0 to 1.
            description: beside the bar.
            line: what is said where there is no bar; nothing if not given.
        """
        self.share = share
        if self._since is None:
            self._since = (time.monotonic(), share)
        if self._bar is not None:
            self._bar.update(self._task, completed=share, description=description)
        elif line:
            self.say(line)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._said = time.monotonic()
        terminal.info("%s", line)  # into the log of a run
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self.out, flush=True)

    def left(self) -> str:
        """How long the rest may take at the pace so far; empty where that cannot be told yet, or nothing is left."""
        seconds = self._seconds_left()
        if seconds is None:
            return ""
        return f"{'at most' if self.may_end_early else 'about'} {duration(seconds)} left"

    def _seconds_left(self) -> float | None:
        if self._since is None or not self._since[1] < self.share < 1:
            return None
        began, share = self._since
        return (time.monotonic() - began) * (1.0 - self.share) / (self.share - share)

    def _beat(self) -> None:
        while not self._done.wait(max(0.05, self._said + self._pause() - time.monotonic())):
            if time.monotonic() - self._said >= self._pause():
                told = f"… {self.doing()}: {duration(time.monotonic() - self._began)} so far"
                self.say(", ".join(filter(None, [told, self.left()])))

    def _pause(self) -> float:
        return self.heartbeat if self._since else min(self.heartbeat, FIRST_HEARTBEAT)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Progress of countable work: the block gets a function of (done, total); off a terminal ten lines tell it."""
    step = max(1, -(-total // 10))
    with Progress(what, sys.stderr) as progress:

        def told(done: int, _: int) -> None:
            line = f"{what} {done} of {total}" if done % step == 0 or done == total else ""
            progress.at(done / max(1, total), f"{what} {done}/{total}", line)

        yield told


@contextmanager
def episodes_played(
    loading: str, folder: Path | str | None, *, bar: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """Progress of episodes: the block gets a function of (played, total), first those that a folder had kept.

    Ctrl-C in the block says what the folder keeps, and how to go on.

    Args:
        loading: what is done before that is known.
        folder: that may have kept some.
        bar: as of `Progress`.
    """
    state = ""
    with Progress(loading, sys.stderr, bar=bar) as progress:

        def told(played: int, total: int) -> None:
            nonlocal state
            state = f"{played} of {total} episodes"
            if progress.what == loading and played:
                kept = f"{counted(played, 'episode')} of {folder} were played before and are kept"
                print(kept, file=sys.stderr, flush=True)
            progress.what = f"playing, {played} of {total} episodes"
            if played:
                progress.at(played / total, f"{played}/{total} episodes")

        try:
            yield told
        except KeyboardInterrupt:
            if folder is None or not state:
                raise
            again = f"the same command with --out {shlex.quote(str(folder))} goes on"
            raise KeyboardInterrupt(f"{state} are kept in {folder}: {again}") from None


def wide_console() -> Any:
    """Standard output; a file or a pipe has no edge at which the cells of a table would break."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, 200)
    return console


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = (0,)
) -> None:
    """A table on standard output; columns are numbers, to the right, but for those in `text`."""
    from rich.box import SIMPLE
    from rich.table import Table

    made = Table(
        title=harmless(title) or None, title_justify="left", box=SIMPLE, collapse_padding=True, pad_edge=False
    )
    for place, name in enumerate(header):
        made.add_column(harmless(name), justify="left" if place in text else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(harmless, row))
    wide_console().print(made)


# --- what a command line says of an environment
Settings = Annotated[tuple[str, ...], Positional("[KEY=VALUE ...]")]
EnvKwargs = Annotated[
    tuple[str, ...], Parameter(help="Arguments of the env as key=value; values are JSON or plain text.")
]
Wrappers = Annotated[
    tuple[str, ...],
    Parameter(help="A wrapper for the env as module:Name; repeatable, the first is innermost."),
]


def arguments_of(settings: tuple[str, ...], env_kwargs: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of an env, given as settings and by `--env-kwargs`."""
    from shoal.envs.catalogue import parse_env_kwargs

    found, more = parse_settings(settings), parse_env_kwargs(env_kwargs)
    for key in more:
        if key in found:
            raise ConfigError(f"the argument {key!r} of the environment was given twice")
    return {**found, **more}


def parse_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    """Settings from `key=value` words; values are YAML, and `a.b=c` sets b inside a.

    >>> parse_settings(("dim_room=[7,7]", "kwargs.fast=true"))
    {'dim_room': [7, 7], 'kwargs': {'fast': True}}
    """
    from omegaconf import OmegaConf

    for setting in settings:
        if "=" not in setting:
            raise ConfigError(f"settings must be key=value, got {setting!r}")
    values = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)))
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


# --- what plays or trains agents: a config by name, and Hydra's `key=value` overrides
_FILES = (item.name for item in resources.files("shoal.configs").iterdir())
_CONFIGS = sorted(name.removesuffix(".yaml") for name in _FILES if name.endswith(".yaml"))
ConfigName = Parameter(help=f"A config that comes with shoal ({', '.join(_CONFIGS)}), or your own.")


@dataclass(frozen=True)
class SettingsOptions:
    """Settings to change, and the flags that all commands with settings have."""

    overrides: Annotated[tuple[str, ...], Positional("[KEY=VALUE ...]")] = ()
    """Settings to change, as in Hydra: +key=value adds one, ~key removes one."""
    run_dir: str | None = None
    """Run folder (run_dir=FOLDER)."""
    seed: int | None = None
    """Random seed of the run (seed=N)."""
    device: str | None = None
    """Device of the model (engine.device=NAME): cpu, cuda, cuda:1, mps."""
    json: bool = False
    """Print the summary as JSON on standard output, and all else on standard error."""

    def settings(self, device: str = "engine.device") -> list[str]:
        """The settings, with `--seed`, `--device` (whose key is given) and `--resume` among them.

        Raises:
            ConfigError: a flag is given as a setting, too.
        """
        flags = {"seed": self.seed, device: self.device, "resume": getattr(self, "resume", None) or None}
        words = list(self.overrides)
        for key, value in flags.items():
            if value is not None:
                refuse_twice(key, words)
                words.append(f"{key}={str(value).lower() if value is True else value}")
        return words


@dataclass(frozen=True)
class AgentOptions(SettingsOptions):
    """What names a run of agents: a config, and settings to change."""

    config_name: Annotated[str, ConfigName] = "demo"
    config_dir: Path | None = None
    """Folder with your own YAML configs, and with the Python files of the envs that they name."""


def composed(options: AgentOptions, further: Sequence[str] = ()) -> Any:
    """The config that the command line names, an `AgentConfig`; flags become settings.

    Raises:
        UnknownNameError: there is no such config; `further` ones, which the command takes too, are named as well.
    """
    from shoal.train.agent.config import compose_config, config_names, refuse_unknown_config

    if options.config_dir is not None and not options.config_dir.is_dir():
        raise ConfigError(f"--config-dir must be a folder, got {options.config_dir}")
    if options.config_dir is not None and (folder := str(options.config_dir.resolve())) not in sys.path:
        sys.path.append(folder)  # an env of "module:Class" may lie beside its config
    for word in options.overrides:
        if "=" not in word and not word.startswith("~"):
            meant = f": --config-name {word}" if word in config_names() else ""
            raise ConfigError(
                f"settings are given as key=value (such as seed=1), got {word!r}; a config is named by "
                f"--config-name{meant}"
            )
    refuse_unknown_config(options.config_name, options.config_dir, further)
    words = options.settings()
    own = options.config_dir / f"{options.config_name}.yaml" if options.config_dir is not None else None
    _refuse_secrets([*words, own.read_text("utf-8", "replace") if own and own.is_file() else ""])
    config = compose_config(options.config_name, words, options.config_dir)
    if own is not None and own.is_file() and "next_step" not in _warn_of_plain_defaults(own):
        config = replace(config, next_step="")  # that of the config which it builds on is about another task
    if options.run_dir is not None:
        refuse_twice("run_dir", words)
        config = replace(config, run_dir=options.run_dir)
    if options.config_dir is not None and any(options.config_dir.glob("*.py")):
        # whoever evaluates, replays or exports the run finds its envs there
        config = replace(config, imports=[*config.imports, f"{options.config_dir.resolve()}/"])
    refuse_device(config.engine.device)
    return config


def _warn_of_plain_defaults(path: Path) -> dict[str, Any]:
    """Print it where a config of the user's builds on no other one, and leaves settings out; its settings."""
    from shoal.core.configuration import read_settings
    from shoal.train.agent.config import AgentConfig

    values = read_settings(path)
    parts = [field.name for field in fields(AgentConfig) if is_dataclass(field.default)]
    lacking = [part for part in parts if part not in values]
    if "defaults" not in values and lacking:
        print(
            f"WARNING: {path} has no `defaults:` list, so {', '.join(lacking)} and all else that it leaves out have "
            f"the plain defaults of the settings; `defaults: [base, _self_]` as its first line builds on base.yaml",
            file=sys.stderr,
        )
    return values


def _refuse_secrets(texts: Sequence[str]) -> None:
    """Settings are printed, and written into config.yaml and names of folders: no place for a secret's value."""
    for name in re.findall(r"\$\{\s*oc\.(?:env|decode)\s*:\s*([^,}\s]+)", "\n".join(texts)):
        if re.search(r"key|token|secret|passw|credential", name, re.IGNORECASE):
            raise ConfigError(
                f"${{oc.env:{name}}} would write what {name} holds into config.yaml: name the variable instead, "
                f"such as engine.server.api_key_env={name}"
            )


Tracker = Literal["none", "tensorboard", "wandb"]


def tracking(tracker: str | None, project: str | None) -> tuple[bool | None, str | None]:
    """Whether TensorBoard files are written (None: as the settings say), and the project on Weights & Biases, if any.

    Args:
        tracker: of `--tracker`; "none" wins over all else.
        project: of `--wandb`.

    >>> tracking(None, "mine"), tracking("wandb", None), tracking("none", "mine")
    ((None, 'mine'), (False, 'shoal'), (False, None))
    """
    if tracker == "none":
        return False, None
    return None if tracker is None else tracker == "tensorboard", project or (
        "shoal" if tracker == "wandb" else None
    )


def refuse_twice(key: str, overrides: Sequence[str]) -> None:
    """Raise a `ConfigError` if a setting is given that a flag gives, too."""
    if any(word.partition("=")[0].lstrip("+") == key for word in overrides):
        raise ConfigError(f"{key} is given twice, as a setting and as a flag: leave one of them out")


def refuse_device(device: str) -> None:
    """Refuse a device that torch does not know, or that this machine does not have.

    Raises:
        ConfigError: names the devices that there are.
    """
    kind = device.partition(":")[0]
    if kind == "cpu":
        return
    import torch

    cuda = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    have = ["cpu", *(f"cuda:{number}" for number in cuda)]
    have += ["mps"] if torch.backends.mps.is_available() else []
    known = {*have, *(name.partition(":")[0] for name in have), "auto"}
    if device not in known:
        raise ConfigError(
            f"device={device} is not available here: torch can use {', '.join(have)}; see shoal doctor"
        )


class _ToStandardError(logging.Handler):
    """Writes to what is standard error at that moment: above the bar, while there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(harmless(self.format(record)), file=sys.stderr, flush=True)
        except Exception:  # as handlers of the standard library do
            self.handleError(record)


def show_warnings(form: str = "%(levelname)s %(name)s: %(message)s") -> None:
    """Send the library's warnings to standard error; they may quote what an env or a file says."""
    handler = _ToStandardError()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(form))
    terminal.setLevel(logging.INFO)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
