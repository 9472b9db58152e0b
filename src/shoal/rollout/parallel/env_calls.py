"""Calls into envs, which may raise anything, answer anything, fork, or never come back."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from shoal.rollout.episode import Episode
from shoal.rollout.parallel.shares import Assignment, Limits


class EnvFailedError(Exception):
    """An env raised, or answered what it must not."""


@dataclass(slots=True, eq=False)
class Seat:
    """A thread that plays one episode after another, as its supervisor sees it."""

    episode: Episode | None = None
    assignment: Assignment | None = None
    began: float = 0.0
    doing: str = ""
    in_env_since: float | None = None
    abandoned: bool = False

    def overdue(self, now: float, limits: Limits) -> str | None:
        """Why this seat's episode has to be given up, if it has."""
        since = self.in_env_since
        if self.episode is None:
            return None
        if since is not None and limits.step_seconds is not None and now - since > limits.step_seconds:
            return f"{self.doing} did not answer within {limits.step_seconds:g} s"
        if limits.episode_seconds is not None and now - self.began > limits.episode_seconds:
            return f"the episode did not end within {limits.episode_seconds:g} s"
        return None

    def in_env(self, doing: str, call: Callable[[], Any]) -> Any:
        """Call into the env, so that what it raises is told apart from all else.

        Raises:
            EnvFailedError: it raised something, be it `SystemExit` or a cancellation; Ctrl-C is none of its own.
        """
        process, failure = os.getpid(), None
        self.doing, self.in_env_since = doing, time.monotonic()
        try:
            return call()
        except BaseException as error:
            failure = error
            if isinstance(error, KeyboardInterrupt):
                raise
            message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise EnvFailedError(f"{doing} failed: {message}") from error
        finally:
            self.in_env_since = None
            if os.getpid() != process:
                _end_forked(failure)


def _end_forked(error: BaseException | None) -> NoReturn:
    """A child that the env forked came back from the env: it must not go on as a second worker."""
    code = 0
    with contextlib.suppress(BaseException):
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def begin(episode: Episode, env: Any) -> None:
    """Reset the env for an episode."""
    observation, info = env.reset(seed=episode.place.env_seed)
    episode.begin(observation, _info(info))


def step(env: Any, action: int | str) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
    """Step the env, and see that it answers what it must."""
    observation, reward, terminated, truncated, info = env.step(action)
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward must be a finite number, got {reward!r}")
    return observation, number, bool(terminated), bool(truncated), _info(info)


def _info(info: Any) -> Mapping[str, Any]:
    if not isinstance(info, Mapping):
        raise TypeError(f"the info must be a dict, got {info!r}")
    return info


def close_all(envs: Sequence[Any], seconds: float | None = None) -> int:
    """Close envs, each within so many seconds if given; returns how many threads are left behind in one."""
    if seconds is None:
        for env in envs:
            _close(env)
        return 0
    threads = [threading.Thread(target=_close, args=(env,), daemon=True) for env in envs]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return sum(thread.is_alive() for thread in threads)


def _close(env: Any) -> None:
    with contextlib.suppress(EnvFailedError):
        Seat().in_env("close", env.close)
