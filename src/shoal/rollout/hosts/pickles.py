"""Sending to another process what a fresh interpreter could not import there: classes of scripts and of tests."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle

_LOCK = threading.RLock()
"""cloudpickle's list of modules is one for all threads."""
DEEPEST = 4


@contextlib.contextmanager
def by_value(items: Sequence[Any]) -> Iterator[None]:
    """Have cloudpickle send what these need and a fresh interpreter could not import."""
    names = {name for item in items for name in _modules_of(item)}
    modules = [sys.modules[name] for name in names if name in sys.modules and not _importable(name)]
    with _LOCK:
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def _modules_of(item: Any, depth: int = 0) -> set[str]:
    """The modules that functions, classes and instances inside `item` come from."""
    if depth > DEEPEST or item is None or isinstance(item, str | bytes | int | float):
        return set()
    if isinstance(item, dict):
        inner = [*item.keys(), *item.values()]
        names = set[str]()
    elif isinstance(item, list | tuple | set | frozenset):
        inner, names = list(item), set[str]()
    else:
        named = item if hasattr(item, "__qualname__") else type(item)
        names = {module} if isinstance(module := getattr(named, "__module__", None), str) else set()
        inner = [getattr(item, name, None) for name in ("func", "entry_point", "args", "keywords")]
        for cell in getattr(item, "__closure__", None) or ():
            with contextlib.suppress(ValueError):
                inner.append(cell.cell_contents)
    return names.union(*(_modules_of(part, depth + 1) for part in inner))


def _importable(name: str) -> bool:
    """Whether a fresh interpreter finds the module where this one did."""
    if name == "__main__":
        return True  # cloudpickle sends it by value anyway
    top, *parts = name.split(".")
    origin = getattr(sys.modules[name], "__file__", None)
    try:  # a lookup on the path, not in `sys.modules`
        spec = importlib.machinery.PathFinder.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return top in sys.stdlib_module_names
    if origin is None:
        return True
    if not parts:
        return bool(spec.origin == origin)
    stem = os.path.splitext(origin)[0].removesuffix(f"{os.sep}__init__")
    return any(os.path.join(folder, *parts) == stem for folder in spec.submodule_search_locations or ())
