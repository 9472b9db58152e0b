"""Any Gymnasium env whose state can be put back as a world for skills: say what its features are.

    class Rooms(GymnasiumWorld):
        features = Features("rooms", ("key", "door"), {}, frozenset())

        def make(self):
            return gymnasium.make("Rooms-v0")

        def read(self, env):
            return [env.unwrapped.has_key, env.unwrapped.door_open]

Nothing more is needed where an env is a function of its seed and its actions: a state is then kept as those, and put
back by playing them again. An env that can do better overrides `freeze` and `thaw`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Discrete, flatdim, flatten

from shoal.core.data import check_flags, reward_of
from shoal.core.errors import ConfigError
from shoal.skills.spec import Features
from shoal.skills.worlds.world import Bank, Bools, Floats, Ints

MOST_STEPS = 2000  # actions that a state may be away from its reset
OVER = "shoal:over"  # the array that says whether an env was over, where `freeze` cannot tell


class GymnasiumWorld:
    """`lanes` envs of one kind; see `shoal.skills.worlds.world.World`.

    A subclass has `features`, `make` and `read`, and may have `moves`, `wait`, `training`, `death`, `picture`.
    Rewards of the env are not used: a skill says what pays.
    """

    features: ClassVar[Features]
    moves: ClassVar[Sequence[int]] = ()  # actions that only walk and turn; by default all
    wait: ClassVar[int] = 0  # an action that does no harm
    most_lanes: ClassVar[int | None] = 64
    training: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "num_envs": 32,
            "num_steps": 64,
            "layer_size": 64,
            "evaluation_episodes": 128,
            "bank_worlds": 128,
            "patience_frames": 1e5,
            "anneal_frames": 3e5,
        }
    )  # fmt: skip
    fresh_is_cheap = False
    feature_columns: ClassVar[Mapping[str, int]] = MappingProxyType({})

    def make(self) -> Env[Any, Any]:
        """A new env."""
        raise NotImplementedError

    def read(self, env: Env[Any, Any]) -> Sequence[float]:
        """The values of `features.names` now."""
        raise NotImplementedError

    def death(self, env: Env[Any, Any], reward: float, terminated: bool) -> bool:
        """Whether the agent died; by default an env that terminates unrewarded."""
        return terminated and reward <= 0

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self._envs = [self.make() for _ in range(lanes)]
        actions, space = self._envs[0].action_space, self._envs[0].observation_space
        if not isinstance(actions, Discrete):
            raise ConfigError(
                f"a world for skills needs Discrete actions, {type(self).__name__} has {actions}"
            )
        self._space, self._first = space, int(actions.start)
        self.n_actions, self.obs_size = int(actions.n), int(flatdim(space))
        self.action_names = tuple(str(action) for action in range(self.n_actions))
        if not self.moves:
            self.moves = tuple(range(self.n_actions))  # type: ignore[misc]
        self._observations: Floats = np.zeros((lanes, self.obs_size), np.float32)
        self._values: Floats = np.zeros((lanes, len(self.features.names)), np.float32)
        self._seeds = np.zeros(lanes, np.int64)
        self._played: list[list[int]] = [[] for _ in range(lanes)]
        self._over = np.zeros(lanes, np.bool_)
        self._replayed = np.zeros(lanes, np.bool_)  # put back by playing again, which has to stay short

    def freeze(self, lane: int) -> dict[str, Any]:
        """A lane's state as arrays whose shapes are the same for every state."""
        played = np.full(MOST_STEPS, -1, np.int16)
        played[: len(self._played[lane])] = self._played[lane]
        return {"seed": self._seeds[lane], "played": played}

    def thaw(self, lane: int, state: Mapping[str, Any]) -> Any:
        """Put a lane into a state that `freeze` gave; returns the observation there."""
        played = [int(action) for action in state["played"] if action >= 0]
        env, seed = self._envs[lane], int(state["seed"])
        if (
            self._seeds[lane] == seed
            and played[: len(self._played[lane])] == self._played[lane]
            and self._played[lane]
        ):
            ahead, observation = played[len(self._played[lane]) :], self._observations[lane]
        else:
            ahead, observation = played, env.reset(seed=seed)[0]
        for action in ahead:
            observation, _, terminated, truncated, _ = env.step(self._first + action)
            check_flags(terminated, truncated)
            self._over[lane] = terminated or truncated
        self._seeds[lane], self._played[lane] = seed, played
        return observation

    def fresh(self, count: int, rng: np.random.Generator) -> Bank:
        """New worlds: seeds, with nothing played yet."""
        seeds = rng.integers(1, 2**31 - 1, count)
        if not self._copied():
            return Bank({"seed": seeds, "played": np.full((count, MOST_STEPS), -1, np.int16)})
        saved = self._seeds[0], self._played[0], self._envs[0]
        self._envs[0] = self.make()
        states: list[Mapping[str, Any]] = []
        for seed in seeds:
            self._seeds[0], self._played[0] = int(seed), []
            self._envs[0].reset(seed=int(seed))  # from which the state is copied
            states.append({**self.freeze(0), OVER: np.False_})
        self._envs[0].close()
        self._seeds[0], self._played[0], self._envs[0] = saved
        return _bank(states)

    def load(self, bank: Bank, rows: Ints, mask: Bools) -> None:
        """Put state `rows[i]` of `bank` into lane `i` where `mask[i]`."""
        for lane in np.flatnonzero(mask):
            state = {key: array[rows[lane]] for key, array in bank.arrays.items()}
            if self._over[lane]:  # nothing is played on from an end
                self._over[lane], self._played[lane] = False, []
            before, over = self._played[lane], state.pop(OVER, None)
            self._see(int(lane), self.thaw(int(lane), state))
            self._replayed[lane] = self._played[lane] is not before
            if over is not None:
                self._over[lane] = over

    def save(self) -> Bank:
        """The states of all lanes."""
        states: list[dict[str, Any]] = [self.freeze(lane) for lane in range(self.lanes)]
        if self._copied():
            states = [{**state, OVER: over} for state, over in zip(states, self._over, strict=True)]
        return _bank(states)

    def _copied(self) -> bool:
        """Whether states are copied from the env, and not played again."""
        return type(self).freeze is not GymnasiumWorld.freeze

    def observe(self) -> Floats:
        """`[lanes, obs_size]`, flattened as Gymnasium does."""
        return self._observations.copy()

    def values(self) -> Floats:
        """`[lanes, features]`, copied."""
        return self._values.copy()

    def step(self, actions: Ints, rng: np.random.Generator) -> Bools:
        """Act in every lane; one whose env is over, or too far from its reset, stays where it is."""
        died = np.zeros(self.lanes, np.bool_)
        for lane, action in enumerate(actions):
            if self._over[lane] or (self._replayed[lane] and len(self._played[lane]) >= MOST_STEPS):
                continue
            observation, reward, terminated, truncated, _ = self._envs[lane].step(self._first + int(action))
            check_flags(terminated, truncated)
            if self._replayed[lane]:
                self._played[lane] = [*self._played[lane], int(action)]
            self._see(lane, observation)
            died[lane] = self.death(self._envs[lane], reward_of(reward), bool(terminated))
            self._over[lane] = terminated or truncated
        return died

    def _see(self, lane: int, observation: Any) -> None:
        if not (isinstance(observation, np.ndarray) and observation.shape == self._observations[lane].shape):
            observation = flatten(self._space, observation)
        self._observations[lane] = observation
        values = self.read(self._envs[lane])
        if len(values) != len(self.features.names):  # one would be taken for all
            names = ", ".join(self.features.names)
            raise ConfigError(
                f"{type(self).__name__}.read must give a number for each of {names}, got {values}"
            )
        self._values[lane] = values


def _bank(states: Sequence[Mapping[str, Any]]) -> Bank:
    return Bank({key: np.stack([np.asarray(state[key]) for state in states]) for key in states[0]})
