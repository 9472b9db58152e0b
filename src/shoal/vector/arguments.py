"""What a caller may pass to a pool: seeds, indices, masks; refused with a reason before anything is begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.core.seeding import derive_seed

Seeds = int | Sequence[int | None] | None


def groups(seed: int, n_groups: int, group_size: int, *, iteration: int = 0) -> list[int]:
    """Seeds for `reset` in which the environments of a group start alike and groups differ.

    Group g holds environments `g * group_size … (g + 1) * group_size - 1`.

    >>> a, b, c, d = groups(7, n_groups=2, group_size=2)
    >>> a == b, c == d, a == c
    (True, True, False)
    """
    if n_groups < 1 or group_size < 1:
        raise ValueError(f"n_groups and group_size must be at least 1, got {n_groups} and {group_size}")
    return [derive_seed(seed, "env", iteration, g) for g in range(n_groups) for _ in range(group_size)]


def spread(seed: Seeds, n_envs: int) -> list[int | None]:
    """One seed per environment: of an int `seed + i`, of a sequence its own."""
    if seed is None:
        return [None] * n_envs
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(n_envs)]
    seeds = [None if item is None else int(item) for item in seed]
    if len(seeds) != n_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={n_envs} but got "
            f"length={len(seeds)}."
        )
    return seeds


def checked_indices(
    indices: Sequence[int], active: np.ndarray[Any, Any], partners: Sequence[Any], word: str
) -> list[int]:
    """Different environments that take part, one for each of `partners` (the `word` that goes with them)."""
    chosen, n_envs = [int(i) for i in indices], len(active)
    if len(chosen) != len(partners):
        raise ValueError(f"expected as many {word} as indices, got {len(partners)} and {len(chosen)}")
    if len(set(chosen)) != len(chosen) or any(not 0 <= i < n_envs for i in chosen):
        raise ValueError(f"indices must be different numbers in [0, {n_envs}), got {chosen}")
    masked = [i for i in chosen if not active[i]]
    if masked:
        raise ValueError(f"environments {masked} were masked out after a failure")
    return chosen


def checked_mask(mask: Any, n_envs: int) -> Any:
    """`options["reset_mask"]` as Gymnasium wants it."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (n_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({n_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(  # (its users look for Gymnasium's words)
            "`options['reset_mask']` must contain a boolean array with at least one True value, "
            f"got reset_mask={mask}"
        )
    return mask
