"""Who plays the other seats of a turn game: at random, a function of the user's, or a model behind a server."""

from __future__ import annotations

import inspect
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, EnvError, format_error
from shoal.envs.catalogue import function_named

RANDOM = "random"
MOST_MOVES = 10_000
"""That the other seats make in a row."""
WAIT_SECONDS = 0.5
"""Before a server is asked again, doubled each time."""
TRIED_AGAIN = {408, 409, 429, *range(500, 600)}


@dataclass(frozen=True)
class Opponent:
    """Who plays the other seats of a game.

    It is asked for a move with what its seat sees, the legal moves (none where the game does not list them), and a
    generator that the episode's seed fixes.
    """

    plays: str = RANDOM
    """`random`, `module:function` or the address of a server, such as `http://127.0.0.1:8000/v1`. A function gets as
    many of `(seen, moves, rng)` as it has parameters, and returns one of the moves."""
    model: str = ""
    """The model of a server. Its answers are greedy, but whether equal questions get equal answers is the server's
    doing: the episodes are no function of the seed alone then."""
    max_tokens: int = 64
    """Of a server's answer."""
    timeout: float = 60.0
    """Seconds in which a server must have answered; it is asked again when it is busy or down."""

    def __post_init__(self) -> None:
        if self.plays != RANDOM and ":" not in self.plays:
            raise ConfigError(
                f"opponent.plays must be 'random', 'module:function' or the address of a server, got {self.plays!r}"
            )
        if self.is_server and not self.model:
            raise ConfigError(f"opponent.model must name the model of the server {self.plays}")
        if not (self.max_tokens >= 1 and 0 < self.timeout < 1e9):
            raise ConfigError("opponent.max_tokens and opponent.timeout must be positive")

    @property
    def is_server(self) -> bool:
        """Whether a model behind a server plays."""
        return self.plays.startswith(("http://", "https://"))

    def ready(self) -> Callable[[Any, Sequence[Any], np.random.Generator], Any]:
        """The function that chooses a move; what it needs is imported.

        Raises:
            ConfigError: there is no such function.
        """
        if self.plays == RANDOM:
            return _at_random
        if self.is_server:
            return lambda seen, moves, rng: self._asked(seen)
        function = function_named(self.plays, "opponent.plays")
        count = _parameters_of(function)
        return lambda *given: function(*given[:count])

    def _asked(self, seen: Any) -> str:
        """The answer of a server to what a seat sees: rules, and news."""
        rules, news = seen if isinstance(seen, tuple) else ("", str(seen))
        told = [("system", rules), ("user", news)]
        body = {
            "model": self.model,
            "messages": [{"role": role, "content": text} for role, text in told if text],
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
        }
        key = os.environ.get("OPENAI_API_KEY", "none")
        request = urllib.request.Request(
            self.plays.rstrip("/") + "/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        until, wait = time.monotonic() + self.timeout, WAIT_SECONDS
        while True:
            left = max(0.1, until - time.monotonic())
            try:
                with urllib.request.urlopen(request, timeout=left) as answer:
                    return str(json.load(answer)["choices"][0]["message"]["content"] or "")
            except (OSError, ValueError, LookupError, TypeError) as error:
                final = isinstance(error, urllib.error.HTTPError) and error.code not in TRIED_AGAIN
                if final or not isinstance(error, OSError) or time.monotonic() + wait > until:
                    rest = error.read(300) if isinstance(error, urllib.error.HTTPError) else b""
                    said = f"{format_error(error)} {rest.decode('utf-8', 'replace')}".strip()
                    raise EnvError(f"the opponent at {self.plays} gave no move: {said}") from error
            time.sleep(wait)
            wait *= 2


def _at_random(seen: Any, moves: Sequence[Any], rng: np.random.Generator) -> Any:
    if not len(moves):
        raise EnvError(
            "the game does not list its legal moves, so nobody can play them at random: set opponent.plays to a "
            "function 'module:function', or to a server"
        )
    return moves[int(rng.integers(len(moves)))]


def _parameters_of(function: Callable[..., Any]) -> int:
    """How many of (seen, moves, rng) a function takes."""
    try:
        inspect.signature(function).bind(0, 0, 0)
        return 3
    except TypeError:
        parameters = inspect.signature(function).parameters.values()
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if not 1 <= count <= 3:
        raise ConfigError(
            f"the opponent {function} must take (seen, moves, rng), or the first one or two of them"
        )
    return count


def seat_of(seat: int | None, seats: int, rng: np.random.Generator) -> int:
    """The agent's seat in an episode: the one that was asked for, else one drawn.

    Raises:
        ConfigError: the game has no such seat.
    """
    if seat is None:
        return int(rng.integers(seats))
    if not 0 <= seat < seats:
        raise ConfigError(f"seat must be from 0 to {seats - 1}, got {seat}")
    return seat
