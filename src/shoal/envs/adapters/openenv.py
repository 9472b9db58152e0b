"""An env served over the network in the OpenEnv convention, as a text env: one WebSocket session per env.

Messages are JSON: `{"type": "reset" | "step", "data": …}` is answered by `{"type": "observation", "data":
{"observation": {…}, "reward": …, "done": …}}` or by `{"type": "error", …}`.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from shoal.core.data import MOST_REWARD
from shoal.core.errors import ConfigError, EnvError, needs_extra
from shoal.envs.actions import Projection
from shoal.envs.spaces import FreeText
from shoal.envs.text import Action, Outcome, TextEnv, check_numbers

MAX_MESSAGE = 16 * 1024 * 1024


@dataclass(frozen=True)
class OpenEnvConfig:
    """Settings of `OpenEnvEnv`."""

    url: str = ""
    """Where the server is, as in "http://127.0.0.1:8000"."""
    action_field: str = "action"
    """Field of the server's action that the model's text goes into. An action that is a JSON object itself is
    sent as it is."""
    observation_field: str = "text"
    """Field of the server's observation to show; if there is none, the whole observation is shown as JSON."""
    success_reward: float | None = None
    """Reward on the last step from which an episode counts as a success, unless the server says itself."""
    connect_seconds: float = 10.0
    answer_seconds: float = 60.0
    """How long to wait for an answer before the episode is given up with an `EnvError`."""
    max_steps: int = 200
    """Steps after which an episode is truncated."""
    invalid_penalty: float = 0.0
    """Reward of a response without a usable action; the server is not asked then."""

    def __post_init__(self) -> None:
        if not re.match(r"(http|ws)s?://[^/]", self.url):
            raise ConfigError(f"url must be like http://127.0.0.1:8000, got {self.url!r}")
        check_numbers(self, max_steps=1)


class OpenEnvEnv(TextEnv[OpenEnvConfig]):
    """An env on an OpenEnv server.

    Envs served by `shoal envs serve` also report their actions, validity and success.
    """

    Config = OpenEnvConfig
    seed_stream = "OpenEnvEnv"
    instructions = "Act in the environment. Each turn, answer with one action."
    projection = Projection(parse=lambda text: text or None, invalid="")
    action_space = FreeText(65_536)
    observation_space = FreeText(262_144)

    def __init__(self, config: OpenEnvConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._socket: Any = None
        self._session = contextlib.ExitStack()

    def _start(self, rng: np.random.Generator) -> None:
        # The server gets this episode's own seed, so that a shoal env behind it plays the very episode.
        self._take(self._ask({"type": "reset", "data": {"seed": self._seed}}))
        rules = self._fields.get("instructions")
        if isinstance(rules, str) and rules:
            self.instructions = rules

    def _advance(self, action: Action) -> Outcome:
        if action == self.invalid_action:
            return Outcome(self.config.invalid_penalty, effective=False, valid=False)
        before = self._text
        reward, done = self._take(self._ask({"type": "step", "data": self._payload(str(action))}))
        wanted = self.config.success_reward
        cut = self._said("truncated", False)
        return Outcome(
            reward,
            terminated=done and not cut,
            truncated=done and cut,
            success=self._said("success", done and wanted is not None and reward >= wanted),
            valid=self._said("action_is_valid", True),
            effective=self._said("action_is_effective", self._text != before),
        )

    def _said(self, field: str, otherwise: bool) -> bool:
        """What the server says by true or false; words and numbers of another meaning do not count."""
        value = self._fields.get(field)
        return value if isinstance(value, bool) else otherwise

    def available_actions(self) -> list[str]:
        """What the server offers, if it says so."""
        offered = self._fields.get("available_actions")
        return list(map(str, offered)) if isinstance(offered, list) and offered else ["<action>"]

    def observe(self) -> str:
        """The server's observation."""
        return self._text

    def close(self) -> None:
        """End the session, and the episode with it: another one would know nothing of it."""
        super().close()
        self._session.close()
        self._socket = None

    def __getstate__(self) -> dict[str, Any]:
        if self._socket is not None and not self._over:
            raise EnvError(
                "an episode on a server cannot be copied or sent elsewhere; reset() the copy instead"
            )
        return {**self.__dict__, "_socket": None, "_session": contextlib.ExitStack()}

    def _payload(self, action: str) -> dict[str, Any]:
        if action.startswith("{"):
            try:
                parsed = json.loads(action)
            except (ValueError, RecursionError):
                parsed = None
            if isinstance(parsed, dict):
                return parsed
        return {self.config.action_field: action}

    def _take(self, answer: dict[str, Any]) -> tuple[float, bool]:
        fields = answer.get("observation")
        if not isinstance(fields, dict):
            raise EnvError(f"{self.config.url} must answer with an observation object, got {answer!r:.200}")
        self._fields = fields
        shown = fields.get(self.config.observation_field)
        self._text = (
            shown if isinstance(shown, str) else json.dumps(fields, sort_keys=True, ensure_ascii=False)
        )
        reward, done = answer.get("reward"), answer.get("done", False)
        is_number = isinstance(reward, int | float | None) and abs(reward or 0) <= MOST_REWARD
        if not is_number or not isinstance(done, bool | None):
            raise EnvError(
                f"{self.config.url} must answer with a number as reward and true or false as done, "
                f"got {reward!r:.100} and {done!r:.100}"
            )
        return float(reward or 0.0), bool(done)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        with needs_extra("the openenv client", "web"):
            from websockets.exceptions import WebSocketException
        url = self.config.url
        try:
            if self._socket is None:
                self._socket = self._connect()
            self._socket.send(json.dumps(message))
            answer = json.loads(self._socket.recv(timeout=self.config.answer_seconds))
        except (OSError, ValueError, RecursionError, WebSocketException) as error:
            self.close()
            raise EnvError(
                f"{url} did not answer a {message['type']}: {error or type(error).__name__}"
            ) from error
        if not isinstance(answer, dict) or answer.get("type") != "observation":
            raise EnvError(f"{url} answered a {message['type']} with {answer!r:.300}")
        data = answer.get("data")
        return data if isinstance(data, dict) else {}

    def _connect(self) -> Any:
        from websockets.sync.client import connect

        parts = urlsplit(self.config.url)
        path = parts.path.rstrip("/").removesuffix("/ws") + "/ws"
        connection = connect(
            urlunsplit((parts.scheme.replace("http", "ws"), parts.netloc, path, parts.query, "")),
            open_timeout=self.config.connect_seconds,
            max_size=MAX_MESSAGE,
            proxy=None,
            ping_interval=None,  # pings draw from the global `random`; answer_seconds bounds every wait
        )
        return self._session.enter_context(connection)
