"""JSON over HTTP with kept connections, retries and one error at the end; the standard library is enough."""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import urllib.parse
from collections import deque
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import EngineError
from shoal.core.seeding import stream

logger = logging.getLogger(__name__)

RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Statuses that say nothing about the request itself."""
MAX_REPLY = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server is waited for."""

    timeout: float = 120.0  # seconds of one attempt
    retries: int = 4  # attempts after the first
    backoff: float = 0.25  # seconds before the first retry; doubled for each further one
    max_backoff: float = 8.0

    def __post_init__(self) -> None:
        if not self.timeout > 0 or self.retries < 0 or self.backoff < 0 or self.max_backoff < self.backoff:
            raise ValueError(
                f"expected timeout > 0, retries >= 0 and 0 <= backoff <= max_backoff, got {self}"
            )


class HttpClient:
    """Posts JSON to one server from any number of threads.

    Args:
        url: base address, such as `http://127.0.0.1:8000`.
        patience: timeouts and retries.
        api_key: sent as a bearer token; never shown.
    """

    def __init__(self, url: str, patience: Patience = Patience(), api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the server's address must begin with http:// or https://, got {url!r}")
        self.url = url.rstrip("/")
        self.patience = patience
        self._parts = parts
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._lock = threading.Lock()

    def post(self, path: str, body: Any, *, name: str = "") -> Any:
        """The reply to a JSON body.

        Raises:
            EngineError: the server refused the request, or gave no answer in all attempts.
        """
        return self._ask("POST", path, json.dumps(body).encode(), name)

    def get(self, path: str) -> Any:
        """The reply to a GET."""
        return self._ask("GET", path, None, "")

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    def _ask(self, method: str, path: str, body: bytes | None, name: str) -> Any:
        patience, begin, trouble = self.patience, time.monotonic(), ""
        for attempt in range(patience.retries + 1):
            if attempt:
                time.sleep(self._pause(attempt, name or path, trouble))
            try:
                status, headers, data = self._once(method, path, body)
            except (OSError, http.client.HTTPException) as error:  # TimeoutError is an OSError
                trouble = f"{type(error).__name__}: {error}"
                continue
            if status < 300:
                return self._parsed(path, data)
            trouble = f"HTTP {status}: {_message(data)}"
            if status not in RETRIED:
                raise EngineError(f"{self.url}{path} refused the request: {trouble}")
            if headers.get("retry-after", "").isdigit():
                time.sleep(min(float(headers["retry-after"]), patience.max_backoff))
        seconds = time.monotonic() - begin
        raise EngineError(
            f"{self.url}{path} gave no answer in {patience.retries + 1} attempts over {seconds:.1f} s; "
            f"the last: {trouble}"
        )

    def _pause(self, attempt: int, name: str, trouble: str) -> float:
        """Seconds before an attempt: doubled each time, and spread so that clients do not come back together."""
        base = min(self.patience.backoff * 2.0 ** (attempt - 1), self.patience.max_backoff)
        pause = base * (0.5 + 0.5 * float(stream(0, "http", name, attempt).random()))
        logger.warning("%s: %s; attempt %d in %.2f s", self.url, trouble, attempt + 1, pause)
        return pause

    def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, str], bytes]:
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                return self._exchange(kept, method, path, body)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                pass  # the server had closed an idle connection: that is no failure of the request
        return self._exchange(self._connect(), method, path, body)

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> tuple[int, dict[str, str], bytes]:
        end = time.monotonic() + self.patience.timeout
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, body, self._headers)
            reply = connection.getresponse()
            data = _read(reply, end)
        except BaseException:
            connection.close()
            raise
        if reply.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        return reply.status, {key.lower(): value for key, value in reply.getheaders()}, data

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(str(self._parts.hostname), self._parts.port, timeout=self.patience.timeout)

    def _parsed(self, path: str, data: bytes) -> Any:
        if not data.strip():
            return {}
        try:
            return json.loads(data)
        except ValueError:
            if not data.lstrip().startswith((b"{", b"[")):
                return {"text": data.decode("utf-8", "replace")}
            raise EngineError(f"{self.url}{path} answered broken JSON: {data[:80]!r}") from None


def _read(reply: http.client.HTTPResponse, end: float) -> bytes:
    """The whole body, if it is there by `end`: the connection's own timeout begins anew with every byte."""
    data = bytearray()
    while part := reply.read1(65_536):
        data += part
        if len(data) > MAX_REPLY:
            raise http.client.HTTPException(f"the reply is longer than {MAX_REPLY} bytes")
        if time.monotonic() > end:
            raise TimeoutError(f"the reply was not complete in time, only {len(data)} bytes of it")
    data += reply.read()  # nothing more, but the connection is free only after it
    if reply.length:
        raise http.client.IncompleteRead(bytes(data[-80:]), reply.length)
    return bytes(data)


def _message(data: bytes) -> str:
    """What a server says of an error, in at most 300 characters."""
    text = data.decode("utf-8", "replace").strip()
    try:
        reply = json.loads(text)
        error = reply.get("error", reply)
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return text[:300]
