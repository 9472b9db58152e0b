"""What every world for skills promises: shapes, states that can be put back, chance that comes from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.skills.learning.spec import Features
from shoal.testing.promises import expect


def check_world(make: Callable[[int], Any], *, lanes: int = 4, steps: int = 20, seed: int = 0) -> None:
    """Step a world at random and compare what it does with what `World` promises.

    Args:
        make: makes a world of so many lanes; the class will do.
        lanes: to step together.
        steps: at random.
        seed: of the worlds and the actions.

    Raises:
        AssertionError: which promise broke.
    """
    world = make(lanes)
    features = world.features
    expect(isinstance(features, Features), "`features` must be a Features")
    expect(bool(features.names), "`features` must name something")
    expect(world.lanes == lanes, f"`lanes` must be what was asked for: {lanes}, got {world.lanes}")
    expect(0 <= world.wait < world.n_actions, "`wait` must be an action")
    expect(set(world.moves) <= set(range(world.n_actions)) and world.moves, "`moves` must be actions")
    expect(set(world.feature_columns) <= set(features.names), "`feature_columns` must speak of features")
    for columns, acts in getattr(world, "mirrors", ()):
        expect(
            sorted(columns) == list(range(world.obs_size)) and sorted(acts) == list(range(world.n_actions)),
            "`mirrors` must be pairs of which column of an observation, and which action, stands for each",
        )

    def rng(*more: int) -> np.random.Generator:
        return np.random.default_rng([seed, *more])

    bank = world.fresh(2 * lanes, rng())
    expect(len(bank) == 2 * lanes, f"`fresh(n)` must give n states, gave {len(bank)} for {2 * lanes}")
    again = make(lanes).fresh(2 * lanes, rng())
    expect(_same(bank, again), "`fresh` must be a function of its random numbers")
    every, rows = np.ones(lanes, np.bool_), np.arange(lanes)
    world.load(bank, rows, every)
    _shapes(world, lanes)
    start = world.observe().copy(), world.values().copy()
    actions = rng(1).integers(0, world.n_actions, (steps, lanes))
    seen = _play(world, actions, rng(2))
    middle = world.save()
    expect(len(middle) == lanes, "`save` must give the state of every lane")
    told = world.observe().copy(), world.values().copy()
    world.load(bank, rows, every)
    expect(np.array_equal(world.observe(), start[0]), "a state that is put back must look as it did")
    expect(np.array_equal(world.values(), start[1]), "a state that is put back must have its features")
    expect(
        _play(world, actions, rng(2)) == seen, "a step must be a function of state, action and random numbers"
    )
    other = make(lanes)
    other.load(middle, rows, every)
    expect(np.array_equal(other.observe(), told[0]), "a saved state must look the same in another world")
    expect(np.array_equal(other.values(), told[1]), "a saved state must have its features in another world")
    half = np.arange(lanes) % 2 == 0
    other.load(bank, rows[::-1].copy(), half)
    expect(
        np.array_equal(other.observe()[~half], told[0][~half]),
        "`load` must leave lanes outside its mask alone",
    )
    kept = other.observe()
    kept += 1
    expect(
        not np.array_equal(kept, other.observe()), "`observe` must not give out what changing it would change"
    )


def _shapes(world: Any, lanes: int) -> None:
    observations, values = world.observe(), world.values()
    wanted = (lanes, world.obs_size), (lanes, len(world.features.names))
    expect(
        (observations.shape, values.shape) == wanted,
        f"`observe` and `values` must have shapes {wanted[0]} and {wanted[1]}, got {observations.shape} and "
        f"{values.shape}",
    )
    expect(observations.dtype == np.float32 == values.dtype, "`observe` and `values` must be float32")
    expect(np.isfinite(observations).all() and np.isfinite(values).all(), "what is seen must be finite")


def _play(world: Any, actions: np.ndarray, rng: np.random.Generator) -> list[bytes]:
    seen = []
    for row in actions:
        died = world.step(row, rng)
        expect(
            died.shape == row.shape and died.dtype == np.bool_,
            "`step` must say of every lane whether it died",
        )
        _shapes(world, len(row))
        held = np.array([world.features.holds(name) for name in world.features.names])
        expect((world.values() <= held).all(), "a feature must not be more than can be held")
        seen += [died.tobytes(), world.observe().tobytes(), world.values().tobytes()]
    return seen


def _same(one: Any, other: Any) -> bool:
    return one.arrays.keys() == other.arrays.keys() and all(
        np.array_equal(array, other.arrays[key]) for key, array in one.arrays.items()
    )
