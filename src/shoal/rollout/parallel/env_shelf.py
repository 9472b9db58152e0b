"""Envs that are used again for another episode instead of being made anew."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class EnvShelf:
    """Envs that wait for their next episode, by kind."""

    def __init__(self) -> None:
        self._idle: dict[Any, list[Any]] = {}
        self._lock = threading.Lock()

    def take(self, kind: Any, make: Callable[[], Any]) -> Any:
        """An idle env of this kind, or a new one."""
        with self._lock:
            if self._idle.get(kind):
                return self._idle[kind].pop()
        return make()

    def put(self, kind: Any, env: Any) -> None:
        """The env can be reset for another episode."""
        with self._lock:
            self._idle.setdefault(kind, []).append(env)

    def clear(self) -> list[Any]:
        """The idle envs, which nobody else gets any more."""
        with self._lock:
            envs = [env for idle in self._idle.values() for env in idle]
            self._idle.clear()
        return envs


KEPT = EnvShelf()
"""Envs of this process that outlive a share (`Share.keep_envs`)."""


def kind_of(env_fn: Callable[[], Any]) -> Any:
    """What makes two env functions make the same kind of env."""
    partial_of = getattr(env_fn, "func", None)
    if partial_of is None:
        return env_fn
    return (partial_of, repr(getattr(env_fn, "args", ())), repr(getattr(env_fn, "keywords", {})))
