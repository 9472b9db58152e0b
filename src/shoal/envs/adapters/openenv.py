"""An env served over the network in the OpenEnv convention, as a text env: one WebSocket session per env.

Messages are JSON: `{"type": "reset" | "step", "data": …}` is answered by `{"type": "observation", "data":
{"observation": {…}, "reward": …, "done": …}}` or by `{"type": "error", …}`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import urllib.request
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from shoal.core.data import MOST_REWARD
from shoal.core.errors import ConfigError, EnvError, needs_extra
from shoal.envs.actions import Projection
from shoal.envs.spaces import FreeText
from shoal.envs.text import Action, Outcome, TextEnv, check_numbers

logger = logging.getLogger(__name__)
MAX_MESSAGE = 16 * 1024 * 1024
OF_ALL = ("metadata", "done", "reward")
"""Fields that every action or observation of OpenEnv has."""


@dataclass(frozen=True)
class OnServerConfig:
    """Settings of every env on an OpenEnv server."""

    url: str = ""
    """Where the server is, as in "http://127.0.0.1:8000"."""
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


C = TypeVar("C", bound=OnServerConfig)


class OnServer(TextEnv[C], ABC):
    """An env on an OpenEnv server, in a session of its own that the first message opens."""

    _session = contextlib.ExitStack()
    _socket: Any = None

    def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[dict[str, Any], float, bool]:
        """The fields of the observation that the server answers, the reward, and whether the episode is done.

        Raises:
            EnvError: it gives none, or not in time. The episode is over then.
        """
        try:
            return self._observation_in(self._answer(kind, data))
        except EnvError:
            self.close()
            raise

    def _answer(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        with needs_extra("the openenv client", "web"):
            from websockets.exceptions import WebSocketException
        try:
            if self._socket is None:
                self._socket = self._connect()
            self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(timeout=self.config.answer_seconds))
        except (OSError, ValueError, RecursionError, WebSocketException) as error:
            raise EnvError(
                f"{self.config.url} did not answer a {kind}: {error or type(error).__name__}"
            ) from error
        if not isinstance(answer, dict) or answer.get("type") != "observation":
            raise EnvError(f"{self.config.url} answered a {kind} with {answer!r:.300}")
        found = answer.get("data")
        return found if isinstance(found, dict) else {}

    def _observation_in(self, answer: Mapping[str, Any]) -> tuple[dict[str, Any], float, bool]:
        fields = answer.get("observation")
        if not isinstance(fields, dict):
            raise EnvError(f"{self.config.url} must answer with an observation object, got {answer!r:.200}")
        reward, done = answer.get("reward"), answer.get("done", False)
        is_number = isinstance(reward, int | float | None) and abs(reward or 0) <= MOST_REWARD
        if not is_number or not isinstance(done, bool | None):
            raise EnvError(
                f"{self.config.url} must answer with a number as reward and true or false as done, "
                f"got {reward!r:.100} and {done!r:.100}"
            )
        return fields, float(reward or 0.0), bool(done)

    def _connect(self) -> Any:
        from websockets.sync.client import connect

        connection = connect(
            self._address("ws", "/ws"),
            open_timeout=self.config.connect_seconds,
            max_size=MAX_MESSAGE,
            proxy=None,
            ping_interval=None,  # pings draw from the global `random`; answer_seconds bounds every wait
        )
        self._session = contextlib.ExitStack()
        return self._session.enter_context(connection)

    def _address(self, protocol: str, page: str) -> str:
        parts = urlsplit(self.config.url)
        path = parts.path.rstrip("/").removesuffix("/ws") + page
        scheme = re.sub("http|ws", protocol, parts.scheme)
        return urlunsplit((scheme, parts.netloc, path, parts.query, ""))

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
        return {name: value for name, value in vars(self).items() if name not in ("_session", "_socket")}


@dataclass(frozen=True)
class OpenEnvConfig(OnServerConfig):
    """Settings of `OpenEnvEnv`."""

    action_field: str = ""
    """Field of the server's action that the model's text goes into. If not given, the one field that the server's
    `/schema` asks for; where it asks for several, an action has to be a JSON object. A server without `/schema` gets
    `action`. An action that is a JSON object itself is sent as it is."""
    observation_field: str = ""
    """Field of the server's observation to show. If not given, `text`, or the one text that `/schema` names; if there
    is none, the whole observation is shown as JSON."""
    success_reward: float | None = None
    """Reward on the last step from which an episode counts as a success, unless the server says itself."""


class OpenEnvEnv(OnServer[OpenEnvConfig]):
    """An env on an OpenEnv server.

    Envs served by `shoal envs serve` also report their actions, validity and success.
    """

    Config = OpenEnvConfig
    seed_stream = "OpenEnvEnv"
    instructions = "Act in the environment. Each turn, answer with one action."
    projection = Projection(parse=lambda text: text or None, invalid="")
    action_space = FreeText(65_536)
    observation_space = FreeText(262_144)

    def _start(self, rng: np.random.Generator) -> None:
        # The server gets this episode's own seed, so that a shoal env behind it plays the very episode.
        self._take("reset", {"seed": self._seed})
        rules = self._fields.get("instructions")
        if isinstance(rules, str) and rules:
            self.instructions = rules
        elif len(asked := self._fields_of["action"]) > 1 and not self.config.action_field:
            written = ", ".join(f'"{name}" ({_kind_of(field)})' for name, field in asked.items())
            self.instructions = f"{type(self).instructions} It is a JSON object with {written}."

    def _advance(self, action: Action) -> Outcome:
        payload = None if action == self.invalid_action else self._payload(str(action))
        if payload is None:
            return Outcome(self.config.invalid_penalty, effective=False, valid=False)
        before = self._text
        reward, done = self._take("step", payload)
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

    def _payload(self, action: str) -> dict[str, Any] | None:
        """What the server gets for a text; None where it is no action of its."""
        if action.startswith("{"):
            try:
                parsed = json.loads(action)
            except (ValueError, RecursionError):
                parsed = None
            if isinstance(parsed, dict):
                return parsed
        if self.config.action_field:
            return {self.config.action_field: action}
        asked = self._fields_of["action"]
        if "action" in asked or not asked:
            return {"action": action}
        [(name, field), *more] = asked.items()
        if more:
            return None
        if _kind_of(field) not in ("integer", "number"):
            return {name: action}
        try:
            number = json.loads(action)
        except (ValueError, RecursionError):
            return None
        fits = isinstance(number, int if _kind_of(field) == "integer" else int | float)
        return {name: number} if fits and not isinstance(number, bool) else None

    @cached_property
    def _fields_of(self) -> dict[str, dict[str, Any]]:
        """The fields of an "action" and an "observation", by the server's schema; of those that it requires, if any."""
        schema = self._schema()
        return {part: _fields(schema.get(part)) for part in ("action", "observation")}

    def _schema(self) -> dict[str, Any]:
        """What the server publishes of its fields; nothing if it publishes none."""
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(self._address("http", "/schema"), timeout=self.config.connect_seconds) as answer:
                found = json.loads(answer.read(MAX_MESSAGE))
        except (OSError, ValueError, RecursionError) as error:
            logger.debug("%s has no /schema: %s", self.config.url, error)
            return {}
        return found if isinstance(found, dict) else {}

    def _take(self, kind: str, data: dict[str, Any]) -> tuple[float, bool]:
        self._fields, reward, done = self._ask(kind, data)
        shown = self._fields.get(self._shown_field())
        self._text = (
            shown if isinstance(shown, str) else json.dumps(self._fields, sort_keys=True, ensure_ascii=False)
        )
        return reward, done

    def _shown_field(self) -> str:
        """The field of an observation that is shown."""
        if self.config.observation_field or "text" in self._fields:
            return self.config.observation_field or "text"
        texts = [
            name for name, field in self._fields_of["observation"].items() if _kind_of(field) == "string"
        ]
        return texts[0] if len(texts) == 1 else "text"


def _fields(schema: Any) -> dict[str, Any]:
    """The fields of an object's JSON schema but for those that all have; of the required ones, if there are any."""
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        return {}
    found = {name: value for name, value in schema["properties"].items() if name not in OF_ALL}
    required = schema.get("required")
    needed = [name for name in found if isinstance(required, list) and name in required]
    return {name: found[name] for name in needed or found}


def _kind_of(field: Any) -> str:
    """The type of a field of a JSON schema."""
    kind = field.get("type") if isinstance(field, dict) else None
    return kind if isinstance(kind, str) else "any"
