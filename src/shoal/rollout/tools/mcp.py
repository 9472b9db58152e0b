"""MCP servers as tools: a process that speaks over its pipes, or an address (streamable HTTP).

All of it runs in one event loop. A server that dies, or hangs so that it does not even list its tools, is ended with
all that it started, and begins anew for the next call; a call in which a server died is made once more.
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
from typing import Any
from urllib.parse import urlsplit

from shoal.core.errors import ConfigError, EnvError, format_error, needs_extra
from shoal.core.ports import is_this_machine

START_SECONDS = 30.0
"""Within which a server must be there."""
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
    names: tuple[str, ...] = ()
    """Which of its tools the model may call; all if empty."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError("mcp needs a command (a list of words) or a url, and not both")

    def __str__(self) -> str:
        return self.url or " ".join(self.command)


class ToolsFailedError(EnvError):
    """The tools of an episode are not there: it is played again, and counted as failed if that does not help."""


class McpServer:
    """One server; all methods are called in one event loop.

    Args:
        config: which.
    """

    def __init__(self, config: McpConfig) -> None:
        with needs_extra("MCP servers as tools", "tools"):
            from mcp import Client  # noqa: F401
        self.config = config
        self._lock = asyncio.Lock()
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        self._said: Any = None  # the file of its standard error
        self._trouble = ""  # why there is no connection

    async def tools(self) -> list[Any]:
        """The tools that it lists, under `names` if given.

        Raises:
            ToolsFailedError: it does not start, or does not answer.
            ConfigError: it has no tool of that name.
        """
        client, _ = await self._connected()
        try:
            async with asyncio.timeout(START_SECONDS):
                page = await client.list_tools()
                listed = list(page.tools)
                while page.next_cursor and len(listed) < 1000:
                    page = await client.list_tools(cursor=page.next_cursor)
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
        return [tool for tool in listed if not names or tool.name in names]

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
                connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._end = asyncio.Event()
                self._task = asyncio.create_task(self._hold(connected.set_result, self._end))
                await asyncio.wait(
                    {connected, self._task}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if not connected.done():
                    late = not self._task.done()
                    await self._stop(self._task)
                    why = f"did not answer within {START_SECONDS:g} s" if late else "cannot be reached"
                    trouble = "" if late else f": {self._trouble}"  # else it is that of being stopped
                    raise ToolsFailedError(f"MCP server {self.config} {why}{self._last_words() or trouble}")
                self._client = connected.result()
            return self._client, self._task

    async def _hold(self, connected: Callable[[Any], None], end: asyncio.Event) -> None:
        """Connect, and stay connected until the end; trouble ends this task."""
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        config = self.config
        try:
            server: Any = config.url
            if config.command:
                self._said = self._said or tempfile.TemporaryFile("w+")  # noqa: SIM115  # its last words are read later
                command, *words = (sys.executable if word == "{python}" else word for word in config.command)
                variables = {**os.environ, **config.variables}
                server = stdio_client(
                    StdioServerParameters(command=command, args=words, env=variables, cwd=config.folder),
                    self._said,
                )
            async with contextlib.AsyncExitStack() as ending:
                if config.url and is_this_machine(urlsplit(config.url).hostname or ""):
                    limits = httpx2.Timeout(START_SECONDS, read=READ_SECONDS)
                    direct = httpx2.AsyncClient(
                        trust_env=False, timeout=limits
                    )  # no proxy of the environment
                    await ending.enter_async_context(direct)
                    server = streamable_http_client(config.url, http_client=direct)
                connected(await ending.enter_async_context(Client(server, cache=None)))
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
    from mcp_types import CONNECTION_CLOSED

    code = getattr(getattr(error, "error", error), "code", None)
    return code == CONNECTION_CLOSED or type(error).__module__.partition(".")[0] in ("anyio", "httpx2")


def _text(result: Any) -> tuple[str, bool]:
    """What a result says, with its structured data as JSON behind texts that do not hold it; and whether it failed."""
    parts, data = list(map(_part, result.content)), result.structured_content
    texts = [
        text for text, part in zip(parts, result.content, strict=True) if part.type in ("text", "resource")
    ]
    if data is not None and not _holds(texts, data):
        parts.append(json.dumps(data, ensure_ascii=False))
    return "\n".join(parts), bool(result.is_error)


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
