"""Environments that misbehave on purpose, and small ones that do not."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class CountEnv(gymnasium.Env[Any, Any]):
    """Counts its steps; observation `[seed, episode, t, last action]`, episodes of `length` steps."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(10)

    def __init__(self, length: int = 5, index: int = 0, render_mode: str | None = None) -> None:
        self.length, self.index, self.render_mode = length, index, render_mode
        self.seed_, self.episode, self.t = -1, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.seed_, self.episode = seed % 1000, 0
        self.episode += 1
        self.t = 0
        return self.observe(0), {"episode": self.episode, **({"options": str(options)} if options else {})}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.misbehave(action)
        info = {"t": self.t} if self.t % 2 else {}
        return self.observe(action), float(self.t + 10 * int(action)), self.t >= self.length, False, info

    def observe(self, action: Any) -> Any:
        return np.array([self.seed_, self.episode, self.t, action], dtype=np.float64)

    def render(self) -> Any:
        return f"{self.seed_}/{self.t}"

    def misbehave(self, action: Any) -> None:
        """Nothing here."""


class Unpicklable(Exception):  # noqa: N818
    """An exception that cannot be rebuilt from its arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.lock = threading.Lock()


class Faulty(CountEnv):
    """Does `fault` in the step with action 9."""

    def __init__(self, fault: str, length: int = 1000) -> None:
        super().__init__(length)
        self.fault = fault

    def misbehave(self, action: Any) -> None:
        if int(action) != 9:
            return
        match self.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "sys.exit":
                sys.exit(3)
            case "segv":
                ctypes.string_at(0)
            case "raise":
                raise ZeroDivisionError("one over zero")
            case "unpicklable":
                raise Unpicklable(1, 2)
            case "hang":
                time.sleep(3600)
            case "stubborn hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                while True:
                    time.sleep(1)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if int(action) == 9:
            match self.fault:
                case "shape":
                    obs = np.zeros(7)
                case "dtype":
                    obs = "four words of text"  # type: ignore[assignment]
                case "nan observation":
                    obs = np.array([0.0, np.nan, 0.0, 0.0])
                case "nan reward":
                    reward = float("nan")
                case "none reward":
                    reward = None  # type: ignore[assignment]
                case "info":
                    info = {"lock": threading.Lock()}
        return obs, reward, terminated, truncated, info


def one_faulty(fault: str, n: int) -> list[Any]:
    """What makes `n` environments; number 1 is faulty."""
    return [
        functools.partial(Faulty, fault) if i == 1 else functools.partial(CountEnv, 1000) for i in range(n)
    ]


EXCEPTIONS = [
    "sys.exit",
    "raise",
    "unpicklable",
    "shape",
    "dtype",
    "nan observation",
    "nan reward",
    "none reward",
]
DEATHS = ["kill", "exit", "segv"]
HANGS = ["hang", "stubborn hang"]
