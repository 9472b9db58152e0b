"""A program as an environment: it plays an episode by asking the model itself, over HTTP, and says what it earned.

The program is a Python function, which gets its task and the address of the model, and returns its reward:
`agent(task, base_url)`. Or it is any command: it gets its task as one line of JSON on its standard input, finds the
model by `OPENAI_BASE_URL` or `ANTHROPIC_BASE_URL`, and prints its reward as JSON in its last line: `{"reward": 1.0}`,
with `"success": true` if it wants. It is played by a rollout (`shoal.rollout.programs`), never stepped.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gymnasium.spaces import Text

from shoal.core.errors import ConfigError, EnvError
from shoal.core.seeding import stream
from shoal.envs.actions import Projection
from shoal.envs.text import TextEnv, check_numbers


@dataclass(frozen=True)
class ProgramConfig:
    """Settings of a program, which is a function or a command."""

    function: str | None = None
    """A Python function as `module:name`, plain or `async`, that plays one episode and returns its reward, or
    `{"reward": …, "success": …}`. It may take `task`, `base_url` and `variables` (what SDKs read from the
    environment), and is called in a worker process that plays one episode after another."""
    command: tuple[str, ...] = ()
    """A command and its arguments, one process an episode; `{python}` stands for the Python that runs shoal."""
    tasks: str | None = None
    """A file with one JSON value a line; each group of episodes has one of them, drawn by its seed. Without a file the
    task is `{"seed": …}` alone."""
    folder: str | None = None
    """Where the program runs, and the module of a function is found; the current folder if not given."""
    max_steps: int = 64
    """Calls of the model, at most. The next one is refused, and the episode is truncated: it counts, with the reward
    that the program returns all the same, else 0."""
    on_error: float = 0.0
    """Reward of an episode whose program raises (a command: ends with a status other than 0) after the model answered
    it. It counts as an unsuccessful episode and is not played again."""
    parallel: bool = False
    """Whether it asks the model several things at a time. Its calls have no order in time then, for discounts and for
    the last one, at which the reward stands: they are put into one that does not depend on their arrival."""
    timeout: float = 600.0
    """Seconds of one episode; the program is killed then."""
    memory: int | None = None
    """MiB of address space for each process of the program (Linux); no limit if not given."""
    output: int = 1 << 20
    """Bytes that a command may print on its standard output."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.function):
            raise ConfigError(
                'give either function, such as "agent:play", or command, a list of words such as '
                '["{python}", "agent.py"]'
            )
        if self.function is not None and not re.fullmatch(r"[\w.]+(?<!\.py):\w+", self.function):
            raise ConfigError(f'function must be such as "agent:play", got {self.function!r}')
        check_numbers(self, max_steps=1, output=1)
        if not 0 < self.timeout < 1e9:
            raise ConfigError(f"timeout must be a positive number of seconds, got {self.timeout}")


class ProgramEnv(TextEnv[ProgramConfig]):
    """An agent program that asks the model by itself, through the gateway."""

    Config = ProgramConfig
    instructions = "A program asks."
    projection = Projection(parse=lambda text: text, invalid="")
    action_space, observation_space = Text(1 << 16), Text(1 << 16)

    @cached_property
    def tasks(self) -> list[Any]:
        """The tasks of the file; `[None]` without one.

        Raises:
            ConfigError: the file cannot be read, holds no JSON, or nothing.
        """
        if self.config.tasks is None:
            return [None]
        path = Path(self.config.folder or ".") / self.config.tasks
        try:
            lines = path.read_text("utf-8-sig").splitlines()
            found = [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"tasks: {path} must hold a JSON value in each line: {error}") from error
        if not found:
            raise ConfigError(f"tasks: {path} holds no task")
        return found

    def task(self, env_seed: int) -> dict[str, Any]:
        """What the program gets for a start state: its seed, and one of the tasks."""
        chosen = self.tasks[int(stream(env_seed, "task").integers(len(self.tasks)))]
        seed = env_seed % 2**31  # what any language's generators take
        return {"seed": seed} if chosen is None else {"seed": seed, "task": chosen}

    def _start(self, rng: np.random.Generator) -> NoReturn:
        raise EnvError("a program plays by itself, in a rollout: it cannot be reset and stepped")

    def _advance(self, action: Any) -> NoReturn:
        raise EnvError("a program plays by itself, in a rollout: it cannot be reset and stepped")

    def observe(self) -> str:
        """Nothing: the program sees its own observations."""
        return ""
