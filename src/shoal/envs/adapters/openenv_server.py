"""Serves a text env on this machine in the OpenEnv convention: each WebSocket session has its own env.

It binds to 127.0.0.1 and answers only requests that were made to that name and that no page of another site
sent, so that a web page in a browser cannot play. Sessions, message sizes and idle time are limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from shoal import __version__
from shoal.core.errors import ConfigError, EnvError, ShoalError, format_error, needs_extra
from shoal.core.executors import OwnThread
from shoal.core.ports import LOCAL, listening
from shoal.envs.text import TextEnv

Make = Callable[[], TextEnv[Any]]
logger = logging.getLogger(__name__)

MAX_SESSIONS = 256
MAX_MESSAGE = 1024 * 1024
IDLE_SECONDS = 3600.0
CLOSE_SECONDS = 3
"""How long the end of the server waits for envs that are at something, and as long for them to close."""


class Session:
    """One env and where it stands, in the words of the protocol.

    The env is made on first use, stepped and closed in a thread of its own, which no exit waits for: one that hangs
    keeps neither the others from playing nor the server from ending.
    """

    def __init__(self, make: Make) -> None:
        self._make, self.steps = make, 0
        self._env: TextEnv[Any] | None = None
        self._closing: Future[Any] | None = None
        self._thread = OwnThread("shoal-session")

    @property
    def env(self) -> TextEnv[Any]:
        """The env; only for the thread of the session."""
        if self._env is None:
            self._env = self._make()
        return self._env

    async def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The answer to a reset or step, one call at a time."""
        answered = self._put(partial(self.reset if kind == "reset" else self.step, data))
        return await asyncio.wrap_future(answered)  # type: ignore[no-any-return]

    def close(self) -> Future[Any]:
        """Close the env after what it is at, and end its thread."""
        if self._closing is None:
            self._closing = self._put(self._close)
            self._thread.end()
        return self._closing

    def _put(self, call: Callable[[], Any]) -> Future[Any]:
        def run() -> Any:
            try:
                return call()
            except (StopIteration, SystemExit, KeyboardInterrupt) as error:  # of which no task can end
                raise EnvError(format_error(error)) from error

        return self._thread.submit(run)

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Start an episode, from `data["seed"]` if there is one."""
        seed = data.get("seed")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
        observation, info = self.env.reset(seed=seed)
        self.steps = 0
        return self._answer(observation, 0.0, False, False, info)

    def step(self, data: dict[str, Any]) -> dict[str, Any]:
        """Take `data["action"]` (a word or action of the env) or what a response `data["text"]` says."""
        if isinstance(data.get("text"), str):
            action = self.env.projection(data["text"]).actions[0]
        elif isinstance(data.get("action"), int | str):
            given = data["action"]
            known = self.env.projection.action_of(given) if isinstance(given, str) else given
            action = self.env.invalid_action if known is None else known
        else:
            raise ValueError(
                f"a step needs 'action' (a word or number) or 'text' (a response), got {sorted(data)}"
            )
        answer = self._answer(*self.env.step(action))
        self.steps += 1
        return answer

    def state(self) -> dict[str, Any]:
        """What the convention calls the state."""
        return {"episode_id": None, "step_count": self.steps}

    def _answer(
        self, observation: Any, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> dict[str, Any]:
        fields = {
            "text": self.env.observe(),
            "instructions": self.env.instructions,
            "terminated": terminated,
            "truncated": truncated,
            **{key: info[key] for key in ("success", "action_is_valid", "action_is_effective")},
            "available_actions": info["available_actions"],
        }
        return {"observation": fields, "reward": reward, "done": terminated or truncated}


class _Answers:
    """What each address of the server answers."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._sessions: set[Session] = set()
        # of plain HTTP: everybody's, as in the convention's first version
        self._shared: Session | None = None

    async def over_http(self, request: Any) -> Any:
        """A reset or a step."""
        from starlette.responses import JSONResponse

        kind = request.url.path.strip("/")
        try:
            data = json_object(await request.body() or b"{}")
            self._shared = self._shared or Session(self._make)
            if kind == "step":
                data = data.get("action", data) if isinstance(data.get("action"), dict) else data
            return JSONResponse(await self._shared.answer(kind, data))
        except Exception as error:  # a border: the client gets whatever an env raises
            refused = isinstance(error, ValueError | ShoalError)
            return JSONResponse({"detail": _message(error)}, status_code=422 if refused else 500)

    async def over_websocket(self, socket: Any) -> None:
        """A whole session, with an env of its own."""
        await socket.accept()
        if len(self._sessions) >= MAX_SESSIONS:
            await socket.send_text(_error(f"{MAX_SESSIONS} sessions are open already", "CAPACITY_REACHED"))
            await socket.close()
            return
        session = Session(self._make)
        self._sessions.add(session)
        try:
            await _converse(socket, session)
        finally:
            session.close().add_done_callback(lambda closed: self._closed(session, closed))

    def _closed(self, session: Session, closed: Future[Any]) -> None:
        self._sessions.discard(session)
        if (error := closed.exception()) is not None:
            logger.error("an env that is served cannot be closed", exc_info=error)

    def state(self) -> dict[str, Any]:
        """Where the session of plain HTTP stands."""
        return self._shared.state() if self._shared else {"episode_id": None, "step_count": 0}

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        """Close all envs at the end."""
        yield
        closing = [
            asyncio.wrap_future(one.close()) for one in (*self._sessions, self._shared) if one is not None
        ]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_SECONDS)


