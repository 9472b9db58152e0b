"""The text-environment protocol: a `gymnasium.Env` whose observations are text and whose actions have names.

A subclass states its words and three methods (`_start`, `_advance`, `observe`), and its settings if it has any; what
can be checked is checked when the class is made. This base keeps the promises that all share: own random stream from
the seed, a step after the end raises, invalid actions count as steps, episodes are truncated at `max_steps`, and `info`
always has the same keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import operator
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, TypeGuard, TypeVar

import gymnasium
import numpy as np
from gymnasium.utils import seeding

from shoal.core.configuration import convert_fields
from shoal.core.data import MOST_REWARD, check_flags, reward_of
from shoal.core.errors import ConfigError, EnvError, owner, place_of
from shoal.core.seeding import stream
from shoal.envs.actions import Projection, ToolCall
from shoal.envs.spaces import ANY_TEXT, FreeText, free_text, own_space, why_not_in

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
    """The outcome with Python's own booleans, which can be serialized; text is refused."""
    said = {
        name: getattr(outcome, name) for name in ("terminated", "truncated", "success", "effective", "valid")
    }
    check_flags(**said)
    yes = {name: bool(value) for name, value in said.items()}
    return outcome._replace(**yes)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The settings of an env that states no `Config`."""

    max_steps: int = 100
    """Steps after which an episode is truncated."""


class TextEnv(gymnasium.Env[Any, Any], Generic[C]):
    """Base of shoal's text environments.

    `reset(seed=)` without a seed draws one from the env's own stream (from entropy the first time), so that
    `info["seed"]` always reproduces the episode.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 4}  # type: ignore[misc]
    Config: ClassVar[type] = TextConfig
    """The frozen dataclass of settings, if the env has any; its `max_steps` goes before that of the class."""
    max_steps: int = TextConfig.max_steps
    """Steps after which an episode is truncated."""
    instructions: str
    """The rules for the model: goal, symbols, what actions mean. No line about the reply format."""
    projection: Projection
    """How model text becomes an action of this env."""
    invalid_action: ClassVar[Action] = 0
    """What the projection gives for text without a usable action: it costs a step and changes nothing.

    Where the class does not state one and 0 is an action, it is the number behind the last action.
    """
    observation_space: gymnasium.Space[Any] = FreeText(ANY_TEXT)
    calls_tools: bool = False
    """Whether its actions are calls of tools, see `shoal.envs.ToolEnv`."""
    _states_invalid: ClassVar[bool] = False
    seed_stream: ClassVar[str] = "TextEnv"
    """Names the random stream of a seed: it does not change where the class is renamed or has subclasses."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Complete what the class leaves out, and refuse what cannot work.

        Raises:
            ConfigError: names the class, its line, what is wrong and the remedy.
        """
        super().__init_subclass__(**more)
        # cloudpickle makes a class without anything in it, whose parts, complete already, come later
        if any(not name.startswith("__") for name in vars(cls)):
            _complete(cls)

    def __init__(self, config: C | None = None, *, render_mode: str | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError(f"pass a config or settings, not both; got config and {sorted(settings)}")
        if config is not None and not isinstance(config, self.Config):
            raise ConfigError(f"config must be a {self.Config.__name__}, got {config!r:.200}")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(
                f"render_mode must be one of {self.metadata['render_modes']}, got {render_mode!r}"
            )
        if self.Config is TextConfig:
            settings = {"max_steps": self.max_steps, **settings}
        self.config: C = config if config is not None else build_config(self.Config, settings)
        stated = getattr(self.config, "max_steps", None)
        self.max_steps = self.max_steps if stated is None else stated
        if not is_count(self.max_steps):
            raise ConfigError(f"max_steps must be a whole number of at least 1, got {self.max_steps!r}")
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
        self._numbers = range(0)
        self._stated_space: gymnasium.spaces.Text | None = None
        self._has_anchor = type(self).anchor is not TextEnv.anchor

    @classmethod
    def resolved(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings as they go to a worker: names that only this process knows become what they stand for."""
        return dict(settings)

    @property
    def _np_random(self) -> np.random.Generator | None:  # type: ignore[override]
        """Gymnasium's own generator, which shoal's envs never use: seeded when it is first read."""
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

    def expert_action(self) -> str | tuple[ToolCall | str, ...] | None:
        """The action of an expert, which knows the answer, in words that the projection reads.

        For agents with tools also the calls that lead to it, and the action behind them. None where the env has no
        expert, or where nothing leads to success any more.
        """
        return None

    def random_action(self, rng: np.random.Generator) -> str | tuple[ToolCall | str, ...] | None:
        """A uniformly random valid action, as the projection reads it; None for free text without a rule.

        For agents with tools there may be calls before it.
        """
        words = self.available_actions() if self.projection.lookup else []
        return words[int(rng.integers(len(words)))] if words else None

    @property
    def draws_actions(self) -> bool:
        """Whether there are random actions: the env has words for actions, or a `random_action` of its own."""
        return bool(self.projection.lookup) or type(self).random_action is not TextEnv.random_action

    @property
    def has_expert(self) -> bool:
        """Whether there is an expert: the env has an `expert_action` of its own."""
        return type(self).expert_action is not TextEnv.expert_action

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
        seed = operator.index(seed)
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self._np_random_seed, self._gymnasium_rng = seed, None
        self._seed, self._steps, self._over, self._success = seed, 0, True, False
        self._options = options  # for an env inside
        space, actions = self.observation_space, self.action_space
        # A space that a constructor made is not held against an observation: a subclass may show more.
        stated = isinstance(space, gymnasium.spaces.Text) and space == type(self).observation_space
        self._stated_space = space if stated else None  # type: ignore[assignment]
        if isinstance(actions, gymnasium.spaces.Discrete):  # which takes long to say what it contains
            self._numbers = range(int(actions.start), int(actions.start + actions.n))
        self._rng = stream(seed, "env", self.seed_stream)
        self._start(self._rng)
        self._over = False  # not before: where no world was made, there is no episode to be stepped
        return self._checked_observation(), self._info(_BEGINNING)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step; raises `EnvError` when the episode is over (or was never started)."""
        if self._over:
            raise EnvError(
                f"{type(self).__name__}: the episode is over or was never started; call reset() first"
            )
        action = self._checked(action)
        outcome = self._advance(action)
        if type(outcome) is not Outcome:
            self._blame_method("_advance", f"must return an Outcome, got {_kind_of(outcome)}")
        _, ended, success, effective, valid, _, cut = outcome
        if not (type(ended) is type(success) is type(effective) is type(valid) is type(cut) is bool):
            with self._blaming("_advance"):
                outcome = _in_bools(outcome)
        if outcome.valid and action == self.invalid_action:
            outcome = outcome._replace(valid=False)
        reward = outcome.reward
        if type(reward) is not float:
            with self._blaming("_advance"):
                reward = reward_of(reward)
        if not math.isfinite(reward):
            self._blame_method("_advance", f": the reward must be a finite number, got {reward}")
        self._steps += 1
        self._success = self._success or outcome.success
        late = outcome.truncated or self._steps >= self.max_steps
        truncated = late and not outcome.terminated
        self._over = outcome.terminated or truncated
        return self._checked_observation(), reward, outcome.terminated, truncated, self._info(outcome)

    def close(self) -> None:
        """End the episode; what an env holds is let go by its own `close`, which calls this one."""
        self._over = True

    def render(self) -> Any:
        """The observation, for `render_mode="ansi"`."""
        return self.observe() if self.render_mode == "ansi" else None

    def _checked_observation(self) -> Any:
        """The observation; refused if it should be text and is not, or is not in the space that the class states."""
        seen = self._observation()
        if not isinstance(seen, str) and isinstance(self.observation_space, gymnasium.spaces.Text):
            self._blame_method("observe", f"must return a string, got {_kind_of(seen)}")
        stated = self._stated_space
        if stated is not None and not stated.contains(seen):
            self._blame_method("observe", f"gave {seen!r:.80}, but {why_not_in(stated, seen)}")
        return seen

    def _blame_method(self, method: str, problem: str) -> NoReturn:
        raise EnvError(blame(type(self), method, problem))

    @contextlib.contextmanager
    def _blaming(self, method: str) -> Iterator[None]:
        try:
            yield
        except EnvError as error:
            self._blame_method(method, f": {error}")

    def _checked(self, action: Any) -> Action:
        if type(action) is int and action in self._numbers:
            return action
        if isinstance(action, np.generic | np.ndarray) and action.size == 1:
            action = action.item()
        named = isinstance(action, int | str) and not isinstance(action, bool)
        if named and (action == self.invalid_action or self.action_space.contains(action)):
            return action  # type: ignore[no-any-return]
        if isinstance(action, str) and (found := self.projection.action_of(action)) is not None:
            return found
        words = ", ".join(self.projection.words())
        raise EnvError(
            f"{type(self).__name__}: action must be in {self.action_space}{words and f', or one of {words}'}; "
            f"got {action!r}"
        )

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


# --- what is checked and completed when a class is made
_METHODS = {
    "_start": ("rng", "begins an episode from the generator rng"),
    "_advance": ("action", "acts and returns an Outcome"),
    "observe": ("", "returns the present observation as text"),
}


def _complete(cls: type[TextEnv[Any]]) -> None:
    """Spaces and `invalid_action` that the class leaves out; what cannot work is refused."""
    _check_methods(cls)
    _check_settings(cls)
    if cls.__init__ is TextEnv.__init__ and ABC not in cls.__bases__:
        if not hasattr(cls, "projection"):
            words = "projection = Projection(lookup={'left': 1, 'right': 2})"
            _refuse(cls, f"does not say what its actions are; state them, as in {words}")
        if not getattr(cls, "instructions", None):
            _refuse(cls, "needs instructions: the rules of the env as a text for the model")
    if hasattr(cls, "projection"):
        _complete_actions(cls)
    space = cls.observation_space
    if isinstance(space, gymnasium.spaces.Text) and (free := free_text(space)) is not space:
        cls.observation_space = free


def _check_methods(cls: type[TextEnv[Any]]) -> None:
    for name, (argument, what) in _METHODS.items():
        method, written = getattr(cls, name), f"{name}({', '.join(filter(None, ('self', argument)))})"
        if method is getattr(TextEnv, name):
            if ABC not in cls.__bases__:
                _refuse(cls, f"needs a method {written}, which {what}")
        elif inspect.isfunction(method):
            try:
                inspect.signature(method).bind(None, *filter(None, [argument]))
            except TypeError:
                given = f"{name}{inspect.signature(method)}"
                _refuse(cls, f"must have {written}, which {what}; got {given} ({place_of(method)})")


def _check_settings(cls: type[TextEnv[Any]]) -> None:
    if not (isinstance(cls.Config, type) and dataclasses.is_dataclass(cls.Config)):
        _refuse(cls, f"must have a dataclass as its Config, got {cls.Config!r:.80}")
    if "max_steps" in vars(cls):
        if not is_count(cls.max_steps):
            _refuse(cls, f"must have a whole number of at least 1 as max_steps, got {cls.max_steps!r:.80}")
        if cls.Config is not TextConfig and "max_steps" in cls.Config.__dataclass_fields__:
            _refuse(
                cls,
                f"has max_steps twice, in the class and in {cls.Config.__name__}: leave out that of the class",
            )


def _complete_actions(cls: type[TextEnv[Any]]) -> None:
    projection, space = cls.projection, getattr(cls, "action_space", None)
    if not isinstance(projection, Projection):
        if not isinstance(projection, property):
            example = "Projection(lookup={'left': 1, 'right': 2})"
            _refuse(cls, f"must have a projection such as {example}, got {projection!r:.80}")
        return
    actions = list(projection.lookup.values())
    if space is None or (actions and "projection" in vars(cls) and "action_space" not in vars(cls)):
        cls.action_space = space = _space_of(cls, actions)
    if not isinstance(space, gymnasium.Space):
        return
    for word, action in projection.lookup.items():
        if not space.contains(action):
            _refuse(cls, f"has the word {word!r} for {action!r}, which is not in action_space {space}")
    cls._states_invalid = cls._states_invalid or "invalid_action" in vars(cls)
    if not cls._states_invalid:
        invalid = projection.invalid
        if actions and isinstance(space, gymnasium.spaces.Discrete) and space.contains(invalid):
            invalid = int(space.start + space.n)
        cls.invalid_action = invalid
    if actions and space.contains(cls.invalid_action):
        _refuse(
            cls,
            f"has the invalid_action {cls.invalid_action!r}, which means 'no usable action' and is an action too: "
            f"leave invalid_action out, or number the actions from 1",
        )
    if projection.invalid != cls.invalid_action:
        cls.projection = dataclasses.replace(projection, invalid=cls.invalid_action)


def _space_of(cls: type[TextEnv[Any]], actions: list[Action]) -> gymnasium.Space[Any]:
    """The action space of a class that states none."""
    numbers = sorted({action for action in actions if type(action) is int})
    if not numbers:
        return FreeText(MOST_ANSWER)
    if len(numbers) < numbers[-1] - numbers[0] + 1 or not all(type(action) is int for action in actions):
        _refuse(cls, f"must state its action_space: {actions!r:.80} are no row of whole numbers")
    return gymnasium.spaces.Discrete(len(numbers), start=numbers[0])


MOST_ANSWER = 4_096
"""Characters of an action in free text."""


def _refuse(cls: type, problem: str) -> NoReturn:
    frames = [frame for frame in traceback.extract_stack() if owner(frame.filename) == "user"]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    raise ConfigError(f"{cls.__name__}{place} {problem}")


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def blame(kind: type, method: str, problem: str) -> str:
    """A message about what a method returned, with the place where the method stands."""
    place = place_of(getattr(kind, method))
    between = "" if problem.startswith(":") else " "
    return f"{kind.__name__}.{method}(){between}{problem}{place and f' ({place})'}"


def _kind_of(value: Any) -> str:
    """What came instead, in words: "a tuple of 3"."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__


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
