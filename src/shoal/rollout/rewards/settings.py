"""Which rewards an episode gets: the list `rewards` of the YAML, and the registry of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.core.configuration import check_settings, from_mapping
from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.registry import Registry, check_name
from shoal.rollout.prompts import FIELD

F = TypeVar("F", bound=Callable[..., Any])
ENV = "env"
"""The name of the environment's own reward."""
FORMAT = "format"
"""The name of the reward for the form of answers."""
FIELDS = ("transcript", "question", "answer", "task", "lowest", "highest")
"""What a prompt may hold in braces."""
PROMPT = (
    "Below is what an agent saw and what it answered.\n\n{transcript}\n\nHow good were its answers? Think it over in a "
    "few sentences, then end with one number from {lowest} (useless) to {highest} (perfect), written as "
    "<score>number</score>."
)

REWARDS: Registry[Callable[..., Any]] = Registry("reward")


def reward(name: str, *, replace: bool = False) -> Callable[[F], F]:
    """Register a function under the name that `rewards` takes.

    It gets the whole episodes of a group and returns one number for each; where it has a parameter `task`, also the
    task of a program. It is called again when a run is resumed, and must return the same numbers then.

    Args:
        name: in the YAML.
        replace: a function of that name.
    """

    def register(function: F) -> F:
        REWARDS.register(name, function, replace=replace)
        return function

    return register


@reward(ENV)
def env_reward(episodes: Sequence[Trajectory]) -> list[float]:
    """What the environment paid."""
    return [episode.reward for episode in episodes]


@reward(FORMAT)
def format_reward(episodes: Sequence[Trajectory]) -> list[float]:
    """-1 for each turn without a valid action, paid in that turn."""
    return [-float(sum(not turn.action_is_valid for turn in episode.turns)) for episode in episodes]


@dataclass(frozen=True)
class JudgeConfig:
    """A model behind an OpenAI-compatible server that judges episodes."""

    base_url: str
    """The server's address, as the package `openai` takes it: `http://127.0.0.1:8000/v1`."""
    model: str
    """The server's name for the model."""
    api_key_env: str | None = None
    """The environment variable that holds the key; the key itself is never written anywhere."""
    temperature: float = 0.0
    """Of the judge's answers."""
    max_tokens: int = 1024
    """Tokens of an answer, at most."""
    lowest: float = 0.0
    """The lowest score that counts as one."""
    highest: float = 1.0
    """The highest score that counts as one."""
    patience: float = 600.0
    """Seconds over which a request that got HTTP 429 or 5xx, no connection or no answer is sent again."""

    def __post_init__(self) -> None:
        check_settings(self, ["patience"], temperature=0, max_tokens=1)
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url must begin with http:// or https://, got {self.base_url!r}")
        if not self.lowest < self.highest:
            raise ConfigError(f"lowest must be below highest={self.highest}, got {self.lowest}")


@dataclass(frozen=True)
class RewardConfig:
    """One reward of the list `rewards`: the reward of an episode is their weighted sum (`env` is the environment's)."""

    name: str = ""
    """The name of a registered reward; beside `function`, `command` or `model`, what its metric is called."""
    weight: float = 1.0
    """What its scores are multiplied by; 0 only measures."""
    function: str | None = None
    """A Python function as `module:function`."""
    command: tuple[str, ...] = ()
    """A command and its arguments; `{python}` stands for the Python that runs shoal. It gets the episodes of a group
    as JSON on its standard input, and its last line is a JSON list of scores."""
    model: JudgeConfig | None = None
    """A model that judges each episode."""
    prompt: str = ""
    """What the model is asked: `{transcript}`, `{question}` (the first observation), `{answer}` (the last response),
    `{task}` (of a program), `{lowest}` and `{highest}` are filled in. By default it is asked about all turns."""
    timeout: float = 120.0
    """Seconds of one request, one run of the command or one call of the function."""
    retries: int = 1
    """Further tries of a command that fails, and of an answer that holds no score."""
    concurrency: int = 8
    """Requests, or processes of the command, at a time."""

    def __post_init__(self) -> None:
        check_settings(self, ["timeout"], retries=0, concurrency=1)
        given = {"function": self.function, "command": self.command, "model": self.model}
        kinds = [kind for kind, value in given.items() if value]
        if len(kinds) > 1:
            raise ConfigError(f"a reward is one of function, command and model, got {' and '.join(kinds)}")
        if self.prompt and self.model is None:
            raise ConfigError("prompt is what a model is asked: give model, or leave prompt out")
        for field in FIELD.findall(self.prompt):
            if field not in FIELDS:
                raise ConfigError(f"prompt has no field {{{field}}}.{did_you_mean(field, FIELDS)}")
        if kinds:
            last = (self.function or "").rpartition(":")[2]
            default = {"function": last, "command": "program", "model": "judge"}[kinds[0]]
            object.__setattr__(self, "name", check_name("reward", self.name or default))
        elif self.name not in REWARDS:
            known = did_you_mean(self.name, REWARDS)
            raise ConfigError(
                f"name: no reward named {self.name!r}, and no function, command or model given.{known}"
            )

    @property
    def registered(self) -> str | None:
        """Its name where a reward is registered by it; None of another function, a command or a model."""
        return None if self.function or self.command or self.model else self.name


Given = RewardConfig | Mapping[str, Any] | Callable[..., Any] | str


def reward_list(given: Iterable[Given]) -> tuple[RewardConfig, ...]:
    """The rewards that a caller lists: settings as in the YAML, names, or functions, which are registered by theirs.

    Raises:
        ConfigError: an unknown name or key, or two rewards of one name.
    """
    found = []
    for number, one in enumerate(given):
        if isinstance(one, Mapping):
            one = from_mapping(RewardConfig, one, f"rewards.{number}.")
        elif isinstance(one, str):
            one = RewardConfig(one)
        elif not isinstance(one, RewardConfig):
            name = getattr(one, "__name__", type(one).__name__)
            if name == ENV:
                raise ConfigError(
                    f"rewards: {ENV!r} is the environment's own reward: call your function otherwise"
                )
            reward(name, replace=True)(one)
            one = RewardConfig(name)
        found.append(one)
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"rewards: two of them are called {name!r}: give one of them another name")
    return tuple(found)
