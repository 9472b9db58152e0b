"""The gateway as a server of this machine alone: who knows its secret may ask the model.

Each call is on disk before it is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shoal.core.errors import EngineError, needs_extra
from shoal.core.executors import Closing
from shoal.core.files import append_line
from shoal.core.ports import listening, no_proxy
from shoal.core.registry import SAFE_NAME
from shoal.core.seeding import derive_seed
from shoal.gateway import anthropic, completions, openai, responses
from shoal.gateway.chats import PICKING, ChatRequest, RefusedError, flag, from_json
from shoal.gateway.sessions import Choice, ClosedError, Recorded, Session, Tokens
from shoal.samplers.asking import Loop
from shoal.samplers.sampler import ChatTokenizer, Key

logger = logging.getLogger(__name__)
MOST_BODY = 16 << 20
"""Bytes of a request."""
BODY_SECONDS = 30.0
"""In which a request must have arrived."""
LOCAL = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Wire:
    """How a path speaks: requests into turns, answers into JSON and streams."""

    read: Callable[[Mapping[str, Any], int], ChatRequest]
    write: Callable[[ChatRequest, str, Sequence[Choice]], dict[str, Any]]
    stream: Callable[[ChatRequest, Mapping[str, Any]], Iterator[bytes]]
    error: Callable[[RefusedError], dict[str, Any]]


def _openai_error(error: RefusedError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": None}}


def _anthropic_error(error: RefusedError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    found: dict[str, Any] = {"type": kind, "message": str(error)}
    if error.param == anthropic.THREAD:
        found["details"] = {"error_code": "thread_unsupported_request", "unsupported": [anthropic.THREAD]}
    return {"type": "error", "error": found}


WIRES = {
    "chat/completions": Wire(openai.chat, openai.chat_answer, openai.chat_stream, _openai_error),
    "completions": Wire(
        completions.completion, completions.completion_answer, completions.completion_stream, _openai_error
    ),
    "responses": Wire(responses.response, responses.response_answer, responses.response_stream, _openai_error),
    "messages": Wire(anthropic.messages, anthropic.message_answer, anthropic.message_stream, _anthropic_error),
}  # fmt: skip


@dataclass(frozen=True)
class Room:
    """How much a gateway keeps of sessions that began by being asked; beyond that those end that are idle longest."""

    idle_seconds: float = 86_400.0
    """after which a session ends in which nothing was asked"""
    sessions: int = 10_000
    bytes: int = 1 << 30
    """of all their calls in memory, roughly"""


EACH = 64
"""Requests after which it is looked how much there is of all sessions."""


class Record:
    """A file of calls; those that come while others are being written are written together."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, list[bytes]()
        self._one = asyncio.Lock()  # is written at a time
        self._next: asyncio.Task[None] | None = None

    async def add(self, recorded: Recorded) -> None:
        """Return when a call is on disk.

        Raises:
            OSError: it cannot be written.
        """
        self._lines.append(msgspec.json.encode(recorded) + b"\n")
        self._next = self._next or asyncio.ensure_future(self._write())
        await asyncio.shield(self._next)

    async def _write(self) -> None:
        async with self._one:
            lines, self._lines, self._next = b"".join(self._lines), [], None
            await asyncio.to_thread(append_line, self._path, lines, durable=True)


