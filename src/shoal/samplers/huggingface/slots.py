"""Answers in the making on a GPU: each has a slot of a static cache, and a step of all slots is one CUDA graph.

A decoding step of a small model takes longer to launch than to compute. Here the step of all slots (the network, the
noise, the choice of the token) is captured once as a CUDA graph for a few sizes, and replayed; the host reads one token
a slot and step. Requests that wait take free slots between two steps. Without CUDA the same step runs as it is, which
is how it is tested.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from shoal.core.errors import EngineError, format_error
from shoal.samplers.huggingface.caches import Context, Prefix
from shoal.samplers.noise import Noise, gumbel
from shoal.samplers.sampler import Completion, Request, restricted, room_left
from shoal.samplers.tokenizers import TemplateTokenizer

if TYPE_CHECKING:
    from shoal.samplers.huggingface.engine import HuggingFaceEngine

FEWEST_COLUMNS = 64
"""Tokens that a slot holds at least; more by doubling."""
PATIENCE = 8
"""Steps after which few requests that wait enter too; many enter at once."""


class Row:
    """One response in the making."""

    def __init__(self, request: Request, tokenizer: TemplateTokenizer, room: int) -> None:
        self.request = request
        self.most_tokens = len(request.prompt_ids) + room
        """Of the prompt and the longest answer."""
        self.answer: Future[Completion] = Future()
        """Of one that is written in a slot."""
        self.ended = False
        self._tokenizer, self._room = tokenizer, room
        self.noise = Noise(request.key) if request.sampling.temperature else None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: Any = "length"

    def take(self, logprobs: np.ndarray) -> int:
        """Choose a token from `[V]` log-probabilities, and see whether the response ends with it."""
        logprobs = restricted(logprobs, self.request.sampling)
        token = int(logprobs.argmax()) if self.noise is None else self.noise.pick(logprobs)
        return self.note(token, float(logprobs[token]))

    def note(self, token: int, logprob: float) -> int:
        """Write a token down, and see whether the response ends with it."""
        self._ids.append(token)
        self._logprobs.append(logprob)
        if token in self._tokenizer.end_ids or self._stopped():
            self.ended, self._finish = True, "stop"
        self.ended = self.ended or len(self._ids) >= self._room
        return token

    @property
    def temperature(self) -> float:
        """By which scores are divided; 0 is greedy."""
        return self.request.sampling.temperature

    @property
    def written(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._ids)

    @property
    def context(self) -> Context:
        """The prompt and the tokens so far."""
        return self.request.prompt_ids + self.written

    def _stopped(self) -> bool:
        stops = self.request.sampling.stop
        if not stops:
            return False
        tail = self._tokenizer.decode(self._ids[-4 * max(map(len, stops)) :])
        return any(stop in tail for stop in stops)

    def completion(self, version: int) -> Completion:
        """The response, once it has ended."""
        return Completion(tuple(self._ids), tuple(self._logprobs), self._finish, version)


# --- slots
class SlotLayer(DynamicLayer):
    """Keys and values of one layer, `[slots, heads, columns, width]` each: a step writes one column of each slot."""

    def __init__(self, places: Tensor, shown: Shown) -> None:
        super().__init__()
        self.is_initialized, self.dtype, self.device = True, places.dtype, places.device
        self._places, self._shown = places, shown

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write the token of each slot where it stands; the keys and values of all tokens."""
        rows, columns = self._shown.rows, self._shown.columns
        index = self._shown.length[:rows, None, None, None].expand_as(key_states)
        for place, states in zip(self._places, (key_states, value_states), strict=True):
            place[:rows].scatter_(2, index, states)
        keys, values = self._places[:, :rows, :, :columns]
        return keys, values

    def get_seq_length(self) -> int:
        """Nothing asks for it: positions and mask are given."""
        return self._shown.columns


@dataclass
class Shown:
    """The part of the cache that a step computes with."""

    length: Tensor  # [slots] tokens of each: the next one stands there
    rows: int = 1
    columns: int = FEWEST_COLUMNS


