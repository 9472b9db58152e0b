"""Modules and files of users and installed packages, imported so that what they register is known by its name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.core.errors import ConfigError

GROUP = "shoal.extensions"
"""The group of entry points in which installed packages name modules that register what is theirs."""
_IMPORTS = threading.RLock()


def package_of(entry: importlib.metadata.EntryPoint) -> str:
    """The name of the package that an entry point is of."""
    return "(unknown)" if entry.dist is None else entry.dist.name


def import_extensions(names: Sequence[str]) -> None:
    """Import modules and files of the user (`imports:`), and what installed packages name, so that they register.

    One that fails can be imported again, and registers its names again. Threads import one after the other.

    Raises:
        ConfigError: there is no such module or file, or it fails.
    """
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"imports must be a list of modules and files, got {names!r}")
    with _IMPORTS:
        for entry in importlib.metadata.entry_points(group=GROUP):
            source = f"the entry point {entry.name!r} of {package_of(entry)}"
            _import(source, entry.load)
        for name in names:
            if "/" in name.replace(os.sep, "/") and not name.endswith(".py"):  # a folder to find modules in
                if os.path.isdir(name) and (folder := os.path.abspath(name)) not in sys.path:
                    sys.path.append(folder)
            elif name.endswith(".py"):
                _import(f"imports: {name}", partial(_import_file, Path(name).resolve()))
            else:
                _import(f"imports: {name}", partial(importlib.import_module, name))


def _import(source: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{source} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> None:
    """Run a file once in this process, and again when it says something else."""
    source = path.read_bytes()
    name = f"shoal_imports.{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules and sys.modules[name].__dict__["source"] == source:
        return
    sys.modules[name] = module = ModuleType(name)
    module.__dict__.update(__file__=str(path), source=source)
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
