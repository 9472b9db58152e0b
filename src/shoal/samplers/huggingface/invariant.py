"""A network whose results do not depend on what else is in the batch: the same bits in the sampler and in the trainer.

Libraries choose the order of additions by the shape of a batch. Here every product has one shape: rows go through in
tiles of a fixed number, the last one filled up with zeros, and attention in tiles of queries and blocks of keys that
are counted from the first token of a sequence. Only the forward pass is replaced; gradients are those of the plain one.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from shoal.core.errors import ConfigError, format_error, needs_extra
from shoal.samplers.models import INVARIANT, looks_back

with needs_extra("batch-invariant networks", "llm"):
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.overrides import TorchFunctionMode
    from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
    from transformers.masking_utils import sdpa_mask

BLOCK = 64
"""Keys that are multiplied at once."""
CHUNK = 1 << 14
"""Numbers that go through an exponential at once: few enough for one thread, and whole vectors."""


class Tiles(NamedTuple):
    """The fixed shapes of products: small enough for one decoding step, large enough to be fast."""

    rows: int  # of a matrix product
    queries: int  # of a product of attention: tokens, times the heads that share keys
    products: int  # of attention that are made at once


def tiles_of(tensor: Tensor) -> Tiles:
    """The shapes for the device of a tensor."""
    return Tiles(32, 16, 32) if tensor.device.type == "cpu" else Tiles(256, 64, 1024)


# --- on and off
def make_invariant(model: Any) -> None:
    """Let a model of transformers compute each token alike in every batch, from now on; its copies do as well.

    Raises:
        ConfigError: the model cannot: it has windows or an attention of its own, or a trial finds a difference.
    """
    kind = type(model).__name__
    if looks_back(model) < math.inf:
        raise ConfigError(
            f"engine.batch_invariant=true needs full attention in all layers; {kind} has other layers"
        )
    model.set_attn_implementation(INVARIANT)
    if not is_invariant(model):
        raise ConfigError(f"engine.batch_invariant=true cannot replace the attention of {kind}")
    for part in filter(None, (model, model.get_decoder(), model.get_output_embeddings())):
        part.register_forward_pre_hook(_enter)
        part.register_forward_hook(_leave, always_call=True)
    try:
        differs = _differs(model)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"engine.batch_invariant=true fails for {kind}: {format_error(error)}") from error
    if differs:
        raise ConfigError(
            f"engine.batch_invariant=true does not hold for {kind}: its scores differ {differs}"
        )


def is_invariant(model: Any) -> bool:
    """Whether `make_invariant` was called on a model, or on what it is a copy of."""
    return getattr(model.config.get_text_config(), "_attn_implementation", None) == INVARIANT


def _differs(model: Any) -> str:
    """Where the scores of a short sequence differ from those that it has alone; empty if nowhere."""
    ids = torch.arange(3, 23, device=next(model.parameters()).device)[None]
    pair = torch.cat([ids.roll(7, 1), ids])
    mask = torch.ones_like(pair)
    mask[0, :9] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()
    with torch.no_grad():
        alone = model(input_ids=ids, use_cache=False).logits[0]
        batch = model(input_ids=pair, attention_mask=mask, position_ids=positions, use_cache=False).logits[1]
        read = [
            model(input_ids=part, past_key_values=cache, use_cache=True).logits[0]
            for part in ids.split(17, 1)
        ]
    in_batch = "in a batch" if not torch.equal(batch, alone) else ""
    return in_batch or ("behind a cache" if not torch.equal(torch.cat(read), alone) else "")


class _Inside(threading.local):
    depth = 0  # of parts of models that this thread is in


class _Mode(TorchFunctionMode):
    """While it is on, functions that choose an order by the shape are replaced."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _REPLACED.get(function)
        if replacement is None:
            return function(*args, **(kwargs or {}))
        return replacement(function, *args, **(kwargs or {}))


def _enter(module: nn.Module, args: Any) -> None:
    _INSIDE.depth += 1
    if _INSIDE.depth == 1:
        _MODE.__enter__()  # type: ignore[no-untyped-call]


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    _INSIDE.depth -= 1
    if not _INSIDE.depth:
        _MODE.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def checkpoint_contexts() -> tuple[Any, Any]:
    """For `torch.utils.checkpoint`: what a layer of an invariant network runs in, at first and again.

    Its hooks are not called again.
    """
    return contextlib.nullcontext(), _MODE


