"""Functions that make environments, as bytes for a process that may lack the modules they come from."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle

from shoal.core.errors import ConfigError
from shoal.vector.share import EnvFn


def pickled(env_fns: Sequence[EnvFn]) -> bytes:
    """The functions as bytes; what a fresh interpreter could not import travels by value.

    Raises:
        ConfigError: when a function holds something that cannot be sent to another process.
    """
    with by_value(env_fns):
        try:
            return cloudpickle.dumps(list(env_fns), protocol=5)  # type: ignore[no-any-return]
        except Exception as error:
            raise ConfigError(
                f"what makes the environments cannot be sent to a worker process ({error}); make it a function "
                f"of a module, without locks, files or generators in its closure, or use backend='serial'"
            ) from error


@contextlib.contextmanager
def by_value(env_fns: Sequence[Any]) -> Iterator[None]:
    """Have cloudpickle send what these need and a fresh interpreter could not import."""
    names = {name for fn in env_fns for name in _modules_of(fn)}
    modules = [sys.modules[name] for name in names if name in sys.modules and not _importable(name)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_of(fn: Any, depth: int = 0) -> set[str]:
    names: set[str] = set()
    if depth > 4:
        return names
    if hasattr(fn, "__module__") and isinstance(fn.__module__, str):
        names.add(fn.__module__)
    inner = [getattr(fn, "func", None), *getattr(fn, "args", ()), getattr(fn, "entry_point", None)]
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            inner.append(cell.cell_contents)
    for item in inner:
        if callable(item) or hasattr(item, "entry_point"):
            names |= _modules_of(item, depth + 1)
    return names


def _importable(name: str) -> bool:
    if name == "__main__":
        return True  # cloudpickle sends it by value anyway
    module = sys.modules[name]
    origin = getattr(module, "__file__", None)
    top = name.partition(".")[0]
    try:
        # A lookup on the path, as a fresh interpreter does it, not in sys.modules.
        spec = importlib.machinery.PathFinder.find_spec(top) if top in sys.modules else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return origin is None or top in sys.builtin_module_names
    if "." not in name:
        return spec.origin == origin or origin is None
    folders = list(spec.submodule_search_locations or ())
    parts = name.split(".")[1:]
    return origin is None or any(
        os.path.exists(os.path.join(folder, *parts) + ".py")
        or os.path.exists(os.path.join(folder, *parts, "__init__.py"))
        or os.path.dirname(origin) == os.path.join(folder, *parts[:-1])
        for folder in folders
    )
