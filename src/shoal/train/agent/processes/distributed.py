"""Several processes that train one model: they share out episodes and samples, and add up their gradients.

Everything that is random is keyed by what it is for, so it does not matter which process does it: the trajectories
and, up to the order of float sums, the weights are those of one process. With `sharding: full` networks lie in shards
(FSDP2), and a pass through one is a pass of all processes: each must take as many as the others.
"""

from __future__ import annotations

import atexit
import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.core.errors import ConfigError, EngineError, format_error, needs_extra

T = TypeVar("T")
PATIENCE = timedelta(hours=2)
"""What a process waits for the others, who may be playing long episodes; the launcher ends all when one fails."""


class Processes:
    """The processes of a run, as the one of this `rank` sees them; on its machine it has the number `local_rank`.

    With `sharded`, networks lie in shards, so that each pass through one is a pass of all processes. They gather in
    torch's `group`, that of all if not given.
    """

    def __init__(
        self, rank: int = 0, count: int = 1, local_rank: int = 0, *, sharded: bool = False, group: Any = None
    ) -> None:
        self.rank, self.count, self.local_rank = rank, count, local_rank
        self.sharded, self._group = sharded, group

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
        with needs_extra("several processes", "llm"):
            import transformers.modeling_utils  # noqa: F401  (first: imported later, it keeps the group's threads)
            from accelerate import PartialState
        if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1"):  # nobody else is to be listened to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not dist.is_initialized():
            atexit.register(_leave)
        state = PartialState(cpu=device == "cpu", timeout=PATIENCE)
        return cls(state.process_index, state.num_processes, state.local_process_index, sharded=sharded)

    def apart(self) -> Processes:
        """The same processes for another thread, which may gather while this one does; all of them must ask for it."""
        group = dist.new_group(backend="gloo", timeout=PATIENCE) if self.count > 1 else None
        return Processes(self.rank, self.count, self.local_rank, sharded=self.sharded, group=group)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def device(self, wanted: str) -> str:
        """The device of this process's model: `cuda` is the GPU of its number."""
        return f"cuda:{self.local_rank}" if wanted == "cuda" and self.count > 1 else wanted

    # --- sharing out
    def partition(self, sizes: Sequence[int]) -> list[list[int]]:
        """The items of every process, by their sizes: largest first, each to who has least; ascending."""
        filled = [(0, rank) for rank in range(self.count)]
        found: list[list[int]] = [[] for _ in range(self.count)]
        for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            size, rank = heapq.heappop(filled)
            found[rank].append(i)
            heapq.heappush(filled, (size + sizes[i], rank))
        return [sorted(items) for items in found]

    def share_out(self, sizes: Sequence[int], compute: Callable[[list[int]], list[Any]]) -> list[Any]:
        """One result an item, each computed by one process: `compute` gets the numbers of this one's items."""
        parts = self.partition(sizes)
        work = partial(compute, parts[self.rank])
        # an error amid passes of all ends this process: the others wait for the rest of the pass
        if self.sharded:
            done = work()
            shares = self.all_gather(lambda: done)
        else:
            shares = self.all_gather(work)
        placed: dict[int, Any] = {}
        for numbers, values in zip(parts, shares, strict=True):
            placed |= zip(numbers, values, strict=True)
        return [placed[number] for number in range(len(sizes))]

    def all_gather(self, work: Callable[[], T]) -> list[T]:
        """What each process's `work` gave, by rank; an error in one is an error in all.

        Raises:
            EngineError: another process failed; the message says which, and with what, unless it was killed.
        """
        if self.count == 1:
            return [work()]
        failure: Exception | None = None
        value: Any = None
        try:
            value = work()
        except Exception as error:
            failure = error
        reason = None if failure is None else format_error(failure)
        found: list[Any] = [None] * self.count
        with _met(self.count):
            dist.all_gather_object(found, (reason, value), group=self._group)
        if failure is not None:
            raise failure
        for rank, (error_there, _) in enumerate(found):
            if error_there is not None:
                raise EngineError(f"process {rank} of {self.count} failed: {error_there}")
        return [there for _, there in found]

    def even_out(self, items: Sequence[T]) -> Iterator[T | None]:
        """The items, and where passes are those of all processes, None for as long as another one still has items."""
        n_items = len(items)
        most = max(self.all_gather(lambda: n_items)) if self.sharded else n_items
        yield from items
        yield from [None] * (most - n_items)

    # --- weights
    def share_weights(self, tensors: Iterable[Tensor]) -> None:
        """Everyone takes over the first one's values; of shards, each process has its own."""
        if self.count > 1 and not self.sharded:
            with torch.no_grad(), _met(self.count):
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Everyone gets the sum of all gradients; a parameter that none has a gradient for keeps none.

        Those of shards were summed in the backward pass.
        """
        if self.count == 1 or self.sharded:
            return
        known = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
        with _met(self.count):
            dist.all_reduce(known)
            summed = [p for p, n in zip(parameters, known.tolist(), strict=True) if n]
            for p in summed:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            for pending in [dist.all_reduce(p.grad, async_op=True) for p in summed]:
                pending.wait()


ALONE = Processes()


@contextmanager
def _met(count: int) -> Iterator[None]:
    """What torch raises here says that another of `count` processes is gone, in the words of its own files."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(
            f"another of the {count} processes ended, or cannot be reached: see what it said; what was saved is whole, "
            f"go on with resume=true ({format_error(error).splitlines()[0]})"
        ) from error


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
