"""Which episodes an iteration has, and the seeds of each: all of it follows from numbers.

Group g of an iteration starts its members from one env seed; members differ in their sampling noise alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from shoal.core.seeding import derive_seed
from shoal.rollout.episode import EpisodeId


@dataclass(frozen=True, slots=True)
class Assignment:
    """One episode to play; `index` is its number in the rollout."""

    index: int
    place: EpisodeId
    tag: str


def assignments_of(
    seed: int,
    iteration: int,
    tags: Sequence[str],
    group_size: int,
    first_group: int = 0,
    n_groups: int | None = None,
) -> list[Assignment]:
    """The episodes of these groups, group by group, member by member; `slot_of` says whose tag each has."""
    count = len(tags) if n_groups is None else n_groups
    if not 1 <= count <= len(tags):
        raise ValueError(f"n_groups must be in [1, {len(tags)}], the number of tags, got {count}")
    if first_group < 0:
        raise ValueError(f"first_group must be at least 0, got {first_group}")
    groups = range(first_group, first_group + count)
    return [
        Assignment(index, place_of(seed, iteration, group, member), tags[slot_of(group, tags)])
        for index, (group, member) in enumerate(product(groups, range(group_size)))
    ]


def slot_of(group: int, tags: Sequence[str]) -> int:
    """Whose tag a group has: its own number in the first batch; further groups take the kinds in turn, mixed evenly.

    So a refill of a few groups has the proportions of the whole, as nearly as its size allows.
    """
    n = len(tags)
    return group if group < n else _mixed(tuple(tags))[group % n]


@lru_cache(maxsize=64)
def _mixed(tags: tuple[str, ...]) -> tuple[int, ...]:
    """All slots, those of each kind spread evenly over the order."""
    count, seen = Counter(tags), Counter[str]()
    keys = []
    for slot, tag in enumerate(tags):
        keys.append(((seen[tag] + 0.5) / count[tag], slot))
        seen[tag] += 1
    return tuple(slot for _, slot in sorted(keys))


def place_of(seed: int, iteration: int, group: int, member: int) -> EpisodeId:
    """The identity of an episode in the run; the members of a group share their env seed."""
    env_seed = derive_seed(seed, "env", iteration, group)  # which refuses what is no whole number
    for number in (seed, iteration):
        if not -(2**63) <= number < 2**64:
            raise ValueError(f"a seed or iteration must be in [-2**63, 2**64) to reach workers, got {number}")
    return EpisodeId(int(seed), int(iteration), group, member, env_seed)  # NumPy's cannot be recorded
