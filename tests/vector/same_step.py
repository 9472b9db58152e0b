"""`make_vec` with same-step autoreset, which most tests of this room are written for."""

from __future__ import annotations

from typing import Any

import shoal.vector
from shoal.vector import VectorPool


def make_vec(*args: Any, **options: Any) -> VectorPool:
    """Environments that begin their next episode in the step in which one ends."""
    return shoal.vector.make_vec(*args, **{"autoreset": "same_step", **options})
