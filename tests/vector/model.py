"""What a vector env must show, from plain envs: an env that tells all of its state, and twins that follow it.

A twin is a plain env that plays beside one env of the vector env. Where the rules leave something open (which
seed a replaced env gets, whether a neighbour of a dead env had finished its step) the twin checks that what it
sees is one of the things allowed and takes it over; everything else must be equal.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

RELEASED = threading.Event()
"""Set by a test that hung envs in threads of its own process, so that these threads end."""
LIMIT = 0.8
"""The `step_timeout` in seconds."""
SLOW = 15
"""The action that takes a while, but not too long."""
FAULTS = {
    8: "raise",
    9: "base exception",
    10: "bad observation",
    11: "nan reward",
    12: "kill",
    13: "exit",
    14: "hang",
}
LETHAL = frozenset({12, 13, 14})
"""Actions that end the worker, and with it the neighbours of the env."""

INDEX, SEED, EPISODE, T, ACTION, RESETS = range(6)


class OwnBaseException(BaseException):
    """An exception that `except Exception` does not catch."""


class Encoded(gymnasium.Env[Any, Any]):
    """Observations `[index, seed, episode, t, last action, resets]`: a stale or foreign one is noticed.

    `seed` is -1 before the first, `resets` counts those of this instance. Episodes last 1 to 4 steps; in odd
    ones the end is a termination, in even ones a truncation.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (6,), np.float64)
    action_space = spaces.Discrete(16)

    def __init__(self, index: int) -> None:
        self.index = index
        self.seed_, self.episode, self.t, self.action, self.resets = -1, 0, 0, 0, 0

    def tell(self) -> list[int]:
        return [self.index, self.seed_, self.episode, self.t, self.action, self.resets]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.seed_, self.episode = seed, 0
        self.episode += 1
        self.t = self.action = 0
        self.resets += 1
        return np.array(self.tell(), np.float64), {"resets": self.resets}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t, self.action = self.t + 1, int(action)
        obs: Any = np.array(self.tell(), np.float64)
        reward = self.t + 10.0 * self.action + 1000.0 * self.index
        match FAULTS.get(self.action):
            case "raise":
                raise ArithmeticError("meant")
            case "base exception":
                raise OwnBaseException("meant")
            case "bad observation":
                obs = np.zeros(3)
            case "nan reward":
                reward = float("nan")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "hang":
                RELEASED.wait(3600)
        if self.action == SLOW:
            time.sleep(0.1)
        over = self.t > (self.seed_ + self.episode) % 4
        odd = bool(self.episode % 2)
        return obs, reward, over and odd, over and not odd, {"t": self.t} if self.t % 2 else {}


@dataclass
class Seen:
    """What the vector env showed of one env after a step."""

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def same(a: Any, b: Any) -> bool:
    """Equal in value, arrays and nested dicts included."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))


def unbatched(infos: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """Gymnasium's dict of arrays as one info for each env."""
    each: list[dict[str, Any]] = [{} for _ in range(n)]
    for key, values in infos.items():
        if key.startswith("_"):
            continue
        rows = unbatched(values, n) if isinstance(values, dict) else values
        for i in np.flatnonzero(infos[f"_{key}"]).tolist():
            each[i][key] = rows[i]
    return each


