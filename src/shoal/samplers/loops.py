"""Event loops of shoal's own: one in a thread beside the trainer, or one in the caller's thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.core.errors import EngineError
from shoal.core.executors import Closing

T = TypeVar("T")
END_SECONDS = 5.0
"""For which what runs when a loop is closed is waited for."""


class LoopThread(Closing):
    """An event loop in a daemon thread.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.run_until_complete(asyncio.sleep(0))  # connections that were closed
        self.loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run `work` in the loop.

        Raises:
            EngineError: the loop was closed.
        """
        with self._lock:
            if self._closed:
                work.close()
                raise EngineError("the sampler was closed")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
            self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """What `work` returns; it is cancelled where that takes longer than `timeout` or this thread is interrupted."""
        future = self.submit(work)
        try:
            return future.result(timeout)
        except concurrent.futures.CancelledError as error:
            raise EngineError("the sampler was closed before it answered") from error
        except BaseException:
            future.cancel()
            raise

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, for a coroutine of another event loop."""
        try:
            return await asyncio.wrap_future(self.submit(work))
        except asyncio.CancelledError as error:
            if not self._closed:
                raise
            raise EngineError("the sampler was closed before it answered") from error

    def close(self) -> None:
        """Cancel what runs and end the thread; may be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if threading.current_thread() is self._thread:
            self.loop.call_soon(self.loop.stop)
            return
        with contextlib.suppress(concurrent.futures.TimeoutError, RuntimeError):
            asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result(END_SECONDS)
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(END_SECONDS)
        for future in list(self._running):
            future.cancel()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=END_SECONDS / 2) if others else None


def run_here(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, run in the caller's thread; in another one where the caller is in an event loop itself.

    The first Ctrl-C waits for the step that is under way, a second one does not.
    """
    if asyncio._get_running_loop() is None:
        with asyncio.Runner() as runner:
            runner.get_loop().set_exception_handler(_without_ctrl_c)
            return runner.run(work)
    with LoopThread("shoal-rollout") as aside:
        return aside.run(work)


def _without_ctrl_c(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what a task of the loop raised, but not Ctrl-C, which its caller gets."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)
