"""Any `gymnasium.Env` as text: what it shows is written out, what it takes is read from words, numbers or free text.

An env that states no `observation_space` may also show chat messages, a list of `{"role": …, "content": …}`: the
system message joins the instructions, and the others are the text of the turn.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from shoal.core.data import check_flags, check_step_result, info_of, refuse_no_text, reward_of
from shoal.core.errors import ConfigError, EnvError, UnknownNameError
from shoal.envs.actions import Projection
from shoal.envs.adapters.views import as_text
from shoal.envs.catalogue import resolve
from shoal.envs.spaces import ANY_TEXT, FreeText, free_text
from shoal.envs.text import MOST_ANSWER, Action, Outcome, TextEnv, blame, check_numbers, is_count

MAX_NUMBERS = 512
"""Numbers in an observation that can still be shown as text."""
MOST_STEPS = 1000
"""Of an episode where neither the config nor the env has `max_steps`."""
SHOWN = ("image", "text", "anchor")
"""Keys of an info that mean something to who plays an episode, whatever the env inside means by them."""
MAX_CHOICES = 65_536
"""Actions of a discrete space that can still be listed."""

NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "CartPole": (
        ("push left", "push right"),
        ("cart position", "cart velocity", "pole angle", "pole angular velocity"),
    ),
    "MountainCar": (("left", "wait", "right"), ("position", "velocity")),
    "Acrobot": (
        ("torque -1", "torque 0", "torque 1"),
        ("cos angle 1", "sin angle 1", "cos angle 2", "sin angle 2", "velocity 1", "velocity 2"),
    ),
    "Pendulum": ((), ("cos angle", "sin angle", "angular velocity")),
    "LunarLander": (
        ("nothing", "left engine", "main engine", "right engine"),
        ("x", "y", "x velocity", "y velocity", "angle", "angular velocity", "left leg", "right leg"),
    ),
    "Taxi": (("south", "north", "east", "west", "pick up", "drop off"), ()),
    "CliffWalking": (("up", "right", "down", "left"), ()),
    "FrozenLake": (("left", "down", "right", "up"), ()),
    "Blackjack": (("stick", "hit"), ("player sum", "dealer card", "usable ace")),
}
"""Words for the actions and observations of well-known envs, by the name in front of the version."""

_NUMBER = re.compile(r"[+-]?(?:\d{1,16}(?:\.\d{0,24})?|\.\d{1,24})(?:[eE][+-]?\d{1,2})?")
_COLORED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)


@dataclass(frozen=True)
class GymnasiumConfig:
    """Settings of `GymnasiumEnv`."""

    id: str = ""
    """An id as in "CartPole-v1" or "package:Name-v0", or "module:Class"."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the env."""
    action_names: tuple[str, ...] = ()
    """Words for the actions of a discrete action space, in order."""
    observation_names: tuple[str, ...] = ()
    """Words for the numbers of an observation, in order."""
    show: Literal["auto", "values", "ansi"] = "auto"
    """The values of the observation, or the env's own text drawing. "auto" prefers words where they are known
    (MiniGrid, BabyAI, NLE), then the drawing."""
    digits: int = 3
    """Significant digits of the numbers that are shown."""
    success_return: float | None = None
    """Return from which an episode counts as a success; None leaves it to the env's info or threshold."""
    max_steps: int | None = None
    """Steps after which an episode is truncated; None leaves it to the env's own `max_steps`, else it is 1000."""
    invalid_penalty: float = 0.0
    """Reward of a response without a usable action."""

    def __post_init__(self) -> None:
        if not self.id:
            raise ConfigError("id must name a gymnasium env, as in id='CartPole-v1'")
        check_numbers(self, max_steps=1, digits=1)


