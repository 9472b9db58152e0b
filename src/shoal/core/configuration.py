"""Frozen dataclasses from YAML-like mappings, checked once: unknown keys and wrong types are errors with a path."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from shoal.core.errors import ConfigError, did_you_mean

C = TypeVar("C")
MOST_SECONDS = 1e6
"""Of a time limit; the system cannot wait much longer in one go."""


def from_mapping(kind: type[C], values: Mapping[str, Any], path: str = "") -> C:
    """A config dataclass from a nested mapping.

    Raises:
        ConfigError: an unknown key (with the closest known one), a value of the wrong type, or a value that the
            dataclass itself refuses; the message starts with the path of the key.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{path.removesuffix('.') or kind.__name__} must be a mapping of settings, got {values!r}"
        )
    built = convert_fields(kind, values, path, lambda key: f"unknown key {path + key!r}")
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        if item.init and item.default is item.default_factory and item.name not in built:  # it has no default
            raise ConfigError(f"{path}{item.name} is missing")
    try:
        return kind(**built)
    except ValueError as error:
        named = re.match(r"[a-z_]\w*", str(error))  # the message of a dataclass may begin with a field's name
        where = path if named and named[0] in built else f"{path.removesuffix('.')}: "
        raise ConfigError(f"{where}{error}" if path else str(error)) from error


def convert_fields(
    kind: type, values: Mapping[str, Any], path: str, unknown: Callable[[str], str]
) -> dict[str, Any]:
    """The values of a config dataclass, each as its field's type; `unknown` says what is wrong with a key.

    What a mapping of settings leaves out is as in the default of its field.
    """
    hints, defaults = _hints(kind), {item.name: item.default for item in dataclasses.fields(kind)}
    converted: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            told = unknown(str(key))
            named = path if f"{path}{key}" in told else ""
            raise ConfigError(f"{told}.{did_you_mean(str(key), hints, named)}")
        if isinstance(value, Mapping):
            value = {**_own_defaults(defaults[key]), **value}
        converted[key] = _convert(hints[key], value, f"{path}{key}")
    return converted


def _own_defaults(default: Any) -> dict[str, Any]:
    """The settings that are the default of a field, if they are others than those of their class."""
    if not dataclasses.is_dataclass(default) or isinstance(default, type):
        return {}
    items = [item for item in dataclasses.fields(default) if item.init]
    whole = all(item.default is not item.default_factory for item in items)  # or one has to be given
    if whole and default == type(default)():
        return {}
    return {item.name: getattr(default, item.name) for item in items}


@lru_cache(maxsize=256)
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


def check_fields(config: Any, path: str = "") -> None:
    """Refuse what the types of a dataclass do not allow, in one that was made in Python, and numbers without end.

    NumPy's numbers in it become Python's, which files and workers take.

    Raises:
        ConfigError: an unknown word, a value of the wrong type, NaN or infinity, a count beyond 64 bits (seeds are
            none); the message has the path of the key.
    """
    for name, hint in _hints(type(config)).items():  # type: ignore[arg-type]
        value = getattr(config, name)
        _check(hint, value, f"{path}{name}")
        if isinstance(value, np.generic):
            object.__setattr__(config, name, value.item())


def check_settings(settings: Any, seconds: Collection[str] = (), **least: float) -> None:
    """Refuse settings that cannot be meant, be they of YAML or of Python.

    Args:
        settings: a dataclass.
        seconds: its time limits.
        **least: the least that a number may be.

    Raises:
        ConfigError: a number is too small, NaN or infinite, a word unknown, or a value of another type.
    """
    for name, hint in _hints(type(settings)).items():  # type: ignore[arg-type]
        value = getattr(settings, name)
        if not isinstance(value, int | float | np.number):
            continue
        end = ", or null" if type(None) in typing.get_args(hint) else ""
        if name in seconds and not value > 0:
            raise ConfigError(f"{name} must be positive{end}, got {value}")
        if name in seconds and value > MOST_SECONDS:
            raise ConfigError(f"{name} must be at most {MOST_SECONDS:.0f} seconds{end}, got {value}")
        if name in least and not value >= least[name]:
            raise ConfigError(f"{name} must be at least {least[name]}{end}, got {value}")
    check_fields(settings)


