"""What callers pass to a vector env, checked: seeds, masks, indices, time limits."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.seeding import derive_seed

CONVERTERS = "pettingzoo.utils.conversions"  # where its `parallel_env` functions are made
Seeds = int | Sequence[int | None] | None


def check_options(options: Any) -> dict[str, Any] | None:
    """The options of a reset; a `TypeError` for what is no dict, in which no `reset_mask` can be looked for."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict or None, got {options!r:.80}")
    return options  # type: ignore[return-value]


def check_whole(value: Any, what: str, least: int) -> int:
    """An int of a whole number of any kind.

    Raises:
        TypeError: for anything else, truth values included: as indices they would name other environments.
        ValueError: if it is less than `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{what} must be a whole number, got {value!r:.80}")
    if number < least:
        raise ValueError(f"{what} must be at least {least}, got {number}")
    return number


def check_limit(value: Any, what: str) -> Any:
    """A number (infinity is one), or None for no limit, as it came.

    Raises:
        TypeError: for anything else.
        ValueError: for NaN, which would never be reached.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"{what} must be a number or None, got {value!r:.80}")
    if value is not None and value != value:
        raise ValueError(f"{what} must be a number or None, got {value}")
    return value


def one_each(given: Any, n: int, word: str = "actions") -> list[Any]:
    """A list of n actions, or whatever the `word` says.

    Raises:
        ValueError: for another number of them.
        TypeError: for a number, text, dict or set: as many letters, or keys in any order, as environments are no batch.
    """
    try:
        each = None if isinstance(given, str | bytes | dict | set | frozenset) else list(given)
    except TypeError:  # a number
        each = None
    if each is None:
        raise TypeError(
            f"expected one {word[:-1]} for each of {n} environments, got the single {given!r:.80}"
        )
    if len(each) != n:
        raise ValueError(f"expected {n} {word}, one for each environment, got {len(each)}")
    return each


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


def plain_seed(seed: Any) -> int | None:
    """A seed as environments take it, whatever kind of whole number it is."""
    try:
        return None if seed is None else operator.index(seed)
    except TypeError:
        raise TypeError(f"a seed must be a whole number or None, got {seed!r:.80}") from None


def seeds_per_env(seed: Seeds, n_envs: int) -> list[int | None]:
    """One seed per environment: of an int `seed + i`, of a sequence its own."""
    if not isinstance(seed, Iterable) or isinstance(seed, bytes | dict | set | frozenset):
        first = plain_seed(seed)
        return [None if first is None else first + i for i in range(n_envs)]
    seeds = [plain_seed(item) for item in seed]
    if len(seeds) != n_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={n_envs} but got "
            f"length={len(seeds)}."
        )
    return seeds


def check_mask(mask: Any, n_envs: int) -> Any:
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


def check_single_agent(env: Any) -> None:
    """A `TypeError` for one of PettingZoo's environments, or its class, module or function `parallel_env`."""
    made = getattr(env, "__name__", "") == "parallel_env" or getattr(env, "__module__", "") == CONVERTERS
    if made or hasattr(env, "possible_agents") or hasattr(env, "parallel_env"):
        raise TypeError(
            f"make_vec takes environments of one agent, got {env!r}; use "
            "shoal.vector.PettingZooVectorEnv(function_that_makes_it, num_copies)"
        )
