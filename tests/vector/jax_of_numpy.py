"""What shoal and its tests use of JAX, made of NumPy: nothing is compiled, and a batch is a loop."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def _map(change: Callable[..., Any], first: Any, *rest: Any) -> Any:
    if isinstance(first, dict):
        return {key: _map(change, first[key], *(other[key] for other in rest)) for key in first}
    if isinstance(first, tuple):
        parts = [_map(change, *items) for items in zip(first, *rest, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return change(first, *rest)


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def vmap(function: Callable[..., Any], in_axes: Sequence[int | None] | int = 0) -> Callable[..., Any]:
    def batched(*args: Any) -> Any:
        axes = [in_axes] * len(args) if isinstance(in_axes, int) else in_axes
        n = next(
            len(arg)
            for arg, axis in zip(args, axes, strict=True)
            if isinstance(arg, np.ndarray) and axis == 0
        )
        each = [
            function(
                *(
                    arg if axis is None else _map(lambda leaf, i=i: leaf[i], arg)
                    for arg, axis in zip(args, axes, strict=True)
                )
            )
            for i in range(n)
        ]
        return _map(lambda *leaves: np.stack(leaves), each[0], *each[1:])

    return batched


def _drawn(key: Any, *words: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([*map(int, key), *words])


numpy = np
tree = types.SimpleNamespace(map=_map)
random = types.SimpleNamespace(
    PRNGKey=lambda seed: np.array([0, seed], np.uint32),
    fold_in=lambda key, data: _drawn(key, 1, int(data)).generate_state(2),
    split=lambda key: _drawn(key, 2).generate_state(4).reshape(2, 2),
    normal=lambda key: np.float32(np.random.default_rng(_drawn(key, 3)).normal()),
)
