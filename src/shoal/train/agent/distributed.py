"""Several processes that train one model: they share out episodes and samples, and add up their gradients.

Everything that is random is keyed by what it is for, so it does not matter which process does it: the trajectories
and, up to the order of float sums, the weights are those of one process. With `sharding: full` networks lie in shards
(FSDP2), and a pass through one is a pass of all processes: each must take as many as the others.
"""

from __future__ import annotations

import atexit
import gc
import heapq
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.core.data import Trajectory
from shoal.core.errors import (
    ConfigError,
    DivergedError,
    EngineError,
    EnvError,
    format_error,
    needs_extra,
)
from shoal.core.executors import connect_ray
from shoal.core.files import verify_folder, write_folder
from shoal.rollout.collector import TrajectoryCollector
from shoal.rollout.driver import RolloutReport
from shoal.rollout.rollouts import ParallelRolloutManager
from shoal.rollout.samplers.sampler import NO_NUMBERS, Sampling, of_inner
from shoal.rollout.samplers.settings import ReplicaConfig
from shoal.train.agent.policy import Around, Critic, Policy, add_file, trained_parameters
from shoal.train.agent.weights import whole_weights

if TYPE_CHECKING:  # FSDP takes a second to import, and few runs need it
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


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
        self.sharded = sharded
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
        with needs_extra("several processes", "llm"):
            import transformers.modeling_utils  # noqa: F401  (first: imported later, it keeps the group's threads)
            from accelerate import PartialState
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
        parts = self.parts(sizes)
        work = partial(compute, parts[self.rank])
        if self.sharded:
            # An error amid passes of all cannot be told the others, who wait for the rest of the pass:
            done = work()  # it ends this process, and the launcher them
            shares = self.together(lambda: done)
        else:
            shares = self.together(work)
        placed: dict[int, Any] = {}
        for numbers, values in zip(parts, shares, strict=True):
            placed |= zip(numbers, values, strict=True)
        return [placed[number] for number in range(len(sizes))]

    def together(self, work: Callable[[], T]) -> list[T]:
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
        told = None if failure is None else format_error(failure)
        found: list[Any] = [None] * self.count
        with _met(self.count):
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

    # --- files
    @property
    def writers(self) -> Processes | None:
        """With whom this process writes networks: all where they lie in shards, else the first alone; None if not."""
        if self.sharded:
            return self
        return ALONE if self.first else None

    @contextmanager
    def write_folder(self, folder: Path) -> Iterator[Path]:
        """`shoal.core.files.write_folder` for files of all: the first commits it when each has written its own.

        Raises:
            ConfigError: a process does not see what the first one made.
        """

        def look() -> None:
            if not made[0].is_dir():
                raise ConfigError(
                    f"process {self.rank} does not see {folder} of the first: with trainer.sharding=full run_dir must "
                    f"lie where all processes see it"
                )

        with ExitStack() as opened:
            made = self.together(lambda: opened.enter_context(write_folder(folder)) if self.first else folder)
            self.together(look)
            yield made[0]
            self.together(lambda: None)  # each is done
            self.together(opened.close)

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
        wanted = [p for p, n in zip(parameters, known.tolist(), strict=True) if n]
        for bucket in _buckets(wanted):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            with _met(self.count):
                dist.all_reduce(flat)
            for p, grad in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = grad.view_as(p).clone()


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


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in order, cut where the kind of number changes or `BUCKET` is full."""
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        filled += parameter.numel()
        if not buckets or filled > BUCKET or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            filled = parameter.numel()
        buckets[-1].append(parameter)
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


class ShardedPolicy(Around):
    """A policy whose network lies in shards; it computes scores with all processes.

    What samples from the network itself can do so for as long as `whole` lasts.

    Args:
        policy: with a whole network, the same in every process; it is cut in place.
        processes: who holds the shards.
    """

    def __init__(self, policy: Policy, processes: Processes) -> None:
        super().__init__(policy)
        self._processes = processes
        _try(policy.logits, policy)  # it finds out what its network is like while that is whole
        self._scores = _Scores(policy)
        self._parts = _shard(self._scores, policy.module, [], processes)
        self._root = self._parts[-1]
        _try(self.logits, policy)  # from the first pass on, the outermost module is known as such

    @property
    def head(self) -> None:
        """A part of the pass of all processes: scores are made at once."""
        return None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every process has all parameters for as long as this lasts, and may use them without the others."""
        self._root.set_reshard_after_forward(False)
        for part in self._parts:
            part.unshard()
        try:
            yield
        finally:
            self._root.set_reshard_after_forward(True)
            self._forget()

    without_adapters = of_inner("without_adapters")

    # --- training
    def logits(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        """As the inner one's, with all processes at once."""
        scores: Tensor = self._scores(ids, lengths, where, begins)
        if not torch.is_grad_enabled():
            self._forget()
        return scores

    def _forget(self) -> None:
        """Let go of whole parameters and of passes without a backward pass.

        What comes next is guessed from the passes before, and the guesses of all processes must be the same.
        """
        self._root.reset_iter_state()

    # --- files
    def save(self, folder: Path) -> None:  # type: ignore[override]  # it has the weights of all
        """Write what `load_policy` needs, with all processes: the first gathers and writes one file at a time."""
        first, files = self._processes.first, self.inner.files()

        def write(number: int, weights: dict[str, Tensor]) -> None:
            if first and len(files) == 1:
                self.inner.save(folder, weights)
            elif first:
                with tempfile.TemporaryDirectory(dir=folder) as part:
                    self.inner.save(Path(part), weights)
                    add_file(folder, Path(part), number, len(files))

        for number, names in enumerate(files, 1):  # no more than one is held at a time
            self._processes.together(partial(write, number, whole_weights(self.module, first, names)))


def shard_critic(critic: Critic, policy: Policy, processes: Processes) -> None:
    """Cut a critic in place; its output has numbers of its own kind, so it is a part of its own."""
    _shard(critic, critic.model, [critic.output], processes)
    _try(critic, policy)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a network: those that a transformers model names, or its longest list of modules."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [part for part in model.modules() if type(part).__name__ in names]
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    return named or max(lists, key=len, default=[])


class _Scores(nn.Module):
    """The pass that gives scores, as the forward pass of a module around the network."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.module
        self._policy = policy

    def forward(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        return self._policy.logits(ids, lengths, where, begins)


def _shard(
    root: nn.Module, model: nn.Module, more: Sequence[nn.Module], processes: Processes
) -> list[FSDPModule]:
    """Cut each block of `model`, each of `more`, and what is left of `root`: these parts, the root last.

    Raises:
        ConfigError: a part is of a kind that cannot be cut, or this PyTorch cannot do it.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    needed = ("reset_iter_state", "set_force_sum_reduction_for_comms")
    if not all(hasattr(FSDPModule, name) for name in needed):
        raise ConfigError(
            f"trainer.sharding=full needs a newer PyTorch than {torch.__version__} (2.13 is known to do): "
            f"install it, or set trainer.sharding=none"
        )
    parts = [*blocks_of(model), *more]
    _refuse_mixed(root, parts)
    mesh = processes.mesh(next(root.parameters()).device.type)
    cut = [fully_shard(part, mesh=mesh, reshard_after_forward=True) for part in [*parts, root]]
    for part in cut:
        part.set_gradient_divide_factor(1.0)  # weights of tokens are shares of the whole minibatch: a sum
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return cut


def _refuse_mixed(root: nn.Module, parts: Sequence[nn.Module]) -> None:
    for name, part in root.named_modules():
        if name.endswith("experts") and isinstance(part, nn.ModuleList):
            raise ConfigError(
                f"trainer.sharding=full needs the experts of a layer in one tensor, as transformers 5 keeps them, and "
                f"{name} has {len(part)} modules: a process whose samples miss one would have no gradient to sum. "
                f"Set trainer.sharding=none"
            )
    inner = {id(parameter) for part in parts for parameter in part.parameters()}
    rest = [p for p in root.parameters() if id(p) not in inner]
    for group in [*(list(part.parameters()) for part in parts), rest]:
        kinds = {str(p.dtype).removeprefix("torch.") for p in group if p.requires_grad}
        if len(kinds) > 1:
            raise ConfigError(
                f"trainer.sharding=full needs one kind of number for all that is trained in a block, got "
                f"{' and '.join(sorted(kinds))}: set engine.dtype=float32, or trainer.sharding=none"
            )
        if any(p.ndim == 0 for p in group):
            raise ConfigError(
                "this network has a parameter that is a single number, which cannot be cut: set trainer.sharding=none"
            )


def _try(network: Any, policy: Policy) -> None:
    """One short pass without gradients."""
    device = next(policy.module.parameters()).device
    ids = torch.tensor([[policy.pad_id] * 3], device=device)
    with torch.no_grad():
        network(ids, torch.tensor([3], device=device), torch.tensor([[False, True, True]], device=device))


class Reference:
    """The weights that a KL penalty holds on to: those of the start of the run, kept in its folder.

    Args:
        policy: with these weights.
        folder: where they are kept for a run that is resumed; None where they never change.
        processes: who takes part in the run.
    """

    def __init__(self, policy: Policy, folder: Path | None = None, processes: Processes = ALONE) -> None:
        self.policy = policy
        self._folder, self._writers = folder, processes.writers

    def keep(self, policy: Policy) -> None:
        """Take over the present weights of `policy`, in memory and on disk."""
        if self._folder is None:
            return
        self.policy.module.load_state_dict(policy.module.state_dict())
        if self._writers:
            with self._writers.write_folder(self._folder) as folder:
                policy.save(folder)

    def load(self) -> None:
        """Read back what `keep` wrote."""
        if self._folder is not None:
            weights = self.policy.read(verify_folder(self._folder))
            self.policy.load_weights(weights, self.policy.weights_version)


class BasePolicy(Around):
    """The base model under LoRA adapters: the same network with them switched off."""

    inner: Any

    @property
    def head(self) -> nn.Module | None:
        """The inner one's, unless it has adapters itself: then scores are made at once, without them."""
        head: nn.Module | None = self.inner.head
        return None if head is None or trained_parameters(head) else head

    def logits(self, *read: Any) -> Tensor:
        """The inner one's, without adapters."""
        with self.inner.without_adapters():
            return self.inner.logits(*read)  # type: ignore[no-any-return]

    def hidden(self, *read: Any) -> Tensor:
        """The inner one's, without adapters."""
        with self.inner.without_adapters():
            return self.inner.hidden(*read)  # type: ignore[no-any-return]


class SharedCollector:
    """A collector whose groups are played by all processes, each a share; everyone gets all trajectories.

    Args:
        collector: plays this process's share.
        processes: who takes part.
        ready: entered for as long as they play.
    """

    def __init__(
        self,
        collector: TrajectoryCollector | ParallelRolloutManager,
        processes: Processes,
        ready: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.collector = collector
        self._ready = ready
        self.tags = collector.tags
        self._processes = processes
        # Since the last lap: of each call, one a process that played.
        self._reports: list[list[RolloutReport]] = []

    def collect(
        self, iteration: int, sampling: Sampling, *, first_group: int = 0, n_groups: int | None = None
    ) -> list[Trajectory]:
        """Play groups once; trajectories come group by group, member by member, as from one process."""
        processes = self._processes
        n_groups = len(self.tags) if n_groups is None else n_groups
        cuts = [n_groups * rank // processes.count for rank in range(processes.count + 1)]
        first, last = cuts[processes.rank], cuts[processes.rank + 1]

        def play() -> tuple[list[Trajectory], RolloutReport | None]:
            if first == last:
                return [], None
            own = first_group + first
            played = self.collector.collect(iteration, sampling, first_group=own, n_groups=last - first)
            refuse_no_numbers(played)
            return played, self.collector.report

        with self._ready():
            everyone = processes.together(play)
        self._reports.append([report for _, report in everyone if report is not None])
        return [trajectory for part, _ in everyone for trajectory in part]

    def lap(self) -> dict[str, float]:
        """How parallel rollouts went since the last lap, all calls and processes together; nothing for others."""
        calls, self._reports = self._reports, []
        reports = [report for call in calls for report in call]
        if not reports:
            return {}
        added = ("seconds", "engine_seconds", "batches", "worker_deaths", "replayed_episodes")
        sums = {name: sum(getattr(report, name) for report in reports) for name in added}
        workers = max(sum(report.workers for report in call) for call in calls)
        return RolloutReport(workers=workers, **sums).metrics()

    def close(self) -> None:
        """End this process's envs and workers."""
        self.collector.close()


def refuse_no_numbers(trajectories: Sequence[Trajectory]) -> None:
    """Check what the engine said of its own tokens.

    Raises:
        DivergedError: NaN or infinity, as from weights that a too large step has spoiled.
    """
    for trajectory in trajectories:
        if not all(math.isfinite(logprob) for call in trajectory.calls for logprob in call.logprobs):
            raise _spoiled(trajectory)


def refuse_all_failed(trajectories: Sequence[Trajectory], what: str) -> None:
    """Check that something can be said and learned of these episodes.

    Raises:
        EngineError: not one was played to its end (`EnvError` if it was the env that failed first).
        DivergedError: the same, because the engine's log-probabilities are no numbers.
    """
    if any(trajectory.status == "ok" for trajectory in trajectories):
        return
    first = trajectories[0]
    if first.status == "engine_error" and NO_NUMBERS in (first.error or ""):
        raise _spoiled(first)
    kind = EnvError if first.status == "env_error" else EngineError
    raise kind(f"all {len(trajectories)} episodes of {what} failed; the first: {first.error or first.status}")


def _spoiled(trajectory: Trajectory) -> DivergedError:
    return DivergedError(
        f"the sampler returned log-probabilities that are no numbers (group {trajectory.group}, member "
        f"{trajectory.member}): its weights are spoiled. Begin anew in another run_dir with a lower learning rate "
        f"(algorithm.learning_rate, or warmup.learning_rate at the start): resume=true takes the same settings alone"
    )


_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


def refuse_without_room(replicas: ReplicaConfig, processes: Processes) -> None:
    """Connect each process to its cluster, and count who shares one.

    Raises:
        ConfigError: the replicas of the processes on one cluster need more than it has; raised in all processes.
    """
    ray = connect_ray()
    own = str(ray.get_runtime_context().gcs_address)
    places = processes.together(lambda: (own, dict(ray.cluster_resources())))
    for address, there in places:
        sharing = sum(other == address for other, _ in places)
        refuse_too_many(replicas, sharing, there)


def refuse_too_many(replicas: ReplicaConfig, sharing: int, there: dict[str, float]) -> None:
    """Check the replicas of `sharing` processes against all that a cluster has."""
    wanted = replicas.resources
    named = {_NAMES[key]: wanted[key] for key in wanted.keys() & _NAMES.keys()}
    each = wanted.get("resources", {}) | named
    total = sharing * replicas.count
    for name, amount in sorted(each.items()):
        if amount and total * amount > there.get(name, 0):
            raise ConfigError(
                f"{sharing} processes with engine.replicas.count={replicas.count} make {total} replicas, which need "
                f"{total * amount:g} of {name!r}; their Ray cluster has {there.get(name, 0):g}: start fewer processes "
                f"or replicas, ask for less in engine.replicas.resources, or add nodes first"
            )
