"""The tiny model: a language model small enough to learn an environment on a laptop within a minute.

Every batch is run in chunks of one fixed shape and equal prompts are computed once, so with one torch thread
not only the tokens but the log-probabilities are bit-equal whatever else is in the batch (level L2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.configuration import check_settings
from shoal.core.errors import needs_extra, reading
from shoal.core.files import read_json
from shoal.core.seeding import derive_seed
from shoal.maths.noise import torch_noise
from shoal.samplers.sampler import Completion, Level, Request, refuse_strange, restricted, room_left
from shoal.samplers.tokenizers import END, PAD, TinyTokenizer

with needs_extra("the tiny model", "train"):
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    from shoal.samplers.noise import Noise

ROWS = 32
"""Rows of a chunk; smaller batches are filled with padding."""
BUCKET = 8
"""Prompts are padded on the left to a multiple of this many tokens."""


@dataclass(frozen=True)
class TinyShape:
    """Sizes of the network; the defaults have about 0.1M parameters."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 256  # longest prompt plus response, in tokens

    def __post_init__(self) -> None:
        check_settings(self, width=1, layers=1, heads=1, context=1)
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads={self.heads}, got {self.width}")


class Block(nn.Module):
    """Attention and a feed-forward layer, each on the normalised residual."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.gradient_checkpointing = True  # in training mode, which the trainer switches on where asked for
        self.norm_attention = nn.RMSNorm(shape.width)
        self.norm_feed = nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(
        self, x: Tensor, mask: Tensor, cache: Tensor | None = None, at: int = 0, wanted: Tensor | None = None
    ) -> Tensor:
        """`x [B, T, W]` → the same shape, or `[B, K, W]` of the positions `wanted`.

        Args:
            x: the residual stream.
            mask: `[B, 1, T, S]` (of the positions `wanted`: `[B, 1, K, S]`) additive, 0 where a query may look and -inf
                where not; or one of bools for `scaled_dot_product_attention`.
            cache: `[2, B, H, S, W/H]` keys and values, written at `at … at+T` and read whole up to there.
            at: position of the first of the `T` tokens in the cache.
            wanted: `[B, K]` of the `T` tokens; the others are looked at and no more.
        """
        batch, length, width = x.shape
        normed = self.norm_attention(x)
        if wanted is None:
            query, key, value = self._by_head(self.qkv(normed), 3)
        else:
            rows = torch.arange(batch, device=x.device)[:, None]
            key, value = self._by_head(F.linear(normed, self.qkv.weight[width:]), 2)
            (query,) = self._by_head(F.linear(normed[rows, wanted], self.qkv.weight[:width]), 1)
            x = x[rows, wanted]
        if cache is not None:
            cache[0, :, :, at : at + length] = key
            cache[1, :, :, at : at + length] = value
            key, value = cache[0, :, :, : at + length], cache[1, :, :, : at + length]
        if mask.dtype == torch.bool:
            attended = F.scaled_dot_product_attention(query, key, value, mask)
        else:
            scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
            attended = (scores + mask).softmax(-1) @ value
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_feed(x))))
        return out

    def _by_head(self, x: Tensor, parts: int) -> Tensor:
        """`[B, T, parts * W]` → `[parts, B, H, T, W/H]`."""
        batch, length, width = x.shape
        return x.view(batch, length, parts, self.heads, width // parts // self.heads).permute(2, 0, 3, 1, 4)


class TinyNetwork(nn.Module):
    """Token ids to next-token scores: a small decoder-only transformer, pre-norm with learned positions.

    It runs with and without a cache; initial weights depend on `seed` alone.
    """

    def __init__(self, shape: TinyShape, vocabulary: int, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.vocabulary = vocabulary
        with torch_noise():  # torch's own initialisation draws from it
            self.embedding = nn.Embedding(vocabulary, shape.width)
            self.position = nn.Embedding(shape.context, shape.width)
            self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
            self.norm = nn.RMSNorm(shape.width)
            self.head = nn.Linear(shape.width, vocabulary, bias=False)
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.startswith(("embedding", "position")):
                    parameter.normal_(0, 0.5, generator=generator)
                elif parameter.ndim == 2:
                    bound = parameter.shape[1] ** -0.5
                    parameter.uniform_(-bound, bound, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()

    def hidden(
        self,
        ids: Tensor,
        start: Tensor,
        cache: list[Tensor] | None = None,
        at: int = 0,
        wanted: Tensor | None = None,
        masks: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The last hidden states `[B, T, W]` of `ids [B, T]`, or `[B, K, W]` of the positions `wanted`.

        Args:
            ids: tokens; in a left-padded batch the first `start[b]` of the whole context are padding.
            start: `[B]` where each row's context begins, or `[B, 1 or T]` where that of each token does, or
                `[1 + 2 S, B, T]` with the first position and the end of each of the pieces of the row that it goes on
                from.
            cache: one `[2, B, H, S, W/H]` a layer, filled from `at` on.
            at: how many tokens stand in the cache already.
            wanted: `[B, K]` of the `T` tokens: the last layer is computed for these alone.
            masks: bools in the place of those of `start`, for each layer but the last and for the last.
        """
        positions = torch.arange(at, at + ids.shape[1], device=ids.device)
        first, *spans = start if start.ndim == 3 else (start[:, None] if start.ndim == 1 else start,)
        offset = sum((end - begin for begin, end in zip(spans[::2], spans[1::2], strict=True)), start=0)
        x = self.embedding(ids) + self.position((positions[None] - first).clamp(min=0) + offset)
        mask, of_last = masks or self._masks(positions, at, first, spans, wanted)
        for index, block in enumerate(self.blocks):
            here = None
            if index + 1 == len(self.blocks):
                mask, here = of_last, wanted
            if block.training and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, None, 0, here, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, mask, None if cache is None else cache[index], at, here)
        normalised: Tensor = self.norm(x)
        return normalised

    def _masks(
        self, positions: Tensor, at: int, first: Tensor, spans: list[Tensor], wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        seen = torch.arange(at + len(positions), device=positions.device)
        allowed = (seen <= positions[:, None]) & (seen >= first[:, :, None])
        for begin, end in zip(spans[::2], spans[1::2], strict=True):
            allowed |= (seen >= begin[:, :, None]) & (seen < end[:, :, None])
        allowed = allowed | (seen == positions[:, None])  # a padding query sees itself: no NaN
        mask = torch.zeros(allowed.shape, dtype=self.head.weight.dtype, device=positions.device)
        mask = mask.masked_fill(~allowed, float("-inf"))[:, None]
        if wanted is None:
            return mask, mask
        return mask, mask.gather(2, wanted[:, None, :, None].expand(-1, -1, -1, mask.shape[3]))


class TinyEngine:
    """Completes prompts with a `TinyNetwork`.

    Args:
        words: action words that are one token each.
        shape: sizes of the network.
        seed: of the initial weights.
        device: where the network lives.
    """

    def __init__(
        self, words: Sequence[str] = (), shape: TinyShape | None = None, *, seed: int = 0, device: str = "cpu"
    ) -> None:
        self.tokenizer = TinyTokenizer(words)
        first = derive_seed(seed, "init", "tiny") % 2**63
        self.model = TinyNetwork(shape or TinyShape(), self.tokenizer.size, first).to(device)
        self.device = torch.device(device)
        self.weights_version = 0
        self.pad_id = PAD

    @property
    def level(self) -> Level:
        """L2 on a CPU with one torch thread, else L1."""
        return "L2" if self.device.type == "cpu" and torch.get_num_threads() == 1 else "L1"

    # --- rollouts
    @property
    def context(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self.model.shape.context

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order."""
        groups: dict[tuple[int, int], list[int]] = {}
        done: dict[int, Completion] = {}
        for index, request in enumerate(requests):
            room = room_left(self, request)
            padded = -(-len(request.prompt_ids) // BUCKET) * BUCKET
            if room:
                groups.setdefault((padded, room), []).append(index)
            else:
                done[index] = Completion((), (), "context", self.weights_version)
        with torch.inference_mode():
            for (padded, room), members in groups.items():
                unique = {requests[i].prompt_ids: None for i in members}
                row_of = {prompt: row for row, prompt in enumerate(unique)}
                prefix = self._prefill(list(unique), padded)
                for first in range(0, len(members), ROWS):
                    chunk = members[first : first + ROWS]
                    rows = [row_of[requests[i].prompt_ids] for i in chunk]
                    rows += rows[-1:] * (ROWS - len(rows))
                    answers = self._decode([requests[i] for i in chunk], prefix.rows(rows, room), room)
                    done.update(zip(chunk, answers, strict=True))
        return [done[index] for index in range(len(requests))]

    def _prefill(self, prompts: list[tuple[int, ...]], padded: int) -> _Prefix:
        shape = self.model.shape
        parts: list[_Prefix] = []
        for first in range(0, len(prompts), ROWS):
            ids = np.full((ROWS, padded), PAD, dtype=np.int64)
            start = np.full(ROWS, padded - 1, dtype=np.int64)
            for row, prompt in enumerate(prompts[first : first + ROWS]):
                start[row] = padded - len(prompt)
                ids[row, start[row] :] = prompt
            begin = torch.from_numpy(start).to(self.device)
            size = (2, ROWS, shape.heads, padded, shape.width // shape.heads)
            cache = [torch.zeros(size, device=self.device) for _ in range(shape.layers)]
            last = torch.full((ROWS, 1), padded - 1, device=self.device)
            hidden = self.model.hidden(torch.from_numpy(ids).to(self.device), begin, cache, wanted=last)[:, 0]
            parts.append(_Prefix(cache, hidden, begin))
        return parts[0] if len(parts) == 1 else _Prefix.join(parts)

    def _decode(self, requests: list[Request], prefix: _Prefix, room: int) -> list[Completion]:
        """Sample one chunk token by token, up to `room`, until every row has ended."""
        padded = prefix.padded
        hidden, n = prefix.hidden, len(requests)
        temperature = np.array([request.sampling.temperature for request in requests])
        scale = torch.ones(ROWS, 1, device=self.device)
        scale[:n, 0] = torch.from_numpy(1 / np.where(temperature == 0, 1, temperature)).float()
        noise = np.zeros((n, room, self.tokenizer.size))
        for row in np.flatnonzero(temperature).tolist():
            noise[row] = Noise(requests[row].key).rows(room, self.tokenizer.size)
        limited = [row for row, request in enumerate(requests) if request.sampling.restricted]
        texts = [""] * n
        written: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        live = dict.fromkeys(range(n))
        for step in range(room):
            scores = (self.model.head(hidden) * scale).log_softmax(-1)[:n].cpu().numpy()
            if limited:
                scores = scores.astype(np.float64)
                for row in limited:
                    scores[row] = restricted(scores[row], requests[row].sampling)
            picks = (scores + noise[:, step]).argmax(-1)
            for row in list(live):
                pick = int(picks[row])
                written[row].append(pick)
                logprobs[row].append(float(scores[row, pick]))
                ended = pick == END
                if stops := requests[row].sampling.stop:
                    piece = self.tokenizer.decode((pick,))
                    texts[row] += piece
                    ended = ended or any(stop in texts[row][-len(stop + piece) + 1 :] for stop in stops)
                if ended:
                    del live[row]
            if not live or step + 1 == room:
                break
            ids = torch.full((ROWS, 1), PAD, dtype=torch.int64)
            ids[:n, 0] = torch.from_numpy(picks)
            hidden = self.model.hidden(ids.to(self.device), prefix.start, prefix.cache, padded + step)[:, -1]
        return [
            Completion(tuple(ids), tuple(lps), "length" if row in live else "stop", self.weights_version)
            for row, (ids, lps) in enumerate(zip(written, logprobs, strict=True))
        ]

    # --- files
    @classmethod
    def load(cls, folder: Path, *, device: str = "cpu") -> TinyEngine:
        """The sampler of a folder that a policy wrote; a `DataError` says which file does not fit."""
        described: dict[str, Any] = read_json(folder / "engine.json")
        with reading(folder / "engine.json", "does not describe a tiny engine"):
            engine = cls(described["words"], TinyShape(**described["shape"]), device=device)
        with reading(folder / "model.safetensors", "holds no weights that load"):
            weights = load_file(folder / "model.safetensors")
        engine.load_weights(weights, engine.weights_version)
        return engine

    def load_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Take over weights by name; `version` marks the completions they produce."""
        refuse_strange(self.model.state_dict(keep_vars=True), weights)
        self.model.load_state_dict(weights, strict=False)
        self.weights_version = version


@dataclass(frozen=True)
class _Prefix:
    """Computed prompts: a cache a layer `[2, B, H, S, D]`, last hidden states `[B, W]`, starts `[B]`."""

    cache: list[Tensor]
    hidden: Tensor
    start: Tensor
    padded: int = 0

    @classmethod
    def join(cls, parts: list[_Prefix]) -> _Prefix:
        caches = [torch.cat(layer, 1) for layer in zip(*(part.cache for part in parts), strict=True)]
        return cls(caches, torch.cat([p.hidden for p in parts]), torch.cat([p.start for p in parts]))

    def rows(self, rows: list[int], room: int) -> _Prefix:
        """These rows, with room for `room` more tokens."""
        index = torch.tensor(rows, device=self.start.device)
        padded = self.cache[0].shape[3]
        caches = []
        for layer in self.cache:
            sides, _, heads, _, width = layer.shape
            grown = layer.new_zeros((sides, len(rows), heads, padded + room, width))
            grown[:, :, :, :padded] = layer.index_select(1, index)
            caches.append(grown)
        return _Prefix(caches, self.hidden[index], self.start[index], padded)
