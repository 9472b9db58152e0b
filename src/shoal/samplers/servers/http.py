"""JSON over HTTP to one server, with retries, and one error at the end.

Every wait has an end: an attempt has one deadline from the first byte sent to the last one read, whatever the server
does meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

from shoal.core.configuration import check_settings
from shoal.core.errors import EngineError, needs_extra
from shoal.core.ports import proxy_for
from shoal.core.seeding import stream
from shoal.samplers.loops import LoopThread

logger = logging.getLogger(__name__)

RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Statuses that say nothing about the request itself."""
MAX_REPLY = 64 * 2**20
"""Bytes of an answer; a longer one is none."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a server is waited for."""

    timeout: float = 120.0  # seconds of one attempt
    retries: int = 4  # attempts after the first
    backoff: float = 0.25  # seconds before the first retry; doubled for each further one
    max_backoff: float = 8.0  # seconds between two attempts at most, also where the server asks for more
    patience: float | None = None  # seconds in which further attempts begin, in the place of `retries`

    def __post_init__(self) -> None:
        check_settings(self, ["timeout", "patience"], retries=0, backoff=0, max_backoff=self.backoff)


class RefusedError(EngineError):
    """The server understood the request and will not answer it: the same request would be refused again."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        """What the server calls it, such as "context_length_exceeded"; empty if it does not say."""


class HttpClient:
    """Posts JSON to one server, through the proxy that the environment names for it.

    Args:
        url: base address, such as `http://127.0.0.1:8000`.
        loop: where requests run; the connections end with it.
        retry_policy: timeouts and retries.
        api_key: sent as a bearer token; never shown.
    """

    def __init__(
        self,
        url: str,
        loop: LoopThread,
        retry_policy: RetryPolicy = RetryPolicy(),
        api_key: str | None = None,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the server's address must begin with http:// or https://, got {url!r}")
        self.url = url.rstrip("/")
        self._proxy = proxy_for(url)
        self.retry_policy = retry_policy
        # A packed answer could unpack to any size, so none is asked for.
        kind = "application/json"
        headers = {"Content-Type": kind, "Accept": kind, "Accept-Encoding": "identity"}
        self._headers = headers | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._loop = loop
        self._session, self._closing = loop.run(_opened(retry_policy.timeout))

    def post(self, path: str, body: Any) -> Any:
        """The reply to a JSON body; raises like `request`."""
        return self._loop.run(self.request("POST", path, body))

    def get(self, path: str) -> Any:
        """The reply to a GET; raises like `request`."""
        return self._loop.run(self.request("GET", path))

    async def request(self, method: str, path: str, body: Any = None, name: str = "") -> Any:
        """The reply to a request, in the client's event loop.

        Args:
            method: GET or POST.
            path: behind the base address.
            body: is sent as JSON.
            name: of the noise of its pauses.

        Raises:
            EngineError: the server gave no answer in all attempts, or a broken one.
            RefusedError: it refused the request.
        """
        import aiohttp

        data = None if body is None else json.dumps(body).encode()
        retry_policy, trouble, asked_for, begin = self.retry_policy, "", 0.0, time.monotonic()
        patience, attempts = retry_policy.patience, 0
        for attempt in itertools.count() if patience is not None else range(retry_policy.retries + 1):
            if attempt:
                pause = max(asked_for, self._pause(attempt, name or path, trouble))
                if patience is not None and time.monotonic() + pause - begin > patience:
                    break
                await asyncio.sleep(pause)
                asked_for = 0.0
            attempts += 1
            try:
                status, retry_after, reply = await self._once(method, path, data)
            except TimeoutError:
                trouble = f"it timed out after {retry_policy.timeout:g} s"
                continue
            except aiohttp.ClientConnectorError as error:
                number = error.os_error.errno or 0
                # it has numbers of its own
                plain = number > 0 and not isinstance(error, aiohttp.ClientSSLError)
                trouble = f"no connection: {os.strerror(number) if plain else error.os_error}"
                continue
            except (aiohttp.ClientError, OSError, ValueError, EOFError) as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if status < 300:
                return self._parsed(path, reply)
            message, code = _message(reply)
            trouble = f"HTTP {status}: {message}"
            if status not in RETRIED:
                raise RefusedError(f"{self.url}{path} refused the request: {trouble}", code)
            if retry_after.isdecimal():  # a date asks for nothing
                asked_for = min(float(retry_after), retry_policy.max_backoff)
        seconds = time.monotonic() - begin
        raise EngineError(
            f"{self.url}{path} gave no answer in {attempts} attempts over {seconds:.1f} s; "
            f"the last: {trouble}"
        )

    def _pause(self, attempt: int, name: str, trouble: str) -> float:
        """Seconds before an attempt: doubled each time, and spread so that clients do not come back together."""
        base = min(self.retry_policy.backoff * 2.0 ** min(attempt - 1, 99), self.retry_policy.max_backoff)
        pause = base * (0.5 + 0.5 * float(stream(0, "http", name, attempt).random()))
        logger.warning("%s: %s; attempt %d in %.2f s", self.url, trouble, attempt + 1, pause)
        return pause

    async def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, str, bytes]:
        """Status, Retry-After and body of one attempt."""
        settings = {"data": body, "headers": self._headers, "allow_redirects": False, "proxy": self._proxy}
        async with self._session.request(method, self.url + path, **settings) as reply:
            data = bytearray()
            async for part in reply.content.iter_chunked(65_536):
                data += part
                if len(data) > MAX_REPLY:
                    raise ValueError(f"the reply is longer than {MAX_REPLY} bytes")
            return reply.status, reply.headers.get("Retry-After", ""), bytes(data)

    def _parsed(self, path: str, data: bytes) -> Any:
        if not data.strip():
            return {}
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            if not data.lstrip().startswith((b"{", b"[")):
                return {"text": data.decode("utf-8", "replace")}
            raise EngineError(f"{self.url}{path} answered broken JSON: {data[:80]!r}") from error


async def _opened(timeout: float) -> tuple[Any, asyncio.Task[None]]:
    """A session of connections, and a task that closes them when its event loop ends."""
    with needs_extra("samplers on a server", "llm"):
        import aiohttp
    session = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout),
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )

    async def until_the_loop_ends() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await session.close()

    return session, asyncio.create_task(until_the_loop_ends())


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
