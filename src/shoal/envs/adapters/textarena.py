"""Single-player games of TextArena. Multi-player games need opponents and are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.errors import EnvError, format_error
from shoal.envs.actions import Projection
from shoal.envs.adapters.library import PrivateRandom, library
from shoal.envs.spaces import FreeText
from shoal.envs.text import Action, Outcome, TextEnv, check_numbers


@dataclass(frozen=True)
class TextArenaConfig:
    """Settings of `TextArenaEnv`."""

    id: str = "FrozenLake-v0"
    """Id of a single-player game, as in textarena.make."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of textarena.make."""
    keep_rules: bool = True
    """Begin every observation with what the game said first, and not only the first one."""
    success_reward: float = 1.0
    """Final reward from which an episode counts as a success."""
    max_steps: int = 100
    """Steps after which an episode is truncated."""
    invalid_penalty: float = 0.0
    """Reward of a response without a usable action."""

    def __post_init__(self) -> None:
        check_numbers(self, max_steps=1)


class TextArenaEnv(TextEnv[TextArenaConfig]):
    """A TextArena game for one player.

    Moves are written as the game asks, often in brackets.
    """

    Config = TextArenaConfig
    seed_stream = "TextArenaEnv"
    instructions = "Play the game. Write your move exactly as its rules ask, with any brackets they ask for."
    projection = Projection(parse=lambda text: text[:4_096] or None, invalid="")
    action_space = FreeText(65_536)
    observation_space = FreeText(262_144)

    def __init__(self, config: TextArenaConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        library("textarena")  # what is missing shows now and not in the first episode
        self._random = PrivateRandom()

    def _start(self, rng: np.random.Generator) -> None:
        seed = int(rng.integers(2**31))
        self._random.seed(seed)
        name = self.config.id.removesuffix("-raw")
        with self._random.active():
            try:
                # "-raw" leaves out the wrappers that repeat the whole history in every observation
                self._game = library("textarena").make(f"{name}-raw", **self.config.kwargs)
                self._game.reset(num_players=1, seed=seed)
            except Exception as error:  # of half an archive of words too, whatever reads it
                raise EnvError(
                    f"textarena cannot start {name!r} for one player: {format_error(error)}"
                ) from error
            self._rules, self._latest = self._news()

    def _advance(self, action: Action) -> Outcome:
        if action == self.invalid_action:
            return Outcome(self.config.invalid_penalty, effective=False, valid=False)
        with self._random.active():
            turn = self._game.state.turn
            over, _ = self._game.step(action=str(action))
            rewards, endings = self._game.close() if over else (None, {})
            # a move that is refused does not count as a turn; the one refusal too many ends the game
            refused = endings.get(0, {}).get("invalid_move", False) if over else self._game.state.turn == turn
            self._latest = "" if over else self._news()[1]
        given = (rewards or {}).get(0, 0.0)
        # three games of TextArena 0.7 swap reward and reason where the last refusal ends them
        reward = self.config.invalid_penalty if refused and isinstance(given, str) else float(given)
        if over:
            self._latest = f"The game is over, with a reward of {reward:g}."
        return Outcome(reward, over, over and reward >= self.config.success_reward, not refused, not refused)

    def _news(self) -> tuple[str, str]:
        """The rules and what else the game said since it was last asked; not the player's own words."""
        textarena = library("textarena")
        _, messages = self._game.get_observation()
        rules: list[str] = []
        rest: list[str] = []
        for speaker, text, *kind in messages:
            if speaker == textarena.GAME_ID:
                is_rules = kind[:1] == [textarena.ObservationType.PROMPT]
                (rules if is_rules else rest).append(text.strip("\n"))
        return "\n".join(rules), "\n".join(rest)

    def available_actions(self) -> list[str]:
        """A pattern: a move is free text."""
        return ["<move>"]

    def observe(self) -> str:
        """The rules and what the game said last."""
        keeps = self.config.keep_rules or not self._latest
        return f"{self._rules}\n{self._latest}".strip() if keeps else self._latest
