"""Find, make and try the environment that `--env` names; Atari games as the literature plays them."""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from shoal.core.errors import ConfigError, EnvError, ShoalError, format_error
from shoal.core.seeding import derive_seed, stream
from shoal.envs.catalogue import Source, Wrapper, find, find_wrapper, name_of, resolve
from shoal.train.ppo.arrays.spaces import ActionRows, ObservationRows
from shoal.train.ppo.arrays.steps import SeededEpisodes
from shoal.train.ppo.config import LARGEST, check_whole

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
        atari: play the screen of an Atari game as the literature does (see `AtariScreen`).
        frame_stack: show the last so many observations as one; 0 or 1 for the last alone.
        squash: take actions of any size, and squash them into the bounds (see `SquashedActions`).

    Raises:
        UnknownNameError: no environment of that name; says which was probably meant.
        ConfigError: it cannot be imported or does not take `kwargs`.
    """

    source: EnvSource
    seed: int = 0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    stream: str = "env"
    wrappers: Sequence[Wrapper] = ()
    atari: bool = False
    frame_stack: int = 0
    squash: bool = False
    name: str = field(init=False)
    """What to call the environment in files and messages."""
    native: ClassVar[bool] = False
    """Whether it makes native batches (see `BatchFactory`)."""
    _found: Callable[..., gym.Env] | EnvSpec = field(init=False, repr=False)
    _wraps: Sequence[Wrapper] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_whole("frame_stack", self.frame_stack, 0, LARGEST)
        # so that a mistake shows here
        resolve(self.source, env_kwargs=self._kwargs(), wrappers=self.wrappers)
        found = find(self.source)
        object.__setattr__(self, "name", name_of(self.source))
        object.__setattr__(self, "_found", _lean(found) if isinstance(found, EnvSpec) else found)
        object.__setattr__(self, "_wraps", [find_wrapper(wrapper) for wrapper in self.wrappers])

    def __call__(self, index: int = 0, **more: Any) -> SeededEpisodes:
        """A fresh environment that seeds its own episodes."""
        make = resolve(self._found, env_kwargs={**self._kwargs(), **more}, wrappers=self._wraps)
        env = make()
        if not isinstance(env, gym.Env):
            raise ConfigError(f"{self.name} must make a gymnasium.Env, got {type(env).__name__}")
        if self.atari:
            env = AtariScreen(env, clip_rewards=self.stream == "env")
        if self.frame_stack > 1:
            env = gym.wrappers.FrameStackObservation(env, self.frame_stack)
        if self.squash:
            env = SquashedActions(env)
        return SeededEpisodes(env, self.seed, index, self.stream)

    def rendered(self) -> SeededEpisodes:
        """A fresh environment whose `render()` gives pictures.

        Raises:
            ConfigError: it has none.
        """
        try:
            return self(render_mode="rgb_array")
        except (ShoalError, TypeError) as error:
            raise ConfigError(
                f"a video (--record-video, --video) needs an environment with render_mode='rgb_array': {error}"
            ) from error

    def check_rendering(self) -> None:
        """Refuse to film an environment whose pictures no video can be made of.

        Raises:
            ConfigError: `render()` gives none.
        """
        env = self.rendered()
        try:
            env.reset()
            frame: Any = env.render()
        except Exception as error:  # an env may raise whatever it likes
            raise ConfigError(
                f"a video needs pictures [height, width, 3] from render(), and that of {self.name} failed: "
                f"{format_error(error)}; leave --record-video or --video out"
            ) from error
        finally:
            env.close()
        if np.ndim(frame) != 3:
            raise ConfigError(
                f"a video needs pictures [height, width, 3] from render(), and {self.name} gave "
                f"{type(frame).__name__}; leave --record-video or --video out"
            )

    def _kwargs(self) -> dict[str, Any]:
        return {**(ATARI_KWARGS if self.atari else {}), **self.kwargs}


class SquashedActions(gym.ActionWrapper):
    """Takes points of any size and gives the env their tanh, stretched over its bounds.

    A policy's Gaussian lies before the squashing. Its probability ratios are those of the squashed actions, since the
    slope of tanh depends on the action alone; its entropy is that before the squashing.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.action_space = unbounded(env.action_space)

    def action(self, action: Any) -> Any:
        """The env's own action."""
        return squashed(self.env.action_space, action)