class GymnasiumEnv(TextEnv[GymnasiumConfig]):
    """Any Gymnasium env, as text.

    Discrete actions have the numbers 1, 2, … here (0 stands for no usable action); those of a `Text` space, or of an
    env without `action_space`, are free text; others are given as numbers in text, "0.5, -1". A response without a
    usable action does not reach the env. The class inside may have `instructions`, `action_names` and `max_steps`,
    which are used where the config does not say otherwise, and `random_action(rng)` and `expert_action()`, from which
    the warm-up learns.

    Args:
        config: how it is shown.
        make: makes the env inside; `id` is then only what it is called.
        settings: those of the config, by keyword.
    """

    Config = GymnasiumConfig
    seed_stream = "GymnasiumEnv"
    inner_info: Mapping[str, Any] = MappingProxyType({})
    """What the env inside reported last, and `info` has beside the keys of every text env."""
    success_is_known = False
    """Whether the env, or the config, has said when an episode counts as a success."""

    def __init__(
        self,
        config: GymnasiumConfig | None = None,
        *,
        make: Callable[..., gymnasium.Env[Any, Any]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(config, **settings)
        make = _maker(self.config.id, self.config.kwargs) if make is None else make
        self.inner = _made(make, self.config.id)
        _check_reset(type(self.inner.unwrapped))
        self._adapt(make)

    def _adapt(self, make: Callable[..., gymnasium.Env[Any, Any]]) -> None:
        """Find the words for what the env inside shows and takes."""
        config = self.config
        view = as_text(self.inner) if config.show == "auto" else None
        self.inner = view or self.inner
        modes = (self.inner.metadata or {}).get("render_modes") or ()
        drawn = "ansi" in modes and config.show != "values" and view is None
        if config.show == "ansi" and not drawn:
            raise ConfigError(f"{config.id} has no render_mode 'ansi'; use show='values'")
        if drawn and self.inner.render_mode != "ansi":
            self.inner.close()
            try:
                self.inner = _made(make, config.id, render_mode="ansi")
            except ConfigError:  # an older env, or one of the user's own, that cannot be asked to draw
                if config.show == "ansi":
                    raise
                drawn, self.inner = False, _made(make, config.id)
        self._drawn = drawn
        inner: Any = view or self.inner.unwrapped
        own = getattr(inner, "max_steps", None)
        self.max_steps = config.max_steps or (own if is_count(own) else MOST_STEPS)
        name = config.id.rpartition(":")[2].rpartition("/")[2].rpartition("-v")[0] or config.id
        known_actions, known_numbers = NAMES.get(name, ((), ()))
        self._names = config.observation_names or known_numbers
        self.observation_space = FreeText(ANY_TEXT)
        self._space: Space[Any] | None = getattr(self.inner, "observation_space", None)
        if isinstance(self._space, spaces.Sequence):
            self._space = None
        self._system = ""
        self._messages: list[Any] = []
        self._inner: Mapping[str, Any] = {}
        if self._space is None and not drawn:
            self._look_at_the_first_observation()
        elif self._space is not None and not drawn:
            _check_size(self._space, config.id)
        shown = 0 if drawn or self._space is None else _count_of_names(self._space)
        if config.observation_names and len(config.observation_names) != shown:
            raise ConfigError(
                f"{config.id} shows {shown} numbers to be named, but observation_names has "
                f"{len(config.observation_names)}"
                + ("; its drawing has none: use show='values'" if drawn else "")
            )
        names = config.action_names or tuple(getattr(inner, "action_names", ()))
        space = self._action_space = getattr(self.inner, "action_space", None)
        if isinstance(space, spaces.Discrete):
            if space.n > MAX_CHOICES:
                raise ConfigError(f"{config.id} has {space.n} actions; text can offer {MAX_CHOICES}")
            numbered = tuple(map(str, range(int(space.n))))
            words = names or (known_actions if len(known_actions) == space.n else numbered)
            if len(words) != space.n:
                raise ConfigError(f"{config.id} has {space.n} actions, but action_names has {len(words)}")
            if twice := [word for word, count in Counter(words).items() if count > 1]:
                raise ConfigError(
                    f"action_names of {config.id} has {twice[0]!r} twice: each action needs its own word"
                )
            self._first = int(space.start)
            self.action_space = spaces.Discrete(int(space.n), start=1)
            self.projection = Projection(lookup={word: number for number, word in enumerate(words, 1)})
            self._form = f"one of: {', '.join(words)}"
        elif config.action_names:
            raise ConfigError(
                f"action_names are for a choice of actions, but those of {config.id} are {space}"
            )
        elif (
            space is None
            or is_text(space)
            or isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary)
        ):
            self.invalid_action = ""  # type: ignore[misc]
            self.action_space = FreeText(MOST_ANSWER)
            self.projection = Projection(parse=self._understood, invalid="")
            self._form = "text" if space is None else describe_space(space)
        else:
            raise ConfigError(f"actions of {config.id} cannot be written as text: {space}")
        seen = "text" if self._space is None else describe_space(self._space)
        seen = "a drawing in text, highlighted cells in [ ]" if drawn else seen
        texts = [str(text) for text in (getattr(inner, "instructions", ""), self._system) if text]
        self.instructions = "\n\n".join(texts) or (
            f"You act in the environment {config.id}. An observation is {seen}. An action is {self._form}."
        )

    def _look_at_the_first_observation(self) -> None:
        """Find out what an env without a space of observations shows: text, or messages with a system message."""
        with self._blaming("_start"):
            seen, _ = check_step_result(self.inner.reset(seed=0), "reset")
        if are_messages(seen):
            contents = [message["content"] for message in seen if message["role"] == "system"]
            self._system = "\n\n".join(contents)
        elif not isinstance(seen, str):
            raise ConfigError(
                f"observations of {self.config.id} cannot be written as text: it has no observation_space that says "
                f"what they are, and they are no text and no chat messages, but {type(seen).__name__}"
            )

    @classmethod
    def resolved(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings, with what makes the env of this id."""
        name, kwargs = settings.get("id"), settings.get("kwargs") or {}
        if "make" in settings or not (isinstance(name, str) and name and isinstance(kwargs, Mapping)):
            return dict(settings)
        return {**settings, "make": _maker(name, kwargs)}

    def _understood(self, text: str) -> str | None:
        return None if self._action_inside(text) is None else text

    def _action_inside(self, action: Action) -> Any:
        """What the env inside takes for an action here; None where that is none."""
        space, text = self._action_space, str(action)
        if isinstance(space, spaces.Discrete):
            return int(action) - 1 + self._first
        if space is not None and not is_text(space):
            return read_numbers(space, text)
        if isinstance(space, spaces.Text) and free_text(space) is not space:
            return text if space.min_length <= len(text) <= space.max_length else None
        return text if space is None or space.contains(text) else None

    def _start(self, rng: np.random.Generator) -> None:
        asked = {} if self._options is None else {"options": self._options}
        answer = self.inner.reset(seed=int(rng.integers(2**31)), **asked)
        self._return, self._messages = 0.0, []
        with self._blaming("_start"):
            self._seen, info = check_step_result(answer, "reset")
            self._inner = info_of(info)
            self._text = self._written()

    def _advance(self, action: Action) -> Outcome:
        inside = None if action == self.invalid_action else self._action_inside(action)
        if inside is None:
            self._inner = {}
            return Outcome(self.config.invalid_penalty, effective=False, valid=False)
        answer = self.inner.step(inside)
        with self._blaming("_advance"):
            self._seen, reward, terminated, truncated, info = check_step_result(answer, "step")
            before, self._text = self._text, self._written()
            check_flags(terminated, truncated)
            paid = reward_of(reward)
            self._return += paid
            self._inner = info_of(info)
            success = self._succeeded(self._inner, bool(terminated), bool(truncated))
        return Outcome(
            paid,
            bool(terminated),
            success,
            effective=self._text != before,
            truncated=bool(truncated),
        )

    def _info(self, outcome: Outcome) -> dict[str, Any]:
        own = super()._info(outcome)
        self.inner_info = {
            key: self._inner[key] for key in self._inner if key not in own and key not in SHOWN
        }
        return {**self.inner_info, **own}

    def _blame_method(self, method: str, problem: str) -> NoReturn:
        """The author of the env inside knows `reset` and `step`."""
        first = method == "_start" or (method == "observe" and not self._steps)
        raise EnvError(blame(type(self.inner.unwrapped), "reset" if first else "step", problem))

    def _succeeded(self, info: Mapping[str, Any], terminated: bool, truncated: bool) -> bool:
        for key in ("success", "is_success", "won"):
            if key in info and self.config.success_return is None:
                self.success_is_known = True
                check_flags(terminated, truncated, **{key: info[key]})
                return bool(info[key])
        spec = self.inner.spec
        wanted = self.config.success_return
        if wanted is None and spec is not None:
            wanted = spec.reward_threshold
        self.success_is_known = self.success_is_known or wanted is not None
        over = terminated or truncated or self._steps + 1 >= self.max_steps
        return over and wanted is not None and self._return >= wanted

    def _written(self) -> str:
        if self._drawn:
            return plain_drawing(str(self.inner.render()))
        if self._space is not None:
            return write_value(self._space, self._seen, self._names, self.config.digits)
        if isinstance(self._seen, str):
            return self._seen
        if not are_messages(self._seen):
            raise EnvError(
                "the observation must be text, or a list of messages {'role': …, 'content': …}; got "
                f"{self._seen!r:.80}"
            )
        return self._new_messages(list(self._seen))

    def _new_messages(self, messages: list[Any]) -> str:
        """The text of a turn: of messages that grew by some, those; never what the agent itself said."""
        known = len(self._messages)
        grew = len(messages) > known and messages[:known] == self._messages
        new = messages[known:] if grew else messages
        self._messages = messages
        return "\n\n".join(
            message["content"]
            for message in new
            if message["role"] != "assistant"
            and not (message["role"] == "system" and message["content"] in self._system)
        )

    @property
    def draws_actions(self) -> bool:
        """Whether there are words for actions, or the env inside has a `random_action`."""
        return bool(self.projection.lookup) or self._own("random_action") is not None

    def random_action(self, rng: np.random.Generator) -> Any:
        """What `random_action(rng)` of the env inside gives, if it has one: an action, or the text of one."""
        own = self._own("random_action")
        return super().random_action(rng) if own is None else self._in_words(own(rng), "random_action")

    @property
    def has_expert(self) -> bool:
        """Whether the env inside has an `expert_action`."""
        return self._own("expert_action") is not None

    def expert_action(self) -> Any:
        """What `expert_action()` of the env inside gives, if it has one: an action, the text of one, or None."""
        own = self._own("expert_action")
        return None if own is None else self._in_words(own(), "expert_action")

    def _own(self, name: str) -> Callable[..., Any] | None:
        """A method of the env inside."""
        method = getattr(self.inner.unwrapped, name, None)
        return method if callable(method) else None

    def _in_words(self, action: Any, method: str) -> Any:
        """The text of an action: the word of a discrete one, the numbers of an array; text and calls stay."""
        if action is None or isinstance(action, str | tuple | list):
            return action
        space = self._action_space
        if isinstance(action, np.ndarray):
            return ", ".join(map(str, action.ravel().tolist()))
        if isinstance(space, spaces.Discrete) and space.contains(action):
            return self.projection.words()[int(action) - self._first]
        kind, wanted = type(self.inner.unwrapped), "must return an action, or its text"
        raise EnvError(blame(kind, method, f"{wanted}, got {action!r:.80}"))

    def available_actions(self) -> list[str]:
        """The words of discrete actions, those that `info["action_mask"]` allows; or a pattern for numbers."""
        words, mask = self.projection.words(), self._inner.get("action_mask")
        if words and isinstance(mask, np.ndarray | list | tuple) and len(mask) == len(words):
            words = [word for word, allowed in zip(words, mask, strict=True) if allowed]
        return words or [f"<{self._form}>"]

    def observe(self) -> str:
        """The present observation as text."""
        return self._text

    def close(self) -> None:
        """Close the env inside."""
        super().close()
        self.inner.close()


def are_messages(value: Any) -> bool:
    """Whether an observation is a chat: a list of messages that have a role and a content of text."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )


def is_text(space: Space[Any]) -> bool:
    """Whether the values of a space are strings: a `Text`, or a space of one's own with `dtype=str`."""
    return isinstance(space, spaces.Text) or (space.dtype is not None and space.dtype.kind == "U")


def describe_space(space: Space[Any]) -> str:
    """What a value of a space looks like, in words."""
    if isinstance(space, spaces.Discrete):
        return f"a number from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.Box):
        low, high = np.unique(space.low), np.unique(space.high)
        limits = f" from {low[0]:g} to {high[0]:g}" if len(low) == len(high) == 1 else ""
        return f"{_count(space.shape)}{limits}"
    if isinstance(space, spaces.MultiDiscrete):
        first = space.start.tolist() if space.start.any() else 0
        return f"{_count(space.shape)}, each from {first} up to {(space.start + space.nvec - 1).tolist()}"
    if isinstance(space, spaces.MultiBinary):
        return f"{_count(space.shape)}, each 0 or 1"
    if isinstance(space, spaces.Tuple):
        return "; ".join(describe_space(part) for part in space.spaces)
    if isinstance(space, spaces.Dict):
        return "; ".join(f"{name}: {describe_space(part)}" for name, part in space.spaces.items())
    return "text" if is_text(space) else str(space)


def write_value(space: Space[Any], value: Any, names: tuple[str, ...] = (), digits: int = 3) -> str:
    """A value of a space as text: numbers with their names if there are any, parts a line each."""
    if isinstance(space, spaces.Dict):
        return "\n".join(
            f"{name}: {write_value(part, value[name], (), digits)}" for name, part in space.spaces.items()
        )
    if isinstance(space, spaces.Tuple):
        parts = [write_value(part, item, (), digits) for part, item in zip(space.spaces, value, strict=True)]
        if len(names) == len(parts):
            return "\n".join(f"{name}: {part}" for name, part in zip(names, parts, strict=True))
        return "\n".join(parts)
    if is_text(space):
        refuse_no_text(value)
        return str(value)
    array = np.asarray(value)
    if array.ndim == 0:
        return f"{array.item():.{digits}g}" if array.dtype.kind == "f" else str(array.item())
    if array.ndim > 1:
        return "\n".join(write_value(space, row, (), digits) for row in array)
    texts = [f"{item:.{digits}g}" if array.dtype.kind == "f" else str(int(item)) for item in array.tolist()]
    if len(names) == len(texts):
        return "\n".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True))
    return " ".join(texts)


