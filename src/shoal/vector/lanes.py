"""Where a share of the environments runs, as the pool sees it: start an operation, then collect its reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shoal.vector.actions import Loose, read
from shoal.vector.share import Extras, Share


class Lane(Protocol):
    """A share that answers one operation at a time."""

    first: int
    count: int
    inline: bool
    """The caller's own thread does the work, in `finish`."""

    def start_step(self, members: Sequence[int] | None, loose: Loose, ring: int) -> None:
        """Begin to step all envs of the share, or only `members`; fixed-size actions are in the slots."""

    def start(self, operation: str, *args: Any) -> None:
        """Begin another operation of `Share`, by name."""

    def finished(self) -> bool:
        """The reply is there: `finish` will not wait."""

    def finish(self, timeout: float | None = None) -> Extras | None:
        """The reply; `TimeoutError` when it does not come in time (it may be collected later)."""

    def close(self, timeout: float) -> None:
        """End it, by force after `timeout` seconds."""


class InlineLane:
    """A share that the caller steps itself."""

    inline = True

    def __init__(self, share: Share) -> None:
        self.share = share
        self.first, self.count = share.first, share.count
        self._all = range(share.count)
        self._job: tuple[Any, ...] | None = None

    def start_step(self, members: Sequence[int] | None, loose: Loose, ring: int) -> None:
        """Take the actions now: the caller may reuse the slots."""
        chosen = self._all if members is None else members
        self._job = ("step", read(self.share.slots, self.first, chosen, loose), chosen, ring)

    def start(self, operation: str, *args: Any) -> None:
        """Remember the operation for `finish`."""
        self._job = (operation, *args)

    def finished(self) -> bool:
        """Its reply costs the caller's own time and nothing else."""
        return True

    def finish(self, timeout: float | None = None) -> Extras | None:
        """Do it."""
        del timeout
        assert self._job is not None
        operation, *args = self._job
        self._job = None
        result: Extras | None = getattr(self.share, operation)(*args)
        return result

    def close(self, timeout: float) -> None:
        """Close the envs."""
        del timeout
        self.share.close()
