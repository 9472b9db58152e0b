"""Answers in the making on a GPU: each has a slot of a static cache, and a step of all slots is one CUDA graph.

A decoding step of a small model takes longer to launch than to compute. Here the step of all slots (the network, the
noise, the choice of the token) is captured once as a CUDA graph for a few sizes, and replayed; the host reads one token
a slot and step. Requests that wait take free slots between two steps. Without CUDA the same step runs as it is, which
is how it is tested.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from shoal.core.errors import EngineError, format_error
from shoal.samplers.asking import as_error
from shoal.samplers.huggingface.caches import Context, Prefix
from shoal.samplers.noise import Noise, gumbel
from shoal.samplers.sampler import Completion, Request, Sampling, restricted, room_left
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

    def take(self, logprobs: np.ndarray) -> None:
        """Choose a token from `[V]` log-probabilities, and see whether the response ends with it."""
        logprobs = restricted(logprobs, self.request.sampling)
        token = int(logprobs.argmax()) if self.noise is None else self.noise.pick(logprobs)
        self.note(token, float(logprobs[token]))

    def note(self, token: int, logprob: float) -> None:
        """Write a token down, and see whether the response ends with it."""
        self._ids.append(token)
        self._logprobs.append(logprob)
        if token in self._tokenizer.end_ids or self._stopped():
            self.ended, self._finish = True, "stop"
        self.ended = self.ended or len(self._ids) >= self._room

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

    def __init__(self, memory: Tensor, shown: Shown) -> None:
        super().__init__()
        self.is_initialized, self.dtype, self.device = True, memory.dtype, memory.device
        self._memory, self._shown = memory, shown

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write the token of each slot where it stands; the keys and values of all tokens."""
        rows, columns = self._shown.rows, self._shown.columns
        index = self._shown.length[:rows, None, None, None].expand_as(key_states)
        for memory, states in zip(self._memory, (key_states, value_states), strict=True):
            memory[:rows].scatter_(2, index, states)
        keys, values = self._memory[:, :rows, :, :columns]
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


class Draw(NamedTuple):
    """How the next token of each of `B` answers is drawn; on the device of the network."""

    temperature: Tensor  # [B, 1] float32: scores are divided by it
    keys: Tensor  # [B, 4] int64: the words of the noise
    noisy: Tensor  # [B, 1] bool: False is greedy
    limits: Tensor  # [B, 3] float64: min_p, top_k and top_p, which may be off
    drawn: Tensor  # [B] int64: tokens so far

    @classmethod
    def of(cls, rows: Sequence[Row], device: Any) -> Draw:
        """How these draw."""
        samplings, noises = [row.request.sampling for row in rows], [row.noise for row in rows]
        words = np.stack([np.zeros(4) if noise is None else noise.words for noise in noises]).astype(np.int64)
        temperature = torch.tensor([[sampling.temperature or 1.0] for sampling in samplings])
        noisy = torch.tensor([[noise is not None] for noise in noises])
        limits = torch.tensor([_limits(sampling) for sampling in samplings], dtype=torch.float64)
        drawn = torch.tensor([len(row.written) for row in rows])
        parts = temperature, torch.from_numpy(words), noisy, limits, drawn
        return cls(*(part.to(device) for part in parts))

    def pick(self, scores: Tensor, *, limited: bool) -> tuple[Tensor, Tensor]:
        """The tokens `[B]` that are drawn from scores `[B, V]`, and their log-probabilities.

        Args:
            scores: of the next token.
            limited: whether some answers have limits.
        """
        logprobs = (scores.float() / self.temperature).log_softmax(-1)
        if limited:
            logprobs = within_limits(logprobs, self.limits)
        noise = gumbel(self.keys, self.drawn, logprobs.shape[1])
        picked = (logprobs + noise * self.noisy).argmax(1)
        return picked, logprobs.gather(1, picked[:, None])[:, 0]


def _limits(sampling: Sampling) -> tuple[float, float, float]:
    if not sampling.restricted:
        return 0.0, math.inf, 1.0
    return sampling.min_p, sampling.top_k if sampling.top_k > 0 else math.inf, sampling.top_p


def within_limits(logprobs: Tensor, limits: Tensor) -> Tensor:
    """`[B, V]` float64: what `restricted` makes of each row, of another shape at no time, so that a graph may do it."""
    values, (min_p, top_k, top_p) = logprobs.double(), limits.split(1, 1)
    ranked = values.sort(-1, descending=True).values
    last = top_k.clamp(max=values.shape[1]).long() - 1
    least = torch.maximum(ranked[:, :1] + min_p.log(), ranked.gather(1, last))
    mass = torch.where(ranked >= least, (ranked - ranked[:, :1]).exp(), 0.0).cumsum(-1)
    last = (mass < top_p * mass[:, -1:]).sum(-1, keepdim=True)
    least = torch.where(top_p < 1, torch.maximum(least, ranked.gather(1, last)), least)
    left = values.masked_fill(values < least, -torch.inf).log_softmax(-1)
    off = (min_p <= 0) & top_k.isinf() & (top_p >= 1)
    return torch.where(off, values, left)


