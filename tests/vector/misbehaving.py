"""Environments that fail at a chosen moment in a chosen way; importable, so that workers find them by name."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.vector.faulty import CountEnv

RELEASED = threading.Event()
"""Set by a test that hung envs in threads of its own process, so that these threads end."""

FAULT = 9
"""The action that makes an env do its fault."""


class OwnBaseException(BaseException):
    """An exception that `except Exception` does not catch."""


BASE_EXCEPTIONS: dict[str, type[BaseException]] = {
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
    "OwnBaseException": OwnBaseException,
}


def do(fault: str) -> None:
    """Fail in the way `fault`; "" is no fault."""
    if fault in BASE_EXCEPTIONS:
        raise BASE_EXCEPTIONS[fault]("meant")
    match fault:
        case "raise":
            raise ZeroDivisionError("one over zero")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "hang":
            RELEASED.wait(3600)
        case "":
            pass
        case _:
            raise NotImplementedError(fault)


class Misbehaving(CountEnv):
    """Counts; does `fault` at the moment `where`: "init", "reset", "step", "method" or "close".

    A step fails with the action `FAULT`, a reset with the option "fail", the others whenever they run.
    """

    def __init__(self, fault: str = "", where: str = "step", length: int = 1000) -> None:
        super().__init__(length)
        self.fault, self.where = fault, where
        if where == "init":
            do(fault)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.where == "reset" and options and options.get("fail"):
            do(self.fault)
        return super().reset(seed=seed)

    def misbehave(self, action: Any) -> None:
        if self.where == "step" and int(action) == FAULT:
            do(self.fault)

    def method(self) -> int:
        if self.where == "method":
            do(self.fault)
        return self.t

    def close(self) -> None:
        if self.where == "close":
            do(self.fault)


class FailsWhenMadeAgain(CountEnv):
    """Raises in the step with action `FAULT`; made again, it does `fault` in its constructor.

    Args:
        fault: what a second constructor does; "meet": it waits until three others like it, with markers in the same
            folder, have begun, for so many seconds.
        marker: a path that is free; who finds a file there is made again.
        seconds: to wait for others.
        first: how the step fails.
    """

    def __init__(self, fault: str, marker: str, seconds: float = 0.0, first: str = "raise") -> None:
        super().__init__(1000)
        self.first = first
        if not Path(marker).exists():
            Path(marker).touch()
        elif fault == "meet":
            Path(f"{marker}-again").touch()
            end = time.monotonic() + seconds
            while len(list(Path(marker).parent.glob("*-again"))) < 4:
                assert time.monotonic() < end, "the others have not begun"
                time.sleep(0.01)
            Path(f"{marker}-met").touch()
        else:
            do(fault)

    def misbehave(self, action: Any) -> None:
        if int(action) == FAULT:
            do(self.first)


class Unspeakable:
    """A reward that is no number, and says so in its own way."""

    def __float__(self) -> float:
        raise RuntimeError("not while a gradient is wanted")

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class SlowToMake(CountEnv):
    """Takes its time in the constructor."""

    def __init__(self, seconds: float) -> None:
        time.sleep(seconds)
        super().__init__(1000)


class EndsThenFails(CountEnv):
    """Pays 1.0 in its third and last step; the second `reset` of an instance does `fault`."""

    def __init__(self, fault: str) -> None:
        super().__init__(3)
        self.fault, self.resets = fault, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets += 1
        if self.resets == 2:
            do(self.fault)
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(terminated), terminated, truncated, info


class Dawdling(CountEnv):
    """Writes its actions down; the action `SLOW` takes `seconds`."""

    SLOW = 8

    def __init__(self, seconds: float, length: int = 10**6) -> None:
        super().__init__(length)
        self.seconds, self.actions = seconds, []  # type: tuple[float, list[int]]

    def step(self, action: Any) -> Any:
        if int(action) == self.SLOW:
            time.sleep(self.seconds)
        self.actions.append(int(action))
        if int(action) == FAULT:
            time.sleep(self.seconds)
            do("raise")
        return super().step(action)


class Picture(gymnasium.Env[Any, Any]):
    """Observations of `size` numbers that all say the same: how many there have been in this process."""

    action_space = spaces.Discrete(10)
    made = 0

    def __init__(self, size: int, length: int = 4) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float64)
        self.length = length

    def observe(self) -> Any:
        Picture.made += 1
        return np.full(self.observation_space.shape, Picture.made, np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.observe(), 0.0, self.t >= self.length, False, {}


class Located(CountEnv):
    """Writes down which thread of which process does what; keeps an sqlite3 connection, which refuses others."""

    def __init__(self, folder: str, fault: str = "") -> None:
        super().__init__(3)
        self.fault = fault
        self.file = Path(folder) / f"{os.getpid()}-{random.Random().getrandbits(64):x}"
        self.database = sqlite3.connect(":memory:")
        self.note("init")

    def note(self, what: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{what} {os.getpid()} {threading.get_ident()}\n")
        self.database.execute("select 1")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.note("reset")
        return super().reset(seed=seed)

    def misbehave(self, action: Any) -> None:
        self.note("step")
        if int(action) == FAULT:
            do(self.fault)

    def method(self) -> None:
        self.note("method")

    def close(self) -> None:
        self.note("close")
        self.database.close()


class TellsItsSeed(gymnasium.Env[Any, Any]):
    """Shows the seed of its last `reset`, -1 for none; seeds NumPy's old generator, as many envs do."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(10)

    def __init__(self, fault: str = "raise") -> None:
        self.fault, self.t = fault, 0
        self.last = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            np.random.RandomState(seed)  # refuses what does not fit into 32 bits
            self.last = seed
        self.t = 0
        return np.array([self.last, 0.0]), {}

    def step(self, action: Any) -> Any:
        if int(action) == FAULT:
            do(self.fault)
        self.t += 1
        return np.array([self.last, self.t], np.float64), 0.0, False, False, {}


