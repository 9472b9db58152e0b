"""Names on the command line that must find code: a table with "did you mean"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Generic, TypeVar

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
    """Things by name. Registering a taken name raises unless `replace=True`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str, item: T, *, replace: bool = False) -> T:
        """Put `item` under `name` and return it."""
        check_name(self.kind, name)
        if name in self._items and not replace:
            raise ValueError(f"{self.kind} {name!r} is registered already; pass replace=True to replace it")
        self._items[name] = item
        return item

    def __getitem__(self, name: str) -> T:
        try:
            return self._items[name]
        except KeyError:
            raise unknown_name(self.kind, name, self._items) from None

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))

    def __len__(self) -> int:
        return len(self._items)
