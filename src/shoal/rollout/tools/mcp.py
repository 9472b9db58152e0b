"""MCP servers as tools: a process that speaks over its pipes, or an address (streamable HTTP).

Versions 1 and 2 of the package `mcp` are used alike. All of it runs in one event loop. A server that dies, or hangs so
that it does not even list its tools, is ended with all that it started, and begins anew for the next call; a call in
which a server died is made once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from shoal.core.configuration import check_settings
from shoal.core.errors import ConfigError, EnvError, format_error, needs_extra
from shoal.core.ports import is_this_machine

LIST_SECONDS = 30.0
"""Within which a server must list its tools."""
READ_SECONDS = 300.0
"""Within which the next part of an answer of a server of this machine must come, as with the package of MCP."""
STOP_SECONDS = 10.0
"""For which the end of a server is waited for; the package of MCP kills one that does not end by itself."""
LOOK_SECONDS = 5.0
"""Within which a server must list its tools after a call that took too long, at most."""


@dataclass(frozen=True)
class McpConfig:
    """A server of the Model Context Protocol: `command`, or `url`."""

    command: tuple[str, ...] = ()
    """Starts it; `{python}` is the Python that runs shoal."""
    url: str | None = None
    """Its address (streamable HTTP), such as http://127.0.0.1:8000/mcp."""
    folder: str | None = None
    """Where the command runs; the current folder if not given."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the command, beside those of shoal."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of each request to a url, such as `Authorization`."""
    names: tuple[str, ...] = ()
    """Which of its tools the model may call; all if empty."""
    scope: Literal["run", "episode"] = "run"
    """`run`: one server for all episodes, which share its state. `episode`: each has a server (of a url: a session) of
    its own, from its first call to its end."""
    start_seconds: float = 30.0
    """Within which a server must be there; more for commands that download first, as npx and uvx do."""

    def __post_init__(self) -> None:
        check_settings(self, ["start_seconds"])
        if self.headers and not self.url:
            raise ConfigError("mcp.headers are those of a url: give a command its secrets by mcp.variables")
        if bool(self.command) == bool(self.url):
            raise ConfigError("mcp needs a command (a list of words) or a url, and not both")

    def __str__(self) -> str:
        return self.url or " ".join(self.command)


class ToolsFailedError(EnvError):
    """The tools of an episode are not there: it is played again, and counted as failed if that does not help."""


