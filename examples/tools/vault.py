"""A vault that only tools open: a record names two numbers, their product is a code, and the code opens one door."""

import hashlib
from typing import Literal

from gymnasium.spaces import Discrete

from shoal.envs import TextEnv
from shoal.envs.actions import Projection, ToolCall
from shoal.envs.text import Outcome

Town = Literal["Bern", "Cork", "Graz", "Kiel", "Lyon", "Oslo", "Pisa", "Riga"]
Thing = Literal["axe", "bow", "cup", "fan", "hat", "jar", "key", "map"]
DOORS = ["black", "blue", "gold", "gray", "green", "pink", "red", "white"]


def secret(text, many):
    """A number below `many` that nobody guesses from the text."""
    return hashlib.sha256(text.encode()).digest()[0] % many


def search(town: Town, thing: Thing, day: int) -> str:
    """Find the two numbers in the record of a thing in a town on a day."""
    return f"{secret(f'{town} {thing} {day} first', 10)} {secret(f'{town} {thing} {day} second', 10)}"


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Vault(TextEnv):
    """Open the right door of eight at the first try; the doors are asked at the MCP server in `server.py`."""

    instructions = "Search the record, multiply its numbers, ask for the door, and open it."
    action_space = Discrete(8)
    projection = Projection(lookup={word: number for number, word in enumerate(DOORS)}, invalid=8)
    invalid_action = 8
    max_steps = 1

    def _start(self, rng):
        self.town, self.thing = rng.choice(Town.__args__), rng.choice(Thing.__args__)
        self.day = int(rng.integers(100))

    def observe(self):
        """What is asked for."""
        return f'"{self.town}" "{self.thing}" {self.day}'

    def _advance(self, action):
        right = action < 8 and DOORS[action] == self._way()[-1]
        return Outcome(float(right), terminated=True, success=right)

    def _way(self):
        a, b = map(int, search(self.town, self.thing, self.day).split())
        found = ToolCall("search", {"town": str(self.town), "thing": str(self.thing), "day": self.day})
        door = DOORS[secret(f"code {a * b}", 8)]
        return found, ToolCall("multiply", {"a": a, "b": b}), ToolCall("door", {"code": a * b}), door

    def expert_action(self):
        """The calls that lead to the door, and the door."""
        return self._way()

    def random_action(self, rng):
        """Random calls, and a random door: nothing is learned from them but how calls are written."""
        a, b, day = map(int, rng.integers((10, 10, 100)))
        found = {"town": str(rng.choice(Town.__args__)), "thing": str(rng.choice(Thing.__args__)), "day": day}
        calls = [
            ToolCall("search", found),
            ToolCall("multiply", {"a": a, "b": b}),
            ToolCall("door", {"code": a}),
        ]
        return *rng.permutation(calls)[: rng.integers(4)], str(rng.choice(DOORS))
