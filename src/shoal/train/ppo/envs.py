"""Find, make and try the environment that `--env` names."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from shoal.core.errors import ConfigError, EnvError, ShoalError
from shoal.core.seeding import derive_seed, stream
from shoal.envs.catalogue import Source, Wrapper, find, find_wrapper, name_of, resolve
from shoal.rollout.arrays.episodes import SeededEpisodes
from shoal.rollout.arrays.spaces import ActionRows, ObservationRows

EnvSource = Source


@dataclass(frozen=True)
class EnvFactory:
    """Makes env `index` of a run; it travels to worker processes, which need not know the env's name.

    Args:
        source: what `shoal.envs.resolve` takes.
        seed: of the run.
        kwargs: for the environment.
        stream: name of its stream of seeds.
        wrappers: put around the environment, the first innermost.

    Raises:
        UnknownNameError: no environment of that name; says which was probably meant.
        ConfigError: it cannot be imported or does not take `kwargs`.
    """

    source: EnvSource
    seed: int = 0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    stream: str = "env"
    wrappers: Sequence[Wrapper] = ()
    name: str = field(init=False)
    """What to call the environment in files and messages."""
    _found: Callable[..., gym.Env] | EnvSpec = field(init=False, repr=False)
    _wraps: Sequence[Wrapper] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        resolve(self.source, env_kwargs=self.kwargs, wrappers=self.wrappers)  # so that a mistake shows here
        found = find(self.source)
        object.__setattr__(self, "name", name_of(self.source))
        object.__setattr__(self, "_found", _lean(found) if isinstance(found, EnvSpec) else found)
        object.__setattr__(self, "_wraps", [find_wrapper(wrapper) for wrapper in self.wrappers])

    def __call__(self, index: int = 0, **more: Any) -> SeededEpisodes:
        """A fresh environment that seeds its own episodes."""
        make = resolve(self._found, env_kwargs={**self.kwargs, **more}, wrappers=self._wraps)
        env = make()
        if not isinstance(env, gym.Env):
            raise ConfigError(f"{self.name} must make a gymnasium.Env, got {type(env).__name__}")
        return SeededEpisodes(env, self.seed, index, self.stream)


def _lean(spec: EnvSpec) -> EnvSpec:
    """The spec without checks of the caller: our collectors reset before they step, and a test says so."""
    lean = copy.deepcopy(spec)
    lean.order_enforce = False
    lean.disable_env_checker = True
    return lean


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
        EnvError: it cannot be made, or a random action made it raise.
    """
    try:
        env = factory(0)
    except ShoalError:
        raise
    except Exception as error:  # an env may raise whatever it likes
        raise EnvError(f"{factory.name} cannot be made: {type(error).__name__}: {error}") from error
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