class Slots:
    """A static cache for the answers under way, and the step that writes the next token of each.

    Args:
        model: a causal model of `transformers` whose layers keep all tokens.
        most: slots, at most (`engine.max_batch`).
        most_tokens: tokens of all slots together, at most (`engine.cache_tokens`).
    """

    def __init__(self, model: nn.Module, most: int, most_tokens: int) -> None:
        self.model, self.most, self.most_tokens = model, most, most_tokens
        self.answers: dict[int, Row] = {}
        """By slot: who is in it."""
        self.columns = self._slots = 0
        self._memory: Tensor | None = None  # [layers, 2, slots, heads, columns, width]
        self._graphs: dict[Any, Any] = {}  # by slots, columns, and whether some answers have limits
        self._pool: Any = None
        device = next(model.parameters()).device
        self._captures = device.type == "cuda"
        with torch.inference_mode():
            self._shown = Shown(torch.zeros(most, dtype=torch.int64, device=device))
            self._fed = torch.zeros(most, dtype=torch.int64, device=device)
            self._draw = Draw(
                torch.ones(most, 1, device=device),
                torch.zeros(most, 4, dtype=torch.int64, device=device),
                torch.zeros(most, 1, dtype=torch.bool, device=device),
                torch.ones(most, 3, dtype=torch.float64, device=device),
                torch.zeros(most, dtype=torch.int64, device=device),
            )
            self._out = torch.zeros(2, most, dtype=torch.float64, device=device)

    # --- who is in
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
        if columns_for(tokens) > self.columns and self.answers:
            return 0
        return self.fit(max(tokens, self.columns if self.answers else 0)) - len(self.answers)

    def enter(self, answers: Sequence[Row], cache: Any, mask: Tensor, sources: list[int]) -> None:
        """Put answers into free slots.

        Args:
            answers: whose first token was picked and not fed.
            cache: of their prompts.
            mask: `[B, P]` of what is real in it.
            sources: the row of each answer's prompt in the cache.
        """
        self._reserve(cache, max(answer.most_tokens for answer in answers))
        assert self._memory is not None
        device = mask.device
        free = (slot for slot in range(self._slots) if slot not in self.answers)
        slots = list(itertools.islice(free, len(answers)))
        self.answers |= zip(slots, answers, strict=True)
        there, source = torch.tensor(slots, device=device), torch.tensor(sources, device=device)
        rows, columns = mask[source].nonzero(as_tuple=True)
        target = (mask.cumsum(1) - 1)[source][rows, columns]
        for number, layer in enumerate(cache.layers):
            for side, states in enumerate((layer.keys, layer.values)):
                self._memory[number, side][there[rows], :, target] = states[source[rows], :, columns]
        self._fed[there] = torch.tensor([answer.context[-1] for answer in answers], device=device)
        self._shown.length[there] = mask.sum(1)[source]
        for own, new in zip(self._draw, Draw.of(answers, device), strict=True):
            own[there] = new

    def _reserve(self, cache: Any, tokens: int) -> None:
        """Have room for answers of so many tokens; an empty cache is made anew where it is too narrow."""
        columns = columns_for(tokens)
        if columns <= self.columns and self._memory is not None:
            return
        assert not self.answers
        self.clear()
        slots, (_, heads, _, width) = self.fit(tokens), cache.layers[0].keys.shape
        size = (len(cache.layers), 2, slots, heads, columns, width)
        self._memory = cache.layers[0].keys.new_zeros(size)
        self.columns, self._slots = columns, slots
        self._cache = DynamicCache()
        self._cache.layers = [SlotLayer(memory, self._shown) for memory in self._memory]

    def copied(self, slot: int) -> Prefix:
        """The keys and values of what was fed of an answer."""
        assert self._memory is not None
        tokens = self.answers[slot].context[:-1]  # the last token was picked and never fed
        kept = self._memory[:, :, slot, :, : len(tokens)].clone()
        return Prefix(tokens, tuple((keys, values) for keys, values in kept))

    def clear(self) -> None:
        """Give the memory back, and let everybody go."""
        self.answers, self.columns, self._memory, self._pool = {}, 0, None, None
        self._graphs.clear()

    def forget_graphs(self) -> None:
        """The network is another one now: its layers or the memory of its weights."""
        self._graphs.clear()

    # --- a step
    def step(self) -> list[int]:
        """Write the next token of each answer; the slots of those that ended."""
        answers = self.answers.values()
        longest = max(len(answer.context) for answer in answers)
        if max(self.answers) >= 2 * len(self.answers):
            self._close_up()
        rows, columns = rows_for(max(self.answers) + 1, self._slots), min(columns_for(longest), self.columns)
        self._shown.rows, self._shown.columns = rows, columns
        self._play(rows, columns, any(answer.request.sampling.restricted for answer in answers))
        tokens, logprobs = self._out[:, :rows].cpu().numpy()
        for slot, answer in self.answers.items():
            answer.note(int(tokens[slot]), float(logprobs[slot]))
        return [slot for slot, answer in self.answers.items() if answer.ended]

    def _play(self, *step: Any) -> None:
        """Compute a step, by its graph where there are graphs."""
        if not self._captures:
            return self._compute(*step)
        if step not in self._graphs:
            self._graphs[step] = self._captured(lambda: self._compute(*step))
        self._graphs[step].replay()

    def _captured(self, work: Callable[[], None]) -> Any:
        """The graph of some work, which is done once before, as capturing asks for; it leaves no trace."""
        state = (self._shown.length, self._fed, self._draw.drawn)
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

    def _compute(self, rows: int, columns: int, limited: bool) -> None:
        """Feed a token to each of the first slots, and pick the next one."""
        length = self._shown.length[:rows]
        seen = torch.arange(columns, device=length.device) <= length[:, None]
        kind = self._memory.dtype if self._memory is not None else torch.float32
        mask = torch.zeros(seen.shape, dtype=kind, device=length.device)
        mask = mask.masked_fill(~seen, torch.finfo(kind).min)[:, None, None]
        out = self.model(
            input_ids=self._fed[:rows, None], attention_mask=mask, position_ids=length[:, None],
            past_key_values=self._cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        draw = Draw(*(part[:rows] for part in self._draw))
        picked, logprobs = draw.pick(out.logits[:, -1], limited=limited)
        self._out[0, :rows].copy_(picked)
        self._out[1, :rows].copy_(logprobs)
        self._fed[:rows].copy_(picked)
        draw.drawn.add_(1)
        length.add_(1).clamp_(max=self.columns - 1)  # a free slot steps in place

    def _close_up(self) -> None:
        """Move the answers to the first slots."""
        assert self._memory is not None
        there = torch.tensor(list(self.answers), device=self._fed.device)
        kept = len(self.answers)
        self._memory[:, :, :kept] = self._memory[:, :, there]
        for state in (self._shown.length, self._fed, *self._draw):
            state[:kept] = state[there]
        self.answers = dict(enumerate(self.answers.values()))


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
                if self.engine.keeps_prefixes:
                    self.engine.prefixes.keep(self.slots.copied(slot))
                self._answer(self.slots.answers.pop(slot))

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
        engine.follow(entering)
        going = [row for row in entering if not row.ended]
        if going:
            self._enter(going)
        for row in entering:
            if row.ended:
                self._answer(row)

    def _enter(self, rows: list[Row]) -> None:
        """Compute what comes before the next token of each answer, pick that, and put the answer into a slot."""
        cache, scores, mask, select = self.engine.compute([row.context for row in rows])
        limited = any(row.request.sampling.restricted for row in rows)
        picked, logprobs = Draw.of(rows, scores.device).pick(scores[select], limited=limited)
        for row, token, logprob in zip(rows, picked.tolist(), logprobs.tolist(), strict=True):
            row.note(token, logprob)
        stay = [(row, source) for row, source in zip(rows, select.tolist(), strict=True) if not row.ended]
        if stay:
            self.slots.enter([row for row, _ in stay], cache, mask, [source for _, source in stay])

    def _answer(self, row: Row) -> None:
        with self._news:
            self._under_way.remove(row)
            self._news.notify_all()
        if not row.answer.done():
            row.answer.set_result(row.completion(self.engine.weights_version))

    def _fail(self, error: BaseException) -> None:
        """Everybody under way hears of an error, and begins anew if asked again."""
        self.slots.clear()
        with self._news:
            failed = [*self._under_way]
            self._under_way.clear()
            self._news.notify_all()
        reason = as_error(error)
        if isinstance(error, torch.OutOfMemoryError):
            reason = EngineError(
                f"the GPU has no memory for {self.slots.most} answers at once: lower engine.max_batch or "
                f"engine.cache_tokens ({format_error(error)})"
            )
        for row in failed:
            if not row.answer.done():
                row.answer.set_exception(reason)
