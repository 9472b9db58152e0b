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
from shoal.envs.adapters.openenv_session import SCHEMA, Make, Session, json_object

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_SESSIONS = 256
MAX_MESSAGE = 1024 * 1024
IDLE_SECONDS = 3600.0


class _Answers:
    """What each address of the server answers."""

    def __init__(self, name: str, make: Make) -> None:
        self._name, self._make = name, make
        self._sessions: set[Session] = set()
        self._shared: Session | None = (
            None  # of plain HTTP, for everybody, as in the convention's first version
        )

    async def over_http(self, request: Any) -> Any:
        """A reset or a step."""
        from starlette.responses import JSONResponse

        kind = request.url.path.strip("/")
        try:
            data = await _read(request)
            if self._shared is None:
                self._shared = Session(self._make)
            if kind == "step":
                data = data.get("action", data) if isinstance(data.get("action"), dict) else data
            return JSONResponse(await self._shared.answer(kind, data))
        except (ValueError, ShoalError) as error:
            return JSONResponse({"detail": str(error)}, status_code=422)

    async def over_websocket(self, socket: Any) -> None:
        """A whole session, with an env of its own."""
        if not _is_local(socket.headers.get("origin")):
            await socket.close(code=1008)
            return
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
            self._sessions.discard(session)
            await asyncio.to_thread(session.env.close)

    def metadata(self) -> dict[str, Any]:
        """Name and rules of the env."""
        env = self._make()
        description = env.instructions
        env.close()
        return {"name": self._name, "description": description, "version": __version__}

    def state(self) -> dict[str, Any]:
        """Where the session of plain HTTP stands."""
        return self._shared.state() if self._shared else {"episode_id": None, "step_count": 0}

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        """Close all envs at the end."""
        yield
        for session in [*self._sessions, *([self._shared] if self._shared else [])]:
            session.env.close()


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
    answers = _Answers(name, make)

    def told(path: str, answer: Callable[[], dict[str, Any]]) -> Any:
        async def endpoint(request: Any) -> Any:
            return JSONResponse(answer())

        return Route(path, endpoint)

    return Starlette(
        routes=[
            told("/health", lambda: {"status": "healthy"}),
            told("/metadata", answers.metadata),
            told("/schema", lambda: SCHEMA),
            told("/state", answers.state),
            Route("/reset", answers.over_http, methods=["POST"]),
            Route("/step", answers.over_http, methods=["POST"]),
            WebSocketRoute("/ws", answers.over_websocket),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
        lifespan=answers.lifespan,
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


async def _read(request: Any) -> dict[str, Any]:
    if int(request.headers.get("content-length") or 0) > MAX_MESSAGE:
        raise ValueError(f"a request must not exceed {MAX_MESSAGE} bytes")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_MESSAGE:
            raise ValueError(f"a request must not exceed {MAX_MESSAGE} bytes")
    return json_object(body or b"{}")


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
        except (ValueError, ShoalError) as error:
            await socket.send_text(_error(str(error), "EXECUTION_ERROR"))
        except WebSocketDisconnect:
            return


def _error(message: str, code: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}})


def _is_local(origin: str | None) -> bool:
    """Programs send no origin; a browser's must be this machine."""
    from urllib.parse import urlsplit

    return origin is None or urlsplit(origin).hostname in (HOST, "localhost")
