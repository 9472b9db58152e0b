"""The text-environment protocol: a `gymnasium.Env` whose observations are text and whose actions have names.

A subclass states a config dataclass, its words and three methods (`_start`, `_advance`, `observe`);
this base keeps the promises that all share: own random stream from the seed, a step after the end raises,
invalid actions count as steps, episodes are truncated at `max_steps`, and `info` always has the same keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import gymnasium
import numpy as np
from gymnasium.utils import seeding

from shoal.core.configuration import convert_fields
from shoal.core.data import MOST_REWARD, refuse_words, reward_of
from shoal.core.errors import ConfigError, EnvError
from shoal.core.seeding import stream
from shoal.envs.actions import Projection
from shoal.envs.spaces import own_space

Action = int | str
C = TypeVar("C")


class Outcome(NamedTuple):
    """What one action did to the world."""

    reward: float
    terminated: bool = False
    success: bool = False
    effective: bool = True  # the state changed
    valid: bool = True  # the env understood the action
    metrics: Mapping[str, Any] = MappingProxyType({})  # further entries of `info`
    truncated: bool = False  # a wrapped env stopped watching; `max_steps` is looked after by `TextEnv`


_BEGINNING = Outcome(0.0, effective=False)


def _in_bools(outcome: Outcome) -> Outcome:
    """The outcome whose yes and no are Python's, which files and servers can tell; words are refused."""
    said = {
        name: getattr(outcome, name) for name in ("terminated", "truncated", "success", "effective", "valid")
    }
    refuse_words(**said)
    yes = {name: bool(value) for name, value in said.items()}
    return outcome._replace(**yes)  # type: ignore[arg-type]


class TextEnv(gymnasium.Env[Any, Any], Generic[C]):
    """Base of shoal's text environments.

    `reset(seed=)` without a seed draws one from the env's own stream (from entropy the first time), so that
    `info["seed"]` always reproduces the episode.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 4}  # type: ignore[misc]
    Config: ClassVar[type]
    """The frozen dataclass of settings; it has at least `max_steps: int`."""
    instructions: str
    """The rules as told to the model: goal, symbols, what actions mean. No line about the reply format."""
    projection: Projection
    """How model text becomes an action of this env."""
    invalid_action: ClassVar[Action] = 0
    """What the projection gives for text without a usable action: it costs a step and changes nothing."""

    def __init__(self, config: C | None = None, *, render_mode: str | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError(f"pass a config or settings, not both; got config and {sorted(settings)}")
        if config is not None and not isinstance(config, self.Config):
            raise ConfigError(f"config must be a {self.Config.__name__}, got {config!r:.200}")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(
                f"render_mode must be one of {self.metadata['render_modes']}, got {render_mode!r}"
            )
        self.config: C = config if config is not None else build_config(self.Config, settings)
        self.render_mode = render_mode
        for name in ("action_space", "observation_space"):
            space = getattr(type(self), name, None)
            if isinstance(space, gymnasium.Space) and name not in vars(self):
                setattr(self, name, own_space(space))
        self._seed: int | None = None
        self._steps = 0
        self._over = True
        self._success = False
        self._rng = np.random.default_rng(0)
        self._gymnasium_rng: np.random.Generator | None = None
        self._plain_space: Any = None
        self._plain_range = range(0)
        self._has_anchor = type(self).anchor is not TextEnv.anchor

    @classmethod
    def resolved(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings as they go to a worker: names that only this process knows become what they stand for."""
        return dict(settings)

    @property
    def _np_random(self) -> np.random.Generator | None:  # type: ignore[override]
        """Gymnasium's own generator, which shoal's envs never use: seeded when somebody looks at it."""
        if self._gymnasium_rng is None and self._np_random_seed is not None and self._np_random_seed >= 0:
            self._gymnasium_rng, _ = seeding.np_random(self._np_random_seed)
        return self._gymnasium_rng

    @_np_random.setter
    def _np_random(self, generator: np.random.Generator | None) -> None:
        self._gymnasium_rng = generator

    # --- what a subclass writes
    @abstractmethod
    def _start(self, rng: np.random.Generator) -> None:
        """Make a new world from `rng`, which depends on the seed alone."""

    @abstractmethod
    def _advance(self, action: Action) -> Outcome:
        """Act on the world; `action` is in the action space or is `invalid_action`."""

    @abstractmethod
    def observe(self) -> str:
        """The observation of the present state as text."""

    def _observation(self) -> Any:
        """What `reset` and `step` return: the text, unless an env can also show itself as an array."""
        return self.observe()

    def anchor(self) -> str:
        """A key equal for equal states of one group; the observation unless that hides something.

        An env that overrides it gets the key into `info["anchor"]`.
        """
        return self.observe()

    def available_actions(self) -> list[str]:
        """The words that the projection accepts in the present state."""
        return self.projection.words()

    def expert_action(self) -> str | None:
        """What somebody who knows the answer would do now, as the projection reads it.

        None where the env has no expert, or where nothing leads to success any more.
        """
        return None

    def random_action(self, rng: np.random.Generator) -> str | None:
        """A valid action drawn by lot, as the projection reads it; None where actions are free text without a rule."""
        words = self.available_actions() if self.projection.lookup else []
        return words[int(rng.integers(len(words)))] if words else None

    @property
    def action_words(self) -> dict[str, Action]:
        """The env's words and what they stand for; empty where actions are free text."""
        return dict(self.projection.lookup)

    # --- what gymnasium sees
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode that depends on `seed` and the config alone."""
        if seed is None:
            if self._seed is None:
                self._rng = np.random.default_rng()
            seed = int(self._rng.integers(2**63))
        seed = _whole(seed)
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self._np_random_seed, self._gymnasium_rng = seed, None
        self._seed, self._steps, self._over, self._success = seed, 0, True, False
        self._options = options  # for an env inside
        self._rng = stream(seed, "env", type(self).__name__)
        self._start(self._rng)
        self._over = False  # not before: where no world was made, there is no episode to be stepped
        return self._observation(), self._info(_BEGINNING)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step; raises `EnvError` when the episode is over (or was never started)."""
        if self._over:
            raise EnvError(
                f"{type(self).__name__}: the episode is over or was never started; call reset() first"
            )
        outcome = self._advance(self._checked(action))
        _, ended, success, effective, valid, _, cut = outcome
        if not (type(ended) is type(success) is type(effective) is type(valid) is type(cut) is bool):
            outcome = _in_bools(outcome)
        self._steps += 1
        self._success = self._success or outcome.success
        late = outcome.truncated or self._steps >= self.config.max_steps  # type: ignore[attr-defined]
        truncated = late and not outcome.terminated
        self._over = outcome.terminated or truncated
        reward = outcome.reward if type(outcome.reward) is float else reward_of(outcome.reward)
        return self._observation(), reward, outcome.terminated, truncated, self._info(outcome)

    def close(self) -> None:
        """End the episode; what an env holds is let go by its own `close`, which calls this one."""
        self._over = True

    def render(self) -> Any:
        """The observation, for `render_mode="ansi"`."""
        return self.observe() if self.render_mode == "ansi" else None

    def _checked(self, action: Any) -> Action:
        if type(action) is int and action in self._plain_actions():
            return action
        if isinstance(action, np.generic | np.ndarray) and action.size == 1:
            action = action.item()
        named = isinstance(action, int | str) and not isinstance(action, bool)
        if named and (action == self.invalid_action or self.action_space.contains(action)):
            return action  # type: ignore[no-any-return]
        raise EnvError(f"{type(self).__name__}: action must be in {self.action_space}, got {action!r}")

    def _plain_actions(self) -> range:
        """The whole numbers of a discrete space, kept because a space takes long to say what it contains."""
        space = self.action_space
        if self._plain_space is not space:
            self._plain_space, self._plain_range = space, range(0)
            if isinstance(space, gymnasium.spaces.Discrete):
                self._plain_range = range(int(space.start), int(space.start + space.n))
        return self._plain_range

    def _info(self, outcome: Outcome) -> dict[str, Any]:
        info: dict[str, Any] = {
            "success": self._success,
            "won": self._success,
            "action_is_valid": outcome.valid,
            "action_is_effective": outcome.effective,
            "step": self._steps,
            "seed": self._seed,
            "available_actions": [] if self._over else self.available_actions(),
        }
        if outcome.metrics:
            info.update(outcome.metrics)
        if self._has_anchor:
            info["anchor"] = self.anchor()
        return info


