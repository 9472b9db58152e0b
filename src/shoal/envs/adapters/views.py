"""Well-known worlds of symbols in words: MiniGrid and BabyAI as what the agent sees, NetHack as its screen.

The adapter `gymnasium` puts these around an env by its class, unless it shows values. None imports the library.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np

from shoal.core.seeding import stream
from shoal.envs.spaces import ANY_TEXT, FreeText


class TextView(gymnasium.Wrapper[str, Any, Any, Any]):
    """Shows an env as text; with words for its actions, and its rules."""

    action_names: tuple[str, ...] = ()
    instructions = ""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = FreeText(ANY_TEXT)

    @property
    def max_steps(self) -> Any:
        """The limit that the env inside has itself."""
        return getattr(self.env.unwrapped, "max_steps", None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Begin an episode."""
        seen, info = self.env.reset(seed=seed, options=options)
        return self.written(seen), info

    def step(self, action: Any) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        """Act once."""
        seen, reward, terminated, truncated, info = self.env.step(action)
        info = {"success": self.solved(float(reward), terminated, info), **info}
        return self.written(seen), reward, terminated, truncated, info

    def solved(self, reward: float, terminated: bool, info: dict[str, Any]) -> bool:
        """Whether the task is solved with this step."""
        return terminated and reward > 0

    def written(self, seen: Any) -> str:
        """An observation in words."""
        raise NotImplementedError


class MiniGridView(TextView):
    """MiniGrid and BabyAI: the mission, what lies in the field of view and where, and what is carried.

    Walls are told where they are straight ahead, and beside the agent.
    """

    instructions = (
        "You move in a grid of cells and see only what is in front of you. Fulfil the mission. Places are told from "
        "where you stand and look. What you pick up, toggle or drop is in the cell right in front of you."
    )
    words = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done")
    kinds: ClassVar = dict(enumerate(
        ("unseen", "nothing", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
    ))  # fmt: skip
    empty: ClassVar = {"unseen", "nothing", "wall", "floor", "agent"}
    colours: ClassVar = ("red", "green", "blue", "purple", "yellow", "grey")
    doors: ClassVar = ("open", "closed", "locked")

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.action_names = self.words[: env.action_space.n]  # type: ignore[attr-defined]

    def written(self, seen: Any) -> str:
        """The mission and the field of view, `[width, depth, 3]` of kind, colour and state; the agent looks up."""
        view = np.asarray(seen["image"])
        width, depth = view.shape[:2]
        here, front = width // 2, depth - 1
        found = []
        for x, y in np.ndindex(width, depth):
            if (x, y) != (here, front) and self._kind(view[x, y]) not in self.empty:
                place = front - y, x - here
                found.append((place[0] + abs(place[1]), place, self._thing(view[x, y])))
        lines = [f"Mission: {seen['mission']}"]
        lines += [f"You see {thing}, {_place(*place)}." for _, place, thing in sorted(found)]
        ways = {
            "in front of you": [view[here, y] for y in range(front - 1, -1, -1)],
            "to your left": [view[x, front] for x in range(here - 1, -1, -1)],
            "to your right": [view[x, front] for x in range(here + 1, width)],
        }
        for where, cells in ways.items():
            walls = [steps for steps, cell in enumerate(cells, 1) if self._kind(cell) == "wall"]
            if walls:
                lines.append(f"There is a wall {_steps(walls[0])} away, {where}.")
        carried = view[here, front]
        if self._kind(carried) not in self.empty:
            lines.append(f"You carry {self._thing(carried)}.")
        return "\n".join(lines)

    def _kind(self, cell: Any) -> str:
        return str(self.kinds.get(int(cell[0]), "thing"))

    def _thing(self, cell: Any) -> str:
        kind, colour = self._kind(cell), self.colours[cell[1]]
        if kind in ("goal", "lava"):
            return "the goal" if kind == "goal" else "lava"
        state = f"{self.doors[cell[2]]} " if kind == "door" else ""
        return f"{'an' if state.startswith('o') else 'a'} {state}{colour} {kind}"


def _place(ahead: int, right: int) -> str:
    parts = [f"{_steps(ahead)} ahead"] if ahead else []
    if right:
        parts.append(f"{_steps(abs(right))} to the {'right' if right > 0 else 'left'}")
    return " and ".join(parts)


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


class NetHackView(TextView):
    """NetHack (NLE): its screen of 24 lines, without the empty ones. The seed of `reset` seeds the game too.

    NLE's own `reset(seed=)` leaves the game random.
    """

    instructions = "You play NetHack. You are the @ on the screen; the lines below tell how you are."
    directions: ClassVar = {
        "N": "north", "E": "east", "S": "south", "W": "west",
        "NE": "northeast", "SE": "southeast", "SW": "southwest", "NW": "northwest",
    }  # fmt: skip

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        actions = list(env.unwrapped.actions)  # type: ignore[attr-defined]
        self.action_names = tuple(map(self._word, actions))

    def _word(self, action: Any) -> str:
        kind, name = type(action).__name__, action.name
        if name in self.directions:
            return ("far " if kind.endswith("Longer") else "") + self.directions[name]
        return str(name).lower().replace("_", " ")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Begin a game that depends on the seed alone."""
        if seed is not None:
            core, display = stream(seed, "nethack").integers(2**31, size=2).tolist()
            self.env.unwrapped.seed(core=core, disp=display, reseed=False)  # type: ignore[attr-defined]
        return super().reset(seed=seed, options=options)

    def solved(self, reward: float, terminated: bool, info: dict[str, Any]) -> bool:
        """Whether the task's end was reached, or the player ascended."""
        status = getattr(info.get("end_status"), "name", "")
        return status == "TASK_SUCCESSFUL" or bool(info.get("is_ascended"))

    def written(self, seen: Any) -> str:
        """The characters of the terminal, `[24, 80]`."""
        lines = [bytes(row).decode("latin-1").rstrip() for row in np.asarray(seen["tty_chars"])]
        return "\n".join(line for line in lines if line)


VIEWS = {"minigrid": (MiniGridView, "mission"), "nle": (NetHackView, "tty_chars")}
"""By the package of an env's class, or of a base of it: the view, and the part of an observation that it needs."""


def as_text(env: gymnasium.Env[Any, Any]) -> TextView | None:
    """The env in words, if it is of a package whose words are known and shows what they are made of."""
    space = getattr(env, "observation_space", None)
    parts = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {}
    packages = [kind.__module__.partition(".")[0] for kind in type(env.unwrapped).__mro__]
    found = (VIEWS[package] for package in packages if package in VIEWS)
    return next((view(env) for view, needed in found if needed in parts), None)
