"""Other people's libraries: imported on first use, their draws from global generators reproducible and unnoticed."""

from __future__ import annotations

import contextlib
import importlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.core.errors import MissingExtraError

_ONE_AT_A_TIME = threading.RLock()


def library(module: str) -> Any:
    """The library of that name. No env keeps it: a module cannot be copied or sent elsewhere.

    Raises:
        MissingExtraError: it is not installed, or not whole.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.replace("_", "-")
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            message = f'{module} envs need a package: run pip install "{package}"'
        else:
            message = f"{package} is installed, but cannot be imported: {error}"
        raise MissingExtraError(message) from error


class PrivateRandom:
    """A state of `random` and `numpy.random` of one's own, switched in while a library is called.

    Within one process only one library call runs at a time: the generators it uses are the process's.
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