def read_numbers(space: Space[Any], text: str) -> Any:
    """The value of a space that a text of numbers stands for, None if it stands for none."""
    words = text.replace(",", " ").split()
    if not words or len(words) > MAX_NUMBERS or not all(_NUMBER.fullmatch(word) for word in words):
        return None
    numbers = [float(word) for word in words]
    if len(numbers) != math.prod(space.shape or ()):
        return None
    dtype = np.dtype(space.dtype or np.float64)
    if dtype.kind in "iu" and not all(number.is_integer() for number in numbers):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        value = np.array(numbers).reshape(space.shape or ()).astype(dtype)
    if dtype.kind in "iu" and value.ravel().tolist() != numbers:
        # it has no room for them: 256 would become 0
        return None
    return value if np.isfinite(value).all() and space.contains(value) else None


def plain_drawing(text: str) -> str:
    r"""A colored terminal drawing without colors: what was highlighted stands in brackets.

    >>> plain_drawing("S\x1b[41mF\x1b[0mH")
    'S[F]H'
    """
    marks = {"34": "()", "35": "{}"}  # the colors of passenger and destination in Taxi

    def mark(match: re.Match[str]) -> str:
        codes = match[1].split(";")
        highlighted = any(len(code) == 2 and code[0] == "4" for code in codes)
        around = "[]" if highlighted else next((marks[code] for code in codes if code in marks), "")
        return f"{around[:1]}{match[2]}{around[1:]}"

    return re.sub(r"\x1b\[[0-9;]*m", "", _COLORED.sub(mark, text)).strip("\n")


