"""Requests as they come, for a network on a GPU: those that wait enter between two steps, those that ended leave."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shoal.core.errors import EngineError, format_error
from shoal.rollout.samplers.sampler import Completion, Request, room_left
from shoal.rollout.samplers.slots import Slots

if TYPE_CHECKING:
    from shoal.rollout.samplers.huggingface import HuggingFaceEngine, Row

PATIENCE = 8
"""Steps after which few requests that wait enter too; many enter at once."""


@dataclass(slots=True)
class Asked:
    """A request under way."""

    row: Row
    tokens: int  # of the prompt and the longest answer
    future: Future[Completion]


class Decoder:
    """Answers requests in a thread that lives as long as there are some.

    Args:
        engine: whose network answers; it computes prompts.
        slots: where answers are written.
    """

    def __init__(self, engine: HuggingFaceEngine, slots: Slots) -> None:
        self.engine, self.slots = engine, slots
        self._waiting: deque[Asked] = deque()
        self._under_way: dict[int, Asked] = {}  # by the id of its row
        self._news = threading.Condition()
        self._working = self._holding = False
        self._patience = PATIENCE

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """The answers to come, in order."""
        asked = [self._asked(request) for request in requests]
        with self._news:
            self._waiting.extend(item for item in asked if not item.future.done())
            if self._waiting and not self._working:
                self._working = True
                threading.Thread(target=self._work, daemon=True, name="shoal-decoder").start()
        return [item.future for item in asked]

    async def sample(self, request: Request) -> Completion:
        """The answer to one request, which others do not hold up."""
        return await asyncio.wrap_future(self.submit([request])[0])

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Nothing is under way meanwhile, and nothing enters."""
        with self._news:
            self._holding = True
            self._news.wait_for(lambda: not self._under_way)
        try:
            yield
        finally:
            with self._news:
                self._holding = False
                self._news.notify_all()

    def _asked(self, request: Request) -> Asked:
        engine, future = self.engine, Future[Completion]()
        room = 0
        try:
            room = room_left(engine, request)
            engine.refuse_unknown(max(request.prompt_ids))
            self.slots.fit(len(request.prompt_ids) + room)
        except EngineError as error:
            future.set_exception(error)
        if not room and not future.done():
            future.set_result(Completion((), (), "context", engine.weights_version))
        return Asked(engine.row(request, room), len(request.prompt_ids) + room, future)

    # --- its thread
    def _work(self) -> None:
        """Turn after turn, as long as there is something to do."""
        device = self.engine.device
        with torch.inference_mode(), torch.cuda.device(device if device.type == "cuda" else -1):
            while True:
                with self._news:
                    self._news.wait_for(lambda: not self._holding or self._under_way)
                    if not self._waiting and not self._under_way:
                        self._working = False
                        return
                try:
                    self._turn()
                except BaseException as error:  # of the device, say: everybody hears of it
                    self._fail(error)

    def _turn(self) -> None:
        """Let requests in, and write a token of each."""
        entering = self._entering()
        if entering:
            self._begin(entering)
        if self._under_way:
            for slot in self.slots.step():
                row: Any = self.slots.answers[slot]
                prefix = self.slots.leave(slot, copied=self.engine.keeps_prefixes)
                if prefix is not None:
                    self.engine.prefixes.keep(prefix)
                self._answer(row)

    def _entering(self) -> list[Asked]:
        """Who enters now: in the order in which they came, as many as there are slots for."""
        with self._news:
            if self._holding or not self._waiting:
                return []
            tokens, many = 0, 0
            for item in self._waiting:
                tokens = max(tokens, item.tokens)
                if many + 1 > self.slots.free(tokens):
                    break
                many += 1
            # computing prompts costs more than a step, however few they are: they wait a little for others
            self._patience -= 1
            if not many or (many * 8 < len(self._under_way) and self._patience > 0):
                return []
            self._patience = PATIENCE
            entering = [self._waiting.popleft() for _ in range(many)]
            self._under_way |= {id(item.row): item for item in entering}
        return entering

    def _begin(self, entering: list[Asked]) -> None:
        """Compute prompts, and pick the first token of each answer."""
        engine = self.engine
        alone = len(self._under_way) == len(entering)  # then the network may be another one than before
        if alone and engine.weights_changed():
            self.slots.forget_graphs()
        rows = [item.row for item in entering]
        limited = [row for row in rows if row.request.sampling.restricted]
        for row, answer in zip(limited, engine.decode_rows([row.request for row in limited]), strict=True):
            self._answer(row, answer)
        rows = [row for row in rows if not row.request.sampling.restricted]
        engine.follow(rows)
        going = [row for row in rows if not row.ended]
        if going:
            self._enter(going)
        for row in rows:
            if row.ended:
                self._answer(row)

    def _enter(self, rows: list[Row]) -> None:
        """Compute what comes before the next token of each answer, pick that, and put the answer into a slot."""
        cache, scores, mask, select = self.engine.compute([row.context for row in rows])
        self.engine.pick(scores[select], [[row] for row in rows])
        stay = [(row, place) for row, place in zip(rows, select.tolist(), strict=True) if not row.ended]
        if stay:
            tokens = max(self._under_way[id(row)].tokens for row, _ in stay)
            self.slots.enter([row for row, _ in stay], tokens, cache, mask, [place for _, place in stay])

    def _answer(self, row: Row, answer: Completion | None = None) -> None:
        with self._news:
            item = self._under_way.pop(id(row))
            self._news.notify_all()
        if not item.future.done():
            item.future.set_result(answer or row.completion(self.engine.weights_version))

    def _fail(self, error: BaseException) -> None:
        """Everybody under way hears of an error, and begins anew if asked again."""
        self.slots.clear()
        with self._news:
            failed = [*self._under_way.values()]
            self._under_way.clear()
            self._news.notify_all()
        reason = (
            error
            if isinstance(error, EngineError)
            else EngineError(f"decoding failed: {format_error(error)}")
        )
        if isinstance(error, torch.OutOfMemoryError):
            reason = EngineError(
                f"the GPU has no memory for {self.slots.most} answers at once: lower engine.max_batch or "
                f"engine.cache_tokens ({format_error(error)})"
            )
        for item in failed:
            if not item.future.done():
                item.future.set_exception(reason)
