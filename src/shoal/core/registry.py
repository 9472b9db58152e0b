"""Names on the command line that must find code: a table with "did you mean"."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar

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


class _Entry(NamedTuple):
    """What was registered, in place of what, and the namespace of the module that was being imported then."""

    items: dict[str, Any]
    name: str
    before: Any
    item: Any
    namespace: dict[str, Any]


_JOURNAL: ContextVar[list[_Entry] | None] = ContextVar("journal", default=None)
_ABSENT = object()


@contextmanager
def all_or_nothing() -> Iterator[None]:
    """What this thread registers meanwhile is taken back if the block raises: it can then be tried again.

    Not so what a module registered that was imported whole meanwhile: it stays imported, so nobody would run it again.
    """
    outer, known = _JOURNAL.get(), {*sys.modules}
    journal: list[_Entry] = []
    token = _JOURNAL.set(journal)
    try:
        yield
    except BaseException:
        for items, name, before, item, namespace in reversed(journal):
            by = namespace.get("__name__")
            whole = by not in known and getattr(sys.modules.get(by), "__dict__", None) is namespace  # type: ignore[arg-type]
            if whole or items.get(name) is not item:
                continue
            if before is _ABSENT:
                del items[name]
            else:
                items[name] = before
        raise
    else:
        if outer is not None:  # which may still fail
            outer += journal
    finally:
        _JOURNAL.reset(token)


def _namespace() -> dict[str, Any]:
    """That of the module which is being run, from however deep in its calls this is asked."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame.f_globals  # type: ignore[no-any-return]


class Registry(Generic[T]):
    """Things by name, for any number of threads. Registering a taken name raises unless `replace=True`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}
        self._lock = threading.Lock()

    def register(self, name: str, item: T, *, replace: bool = False) -> T:
        """Put `item` under `name` and return it."""
        check_name(self.kind, name)
        with self._lock:
            before: Any = self._items.get(name, _ABSENT)
            if before is not _ABSENT and not replace:
                raise ValueError(
                    f"{self.kind} {name!r} is registered already; pass replace=True to replace it"
                )
            self._items[name] = item
        journal = _JOURNAL.get()
        if journal is not None:
            journal.append(_Entry(self._items, name, before, item, _namespace()))
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
