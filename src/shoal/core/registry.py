"""Names on the command line that must find code: a table with "did you mean"."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from shoal.core.errors import unknown_name

T = TypeVar("T")

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ ()-]{0,63}")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it may become part of a path or a table, else raise `ValueError`."""
    if not isinstance(name, str) or not SAFE_NAME.fullmatch(name) or name.endswith((" ", ".")):
        raise ValueError(
            f"{kind} name must be 1 to 64 letters, digits or any of '._ ()-', start with a letter or digit "
            f"and not end with a dot or space, got {name!r}"
        )
    return name


class Registry(Generic[T]):
    """Things by name, for any number of threads.

    A name that is taken is refused, unless `replace=True` or the same code registers it again, as a module does whose
    first import failed midway, or a file that is imported by two names.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}
        self._lock = threading.Lock()

    def register(self, name: str, item: T, *, replace: bool = False) -> T:
        """Put `item` under `name` and return it."""
        check_name(self.kind, name)
        with self._lock:
            if name in self._items and not replace and _code(self._items[name]) != _code(item):
                raise ValueError(
                    f"{self.kind} {name!r} is registered already; pass replace=True to replace it"
                )
            self._items[name] = item
        return item

    def __getitem__(self, name: str) -> T:
        try:
            return self._items[name]
        except (KeyError, TypeError):  # also of what can be no name, such as a list
            raise unknown_name(self.kind, name, list(self._items)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(list(self._items)))

    def __len__(self) -> int:
        return len(self._items)


def _code(item: Any) -> str:
    """File and name of what is registered, or of the function that it holds."""
    code = getattr(item, "compute", item)
    if not (hasattr(code, "__module__") and hasattr(code, "__qualname__")):
        return repr(item)
    file = getattr(sys.modules.get(code.__module__), "__file__", None)
    return f"{file or code.__module__}.{code.__qualname__}"
