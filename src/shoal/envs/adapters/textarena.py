"""Games of TextArena: for one player, or for several, whose other seats opponents play."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.errors import EnvError, format_error
from shoal.core.seeding import stream
from shoal.envs.adapters.library import LibraryEnv, library
from shoal.envs.opponents import MOST_MOVES, Opponent, seat_of
from shoal.envs.text import Action, Outcome, check_numbers

_MOVE = re.compile(r"'(\[[^\[\]']{1,40}\])'")
"""A legal move, as the games list them: '[4]', '[row, column]'."""


@dataclass(frozen=True)
class TextArenaConfig:
    """Settings of `TextArenaEnv`."""

    id: str = "FrozenLake-v0"
    """Id of a game, as in textarena.make."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of textarena.make."""
    num_players: int = 1
    """Seats of the game."""
    seat: int | None = None
    """The agent's seat, from 0; drawn for each episode if not given."""
    opponent: Opponent = field(default_factory=Opponent)
    """Who plays the other seats. At random only in games that list the legal moves, as in '[4]'."""
    keep_rules: bool = True
    """Begin every observation with what the game said first, and not only the first one."""
    success_reward: float = 1.0
    """Final reward from which an episode counts as a success."""
    max_steps: int = 100
    """Steps after which an episode is truncated."""
    invalid_penalty: float = 0.0
    """Reward of a response without a usable action."""

    def __post_init__(self) -> None:
        check_numbers(self, max_steps=1, num_players=1)
        seat_of(self.seat, self.num_players, np.random.default_rng(0))


class TextArenaEnv(LibraryEnv[TextArenaConfig]):
    """A TextArena game, from one seat.

    Moves are written as the game asks, often in brackets. A step is the agent's move and those of the others, until it
    is the agent's turn again.
    """

    Config = TextArenaConfig
    package = "textarena"
    seed_stream = "TextArenaEnv"
    instructions = "Play the game. Write your move exactly as its rules ask, with any brackets they ask for."

    def __init__(self, config: TextArenaConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._choose = self.config.opponent.ready()

    def _start(self, rng: np.random.Generator) -> None:
        seed, players = int(rng.integers(2**31)), self.config.num_players
        self._random.seed(seed)
        self._me = seat_of(self.config.seat, players, stream(seed, "seat"))
        self._others = stream(seed, "opponent")
        self._rules: dict[int, str] = {}  # by seat
        self._moves: list[str] = []
        name = self.config.id.removesuffix("-raw")
        with self._random.active():
            try:
                # "-raw" leaves out the wrappers that repeat the whole history in every observation
                self._game = library("textarena").make(f"{name}-raw", **self.config.kwargs)
                self._game.reset(num_players=players, seed=seed)
            except Exception as error:  # of half an archive of words too, whatever reads it
                count = "one player" if players == 1 else f"{players} players"
                raise EnvError(
                    f"textarena cannot start {name!r} for {count}: {format_error(error)}"
                ) from error
        if self._until_my_turn():
            raise EnvError(f"textarena's {name!r} was over before the agent's first move")

    def _advance(self, action: Action) -> Outcome:
        if action == self.invalid_action:
            return self._nothing_done()
        over, refused = self._play(str(action))
        if not over:
            over = self._until_my_turn()
        rewards, endings = self._game.close() if over else (None, {})
        if over and endings.get(self._me, {}).get("invalid_move", False):
            refused = True  # a move that is refused does not count as a turn; the one too many ends the game
        given = (rewards or {}).get(self._me, 0.0)
        # three games of TextArena 0.7 swap reward and reason where the last refusal ends them
        reward = self.config.invalid_penalty if refused and isinstance(given, str) else float(given)
        if over:
            self._latest = f"The game is over, with a reward of {reward:g}."
        return Outcome(reward, over, over and reward >= self.config.success_reward, not refused, not refused)

    def _play(self, move: str) -> tuple[bool, bool]:
        """Make the move of whose turn it is; whether the game is over, and whether it refused the move."""
        with self._random.active():
            turn = self._game.state.turn
            over, _ = self._game.step(action=move)
        return bool(over), not over and self._game.state.turn == turn

    def _until_my_turn(self) -> bool:
        """Let the others move; whether the game ended by that."""
        for _ in range(MOST_MOVES):
            player, news = self._news()
            if player == self._me:
                self._latest = news
                return False
            move = self._choose((self._rules[player], news), self._moves, self._others)
            if self._play(str(move))[0]:
                return True
        raise EnvError(f"the other seats made {MOST_MOVES} moves in a row")

    def _news(self) -> tuple[int, str]:
        """Whose turn it is, and what the game said to that seat since it was last asked, but the rules.

        Not the seat's own words; in games of several players those of the others, which are part of the game.
        """
        textarena = library("textarena")
        with self._random.active():
            player, messages = self._game.get_observation()
        rules: list[str] = []
        rest: list[str] = []
        for speaker, text, *kind in messages:
            if speaker == textarena.GAME_ID:
                is_rules = kind[:1] == [textarena.ObservationType.PROMPT]
                (rules if is_rules else rest).append(text.strip("\n"))
            elif speaker != player and self.config.num_players > 1:
                rest.append(f"Player {speaker}: {text.strip()}")
        if rules or player not in self._rules:
            self._rules[player] = "\n".join(rules)
        self._moves = next((found for text in reversed(rest) if (found := _MOVE.findall(text))), [])
        return int(player), "\n".join(rest)

    @property
    def draws_actions(self) -> bool:
        """Whether the game lists its moves, which its first turn shows."""
        if not hasattr(self, "_rules"):
            self._start(np.random.default_rng(0))
        return bool(self._moves)

    def random_action(self, rng: np.random.Generator) -> str | None:
        """One of the moves that the game lists; None where it lists none."""
        return self._moves[int(rng.integers(len(self._moves)))] if self._moves else None

    def available_actions(self) -> list[str]:
        """The moves that the game lists; else a pattern: a move is free text."""
        return list(self._moves) or super().available_actions()

    def observe(self) -> str:
        """The rules and what the game said last."""
        rules = self._rules.get(self._me, "")
        keeps = self.config.keep_rules or not self._latest
        return f"{rules}\n{self._latest}".strip() if keeps else self._latest
