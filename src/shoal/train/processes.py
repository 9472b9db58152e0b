"""Several processes that train one model: they share out episodes and samples, and add up their gradients.

Everything that is random is keyed by what it is for, so it does not matter which process does it: the trajectories
and, up to the order of float sums, the weights are those of one process.
"""

from __future__ import annotations

import atexit
import gc
import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.core.errors import ConfigError, EngineError, missing_extra

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
PATIENCE = timedelta(hours=2)
"""What a process waits for the others, who may be playing long episodes; the launcher ends all when one fails."""
BUCKET = 1 << 24
"""Gradients that are added up at once, in numbers."""


class Processes:
    """The processes of a run, as one of them sees them.

    Args:
        rank: the number of this one.
        count: of all.
        local_rank: its number on this machine.
        sharded: networks lie in shards, so that each pass through one is a pass of all processes.
    """

    def __init__(self, rank: int = 0, count: int = 1, local_rank: int = 0, *, sharded: bool = False) -> None:
        self.rank, self.count, self.local_rank = rank, count, local_rank
        self.sharded = sharded and count > 1
        self._mesh: DeviceMesh | None = None

    @classmethod
    def join(cls, device: str, *, sharded: bool = False) -> Processes:
        """Meet the other processes that `torchrun` or `accelerate launch` started; alone without a launcher.

        Raises:
            ConfigError: `device` names one GPU for all of them.
        """
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return cls()
        if ":" in device:
            raise ConfigError(
                f"engine.device={device} would be one GPU for {count} processes: set cuda, and each takes its own"
            )
        try:
            from accelerate import PartialState
        except ImportError as error:
            raise missing_extra("several processes", "llm") from error
        if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1"):  # nobody else is to be listened to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not dist.is_initialized():
            atexit.register(_leave)
        state = PartialState(cpu=device == "cpu", timeout=PATIENCE)
        return cls(state.process_index, state.num_processes, state.local_process_index, sharded=sharded)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def device(self, wanted: str) -> str:
        """The device of this process's model: `cuda` is the GPU of its number."""
        return f"cuda:{self.local_rank}" if wanted == "cuda" and self.count > 1 else wanted

    def mesh(self, device: str) -> DeviceMesh:
        """The processes in a row, as shards are laid out; one object, so that weights can go from shard to shard."""
        from torch.distributed.device_mesh import init_device_mesh

        if self._mesh is None:
            self._mesh = init_device_mesh(device, (self.count,))
            atexit.register(_let_go, self._mesh)
        return self._mesh

    # --- sharing out
    def part(self, sizes: Sequence[int]) -> list[int]:
        """Which of the items of these sizes are this process's: largest first, each to who has least."""
        return self.parts(sizes)[self.rank]

    def parts(self, sizes: Sequence[int]) -> list[list[int]]:
        """The items of every process, ascending; every process computes the same."""
        if self.count == 1:
            return [list(range(len(sizes)))]
        filled = [(0, rank) for rank in range(self.count)]
        found: list[list[int]] = [[] for _ in range(self.count)]
        for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            size, rank = heapq.heappop(filled)
            found[rank].append(i)
            heapq.heappush(filled, (size + sizes[i], rank))
        return [sorted(items) for items in found]

    def spread(self, sizes: Sequence[int], compute: Callable[[list[int]], list[Any]]) -> list[Any]:
        """One result an item, each computed by one process: `compute` gets the numbers of this one's items."""
        if self.count == 1:
            return compute(list(range(len(sizes))))
        results: list[Any] = [None] * len(sizes)
        parts = self.parts(sizes)

        def work() -> list[Any]:
            return compute(parts[self.rank])

        if self.sharded:
            # An error amid passes of all cannot be told the others, who wait for the rest of the pass:
            done = work()  # it ends this process, and the launcher them
            shares = self.together(lambda: done)
        else:
            shares = self.together(work)
        for numbers, values in zip(parts, shares, strict=True):
            for number, value in zip(numbers, values, strict=True):
                results[number] = value
        return results

    def together(self, work: Callable[[], T]) -> list[T]:
        """What each process's `work` gave, by rank; an error in one is an error in all.

        Raises:
            EngineError: another process failed; the message says which, and with what.
        """
        if self.count == 1:
            return [work()]
        failure: Exception | None = None
        value: Any = None
        try:
            value = work()
        except Exception as error:
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, (told, value))
        if failure is not None:
            raise failure
        for rank, (error_there, _) in enumerate(found):
            if error_there is not None:
                raise EngineError(f"process {rank} of {self.count} failed: {error_there}")
        return [there for _, there in found]

    def in_step(self, items: Sequence[T]) -> Iterator[T | None]:
        """The items, and where passes are those of all processes, None for as long as another one still has items."""
        n_items = len(items)
        most = max(self.together(lambda: n_items)) if self.sharded else n_items
        yield from items
        yield from [None] * (most - n_items)

    # --- weights
    def share_weights(self, tensors: Iterable[Tensor]) -> None:
        """Everyone takes over the first one's values; of shards, each process has its own."""
        if self.count > 1 and not self.sharded:
            with torch.no_grad():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Everyone gets the sum of all gradients; a parameter that none has a gradient for keeps none.

        Those of shards were summed in the backward pass.
        """
        if self.count == 1 or self.sharded:
            return
        known = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
        dist.all_reduce(known)
        wanted = [p for p, n in zip(parameters, known.tolist(), strict=True) if n]
        for bucket in _buckets(wanted):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for p, grad in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = grad.view_as(p).clone()


ALONE = Processes()


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in order, cut where the kind of number changes or `BUCKET` is full."""
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        fits = buckets and filled + parameter.numel() <= BUCKET and buckets[-1][0].dtype == parameter.dtype
        if fits:
            buckets[-1].append(parameter)
            filled += parameter.numel()
        else:
            buckets.append([parameter])
            filled = parameter.numel()
    return buckets


def _let_go(mesh: DeviceMesh) -> None:
    """Let the group's threads end in `_leave`.

    Caches of PyTorch keep the mesh, and it and networks in shards keep the group, until the interpreter itself ends;
    there, a thread of the group once aborted a process that had done all its work.
    """
    getattr(mesh, "_pg_registry", {}).clear()
    gc.collect()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