def _check(hint: Any, value: Any, path: str) -> None:
    arguments = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, hint):  # type: ignore[arg-type]
            raise ConfigError(f"{path} must be {hint.__name__} settings, got {value!r}")  # type: ignore[union-attr]
        check_fields(value, f"{path}.")
    elif isinstance(value, Mapping) and len(arguments) == 2 and dataclasses.is_dataclass(arguments[1]):
        for name, item in value.items():
            _check(arguments[1], item, f"{path}.{name}")
    elif isinstance(value, float | np.floating) and not math.isfinite(value):
        raise ConfigError(f"{path} must be a finite number, got {value}")
    else:
        _convert(hint, value, path)
        counts = int in (hint, *arguments) and not path.endswith("seed")
        if counts and isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{path} must be a whole number of 64 bits, got {value}")


def to_mapping(config: Any) -> dict[str, Any]:
    """The nested plain values of a config dataclass, as YAML or JSON can hold them."""
    return msgspec.to_builtins(config, enc_hook=_plain)  # type: ignore[no-any-return]


def as_yaml(values: Mapping[str, Any]) -> str:
    """Settings as `yaml.safe_load` reads them: a `${` in a text is text, which OmegaConf would take for a reference."""
    import yaml

    dumper = type("NoAliases", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    text: str = yaml.dump(dict(values), Dumper=dumper, sort_keys=False, allow_unicode=True)
    return text


def field_notes(config: type) -> dict[str, str]:
    """What stands in the source below each field of a dataclass, on one line; inherited fields are among them."""
    notes: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        try:
            classes = _classes(inspect.getsource(sys.modules[kind.__module__]))
        except (KeyError, OSError, TypeError, SyntaxError):  # there is no source
            continue
        for item, note in pairwise(classes.get(kind.__qualname__, [])):
            is_field = isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            if is_field and isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
                notes[item.target.id] = " ".join(str(note.value.value).split())
    return notes


@lru_cache(maxsize=32)
def _classes(source: str) -> dict[str, list[Any]]:
    """What stands in each class of a module; `inspect.getsource` would parse the whole module for each class."""
    return {item.name: item.body for item in ast.parse(source).body if isinstance(item, ast.ClassDef)}


def as_commented_yaml(config: Any, reasons: Mapping[str, str] | None = None) -> str:
    """A config dataclass as `as_yaml` writes it, with the meaning of each setting as a comment above it.

    Args:
        config: the settings.
        reasons: by the path of a setting, why it has its value; it stands below the meaning.
    """
    return "".join(f"{line}\n" for line in _commented(config, reasons or {}))


def _commented(config: Any, reasons: Mapping[str, str], path: str = "") -> Iterator[str]:
    notes, plain = field_notes(type(config)), to_mapping(config)
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        note = notes.get(item.name) or first_line(value)
        for text in (note, reasons.get(path + item.name, "")):
            yield from textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ")
        if dataclasses.is_dataclass(value):
            yield f"{item.name}:"
            yield from _indented(_commented(value, reasons, f"{path}{item.name}."))
        elif isinstance(value, dict) and value and all(map(dataclasses.is_dataclass, value.values())):
            yield f"{item.name}:"
            for name, inner in value.items():
                yield from _indented([as_yaml({name: {}}).removesuffix(" {}\n")])
                yield from _indented(_indented(_commented(inner, {})))
        else:
            yield from as_yaml({item.name: plain[item.name]}).removesuffix("\n").split("\n")


def first_line(section: Any) -> str:
    """What the docstring of a section of settings begins with; "" of any other value."""
    documented = (inspect.getdoc(type(section)) or "") if dataclasses.is_dataclass(section) else ""
    return documented.partition("\n")[0]


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" if line else line for line in lines)


MOST_BYTES, MOST_VALUES = 2**20, 20_000
"""Of a file of settings; more is a mistake or an attack (aliases of aliases), and takes minutes to use."""


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file; {} of an empty one.

    Raises:
        ConfigError: it is broken, or no mapping, or larger than settings are (with all aliases in full).
    """
    import yaml

    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{path} must be at most {MOST_BYTES} bytes, got {path.stat().st_size}")
    try:
        values = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path} is not YAML, and cannot be read: {why}") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path} must be a mapping of settings, got {type(values).__name__}")
    todo: list[Any] = [values]
    for _ in range(MOST_VALUES):
        if not todo:
            return {str(key): value for key, value in (values or {}).items()}
        value = todo.pop()
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    raise ConfigError(f"{path} must hold at most {MOST_VALUES} values, aliases in full, got more")


def first_change(old: Any, new: Any, path: str = "") -> str:
    """The first setting, by name, in which two mappings differ, in words; "" if they are equal.

    >>> first_change({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    'a.c was 2 and is 3'
    >>> first_change({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]})
    'a.1.b was 2 and is 3'
    """
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            found = first_change(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return ""
    return "" if old == new else f"{path} was {old!r} and is {new!r}"


def plain_values(config: Any) -> Any:
    """What a config of Hydra's (OmegaConf) holds, in Python's mappings and lists; anything else as it is."""
    omegaconf = sys.modules.get("omegaconf")  # a config of it exists only where it is imported
    if omegaconf is not None and omegaconf.OmegaConf.is_config(config):
        return omegaconf.OmegaConf.to_container(config, resolve=True)
    return config


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a config cannot hold {value!r}: it must be something that YAML can")


def _holds_settings(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(map(_holds_settings, typing.get_args(hint)))


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            check_fields(value, f"{path}.")
            return value
        return from_mapping(hint, value, f"{path}.")  # type: ignore[arg-type]
    if _holds_settings(hint):  # whose unknown keys msgspec would pass over
        if origin in (typing.Union, types.UnionType):
            for option in filter(_holds_settings, arguments):
                listed = typing.get_origin(option) in (list, tuple)
                made = dataclasses.is_dataclass(option) and isinstance(value, option)  # type: ignore[arg-type]
                if made or isinstance(value, list | tuple if listed else Mapping):
                    return _convert(option, value, path)
        elif origin is dict:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path} must be a mapping of names to settings, got {value!r}")
            return {str(name): _convert(arguments[1], item, f"{path}.{name}") for name, item in value.items()}
        elif origin in (list, tuple) and isinstance(value, list | tuple):
            return origin(_convert(arguments[0], item, f"{path}.{at}") for at, item in enumerate(value))
    plain = _plain(value) if isinstance(value, np.generic) else value
    try:
        return msgspec.convert(plain, hint)
    except TypeError:  # a type that msgspec does not know, such as a function: the config looks after it
        return value
    except msgspec.ValidationError as error:
        words = [repr(word) for option in (hint, *arguments) for word in _words(option)]
        if isinstance(value, str) and words:
            words = ["a number"] * bool({int, float} & {*arguments}) + words
            choices = f"{', '.join(words[:-1])} or {words[-1]}"
            raise ConfigError(f"{path} must be {choices}, got {value!r}") from error
        if limit := re.match(r"Expected `\w+` (>|<)= (-?[\d.]+(?:e[+-]?\d+)?)", str(error)):
            least_or_most = "least" if limit[1] == ">" else "most"
            raise ConfigError(
                f"{path} must be at {least_or_most} {limit[2].removesuffix('.0')}, got {value!r}"
            ) from error
        expected = re.sub(r"(, got `[a-z]+`)?( - at `\$`)?$", "", str(error))
        raise ConfigError(f"{path}: {expected}, got {value!r}") from error


def _words(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
