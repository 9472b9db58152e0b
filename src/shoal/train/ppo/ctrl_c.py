"""Ctrl-C that waits for the piece of work in progress; a second one acts at once."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any, Self

logger = logging.getLogger(__name__)
NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class CtrlCWaits:
    """`with` it, the first Ctrl-C sets `came`; `pass_on()` then does what it would have done.

    A request to end (SIGTERM, SIGHUP) waits too where a handler is set for it. Inside another such block, and outside
    the main thread, which no signal reaches, it does nothing.
    """

    def __init__(self) -> None:
        self._came: int | None = None
        self._handlers: dict[int, Any] = {}

    @property
    def came(self) -> bool:
        """Whether Ctrl-C came and was not passed on."""
        return self._came is not None

    def pass_on(self) -> None:
        """Interrupt now, if Ctrl-C came."""
        number, self._came = self._came, None
        if number is not None:
            self._handlers[number](number, None)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in NAMES if hasattr(signal, name)):
                handler = signal.getsignal(number)
                if callable(handler) and not isinstance(getattr(handler, "__self__", None), CtrlCWaits):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self._came is not None:
            self._handlers[number](number, frame)
            return
        self._came = number
        logger.warning("ending after the update in progress; press Ctrl-C again to end at once")
