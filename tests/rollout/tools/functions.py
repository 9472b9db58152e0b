"""Tools of the tests, in a module that workers import."""

import asyncio
import time
from pathlib import Path
from typing import Literal

import gymnasium
from gymnasium.spaces import Discrete, Text


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


class Breaks(gymnasium.Env):
    """Raises in its first step ever, of which a file tells; ends in the next one."""

    observation_space, action_space = Text(9), Discrete(2)
    action_names = ("left", "right")

    def __init__(self, file):
        self.file = Path(file)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "go", {}

    def step(self, action):
        if not self.file.exists():
            self.file.touch()
            raise RuntimeError("broken")
        return "gone", 1.0, True, False, {}
