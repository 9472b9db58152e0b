"""Any causal language model of `transformers` as a sampler in this process; what trains it may share its network.

What is equal is computed once: prompts, what all prompts of a batch begin with, answers until they part. A context that
was computed before, by whichever episode, goes on from its scores, and one that begins like another from its keys and
values. Rows that have ended leave the batch, and the picks are keyed Gumbel noise over log-probabilities (level L1),
made where the network is: a GPU sends tokens, not scores.
"""

from __future__ import annotations

import math
import threading
import warnings
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError, EngineError, needs_extra, reading
from shoal.rollout.samplers.invariant import is_invariant, make_invariant
from shoal.rollout.samplers.models import looks_back
from shoal.rollout.samplers.noise import picks
from shoal.rollout.samplers.sampler import (
    Completion,
    Level,
    Noise,
    Request,
    refuse_strange,
    restricted,
    room_left,
)
from shoal.rollout.samplers.tokenizers import TemplateTokenizer, read_tokenizer

with needs_extra("the Hugging Face sampler", "llm"):
    import torch
    from torch import Tensor, nn
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.cache_utils import DynamicLayer

Context = tuple[int, ...]
"""The tokens of a prompt and of its answer so far."""
MIN_SHARED = 8
"""Tokens below which starting from an entry saves nothing."""
SPARE = 16
"""Tokens that keys and values have room for before they are copied to a larger place."""
MOST_SCORES = 2**26
"""Numbers that are kept of what follows contexts: 256 MiB in float32."""


ADAPTERS = {"shoal", "shoal-next"}
"""Names of what `load_adapter` puts on a model; there are two for a moment."""


