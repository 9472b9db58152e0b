"""Tasks of reasoning-gym, one question per episode. Only scorers known not to run what a model wrote are used."""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, unknown_name
from shoal.envs.actions import Projection
from shoal.envs.adapters.library import LibraryEnv, library
from shoal.envs.spaces import FreeText
from shoal.envs.text import Action, Outcome, check_numbers

logger = logging.getLogger(__name__)

CHECKED = frozenset(
    """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation
    bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic chain_sum circuit_logic codeio coin_flip
    color_cube_rotation complex_arithmetic count_bits count_primes course_schedule cryptarithm
    decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships figlet_font
    fraction_simplification futoshiki game_of_life game_of_life_halting gcd graph_color group_anagrams
    gsm_symbolic isomorphic_strings jugs kakurasu knight_swap knights_knaves largest_island lcm leg_counting
    letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid
    needle_haystack number_filtering number_format number_sequence number_sorting palindrome_generation
    palindrome_partitioning path_star polynomial_equations pool_matrix power_function prime_factorization
    products propositional_logic quantum_lock ransom_note rearc rectangle_count rotate_matrix rotten_oranges
    rubiks_cube rush_hour self_reference sentence_reordering shortest_path simple_equations simple_geometry
    sokoban spell_backward string_manipulation string_splitting string_synthesis sudoku survo syllogism
    time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles
    """.split()  # noqa: SIM905
)
"""Datasets whose scorers, in reasoning-gym 0.1.25, neither evaluate an answer nor give it to sympy's parser: they
were looked through, and a test watches them score. What is not listed is refused."""

_NO_NUMBER = re.compile(r"(?<![a-z])nan(?=j?(?![a-z]))", re.IGNORECASE)
_RUNS_TEXT = re.compile(r"\b(?:eval|exec|compile|parse_expr|sympify)\(\s*(?!entry\b)")


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
    """Attempts at a question; the last answer ends the episode, right or wrong."""
    success_score: float = 1.0
    """Score from which an answer counts as right."""
    invalid_penalty: float = 0.0
    """Reward of a response without an answer."""
    trust_scorer: bool = False
    """Use the dataset even if it is not known that its scorer keeps answers from eval and sympy's parser: a
    model that is being trained may then run any code in this process."""

    def __post_init__(self) -> None:
        check_numbers(self, size=1, max_steps=1)
        for key, setting in (("seed", "dataset_seed"), ("size", "size")):
            if key in self.dataset_config:
                raise ConfigError(
                    f"{key!r} of the dataset is the setting {setting}; take it out of dataset_config"
                )


class ReasoningGymEnv(LibraryEnv[ReasoningGymConfig]):
    """A question of a reasoning-gym dataset; the reward is the dataset's own score of the answer."""

    Config = ReasoningGymConfig
    package = "reasoning_gym"
    seed_stream = "ReasoningGymEnv"
    pattern = "<answer>"
    instructions = "Answer the question."
    projection = Projection(parse=lambda text: text[:4_096] or None, invalid="", tags=("action", "answer"))
    observation_space = FreeText(65_536, min_length=1)

    def __init__(self, config: ReasoningGymConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        with self._random.active():
            self._dataset = _dataset(self.config)

    def _start(self, rng: np.random.Generator) -> None:
        self._random.seed(int(rng.integers(2**32)))
        with self._random.active():
            self._item = self._dataset[int(rng.integers(self.config.size))]
        self._text = str(self._item["question"])

    def _advance(self, action: Action) -> Outcome:
        if action == self.invalid_action:
            return self._nothing_done()
        score = self._score(str(action))
        right, last = score >= self.config.success_score, self._steps + 1 >= self.config.max_steps
        self._text = f"{self._item['question']}\n{'Right.' if right else 'Not right.'}"
        return Outcome(score, terminated=right or last, success=right)

    def _score(self, answer: str) -> float:
        """The dataset's score; 0 for an answer that its scorer cannot read, whatever it raises then.

        And for one that is no number where the right one is: by NaN any distance is none (`min(1.0, nan)` is 1).
        """
        if _NO_NUMBER.search(answer) and not _NO_NUMBER.search(str(self._item["answer"])):
            return 0.0
        with self._random.active():
            try:
                return float(self._dataset.score_answer(answer, self._item))
            except Exception as error:
                logger.debug("%s cannot score %.200r: %r", self.config.dataset, answer, error)
                return 0.0

    def observe(self) -> str:
        """The question, and after an attempt whether it was right."""
        return self._text


def _dataset(config: ReasoningGymConfig) -> Any:
    reasoning_gym = library("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    if config.dataset not in DATASETS:
        raise unknown_name("reasoning-gym dataset", config.dataset, DATASETS)
    if not config.trust_scorer and not _is_known_safe(config.dataset, DATASETS[config.dataset][0]):
        raise ConfigError(
            f"the scorer of reasoning-gym's {config.dataset!r} is not among those known not to run what they "
            "are given: by eval or sympy's parser a model could run code here. Use another dataset (shoal has a "
            "countdown of its own), or set trust_scorer=True where that is harmless"
        )
    settings = {**config.dataset_config, "seed": config.dataset_seed, "size": config.size}
    try:
        return reasoning_gym.create_dataset(config.dataset, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"reasoning-gym refuses the settings of {config.dataset!r}: {error}") from error


@lru_cache(maxsize=256)
def _is_known_safe(name: str, kind: type) -> bool:
    """Whether the scorer is a checked one of the library's own, and does not look otherwise in its version here."""
    if name not in CHECKED or not kind.__module__.startswith("reasoning_gym."):
        return False
    try:
        source = inspect.getsource(kind.score_answer)  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return False
    return not _RUNS_TEXT.search(source)
