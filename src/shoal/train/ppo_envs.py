"""Find, make and try the environment that `--env` names."""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from gymnasium.error import DependencyNotInstalled, Error

from shoal.core.errors import ConfigError, EnvError, MissingExtraError, unknown_name
from shoal.core.seeding import derive_seed, stream
from shoal.rollout.episodes import SeededEpisodes
from shoal.rollout.spaces import ActionRows, ObservationRows

EnvSource = str | Callable[..., gym.Env] | gym.envs.registration.EnvSpec


@dataclass(frozen=True)
class EnvFactory:
    """Makes env `index` of a run; it travels to worker processes.

    Args:
        source: a Gymnasium id, `module:Class`, an `EnvSpec`, or a function that returns an env.
        seed: of the run.
        kwargs: for the environment.
        stream: name of its stream of seeds.
    """

    source: EnvSource
    seed: int = 0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    stream: str = "env"

    def __call__(self, index: int = 0, **more: Any) -> SeededEpisodes:
        """A fresh environment that seeds its own episodes."""
        return SeededEpisodes(make_env(self.source, **{**self.kwargs, **more}), self.seed, index, self.stream)

    @property
    def name(self) -> str:
        """What to call the environment in files and messages."""
        if isinstance(self.source, str):
            return self.source
        if isinstance(self.source, gym.envs.registration.EnvSpec):
            return self.source.id
        return getattr(self.source, "__qualname__", type(self.source).__name__)


def make_env(source: EnvSource, **kwargs: Any) -> gym.Env:
    """One environment, without the wrappers that only check its caller.

    Raises:
        UnknownNameError: no environment of that name; says which was probably meant.
        ConfigError: `module:Class` that cannot be imported, or something that is no environment.
        MissingExtraError: the environment needs a package that is not installed.
    """
    found = _find(source) if isinstance(source, str) else source
    try:
        env = (
            gym.make(_lean(found), **kwargs)
            if isinstance(found, gym.envs.registration.EnvSpec)
            else found(**kwargs)
        )
    except DependencyNotInstalled as error:
        raise MissingExtraError(f"environment {_name(source)!r} needs a package: {error}") from error
    if not isinstance(env, gym.Env):
        raise ConfigError(f"{_name(source)} must make a gymnasium.Env, got {type(env).__name__}")
    return env


def _find(name: str) -> Callable[..., gym.Env] | gym.envs.registration.EnvSpec:
    module, _, attribute = name.partition(":")
    if attribute and not attribute.rpartition("-v")[2].isdigit():
        try:
            return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot import the environment {name!r}: {error}") from error
    try:
        return gym.spec(name)
    except (Error, ImportError) as error:
        if attribute:
            raise ConfigError(f"cannot find the environment {name!r}: {error}") from error
        raise unknown_name("environment", name, _near(name)) from error


def _near(name: str) -> list[str]:
    """Registered ids, without the families that would bury the answer."""
    head = name.partition("/")[0]
    return [env for env in gym.registry if "/" not in env or env.startswith(head + "/")]


def _lean(spec: gym.envs.registration.EnvSpec) -> gym.envs.registration.EnvSpec:
    """The spec without checks of the caller: our collectors reset before they step, and a test says so."""
    lean = copy.deepcopy(spec)
    lean.order_enforce = False
    lean.disable_env_checker = True
    return lean


def _name(source: Any) -> str:
    return str(getattr(source, "id", None) or getattr(source, "__qualname__", source))


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """What a try of an environment tells."""

    observation_space: gym.Space
    action_space: gym.Space
    masked: bool  # it gives info["action_mask"]
    step_seconds: float  # median time of a step
    max_steps: int | None  # its time limit, if it has one


def try_env(factory: EnvFactory, n_steps: int = 64) -> EnvFacts:
    """Make one environment, look at its spaces, take a few random steps and close it.

    Raises:
        ConfigError: a space that PPO cannot use.
        EnvError: a random action made it raise.
    """
    env = factory(0)
    try:
        ObservationRows(env.observation_space)
        actions = ActionRows(env.action_space)
        _, info = env.reset(seed=derive_seed(factory.seed, "try") & 0x7FFFFFFF)
        masked = "action_mask" in info and actions.is_discrete
        env.action_space.seed(int(stream(factory.seed, "try").integers(2**31)))
        times: list[float] = []
        for _ in range(0 if masked else n_steps):
            action = env.action_space.sample()
            started = time.perf_counter()
            try:
                _, _, terminated, truncated, _ = env.step(action)
            except Exception as error:
                raise EnvError(
                    f"{factory.name} failed when it was tried with action {action!r}: {error!r}"
                ) from error
            times.append(time.perf_counter() - started)
            if terminated or truncated:
                env.reset()
        limit = env.spec.max_episode_steps if env.spec is not None else None
        seconds = sorted(times)[len(times) // 2] if times else 0.0
        return EnvFacts(env.observation_space, env.action_space, masked, seconds, limit)
    finally:
        env.close()
