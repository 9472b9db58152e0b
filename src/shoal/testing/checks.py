"""Checks that users run on their own parts: vector envs, engines, executors, worlds for skills.

Each failure is an `AssertionError` that says which promise broke, where (seed, step, request) and how.
"""

from __future__ import annotations

import math
import operator
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from shoal.core.executors import map_ordered
from shoal.envs.check import expect
from shoal.samplers.asking import generate
from shoal.samplers.sampler import (
    FINISHES,
    Capabilities,
    Completion,
    Key,
    Request,
    Sampler,
    Sampling,
    capabilities_of,
)
from shoal.skills.spec import Features


# --- vector envs
def check_vector_env(
    make: Callable[[Any], Any],
    env_fn: Callable[[], Any],
    *,
    num_envs: int = 3,
    steps: int = 30,
    seed: int = 0,
) -> None:
    """Compare a vector env with a plain loop over its environments, action by action.

    Args:
        make: from a list of functions that make environments to a vector env of them
            (`lambda fns: make_vec(fns, backend="process")`).
        env_fn: makes one environment; it must depend on its seed alone.
        num_envs: how many to put together.
        steps: vector steps to compare.
        seed: environment i is reset with `seed + i`.
    """
    single = [env_fn() for _ in range(num_envs)]
    vec = make([env_fn] * num_envs)
    try:
        expect(vec.num_envs == num_envs, f"num_envs must be {num_envs}, got {vec.num_envs}")
        mode = vec.metadata.get("autoreset_mode")
        expect(
            isinstance(mode, AutoresetMode),
            f"metadata['autoreset_mode'] must be an AutoresetMode, got {mode}",
        )
        vec.action_space.seed(seed)
        for attempt in range(2):
            obs, _ = vec.reset(seed=seed)
            expected = [env.reset(seed=seed + i)[0] for i, env in enumerate(single)]
            for i, row in enumerate(iterate(vec.observation_space, obs)):
                expect(
                    _alike(row, expected[i]),
                    f"reset {attempt}: env {i} must be reset with seed {seed + i}: got {row!r}, a single env "
                    f"gives {expected[i]!r}",
                )
            _compare_steps(vec, single, mode, steps)
    finally:
        vec.close()
        for env in single:
            env.close()
    vec.close()  # a second time must do nothing


def _compare_steps(vec: Any, single: list[Any], mode: AutoresetMode, steps: int) -> None:
    over = [False] * len(single)
    for t in range(steps):
        batch = vec.action_space.sample()
        actions = list(iterate(vec.action_space, batch))
        obs, rewards, terminated, truncated, infos = vec.step(batch)
        for i, (env, row) in enumerate(zip(single, iterate(vec.observation_space, obs), strict=True)):
            where = f"step {t}, env {i}"
            if over[i] and mode is AutoresetMode.NEXT_STEP:
                want: tuple[Any, ...] = (env.reset()[0], 0.0, False, False)
            else:
                want = env.step(actions[i])[:4]
            over[i] = bool(want[2] or want[3])
            got = (float(rewards[i]), bool(terminated[i]), bool(truncated[i]))
            expect(
                got == (float(want[1]), bool(want[2]), bool(want[3])),
                f"{where}: reward, terminated, truncated are {got}, a single env gives {want[1:]}",
            )
            shown = want[0]
            if over[i] and mode is AutoresetMode.SAME_STEP:
                expect(
                    bool(infos.get("_final_obs", [False] * len(single))[i])
                    and _alike(infos["final_obs"][i], want[0]),
                    f"{where}: infos['final_obs'] must hold the last observation of the episode",
                )
                shown = env.reset()[0]
            expect(_alike(row, shown), f"{where}: observation is {row!r}, a single env gives {shown!r}")
        if mode is AutoresetMode.DISABLED and any(over):
            return


def _alike(a: Any, b: Any) -> bool:
    if isinstance(b, dict):
        return isinstance(a, dict) and a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in b)
    if isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_alike, a, b))
    kinds = np.asarray(a).dtype.kind + np.asarray(b).dtype.kind
    return bool(np.array_equal(a, b, equal_nan=kinds == "ff"))


# --- engines
def check_engine(
    make: Callable[[], Sampler], prompts: Sequence[str] = ("Say something.", "And now?", "x")
) -> None:
    """Ask a sampler for completions and compare what it does with what `Sampler` and its level promise.

    Args:
        make: makes the engine; called once.
        prompts: user messages to complete.
    """
    expect(prompts, "prompts must hold at least one message")
    engine = make()
    expect(
        isinstance(engine, Sampler),
        f"{type(engine).__name__} must have tokenizer, level, weights_version",
    )
    known = capabilities_of(engine)
    tokenizer = engine.tokenizer
    expect(tokenizer.decode(tokenizer.encode("a b 12")) == "a b 12", "decode must undo encode")
    starts = [tokenizer.start([{"role": "user", "content": prompt}]) for prompt in prompts]
    for prompt, start in zip(prompts, starts, strict=True):
        expect(len(start) > 0, f"tokenizer.start must give a prompt for {prompt!r}")
        more = tokenizer.extend(start, {"role": "user", "content": prompt})
        expect(len(more) > 0, "extend must add a turn")
    asked = [
        Request(start, Key(7, (1, group, member, 0)), Sampling(2 + member, (1.0, 1.0, 0.0)[member]))
        for group, start in enumerate(starts)
        for member in range(3)
    ]
    ask: Any = getattr(engine, "generate", None) or partial(generate, engine)
    whole = ask(asked)
    expect(list(ask([])) == [], "generate([]) must give an empty list")
    expect(len(whole) == len(asked), f"{len(asked)} requests must give as many completions, got {len(whole)}")
    for number, (request, completion) in enumerate(zip(asked, whole, strict=True)):
        _check_completion(engine, known, f"request {number}", request, completion)
    if engine.level == "L0":
        return
    order = list(range(len(asked)))
    random.Random(0).shuffle(order)
    shuffled = dict(zip(order, ask([asked[i] for i in order]), strict=True))
    for number, request in enumerate(asked):
        for how, other in (("alone", ask([request])[0]), ("in another order", shuffled[number])):
            where, first = f"request {number}: asked {how}", whole[number]
            expect(other.token_ids == first.token_ids, f"{where}, it has other tokens ({engine.level})")
            alike = engine.level != "L2" or other.logprobs == first.logprobs
            expect(alike, f"{where}, it has other log-probabilities (L2)")


