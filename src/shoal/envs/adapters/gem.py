"""Games and tasks of GEM (gem-llm)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.data import check_flags, check_step_result, reward_of
from shoal.core.errors import ConfigError, format_error
from shoal.envs.adapters.library import LibraryEnv, PrivateRandom, library
from shoal.envs.text import Action, Outcome, check_numbers


@dataclass(frozen=True)
class GemConfig:
    """Settings of `GemEnv`."""

    id: str = "game:GuessTheNumber-v0-easy"
    """Id of an env, as in gem.make."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of gem.make."""
    boxed: bool = True
    r"""Put the action into `\\boxed{…}`, where GEM's games look for it, unless it holds one already."""
    keep_rules: bool = True
    """Begin every observation with what the env said first, and not only the first one."""
    success_reward: float = 1.0
    """Reward of the last step from which an episode counts as a success."""
    max_steps: int = 100
    """Steps after which an episode is truncated."""
    invalid_penalty: float = 0.0
    """Reward of a response without a usable action."""

    def __post_init__(self) -> None:
        check_numbers(self, max_steps=1)


class GemEnv(LibraryEnv[GemConfig]):
    """An env of GEM; it is seeded by the episode, and its draws are private."""

    Config = GemConfig
    package = "gem"
    pip = "gem-llm"
    pattern = "<answer>"
    seed_stream = "GemEnv"
    instructions = "Do the task. Write your answer as its rules ask."

    def __init__(self, config: GemConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        with self._random.active():
            try:
                self._inner = library("gem").make(self.config.id, **self.config.kwargs)
            except (
                Exception
            ) as error:  # it raises what it likes: ValueError, LookupError of words that are missing
                reason = format_error(error).strip().partition("\n")[0]
                raise ConfigError(f"gem cannot make {self.config.id!r}: {reason}") from error

    def _start(self, rng: np.random.Generator) -> None:
        seed = int(rng.integers(2**31))
        self._random.seed(seed)
        with self._random.active():
            seen, info = check_step_result(self._inner.reset(seed=seed), "reset")
        self._rules, self._latest = str(seen).strip(), ""
        self._hint = self._suffix(info)

    def _advance(self, action: Action) -> Outcome:
        if action == self.invalid_action:
            return self._nothing_done()
        text = str(action)
        if self.config.boxed and "\\boxed{" not in text:
            text = f"\\boxed{{{text}}}"
        with self._random.active():
            seen, reward, terminated, truncated, info = check_step_result(self._inner.step(text), "step")
        check_flags(terminated, truncated)
        paid, over = reward_of(reward), bool(terminated or truncated)
        before, self._latest = self._latest, str(seen).strip()
        self._hint = "" if over else self._suffix(info)
        won = over and paid >= self.config.success_reward
        return Outcome(paid, bool(terminated), won, self._latest != before, truncated=bool(truncated))

    @staticmethod
    def _suffix(info: Any) -> str:
        """What GEM would put behind an observation: the board, or that it is the agent's turn."""
        return str(info.get("suffix", "")).strip() if isinstance(info, dict) else ""

    @property
    def draws_actions(self) -> bool:
        """Whether the env has a `sample_random_action` of its own."""
        own = type(self._inner.unwrapped).sample_random_action
        return own is not library("gem.core").Env.sample_random_action

    def random_action(self, rng: np.random.Generator) -> str | None:
        """What the env's own `sample_random_action` gives, if it has one."""
        if not self.draws_actions:
            return None
        draws = PrivateRandom()  # others than those of the episode, which goes on as if nothing was asked
        draws.seed(int(rng.integers(2**31)))
        with draws.active():
            return str(self._inner.sample_random_action())

    def observe(self) -> str:
        """The rules and what the env said last."""
        first = not self._latest or self.config.keep_rules
        return "\n".join(filter(None, [self._rules if first else "", self._latest, self._hint]))
