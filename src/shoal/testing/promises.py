"""How a check says which promise broke."""

from __future__ import annotations

from typing import Any


def expect(holds: Any, promise: str) -> None:
    """Raise an `AssertionError` that states the promise unless it holds."""
    if not holds:
        raise AssertionError(promise)
