"""JSON over HTTP to one server, with retries, and one error at the end.

Every wait has an end: an attempt has one deadline from the first byte sent to the last one read, whatever the server
does meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import urllib.parse
import weakref
from functools import partial
from typing import Any

from shoal.core.errors import EngineError, needs_extra
from shoal.core.executors import Closing
from shoal.core.ports import proxy_for
from shoal.samplers.asking import END_SECONDS, Loop, RejectedError, RetryPolicy, retried

RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Statuses that say nothing about the request itself."""
MAX_REPLY = 64 * 2**20
"""Bytes of an answer; a longer one is none."""


class NoAnswerError(EngineError):
    """The server gave no answer to one attempt.

    Args:
        message: what happened.
        retry_after: the seconds that it asks for before another one.
    """

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class HttpClient(Closing):
    """Posts JSON to one server, through the proxy that the environment names for it.

    Args:
        url: base address, such as `http://127.0.0.1:8000`.
        retry_policy: timeouts and retries.
        api_key: sent as a bearer token; never shown.

    Use it as a context manager, or call `close`, so that connections and requests under way end.
    """

    def __init__(self, url: str, retry_policy: RetryPolicy | None = None, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the server's address must begin with http:// or https://, got {url!r}")
        self.url, self.loop = url.rstrip("/"), Loop()
        self.retry_policy = retry_policy or RetryPolicy()
        self._proxy = proxy_for(url)
        # A packed answer could unpack to any size, so none is asked for.
        kind = "application/json"
        headers = {"Content-Type": kind, "Accept": kind, "Accept-Encoding": "identity"}
        self._headers = headers | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        with needs_extra("samplers on a server", "llm"):
            import aiohttp  # noqa: F401
        self._opened: list[Any] = []  # the session of its connections, when there is one
        self._connected = [0]
        self.refused = 0
        """Attempts that found no server: another process may answer the next one."""
        self._end = weakref.finalize(self, _end, self.loop, self._opened)

    def post(self, path: str, body: Any) -> Any:
        """The reply to a JSON body; raises like `request`."""
        return self.loop.run(self.request("POST", path, body))

    def get(self, path: str) -> Any:
        """The reply to a GET; raises like `request`."""
        return self.loop.run(self.request("GET", path))

    @property
    def connections(self) -> int:
        """How many connections were made: a process that was restarted answers by none of those before."""
        return self._connected[0]

    def close(self) -> None:
        """Give up requests that are under way; nothing is answered any more."""
        self._end()

    async def request(self, method: str, path: str, body: Any = None, name: str = "") -> Any:
        """The reply to a request, in the event loop of this process.

        Args:
            method: GET or POST.
            path: behind the base address.
            body: is sent as JSON.
            name: of the noise of its pauses.

        Raises:
            EngineError: the server gave no answer in all attempts, or a broken one.
            RejectedError: it rejected the request.
        """
        return await retried(partial(self.attempt, method, path, body), self.retry_policy, name or path)

    async def attempt(self, method: str, path: str, body: Any = None) -> Any:
        """The reply to a request that is made once; raises like `request`."""
        import aiohttp

        data, where = None if body is None else json.dumps(body).encode(), f"{self.url}{path}"
        try:
            status, retry_after, reply = await self._once(method, path, data)
        except TimeoutError:
            raise NoAnswerError(f"{where} timed out after {self.retry_policy.timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno or 0
            # TLS has numbers of its own
            plain = number > 0 and not isinstance(error, aiohttp.ClientSSLError)
            trouble = os.strerror(number) if plain else error.os_error
            self.refused += 1
            raise NoAnswerError(f"{where}: no connection: {trouble}") from error
        except (aiohttp.ClientError, OSError, ValueError, EOFError) as error:
            raise NoAnswerError(f"{where}: {type(error).__name__}: {error}") from error
        if status < 300:
            return _parsed(where, reply)
        message, code = _message(reply)
        if status not in RETRIED:
            raise RejectedError(f"{where} refused the request: HTTP {status}: {message}", code)
        pause = float(retry_after) if retry_after.isdecimal() else 0.0  # a date asks for nothing
        raise NoAnswerError(f"{where}: HTTP {status}: {message}", pause)

    def _session(self) -> Any:
        """The connections, which belong to the event loop."""
        import aiohttp

        if not self._opened:
            connected, trace = self._connected, aiohttp.TraceConfig()

            async def count(*_: Any) -> None:
                connected[0] += 1

            trace.on_connection_create_end.append(count)
            session = aiohttp.ClientSession(
                trace_configs=[trace],
                timeout=aiohttp.ClientTimeout(total=self.retry_policy.timeout),
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
            self._opened.append(session)
        return self._opened[0]

    async def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, str, bytes]:
        """Status, Retry-After and body of one attempt."""
        settings = {"data": body, "headers": self._headers, "allow_redirects": False, "proxy": self._proxy}
        async with self._session().request(method, self.url + path, **settings) as reply:
            data = bytearray()
            async for part in reply.content.iter_chunked(65_536):
                data += part
                if len(data) > MAX_REPLY:
                    raise ValueError(f"the reply is longer than {MAX_REPLY} bytes")
            return reply.status, reply.headers.get("Retry-After", ""), bytes(data)


def _end(loop: Loop, opened: list[Any]) -> None:
    loop.close()
    while opened:
        ended = asyncio.run_coroutine_threadsafe(opened.pop().close(), loop.loop)
        if asyncio._get_running_loop() is not loop.loop:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                ended.result(END_SECONDS)


def _parsed(where: str, data: bytes) -> Any:
    if not data.strip():
        return {}
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        if not data.lstrip().startswith((b"{", b"[")):
            return {"text": data.decode("utf-8", "replace")}
        raise EngineError(f"{where} answered broken JSON: {data[:80]!r}") from error


def _message(data: bytes) -> tuple[str, str]:
    """What a server says of an error, in at most 300 characters, and what it calls it."""
    text, code = data.decode("utf-8", "replace").strip(), ""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        reply = json.loads(text)
        error = reply.get("error", reply)
        if isinstance(error, dict):
            code = str(error.get("code") or "")[:80]
            error = error.get("message", error)
        text = str(error)
    return text[:300], code
