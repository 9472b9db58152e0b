"""A small decoder-only transformer, pre-norm with learned positions, that runs with and without a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class TinyShape:
    """Sizes of the network; the defaults have about 0.1M parameters."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 256  # longest prompt plus response, in tokens

    def __post_init__(self) -> None:
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

    def forward(self, x: Tensor, mask: Tensor, cache: Tensor | None = None, at: int = 0) -> Tensor:
        """`x [B, T, W]` → the same shape.

        Args:
            x: the residual stream.
            mask: `[B, 1, T, S]` additive, 0 where a query may look and -inf where not.
            cache: `[2, B, H, S, W/H]` keys and values, written at `at … at+T` and read whole up to there.
            at: position of the first of the `T` tokens in the cache.
        """
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, :, at : at + length] = key
            cache[1, :, :, at : at + length] = value
            key, value = cache[0, :, :, : at + length], cache[1, :, :, : at + length]
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
        attended = (scores + mask).softmax(-1) @ value
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_feed(x))))
        return out


class TinyNetwork(nn.Module):
    """Token ids to next-token scores; initial weights depend on `seed` alone."""

    def __init__(self, shape: TinyShape, vocabulary: int, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.vocabulary = vocabulary
        with torch.random.fork_rng(devices=[]):  # torch's own initialisation draws from global state
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

    def hidden(self, ids: Tensor, start: Tensor, cache: list[Tensor] | None = None, at: int = 0) -> Tensor:
        """The last hidden states `[B, T, W]` of `ids [B, T]`.

        Args:
            ids: tokens; in a left-padded batch the first `start[b]` of the whole context are padding.
            start: `[B]` where each row's context begins, or `[B, 1 or T]` where that of each token does, or `[3, B, T]`
                with the first place and the end of a stem before it in the row that it continues.
            cache: one `[2, B, H, S, W/H]` a layer, filled from `at` on.
            at: how many tokens stand in the cache already.
        """
        length = ids.shape[1]
        places = torch.arange(at, at + length, device=ids.device)
        seen = torch.arange(at + length, device=ids.device)
        stem, stem_end = (start[1], start[2]) if start.ndim == 3 else (None, None)
        first = start[:, None] if start.ndim == 1 else start[0] if start.ndim == 3 else start
        allowed = (seen[None, None] <= places[None, :, None]) & (seen[None, None] >= first[:, :, None])
        offset: Tensor | int = 0
        if stem is not None and stem_end is not None:
            allowed |= (seen[None, None] >= stem[:, :, None]) & (seen[None, None] < stem_end[:, :, None])
            offset = stem_end - stem
        allowed = allowed | (seen[None, None] == places[None, :, None])  # a padding query sees itself: no NaN
        mask = torch.zeros(allowed.shape, dtype=self.head.weight.dtype, device=ids.device)
        mask = mask.masked_fill(~allowed, float("-inf"))[:, None]
        x = self.embedding(ids) + self.position((places[None] - first).clamp(min=0) + offset)
        for index, block in enumerate(self.blocks):
            if block.training and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, mask, None if cache is None else cache[index], at)
        normalised: Tensor = self.norm(x)
        return normalised
