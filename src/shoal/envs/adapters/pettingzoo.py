"""A turn game of PettingZoo (AEC) as an environment of one agent: opponents play the other seats."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from shoal.core.errors import ConfigError, EnvError
from shoal.core.seeding import stream
from shoal.envs.adapters.library import library
from shoal.envs.opponents import MOST_MOVES, Opponent, seat_of
from shoal.envs.spaces import own_space
from shoal.envs.text import build_config


class TurnGameEnv(gymnasium.Env[Any, Any]):
    """A game of PettingZoo in which agents take turns, from one seat.

    A step makes the agent's move and those of the others, until it is the agent's turn again or the game is over. The
    reward is what its seat got since its last move. `info["action_mask"]` says which actions are legal, where the game
    says so; `info["success"]` whether the game was won: its last reward is positive.

    Args:
        id: the module of the game, such as `pettingzoo.classic.connect_four_v3`, or `module:function` that makes one.
        opponent: settings of `Opponent`; at random if not given.
        seat: the agent's seat, from 0; drawn for each episode if not given.
        kwargs: arguments of the game.
        render_mode: one of the game's, or "ansi" for a board of two planes: X is the agent's, O the others'.
    """

    def __init__(
        self,
        id: str,
        *,
        opponent: Mapping[str, Any] | Opponent | None = None,
        seat: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.game, own = _made(id, kwargs or {}, render_mode)
        given = opponent if isinstance(opponent, Opponent) else build_config(Opponent, opponent or {})
        self._choose, self.seat = given.ready(), seat
        self.seats = list(self.game.possible_agents)
        seat_of(seat, len(self.seats), np.random.default_rng(0))
        seen = [self.game.observation_space(agent) for agent in self.seats]
        acts = [self.game.action_space(agent) for agent in self.seats]
        if any(space != seen[0] for space in seen) or any(space != acts[0] for space in acts):
            raise ConfigError(f"the seats of {id!r} differ in what they see or do")
        self._masked = isinstance(seen[0], spaces.Dict) and {*seen[0].spaces} == {
            "observation",
            "action_mask",
        }
        self.observation_space = own_space(seen[0]["observation"] if self._masked else seen[0])
        self.action_space = own_space(acts[0])
        self._draws = render_mode == "ansi" and "ansi" not in own
        self.metadata = {"render_modes": own if "ansi" in own or not self._is_board() else [*own, "ansi"]}
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(
                f"{id!r} has no render_mode {render_mode!r}, only {self.metadata['render_modes']}"
            )
        self.render_mode = render_mode
        title = id.partition(":")[0].rpartition(".")[2].rpartition("_v")[0].replace("_", " ")
        marks = " On the board X is yours, O the others'." if self._is_board() else ""
        self.instructions = f"You play {title}. An action is the number of a move.{marks}"

    def _is_board(self) -> bool:
        """Whether an observation is a board, `[rows, columns, 2]`: where the agent has something, and the others."""
        space = self.observation_space
        shaped = isinstance(space, spaces.Box) and len(space.shape) == 3 and space.shape[2] == 2
        return shaped and bool((space.low == 0).all() and (space.high == 1).all())  # type: ignore[attr-defined]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a game; the others move first where they sit in front of the agent."""
        super().reset(seed=seed)
        seed = int(self.np_random.integers(2**31))
        self._rng = stream(seed, "opponent")
        self.game.reset(seed=seed, options=options)
        self._me = self.seats[seat_of(self.seat, len(self.seats), stream(seed, "seat"))]
        seen, _, _, _, info = self._until_my_turn()
        return seen, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make the agent's move, and those of the others until it is its turn again."""
        self.game.step(action.item() if isinstance(action, np.generic) else action)
        seen, reward, terminated, truncated, info = self._until_my_turn()
        over = terminated or truncated
        return seen, reward, terminated, truncated, {"success": bool(over and reward > 0), **info}

    def _until_my_turn(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Let the others move; what the agent's seat sees then."""
        for _ in range(MOST_MOVES):
            seen, reward, terminated, truncated, info = self.game.last()
            shown, mask = (seen["observation"], seen["action_mask"]) if self._masked else (seen, None)
            mask = info.get("action_mask") if mask is None else mask
            if self.game.agent_selection == self._me:
                self._shown = shown
                info = info if mask is None else {**info, "action_mask": mask}
                return shown, float(reward), bool(terminated), bool(truncated), info
            move = None  # as PettingZoo wants it of a seat that is out
            if not (terminated or truncated):
                move = self._choose(shown, self._legal(mask), self._rng)
            self.game.step(move)
        raise EnvError(f"the other seats made {MOST_MOVES} moves in a row")

    def _legal(self, mask: Any) -> Any:
        if not isinstance(self.action_space, spaces.Discrete):
            return ()
        start = int(self.action_space.start)
        return (
            range(start, start + int(self.action_space.n)) if mask is None else np.flatnonzero(mask).tolist()
        )

    def render(self) -> Any:
        """What the game draws; or the board, a line a row, under the numbers of moves where they are columns."""
        if not self._draws:
            return self.game.render()
        columns = range(self._shown.shape[1])
        marks = np.where(self._shown[..., 0], "X", np.where(self._shown[..., 1], "O", "."))
        are_moves = isinstance(self.action_space, spaces.Discrete) and self.action_space.n == len(columns)
        head = [" ".join(map(str, columns))] if are_moves else []
        return "\n".join([*head, *(" ".join(row) for row in marks)])

    def close(self) -> None:
        """Close the game."""
        self.game.close()


def _made(id: str, kwargs: Mapping[str, Any], render_mode: str | None) -> tuple[Any, list[str]]:
    """The game, and the render modes that it has of its own.

    Raises:
        ConfigError: there is none, it does not take these arguments, or it has no turns.
    """
    library("pettingzoo")
    path, _, name = id.partition(":")
    try:
        with warnings.catch_warnings():  # that ids of a registry will replace modules some day
            warnings.simplefilter("ignore", DeprecationWarning)
            make = getattr(importlib.import_module(path), name or "env")
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{id!r} is no game of PettingZoo: {error}") from error
    try:
        game = make(**kwargs)
        modes = list((getattr(game, "metadata", None) or {}).get("render_modes", ()))
        if render_mode in modes:
            game = make(**kwargs, render_mode=render_mode)
    except TypeError as error:
        raise ConfigError(f"{id!r} cannot be made: {error}") from error
    if not hasattr(game, "agent_iter"):
        raise ConfigError(
            f"{id!r} is no game in which agents take turns: all act at once in it, which is for "
            "shoal.vector.PettingZooVectorEnv"
        )
    return game, modes