class Slots:
    """A static cache for the answers under way, and the step that writes the next token of each.

    Args:
        model: a causal model of `transformers` whose layers keep all tokens.
        most: slots, at most (`engine.max_batch`).
        most_tokens: tokens of all slots together, at most (`engine.cache_tokens`).
    """

    def __init__(self, model: nn.Module, most: int, most_tokens: int) -> None:
        self.model, self.most, self.most_tokens = model, most, most_tokens
        self.answers: list[Row | None] = []
        """Who is in each slot."""
        self.columns = 0
        self._places: Tensor | None = None  # [layers, 2, slots, heads, columns, width]
        self._graphs: dict[tuple[int, int], Any] = {}
        self._pool: Any = None
        device = next(model.parameters()).device
        self._captures = device.type == "cuda"
        with torch.inference_mode():
            self._shown = Shown(torch.zeros(most, dtype=torch.int64, device=device))
            self._fed = torch.zeros(most, dtype=torch.int64, device=device)
            self._drawn = torch.zeros(most, dtype=torch.int64, device=device)
            self._keys = torch.zeros(most, 4, dtype=torch.int64, device=device)
            self._heat = torch.ones(most, 1, device=device)
            self._noisy = torch.zeros(most, 1, dtype=torch.bool, device=device)
            self._out = torch.zeros(2, most, dtype=torch.float64, device=device)

    # --- who is in
    @property
    def under_way(self) -> int:
        """Answers in the making."""
        return sum(answer is not None for answer in self.answers)

    def fit(self, tokens: int) -> int:
        """How many slots there are for answers of so many tokens, prompt included.

        Raises:
            EngineError: there is no memory for one.
        """
        slots = min(self.most, self.most_tokens // columns_for(tokens))
        if not slots:
            raise EngineError(
                f"a prompt and its answer of {tokens} tokens do not fit engine.cache_tokens={self.most_tokens}: set "
                f"it to {columns_for(tokens)} at least, or to {columns_for(tokens)} * engine.max_batch "
                f"({self.most}) to decode that many at once"
            )
        return slots

    def free(self, tokens: int) -> int:
        """How many answers of so many tokens may enter now; none as long as the others need another shape."""
        if columns_for(tokens) > self.columns and self.under_way:
            return 0
        return self.fit(max(tokens, self.columns if self.under_way else 0)) - self.under_way

    def enter(self, answers: Sequence[Row], cache: Any, mask: Tensor, places: list[int]) -> None:
        """Put answers into free slots.

        Args:
            answers: whose first token was picked and not fed.
            cache: of their prompts.
            mask: `[B, P]` of what is real in it.
            places: the row of each answer's prompt in the cache.
        """
        self._reserve(cache, max(answer.most_tokens for answer in answers))
        assert self._places is not None
        device = mask.device
        slots = [number for number in range(len(self.answers)) if self.answers[number] is None][
            : len(answers)
        ]
        for slot, answer in zip(slots, answers, strict=True):
            self.answers[slot] = answer
        there, place = torch.tensor(slots, device=device), torch.tensor(places, device=device)
        rows, columns = mask[place].nonzero(as_tuple=True)
        target = (mask.cumsum(1) - 1)[place][rows, columns]
        for number, layer in enumerate(cache.layers):
            for side, states in enumerate((layer.keys, layer.values)):
                self._places[number, side][there[rows], :, target] = states[place[rows], :, columns]
        noises = [answer.noise for answer in answers]
        keys = np.stack([np.zeros(4) if noise is None else noise.words for noise in noises]).astype(np.int64)
        heat = torch.tensor([[answer.temperature or 1.0] for answer in answers])
        self._fed[there] = torch.tensor([answer.context[-1] for answer in answers], device=device)
        self._shown.length[there] = mask.sum(1)[place]
        self._drawn[there] = torch.tensor([len(answer.written) for answer in answers], device=device)
        self._keys[there] = torch.from_numpy(keys).to(device)
        self._heat[there] = heat.to(device)
        self._noisy[there] = torch.tensor([[noise is not None] for noise in noises], device=device)

    def _reserve(self, cache: Any, tokens: int) -> None:
        """Have room for answers of so many tokens; an empty cache is made anew where it is too narrow."""
        columns = columns_for(tokens)
        if columns <= self.columns and self._places is not None:
            return
        assert not self.under_way
        self.clear()
        slots, (_, heads, _, width) = self.fit(tokens), cache.layers[0].keys.shape
        size = (len(cache.layers), 2, slots, heads, columns, width)
        self._places = cache.layers[0].keys.new_zeros(size)
        self.columns, self.answers = columns, [None] * slots
        self._cache = DynamicCache()
        self._cache.layers = [SlotLayer(places, self._shown) for places in self._places]

    def leave(self, slot: int, *, copied: bool) -> Prefix | None:
        """Take an answer that has ended out; if asked for, a copy of the keys and values of what was fed of it."""
        answer = self.answers[slot]
        assert answer is not None
        assert self._places is not None
        self.answers[slot] = None
        if not copied:
            return None
        tokens = answer.context[:-1]  # the last token was picked and never fed
        kept = self._places[:, :, slot, :, : len(tokens)].clone()
        return Prefix(tokens, tuple((keys, values) for keys, values in kept))

    def clear(self) -> None:
        """Give the memory back, and let everybody go."""
        self.answers, self.columns, self._places, self._pool = [], 0, None, None
        self._graphs.clear()

    def forget_graphs(self) -> None:
        """The network is another one now: its layers or the memory of its weights."""
        self._graphs.clear()

    # --- a step
    def step(self) -> list[int]:
        """Write the next token of each answer; the slots of those that ended."""
        taken = [slot for slot, answer in enumerate(self.answers) if answer is not None]
        longest = max(len(answer.context) for answer in self.answers if answer is not None)
        if taken[-1] >= 2 * len(taken):
            taken = self._closed_up(taken)
        rows, columns = rows_for(taken[-1] + 1, len(self.answers)), min(columns_for(longest), self.columns)
        self._shown.rows, self._shown.columns = rows, columns
        self._play(rows, columns)
        tokens, logprobs = self._out[:, :rows].cpu().numpy()
        ended = []
        for slot in taken:
            answer = self.answers[slot]
            assert answer is not None
            answer.note(int(tokens[slot]), float(logprobs[slot]))
            if answer.ended:
                ended.append(slot)
        return ended

    def _play(self, rows: int, columns: int) -> None:
        """Compute a step, by its graph where there are graphs."""
        if not self._captures:
            return self._compute(rows, columns)
        graph = self._graphs.get((rows, columns))
        if graph is None:
            graph = self._graphs[rows, columns] = self._captured(lambda: self._compute(rows, columns))
        graph.replay()

    def _captured(self, work: Callable[[], None]) -> Any:
        """The graph of some work, which is done once before, as capturing asks for; it leaves no trace."""
        state = (self._shown.length, self._fed, self._drawn)
        before = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        self._pool = self._pool or graph.pool()
        return graph

    def _compute(self, rows: int, columns: int) -> None:
        """Feed a token to each of the first slots, and pick the next one."""
        length = self._shown.length[:rows]
        seen = torch.arange(columns, device=length.device) <= length[:, None]
        kind = self._places.dtype if self._places is not None else torch.float32
        mask = torch.zeros(seen.shape, dtype=kind, device=length.device)
        mask = mask.masked_fill(~seen, torch.finfo(kind).min)[:, None, None]
        out = self.model(
            input_ids=self._fed[:rows, None], attention_mask=mask, position_ids=length[:, None],
            past_key_values=self._cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        logprobs = (out.logits[:, -1].float() / self._heat[:rows]).log_softmax(-1)
        noise = gumbel(self._keys[:rows], self._drawn[:rows], logprobs.shape[1])
        picked = (logprobs + noise * self._noisy[:rows]).argmax(1)
        self._out[0, :rows].copy_(picked)
        self._out[1, :rows].copy_(logprobs.gather(1, picked[:, None])[:, 0])
        self._fed[:rows].copy_(picked)
        self._drawn[:rows].add_(1)
        length.add_(1).clamp_(max=self.columns - 1)  # a free slot steps in place

    def _closed_up(self, taken: list[int]) -> list[int]:
        """Move the answers to the first slots."""
        assert self._places is not None
        there = torch.tensor(taken, device=self._fed.device)
        kept = len(taken)
        self._places[:, :, :kept] = self._places[:, :, there]
        for state in (self._shown.length, self._fed, self._drawn, self._keys, self._heat, self._noisy):
            state[:kept] = state[there]
        self.answers = [self.answers[slot] for slot in taken] + [None] * (len(self.answers) - kept)
        return list(range(kept))


def columns_for(tokens: int) -> int:
    """Columns of a slot for so many tokens: a power of two, since each size is a graph of its own."""
    return max(FEWEST_COLUMNS, 1 << (tokens - 1).bit_length())


def rows_for(answers: int, slots: int) -> int:
    """Slots that a step computes: a power of two, or all."""
    return min(slots, 1 << (answers - 1).bit_length())


# --- who waits for a slot
class Decoder:
    """Answers requests in a thread that lives as long as there are some.

    Args:
        engine: whose network answers; it computes prompts.
        slots: where answers are written.
    """

    def __init__(self, engine: HuggingFaceEngine, slots: Slots) -> None:
        self.engine, self.slots = engine, slots
        self._waiting: deque[Row] = deque()
        self._under_way: set[Row] = set()
        self._news = threading.Condition()
        self._working = self._holding = False
        self._patience = PATIENCE

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """The answers to come, in order."""
        rows = [self._row(request) for request in requests]
        with self._news:
            self._waiting.extend(row for row in rows if not row.answer.done())
            if self._waiting and not self._working:
                self._working = True
                threading.Thread(target=self._work, daemon=True, name="shoal-decoder").start()
        return [row.answer for row in rows]

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

    def _row(self, request: Request) -> Row:
        """The answer to a request, which has ended already where there is no room for it or something is wrong."""
        engine, room, wrong = self.engine, 0, None
        try:
            room = room_left(engine, request)
            engine.refuse_unknown(max(request.prompt_ids))
            self.slots.fit(len(request.prompt_ids) + room)
        except EngineError as error:
            wrong = error
        row = Row(request, engine.tokenizer, room)
        if wrong is not None:
            row.answer.set_exception(wrong)
        elif not room:
            row.answer.set_result(Completion((), (), "context", engine.weights_version))
        return row

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

    def _entering(self) -> list[Row]:
        """Who enters now: in the order in which they came, as many as there are slots for."""
        with self._news:
            if self._holding or not self._waiting:
                return []
            tokens, many = 0, 0
            for row in self._waiting:
                tokens = max(tokens, row.most_tokens)
                if many + 1 > self.slots.free(tokens):
                    break
                many += 1
            # computing prompts costs more than a step, however few they are: they wait a little for others
            self._patience -= 1
            if not many or (many * 8 < len(self._under_way) and self._patience > 0):
                return []
            self._patience = PATIENCE
            entering = [self._waiting.popleft() for _ in range(many)]
            self._under_way.update(entering)
        return entering

    def _begin(self, entering: list[Row]) -> None:
        """Compute prompts, and pick the first token of each answer."""
        engine = self.engine
        alone = len(self._under_way) == len(entering)  # then the network may be another one than before
        if alone and engine.weights_changed():
            self.slots.forget_graphs()
        limited = [row for row in entering if row.request.sampling.restricted]
        for row, answer in zip(limited, engine.decode_rows([row.request for row in limited]), strict=True):
            self._answer(row, answer)
        rows = [row for row in entering if not row.request.sampling.restricted]
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
            self.slots.enter([row for row, _ in stay], cache, mask, [place for _, place in stay])

    def _answer(self, row: Row, answer: Completion | None = None) -> None:
        with self._news:
            self._under_way.remove(row)
            self._news.notify_all()
        if not row.answer.done():
            row.answer.set_result(answer or row.completion(self.engine.weights_version))

    def _fail(self, error: BaseException) -> None:
        """Everybody under way hears of an error, and begins anew if asked again."""
        self.slots.clear()
        with self._news:
            failed = [*self._under_way]
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
        for row in failed:
            if not row.answer.done():
                row.answer.set_exception(reason)
