"""Environments of every space that play by their seed; here, so that workers need not import the test tools."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.vector.faulty import CountEnv

LETTERS = "abc XYZ\n\x00é☃𝄞\u2028"


class Coordinates(spaces.Space[Any]):
    """A custom space: a dict that no library knows."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return {"x": int(self.np_random.integers(9)), "tags": ["a"] * int(self.np_random.integers(3))}

    def contains(self, x: Any) -> bool:
        return isinstance(x, dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coordinates)

    __hash__ = None  # type: ignore[assignment]


class Scripted(gymnasium.Env[Any, Any]):
    """Observations, rewards, infos and ends drawn from the seed, changed by the actions."""

    def __init__(self, space: spaces.Space[Any], actions: spaces.Space[Any], length: int, talk: int) -> None:
        # copies: a space has its own random state, and threads would share it
        self.observation_space, self.action_space = copy.deepcopy(space), copy.deepcopy(actions)
        self.length, self.talk = length, talk

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.end = 0, int(self.np_random.integers(1, self.length + 1))
        self.cut = bool(self.np_random.integers(2))
        return self.observe(), self.told(options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t >= self.end
        reward = float(self.np_random.normal()) + len(str(action))
        return self.observe(), reward, over and not self.cut, over and self.cut, self.told(action)

    def observe(self) -> Any:
        if isinstance(self.observation_space, spaces.Text):
            size = int(self.np_random.integers(0, 90))
            return "".join(LETTERS[k] for k in self.np_random.integers(0, len(LETTERS), size))
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def told(self, action: Any) -> dict[str, Any]:
        everything = {
            "number": int(self.np_random.integers(9)),
            "action": repr(action),
            "nested": {"vector": self.np_random.normal(size=2), "flag": bool(self.np_random.integers(2))},
            "none": None,
        }
        return {key: everything[key] for key in list(everything)[: self.talk] if self.np_random.integers(3)}


NUMBERS: dict[str, Callable[[int], Any]] = {
    "float": float,
    "int": int,
    "bool": bool,
    "float64": np.float64,
    "float32": lambda k: np.float32(k / 3),
    "int64": np.int64,
    "int32": np.int32,
    "uint8": np.uint8,
    "float16": np.float16,
    "bool_": np.bool_,
    "complex": complex,
    "longdouble": np.longdouble,
    "text": str,
    "NaN": lambda k: float("nan") if k % 2 else 0.5,
}


class Numbers(gymnasium.Env[Any, Any]):
    """Tells numbers of the given kinds: after t steps those of `script[t % len(script)]`.

    Those of env `odd` come in another order.
    """

    observation_space: spaces.Space[Any] = spaces.Box(-9, 9, (2,))
    action_space: spaces.Space[Any] = spaces.Discrete(4)

    def __init__(
        self, number: int, script: Sequence[dict[str, str]], length: int, odd: int, text: bool = False
    ) -> None:
        self.number, self.script, self.length, self.odd = number, script, length, odd
        self.t = self.all = 0
        if text:
            self.observation_space = spaces.Text(9)

    def observe(self) -> Any:
        if isinstance(self.observation_space, spaces.Text):
            return f"{self.number} {self.t}"
        return np.full(2, self.t, np.float32)

    def told(self) -> dict[str, Any]:
        self.all += 1
        kinds = self.script[self.all % len(self.script)]
        names = reversed(kinds) if self.number == self.odd and self.all % 5 == 0 else kinds
        return {name: NUMBERS[kinds[name]](10 * self.number + self.t) for name in names}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), self.told()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observe(), 1.0, self.t >= self.length, False, self.told()


class SlowEnv(CountEnv):
    """Every step takes some seconds, or those with one action."""

    def __init__(self, seconds: float, slow: int | None = None) -> None:
        super().__init__()
        self.seconds, self.slow = seconds, slow

    def misbehave(self, action: Any) -> None:
        if self.slow in (None, int(action)):
            time.sleep(self.seconds)


class WordEnv(gymnasium.Env[Any, Any]):
    observation_space = spaces.Text(100)
    action_space = spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.seed, self.t = seed, 0
        return f"start {seed}", {"success": False}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return f"{action!r} ☃", 0.5, self.t == 3, False, {"success": self.t == 3}

    def available_actions(self) -> list[str]:
        return [f"go {self.t}"]

    def render(self) -> Any:
        return f"<{self.t}>"


def same(a: Any, b: Any) -> bool:
    """Exactly equal, types and order of keys included."""
    if isinstance(a, np.ndarray) and a.dtype == object:
        return isinstance(b, np.ndarray) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class TakingEnv(CountEnv):
    """Takes its options out of what it is given, as wrappers do."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0], {"level": (options or {}).pop("level", 0)}


class TellingEnv(CountEnv):
    """Tells what it was made to tell."""

    def __init__(self, told: Any) -> None:
        super().__init__()
        self.told = told

    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], {"a": self.told})


class Reuses(gymnasium.Env[Any, Any]):
    """Gives the same array, list and dict each time, changed; keeps and changes the actions it is given."""

    action_space = spaces.Box(-9, 9, (1,), np.float32)

    def __init__(self, size: int) -> None:
        self.observation_space = spaces.Box(-9, 9, (size,), np.float32)
        self.seen, self.log, self.taken = np.zeros(size, np.float32), [], []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seen[:] = options["start"].pop("at", -1) if options else 0
        self.log.clear()
        return self.seen, {"log": self.log}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        self.log.append(sum(float(one[0]) for one in self.taken))
        self.seen += 1
        action *= 2
        return self.seen, 0.0, len(self.log) == 3, False, {"log": self.log, "nested": {"seen": self.seen}}


class Tensor:
    """One of torch's, as far as it matters: its number can be changed in place."""

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> Tensor:
        return self

    def clone(self) -> Tensor:
        return Tensor(self.number)


class Rows(list[Any]):
    """A list of another class."""


class Shares(gymnasium.Env[Any, Any]):
    """All envs of a process give the same observation, reward and info, which stand on the class, changed."""

    observation_space, action_space = Coordinates(), spaces.Discrete(2)
    seen: ClassVar[dict[str, Any]] = {}
    paid = np.zeros(1)
    told: ClassVar[dict[str, Any]] = {
        "nested": OrderedDict(list=[], queue=deque(maxlen=2), tensor=Tensor(0)),
        "more": [Rows([bytearray(1), np.array([[0], None], object)]), ([0], {0})],
    }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seed, self.t = seed or self.seed + 1, 0
        return self.look()

    def look(self) -> tuple[Any, dict[str, Any]]:
        self.seen["x"] = self.told["number"] = self.seed + self.t
        self.told["nested"]["list"][:] = [self.seed, self.t]
        self.told["nested"]["queue"].extend([self.seed, self.t])
        self.told["nested"]["tensor"].number = self.told["more"][0][0][0] = self.seed + self.t
        self.told["more"][0][1][0][0] = self.told["more"][1][0][0] = self.seed + self.t
        self.told["more"][1][1].clear()
        self.told["more"][1][1].add(self.t)
        return self.seen, self.told

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.t += 1
        obs, info = self.look()
        self.paid[:] = self.seed
        return obs, self.paid, self.t == 2, False, info


def look(env: Any) -> Any:
    return env.unwrapped.look()
