"""What an operation on a share leaves beside the slots: what has no fixed size, and what went wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shoal.vector.failures import Failure

Infos = list[tuple[int, Any, dict[str, Any] | None, dict[str, Any]]]


class Where(Enum):
    """Where a final observation is, when it is not in the message."""

    SLOT = "slot"


IN_SLOT = Where.SLOT


@dataclass(slots=True)
class Extras:
    """What one operation left beside the slots."""

    columns: dict[int, list[Any]] = field(default_factory=dict)  # leaf -> values of the envs, in their order
    infos: Infos = field(default_factory=list)
    """(env, final observation or IN_SLOT or None, final info, info), where any of them is not empty."""
    failures: list[Failure] = field(default_factory=list)
    value: Any = None  # what a call returned
