"""The arrays through which environments and their caller talk: one block, each env in its own rows.

The block is plain memory for environments in this process and a shared mapping for worker processes; the
code that reads and writes rows is the same.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError
from shoal.vector.spaces import Layout, Leaf
from shoal.vector.timing import BUCKETS

LINE = 64
"""Bytes of a lane's command line and of its reply line: one cache line each, so they never share one."""
# 32-bit words of a command line …
SEQUENCE, OPERATION, HAS_MESSAGE, RING, BELL_MODE, SPIN = range(6)
# … and of a reply line
REPLY_SEQUENCE, REPLY_MESSAGE, PROGRESS, STEPS_TAKEN = range(4)


class Slots:
    """Named arrays over one buffer; the same arguments give the same places in every process.

    Args:
        n_envs: number of environments.
        observations: layout of one observation.
        actions: layout of one action.
        n_lanes: number of lanes that share the environments.
        ring: how many steps of observations are kept.
        text_bytes: room for text per env and leaf; longer text goes by message.
        buffer: the memory, None for private memory, or False for `nbytes` only.
    """

    def __init__(
        self,
        n_envs: int,
        observations: Layout,
        actions: Layout,
        *,
        n_lanes: int = 1,
        ring: int = 1,
        text_bytes: int = 0,
        buffer: Any = None,
    ) -> None:
        self.n_envs, self.n_lanes, self.ring, self.text_bytes = n_envs, n_lanes, ring, text_bytes
        self.observations, self.actions = observations, actions
        plan = _Plan()
        command = plan.add("u4", (n_lanes, LINE // 4))
        reply = plan.add("u4", (n_lanes, LINE // 4))
        signals = plan.add("u1", (2 * n_lanes + 1, LINE))
        vectors = [plan.add(code, (n_envs,)) for code in ("f8", "?", "?", "?")]
        times = plan.add("u4", (n_envs, BUCKETS))
        act = [_place(plan, leaf, (n_envs,), text_bytes) for leaf in actions.leaves]
        obs = [_place(plan, leaf, (ring, n_envs), text_bytes) for leaf in observations.leaves]
        final = [_place(plan, leaf, (n_envs,), 0) for leaf in observations.leaves]
        self.nbytes = plan.size
        if buffer is False:  # only the size was asked for
            return
        if buffer is None:
            buffer = mmap.mmap(-1, self.nbytes)
        self.buffer = buffer
        memory = memoryview(buffer)
        self.command = plan.words(memory, command)
        self.reply = plan.words(memory, reply)
        self.signal_bytes = plan.array(memory, signals)
        self.rewards, self.terminated, self.truncated, self.mask = (plan.array(memory, v) for v in vectors)
        flags = memory[vectors[1][0] : vectors[2][0] + n_envs]
        self.flags = np.frombuffer(flags, np.bool_)
        """Both kinds of ends in one array, with what lies between them."""
        self.times = plan.array(memory, times)
        self.act = [plan.array(memory, place) for place in act]
        self.obs = [plan.array(memory, place) for place in obs]
        self.final = [plan.array(memory, place) for place in final]
        self._memory, self._obs_places = memory, obs

    def any_end(self) -> bool:
        """Whether an episode ended in the last step."""
        return b"\x01" in self.flags.tobytes()

    def handouts(self, leaf: int) -> list[np.ndarray[Any, Any]]:
        """For a fixed leaf one flat array per place of the ring, each an owner that views of it refer to."""
        place = self._obs_places[leaf]
        assert place is not None
        offset, kind, shape = place
        size = int(np.prod(shape[1:], dtype=np.int64))
        step = size * kind.itemsize
        return [
            np.frombuffer(self._memory[offset + r * step : offset + (r + 1) * step], kind)
            for r in range(self.ring)
        ]


class _Plan:
    """Hands out aligned places in a block that does not exist yet."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, dtype: Any, shape: tuple[int, ...]) -> tuple[int, np.dtype[Any], tuple[int, ...]]:
        kind = np.dtype(dtype)
        offset = self.size
        self.size = -(-(offset + int(np.prod(shape, dtype=np.int64)) * kind.itemsize) // LINE) * LINE
        return offset, kind, shape

    @staticmethod
    def array(memory: memoryview, place: tuple[int, np.dtype[Any], tuple[int, ...]] | None) -> Any:
        if place is None:
            return None
        offset, kind, shape = place
        return np.frombuffer(memory, kind, int(np.prod(shape, dtype=np.int64)), offset).reshape(shape)

    @staticmethod
    def words(memory: memoryview, place: tuple[int, np.dtype[Any], tuple[int, ...]]) -> list[memoryview]:
        """One writable view of 32-bit words per line: faster to index than an array."""
        offset, _, (lines, _) = place
        return [memory[offset + i * LINE : offset + (i + 1) * LINE].cast("I") for i in range(lines)]


def _place(
    plan: _Plan, leaf: Leaf, lead: tuple[int, ...], text_bytes: int
) -> tuple[int, np.dtype[Any], tuple[int, ...]] | None:
    if leaf.kind == "fixed":
        return plan.add(leaf.dtype, (*lead, *leaf.shape))
    if leaf.kind == "text" and text_bytes:
        # per env its room, and 16 bytes for the lengths at the head of its lane's strip
        return plan.add("u1", (lead[-1], 16 + text_bytes))
    return None


def shared_file(nbytes: int) -> int:
    """The descriptor of `nbytes` of shared memory without a name: nothing is left behind, however we end.

    Raises:
        ConfigError: when the memory is not there; asked for up front, so that no later write can fault.
    """
    available = _available_memory()
    if nbytes > available:
        raise ConfigError(_too_little(nbytes, f"{available / 2**20:.0f} MiB are available"))
    descriptor = os.memfd_create("shoal-vector", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, max(nbytes, 1))
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise ConfigError(_too_little(nbytes, error.strerror or "no space")) from error
        raise
    return descriptor


def _too_little(nbytes: int, why: str) -> str:
    return (
        f"not enough shared memory for {nbytes / 2**20:.0f} MiB of observations and actions ({why}): use fewer "
        f"environments, smaller observations or a shorter ring"
    )


def _available_memory() -> int:
    """Bytes that can be had, of the machine and of the control group we run in."""
    found = [1 << 62]
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    for most, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(most).read_text()) - int(Path(used).read_text()))
    return min(found)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where an array's memory starts."""
    return int(array.ctypes.data)
