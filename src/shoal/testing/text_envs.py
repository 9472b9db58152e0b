"""What every text env promises: its declarations, its seed, its infos, its end."""

from __future__ import annotations

import contextlib
import math
import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from shoal.core.errors import EnvError
from shoal.envs.text import TextEnv
from shoal.testing.promises import expect

INFO_KEYS = frozenset(
    ("success", "won", "action_is_valid", "action_is_effective", "step", "seed", "available_actions")
)
_MAX_STEPS = 300


def check_text_env(make: Callable[[], TextEnv[Any]], *, seeds: Iterable[int] = range(5)) -> None:
    """Play a text env and compare what it does with what `TextEnv` promises.

    Args:
        make: makes a fresh env each time it is called; a class without needed arguments will do.
        seeds: episodes to play.

    Raises:
        AssertionError: which promise broke, with the seed and step where it did.
    """
    with contextlib.ExitStack() as opened:

        def fresh() -> TextEnv[Any]:
            env = make()
            opened.callback(env.close)
            return env

        _check_declarations(fresh())
        for seed in seeds:
            before = random.getstate(), pickle.dumps(np.random.get_state())
            first = _play(fresh(), seed)
            same = before == (random.getstate(), pickle.dumps(np.random.get_state()))
            expect(same, f"seed {seed}: the global state of random or numpy.random was changed")
            alone = first == _play(fresh(), seed)
            expect(alone, f"seed {seed}: two envs gave different episodes from one seed")
            used = fresh()
            used.reset(seed=seed + 1)
            again = _play(used, seed)
            expect(first == again, f"seed {seed}: the episode before changed the episode after reset()")
            _check_invalid_actions(fresh(), seed)


def _check_declarations(env: TextEnv[Any]) -> None:
    name = type(env).__name__
    expect(isinstance(env, TextEnv), f"{name} must be a TextEnv")
    expect(
        isinstance(getattr(env, "instructions", None), str) and env.instructions, f"{name} needs instructions"
    )
    expect(getattr(env.config, "max_steps", 0) >= 1, f"{name}.config must have max_steps of at least 1")
    for word in env.projection.words():
        projected = env.projection(f"<{env.projection.tags[0]}>{word}</{env.projection.tags[0]}>")
        fits = projected.valid and all(env.action_space.contains(action) for action in projected.actions)
        expect(fits, f"{name}: the word {word!r} is projected to {projected}, not into {env.action_space}")
    nothing = env.projection("")
    expect(
        not nothing.valid and nothing.actions == (env.invalid_action,),
        f"{name}: text without an action must give invalid_action {env.invalid_action!r}, got {nothing}",
    )
    try:
        env.step(env.invalid_action)
    except EnvError:
        return
    raise AssertionError(f"{name}: step() before reset() must raise EnvError")


def _play(env: TextEnv[Any], seed: int) -> list[Any]:
    """Everything that one episode of random words shows."""
    choose = random.Random(seed)
    env.action_space.seed(seed)  # for envs of free text, whose words are patterns
    observation, info = env.reset(seed=seed)
    expect(info.get("seed") == seed, f"seed {seed}: info['seed'] must be it, got {info.get('seed')!r}")
    shown: list[Any] = [(observation, repr(info))]
    over, step = False, 0
    while not over and step < _MAX_STEPS:
        where = f"seed {seed}, step {step}"
        expect(info.keys() >= INFO_KEYS, f"{where}: info lacks {sorted(INFO_KEYS - info.keys())}")
        expect(isinstance(env.observe(), str), f"{where}: observe() must return text")
        expect(
            env.observation_space.contains(observation),
            f"{where}: {observation!r} is not in {env.observation_space}",
        )
        expect(env.observe() == env.observe(), f"{where}: observe() must not change the env")
        words = [word for word in info["available_actions"] if "<" not in word]
        action = _action(env, choose.choice(words)) if words else env.action_space.sample()
        observation, reward, terminated, truncated, info = env.step(action)
        step += 1
        kinds = type(reward), type(terminated), type(truncated)
        expect(kinds == (float, bool, bool), f"{where}: step() must return float, bool, bool, got {kinds}")
        expect(math.isfinite(reward), f"{where}: the reward must be finite, got {reward}")
        expect(not (terminated and truncated), f"{where}: an episode ends terminated or truncated, not both")
        expect(info["step"] == step, f"{where}: info['step'] must be {step}, got {info['step']}")
        over = terminated or truncated
        shown.append((observation, reward, terminated, truncated, repr(info)))
    if over:
        _expect_over(env, f"seed {seed}, step {step}")
    return shown


def _action(env: TextEnv[Any], word: str) -> Any:
    projected = env.projection(f"<{env.projection.tags[0]}>{word}</{env.projection.tags[0]}>")
    expect(projected.valid, f"available_actions offers {word!r}, which the projection refuses")
    return projected.actions[0]


def _check_invalid_actions(env: TextEnv[Any], seed: int) -> None:
    env.reset(seed=seed)
    over, steps = False, 0
    while not over:
        _, _, terminated, truncated, info = env.step(env.invalid_action)
        steps += 1
        over = terminated or truncated
        expect(not info["action_is_valid"], f"seed {seed}: invalid_action must show as action_is_valid=False")
        expect(info["step"] == steps, f"seed {seed}: an invalid action must count as a step")
        expect(steps <= env.config.max_steps, f"seed {seed}: invalid actions went on beyond max_steps")
    _expect_over(env, f"seed {seed}, after {steps} invalid actions")


def _expect_over(env: TextEnv[Any], where: str) -> None:
    try:
        env.step(env.invalid_action)
    except EnvError:
        return
    raise AssertionError(f"{where}: step() after the end must raise EnvError")
