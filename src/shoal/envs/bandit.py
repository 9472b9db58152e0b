"""A two-armed bandit, played once; which arm has which number depends on the seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError
from shoal.envs.actions import Projection
from shoal.envs.spaces import FreeText
from shoal.envs.text import Action, Outcome, TextEnv, check_numbers


@dataclass(frozen=True)
class BanditConfig:
    """Settings of `BanditEnv`; the high arm pays more on average: 0.25 against 0.1 by default."""

    lo_arm_name: str = "phoenix"
    hi_arm_name: str = "dragon"
    lo_arm_score: float = 0.1
    """What the low arm always pays."""
    hi_arm_loscore: float = 0.0
    """What the high arm pays usually."""
    hi_arm_hiscore: float = 1.0
    """What the high arm pays with probability `hi_arm_hiscore_prob`."""
    hi_arm_hiscore_prob: float = 0.25
    max_steps: int = 1
    """Steps after which an episode is truncated; a pull always ends it, an invalid action does not."""
    invalid_penalty: float = 0.0
    """Reward of a response without a usable action."""

    def __post_init__(self) -> None:
        names = [self.lo_arm_name, self.hi_arm_name]
        if len({name.strip().casefold() for name in names}) < 2 or not all(name.strip() for name in names):
            raise ConfigError(f"the arms must have two different names, got {names}")
        if {"1", "2"} & {name.strip() for name in names}:
            raise ConfigError(f"the names of the arms must not be the numbers 1 and 2, got {names}")
        if not 0 <= self.hi_arm_hiscore_prob <= 1:
            raise ConfigError(f"hi_arm_hiscore_prob must be in [0, 1], got {self.hi_arm_hiscore_prob}")
        check_numbers(self, max_steps=1)


class BanditEnv(TextEnv[BanditConfig]):
    """Pull one of two arms, once.

    Success is pulling the arm that pays more on average. The payout of both arms is drawn at the start:
    members of a group that pull the same arm get the same. An arm can be named by its number or by its
    name.
    """

    Config = BanditConfig
    seed_stream = "BanditEnv"
    projection = Projection(lookup={"1": 1, "2": 2})
    observation_space = FreeText(512, min_length=1)

    def __init__(self, config: BanditConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        names = (self.config.lo_arm_name, self.config.hi_arm_name)
        self.instructions = (
            f"There are two slot machines, {names[0]} and {names[1]}. "
            "Their names hint at how they pay, and one pays more on average. Pull one arm, 1 or 2, once."
        )
        # Of this env alone: a shared lookup would rename the arms of every other env.
        self._numbered = [
            Projection(lookup={"1": 1, "2": 2, first.strip(): 1, second.strip(): 2})
            for first, second in (names, names[::-1])
        ]
        self.observation_space = FreeText(64 + sum(map(len, names)), min_length=1)

    def _start(self, rng: np.random.Generator) -> None:
        config = self.config
        self._high = 1 + int(rng.integers(2))
        wins = rng.random() < config.hi_arm_hiscore_prob
        payouts = (config.lo_arm_score, config.hi_arm_hiscore if wins else config.hi_arm_loscore)
        order = (1, 0) if self._high == 1 else (0, 1)
        self._names = [(config.lo_arm_name, config.hi_arm_name)[arm] for arm in order]
        self._payouts = [payouts[arm] for arm in order]
        self._shown = f"1: {self._names[0]}\n2: {self._names[1]}"
        self.projection = self._numbered[order[0]]

    def _advance(self, action: Action) -> Outcome:
        if action == self.invalid_action:
            return Outcome(self.config.invalid_penalty, effective=False, valid=False)
        arm = int(action)
        reward = self._payouts[arm - 1]
        self._shown = f"{self._names[arm - 1]}: {reward} points"
        return Outcome(reward, terminated=True, success=arm == self._high)

    def available_actions(self) -> list[str]:
        """The numbers of the arms."""
        return ["1", "2"]

    def observe(self) -> str:
        """The arms by number; after the pull, what it paid."""
        return self._shown
