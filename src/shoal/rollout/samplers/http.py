"""JSON over HTTP to one server, from any thread, with retries, and one error at the end.

Requests run in an event loop of their own, so that every wait has an end: an attempt has one deadline from the first
byte sent to the last one read, whatever the server does meanwhile, and all attempts together have another.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import re
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.core.errors import EngineError, needs_extra
from shoal.core.seeding import stream
from shoal.rollout.samplers.settings import check_settings

logger = logging.getLogger(__name__)

RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Statuses that say nothing about the request itself."""
MAX_REPLY = 64 * 2**20
"""Bytes of an answer; a longer one is none."""
_SECONDS = re.compile(r"[0-9]{1,300}")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a server is waited for."""

    timeout: float = 120.0  # seconds of one attempt
    retries: int = 4  # attempts after the first
    backoff: float = 0.25  # seconds before the first retry; doubled for each further one
    max_backoff: float = 8.0  # seconds between two attempts at most, also where the server asks for more

    def __post_init__(self) -> None:
        check_settings(self, ["timeout"], retries=0, backoff=0, max_backoff=self.backoff)

    @property
    def total(self) -> float:
        """Seconds of all attempts and the pauses between them, at most."""
        return self.timeout * (self.retries + 1) + self.max_backoff * self.retries


class RefusedError(EngineError):
    """The server understood the request and will not answer it: the same request would be refused again."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        """What the server calls it, such as "context_length_exceeded"; empty if it does not say."""


class Question(NamedTuple):
    """One body to post."""

    path: str
    body: Any
    name: str = ""  # names the noise of its pauses


class HttpClient:
    """Posts JSON to one server from any number of threads.

    Args:
        url: base address, such as `http://127.0.0.1:8000`.
        retry_policy: timeouts and retries.
        api_key: sent as a bearer token; never shown.
    """

    def __init__(
        self, url: str, retry_policy: RetryPolicy = RetryPolicy(), api_key: str | None = None
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the server's address must begin with http:// or https://, got {url!r}")
        self.url = url.rstrip("/")
        self.retry_policy = retry_policy
        # A packed answer could unpack to any size, so none is asked for.
        kind = "application/json"
        headers = {"Content-Type": kind, "Accept": kind, "Accept-Encoding": "identity"}
        self._headers = headers | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._closed = False
        self._loop: _Loop | None = None
        self._end: Callable[[], Any] | None = None
        self._lock = threading.RLock()  # a signal's handler may close while its thread is in here

    def post(self, path: str, body: Any) -> Any:
        """The reply to a JSON body.

        Raises:
            EngineError: the server refused the request, or gave no answer in all attempts.
        """
        (reply,) = self.post_each([Question(path, body)])
        if isinstance(reply, EngineError):
            raise reply
        return reply

    def post_each(self, questions: Sequence[Question], at_once: int = 1) -> list[Any]:
        """The reply to each question, or an `EngineError` in its place; up to `at_once` are under way at a time."""

        async def all_of_them(session: Any) -> list[Any]:
            free = asyncio.Semaphore(at_once)

            async def one(question: Question) -> Any:
                async with free:
                    return await self.reply_to(session, question)

            return await asyncio.gather(*map(one, questions))

        return self.run(all_of_them)  # type: ignore[no-any-return]

    async def reply_to(self, session: Any, question: Question) -> Any:
        """The reply to a question, or an `EngineError` in its place; in the event loop of the `session`."""
        text = json.dumps(question.body).encode()
        return self._parsed(
            question.path, await self._ask(session, "POST", question.path, text, question.name)
        )

    def get(self, path: str) -> Any:
        """The reply to a GET; raises like `post`."""
        reply = self._parsed(path, self.run(lambda session: self._ask(session, "GET", path, None, "")))
        if isinstance(reply, EngineError):
            raise reply
        return reply

    def close(self, *, for_good: bool = False) -> None:
        """End requests that are under way and close the connections; later ones open new ones, unless `for_good`."""
        with self._lock:
            self._closed = self._closed or for_good
            end, self._loop, self._end = self._end, None, None
        if end is not None:
            end()

    def run(self, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """What `work` gives, with the connections of the event loop it runs in, while the calling thread waits."""
        return self._running().run(work, self.url)

    async def within(self, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """What `work` gives, with the connections of the event loop it runs in, while another event loop waits."""
        return await self._running().within(work, self.url)

    def _running(self) -> _Loop:
        with self._lock:
            if self._closed:
                raise EngineError(f"the connection to {self.url} was closed before the request")
            if self._loop is None:
                self._loop = _Loop(self.retry_policy.timeout)
                self._end = weakref.finalize(self, self._loop.end)
            return self._loop

    async def _ask(
        self, session: Any, method: str, path: str, body: bytes | None, name: str
    ) -> bytes | EngineError:
        try:
            async with asyncio.timeout(self.retry_policy.total):
                return await self._attempts(session, method, path, body, name)
        except TimeoutError:
            return EngineError(
                f"{self.url}{path} gave no answer within {self.retry_policy.total:.1f} s in all"
            )

    async def _attempts(
        self, session: Any, method: str, path: str, body: bytes | None, name: str
    ) -> bytes | EngineError:
        import aiohttp

        retry_policy, trouble, asked_for, begin = self.retry_policy, "", 0.0, time.monotonic()
        for attempt in range(retry_policy.retries + 1):
            if attempt:
                await asyncio.sleep(max(asked_for, self._pause(attempt, name or path, trouble)))
                asked_for = 0.0
            try:
                status, retry_after, data = await self._once(session, method, path, body)
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
                return data
            message, code = _message(data)
            trouble = f"HTTP {status}: {message}"
            if status not in RETRIED:
                return RefusedError(f"{self.url}{path} refused the request: {trouble}", code)
            if _SECONDS.fullmatch(retry_after):
                asked_for = min(float(retry_after), retry_policy.max_backoff)
        seconds = time.monotonic() - begin
        return EngineError(
            f"{self.url}{path} gave no answer in {retry_policy.retries + 1} attempts over {seconds:.1f} s; "
            f"the last: {trouble}"
        )

    def _pause(self, attempt: int, name: str, trouble: str) -> float:
        """Seconds before an attempt: doubled each time, and spread so that clients do not come back together."""
        base = min(self.retry_policy.backoff * 2.0 ** min(attempt - 1, 99), self.retry_policy.max_backoff)
        pause = base * (0.5 + 0.5 * float(stream(0, "http", name, attempt).random()))
        logger.warning("%s: %s; attempt %d in %.2f s", self.url, trouble, attempt + 1, pause)
        return pause

    async def _once(self, session: Any, method: str, path: str, body: bytes | None) -> tuple[int, str, bytes]:
        """Status, Retry-After and body of one attempt."""
        url, headers = self.url + path, self._headers
        reply = await session.request(method, url, data=body, headers=headers, allow_redirects=False)
        try:
            data = bytearray()
            async for part in reply.content.iter_chunked(65_536):
                data += part
                if len(data) > MAX_REPLY:
                    raise ValueError(f"the reply is longer than {MAX_REPLY} bytes")
        except BaseException:
            reply.close()  # with the connection: nobody reads the rest
            raise
        reply.release()
        return reply.status, reply.headers.get("Retry-After", ""), bytes(data)

    def _parsed(self, path: str, data: bytes | EngineError) -> Any:
        if isinstance(data, EngineError):
            return data
        if not data.strip():
            return {}
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            if not data.lstrip().startswith((b"{", b"[")):
                return {"text": data.decode("utf-8", "replace")}
            return EngineError(f"{self.url}{path} answered broken JSON: {data[:80]!r}")


class _Loop:
    """An event loop in a thread, with its connections, and whoever waits in it."""

    def __init__(self, timeout: float) -> None:
        with needs_extra("engines on a server", "llm"):
            import aiohttp
        self._lock = threading.RLock()
        self._shut = False  # then nobody comes in, so that nobody is forgotten in a loop that ends
        self._inside: set[concurrent.futures.Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="shoal-http")
        self._thread.start()

        async def connect() -> Any:
            return aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=timeout),
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )

        self._session = asyncio.run_coroutine_threadsafe(connect(), self._loop).result()

    def _submit(
        self, work: Callable[[Any], Coroutine[Any, Any, Any]], url: str
    ) -> concurrent.futures.Future[Any]:
        with self._lock:
            if self._shut:
                raise EngineError(f"the connection to {url} was closed before the request")
            future = asyncio.run_coroutine_threadsafe(work(self._session), self._loop)
            self._inside.add(future)
        future.add_done_callback(self._inside.discard)
        return future

    async def within(self, work: Callable[[Any], Coroutine[Any, Any, Any]], url: str) -> Any:
        future = self._submit(work, url)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancelled() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise EngineError(f"the connection to {url} was closed before the answer came") from None

    def run(self, work: Callable[[Any], Coroutine[Any, Any, Any]], url: str) -> Any:
        future = self._submit(work, url)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise EngineError(f"the connection to {url} was closed before the answer came") from error
        except BaseException:
            future.cancel()
            raise

    def end(self) -> None:
        """Cancel what is under way, close the connections, and let the thread go."""

        async def finish() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._session.close()

        with self._lock:
            self._shut = True
        if threading.current_thread() is self._thread:  # the last reference was let go in there
            self._loop.stop()
            return
        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(finish(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        for future in list(self._inside):  # of tasks that would not end
            future.cancel()
        if not self._thread.is_alive():
            self._loop.close()


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
