"""The environment that goes wrong in `faults.py`."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Unpicklable(Exception):  # noqa: N818
    """Its constructor wants two arguments and it holds a lock."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.lock = threading.Lock()


class Env(gymnasium.Env[Any, Any]):
    """Steps that say which they are; number 1 does `fault` in its third."""

    observation_space: spaces.Space[Any] = spaces.Box(-1e9, 1e9, (4,), np.float32)
    action_space = spaces.Discrete(100)
    render_mode = None

    def __init__(self, fault: str, index: int) -> None:
        self.fault = fault if index == 1 else ""
        if fault == "text":
            self.observation_space = spaces.Text(100)
        self.slow = fault == "late" and index == 1
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.see(0), {}

    def see(self, action: int) -> Any:
        if isinstance(self.observation_space, spaces.Text):
            return f"action{action}"
        return np.full(4, action, np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        obs, reward = self.see(int(action)), float(action)
        if self.slow and self.t == 3:
            time.sleep(0.5)
        if self.t == 3 and self.fault:
            obs, reward = self.go_wrong(obs, reward)
        return obs, reward, False, False, {}

    def go_wrong(self, obs: Any, reward: float) -> tuple[Any, float]:
        match self.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "segv":
                ctypes.string_at(0)
            case "raise":
                raise ZeroDivisionError("one over zero")
            case "unpicklable":
                raise Unpicklable(1, 2)
            case "hang" | "parent":
                time.sleep(3600)
            case "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                while True:
                    time.sleep(1)
            case "shape":
                obs = np.zeros(7, np.float32)
            case "nan":
                reward = float("nan")
            case "garbage":
                os.write(1, b'\x00\xff{"reward": 1e9}\n')
        return obs, reward
