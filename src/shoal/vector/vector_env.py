"""Many environments behind one `gymnasium.vector.VectorEnv`, on any kind of worker.

Every operation goes the same way: commands for the workers, one wait for their replies, failures dealt with, one
batch. Whatever it raises (an env's exception, Ctrl-C, a timeout of a wait), its environments have to be reset first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import util
from typing import Any, NamedTuple, TypeVar

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.core.errors import EnvError, WorkerTimeoutError
from shoal.core.executors import Closing
from shoal.core.workers import dumps
from shoal.vector.buffers import (
    Buffers,
    Observations,
    PickledActions,
    for_worker,
    plain_target,
    write_actions,
    write_some,
)
from shoal.vector.env_group import call_attribute
from shoal.vector.failures import (
    FailurePolicy,
    OnFailure,
    describe,
    failures_of,
    raise_first,
    worker_error_of,
)
from shoal.vector.infos import (
    FINAL_IN_BUFFER,
    EnvInfo,
    Info,
    InfoTable,
    Ready,
    StepResult,
    batch_infos,
    by_env,
)
from shoal.vector.messages import (
    STEP_ALL,
    Apply,
    Attach,
    Command,
    Failure,
    Reply,
    Reset,
    Step,
    ids_of,
)
from shoal.vector.spaces import (
    Seeds,
    check_limit,
    check_mask,
    check_options,
    check_whole,
    one_each,
    plain_seed,
    seeds_per_env,
)
from shoal.vector.workers import DeadlineError, Pending, Worker, collect, wait_for

logger = logging.getLogger(__name__)
T = TypeVar("T")
CLOSE_SECONDS = 30.0
"""How long `close()` waits for environments that are still writing, such as a video."""
SETTLE_SECONDS = 10.0
"""How long `reset()` waits for what a broken-off operation left at work, where there is no `step_timeout`."""


class Description(NamedTuple):
    """Spaces and metadata that a vector env needs before it can send commands."""

    observation_spaces: list[gymnasium.Space[Any]]
    action_spaces: list[gymnasium.Space[Any]]
    observation_space: gymnasium.Space[Any]  # batched
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any


class PendingTimeoutError(WorkerTimeoutError, multiprocessing.TimeoutError):
    """A `*_wait(timeout=…)` ran out; `reset()` begins anew."""


def one_at_a_time(method: Callable[..., T]) -> Callable[..., T]:
    """A method that refuses to run while another call is at work on the same vector env."""

    @functools.wraps(method)
    def call(self: VectorPool, *args: Any, **kwargs: Any) -> T:
        calls, mine = self._calls, object()
        try:
            if calls.setdefault("now", mine) is not mine:
                raise AlreadyPendingCallError(
                    f"`{method.__name__}` was called while another call is at work on this vector env", "call"
                )
            return method(self, *args, **kwargs)
        except Exception:
            self._check_open()  # it was closed meanwhile: that is why
            raise
        finally:
            if calls.get("now") is mine:
                calls.clear()

    return call


class VectorPool(VectorEnv[Any, Any, Any], Closing):
    """A vector environment; made by `make_vec`, which explains its options.

    The `workers` have made their environments, and know of the buffers.
    """

    warns = True
    """Whether failures that are dealt with are logged; False where who steps the environments reports them."""

    def __init__(
        self,
        workers: Sequence[Worker],
        buffers: Buffers,
        attach: Attach,
        description: Description,
        close_rest: Callable[[], None] = lambda: None,
        *,
        on_failure: OnFailure = "raise",
        max_restarts: float = 3,
        copy: bool = True,
    ) -> None:
        self.num_envs = buffers.n_envs
        self.workers, self.buffers = list(workers), buffers
        self.on_failure = on_failure
        self._remembers = on_failure != "raise"
        """Whether it knows what environments showed last, for those that are replaced."""
        self.worker_of = [worker for worker in self.workers for _ in range(worker.count)]
        self.undone: dict[int, Failure | None] = {}
        """Environments that have to be reset before anything else, each with the failure that took its worker along;
        None where a call raised."""
        self.autoreset_mode = attach.autoreset
        self.metadata = {**description.metadata, "autoreset_mode": attach.autoreset}
        self.render_mode, self.spec = description.render_mode, description.spec
        self.observation_spaces = description.observation_spaces
        self.action_spaces = description.action_spaces
        self.single_observation_space = description.observation_spaces[0]
        self.single_action_space = description.action_spaces[0]
        self.observation_space = description.observation_space
        self.action_space = description.action_space
        self.same_step = attach.autoreset is AutoresetMode.SAME_STEP
        self.shown = Observations(buffers, copy=copy)
        self._policy = FailurePolicy(self, attach, max_restarts)
        self._state: str | None = None  # the operation between `*_async` and `*_wait`
        self._pending: Pending = []
        # Sent and not received: the command of each worker.
        self._in_flight: dict[Worker, Command] = {}
        self._calls: dict[str, object] = {}
        self._steps, self._seconds, self._step_began = 0, 0.0, 0.0
        self._pid = None if all(worker.inline for worker in workers) else os.getpid()
        self._close_rest = close_rest
        self._finish = util.Finalize(self, close_all, (self.workers, close_rest), exitpriority=20)

    # --- one operation at a time
    def _check_open(self) -> None:
        if self._is_forked():
            raise ClosedEnvironmentError(
                f"Trying to operate on a `{type(self).__name__}` whose workers answer the process that this one was "
                "forked from: make one here."
            )
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )

    def _is_forked(self) -> bool:
        """Whether this process was forked from the one that owns the workers: their replies would go there."""
        return self._pid is not None and self._pid != os.getpid()

    def _check_idle(self, operation: str, ids: Iterable[int] = (), *, flying: bool = False) -> None:
        """Refuse what cannot begin now.

        Args:
            operation: what is to begin.
            ids: environments of which it is no reset.
            flying: it may begin while environments are in flight.
        """
        self._check_open()
        if self._state is not None:
            begun = f"{operation}_async" if operation in ("reset", "step", "call") else operation
            raise AlreadyPendingCallError(
                f"Calling `{begun}` while waiting for a pending call to `{self._state}` to complete.",
                self._state,
            )
        if self.undone and (undone := [i for i in ids if i in self.undone]):
            if (failure := self.undone[undone[0]]) is not None:
                note = f"env {undone[0]} was replaced with its worker: reset() it before `{operation}`"
                raise worker_error_of(failure, note)
            which = "all environments" if len(undone) == self.num_envs else f"environments {undone}"
            raise EnvError(f"the last call failed or was interrupted: reset() {which} before `{operation}`")
        if self._in_flight and not flying:
            raise AlreadyPendingCallError(
                f"Calling `{operation}` while environments {self.in_flight[:8]} are in flight; `recv` them.",
                "recv",
            )

    def _break_off(self, pending: Pending) -> None:
        """Have the environments of a call that raises, and those whose worker it left at work or lost, reset first."""
        for worker, command in pending:
            whole = worker.command is not None or worker.lost is not None
            for i in worker.ids if whole else ids_of(worker, command):
                self.undone[i] = None

    def _begin(self, operation: str, commands: Pending) -> None:
        """Send commands; `_end` waits for the replies."""
        self._pending, self._state = commands, operation
        try:
            for worker, command in commands:
                worker.begin(command)
        except BaseException:
            self._state = None
            self._break_off(commands)
            raise

    def _end(self, operation: str, timeout: float | None, take: Callable[[list[Reply], Pending], T]) -> T:
        """What `take` makes of the replies to what `_begin` began."""
        self._check_open()
        if self._state != operation:
            raise NoAsyncCallError(
                f"Calling `{operation}_wait` without any prior call to `{operation}_async`.", operation
            )
        if timeout is not None:
            check_limit(timeout, "timeout")
        try:
            return take(collect([worker for worker, _ in self._pending], timeout), self._pending)
        except BaseException as error:
            self._break_off(self._pending)
            if isinstance(error, DeadlineError):
                raise PendingTimeoutError(
                    f"The call to `{operation}_wait` has timed out after {timeout} second(s)."
                ) from None
            raise
        finally:
            self._state = None

    def by_worker(self, chosen: Iterable[int]) -> list[tuple[Worker, list[int]]]:
        """Environments as (worker, positions in its group)."""
        parts: dict[Worker, list[int]] = {}
        for i in chosen:
            worker = self.worker_of[i]
            parts.setdefault(worker, []).append(i - worker.first)
        return list(parts.items())

    # --- reset
    @one_at_a_time
    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Reset all environments, or those in `options["reset_mask"]`.

        Args:
            seed: None, an int (env i gets `seed + i`) or one seed per env.
            options: passed to every env, without `reset_mask`.
        """
        self._begin_reset(seed, options)
        return self._end("reset", None, self._reset_result)

    @one_at_a_time
    def reset_async(self, seed: Seeds = None, options: dict[str, Any] | None = None) -> None:
        """Begin a reset; `reset_wait` returns its result."""
        self._begin_reset(seed, options)

    @one_at_a_time
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, Info]:
        """The first observations and infos of the episodes begun by `reset_async`."""
        return self._end("reset", timeout, self._reset_result)

    @one_at_a_time
    def reset_some(
        self, indices: Sequence[int], seeds: Sequence[int | None], options: dict[str, Any] | None = None
    ) -> list[tuple[Any, Info]]:
        """Reset the environments `indices`, each with its seed; one `(observation, info)` for each."""
        chosen, seeds = self._indices(indices, seeds, "seeds")
        given = dict(zip(chosen, map(plain_seed, seeds), strict=True))

        def take(replies: list[Reply], pending: Pending) -> list[tuple[Any, Info]]:
            infos = by_env(self._taken(replies, pending))
            return [(self.shown.one(i), infos.get(i, {})) for i in chosen]

        self._reset("reset_some", given, options)
        return self._end("reset", None, take)

    def _begin_reset(self, seed: Seeds, options: dict[str, Any] | None) -> None:
        options = check_options(options)
        chosen: Sequence[int] = range(self.num_envs)
        if options is not None and "reset_mask" in options:
            options = dict(options)
            chosen = np.flatnonzero(check_mask(options.pop("reset_mask"), self.num_envs)).tolist()
        seeds = seeds_per_env(seed, self.num_envs)
        self._reset("reset", {i: seeds[i] for i in chosen}, options)

    def _reset(self, operation: str, seeds: dict[int, int | None], options: dict[str, Any] | None) -> None:
        """Begin to reset these environments; those in flight are dropped where all are reset."""
        self._check_idle(operation, flying=len(seeds) == self.num_envs)
        self._in_flight = {}
        self._begin("reset", self._resets(seeds, options))

    def _resets(self, seeds: dict[int, int | None], options: dict[str, Any] | None) -> Pending:
        """The commands that reset these environments; their workers are freed of what a broken-off call left."""
        by_worker = self.by_worker(sorted(seeds))
        for i in seeds:
            self.undone.setdefault(i)
        self._settle([worker for worker, _ in by_worker])
        lost = [worker for worker, _ in by_worker if worker.lost is not None]
        raise_first(self._policy.restart(lost))
        for i in (i for worker in lost for i in worker.ids):
            self._policy.replaced[i] += 1
            if i in seeds and seeds[i] is None:
                seeds[i] = self._policy.next_seed(i)
        for i, seed in seeds.items():
            if seed is not None:
                self._policy.seeds[i] = seed
        return [
            (worker, Reset(members, [seeds[worker.first + j] for j in members], options))
            for worker, members in by_worker
        ]

    def _settle(self, workers: Sequence[Worker]) -> None:
        """Wait for those that a broken-off operation left at work, and give up those that do not return."""
        for worker in workers:
            if worker.inline:
                worker.command = None
        busy = [worker for worker in workers if worker.command is not None]
        seconds = max((worker.limits.step or SETTLE_SECONDS for worker in busy), default=0.0)
        try:
            wait_for(busy, time.monotonic() + seconds)
        except DeadlineError:
            late = [worker for worker in busy if not worker.answered()]
            for worker in late:
                if worker.can_be_killed:
                    worker.lose(worker.failure("timeout", f"no answer within {seconds:g} s"))
            threads = [worker for worker in late if not worker.can_be_killed]
            if threads:
                names = ", ".join(f"env {worker.first + worker.progress()}" for worker in threads)
                logger.warning("reset() waits for %s, still at work after %g s", names, seconds)
                wait_for(threads)
        for worker in busy:
            worker.receive()

    def _reset_result(self, replies: list[Reply], pending: Pending) -> tuple[Any, Info]:
        env_infos = self._taken(replies, pending)
        return self.shown.batch(), batch_infos(self.num_envs, env_infos)

    # --- step
    @one_at_a_time
    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Info]:
        """Step every environment with its action."""
        self._begin_step(actions)
        return self._end("step", None, self._step_result)

    @one_at_a_time
    def step_async(self, actions: Any) -> None:
        """Begin a step; `step_wait` returns its result."""
        self._begin_step(actions)

    @one_at_a_time
    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, Info]:
        """Observations, rewards, terminations, truncations and infos of the step begun by `step_async`.

        Raises:
            PendingTimeoutError: after `timeout` seconds; then `reset()` begins anew.
        """
        return self._end("step", timeout, self._step_result)

    @one_at_a_time
    def step_wait_each(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, list[EnvInfo]]:
        """`step_wait` with the infos as they came."""

        def take(replies: list[Reply], pending: Pending) -> tuple[Any, Any, Any, Any, list[EnvInfo]]:
            env_infos = self._taken(replies, pending)
            return (*self._arrays(), list(env_infos))

        return self._end("step", timeout, take)

    def _begin_step(self, actions: Any) -> None:
        self._check_idle("step", range(self.num_envs))
        self._step_all(write_actions(self.buffers, actions))

    def _step_all(self, pickled: PickledActions) -> None:
        self._step_began = time.perf_counter()
        self.buffers.flags.fill(False)
        if pickled:
            self._begin("step", [(w, _step_of(w, range(w.count), pickled)) for w in self.workers])
        else:
            self._begin("step", [(worker, STEP_ALL) for worker in self.workers])

    def _step_result(self, replies: list[Reply], pending: Pending) -> tuple[Any, Any, Any, Any, Info]:
        env_infos = self._taken(replies, pending)
        result = (*self._arrays(), batch_infos(self.num_envs, env_infos) if env_infos else {})
        self._steps += 1
        self._seconds += time.perf_counter() - self._step_began
        return result

    def _arrays(self) -> tuple[Any, Any, Any, Any]:
        """Observations, rewards, terminations and truncations."""
        buffers = self.buffers
        paid = buffers.rewards.copy(), buffers.terminated.copy(), buffers.truncated.copy()
        return (self.shown.batch(), *paid)

    @one_at_a_time
    def step_some(self, indices: Sequence[int], actions: Sequence[Any]) -> list[StepResult]:
        """Step only the environments `indices`, with one action each; the others are left alone.

        An action may be anything: what is not in the action space reaches the env as it is.
        """
        chosen, actions = self._indices(indices, actions, "actions")

        def take(replies: list[Reply], pending: Pending) -> list[StepResult]:
            infos = by_env(self._taken(replies, pending))
            buffers = self.buffers
            flags = zip(
                buffers.rewards[chosen].tolist(),
                buffers.terminated[chosen].tolist(),
                buffers.truncated[chosen].tolist(),
                strict=True,
            )
            return [
                StepResult(self.shown.one(i), *paid, infos.get(i, {}))
                for i, paid in zip(chosen, flags, strict=True)
            ]

        self._check_idle("step_some", chosen)
        pickled = write_some(self.buffers, chosen, actions)
        self.buffers.terminated[chosen] = self.buffers.truncated[chosen] = False
        parts = self.by_worker(sorted(chosen))
        self._begin("step", [(worker, _step_of(worker, members, pickled)) for worker, members in parts])
        return self._end("step", None, take)

    # --- replies
    def _taken(self, replies: Sequence[Reply], pending: Pending) -> Sequence[EnvInfo] | InfoTable:
        """What `_take` gives; what is shown now is remembered."""
        env_infos = self._take(replies, pending)
        if self._remembers:
            self._policy.remember()
        return env_infos

    def _take(self, replies: Sequence[Reply], pending: Pending) -> Sequence[EnvInfo] | InfoTable:
        """Read the replies to a reset or step, apply the failure policy, and return the infos."""
        failures = [failure for reply in replies for failure in reply.failures]
        failed = {failure.env for failure in failures}
        env_infos: list[EnvInfo] = []
        tables: list[InfoTable] = []
        for (worker, command), reply in zip(pending, replies, strict=True):
            if reply.columns:
                self.shown.take(ids_of(worker, command), reply.columns, failed)
            if isinstance(reply.env_infos, InfoTable):
                tables.append(reply.env_infos)
            elif reply.env_infos:
                env_infos += reply.env_infos
        if tables:
            joined = None if env_infos or failures or self.undone else InfoTable.joined(tables, self.num_envs)
            if joined is not None:
                return joined
            env_infos += itertools.chain.from_iterable(tables)
        if self.same_step and env_infos:
            env_infos = [
                item._replace(final=self._policy.final(item.env)) if item.final is FINAL_IN_BUFFER else item
                for item in env_infos
            ]
        if failures:
            env_infos = self._policy.recover(failures, env_infos, pending)
        for worker, command in pending if self.undone else ():
            for i in ids_of(worker, command) if isinstance(command, Reset) else ():
                self.undone.pop(i, None)
        return env_infos

    # --- methods and attributes of the environments
    @one_at_a_time
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute; one result per environment."""
        self._begin_call(name, args, kwargs)
        return tuple(self._answers(None).values())

    @one_at_a_time
    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a call; `call_wait` returns its results."""
        self._begin_call(name, args, kwargs)

    @one_at_a_time
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of `call_async`, in the order of the environments."""
        return tuple(self._answers(timeout).values())

    def _begin_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in ("reset", "step", "close"):
            raise ValueError(f"{name!r} has a method of its own on the vector environment; use that")
        given: dict[int, Any] = dict.fromkeys(range(self.num_envs), (name, args, kwargs))
        self._begin_apply("call", f"call {name}", call_attribute, given)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self.call(name)

    @one_at_a_time
    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment: one value for all, or a list or tuple of one for each."""
        each = values if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ValueError(
                f"values must be a list or tuple of one value per environment ({self.num_envs}), got {len(each)}"
            )
        given: dict[int, Any] = {i: ("set_wrapper_attr", (name, value), {}) for i, value in enumerate(each)}
        self._begin_apply("set_attr", f"set {name}", call_attribute, given)
        self._answers(None)

    @one_at_a_time
    def apply(
        self, function: Callable[..., Any], *args: Any, indices: Sequence[int] | None = None
    ) -> list[Any]:
        """`function(env, *args)` for each environment, or some of them, where they live."""
        chosen = list(range(self.num_envs))
        if indices is not None:
            chosen = self._indices(given := list(indices), given, "indices")[0]
        doing = getattr(function, "__name__", "apply")
        self._begin_apply("apply", doing, function, dict.fromkeys(sorted(chosen), args))
        results = self._answers(None)
        return [results[i] for i in chosen]

    def _begin_apply(
        self, operation: str, doing: str, function: Callable[..., Any], args: Mapping[int, Sequence[Any]]
    ) -> None:
        """Begin something with the envs that have `args`."""
        self._check_idle(operation, args)
        commands = [
            (worker, Apply(doing, function, [args[worker.first + j] for j in members], members))
            for worker, members in self.by_worker(args)
        ]
        for worker, command in commands:
            if not worker.inline:
                dumps(command)  # before any is sent: what cannot be sent to one is sent to none
        self._begin("call", commands)

    def _answers(self, timeout: float | None) -> dict[int, Any]:
        """The result of a call for each env; one that raises leaves episodes as they are, but for lost workers."""
        replies, pending = self._end("call", timeout, lambda *given: given)
        self._break_off([(worker, command) for worker, command in pending if worker.lost is not None])
        answers: dict[int, Any] = {}
        for (worker, command), reply in zip(pending, replies, strict=True):
            answers.update(zip(ids_of(worker, command), reply.value or (), strict=False))
        raise_first(failures_of(replies))
        return answers

    def render(self) -> tuple[Any, ...]:
        """What every environment renders."""
        return self.call("render")

    @property  # type: ignore[override]
    def np_random_seed(self) -> Any:
        """The seed of every environment's generator."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> Any:
        """Every environment's generator (from other processes: copies)."""
        return self.get_attr("np_random")

    # --- environments at their own pace: a worker with all its environments is the unit
    @one_at_a_time
    def send(self, env_ids: Sequence[int], actions: Sequence[Any]) -> None:
        """Begin to step these environments; `recv` returns them when they are ready.

        They are all those of one or more workers: `num_workers=num_envs` makes each env a unit of its own.
        """
        ids, actions, workers = self._units("send", env_ids, actions, "actions")
        self._check_idle("send", ids, flying=True)
        pickled = write_some(self.buffers, ids, actions)
        self.buffers.terminated[ids] = self.buffers.truncated[ids] = False
        self._dispatch([(worker, _step_of(worker, range(worker.count), pickled)) for worker in workers])

    @one_at_a_time
    def send_reset(self, env_ids: Sequence[int], seeds: Sequence[int | None] | None = None) -> None:
        """Begin to reset these environments, all those of one or more workers; `recv` returns them."""
        ids = list(env_ids)
        ids, given, _ = self._units("send_reset", ids, [None] * len(ids) if seeds is None else seeds, "seeds")
        self._dispatch(self._resets(dict(zip(ids, map(plain_seed, given), strict=True)), None))

    def _units(
        self, operation: str, env_ids: Sequence[int], given: Sequence[Any], word: str
    ) -> tuple[list[int], list[Any], list[Worker]]:
        """The ids, what is given for each, and their workers: idle ones, of which they are all environments."""
        self._check_idle(operation, flying=True)
        ids, each = self._indices(env_ids, given, word)
        workers = list(dict.fromkeys(self.worker_of[i] for i in ids))
        flying = [i for i in ids if self.worker_of[i] in self._in_flight]
        if flying:
            raise ValueError(
                f"environments {flying} are still in flight: recv them before sending them again"
            )
        missing = sorted({i for worker in workers for i in worker.ids}.difference(ids))
        if missing:
            raise ValueError(
                f"environments {missing} share a worker with some of these and must be sent with them; "
                "num_workers=num_envs gives each environment a worker of its own"
            )
        return ids, each, workers

    def _dispatch(self, commands: Pending) -> None:
        try:
            for worker, command in commands:
                worker.begin(command)
                self._in_flight[worker] = command
        except BaseException:
            self._break_off([(w, command) for w, command in commands if w not in self._in_flight])
            raise

    @one_at_a_time
    def recv(self, min_envs: int = 1, timeout: float | None = None) -> Ready:
        """The environments that are ready, at least `min_envs` of those in flight, by whole workers.

        After `timeout` seconds it returns what there is, perhaps nothing.

        Raises:
            Exception: an environment failed and nothing replaces it: those that were ready have to be reset first.
        """
        self._check_idle("recv", flying=True)
        check_whole(min_envs, "min_envs", 1)
        check_limit(timeout, "timeout")
        if not self._in_flight:
            raise ValueError("no environment is in flight: send some actions first")
        deadline = None if timeout is None else time.monotonic() + timeout
        with contextlib.suppress(DeadlineError):
            wait_for(list(self._in_flight), deadline, min(min_envs, len(self.in_flight)))
        pending = [(worker, command) for worker, command in self._in_flight.items() if worker.answered()]
        try:
            for worker, _ in pending:
                del self._in_flight[worker]
            env_infos = self._take([worker.receive() for worker, _ in pending], pending)
        except BaseException:
            self._break_off(pending)
            raise
        ids = [i for worker, _ in pending for i in worker.ids]
        if self._remembers:
            self._policy.remember(ids)
        buffers, chosen, infos = self.buffers, np.array(ids, dtype=np.int64), by_env(env_infos)
        return Ready(
            chosen,
            buffers.observations.rebuild(self.shown.some(ids)),
            buffers.rewards[chosen],
            buffers.terminated[chosen],
            buffers.truncated[chosen],
            [infos.get(i, {}) for i in ids],
        )

    @property
    def in_flight(self) -> list[int]:
        """The environments that were sent and not received."""
        return sorted(i for worker in self._in_flight for i in worker.ids)

    # --- what is known
    def _indices(
        self, indices: Sequence[int], partners: Sequence[Any], word: str
    ) -> tuple[list[int], list[Any]]:
        """Different environments that take part, and the `partners` (the `word` that goes with them), one for each."""
        chosen = [check_whole(i, "an index", 0) for i in indices]
        each = one_each(partners, len(chosen), word)
        if len(set(chosen)) != len(chosen) or any(i >= self.num_envs for i in chosen):
            raise ValueError(f"indices must be different numbers in [0, {self.num_envs}), got {chosen}")
        return chosen, each

    def observations(self) -> Any:
        """The present observations of all environments."""
        return self.buffers.observations.rebuild(self.shown.some(slice(None)))

    def stats(self) -> dict[str, Any]:
        """What is known of speed, memory and failures.

        `steps` counts steps of all environments together, those of `step` alone, and `step_seconds` is the mean time of
        one;
        `restarts` and `failures` count per env; `workers` has a row with pid and memory for each process.
        """
        return {
            "steps": self._steps,
            "step_seconds": self._seconds / self._steps if self._steps and self._state is None else math.nan,
            "restarts": list(self._policy.replaced),
            "failures": list(self._policy.failed),
            "workers": [row for worker in self.workers if (row := worker.stats())],
        }

    # --- the end
    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments; a worker that has not done so after `timeout` seconds (30) is killed."""
        check_limit(timeout, "timeout")
        if self._is_forked():
            return
        self.closed = True  # first: a call in another thread ends, and says so
        seconds = CLOSE_SECONDS if timeout is None else timeout
        close_all(self.workers, self._close_rest, 0.0 if terminate else seconds)
        self._finish.cancel()


class SerialVectorEnv(VectorPool):
    """All environments in the caller's thread: a plain step crosses no worker."""

    @one_at_a_time
    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Info]:
        """Step every environment with its action."""
        self._check_idle("step", range(self.num_envs))
        buffers = self.buffers
        target = plain_target(buffers)
        if (  # (in place, as a call would cost a fiftieth of a small step)
            target is None
            or type(actions) is not np.ndarray
            or actions.dtype != target.dtype
            or actions.shape != target.shape
        ):
            self._step_all(write_actions(buffers, actions))
            return self._end("step", None, self._step_result)
        began = time.perf_counter()
        worker = self.workers[0]
        assert worker.group is not None
        infos: Info = {}
        try:
            given = list(actions if actions.ndim == 1 else actions.copy())
            reply = worker.group.step(given)
            if reply.failures or reply.env_infos:
                env_infos = self._take([reply], [(worker, Step(None, {}, given))])
                infos = batch_infos(self.num_envs, env_infos) if env_infos else {}
            elif reply.columns:
                self.shown.take(worker.ids, reply.columns)
            result = (*self._arrays(), infos)
            if self._remembers:
                self._policy.remember()
        except BaseException:
            self._break_off([(worker, STEP_ALL)])
            raise
        self._steps += 1
        self._seconds += time.perf_counter() - began
        return result


def close_all(
    workers: Sequence[Worker], close_rest: Callable[[], None], seconds: float = CLOSE_SECONDS
) -> None:
    """Close workers, by force after so many seconds, and free what they share; what fails is logged."""
    try:
        asked = [worker for worker in workers if worker.begin_close()]
        own = [failure for worker in asked if worker.inline for failure in worker.receive().failures]
        asked = [worker for worker in asked if not worker.inline]
        with contextlib.suppress(DeadlineError):
            wait_for(asked, time.monotonic() + seconds)
        failures = own + [f for worker in asked if worker.answered() for f in worker.receive().failures]
        for failure in failures:
            logger.warning("%s", describe(failure))
        for worker in asked:
            if worker.command is not None and seconds > 0:
                env = worker.first + worker.progress()
                logger.warning("env %d was still closing after %g s: it was left or ended", env, seconds)
    finally:
        for worker in workers:
            worker.close()
        close_rest()


def _step_of(worker: Worker, members: Sequence[int], pickled: PickledActions) -> Step:
    """A step of some members of a worker."""
    everyone = len(members) == worker.count
    pickled = for_worker(pickled, worker.first, worker.count)
    return STEP_ALL if everyone and not pickled else Step(None if everyone else members, pickled)