class Gateway:
    """Sessions in front of a sampler.

    Args:
        sampler: what answers; it has `async sample(request)`.
        tokenizer: of the model.
        max_tokens: of an answer, at most.
        journal: a file in which each call is written down before it is answered; None keeps them in memory alone.
        seed: of the noise of sessions that begin by being asked.
        secret: what addresses begin with; drawn if not given.
        model: its name for programs that name none.
        by_asking: whether a session begins when it is first asked, or only by `open`.
        room: when sessions end that began so; who asks them afterwards is refused, for their record is closed.
    """

    def __init__(
        self,
        sampler: Any,
        tokenizer: ChatTokenizer,
        *,
        max_tokens: int = 1024,
        journal: Path | None = None,
        seed: int = 0,
        secret: str | None = None,
        model: str = "shoal",
        by_asking: bool = True,
        room: Room = Room(),
    ) -> None:
        self.sampler, self.tokens, self.max_tokens = sampler, Tokens(tokenizer), max_tokens
        self.seed, self.model, self._by_asking = seed, model, by_asking
        self._record = None if journal is None else Record(journal)
        self.secret = secret or secrets.token_urlsafe(24)
        self.sessions: dict[str, Session] = {}
        self._room, self._requests = room, 0
        self._asked_at: dict[str, float] = {}  # by session that may end by itself; what is idle longest first
        self._ended: set[str] = set()
        self.warned = False
        """Whether it was said that a program asks several things at once."""

    def open(self, name: str, key: Key | None = None, **limits: Any) -> Session:
        """Begin a session.

        Args:
            name: in the address; letters, digits, `._-`.
            key: names its noise; by its name alone if not given.
            **limits: of the session: `fixed`, `most_calls`.

        Raises:
            RefusedError: there is one of that name.
        """
        if not SAFE_NAME.fullmatch(name):
            raise RefusedError(
                f"a session's name must match {SAFE_NAME.pattern}, got {name[:80]!r}", status=404
            )
        if name in self.sessions:
            raise RefusedError(f"there is a session {name!r} already", status=409)
        if key is None:
            key = Key(self.seed, (derive_seed(self.seed, "session", name),))
        write = None if self._record is None else self._record.add
        self.sessions[name] = Session(name, key, self.tokens, self.sampler, write, **limits)
        return self.sessions[name]

    def url(self, base: str, session: str) -> str:
        """The address of a session, where the gateway answers at `base`."""
        return f"{base}/{self.secret}/{session}"

    def variables(self, base: str, session: str) -> dict[str, str]:
        """Environment variables by which SDKs find a session, and ask it without a proxy that may be set."""
        address = self.url(base, session)
        return {
            "OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "shoal",
            "ANTHROPIC_BASE_URL": address, "ANTHROPIC_API_KEY": "shoal", **no_proxy(),
        }  # fmt: skip

    async def handle(self, path: str, session: str, body: bytes, retried: bool) -> tuple[int, Any]:
        """The status and the JSON (or the events, as an iterator of bytes) of an answer."""
        wire = WIRES[path]
        try:
            asked = self._read(wire, body)
            answers = await self._known(session).answer(asked, path.encode() + body, retried=retried)
        except RefusedError as error:
            self.refuse(session, error)
            return error.status, wire.error(error)
        except (EngineError, OSError) as error:  # no answer in time, or a full disk
            return 503, wire.error(RefusedError(str(error), status=503))
        answer = wire.write(asked, session, answers)
        return 200, wire.stream(asked, answer) if asked.stream else answer

    async def count(self, session: str, body: bytes) -> tuple[int, Any]:
        """The status and the JSON of an answer to Anthropic's `count_tokens`; nothing is asked or recorded."""
        wire = WIRES["messages"]
        try:
            asked = self._read(wire, body)
            found = self.sessions.get(session) or Session(session, Key(0, ()), self.tokens, self.sampler)
            return 200, {"input_tokens": await found.count(asked)}
        except RefusedError as error:
            self.refuse(session, error)
            return error.status, wire.error(error)

    def refuse(self, session: str, error: RefusedError) -> None:
        """Note a refused request in its session, if there is one of that name."""
        if session in self.sessions:
            self.sessions[session].refuse(error)

    def _known(self, name: str) -> Session:
        found = self.sessions.get(name)
        if not self._by_asking:
            if found is None:
                raise ClosedError(name)
            return found
        if name in self._ended:
            raise ClosedError(
                name, ", to make room or after a long silence: take another name for what is new"
            )
        self._requests += 1
        session = found or self.open(name)
        self._asked_at.pop(name, None)
        self._asked_at[name] = time.monotonic()
        if found is None or self._requests % EACH == 0:
            self._make_room(name)
        return session

    def _make_room(self, asked: str) -> None:
        """End sessions, those first that are idle longest; never the one that is being asked."""
        room, now = self._room, time.monotonic()
        held = sum(session.size for session in self.sessions.values())
        for name, then in list(self._asked_at.items()):
            crowded = len(self._asked_at) > room.sessions or held > room.bytes
            if not crowded and now - then <= room.idle_seconds:
                break
            session = self.sessions[name]
            if name != asked and session.idle:
                session.closed = True
                held -= session.size
                del self.sessions[name], self._asked_at[name]
                self._ended.add(name)

    def _read(self, wire: Wire, body: bytes) -> ChatRequest:
        try:
            given = from_json(body)
        except ValueError as error:
            raise RefusedError(f"the request is no JSON: {error}") from error
        if not isinstance(given, dict):
            raise RefusedError("the request must be a JSON object")
        asked = wire.read(given, self.max_tokens)
        settings = {name: given[name] for name in PICKING if given.get(name) is not None}
        model = str(given.get("model") or self.model)
        return replace(asked, model=model, stream=flag(given, "stream"), settings=settings)


