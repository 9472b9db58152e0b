"""Where a share of the environments runs, as the pool sees it: start an operation, then collect its reply."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

from shoal.vector.actions import Loose, read, reader
from shoal.vector.failures import Failure
from shoal.vector.share import Extras, Share


class Lane(Protocol):
    """A share that answers one operation at a time."""

    first: int
    count: int
    inline: bool
    """The caller's own thread does the work, in `finish`."""
    ring: int
    """Where in the ring its latest observations are."""
    lost: Failure | None
    """Why it can no longer work, if so."""
    home: Any
    """What it shares with lanes that are lost together with it."""
    rings_bell: bool
    """Its next replies ring the pool's common bell instead of its own."""

    def start_step(self, members: Sequence[int] | None, loose: Loose, ring: int) -> None:
        """Begin to step all envs of the share, or only `members`; fixed-size actions are in the slots."""

    def start(self, operation: str, *args: Any) -> None:
        """Begin another operation of `Share`, by name."""

    def finished(self) -> bool:
        """The reply is there: `finish` will not wait."""

    def check(self) -> None:
        """Notice a worker that is gone or overdue; `finished` is true then."""

    def finish(self, timeout: float | None = None) -> Extras | None:
        """The reply; `TimeoutError` when it does not come in time (it may be collected later)."""

    def close(self, timeout: float) -> None:
        """End it, by force after `timeout` seconds."""


class Backend(Protocol):
    """What the lanes of a pool stand on: their processes or machines."""

    def revive(self, lane: Any) -> Sequence[Lane]:
        """Give a lost lane a fresh worker; returns all lanes that lived in the old one."""

    def wait_bell(self, seconds: float) -> None:
        """Sleep until a lane that rings the common bell has an answer, or so many seconds."""

    def close(self, seconds: float) -> None:
        """End everything, by force after so many seconds."""

    def stats(self) -> list[dict[str, Any]]:
        """One row per worker."""


class InlineLane:
    """A share that the caller steps itself."""

    inline = True
    lost: Failure | None = None
    home: Any = None

    def __init__(self, share: Share) -> None:
        self.ring = 0
        self.rings_bell = False
        self.share = share
        self.first, self.count = share.first, share.count
        self._all = range(share.count)
        self._read = reader(share.slots, share.first, share.count)
        self._job: tuple[Any, ...] | None = None

    def start_step(self, members: Sequence[int] | None, loose: Loose, ring: int) -> None:
        """Take the actions now: the caller may reuse the slots."""
        if members is None and not loose:
            self._job = ("step", self._read(), self._all, ring)
            return
        chosen = self._all if members is None else members
        self._job = ("step", read(self.share.slots, self.first, chosen, loose), chosen, ring)

    def start(self, operation: str, *args: Any) -> None:
        """Remember the operation for `finish`."""
        self._job = (operation, *args)

    def finished(self) -> bool:
        """Its reply costs the caller's own time and nothing else."""
        return True

    def check(self) -> None:
        """The caller knows about itself."""

    def finish(self, timeout: float | None = None) -> Extras | None:
        """Do it."""
        del timeout
        assert self._job is not None
        operation, *args = self._job
        self._job = None
        if operation == "step":
            return self.share.step(*args)
        result: Extras | None = getattr(self.share, operation)(*args)
        return result

    def close(self, timeout: float) -> None:
        """Close the envs."""
        del timeout
        self.share.close()


def close(lanes: Sequence[Lane], backend: Backend | None, owner: int, seconds: float = 2.0) -> None:
    """Close lanes and what they stand on."""
    if os.getpid() != owner:
        return  # a fork of the process that made them: they are not ours to end
    for lane in lanes:
        with contextlib.suppress(Exception):
            lane.close(seconds)
    if backend is not None:
        backend.close(seconds)