class Bomb:
    """Harmless until it is unpickled; then it does `fault`."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __reduce__(self) -> Any:
        match self.fault:
            case "exit":
                return os._exit, (3,)
            case "raise":
                return int, ("no number",)
            case "hang":
                return time.sleep, (3600,)
            case "nonsense":
                return 42
            case "SystemExit":
                return sys.exit, (3,)
        raise NotImplementedError(self.fault)


class BombError(Exception):
    """An exception that does something when it is unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


class Bombing(CountEnv):
    """Sends a bomb: in the info of a step, as the result of a method, or as the exception that it raises."""

    def __init__(self, fault: str = "", way: str = "info") -> None:
        super().__init__(1000)
        self.fault, self.way = fault, way

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.fault and int(action) == FAULT:
            if self.way == "exception":
                raise BombError("meant")
            if self.way == "info":
                info = {"bomb": Bomb(self.fault)}
        return obs, reward, terminated, truncated, info

    def method(self) -> Any:
        return Bomb(self.fault) if self.fault and self.way == "result" else self.t


class StartsAProgram(CountEnv):
    """Starts a program that sleeps; `new_session` takes it out of the worker's process group."""

    def __init__(self, new_session: bool) -> None:
        super().__init__(1000)
        self.program = subprocess.Popen(["sleep", "1000"], start_new_session=new_session)
        self.pid = self.program.pid

    def misbehave(self, action: Any) -> None:
        if int(action) == FAULT:
            do("kill")


class Nonsense(CountEnv):
    """Breaks the rules of an env: `how` says which one."""

    def __init__(self, how: str, only_first: str | None = None) -> None:
        super().__init__(1000)
        self.how = how
        if only_first is not None:
            if Path(only_first).exists():
                self.how = ""
            Path(only_first).touch()
        if self.how == "init raises":
            do("raise")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.how == "reset raises":
            do("raise")
        if self.how == "reset returns None":
            return None
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.how == "step raises":
            do("raise")
        if self.how == "step raises KeyboardInterrupt":
            do("KeyboardInterrupt")
        if self.how == "step returns three things":
            return np.zeros(4), 0.0, False
        obs, reward, terminated, truncated, info = super().step(action)
        if self.how == "step returns None as observation":
            obs = None
        return obs, reward, terminated, truncated, info


class Pays(CountEnv):
    """Pays `reward` for the action `FAULT`, whatever that is."""

    def __init__(self, reward: Any) -> None:
        super().__init__(1000)
        self.reward = reward

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, self.reward if int(action) == FAULT else reward, terminated, truncated, info
