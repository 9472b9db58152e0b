"""Checks that users run on their own parts; each failure says which promise broke and how."""

from __future__ import annotations

import contextlib
import math
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from shoal.core.errors import EnvError
from shoal.envs.text import TextEnv
from shoal.rollout.capabilities import Capabilities, capabilities_of
from shoal.rollout.engine import Completion, Engine, Key, Request, Sampling

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
            _expect(same, f"seed {seed}: the global state of random or numpy.random was changed")
            alone = first == _play(fresh(), seed)
            _expect(alone, f"seed {seed}: two envs gave different episodes from one seed")
            used = fresh()
            used.reset(seed=seed + 1)
            again = _play(used, seed)
            _expect(first == again, f"seed {seed}: the episode before changed the episode after reset()")
            _check_invalid_actions(fresh(), seed)


def _check_declarations(env: TextEnv[Any]) -> None:
    name = type(env).__name__
    _expect(isinstance(env, TextEnv), f"{name} must be a TextEnv")
    _expect(
        isinstance(getattr(env, "instructions", None), str) and env.instructions, f"{name} needs instructions"
    )
    _expect(getattr(env.config, "max_steps", 0) >= 1, f"{name}.config must have max_steps of at least 1")
    for word in env.projection.words():
        projected = env.projection(f"<{env.projection.tags[0]}>{word}</{env.projection.tags[0]}>")
        fits = projected.valid and all(env.action_space.contains(action) for action in projected.actions)
        _expect(fits, f"{name}: the word {word!r} is projected to {projected}, not into {env.action_space}")
    nothing = env.projection("")
    _expect(
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
    _expect(info.get("seed") == seed, f"seed {seed}: info['seed'] must be it, got {info.get('seed')!r}")
    shown: list[Any] = [(observation, repr(info))]
    over, step = False, 0
    while not over and step < _MAX_STEPS:
        where = f"seed {seed}, step {step}"
        _expect(info.keys() >= INFO_KEYS, f"{where}: info lacks {sorted(INFO_KEYS - info.keys())}")
        _expect(isinstance(env.observe(), str), f"{where}: observe() must return text")
        _expect(
            env.observation_space.contains(observation),
            f"{where}: {observation!r} is not in {env.observation_space}",
        )
        _expect(env.observe() == env.observe(), f"{where}: observe() must not change the env")
        words = [word for word in info["available_actions"] if "<" not in word]
        action = _action(env, choose.choice(words)) if words else env.action_space.sample()
        observation, reward, terminated, truncated, info = env.step(action)
        step += 1
        kinds = type(reward), type(terminated), type(truncated)
        _expect(kinds == (float, bool, bool), f"{where}: step() must return float, bool, bool, got {kinds}")
        _expect(math.isfinite(reward), f"{where}: the reward must be finite, got {reward}")
        _expect(not (terminated and truncated), f"{where}: an episode ends terminated or truncated, not both")
        _expect(info["step"] == step, f"{where}: info['step'] must be {step}, got {info['step']}")
        over = terminated or truncated
        shown.append((observation, reward, terminated, truncated, repr(info)))
    if over:
        _expect_over(env, f"seed {seed}, step {step}")
    return shown


def _action(env: TextEnv[Any], word: str) -> Any:
    projected = env.projection(f"<{env.projection.tags[0]}>{word}</{env.projection.tags[0]}>")
    _expect(projected.valid, f"available_actions offers {word!r}, which the projection refuses")
    return projected.actions[0]


def _check_invalid_actions(env: TextEnv[Any], seed: int) -> None:
    env.reset(seed=seed)
    over, steps = False, 0
    while not over:
        _, _, terminated, truncated, info = env.step(env.invalid_action)
        steps += 1
        over = terminated or truncated
        _expect(
            not info["action_is_valid"], f"seed {seed}: invalid_action must show as action_is_valid=False"
        )
        _expect(info["step"] == steps, f"seed {seed}: an invalid action must count as a step")
        _expect(steps <= env.config.max_steps, f"seed {seed}: invalid actions went on beyond max_steps")
    _expect_over(env, f"seed {seed}, after {steps} invalid actions")


def _expect_over(env: TextEnv[Any], where: str) -> None:
    try:
        env.step(env.invalid_action)
    except EnvError:
        return
    raise AssertionError(f"{where}: step() after the end must raise EnvError")


def _expect(holds: Any, promise: str) -> None:
    if not holds:
        raise AssertionError(promise)


def check_engine(
    make: Callable[[], Engine], prompts: Sequence[str] = ("Say something.", "And now?", "x")
) -> None:
    """Ask an engine for completions and compare what it does with what `Engine` and its level promise.

    Args:
        make: makes the engine; called once.
        prompts: user messages to complete.

    Raises:
        AssertionError: which promise broke, and for which request.
    """
    engine = make()
    _expect(
        isinstance(engine, Engine),
        f"{type(engine).__name__} must have tokenizer, level, weights_version, generate",
    )
    known = capabilities_of(engine)
    _expect(known.level == engine.level, f"capabilities state {known.level}, the engine {engine.level}")
    tokenizer = engine.tokenizer
    starts = [tokenizer.start([{"role": "user", "content": prompt}]) for prompt in prompts]
    for prompt, start in zip(prompts, starts, strict=True):
        _expect(len(start) > 0, f"tokenizer.start must give a prompt for {prompt!r}")
        _expect(tokenizer.decode(tokenizer.encode("a b 12")) == "a b 12", "decode must undo encode")
        _expect(
            len(tokenizer.extend(start, {"role": "user", "content": prompt})) > 0, "extend must add a turn"
        )
    asked = [
        Request(start, Key(7, 1, group, member, 0), Sampling(2 + member, (1.0, 1.0, 0.0)[member]))
        for group, start in enumerate(starts)
        for member in range(3)
    ]
    whole = engine.generate(asked)
    _expect(list(engine.generate([])) == [], "generate([]) must give an empty list")
    _expect(
        len(whole) == len(asked), f"{len(asked)} requests must give as many completions, got {len(whole)}"
    )
    for number, (request, completion) in enumerate(zip(asked, whole, strict=True)):
        _check_completion(engine, known, f"request {number}", request, completion)
    if engine.level == "L0":
        return
    order = list(range(len(asked)))
    random.Random(0).shuffle(order)
    shuffled = dict(zip(order, engine.generate([asked[i] for i in order]), strict=True))
    for number, request in enumerate(asked):
        for how, other in (("alone", engine.generate([request])[0]), ("in another order", shuffled[number])):
            where = f"request {number}: asked {how}"
            _expect(
                other.token_ids == whole[number].token_ids, f"{where}, it has other tokens ({engine.level})"
            )
            if engine.level == "L2":
                _expect(
                    other.logprobs == whole[number].logprobs, f"{where}, it has other log-probabilities (L2)"
                )


def _check_completion(
    engine: Engine, known: Capabilities, where: str, request: Request, completion: Completion
) -> None:
    ids, limit = completion.token_ids, request.sampling.max_tokens
    _expect(all(type(i) is int for i in ids), f"{where}: token_ids must be ints, got {ids!r}")
    _expect(
        len(ids) <= limit or not known.token_ids, f"{where}: max_tokens is {limit}, got {len(ids)} tokens"
    )
    _expect(completion.finish in ("stop", "length"), f"{where}: finish must be stop or length")
    if completion.finish == "length" and known.token_ids:
        _expect(len(ids) == limit, f"{where}: finish is 'length' after {len(ids)} of {limit} tokens")
    _expect(
        completion.weights_version == engine.weights_version,
        f"{where}: weights_version must be {engine.weights_version}, got {completion.weights_version}",
    )
    if known.logprobs:
        _expect(len(completion.logprobs) == len(ids), f"{where}: each token needs a log-probability")
        _expect(
            all(math.isfinite(value) and value <= 1e-6 for value in completion.logprobs),
            f"{where}: log-probabilities must be finite and at most 0, got {completion.logprobs}",
        )


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

    Raises:
        AssertionError: which promise broke, at which step and in which environment.
    """
    single = [env_fn() for _ in range(num_envs)]
    vec = make([env_fn] * num_envs)
    try:
        _expect(vec.num_envs == num_envs, f"num_envs must be {num_envs}, got {vec.num_envs}")
        mode = vec.metadata.get("autoreset_mode")
        _expect(
            isinstance(mode, AutoresetMode),
            f"metadata['autoreset_mode'] must be an AutoresetMode, got {mode}",
        )
        vec.action_space.seed(seed)
        for attempt in range(2):
            obs, _ = vec.reset(seed=seed)
            expected = [env.reset(seed=seed + i)[0] for i, env in enumerate(single)]
            for i, row in enumerate(iterate(vec.observation_space, obs)):
                _expect(
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
            _expect(
                got == (float(want[1]), bool(want[2]), bool(want[3])),
                f"{where}: reward, terminated, truncated are {got}, a single env gives {want[1:]}",
            )
            shown = want[0]
            if over[i] and mode is AutoresetMode.SAME_STEP:
                _expect(
                    bool(infos.get("_final_obs", [False] * len(single))[i])
                    and _alike(infos["final_obs"][i], want[0]),
                    f"{where}: infos['final_obs'] must hold the last observation of the episode",
                )
                shown = env.reset()[0]
            _expect(_alike(row, shown), f"{where}: observation is {row!r}, a single env gives {shown!r}")
        if mode is AutoresetMode.DISABLED and any(over):
            return


def _alike(a: Any, b: Any) -> bool:
    if isinstance(b, dict):
        return isinstance(a, dict) and a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in b)
    if isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(np.array_equal(a, b))
