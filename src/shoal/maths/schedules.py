"""Values that change with progress: constant, linear or cosine from the start value to zero."""

from __future__ import annotations

import math
from typing import Literal

Decay = Literal["constant", "linear", "cosine"]


def decayed(value: float, decay: Decay, progress: float) -> float:
    """`value` at `progress`, the finished share of the run in [0, 1].

    >>> decayed(3.0, "linear", 0.25)
    2.25
    >>> round(decayed(1.0, "cosine", 0.5), 6)
    0.5
    """
    progress = min(max(progress, 0.0), 1.0)
    if decay == "linear":
        return value * (1.0 - progress)
    if decay == "cosine":
        return value * 0.5 * (1.0 + math.cos(math.pi * progress))
    return value