# --- functions of rows and numbers
class _Replaced(torch.autograd.Function):
    """Values of one function, gradients of another one, which is computed again."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], plain: Any, *inputs: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        needed = ctx.needs_input_grad[2:]
        inputs = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            found = ctx.plain(*inputs)
        gradients = iter(torch.autograd.grad(found, [t for t in inputs if t.requires_grad], gradient))
        return None, None, *(next(gradients) if need else None for need in needed)


class _Linear(torch.autograd.Function):
    """`torch.nn.functional.linear` in tiles."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, weight)
        return _tiled_linear(F.linear, values, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        values, weight = ctx.saved_tensors
        flat, of = gradient.flatten(0, -2), ctx.needs_input_grad
        of_weight = flat.T @ values.flatten(0, -2) if of[1] else None
        return gradient @ weight if of[0] else None, of_weight, flat.sum(0) if of[2] else None


def _replace(compute: Callable[..., Tensor], plain: Any, *inputs: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return compute(*inputs)
    return _Replaced.apply(compute, plain, *inputs)  # type: ignore[no-any-return, no-untyped-call]


def _in_tiles(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """A function of rows `[..., width]`, called with a fixed number of them, at places of the same alignment."""
    rows, size = values.numel() // values.shape[-1], tiles_of(values).rows
    filled = values.new_empty(-(-rows // size) * size, values.shape[-1])
    filled[:rows] = values.reshape(rows, -1)
    filled[rows:] = 0
    found = torch.cat([function(tile) for tile in filled.split(size)])[:rows]
    return found.view(*values.shape[:-1], -1)


def _tiled_linear(plain: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In tiles; to few columns, as in adapters, others are added: some CPUs multiply those otherwise in each row."""
    columns, added = len(weight), max(0, 16 - len(weight))
    if added:
        weight, bias = F.pad(weight, (0, 0, 0, added)), None if bias is None else F.pad(bias, (0, added))
    return _in_tiles(partial(plain, weight=weight, bias=bias), values)[..., :columns]


def _linear(plain: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not torch.is_grad_enabled():
        return _tiled_linear(plain, input, weight, bias)
    return _Linear.apply(input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def _mean(plain: Any, input: Tensor, dim: Any = None, keepdim: bool = False, **settings: Any) -> Tensor:
    """Of rows, as norms take it; over another dimension than the last it stays as it is."""
    if dim not in (-1, [-1], (-1,)):
        settings |= {} if dim is None else {"dim": dim, "keepdim": keepdim}
        return plain(input, **settings)  # type: ignore[no-any-return]

    def compute(values: Tensor) -> Tensor:
        found = _in_tiles(lambda tile: plain(tile, -1, keepdim=True, **settings), values)
        return found if keepdim else found[..., 0]

    return _replace(compute, lambda values: plain(values, -1, keepdim=keepdim, **settings), input)


def _elementwise(plain: Any, input: Tensor, *args: Any, **settings: Any) -> Tensor:
    """On a CPU, what is left over behind whole vectors goes through other code: here nothing is left over."""
    if input.device.type != "cpu":
        return plain(input, *args, **settings)  # type: ignore[no-any-return]

    def compute(values: Tensor) -> Tensor:
        flat = F.pad(values.reshape(-1), (0, -values.numel() % BLOCK))
        found = torch.cat([plain(chunk, *args, **settings) for chunk in flat.split(CHUNK)])
        return found[: values.numel()].view(values.shape)

    return _replace(compute, lambda values: plain(values, *args, **settings), input)


_MODE, _INSIDE = _Mode(), _Inside()
_NAMES = ("sigmoid", "tanh", "exp", "cos", "sin", "rsqrt")
_ELEMENTWISE = [F.silu, F.gelu, *(getattr(of, name) for of in (torch, Tensor) for name in _NAMES)]
_REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    **dict.fromkeys([torch.mean, Tensor.mean], _mean),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
}


# --- attention
class Layout(NamedTuple):
    """Where the `S` sequences of a batch stand in its rows, each without gaps."""

    rows: Tensor  # [S] of the batch
    queries: Tensor  # [S, Q] their columns; behind them others
    keys: Tensor  # [S, K] the columns of the keys in order; behind them others
    seen: Tensor  # [S, Q] how many of these keys a query sees; 0: it is none of the sequence
    own: Tensor  # [B, Q] the last key that each query sees
    most: tuple[int, ...] | None  # by column, how many keys a query sees in any sequence; None: all


def find_layout(allowed: Tensor) -> Layout:
    """The sequences in a mask `[B, Q, K]`: each is what a query sees, of those that no other query sees more than.

    Raises:
        ValueError: a query sees a part of a sequence that is not its beginning.
    """
    rows, queries, keys = allowed.shape
    counts, own = allowed.sum(2), keys - 1 - allowed.flip(2).byte().argmax(2)
    if queries == 1:  # nothing is asked of the device: a decoding step may be recorded as a graph
        order = (~allowed[:, 0]).byte().argsort(dim=1, stable=True)
        return Layout(torch.arange(rows, device=own.device), torch.zeros_like(own), order, counts, own, None)
    # [B, Q, Q'] query Q the last key of query Q'
    sees = allowed.gather(2, own[:, None].expand(-1, queries, -1))
    rank = counts * queries - torch.arange(queries, device=own.device)
    last = (rank == torch.where(sees, rank[:, :, None], -queries).amax(1)) & (counts > 1)
    sees &= last[:, :, None]
    of, inside = sees.byte().argmax(1), sees.any(1)
    whole = allowed.gather(1, of[:, :, None].expand_as(allowed))
    begun = whole & (whole.cumsum(2) <= counts[:, :, None])
    if not torch.equal(allowed[inside], begun[inside]) or bool((counts[~inside] > 1).any()):
        raise ValueError("what a token sees must be the beginning of what a later one sees, or no part of it")
    row, place = last.nonzero(as_tuple=True)
    mine = (of[row] == place[:, None]) & inside[row]
    order = (~mine).byte().argsort(dim=1, stable=True)[:, : int(mine.sum(1).max()) if len(row) else 0]
    columns = (~allowed[row, place]).byte().argsort(dim=1, stable=True)
    seen = torch.where(mine, counts[row], 0).gather(1, order)
    return Layout(row, order, columns, seen, own, tuple(seen.amax(0).tolist()) if len(row) else ())


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention for `AttentionInterface`, in float32 and in an order that counts from the first token of a sequence.

    Args:
        module: the layer; those after the first use the layout that the first one found in their mask.
        query: `[B, heads, Q, width]`.
        key: `[B, heads of keys, K, width]`; what no query sees must be finite.
        value: `[B, heads of keys, K, width]`.
        attention_mask: `[B, 1, Q, K]`, True (or 0, among numbers) where a query sees a key; None: all up to itself.
        **settings: `scaling` of the scores; `dropout` and caps are refused.

    Returns:
        `[B, Q, heads, width]`, and no weights.
    """
    if strange := [name for name in ("dropout", "softcap", "s_aux", "position_bias") if settings.get(name)]:
        raise ValueError(f"batch-invariant attention knows no {strange[0]}")
    if attention_mask is None:
        shape = (query.shape[2], key.shape[2])
        attention_mask = torch.ones(1, 1, *shape, dtype=torch.bool, device=query.device).tril(
            shape[1] - shape[0]
        )
    allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    scale = settings.get("scaling") or query.shape[-1] ** -0.5
    layout = getattr(attention_mask, "_shoal_layout", None)
    if layout is None or getattr(module, "layer_idx", 0) == 0:
        layout = find_layout(allowed[:, 0].expand(len(query), -1, -1))
        attention_mask._shoal_layout = layout  # type: ignore[attr-defined]

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        return F.scaled_dot_product_attention(query, key, value, allowed, scale=scale).transpose(1, 2)

    return _replace(partial(_attend, layout, scale), plain, query, key, value), None


def _attend(layout: Layout, scale: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads, width, blocks = key.shape[1], value.shape[-1], -(-key.shape[2] // BLOCK)
    group = query.shape[1] // heads
    taken = max(1, tiles_of(query).queries // group)  # tokens of a tile
    (sequences, queries), rows = layout.queries.shape, layout.rows[:, None]
    every = torch.arange(len(query), device=query.device)[:, None]
    # a first token sees itself alone
    found = value.transpose(1, 2)[every, layout.own].repeat_interleave(group, 2)
    if not sequences:
        return found
    behind = -queries % taken
    asked = F.pad(query.float().transpose(1, 2)[rows, layout.queries], (0, 0, 0, 0, 0, behind))
    asked = asked.unflatten(2, (heads, group)).permute(0, 2, 3, 1, 4)  # [S, heads, group, Q, width]
    seen = F.pad(layout.seen, (0, behind))[:, None, None, :, None]
    keys, values = (_in_blocks(each, layout, blocks) for each in (key, value))
    values = F.pad(values, (0, 1), value=1.0)  # a column of ones: the sum of the weights
    values = F.pad(values, (0, -(width + 1) % 8))  # on some CPUs a row of an odd length depends on its place
    slots = torch.arange(blocks * BLOCK, device=query.device).view(blocks, 1, 1, 1, 1, BLOCK)
    answers = []
    for tile in (slice(first, first + taken) for first in range(0, queries, taken)):
        needed = blocks if layout.most is None else max(1, -(-max(layout.most[tile]) // BLOCK))
        each = (
            asked[:, :, :, tile].reshape(1, sequences * heads, group * taken, -1).expand(needed, -1, -1, -1)
        )
        scores = _products(each, keys[:needed], turned=True).view(
            needed, sequences, heads, group, taken, BLOCK
        )
        scores.mul_(scale).masked_fill_(slots[:needed] >= seen[:, :, :, tile], -torch.inf)
        scores -= scores.amax((0, 5), keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        for chunk in scores.view(-1).split(CHUNK):
            chunk.exp_()
        total, *parts = _products(
            scores.view(needed, sequences * heads, group * taken, BLOCK), values[:needed]
        )
        for part in parts:  # one after the other: blocks in which nothing is seen add 0
            total = total + part
        answer = total[..., :width] / total[..., width : width + 1].clamp(min=torch.finfo(torch.float32).tiny)
        answers.append(answer.view(sequences, heads, group, taken, width))
    joined = torch.cat(answers, 3)[:, :, :, :queries].permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype)
    if layout.most is None:
        return joined
    real = layout.seen > 0
    found[rows.expand_as(real)[real], layout.queries[real]] = joined[real]
    return found


def _in_blocks(values: Tensor, layout: Layout, blocks: int) -> Tensor:
    """Keys or values `[B, heads, K, width]` of the sequences, as `[blocks, S * heads, BLOCK, width]`."""
    gathered = values.transpose(1, 2)[layout.rows[:, None], layout.keys].float()
    filled: Tensor = F.pad(gathered, (0, 0, 0, 0, 0, blocks * BLOCK - values.shape[2])).unflatten(
        1, (blocks, BLOCK)
    )
    return filled.permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()


def _products(one: Tensor, other: Tensor, turned: bool = False) -> Tensor:
    """Matrix products `[blocks, N, R, X] @ [blocks, N, X, Y]` (`turned`: `[.., Y, X]`), a fixed number at once."""
    shape = (*one.shape[:3], other.shape[2 if turned else 3])
    one, other = one.flatten(0, 1), other.flatten(0, 1)
    count, size = len(one), tiles_of(one).products
    found = one.new_empty(-(-count // size) * size, *shape[2:])
    for at in (slice(first, first + size) for first in range(0, count, size)):
        left, right = one[at], other[at]
        if len(left) < size:
            left, right = (F.pad(each, (0, 0, 0, 0, 0, size - len(each))) for each in (left, right))
        torch.bmm(left, right.mT if turned else right, out=found[at])
    return found[:count].view(*shape)


def _written_mask(*args: Any, **settings: Any) -> Any:
    """The mask of transformers for this attention, which is always written out."""
    return sdpa_mask(*args, **{**settings, "allow_is_causal_skip": False})


AttentionInterface.register(INVARIANT, attention)
AttentionMaskInterface.register(INVARIANT, _written_mask)
