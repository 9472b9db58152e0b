"""Tools of the tests, in a module that workers import."""

import asyncio
import time
from typing import Literal


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def look(city: Literal["rome", "oslo"]) -> str:
    """The capital of what."""
    await asyncio.sleep(0.01 if city == "oslo" else 0.05)  # the second call ends first
    return {"rome": "Italy", "oslo": "Norway"}[city]


def fail(text: str) -> str:
    """Raise."""
    raise RuntimeError(f"no {text} here")


def hang() -> str:
    """Sleep."""
    time.sleep(30)
    return "late"


async def block() -> str:
    """Sleep without letting go of the loop."""
    time.sleep(3)
    return "late"