def unbounded(space: gym.Space) -> gym.spaces.Box:
    """The space of points before they are squashed.

    Raises:
        ConfigError: there are no bounds to squash them into.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        bounded = isinstance(space, gym.spaces.Box) and np.isfinite(space.high - space.low).all()
    if not bounded or not np.issubdtype(space.dtype, np.floating):
        raise ConfigError(
            f"squash=True needs continuous actions with finite bounds, a finite distance apart, got {space}"
        )
    return gym.spaces.Box(-np.inf, np.inf, space.shape, np.float32)


def squashed(space: gym.Space, action: Any) -> Any:
    """A point of `unbounded(space)` as an action."""
    assert isinstance(space, gym.spaces.Box)
    share = 0.5 * (np.tanh(np.asarray(action, np.float64)) + 1.0)
    return np.clip(space.low + share * (space.high - space.low), space.low, space.high).astype(space.dtype)


ATARI_KWARGS = {"frameskip": 1, "obs_type": "grayscale"}
"""Of an Atari game, since `AtariScreen` skips frames itself."""


class AtariScreen(gym.Wrapper):
    """The screen of an Atari game in grey, 84 x 84, as in Mnih et al. (2015), without losing lives as ends.

    Every action is held for four frames, of which the last two are shown, the brighter of each pixel; an episode
    begins with up to 30 actions that do nothing, and FIRE where the game needs it. A lost life ends no episode: an
    episode is then a function of its seed and actions alone.

    Args:
        env: made with `frameskip=1, obs_type="grayscale"`.
        clip_rewards: to their sign, for learning; evaluation counts the game's own points.
    """

    SKIP, NOOPS, SIDE = 4, 30, 84

    def __init__(self, env: gym.Env, clip_rewards: bool = True) -> None:
        super().__init__(env)
        shape = env.observation_space.shape
        if not hasattr(env.unwrapped, "ale") or shape is None or len(shape) != 2:
            raise ConfigError(
                f"atari=True (--atari) takes a game of ale_py with obs_type='grayscale', got {env.unwrapped} with "
                f"observations {env.observation_space}"
            )
        self._clips = clip_rewards
        self._rows, self._columns = _area(shape[0], self.SIDE), _area(shape[1], self.SIDE)
        self._fires = env.unwrapped.get_action_meanings()[1:2] == ["FIRE"]  # type: ignore[attr-defined]
        self.observation_space = gym.spaces.Box(0, 255, (self.SIDE, self.SIDE), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a game, do nothing for a while, and fire where the game waits for it."""
        frame, info = self.env.reset(seed=seed, options=options)
        waits = int(np.random.default_rng(seed).integers(1, self.NOOPS + 1))
        for action in [0] * waits + [1] * self._fires:
            frame, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                frame, info = self.env.reset(options=options)
        return self._seen(frame), info

    def step(self, action: Any) -> Any:
        """Four frames of the same action."""
        total, frames = 0.0, []
        for _ in range(self.SKIP):
            frame, reward, terminated, truncated, info = self.env.step(action)
            frames.append(frame)
            total += float(reward)
            if terminated or truncated:
                break
        reward = float(np.sign(total)) if self._clips else total
        seen = self._seen(np.maximum(*frames[-2:]) if len(frames) > 1 else frame)
        return seen, reward, terminated, truncated, info

    def _seen(self, frame: Any) -> Any:
        rows = _summed(frame.astype(np.int32), self._rows, 0)
        whole = self._rows[1][:, 0].sum() * self._columns[1][:, 0].sum()
        return np.rint(_summed(rows, self._columns, 1) / whole).astype(np.uint8)


def _area(pixels: int, into: int) -> tuple[Any, Any]:
    """Which pixels `[k, into]` an area of an even division takes up, and how many equal parts of each.

    Whole numbers make the average exact, and the same on every machine; no library spreads the work over threads.
    """
    fine = math.lcm(pixels, into)
    size, part = fine // into, fine // pixels
    begins = np.arange(into) * size
    most = max((begin % part + size + part - 1) // part for begin in begins.tolist())
    places = begins // part + np.arange(most)[:, None]
    overlap = np.minimum((places + 1) * part, begins + size) - np.maximum(places * part, begins)
    return np.minimum(places, pixels - 1), np.clip(overlap, 0, None).astype(np.int32)


def _summed(values: Any, area: tuple[Any, Any], axis: int) -> Any:
    shape = (-1, 1) if axis == 0 else (1, -1)
    return sum(values.take(place, axis) * part.reshape(shape) for place, part in zip(*area, strict=True))


def _lean(spec: EnvSpec) -> EnvSpec:
    """The spec without checks of the caller: our collectors reset before they step, and a test says so."""
    lean = copy.deepcopy(spec)
    lean.order_enforce = False
    lean.disable_env_checker = True
    return lean


def make_envs(factory: EnvFactory, first: int, n: int, tried: Any = None) -> list[SeededEpisodes]:
    """Envs `first .. first + n` of a run.

    Raises:
        ConfigError: two of them are one object, or one was made before (`tried`, a weak reference).
    """
    envs = [factory(first + i) for i in range(n)]
    made = {id(env.unwrapped) for env in envs}
    if len(made) < n or (tried is not None and id(tried()) in made):
        raise ConfigError(
            f"{factory.name} returned the same environment object twice; return a new one at each call, as in "
            "lambda: gymnasium.make('CartPole-v1')"
        )
    return envs


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """What is known of an environment after a few random steps."""

    observation_space: gym.Space
    action_space: gym.Space
    masked: bool  # it gives info["action_mask"]
    step_seconds: float  # median time of a step
    max_steps: int | None  # its time limit, if it has one
    own_action_space: gym.Space  # of the environment, before actions are squashed into it
    tried: Any  # a weak reference to the environment itself
    id: str  # of Gymnasium, if it has one


def try_env(factory: EnvFactory) -> EnvFacts:
    """Make one environment, look at its spaces, take 64 random steps and close it.

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
        for _ in range(0 if masked else 64):
            action = env.action_space.sample()
            started = time.perf_counter()
            try:
                _, _, terminated, truncated, info = env.step(action)
            except Exception as error:
                raise EnvError(
                    f"{factory.name} failed when it was tried with action {action!r}: {error!r}"
                ) from error
            times.append(time.perf_counter() - started)
            if "action_mask" in info and actions.is_discrete:
                raise ConfigError(
                    f"{factory.name} gives info['action_mask'] at a step, but not at the reset before; give it at "
                    "every reset and step"
                )
            if terminated or truncated:
                env.reset()
        limit, id = (None, "") if env.spec is None else (env.spec.max_episode_steps, env.spec.id)
        seconds = sorted(times)[len(times) // 2] if times else 0.0
        inner = env.env
        own = inner.env.action_space if isinstance(inner, SquashedActions) else env.action_space
        tried = weakref.ref(env.unwrapped)
        return EnvFacts(env.observation_space, env.action_space, masked, seconds, limit, own, tried, id)
    finally:
        env.close()