def create_app(name: str, rules: str, make: Make) -> Any:
    """The Starlette application that serves `make()`, an env with these rules."""
    with needs_extra("serving envs", "web"):
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import JSONResponse
        from starlette.routing import Route, WebSocketRoute
    answers, about = _Answers(make), {"name": name, "description": rules, "version": __version__}
    return Starlette(
        routes=[
            Route("/health", lambda request: JSONResponse({"status": "healthy"})),
            Route("/metadata", lambda request: JSONResponse(about)),
            Route("/schema", lambda request: JSONResponse(SCHEMA)),
            Route("/state", lambda request: JSONResponse(answers.state())),
            Route("/reset", answers.over_http, methods=["POST"]),
            Route("/step", answers.over_http, methods=["POST"]),
            WebSocketRoute("/ws", answers.over_websocket),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=[LOCAL, "localhost"]),
            Middleware(_LocalPages),
        ],
        lifespan=answers.lifespan,
    )


def serve(name: str, make: Make, *, port: int = 8000, on_ready: Callable[[int], None] | None = None) -> None:
    """Serve until interrupted; `on_ready` gets the port (port 0 takes a free one)."""
    with needs_extra("serving envs", "web"):
        import uvicorn

    with contextlib.closing(make()) as env:  # a wrong setting shows now and not in the first session
        if env.calls_tools:
            raise ConfigError(
                f"{name} acts by tools, which are not served: only envs whose actions are text are"
            )
        app = create_app(name, env.instructions, make)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        ws_max_size=MAX_MESSAGE,
        ws="websockets-sansio",
        timeout_graceful_shutdown=CLOSE_SECONDS,
        ws_ping_interval=None,  # pings draw from the global `random`; idle sessions end by themselves
    )
    with listening(port) as listener:
        if on_ready is not None:
            on_ready(listener.getsockname()[1])
        uvicorn.Server(settings).run(sockets=[listener])


def json_object(text: str | bytes) -> dict[str, Any]:
    """The object that a message holds."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


async def _converse(socket: Any, session: Session) -> None:
    """Answer messages until the other side closes, goes away or is idle for too long."""
    from starlette.websockets import WebSocketDisconnect

    while True:
        try:
            text = await asyncio.wait_for(socket.receive_text(), IDLE_SECONDS)
        except (WebSocketDisconnect, TimeoutError, KeyError):
            return
        try:
            message = json_object(text)
            kind, data = message.get("type"), message.get("data") or {}
            if kind == "close":
                return
            if kind == "state":
                answer = {"type": "state", "data": session.state()}
            elif kind in ("reset", "step") and isinstance(data, dict):
                answer = {"type": "observation", "data": await session.answer(str(kind), data)}
            else:
                raise ValueError(f"type must be reset, step, state or close, got {kind!r:.80}")
            await socket.send_text(json.dumps(answer))
        except WebSocketDisconnect:
            return
        except Exception as error:  # a border, likewise
            await socket.send_text(_error(_message(error), "EXECUTION_ERROR"))


def _message(error: Exception) -> str:
    """What went wrong; what is no refusal is logged here too, with its place."""
    if isinstance(error, ValueError | ShoalError):
        return str(error)
    logger.error("an env that is served failed", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _error(message: str, code: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}})


class _LocalPages:
    """Refuses what a page of another site asks of the app, whether it may read the answer or not.

    Browsers name a page's site in the header Origin; programs send none.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        origins = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"origin"]
        if all(map(_is_local, origins)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            from starlette.responses import JSONResponse

            reason = {"detail": "only programs and pages of this machine may ask"}
            await JSONResponse(reason, status_code=403)(scope, receive, send)


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in (LOCAL, "localhost")
    except ValueError:
        return False


def _schema(**properties: str | dict[str, Any]) -> dict[str, Any]:
    """An object's schema; a property that is only a type is named by it."""
    typed = {name: {"type": what} if isinstance(what, str) else what for name, what in properties.items()}
    return {"type": "object", "properties": typed}


SCHEMA = {
    "action": _schema(
        action={"type": ["string", "integer"], "description": "a word or number of the env"},
        text={"type": "string", "description": "a model's response, to be projected"},
    ),
    "observation": _schema(
        text="string", instructions="string", terminated="boolean", truncated="boolean", success="boolean",
        action_is_valid="boolean", action_is_effective="boolean",
        available_actions={"type": "array", "items": {"type": "string"}},
    ),
    "state": _schema(episode_id={"type": ["string", "null"]}, step_count="integer"),
}  # fmt: skip