@dataclass
class Twin:
    """Follows one env of a vector env.

    Attributes:
        env: the plain env.
        mode: "same_step", "next_step" or "disabled".
        unsure: a neighbour may have ended its worker: it was replaced, or it was not; the next step tells.
        fresh: it was replaced, and its state has not been seen since.
        over: its episode is over, and the next step or the caller resets it.
        lasts: the observations that may be its last before a fault.
        shown: what the caller saw last, None where that is open.
    """

    env: Encoded
    mode: str
    unsure: bool = False
    fresh: bool = False
    over: bool = False
    lasts: list[Any] = field(default_factory=list)
    shown: Any = None

    @property
    def steps(self) -> bool:
        """Whether the next step reaches the env: its action counts."""
        return not (self.over and not self.waits)

    @property
    def waits(self) -> bool:
        """Whether the caller must reset it before the next step."""
        return self.over and self.mode == "disabled"

    def play(self, action: int) -> Seen:
        """What a step shows when nothing goes wrong."""
        if self.over:
            assert self.mode == "next_step", "the caller of a test forgot a reset"
            self.over = False
            obs, info = self.env.reset()
            return Seen(obs, 0.0, False, False, info)
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            if self.mode == "same_step":
                final, final_info = obs, info
                obs, info = self.env.reset()
                info = {"final_obs": final, "final_info": final_info, **info}
            else:
                self.over = True
        return Seen(obs, reward, terminated, truncated, info)

    def see_step(self, action: int, seen: Seen, *, faulty: bool, endangered: bool) -> None:
        """Check what a step showed.

        Args:
            action: what the env was given.
            seen: what came back.
            faulty: it had to fail in this step.
            endangered: somebody in the vector env ended a worker, perhaps its own.
        """
        if "worker_restarted" in seen.info:
            assert faulty or endangered or self.unsure, f"replaced without a reason: {seen}"
            self._see_replaced(action, seen)
        elif self.fresh:
            assert self.mode == "next_step", seen
            assert (seen.reward, seen.terminated, seen.truncated) == (0.0, False, False), seen
            self.see_reset(seen.obs, seen.info, None)
            self.unsure = endangered
        else:
            assert not faulty or self.unsure, f"its failure is not told: {seen}"
            expected = self.play(action)
            ended = expected.terminated or expected.truncated
            # Perhaps its infos were lost with its worker.
            if endangered and ended and not same(seen.info, expected.info):
                final = {"final_obs": expected.info.get("final_obs"), "final_info": {}}
                expected.info = final if self.mode == "same_step" else {}
            self._equal(seen, expected)
            self.unsure = endangered
        self.shown = seen.obs
        self.lasts = [*self.lasts[-1:], seen.obs]

    def _equal(self, seen: Seen, expected: Seen) -> None:
        assert same(vars(seen), vars(expected)), f"expected {expected}, got {seen}"

    def _see_replaced(self, action: int, seen: Seen) -> None:
        real = None
        if not self.fresh and not (self.steps and action in FAULTS):
            before = [np.array(row) for row in self.lasts]
            real = self.play(action) if not self.over or self.mode == "next_step" else None
            if real is not None:
                self.lasts = [*before, real.info.get("final_obs", real.obs), real.obs]
        flags = (seen.reward, seen.terminated, seen.truncated)
        ends = [(0.0, False, True)]
        if real is not None and (real.terminated or real.truncated):
            ends.append((real.reward, real.terminated, real.truncated))  # it ended, then its worker did
        assert flags in ends, f"{seen} is none of the ends {ends}"
        self.unsure = False
        self.fresh = self.over = True
        if self.mode == "same_step":
            assert self._known(seen.info["final_obs"]), (seen, self.lasts)
            self.see_reset(seen.obs, None, None)
        else:
            assert self._known(seen.obs), (seen, self.lasts)

    def _known(self, obs: Any) -> bool:
        return any(same(obs, last) for last in self.lasts)

    def see_reset(self, obs: Any, info: dict[str, Any] | None, seed: int | None) -> None:
        """Check the first observation of an episode; `info` None is not looked at."""
        if self.fresh or self.unsure:
            row = [int(value) for value in obs]
            assert row[INDEX] == self.env.index, row
            assert (row[T], row[ACTION]) == (0, 0), row
            assert 0 <= row[SEED] < 2**31, f"not seeded, or too large: {row}"
            if seed is not None:
                assert (row[SEED], row[EPISODE]) == (seed, 1), row
            if self.fresh:
                assert row[RESETS] <= 2, f"not a new env: {row}"
            env = self.env
            env.seed_, env.episode, env.t, env.action, env.resets = row[SEED:]
        else:
            expected, told = self.env.reset(seed=seed)
            assert same(obs, expected), f"expected {expected}, got {obs}"
            assert info is None or same(info, told), f"expected {told}, got {info}"
        self.fresh = self.unsure = self.over = False
        self.shown, self.lasts = obs, [obs]