def _check_reset(kind: type) -> None:
    """See that an env can be reset with a seed."""
    try:
        inspect.signature(kind.reset).bind(None, seed=0)  # type: ignore[attr-defined]
    except TypeError:
        wanted = "must be reset(self, *, seed=None, options=None), which begins an episode from the seed"
        raise EnvError(blame(kind, "reset", wanted)) from None
    except ValueError:
        pass  # a signature that is not known here, as of compiled code


def _maker(name: str, kwargs: Mapping[str, Any]) -> Callable[..., gymnasium.Env[Any, Any]]:
    try:
        return resolve(name, env_kwargs=kwargs)
    except UnknownNameError as error:
        raise ConfigError(str(error)) from error


def _made(make: Callable[..., gymnasium.Env[Any, Any]], name: str, **more: Any) -> gymnasium.Env[Any, Any]:
    try:
        env = make(**more)
    except (gymnasium.error.Error, TypeError, ModuleNotFoundError) as error:
        raise ConfigError(f"the environment {name!r} cannot be made: {error}") from error
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{name} must make a gymnasium.Env, got {type(env).__name__}")
    return env


def _check_size(space: Space[Any], env_id: str) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        for part in parts:
            _check_size(part, env_id)
    elif is_text(space):
        return
    elif not isinstance(space, spaces.Discrete | spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        raise ConfigError(f"observations of {env_id} cannot be written as text: {space}")
    elif math.prod(space.shape or ()) > MAX_NUMBERS:
        raise ConfigError(
            f"observations of {env_id} have {math.prod(space.shape or ())} numbers; "
            f"text can show {MAX_NUMBERS}"
        )


def _count_of_names(space: Space[Any]) -> int:
    """How many parts `write_value` writes with their names."""
    if isinstance(space, spaces.Tuple):
        return len(space.spaces)
    return space.shape[0] if space.shape is not None and len(space.shape) == 1 else 0


def _count(shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return "a number" if shape[0] == 1 else f"{shape[0]} numbers"
    return f"{' x '.join(map(str, shape))} numbers" if shape else "a number"
