"""Other people's libraries: imported on first use, their draws from global generators reproducible and unnoticed.

`LibraryEnv` is the base of the text envs that play one of them, `OthersToolEnv` of those that act by its tools.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import threading
from abc import ABC
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from shoal.core.errors import MissingExtraError
from shoal.envs.actions import Projection
from shoal.envs.spaces import FreeText
from shoal.envs.text import Outcome, TextEnv
from shoal.envs.tool_env import ToolEnv
from shoal.envs.tools import Tool

C = TypeVar("C")

_ONE_AT_A_TIME = threading.RLock()


def library(module: str, package: str = "") -> Any:
    """The library of that name. No env keeps it: a module cannot be copied or sent elsewhere.

    Args:
        module: as it is imported.
        package: as it is installed, where that is another name.

    Raises:
        MissingExtraError: it is not installed, or not whole.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name, package = module.partition(".")[0], package or module.replace("_", "-")
        if isinstance(error, ModuleNotFoundError) and error.name in (name, module):
            message = f'{name} envs need a package: run pip install "{package}"'
        else:
            message = f"{package} is installed, but cannot be imported: {error}"
        raise MissingExtraError(message) from error


class PrivateRandom:
    """A state of `random` and `numpy.random` of one's own, switched in while a library is called.

    For an env of one's own that calls a library which draws from the global generators: `seed` it in `_start`, and
    call the library `with self.random.active():`. Within one process only one library call runs at a time: the
    generators it uses are the process's.
    """

    def __init__(self) -> None:
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Seed the private generators."""
        self._own = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(legacy=False),
        )

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The private state is the global one inside, and everybody else's is back afterwards."""
        with _ONE_AT_A_TIME:
            others = random.getstate(), np.random.get_state(legacy=False)
            random.setstate(self._own[0])
            np.random.set_state(self._own[1])
            try:
                yield
            finally:
                self._own = random.getstate(), np.random.get_state(legacy=False)
                random.setstate(others[0])
                np.random.set_state(others[1])


class LibraryEnv(TextEnv[C], ABC):
    """A text env that a library plays: actions are free text, and its draws are private."""

    package: ClassVar[str]
    """The module of the library."""
    pip: ClassVar[str] = ""
    """What is installed for it, where that has another name."""
    projection = Projection(parse=lambda text: text[:4_096] or None, invalid="")
    action_space = FreeText(65_536)
    observation_space = FreeText(262_144)
    pattern: ClassVar[str] = "<move>"
    """How an action is shown where the library does not list them."""

    def __init__(self, config: C | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        library(self.package, self.pip)  # what is missing shows now and not in the first episode
        self._random = PrivateRandom()

    def _nothing_done(self) -> Outcome:
        """What becomes of a response without a usable action: the library does not get it."""
        return Outcome(self.config.invalid_penalty, effective=False, valid=False)  # type: ignore[attr-defined]

    def available_actions(self) -> list[str]:
        """A pattern: an action is free text."""
        return [self.pattern]


class OthersToolEnv(ToolEnv[C], ABC):
    """A text env whose tools somebody else has: a subclass sets what it told, its tools, and how a step came out."""

    instructions = "Do the task. Call tools to act."
    _told: str
    _listed: Sequence[Tool]
    _step_outcome: Outcome

    def tools(self) -> Sequence[Tool]:
        """Those that were listed when the episode began."""
        return self._listed

    def _outcome(self) -> Outcome:
        return self._step_outcome

    def observe(self) -> str:
        """What was told when the episode began."""
        return self._told