def _whole(seed: Any) -> int:
    if type(seed) is int:
        return seed
    if not isinstance(seed, bool):
        with contextlib.suppress(TypeError):
            return operator.index(seed)
    raise TypeError(f"seed must be a whole number or None, got {seed!r:.80}")


def build_config(kind: type[C], settings: Mapping[str, Any]) -> C:
    """A config dataclass from settings, as they come from code or YAML (lists become tuples).

    Raises:
        ConfigError: on an unknown name (with the closest known one) or a value of the wrong type.
    """
    name = kind.__name__
    return kind(**convert_fields(kind, settings, f"{name}.", lambda key: f"{name} has no setting {key!r}"))


MOST_SECONDS = 86_400.0
"""Of a limit of time in a config: a day, for which the timers of all platforms have room."""


def check_numbers(config: Any, **least: int) -> None:
    """Refuse what no number of a config may be; called by its `__post_init__`.

    Fractional numbers must be finite, as rewards must be; limits of time, whose names end with `_seconds`, lie between
    0 and a day; those named in `least` are at least that, or None.

    Raises:
        ConfigError: names the setting.
    """
    for item in dataclasses.fields(config):
        name, value = item.name, getattr(config, item.name)
        if isinstance(value, float) and not abs(value) <= MOST_REWARD:
            raise ConfigError(f"{name} must be a finite number that fits into float32, got {value}")
        if name.endswith("_seconds") and not 0 < value <= MOST_SECONDS:
            raise ConfigError(f"{name} must be above 0 and at most {MOST_SECONDS:g}, got {value}")
        if name in least and value is not None and not (isinstance(value, int) and value >= least[name]):
            raise ConfigError(f"{name} must be a whole number of at least {least[name]}, got {value!r}")
