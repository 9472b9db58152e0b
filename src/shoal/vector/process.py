"""The worker processes of a pool, the block they share with it, and how to replace one."""

from __future__ import annotations

import dataclasses
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

from shoal.vector import slots as words
from shoal.vector import worker
from shoal.vector.channel import Channel
from shoal.vector.launch import StartMethod, WorkerProcess, socket_pair
from shoal.vector.process_lane import ProcessLane
from shoal.vector.share import EnvFn
from shoal.vector.slots import Slots, address_of, shared_file
from shoal.vector.waiting import SLICE, Signal, init_signal


class ProcessBackend:
    """The workers of a pool, and how to replace one.

    Args:
        shares: for each worker, for each of its lanes, the first env and what makes its envs.
        method: how the processes come to be.
    """

    def __init__(self, shares: Sequence[Sequence[tuple[int, Sequence[EnvFn]]]], method: StartMethod) -> None:
        self.workers = [WorkerProcess(lanes, method) for lanes in shares]
        self.lanes: list[list[ProcessLane]] = [[] for _ in shares]
        self.block = -1
        self.attach: worker.Attach | None = None
        self.bell: Signal | None = None

    def start(self) -> None:
        """Start all workers; they make their environments meanwhile."""
        for process in self.workers:
            process.start()

    def describe(self) -> list[worker.About]:
        """What the workers say of the environments, in order."""
        return [about for process in self.workers for about in process.describe()]

    def open(self, attach: worker.Attach, step_timeout: float | None) -> tuple[Slots, list[ProcessLane]]:
        """Make the shared block and connect every lane."""
        self.attach = attach
        plan = (attach.n_envs, attach.observations, attach.actions)
        sizes: dict[str, Any] = {
            "n_lanes": attach.n_lanes,
            "ring": attach.ring,
            "text_bytes": attach.text_bytes,
        }
        self.block = shared_file(Slots(*plan, **sizes, buffer=False).nbytes)
        slots = Slots(*plan, **sizes, buffer=mmap.mmap(self.block, 0))
        bell = address_of(slots.signal_bytes) + 2 * attach.n_lanes * words.LINE
        init_signal(bell)
        self.bell = Signal(bell)
        number = 0
        for process, lanes in zip(self.workers, self.lanes, strict=True):
            for first, env_fns in process.lanes:
                lane = ProcessLane(process, slots, number, first, len(env_fns), attach.spin, step_timeout)
                lanes.append(lane)
                number += 1
            self._connect(process, lanes)
        return slots, [lane for lanes in self.lanes for lane in lanes]

    def _connect(self, process: WorkerProcess, lanes: Sequence[ProcessLane]) -> None:
        assert self.attach is not None
        theirs = []
        try:
            for lane in lanes:
                ours, their = socket_pair()
                theirs.append(their)
                if lane.channel is not None:
                    lane.channel.close()
                lane.channel = Channel(ours, SLICE)
            numbers = [lane.number for lane in lanes]
            process.attach(dataclasses.replace(self.attach, lane_numbers=numbers), self.block, theirs)
        finally:
            for their in theirs:
                their.close()
        process.receive()

    def revive(self, lane: ProcessLane) -> list[ProcessLane]:
        """Replace the worker of a lost lane by a fresh one; returns all lanes of that worker."""
        process = lane.process
        lanes = self.lanes[self.workers.index(process)]
        process.kill()
        process.release()
        process.start()
        process.describe()
        for item in lanes:
            item.reconnect()
        self._connect(process, lanes)
        return lanes

    def wait_bell(self, seconds: float) -> None:
        """Sleep until a lane that rings has an answer."""
        if self.bell is not None and self.bell.acquire(True, max(seconds, 0.0)):
            self.bell.drain()  # the words in memory tell who is ready; one look serves all that rang

    def stats(self) -> list[dict[str, Any]]:
        """Memory and restarts of each worker."""
        return [
            {"pid": process.pid, "rss_mib": process.rss() / 2**20, "restarts": process.generation - 1}
            for process in self.workers
        ]

    def close(self, seconds: float) -> None:
        """Wait for workers that were asked to close, then kill those that did not."""
        end = time.monotonic() + seconds
        for process in self.workers:
            if (
                process.owner == os.getpid() and process.pid > 0
            ):  # else: a fork of the caller, not ours to end
                if not process.wait(end - time.monotonic()):
                    process.kill()
                process.reap()
                process.release()
        if self.block >= 0:
            os.close(self.block)
            self.block = -1