def _check_completion(
    engine: Sampler, known: Capabilities, where: str, request: Request, completion: Completion
) -> None:
    ids, limit = completion.token_ids, request.sampling.max_tokens
    expect(all(type(i) is int for i in ids), f"{where}: token_ids must be ints, got {ids!r}")
    expect(len(ids) <= limit or not known.token_ids, f"{where}: max_tokens is {limit}, got {len(ids)} tokens")
    expect(completion.finish in FINISHES, f"{where}: finish must be one of {', '.join(FINISHES)}")
    full = getattr(engine, "context", None)
    if completion.finish == "length" and known.token_ids:
        room = limit if full is None else min(limit, full - len(request.prompt_ids))
        expect(len(ids) == room, f"{where}: finish is 'length' after {len(ids)} of {room} tokens")
    expect(
        completion.weights_version == engine.weights_version,
        f"{where}: weights_version must be {engine.weights_version}, got {completion.weights_version}",
    )
    if known.logprobs:
        expect(len(completion.logprobs) == len(ids), f"{where}: each token needs a log-probability")
        expect(
            all(math.isfinite(value) and value <= 1e-6 for value in completion.logprobs),
            f"{where}: log-probabilities must be finite and at most 0, got {completion.logprobs}",
        )


# --- executors
def check_executor(make: Callable[[], Executor]) -> None:
    """Give an executor work and compare what comes back with a plain loop.

    Args:
        make: makes the executor; called once. Its tasks are functions of shoal and plain data, so that
            executors which send tasks elsewhere can be checked too.
    """
    executor = make()
    name = type(executor).__name__
    expect(isinstance(executor, Executor), f"{name} must be a concurrent.futures.Executor")
    try:
        future = executor.submit(_describe, 1, 2, last=3)
        expect(isinstance(future, Future), f"{name}.submit must return a concurrent.futures.Future")
        got = future.result()
        expect(got == ((1, 2), {"last": 3}), f"{name}: a task must get its arguments as given, got {got}")
        none = executor.submit(time.sleep, 0).result()
        expect(none is None, f"{name}: a task that returns None must give None, got {none!r}")
        items = list(range(12))
        # The first tasks take longest: an executor that answers in order of arrival shows it here.
        found = list(map_ordered(executor, _slow_square, items, in_flight=6))
        expect(
            found == [item * item for item in items], f"{name}: results must come in input order, got {found}"
        )
        block = bytes(range(256)) * 4096
        turned = executor.submit(operator.getitem, block, slice(None, None, -1)).result()
        expect(turned == block[::-1], f"{name}: a megabyte came back changed")
        _check_failure(executor, name)
    finally:
        executor.shutdown()
    executor.shutdown()  # a second time must do nothing


def _check_failure(executor: Executor, name: str) -> None:
    empty: dict[str, int] = {}
    error = executor.submit(operator.getitem, empty, "seven").exception()
    expect(
        type(error) is KeyError and error.args == ("seven",),
        f"{name}: a task that raises KeyError('seven') must give that error, got {error!r}",
    )
    later = executor.submit(_slow_square, 20)
    failed = later.exception()
    expect(failed is None, f"{name}: it must go on after a task that failed, got {failed!r}")
    expect(later.result() == 400, f"{name}: the task after one that failed gave {later.result()!r}")


def _describe(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _slow_square(item: int) -> int:
    time.sleep(max(0.0, 0.03 - 0.005 * item))
    return item * item


# --- worlds for skills
def check_world(make: Callable[[int], Any], *, lanes: int = 4, steps: int = 20, seed: int = 0) -> None:
    """Step a world at random and compare what it does with what `World` promises.

    Args:
        make: makes a world of so many lanes; the class will do.
        lanes: to step together.
        steps: at random.
        seed: of the worlds and the actions.
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
    expect(_same_states(bank, again), "`fresh` must be a function of its random numbers")
    every, rows = np.ones(lanes, np.bool_), np.arange(lanes)
    world.load(bank, rows, every)
    _shapes(world, lanes)
    start = world.observe().copy(), world.values().copy()
    actions = rng(1).integers(0, world.n_actions, (steps, lanes))
    seen = _play_steps(world, actions, rng(2))
    middle = world.save()
    expect(len(middle) == lanes, "`save` must give the state of every lane")
    told = world.observe().copy(), world.values().copy()
    world.load(bank, rows, every)
    expect(np.array_equal(world.observe(), start[0]), "a state that is put back must look as it did")
    expect(np.array_equal(world.values(), start[1]), "a state that is put back must have its features")
    expect(
        _play_steps(world, actions, rng(2)) == seen,
        "a step must be a function of state, action and random numbers",
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


def _play_steps(world: Any, actions: np.ndarray, rng: np.random.Generator) -> list[bytes]:
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


def _same_states(one: Any, other: Any) -> bool:
    return one.arrays.keys() == other.arrays.keys() and all(
        np.array_equal(array, other.arrays[key]) for key, array in one.arrays.items()
    )
