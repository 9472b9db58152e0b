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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
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
class OpenEnvConfig:
    """Settings of `OpenEnvEnv`."""

    url: str = ""
    """Where the server is, as in "http://127.0.0.1:8000"."""
    action_field: str = ""
    """Field of the server's action that the model's text goes into. If not given, the one field that the server's
    `/schema` asks for; where it asks for several, an action has to be a JSON object. A server without `/schema` gets
    `action`. An action that is a JSON object itself is sent as it is."""
    observation_field: str = ""
    """Field of the server's observation to show. If not given, `text`, or the one text that `/schema` names; if there
    is none, the whole observation is shown as JSON."""
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
        check_url(self.url)
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
        self._server = Connection(self.config.url, self.config.connect_seconds, self.config.answer_seconds)
        self._fields_of: dict[str, dict[str, Any]] | None = (
            None  # of "action" and "observation", once they are asked
        )

    def _start(self, rng: np.random.Generator) -> None:
        # The server gets this episode's own seed, so that a shoal env behind it plays the very episode.
        self._take(self._ask({"type": "reset", "data": {"seed": self._seed}}))
        rules = self._fields.get("instructions")
        if isinstance(rules, str) and rules:
            self.instructions = rules
        elif len(asked := self._asked_for("action")) > 1 and not self.config.action_field:
            written = ", ".join(f'"{name}" ({_kind_of(field)})' for name, field in asked.items())
            self.instructions = f"{type(self).instructions} It is a JSON object with {written}."

    def _advance(self, action: Action) -> Outcome:
        payload = None if action == self.invalid_action else self._payload(str(action))
        if payload is None:
            return Outcome(self.config.invalid_penalty, effective=False, valid=False)
        before = self._text
        reward, done = self._take(self._ask({"type": "step", "data": payload}))
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
        self._server.close()

    def __getstate__(self) -> dict[str, Any]:
        refuse_open(self._server, over=self._over)
        return dict(self.__dict__)

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
        asked = self._asked_for("action")
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

    def _asked_for(self, what: str) -> dict[str, Any]:
        """The fields of an "action", or an "observation", by the server's schema; of those that it requires, if any."""
        if self._fields_of is None:
            schema = self._schema()
            self._fields_of = {part: _fields(schema.get(part)) for part in ("action", "observation")}
        return self._fields_of[what]

    def _schema(self) -> dict[str, Any]:
        """What the server publishes of its fields; nothing if it publishes none."""
        parts = urlsplit(self.config.url)
        scheme = parts.scheme.replace("ws", "http")
        path = parts.path.rstrip("/").removesuffix("/ws") + "/schema"
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(
                urlunsplit((scheme, parts.netloc, path, parts.query, "")), timeout=self.config.connect_seconds
            ) as answer:
                found = json.loads(answer.read(MAX_MESSAGE))
        except (OSError, ValueError, RecursionError) as error:
            logger.debug("%s has no /schema: %s", self.config.url, error)
            return {}
        return found if isinstance(found, dict) else {}

    def _take(self, answer: dict[str, Any]) -> tuple[float, bool]:
        self._fields, reward, done = self._server.observation(answer)
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
            name for name, field in self._asked_for("observation").items() if _kind_of(field) == "string"
        ]
        return texts[0] if len(texts) == 1 else "text"

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._server.ask(message)
        except EnvError:
            self.close()
            raise


class Connection:
    """A session of one env on an OpenEnv server, opened by the first message.

    Args:
        url: of the server, as in "http://127.0.0.1:8000".
        connect_seconds: for which the session may take to open.
        answer_seconds: for which an answer may take.
    """

    def __init__(self, url: str, connect_seconds: float, answer_seconds: float) -> None:
        self.url, self._connect_seconds, self._answer_seconds = url, connect_seconds, answer_seconds
        self._socket: Any = None
        self._session = contextlib.ExitStack()

    @property
    def is_open(self) -> bool:
        """Whether there is a session."""
        return self._socket is not None

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """What the server answers to a message: a new observation.

        Raises:
            EnvError: it gives none, or not in time.
        """
        with needs_extra("the openenv client", "web"):
            from websockets.exceptions import WebSocketException
        try:
            if self._socket is None:
                self._socket = self._connect()
            self._socket.send(json.dumps(message))
            answer = json.loads(self._socket.recv(timeout=self._answer_seconds))
        except (OSError, ValueError, RecursionError, WebSocketException) as error:
            self.close()
            raise EnvError(
                f"{self.url} did not answer a {message['type']}: {error or type(error).__name__}"
            ) from error
        if not isinstance(answer, dict) or answer.get("type") != "observation":
            raise EnvError(f"{self.url} answered a {message['type']} with {answer!r:.300}")
        data = answer.get("data")
        return data if isinstance(data, dict) else {}

    def observation(self, answer: Mapping[str, Any]) -> tuple[dict[str, Any], float, bool]:
        """The fields of the observation in an answer, the reward, and whether the episode is done.

        Raises:
            EnvError: one of them is something else.
        """
        fields = answer.get("observation")
        if not isinstance(fields, dict):
            raise EnvError(f"{self.url} must answer with an observation object, got {answer!r:.200}")
        reward, done = answer.get("reward"), answer.get("done", False)
        is_number = isinstance(reward, int | float | None) and abs(reward or 0) <= MOST_REWARD
        if not is_number or not isinstance(done, bool | None):
            raise EnvError(
                f"{self.url} must answer with a number as reward and true or false as done, "
                f"got {reward!r:.100} and {done!r:.100}"
            )
        return fields, float(reward or 0.0), bool(done)

    def close(self) -> None:
        """End the session."""
        self._session.close()
        self._socket = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_socket": None, "_session": contextlib.ExitStack()}

    def _connect(self) -> Any:
        from websockets.sync.client import connect

        parts = urlsplit(self.url)
        path = parts.path.rstrip("/").removesuffix("/ws") + "/ws"
        connection = connect(
            urlunsplit((parts.scheme.replace("http", "ws"), parts.netloc, path, parts.query, "")),
            open_timeout=self._connect_seconds,
            max_size=MAX_MESSAGE,
            proxy=None,
            ping_interval=None,  # pings draw from the global `random`; answer_seconds bounds every wait
        )
        return self._session.enter_context(connection)


def refuse_open(server: Connection, *, over: bool) -> None:
    """Refuse to copy an env whose episode goes on in a session."""
    if server.is_open and not over:
        raise EnvError("an episode on a server cannot be copied or sent elsewhere; reset() the copy instead")


def check_url(url: str) -> None:
    """Refuse what is no address of a server."""
    if not re.match(r"(http|ws)s?://[^/]", url):
        raise ConfigError(f"url must be like http://127.0.0.1:8000, got {url!r}")


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