class McpServer:
    """One server; all methods are called in one event loop."""

    def __init__(self, config: McpConfig) -> None:
        with needs_extra("MCP servers as tools", "tools"):
            from mcp import ClientSession  # noqa: F401
        self.config = config
        self._lock = asyncio.Lock()
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        self._said: Any = None  # the file of its standard error
        self._trouble = ""  # why there is no connection

    async def tools(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Name, description and JSON schema of the tools that it lists, under `names` if given.

        Raises:
            ToolsFailedError: it does not start, or does not answer.
            ConfigError: it has no tool of that name.
        """
        client, _ = await self._connected()
        from mcp.types import PaginatedRequestParams

        try:
            async with asyncio.timeout(LIST_SECONDS):
                page = await client.list_tools()
                listed = list(page.tools)
                while (cursor := _of(page, "nextCursor")) and len(listed) < 1000:
                    page = await client.list_tools(params=PaginatedRequestParams(cursor=cursor))
                    listed += page.tools
        except Exception as error:
            raise ToolsFailedError(
                f"MCP server {self.config} lists no tools: {format_error(error)}"
            ) from error
        known, names = {tool.name: tool for tool in listed}, self.config.names
        if missing := [name for name in names if name not in known]:
            raise ConfigError(
                f"MCP server {self.config} has no tool {missing[0]!r}; it has {', '.join(known)}"
            )
        return [
            (tool.name, tool.description or "", _of(tool, "inputSchema"))
            for tool in listed
            if not names or tool.name in names
        ]

    async def call(self, name: str, arguments: Mapping[str, Any], timeout: float) -> tuple[str, bool]:
        """The text of a tool's result, and whether that is an error.

        Raises:
            TimeoutError: it did not answer in time.
            ToolsFailedError: the server died twice, or cannot be started again.
        """
        for _ in range(2):
            client, task = await self._connected()
            try:
                async with asyncio.timeout(timeout):
                    return _text(await client.call_tool(name, dict(arguments)))
            except TimeoutError:
                if not await self._lives(client):
                    await self._stop(task)
                raise
            except Exception as error:
                if not _is_end(error):
                    return format_error(error), True
            await self._stop(task)
        raise ToolsFailedError(
            f"MCP server {self.config} ended in a call of {name}, twice{self._last_words()}"
        )

    async def stop(self) -> None:
        """End it; may be called twice."""
        if self._task is not None:
            await self._stop(self._task)
        if self._said is not None:
            self._said.close()
            self._said = None

    # --- the connection, which lives in a task of its own
    async def _connected(self) -> tuple[Any, asyncio.Task[None]]:
        """The client, of a new connection if there is none."""
        async with self._lock:
            if self._task is None or self._task.done():
                seconds = self.config.start_seconds
                connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._end = asyncio.Event()
                self._task = asyncio.create_task(self._hold(connected.set_result, self._end))
                await asyncio.wait(
                    {connected, self._task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if not connected.done():
                    late = not self._task.done()
                    self._task.cancel()  # it waits for the server, not for its end
                    await self._stop(self._task)
                    why = (
                        f"did not answer within {seconds:g} s (mcp.start_seconds)"
                        if late
                        else "cannot be reached"
                    )
                    trouble = "" if late else f": {self._trouble}"  # else it is that of being stopped
                    raise ToolsFailedError(f"MCP server {self.config} {why}{self._last_words() or trouble}")
                self._client = connected.result()
            return self._client, self._task

    async def _hold(self, connected: Callable[[Any], None], end: asyncio.Event) -> None:
        """Connect, and stay connected until the end; trouble ends this task."""
        from mcp import ClientSession, StdioServerParameters
        from mcp.client import streamable_http as http
        from mcp.client.stdio import stdio_client

        config = self.config
        server: Any
        try:
            if config.command:
                self._said = self._said or tempfile.TemporaryFile("w+")  # noqa: SIM115  # its last words are read later
                command, *words = (sys.executable if word == "{python}" else word for word in config.command)
                variables = {**os.environ, **config.variables}
                server = stdio_client(
                    StdioServerParameters(command=command, args=words, env=variables, cwd=config.folder),
                    self._said,
                )
            async with contextlib.AsyncExitStack() as ending:
                if config.url:
                    library: Any = getattr(http, "httpx2", None) or http.httpx  # of mcp 2, of mcp 1
                    client = library.AsyncClient(
                        trust_env=not is_this_machine(urlsplit(config.url).hostname or ""),  # else no proxy
                        timeout=library.Timeout(config.start_seconds, read=READ_SECONDS),
                        headers=config.headers,
                        follow_redirects=True,
                    )
                    await ending.enter_async_context(client)
                    server = http.streamable_http_client(config.url, http_client=client)
                read, write, *_ = await ending.enter_async_context(server)
                session = await ending.enter_async_context(ClientSession(read, write))
                await session.initialize()
                connected(session)
                await end.wait()
        except (Exception, asyncio.CancelledError) as error:
            inside: BaseException = error
            while isinstance(inside, BaseExceptionGroup):
                inside = inside.exceptions[0]
            self._trouble = format_error(inside)

    async def _stop(self, task: asyncio.Task[None]) -> None:
        """End a connection, with the process at its other end."""
        if task is self._task:
            self._end.set()
        done, _ = await asyncio.wait({task}, timeout=STOP_SECONDS)
        if not done:
            task.cancel()
            await asyncio.wait({task}, timeout=STOP_SECONDS)

    async def _lives(self, client: Any) -> bool:
        """Whether the server answers something else."""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await client.list_tools()
        except Exception:
            return False
        return True

    def _last_words(self) -> str:
        """The last line that it wrote to its standard error."""
        if self._said is None:
            return ""
        self._said.seek(0)
        lines = self._said.read().splitlines()
        return f": {lines[-1][:300]}" if lines else ""


def _is_end(error: BaseException) -> bool:
    """Whether a call failed since there is no connection any more."""
    from mcp.types import CONNECTION_CLOSED

    code = getattr(getattr(error, "error", error), "code", None)
    return code == CONNECTION_CLOSED or type(error).__module__.partition(".")[0] in (
        "anyio",
        "httpx",
        "httpx2",
    )


def _of(found: Any, name: str) -> Any:
    """A field as MCP names it, of mcp 1, or in Python's spelling, of mcp 2."""
    own = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    return getattr(found, own) if hasattr(found, own) else getattr(found, name)


def _text(result: Any) -> tuple[str, bool]:
    """What a result says, with its structured data as JSON behind texts that do not hold it; and whether it failed."""
    parts, data = list(map(_part, result.content)), _of(result, "structuredContent")
    texts = [
        text for text, part in zip(parts, result.content, strict=True) if part.type in ("text", "resource")
    ]
    if data is not None and not _holds(texts, data):
        parts.append(json.dumps(data, ensure_ascii=False))
    return "\n".join(parts), bool(_of(result, "isError"))


def _part(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        text = getattr(part.resource, "text", None)
        return f"[resource {part.resource.uri}]" if text is None else str(text)
    return f"[resource_link {part.name}: {part.uri}]" if part.type == "resource_link" else f"[{part.type}]"


def _holds(texts: list[str], data: Any) -> bool:
    """Whether texts say the same as structured data, in which servers name a value that is no object `result`."""
    written = {"".join(json.dumps(data, ensure_ascii=ascii).split()) for ascii in (True, False)}
    if any(one in "".join(text.split()) for text in texts for one in written):
        return True
    values = list(map(_value, texts))
    found = [texts, values, *texts, *values] if len(texts) == 1 else [texts, values] if texts else []
    wrapped = isinstance(data, dict) and set(data) == {"result"}
    return data in found or (wrapped and data["result"] in found)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