class HuggingFaceEngine:
    """Completes prompts with a model of `transformers`.

    Args:
        model: an `AutoModelForCausalLM`.
        tokenizer: its tokenizer, with a chat template.
        max_batch: rows that are decoded at once.
        prefix_tokens: tokens whose keys and values are kept for contexts that begin with them; 0 for none, and then
            every prompt is computed.
        template_settings: passed to the chat template.
    """

    level: Level

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_batch: int = 32,
        prefix_tokens: int = 16_384,
        **template_settings: Any,
    ) -> None:
        self.model: nn.Module = model.eval()
        self.level = "L2" if is_invariant(model) else "L1"
        self.tokenizer = TemplateTokenizer(tokenizer, **template_settings)
        self.max_batch = max_batch
        self.weights_version = 0
        self.prefixes = PrefixStore(prefix_tokens)
        self.picks_here = next(self.model.parameters()).device.type != "cuda"
        """Whether tokens are picked from arrays in memory, or on the device of the network."""
        # what is known of episodes is found, used and replaced by one call at a time
        self._alone = threading.Lock()
        self.prompt_tokens = self.computed_tokens = self.decoded_tokens = 0
        """Tokens of the distinct prompts of all batches, how many were computed, and how many tokens of answers."""
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.pad_id = int(pad or 0)
        limit = getattr(model.config, "max_position_embeddings", None)
        self.context = int(limit) if limit else None
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        self._known: int | None = getattr(embedding, "num_embeddings", None)
        self.vocabulary = max(len(tokenizer), self._known or 0)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        batch_invariant: bool = False,
        **options: Any,
    ) -> HuggingFaceEngine:
        """The sampler of a model folder on disk, with `options` of the sampler; nothing is fetched or run.

        Raises:
            ConfigError: the model cannot be made `batch_invariant`, see `make_invariant`.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise DataError(f"{folder} is not a model folder: it has no config.json")
        model = read_model(folder, dtype=dtype).to(device).eval()
        if batch_invariant:
            make_invariant(model)
        return cls(model, read_tokenizer(folder), **options)

    # --- rollouts
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order."""
        with self._alone:
            return self._generate(requests)

    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        rooms = [room_left(self, request) for request in requests]
        # changes whenever weights do, by `load_weights` or in place by an optimizer
        self.prefixes.valid_for((self.weights_version, sum(p._version for p in self.model.parameters())))
        full = Completion((), (), "context", self.weights_version)
        done = {i: full for i, room in enumerate(rooms) if not room}
        order = sorted(set(range(len(requests))) - done.keys(), key=lambda i: self._to_compute(requests[i]))
        with torch.inference_mode():
            for first in range(0, len(order), self.max_batch):
                chunk = order[first : first + self.max_batch]
                rows = [Row(requests[i], self.tokenizer, rooms[i]) for i in chunk]
                self.prompt_tokens += sum(map(len, {requests[i].prompt_ids for i in chunk}))
                self._follow(rows)
                if going := [row for row in rows if not row.ended]:
                    self._complete(going)
                answers = [row.completion(self.weights_version) for row in rows]
                done.update(zip(chunk, answers, strict=True))
        return [done[i] for i in range(len(requests))]

    def _to_compute(self, request: Request) -> int:
        """How many tokens of a prompt are not known yet."""
        known = self.prefixes.find(request.prompt_ids)
        return len(request.prompt_ids) - (len(known.tokens) if known else 0)

    def _follow(self, rows: list[Row]) -> None:
        """Write what is known to follow: as long as the scores of a row's context were computed before."""
        while True:
            known = [(self.prefixes.scores(tokens), members) for (tokens, _), members in alike(rows).items()]
            places = [(scores, members) for scores, members in known if scores is not None]
            if not places:
                return
            self._pick(torch.stack([scores for scores, _ in places]), [members for _, members in places])
            rows = [row for _, members in places for row in members if not row.ended]

    def _complete(self, rows: list[Row]) -> None:
        """Rows whose prompts and answers are the same so far have one place in the cache, until they differ."""
        places = list(alike(rows).values())
        contexts = [members[0].context for members in places]
        cache, scores, mask = self._prefill(contexts, len(rows))
        keeps = self.prefixes.max_tokens > 0 and self._can_share
        while True:
            self.prefixes.remember(contexts, scores)
            self._pick(scores, places)
            going: dict[tuple[int, int], list[Row]] = {}
            for place, members in enumerate(places):
                for row in members:
                    if not row.ended:
                        going.setdefault((place, row.written[-1]), []).append(row)
                if keeps and any(row.ended for row in members):  # the last token was picked and never fed
                    self.prefixes.keep(take_row(cache, place, mask[place], contexts[place]))
            if not going:
                return
            branches = list(going)
            branches = [branches[number] for number in with_few_moves([place for place, _ in branches])]
            if (stay := [place for place, _ in branches]) != list(range(len(mask))):
                chosen = torch.tensor(stay, device=mask.device)
                keep_rows(cache, chosen)
                mask = mask[chosen]
            places = [going[branch] for branch in branches]
            contexts = [members[0].context for members in places]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            fed = torch.tensor([token for _, token in branches], device=mask.device)
            self.decoded_tokens += len(branches)
            out = self._forward(fed[:, None], mask, cache)
            cache, scores = out.past_key_values, out.logits[:, -1]

    def _prefill(self, contexts: list[Context], room: int) -> tuple[Any, Tensor, Tensor]:
        """The cache, the next token's scores and the mask of each context, with room for so many rows.

        Equal contexts are computed once.
        """
        distinct = list(dict.fromkeys(contexts))
        prefixes = self._with_shared(distinct, [self.prefixes.find(context) for context in distinct])
        rest = [c[len(k.tokens) :] if k else c for c, k in zip(distinct, prefixes, strict=True)]
        self.computed_tokens += sum(map(len, rest))
        ids, mask = self._pad_left(rest)
        cache = None
        if any(prefixes):
            cache = DynamicCache()
            mask = torch.cat([fill_cache(cache, prefixes), mask], 1)
        out = self._forward(ids, mask, cache)
        index = {context: place for place, context in enumerate(distinct)}
        select = torch.tensor([index[context] for context in contexts], device=ids.device)
        keep_rows(out.past_key_values, select, room=room)
        return out.past_key_values, out.logits[:, -1][select], mask[select]

    def _with_shared(self, contexts: list[Context], prefixes: list[Prefix | None]) -> list[Prefix | None]:
        """Prefixes of contexts, where what all of them begin with is more than is known of one."""
        length = min(min(shared_length(contexts[0], context), len(context) - 1) for context in contexts)
        wanting = [prefix is None or len(prefix.tokens) < length for prefix in prefixes]
        if sum(wanting) < 2 or length < MIN_SHARED or not self.prefixes.max_tokens or not self._can_share:
            return prefixes
        tokens = contexts[0][:length]
        ids, mask = self._pad_left([tokens])
        cache = self._forward(ids, mask, None).past_key_values
        self.computed_tokens += length
        shared = take_row(cache, 0, mask[0], tokens)
        self.prefixes.keep(shared)
        return [shared if wants else prefix for prefix, wants in zip(prefixes, wanting, strict=True)]

    @cached_property
    def _can_share(self) -> bool:
        """Whether contexts may go on from keys and values that are kept, with a gap behind them: it is tried.

        Not where layers keep something else, or count places in the row.
        """
        if looks_back(self.model) < math.inf:
            return False
        contexts: list[Context] = [(1, 2, 3, 4), (1, 2, 3, 1, 2, 3, 4)]
        alone = [self._forward(*self._pad_left([context]), None) for context in contexts]
        if not can_be_cropped(alone[0].past_key_values):
            return False
        cache, (ids, mask) = DynamicCache(), self._pad_left([context[3:] for context in contexts])
        begun = take_row(alone[0].past_key_values, 0, mask.new_tensor([1, 1, 1, 0]), (1, 2, 3))
        mask = torch.cat([fill_cache(cache, [begun, begun]), mask], 1)
        scores = self._forward(ids, mask, cache).logits[:, -1]
        gap = (scores - torch.cat([out.logits[:, -1] for out in alone])).abs().max()
        return bool(gap <= (1e-3 if scores.dtype == torch.float32 else 0.02) * scores.abs().max())

    def _pick(self, scores: Tensor, places: Sequence[Sequence[Row]]) -> None:
        """Sample or choose the next token of each row, from the scores of its place, and note it."""
        heats = [members[0].request.sampling.temperature or 1.0 for members in places]
        logprobs = (scores.float() / torch.tensor(heats, device=scores.device)[:, None]).log_softmax(-1)
        rows = [(place, row) for place, members in enumerate(places) for row in members]
        if self.picks_here or any(row.request.sampling.restricted for _, row in rows):
            arrays = logprobs.cpu().numpy()
            for place, row in rows:
                row.take(arrays[place])
            return
        logprobs = logprobs[torch.tensor([place for place, _ in rows], device=logprobs.device)]
        chosen = logprobs.argmax(1)
        noisy = [number for number, (_, row) in enumerate(rows) if row.noise is not None]
        if noisy:
            keys = [row.noise.key for _, row in rows if row.noise is not None]
            written = [len(rows[number][1].written) for number in noisy]
            at = torch.tensor(noisy, device=logprobs.device)
            chosen[at] = picks(logprobs[at], keys, written)
        values = logprobs.gather(1, chosen[:, None])[:, 0]
        for (_, row), token, value in zip(rows, chosen.tolist(), values.tolist(), strict=True):
            row.note(token, value)

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Any:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        read = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return self.model(**read, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def _pad_left(self, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), self.pad_id, dtype=np.int64)
        mask = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        if self._known is not None and int(ids.max()) >= self._known:  # a GPU would be of no use any more
            raise EngineError(
                f"the prompt has token {int(ids.max())}, and the network knows {self._known}: its tokenizer is of "
                f"another model, or got tokens added; copy tokenizer and weights of one model"
            )
        device = next(self.model.parameters()).device
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    # --- weights
    def load_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Take over weights by name, and use no adapter any more; tied weights may be left out."""
        model: Any = self.model
        state = model.state_dict(keep_vars=True)
        own = {n.replace(".base_layer.", "."): t for n, t in state.items() if not ADAPTERS & {*n.split(".")}}
        refuse_strange(own, weights)
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
        if loaded := ADAPTERS & getattr(model, "peft_config", {}).keys():
            model.delete_adapter(sorted(loaded))
        self.prefixes.clear()
        self.weights_version = version

    def load_adapter(self, folder: Path, version: int) -> None:
        """Put the LoRA adapter of a folder on the model, in the place of the one before.

        Raises:
            DataError: it is broken, or of another model; the one before stays.
        """
        folder = Path(folder)
        if not (folder / "adapter_model.safetensors").is_file():
            raise DataError(f"{folder} is no adapter: it has no adapter_model.safetensors")
        model: Any = self.model
        before = model.active_adapters() if getattr(model, "_hf_peft_config_loaded", False) else []
        name = min(ADAPTERS - {*before})
        self.prefixes.clear()
        try:
            with (
                reading(folder, "does not load as an adapter of this model"),
                needs_extra("LoRA adapters", "llm"),
                warnings.catch_warnings(),
            ):
                warnings.filterwarnings(
                    "ignore", "Already found a `peft_config`"
                )  # there are two for a moment
                found = model.load_adapter(str(folder), adapter_name=name)
                strange = set(getattr(found, "unexpected_keys", ()))  # transformers 4 only warns of them
                strange |= {key for key in getattr(found, "missing_keys", ()) if f".{name}." in f"{key}."}
                if strange:  # they were left out, or set at random
                    listed = ", ".join(sorted(strange)[:3])
                    raise ValueError(f"{len(strange)} of its weights do not fit ({listed})")
        except BaseException:
            if before:
                model.set_adapter(before)
            if name in getattr(model, "peft_config", ()):
                model.delete_adapter(name)
            raise
        model.set_adapter(name)
        if before:
            model.delete_adapter(before)
        model.eval()
        self.weights_version = version


def read_model(folder: Path, kind: Any = AutoModelForCausalLM, **settings: Any) -> Any:
    """The model of a folder on disk, of a class of transformers; nothing is fetched or run.

    Raises:
        DataError: files are broken, or weights are not there: transformers would set them at random, and go on.
    """
    settings |= {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    told = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, found = kind.from_pretrained(folder, **settings, **told)
    except Exception as error:  # whatever transformers makes of it
        raise DataError(f"{folder} does not load as a model: {type(error).__name__}: {error}") from error
    absent = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    if absent:
        raise DataError(
            f"{folder} does not load as a model: {len(absent)} of its weights are not there, or of another shape than "
            f"config.json says ({', '.join(sorted(absent)[:3])}): copy all its files, or choose another class of model"
        )
    return model


def read_weights(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The weights that `save_pretrained` wrote into `folder`, by the names that they have in `model`."""
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):  # large models are in several
        weights |= load_file(file)
    if weights.keys() <= model.state_dict().keys():
        return weights
    del weights
    return dict(read_model(folder, dtype=next(model.parameters()).dtype).state_dict())


