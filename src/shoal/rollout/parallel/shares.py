"""What a rollout worker is given to play, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from shoal.core.data import Trajectory
from shoal.rollout.episode import Place, Role
from shoal.rollout.parallel.wire import Link
from shoal.rollout.prompts import PromptConfig
from shoal.rollout.samplers.sampler import ChatTokenizer, Sampling

_reports = msgspec.msgpack.Decoder(tuple[int, int, Trajectory])


@dataclass(frozen=True, slots=True)
class Assignment:
    """One episode to play; `index` is its place among all of the rollout."""

    index: int
    place: Place
    tag: str


@dataclass(frozen=True, slots=True)
class Limits:
    """When an episode is given up; None waits for ever."""

    step_seconds: float | None = None
    episode_seconds: float | None = None
    request_seconds: float | None = None
    env_retries: int = 1  # times an episode starts again in a fresh env after its env failed


@dataclass(frozen=True)
class Share:
    """What one worker plays, and all it needs for it; its numbers are that of the rollout and its own in it."""

    rollout: int
    number: int
    assignments: tuple[Assignment, ...]
    env_fns: Mapping[str, Callable[[], Any]]
    roles: Mapping[str, Role]
    prompt: PromptConfig
    tokenizer: ChatTokenizer
    sampling: Sampling
    limits: Limits = Limits()
    threads: int | None = None
    """Episodes played at once; all of them if not given."""
    lockstep: bool = False
    """Tell the engine which episodes are at play."""
    keep_envs: bool = False
    """Keep the envs for the next share of this process instead of closing them."""


class Connect(Protocol):
    """The way from a worker to the shared engine, as it can be sent to the worker."""

    def connect(self, asker: int) -> Link:
        """Open it."""
        ...


@dataclass(frozen=True, slots=True)
class Played:
    """How a share went."""

    indices: tuple[int, ...]
    cpu_seconds: float
    hung: int  # threads left behind in an env that does not answer


def encode_report(rollout: int, index: int, trajectory: Trajectory) -> bytes:
    """A finished episode as bytes."""
    return msgspec.msgpack.encode((rollout, index, trajectory))


def decode_report(report: bytes) -> tuple[int, int, Trajectory]:
    """What `encode_report` wrote."""
    return _reports.decode(report)
