"""Serves a text env on this machine in the OpenEnv convention: each WebSocket session has its own env.

It binds to 127.0.0.1 and answers only requests that were made to that name, so that a web page in somebody's
browser cannot play; sessions, message sizes and idle time are limited.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from shoal import __version__
from shoal.core.errors import ShoalError, missing_extra
from shoal.envs.text import TextEnv

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_SESSIONS = 256
MAX_MESSAGE = 1024 * 1024
IDLE_SECONDS = 3600.0
Make = Callable[[], TextEnv[Any]]


class Session:
    """One env and where it stands, in the words of the protocol."""

    def __init__(self, make: Make) -> None:
        self.env = make()
        self.steps = 0
        self._lock = asyncio.Lock()

    async def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The answer to a reset or step; the env runs in a thread, one call at a time."""
        async with self._lock:
            return await asyncio.to_thread(self.reset if kind == "reset" else self.step, data)

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


def create_app(name: str, make: Make) -> Any:
    """The Starlette application that serves `make()`."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import JSONResponse
        from starlette.routing import Route, WebSocketRoute
    except ImportError as error:
        raise missing_extra("serving envs", "web") from error
    sessions: set[Session] = set()
    shared: list[Session] = []  # plain HTTP has one session for everybody, as the convention's first version

    async def read(request: Any) -> dict[str, Any]:
        if int(request.headers.get("content-length") or 0) > MAX_MESSAGE:
            raise ValueError(f"a request must not exceed {MAX_MESSAGE} bytes")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_MESSAGE:
                raise ValueError(f"a request must not exceed {MAX_MESSAGE} bytes")
        return _object(body or b"{}")

    async def over_http(request: Any) -> Any:
        kind = request.url.path.strip("/")
        try:
            data = await read(request)
            if not shared:
                shared.append(Session(make))
            if kind == "step":
                data = data.get("action", data) if isinstance(data.get("action"), dict) else data
            return JSONResponse(await shared[0].answer(kind, data))
        except (ValueError, ShoalError) as error:
            return JSONResponse({"detail": str(error)}, status_code=422)

    async def health(request: Any) -> Any:
        return JSONResponse({"status": "healthy"})

    async def metadata(request: Any) -> Any:
        env = make()
        description = env.instructions
        env.close()
        return JSONResponse({"name": name, "description": description, "version": __version__})

    async def schema(request: Any) -> Any:
        return JSONResponse(SCHEMA)

    async def state(request: Any) -> Any:
        return JSONResponse(shared[0].state() if shared else {"episode_id": None, "step_count": 0})

    async def over_websocket(socket: Any) -> None:
        if not _is_local(socket.headers.get("origin")):
            await socket.close(code=1008)
            return
        await socket.accept()
        if len(sessions) >= MAX_SESSIONS:
            await socket.send_text(_error(f"{MAX_SESSIONS} sessions are open already", "CAPACITY_REACHED"))
            await socket.close()
            return
        session = Session(make)
        sessions.add(session)
        try:
            await _converse(socket, session)
        finally:
            sessions.discard(session)
            await asyncio.to_thread(session.env.close)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        for session in [*sessions, *shared]:
            session.env.close()

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metadata", metadata),
            Route("/schema", schema),
            Route("/state", state),
            Route("/reset", over_http, methods=["POST"]),
            Route("/step", over_http, methods=["POST"]),
            WebSocketRoute("/ws", over_websocket),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
        lifespan=lifespan,
    )


def serve(name: str, make: Make, *, port: int = 8000, on_ready: Callable[[int], None] | None = None) -> None:
    """Serve until interrupted; `on_ready` is told the port (port 0 takes a free one)."""
    try:
        import uvicorn
    except ImportError as error:
        raise missing_extra("serving envs", "web") from error

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if on_ready is not None and self.servers:
                on_ready(self.servers[0].sockets[0].getsockname()[1])

    make().close()  # a wrong setting shows now and not in the first session
    app = create_app(name, make)
    settings = uvicorn.Config(
        app,
        HOST,
        port,
        log_level="warning",
        ws_max_size=MAX_MESSAGE,
        ws="websockets-sansio",
        ws_ping_interval=None,  # pings draw from the global `random`; idle sessions end by themselves
    )
    Server(settings).run()


async def _converse(socket: Any, session: Session) -> None:
    """Answer messages until the other side closes, goes away or is idle for too long."""
    from starlette.websockets import WebSocketDisconnect

    last = time.monotonic()
    while time.monotonic() - last < IDLE_SECONDS:
        try:
            text = await asyncio.wait_for(socket.receive_text(), IDLE_SECONDS)
        except (WebSocketDisconnect, TimeoutError, KeyError):
            return
        last = time.monotonic()
        try:
            message = _object(text)
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
        except (ValueError, ShoalError) as error:
            await socket.send_text(_error(str(error), "EXECUTION_ERROR"))
        except WebSocketDisconnect:
            return


def _object(text: str | bytes | bytearray) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _error(message: str, code: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}})


def _is_local(origin: str | None) -> bool:
    """Programs send no origin; a browser's must be this machine."""
    from urllib.parse import urlsplit

    return origin is None or urlsplit(origin).hostname in (HOST, "localhost")


SCHEMA: dict[str, Any] = {
    "action": {
        "type": "object",
        "properties": {
            "action": {"type": ["string", "integer"], "description": "a word or number of the env"},
            "text": {"type": "string", "description": "a model's response, to be projected"},
        },
    },
    "observation": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "instructions": {"type": "string"},
            "terminated": {"type": "boolean"},
            "truncated": {"type": "boolean"},
            "success": {"type": "boolean"},
            "action_is_valid": {"type": "boolean"},
            "action_is_effective": {"type": "boolean"},
            "available_actions": {"type": "array", "items": {"type": "string"}},
        },
    },
    "state": {
        "type": "object",
        "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
    },
}