def make_app(gateway: Gateway) -> Any:
    """The Starlette application of a gateway."""
    with needs_extra("the gateway", "web"):
        from starlette.applications import Starlette
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route

    async def read(request: Request) -> bytes:
        if int(request.headers.get("content-length") or 0) > MOST_BODY:
            raise RefusedError(f"the request is larger than {MOST_BODY >> 20} MiB", status=413)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > MOST_BODY:
                        raise RefusedError(f"the request is larger than {MOST_BODY >> 20} MiB", status=413)
                    parts.append(part)
        except TimeoutError:
            raise RefusedError(f"the request did not arrive within {BODY_SECONDS:g} s", status=408) from None
        return b"".join(parts)

    def refused(request: Request, status: int, text: str) -> Response:
        wire = WIRES.get(request.path_params.get("path", ""), WIRES["chat/completions"])
        error = RefusedError(text, status=status)
        secret, _, behind = request.scope["path"][1:].partition("/")
        if is_secret(secret):
            gateway.refuse(behind.partition("/")[0], error)
        return JSONResponse(wire.error(error), status)

    def is_secret(text: str) -> bool:
        return hmac.compare_digest(text.encode(), gateway.secret.encode())

    def guard(request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        name = host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if name not in LOCAL or (origin is not None and urlsplit(origin).netloc != host):
            return refused(request, 403, "this server only answers programs of this machine")
        if not is_secret(request.path_params["secret"]):
            return refused(request, 404, "there is no such address: use the whole one, secret included")
        return None

    async def ask(request: Request) -> Response:
        if (answer := guard(request)) is not None:
            return answer
        path, session = request.path_params["path"], request.path_params["session"]
        counts = path == "messages/count_tokens"
        if path not in WIRES and not counts:
            return refused(request, 404, f"/v1/{path[:80]} is not served; {', '.join(WIRES)} are")
        try:
            body = await read(request)
        except RefusedError as error:
            return refused(request, error.status, str(error))
        except ClientDisconnect:
            return Response(status_code=400)
        if counts:
            status, found = await gateway.count(session, body)
            return JSONResponse(found, status)
        retried = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        try:
            status, found = await gateway.handle(path, session, body, retried)
        except asyncio.CancelledError:  # the loop ends while the model is being asked
            return refused(request, 503, "the gateway has ended")
        if isinstance(found, dict):
            return JSONResponse(found, status)
        return StreamingResponse(found, status, media_type="text/event-stream")

    async def models(request: Request) -> Response:
        asked = request.path_params.get("model")  # any name will do: there is one model
        entry = {"id": asked or gateway.model, "object": "model", "created": 0, "owned_by": "shoal"}
        return guard(request) or JSONResponse({"object": "list", "data": [entry]} if asked is None else entry)

    async def nowhere(request: Request) -> Response:
        served = "POST to /SECRET/SESSION/v1/chat/completions, or GET /SECRET/SESSION/v1/models"
        return refused(request, 404, f"nothing answers {request.method} at this address: {served}")

    return Starlette(
        routes=[
            Route("/{secret}/{session}/v1/models", models, methods=["GET"]),
            Route("/{secret}/{session}/v1/models/{model:path}", models, methods=["GET"]),
            Route("/{secret}/{session}/v1/{path:path}", ask, methods=["POST"]),
            Route("/{path:path}", nowhere, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]
    )


class GatewayServer(Closing):
    """A gateway that answers on 127.0.0.1 in the event loop of the process, as long as it is open.

    Args:
        gateway: what answers.
        port: 0 takes a free one.
    """

    def __init__(self, gateway: Gateway, port: int = 0) -> None:
        with needs_extra("the gateway", "web"):
            import uvicorn
        self.gateway = gateway
        self._listener = listening(port)
        self.base = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(
            make_app(gateway), log_level="error", access_log=False, server_header=False, lifespan="off",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._loop = Loop()
        self._serving = self._loop.submit(self._server.serve(sockets=[self._listener]))

    def variables(self, session: str) -> dict[str, str]:
        """Environment variables by which SDKs find a session."""
        return self.gateway.variables(self.base, session)

    def close(self) -> None:
        """End the server; may be called twice."""
        self._server.should_exit = True
        with contextlib.suppress(Exception):
            self._serving.result(5)
        self._loop.close()
        self._listener.close()

    async def end(self) -> None:
        """End the server at once, from inside its event loop."""
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait([asyncio.wrap_future(self._serving)])
        self.close()
