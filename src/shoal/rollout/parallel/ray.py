"""The shared engine's counter on a Ray cluster: a mailbox actor between workers on any node and the engine.

Workers leave requests and wait; a thread beside the engine fetches all that is there and brings answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.core.errors import needs_extra
from shoal.rollout.parallel.server import SharedLLMInferenceManager
from shoal.rollout.parallel.transport import (
    Answer,
    Ask,
    LinkLostError,
    Refusal,
    Result,
    answer_of,
    completion_of,
    decode_answer,
)
from shoal.rollout.samplers.sampler import Completion, Key, Request

logger = logging.getLogger(__name__)
DELIVERY_SECONDS = 60.0
"""Within which the actor must have taken what a worker tells it."""
_asks = msgspec.msgpack.Decoder(list[Ask])
_answers = msgspec.msgpack.Decoder(list[msgspec.Raw])
_encode = msgspec.msgpack.encode


class _Counter:
    """The actor: an async one, so that thousands may wait at once."""

    def __init__(self) -> None:
        self._inbox: list[tuple[int, bytes]] = []
        self._news: list[tuple[list[Key], bytes | None]] = []  # who entered; who left, with a report
        self._waiting: dict[int, Any] = {}
        self._arrived = asyncio.Event()
        self._next = 0

    async def ask(self, data: bytes) -> bytes:
        number, self._next = self._next, self._next + 1
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._inbox.append((number, data))
        self._arrived.set()
        try:
            answer: bytes = await future
            return answer
        finally:
            self._waiting.pop(number, None)

    async def entered(self, keys: list[Key]) -> None:
        self._news.append((keys, None))
        self._arrived.set()

    async def left(self, key: Key, report: bytes) -> None:
        self._news.append(([key], report))
        self._arrived.set()

    async def take(self, answers: list[tuple[int, bytes]], seconds: float) -> tuple[list[Any], list[Any]]:
        """Deliver answers, and fetch what arrived, waiting for it a while."""
        for number, data in answers:
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_result(data)
        if not self._inbox and not self._news:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), seconds)
        inbox, self._inbox = self._inbox, []
        news, self._news = self._news, []
        return inbox, news


class Mailbox:
    """The engine's side: starts the actor and carries requests and answers.

    Args:
        inference: the shared engine.
    """

    def __init__(self, inference: SharedLLMInferenceManager) -> None:
        with needs_extra("a rollout on Ray", "parallel"):
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        self._ray = ray
        self._inference = inference
        # Beside the engine: elsewhere, the loss of a node that holds some workers could end the whole rollout.
        # (Ray 2.60 heeds a soft wish only for actors that take a CPU.)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(_Counter).options(num_cpus=0, max_concurrency=100_000, scheduling_strategy=here)
        self.actor = actor.remote()
        self.ticket = RayLink(self.actor)
        self.gone = False
        """Whether the actor was lost: another one is needed."""
        self._answers: list[tuple[int, bytes]] = []
        self._open = 0  # requests whose answers are being made
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._carry, daemon=True, name="shoal-ray-mailbox")
        self._thread.start()

    def _carry(self) -> None:
        try:
            while not self._closed:
                self._exchange()
        except (Exception, SystemExit) as error:  # SystemExit: so Ray ends who waits when it is shut down
            self.gone = True
            if not self._closed:
                logger.error("the mailbox of the rollout is gone: %s", error)

    def _exchange(self) -> None:
        """Bring answers, and fetch what arrived; while answers are being made, look again soon to bring them."""
        with self._lock:
            answers, self._answers = self._answers, []
        inbox, news = self._ray.get(self.actor.take.remote(answers, 0.002 if self._open else 0.2))
        for keys, report in news:
            if report is None:
                self._inference.entered(keys)
        for number, data in inbox:
            self._submit(number, data)
        for keys, report in news:
            if report is not None:
                self._inference.left(keys[0], report)

    def _submit(self, number: int, data: bytes) -> None:
        asks = _asks.decode(data)
        done: dict[int, Answer | Refusal] = {}
        with self._lock:
            self._open += 1

        def reply(place: int, result: Result) -> None:
            done[place] = answer_of(place, result)
            if len(done) == len(asks):
                with self._lock:
                    self._open -= 1
                    self._answers.append((number, _encode([done[i] for i in range(len(asks))])))

        self._inference.submit(("ray", number), [ask.request for ask in asks], reply)

    def close(self) -> None:
        """End the actor."""
        self._closed = True
        # The thread looks up a few times a second. If it were inside Ray when Ray ends, the process would crash.
        self._thread.join(5.0)
        if self._ray.is_initialized():
            with contextlib.suppress(Exception):
                self._ray.kill(self.actor)
        self._thread.join(5.0)


class RayLink:
    """A worker's link to the shared engine on a Ray cluster, from any node; any number of threads may ask at once."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._reports: list[Any] = []

    def connect(self, asker: int) -> RayLink:
        """A link of the worker's own."""
        return RayLink(self._actor)

    def generate(self, requests: Sequence[Request], timeout: float | None = None) -> list[Completion]:
        """One completion a request, in order."""
        asks = [Ask(place, request) for place, request in enumerate(requests)]
        data = self._get(self._actor.ask.remote(_encode(asks)), timeout)
        return [completion_of(decode_answer(answer)) for answer in _answers.decode(data)]

    def entered(self, keys: Sequence[Key]) -> None:
        """Episodes are at play."""
        self._get(self._actor.entered.remote(list(keys)), DELIVERY_SECONDS)

    def left(self, key: Key, report: bytes = b"") -> None:
        """An episode is over."""
        self._reports.append(self._actor.left.remote(key, report))

    def close(self) -> None:
        """Make sure that the reports have arrived."""
        self._get(self._reports, DELIVERY_SECONDS)

    def _get(self, references: Any, timeout: float | None) -> Any:
        import ray

        try:
            return ray.get(references, timeout=timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"the engine did not answer within {timeout} s") from error
        except ray.exceptions.RayError as error:
            raise LinkLostError(f"the shared engine is gone ({error})") from error
