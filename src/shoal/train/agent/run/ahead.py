"""Plays iterations ahead of those that are learned from, in a thread of its own and in the order of the plan."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from shoal.core.executors import Closing, OwnThread

T = TypeVar("T")


class Ahead(Closing, Generic[T]):
    """Plays one iteration after another beside the caller's thread.

    Args:
        play: plays an iteration.
    """

    def __init__(self, play: Callable[[int], T]) -> None:
        self._play = play
        self._thread = OwnThread("shoal-player")
        self._begun: dict[int, Future[T]] = {}

    def begin(self, iteration: int) -> None:
        """Play this iteration after those that were begun before, unless it is one of them."""
        if iteration not in self._begun:
            self._begun[iteration] = self._thread.submit(partial(self._play, iteration))

    def take(self, iteration: int) -> T:
        """What came of an iteration that was begun, once it is over."""
        try:
            return self._begun[iteration].result()
        finally:
            del self._begun[iteration]

    def close(self) -> None:
        """Begin nothing more; what is played now is its owner's to break off."""
        for future in self._begun.values():
            future.cancel()
        self._thread.end()
