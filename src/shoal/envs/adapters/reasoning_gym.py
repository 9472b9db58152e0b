"""Tasks of reasoning-gym, one question per episode. Scorers that would run what a model wrote are refused."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, MissingExtraError, unknown_name
from shoal.envs.actions import Projection
from shoal.envs.adapters.private_random import PrivateRandom
from shoal.envs.spaces import FreeText
from shoal.envs.text import Action, Outcome, TextEnv

_RUNS_TEXT = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")


@dataclass(frozen=True)
class ReasoningGymConfig:
    """Settings of `ReasoningGymEnv`."""

    dataset: str = "leg_counting"
    """Name of a reasoning-gym dataset."""
    dataset_config: dict[str, Any] = field(default_factory=dict)
    """Its own settings."""
    dataset_seed: int = 0
    size: int = 1000
    """Questions in the dataset; the episode's seed picks one."""
    max_steps: int = 1
    """Attempts at a question."""
    success_score: float = 1.0
    """Score from which an answer counts as right."""
    invalid_penalty: float = 0.0
    """Reward of a response without an answer."""
    trust_scorer: bool = False
    """Use the dataset even if its scorer passes the answer to eval, exec or sympy's parser: a model that is
    being trained can then run any code in this process."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.max_steps < 1:
            raise ConfigError(f"size and max_steps must be at least 1, got {self.size} and {self.max_steps}")


class ReasoningGymEnv(TextEnv[ReasoningGymConfig]):
    """A question of a reasoning-gym dataset; the reward is the dataset's own score of the answer."""

    Config = ReasoningGymConfig
    instructions = "Answer the question."
    projection = Projection(parse=lambda text: text[:4_096] or None, invalid="", tags=("action", "answer"))
    invalid_action = ""
    action_space = FreeText(65_536)
    observation_space = FreeText(65_536, min_length=1)

    def __init__(self, config: ReasoningGymConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._random = PrivateRandom()
        with self._random.active():
            self._dataset = _dataset(self.config)

    def _start(self, rng: np.random.Generator) -> None:
        self._random.seed(int(rng.integers(2**32)))
        with self._random.active():
            self._item = self._dataset[int(rng.integers(self.config.size))]
        self._text = str(self._item["question"])

    def _advance(self, action: Action) -> Outcome:
        if action == self.invalid_action:
            return Outcome(self.config.invalid_penalty, effective=False, valid=False)
        with self._random.active():
            score = float(self._dataset.score_answer(str(action), self._item))
        right = score >= self.config.success_score
        self._text = f"{self._item['question']}\n{'Right.' if right else 'Not right.'}"
        return Outcome(score, terminated=right, success=right)

    def available_actions(self) -> list[str]:
        """A pattern: the answer is free text."""
        return ["<answer>"]

    def observe(self) -> str:
        """The question, and after an attempt whether it was right."""
        return self._text


def _dataset(config: ReasoningGymConfig) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingExtraError(
            'reasoning_gym envs need a package: run pip install "reasoning-gym"'
        ) from error
    if config.dataset not in DATASETS:
        raise unknown_name("reasoning-gym dataset", config.dataset, DATASETS)
    if not config.trust_scorer and _runs_answers(DATASETS[config.dataset][0]):
        raise ConfigError(
            f"the scorer of reasoning-gym's {config.dataset!r} passes answers to eval or sympy's parser, so "
            "a model could run code here. Use another dataset (shoal has a countdown of its own), or set "
            "trust_scorer=True where that is harmless"
        )
    settings = {**config.dataset_config, "seed": config.dataset_seed, "size": config.size}
    try:
        return reasoning_gym.create_dataset(config.dataset, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"reasoning-gym refuses the settings of {config.dataset!r}: {error}") from error


@lru_cache(maxsize=256)
def _runs_answers(kind: type) -> bool:
    return bool(_RUNS_TEXT.search(inspect.getsource(kind.score_answer)))  # type: ignore[attr-defined]