def as_in_files(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names that they have in a network of the model in `folder`, by those that files have.

    Transformers keeps the experts of a layer in one tensor, and one tensor an expert in files, as others do.
    """
    from transformers import AutoConfig
    from transformers.core_model_loading import revert_weight_conversion

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):  # a network without memory: it knows the names
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    renamed: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return renamed


class Row:
    """One response in the making."""

    def __init__(self, request: Request, tokenizer: TemplateTokenizer, room: int) -> None:
        self.request = request
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


def alike(rows: Sequence[Row]) -> dict[tuple[Context, float], list[Row]]:
    """Rows by what their next token is drawn from: the context and the temperature."""
    found: dict[tuple[Context, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row.context, row.request.sampling.temperature), []).append(row)
    return found


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values of a layer `[heads, tokens, width]` each, for the tokens of one context."""

    tokens: tuple[int, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]

    def cropped(self, length: int) -> Prefix:
        """Its first tokens (views of the same memory)."""
        layers = tuple((key[:, :length], value[:, :length]) for key, value in self.layers)
        return Prefix(self.tokens[:length], layers)


class PrefixStore:
    """What a model has computed, kept until its weights change: keys and values of contexts, and the scores after them.

    A context is found by its tokens, whichever episode they are of: that of an append prompt goes on from the turn
    before, that of a window prompt from whatever begins alike. Keys and values are the most recently used, up to a
    number of tokens, and scores the last computed, up to `MOST_SCORES`.

    Args:
        max_tokens: over all entries; 0 keeps nothing, scores neither.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 0:
            raise ValueError(f"prefix_tokens must be at least 0, got {max_tokens}")
        self.max_tokens = max_tokens
        self.tokens = 0
        self._entries: OrderedDict[Context, Prefix] = OrderedDict()
        self._sorted: list[Context] = []  # those that begin most alike are neighbours
        self._scores: dict[Context, tuple[Tensor, int]] = {}  # what was computed together, and its row
        self._blocks: deque[tuple[Sequence[Context], Tensor]] = deque()  # oldest first
        self._kept_scores = 0
        self._weights: Any = None

    def valid_for(self, weights: Any) -> None:
        """Forget everything unless it was computed with these weights (any value that changes with them)."""
        if weights != self._weights:
            self.clear()
            self._weights = weights

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._sorted.clear()
        self._scores.clear()
        self._blocks.clear()
        self.tokens = self._kept_scores = 0

    def find(self, context: Context) -> Prefix | None:
        """What is known of the beginning of `context`, at most all of it but the last token."""
        at = bisect_left(self._sorted, context)
        near = self._sorted[max(at - 1, 0) : at + 1]
        shared, entry = max(((shared_length(tokens, context), tokens) for tokens in near), default=(0, ()))
        shared = min(shared, len(context) - 1)
        if shared < MIN_SHARED:
            return None
        self._entries.move_to_end(entry)
        return self._entries[entry].cropped(shared)

    def keep(self, prefix: Prefix) -> None:
        """Keep a context, in the place of one that it begins with."""
        tokens = prefix.tokens
        at = bisect_left(self._sorted, tokens)
        if at < len(self._sorted) and self._sorted[at][: len(tokens)] == tokens:
            return self._entries.move_to_end(self._sorted[at])  # it is known, with more behind it
        if len(tokens) > self.max_tokens:
            return
        if at and self._sorted[at - 1] == tokens[: len(self._sorted[at - 1])]:
            self._drop(self._sorted[at - 1])
        self._sorted.insert(bisect_left(self._sorted, tokens), tokens)
        self._entries[tokens] = prefix
        self.tokens += len(tokens)
        while self.tokens > self.max_tokens:
            self._drop(next(iter(self._entries)))

    def _drop(self, tokens: Context) -> None:
        del self._entries[tokens]
        del self._sorted[bisect_left(self._sorted, tokens)]
        self.tokens -= len(tokens)

    def scores(self, context: Context) -> Tensor | None:
        """`[V]` of the token after a context, if they are known."""
        block, row = self._scores.get(context, (None, 0))
        return None if block is None else block[row]

    def remember(self, contexts: Sequence[Context], scores: Tensor) -> None:
        """Keep the scores `[B, V]` of the token after each context."""
        if not self.max_tokens:
            return
        self._blocks.append((contexts, scores))
        self._scores.update((context, (scores, row)) for row, context in enumerate(contexts))
        self._kept_scores += scores.numel()
        while self._kept_scores > MOST_SCORES:
            contexts, scores = self._blocks.popleft()
            self._kept_scores -= scores.numel()
            for context in contexts:
                if context in self._scores and self._scores[context][0] is scores:
                    del self._scores[context]


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # tuple comparison is fast, so halve the interval instead of walking
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def fill_cache(cache: Any, prefixes: Sequence[Prefix | None]) -> Tensor:
    """Put the prefixes of a batch into an empty cache, padded on the left; the mask `[B, P]` of what is real."""
    known = [prefix for prefix in prefixes if prefix is not None]
    longest = max(len(prefix.tokens) for prefix in known)
    sample = known[0].layers[0][0]
    mask = torch.zeros(len(prefixes), longest, dtype=torch.int64, device=sample.device)
    for row, prefix in enumerate(prefixes):
        if prefix is not None:
            mask[row, longest - len(prefix.tokens) :] = 1
    for layer in range(len(known[0].layers)):
        pair = []
        for side in (0, 1):
            heads, _, width = known[0].layers[layer][side].shape
            whole = sample.new_zeros(len(prefixes), heads, longest, width)
            for row, prefix in enumerate(prefixes):
                if prefix is not None:
                    whole[row, :, longest - len(prefix.tokens) :] = prefix.layers[layer][side]
            pair.append(whole)
        cache.update(*pair, layer)
    return mask


class RoomyLayer(DynamicLayer):
    """Keys and values of a layer with room behind them: a token is written there, and nothing else copied.

    Args:
        layer: what is there already.
        rows: of it, in their new order.
        room: how many rows there may be later.
    """

    def __init__(self, layer: Any, rows: Tensor, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        length = layer.keys.shape[-2]
        self._room = room
        self._places = [self._roomy(old.index_select(0, rows), length) for old in (layer.keys, layer.values)]
        self._show(len(rows), length)

    def _roomy(self, old: Tensor, length: int) -> Tensor:
        rows, heads, _, width = old.shape
        place = old.new_empty(self._room, heads, length + max(SPARE, length // 4), width)
        place[:rows, :, :length] = old[:, :, :length]
        return place

    def _show(self, rows: int, length: int) -> None:
        self.keys, self.values = (place[:rows, :, :length] for place in self._places)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write further tokens; all keys and values so far."""
        rows, _, before, _ = self.keys.shape
        length = before + key_states.shape[-2]
        if length > self._places[0].shape[-2]:
            self._places = [self._roomy(old[:rows], before) for old in self._places]
            if length > self._places[0].shape[-2]:
                raise ValueError(f"{key_states.shape[-2]} tokens at once are more than one answer's next")
        for place, states in zip(self._places, (key_states, value_states), strict=True):
            place[:rows, :, before:length] = states
        self._show(rows, length)
        return self.keys, self.values

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows, in an order of `with_few_moves`; one that is there twice is copied."""
        length = self.keys.shape[-2]
        for place in self._places:
            for here, there in enumerate(rows):
                if here != there:
                    place[here, :, :length] = place[there, :, :length]
        self._show(len(rows), length)


def with_few_moves(rows: Sequence[int]) -> list[int]:
    """An order of what goes on from these rows in which few are moved: the others fill the gaps.

    >>> rows = [0, 2, 2, 3, 5]
    >>> [rows[number] for number in with_few_moves(rows)]
    [0, 5, 2, 3, 2]
    """
    order = [-1] * len(rows)
    moved = []
    for number, row in enumerate(rows):
        if row < len(rows) and order[row] < 0:
            order[row] = number
        else:
            moved.append(number)
    return [moved.pop() if number < 0 else number for number in order]


def keep_rows(cache: Any, rows: Tensor, *, room: int = 0) -> None:
    """Only these rows of a cache, in this order; with `room` for so many, and their answers, if it is a plain one."""
    layers = getattr(cache, "layers", ())
    if room and can_be_cropped(cache):
        cache.layers = [RoomyLayer(layer, rows, room) for layer in layers]
    elif layers and all(isinstance(layer, RoomyLayer) for layer in layers):
        for layer in layers:
            layer.keep(rows.tolist())
    else:
        cache.reorder_cache(rows)


def take_row(cache: Any, row: int, mask: Tensor, tokens: tuple[int, ...]) -> Prefix:
    """Copy one row out of a cache whose real columns `mask [P]` names, for the `tokens` they hold."""
    columns = mask.nonzero()[:, 0]
    assert len(columns) == len(tokens), (len(columns), len(tokens))
    layers = tuple(
        (layer.keys[row].index_select(1, columns), layer.values[row].index_select(1, columns))
        for layer in cache.layers
    )
    return Prefix(tokens, layers)


def can_be_cropped(cache: Any) -> bool:
    """Whether every layer keeps all tokens: sliding windows and recurrent states cannot be taken apart."""
    layers = getattr(cache, "layers", ())
    return bool(layers) and all(type(layer) in (DynamicLayer, RoomyLayer) for layer in layers)
