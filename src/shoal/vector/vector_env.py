"""Many environments behind one `gymnasium.vector.VectorEnv`, whatever steps them.

Every operation goes the same way: commands for the workers, one wait for their replies, failures dealt with, one
batch. A command that nobody waits for any more (a time limit, Ctrl-C) is abandoned: it runs to its end before its
envs take part in anything else, and an episode that ended in it is reported by the next step of its env.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import multiprocessing
import operator
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.core.errors import WorkerError, WorkerTimeoutError
from shoal.core.processes import dumps
from shoal.core.seeding import derive_seed
from shoal.vector.buffers import (
    NOTHING_LOOSE,
    WHOLE,
    Array,
    Buffers,
    Loose,
    Observations,
    of_group,
    one_each,
    plain_target,
    split,
    write_batch,
    write_some,
)
from shoal.vector.env_group import (
    Apply,
    Command,
    EnvGroup,
    Rebuild,
    Reply,
    Reset,
    Step,
    call_attribute,
    ids_of,
    quantiles,
)
from shoal.vector.failures import (
    DEALT_WITH,
    MOST_AT_ONCE,
    Failure,
    MaskedEnv,
    OnFailure,
    Owed,
    error_of,
    raise_first,
    restart_seed,
)
from shoal.vector.process import Backend, DeadlineError, Worker, replies_of, wait_any
from shoal.vector.values import (
    IN_BUFFER,
    Info,
    Ready,
    StepResult,
    Table,
    Told,
    batch_infos,
    by_env,
    limit,
    reset_options,
    whole,
)
from shoal.vector.worker import Attach

logger = logging.getLogger(__name__)
T = TypeVar("T")
Seeds = int | Sequence[int | None] | None
NOBODY: Set[int] = frozenset()
Turn = dict[str, Any]
"""An operation that goes on: its "state", once it has begun, and its "waiter", which only one thread is."""
Pending = list[tuple[Worker, Any]]
"""Workers and what each was told."""


class Description(NamedTuple):
    """What a vector env must know of its environments before it can talk to them."""

    observation_spaces: list[gymnasium.Space[Any]]
    action_spaces: list[gymnasium.Space[Any]]
    observation_space: gymnasium.Space[Any]  # batched
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any


class PendingTimeoutError(WorkerTimeoutError, multiprocessing.TimeoutError):
    """A `*_wait(timeout=…)` ran out.

    Attributes:
        begun: whether the operation had begun: then it runs to its end, and the next step tells what must not be
            lost of it. Otherwise it waited for one abandoned before, has touched no env, and never will.
    """

    begun = True


class VectorPool(VectorEnv[Any, Any, Any]):
    """A vector environment; made by `make_vec`, which explains its options.

    The `workers` have made their environments, and know of the buffers; without a backend the caller steps all.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        backend: Backend | None,
        buffers: Buffers,
        attach: Attach,
        description: Description,
        *,
        on_failure: OnFailure = "raise",
        max_restarts: int = 3,
        copy_observations: bool = True,
        handouts: bool = False,
    ) -> None:
        self.num_envs = buffers.n_envs
        self.workers, self.backend, self.buffers = list(workers), backend, buffers
        self.on_failure, self.max_restarts = on_failure, max_restarts
        self.warns = True  # of failures that are dealt with, unless who steps it tells of them
        self.autoreset_mode = attach.autoreset
        self.metadata = {**description.metadata, "autoreset_mode": attach.autoreset}
        self.render_mode, self.spec = description.render_mode, description.spec
        self.observation_spaces = description.observation_spaces
        self.action_spaces = description.action_spaces
        self.single_observation_space = description.observation_spaces[0]
        self.single_action_space = description.action_spaces[0]
        self.observation_space = description.observation_space
        self.action_space = description.action_space
        self.active = np.ones(self.num_envs, dtype=np.bool_)
        """False for environments that were masked out after a failure."""
        self._same_step = attach.autoreset is AutoresetMode.SAME_STEP
        self._attach = attach
        self._observations = Observations(buffers, copy=copy_observations, handouts=handouts)
        self._plain_actions = plain_target(buffers)
        self._alone = self.workers[0].group if backend is None else None
        self._inline = [worker for worker in self.workers if worker.inline]
        self._by_env = [worker for worker in self.workers for _ in range(worker.count)]
        self._place = 0
        self._seeds: list[int | None] = [None] * self.num_envs
        self._failed = [0] * self.num_envs
        self._replaced = [0] * self.num_envs
        self._masked_by: Failure | None = None  # the last env that was masked out
        self._owed: dict[int, Owed] = {}
        # what is under way
        # "now": what goes on from `*_async` to `*_wait`. An interrupt leaves no `setdefault` or `clear` half done.
        self._turn: dict[str, Turn] = {}
        self._pending: Pending = []
        # whom the operation waits for, before it begins
        self._deferred: tuple[list[Worker], Callable[[], None]] | None = None
        self._resting = NOBODY  # envs that the step under way leaves out: it tells what came late
        self._late: list[Worker] = []  # at an abandoned command
        self._late_failures: list[Failure] = []
        self._flying: dict[int, float] = {}  # what was sent and not received: env -> when
        self._landed: list[Ready] = []  # with columns of observations
        self._errors: list[Exception] = []
        self._pace = 0.0  # seconds between results in the last `recv` that had as many as it wanted
        self._waited = self._stepping = self._began = 0.0
        self._finalizer = weakref.finalize(self, close_all, self.workers, backend, os.getpid())
        self._closing = self._is_parents = False
        self._close_lock = threading.RLock()
        if backend is not None:
            _with_workers.add(self)

    # --- one operation at a time
    def _enter(self, operation: str, *, flying: bool = False) -> None:
        mine: Turn = {}
        try:
            if self.closed or self._turn.setdefault("now", mine) is not mine:
                self._check_open()
                state = str(self._turn.get("now", {}).get("state"))
                raise AlreadyPendingCallError(
                    f"Calling `{operation}` while waiting for a pending call to `{state}` to complete.", state
                )
            if self._flying and not flying:
                raise AlreadyPendingCallError(
                    f"Calling `{operation}` while environments {sorted(self._flying)[:8]} are in flight; `recv` "
                    "them.",
                    "recv",
                )
        except BaseException:
            if self._turn.get("now") is mine:
                self._turn.clear()
            raise

    def _check_open(self) -> None:
        if self._is_parents:
            raise ClosedEnvironmentError(
                f"Trying to operate on a `{type(self).__name__}` whose workers answer the process that this one was "
                "forked from: make one here."
            )
        if self.closed or self._closing:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )

    def _expect(self, operation: str, timeout: float | None) -> Turn:
        """The turn that `operation` began."""
        now = self._turn.get("now", {})
        if self.closed or self._closing or now.get("state") != operation:
            self._check_open()
            raise NoAsyncCallError(
                f"Calling `{operation}_wait` without any prior call to `{operation}_async`.", operation
            )
        if timeout is not None:
            limit(timeout, "timeout")
        return now

    def _begun(self, operation: str, ids: Iterable[int], begin: Callable[[], None]) -> None:
        """Begin what concerns the envs `ids`; `*_wait` does, if one of them is at an abandoned command."""
        self._enter(operation)
        try:
            concerned = {self._by_env[i] for i in ids} if self._late else ()
            late = [worker for worker in self._late if worker in concerned]
            if late:
                self._deferred = late, begin
            else:
                begin()
            self._turn["now"]["state"] = operation.partition("_")[0]
        except BaseException:  # what it began is abandoned
            self._abandon({})
            self._turn.clear()
            raise

    def _at_once(self, begin: Callable[[], None], wait: Callable[[], T]) -> T:
        """What `wait` gives of what `begin` began; an interrupt between the two abandons it, as it does in each."""
        begin()
        mine = None
        try:
            mine = self._turn.get("now")
            return wait()
        except BaseException:
            now = self._turn.get("now")
            if now is not None and now is (mine or now) and "waiter" not in now:
                self._abandon({})
                self._turn.clear()
            raise

    def _abandon(self, replies: dict[Worker, Reply | None]) -> None:
        """Nobody waits for what is pending any more; what was answered already keeps its ends."""
        pending, self._pending, self._deferred = self._pending, [], None
        self._resting = NOBODY
        for worker, command in pending:
            begun = worker.command is command
            if worker in replies:
                self._land_late(worker, command, replies[worker])
            elif worker.inline and not begun:  # the caller was amid it
                self._land_late(worker, command, None)
            elif begun and not worker.inline:
                self._late.append(worker)
            else:
                if begun:
                    worker.command = None
                self._take_back(worker, command)

    def _take_back(self, worker: Worker, command: Command) -> None:
        """It was never sent, or never done: what its envs showed last stands."""
        if isinstance(command, Step | Reset):
            self._observations.carry(worker.ids, worker.before, worker.place)

    # --- reset
    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Reset all environments, or those in `options["reset_mask"]`.

        Args:
            seed: None, an int (env i gets `seed + i`) or one seed per env.
            options: passed to every env, without `reset_mask`.
        """
        return self._at_once(lambda: self.reset_async(seed, options), self.reset_wait)

    def reset_async(self, seed: Seeds = None, options: dict[str, Any] | None = None) -> None:
        """Begin a reset; `reset_wait` returns its result."""
        chosen: Sequence[int] = range(self.num_envs)
        rest = options = reset_options(options)
        if options is not None and "reset_mask" in options:
            rest = dict(options)
            chosen = np.flatnonzero(_checked_mask(rest.pop("reset_mask"), self.num_envs)).tolist()
        seeds = spread(seed, self.num_envs)
        self._begun("reset_async", chosen, lambda: self._begin_reset(chosen, seeds, rest))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, Info]:
        """The first observations and infos of the episodes begun by `reset_async`."""
        turn = self._expect("reset", timeout)
        take = lambda replies: (self._finished(replies), self._batch())  # noqa: E731
        told, obs = self._collect(timeout, "reset", take, turn)
        return obs, batch_infos(self.num_envs, told)

    def reset_each(
        self, seeds: Sequence[int | None], options: dict[str, Any] | None = None
    ) -> tuple[Any, list[Info]]:
        """Reset all environments: a batch of observations and one info per environment."""

        def take(replies: Sequence[Reply | None]) -> tuple[Any, list[Info]]:
            infos = by_env(self._finished(replies))
            return self._batch(), [infos.get(i, {}) for i in range(self.num_envs)]

        return self._at_once(
            lambda: self.reset_async(list(seeds), options), lambda: self._collect(None, "reset", take)
        )

    def reset_some(
        self, indices: Sequence[int], seeds: Sequence[int | None], options: dict[str, Any] | None = None
    ) -> list[tuple[Any, Info]]:
        """Reset the environments `indices`, each with its seed; one `(observation, info)` for each."""
        chosen, seeds = self._indices(indices, seeds, "seeds")
        everyone: list[int | None] = [None] * self.num_envs
        for i, seed in zip(chosen, seeds, strict=True):
            everyone[i] = plain_seed(seed)
        begin = functools.partial(self._begin_reset, sorted(chosen), everyone, options)

        def take(replies: Sequence[Reply | None]) -> list[tuple[Any, Info]]:
            infos = by_env(self._finished(replies))
            return [(self._observation(i), infos.get(i, {})) for i in chosen]

        return self._done("reset_some", chosen, begin, "reset", take)

    def _begin_reset(
        self, chosen: Sequence[int], seeds: list[int | None], options: dict[str, Any] | None
    ) -> None:
        if chosen:
            self._check_one_is_left()
        alive = [i for i in chosen if self.active[i]]
        if options and any(self._by_env[i].sends for i in alive):
            dumps(options)  # before any end is forgotten: what cannot be sent, none gets
        for i in alive:
            self._owed.pop(i, None)
            if seeds[i] is not None:
                self._seeds[i] = seeds[i]
        lost = [worker for worker in self.workers if worker.lost is not None]
        if lost and len(alive) == int(self.active.sum()):
            anew = {i for worker in lost for i in self._lost_with(worker.first)}
            raise_first(self._start_anew(lost))  # fresh workers in place of those that a raised failure left
            for i in anew:
                self._replaced[i] += 1
                if seeds[i] is None:
                    seeds[i] = restart_seed(self._seeds[i], self._replaced[i])
        place = self._next_place()
        for worker, members in self._by_worker(alive, rest=True):
            given = [seeds[worker.first + j] for j in members]
            self._begin(worker, Reset(members, given, options, place))

    # --- step
    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Info]:
        """Step every environment with its action."""
        if (
            self._alone is not None
            and self._masked_by is None
            and not (self._owed or self._late_failures)
            and self._is_plain(actions)
        ):
            return self._step_alone(self._alone, actions)
        return self._at_once(lambda: self.step_async(actions), self.step_wait)

    def step_async(self, actions: Any) -> None:
        """Begin a step; `step_wait` returns its result."""
        columns = split(self.buffers.actions, actions, self.num_envs)
        if self._late:  # they are written later
            columns = [column.copy() if isinstance(column, np.ndarray) else column for column in columns]
        everyone = range(self.num_envs)
        self._begun("step_async", everyone, lambda: self._begin_step(write_batch(self.buffers, columns)))

    def _is_plain(self, actions: Any) -> bool:
        """They are one array of the space's own type, to be taken as it is."""
        target = self._plain_actions
        return (
            target is not None
            and type(actions) is np.ndarray
            and (actions.dtype is target.dtype or actions.dtype == target.dtype)
            and actions.shape == target.shape
        )

    def _step_alone(self, group: EnvGroup, actions: Array) -> tuple[Any, Any, Any, Any, Info]:
        """`step` of a group that is the caller's own and the only one: nothing has far to go, nobody is waited for."""
        self._enter("step")
        told: list[Told] | Table = []
        try:
            self._turn["now"].update(waiter=self, state="step")
            worker, buffers = self.workers[0], self.buffers
            given = list(actions if actions.ndim == 1 else actions.copy())
            buffers.flags.fill(False)
            place = self._next_place() if buffers.places > 1 else 0  # which may itself move the worker: first
            worker.before, worker.place = worker.place, place
            reply: Reply | None = None
            try:
                reply = group.step(given, None, worker.place)
                tells = self._same_step and buffers.any_end()
                if reply is not None and (reply.told or reply.failures):
                    tells = True
                elif reply is not None:
                    self._observations.keep(worker.ids, reply.columns)
            except BaseException:  # an interrupt
                self._land_late(worker, Step(None, worker.place, NOTHING_LOOSE, given), reply)
                raise
            try:
                if tells:
                    self._pending.append((worker, Step(None, worker.place, NOTHING_LOOSE, given)))
                    told = self._finished([reply])
                return self._shown(told, self._infos)  # before another thread may begin what writes over it
            except BaseException:
                self._owe_all([reply], told)
                raise
        except Exception:
            self._check_open()  # an env closed it meanwhile: that is why
            raise
        finally:
            self._pending = []
            self._turn.clear()

    def step_async_each(self, actions: Sequence[Any]) -> None:
        """`step_async` with one action per environment, not batched."""
        ids, given = range(self.num_envs), one_each(actions, self.num_envs)
        self._begun("step_async", ids, lambda: self._begin_step(write_some(self.buffers, ids, given)))

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, Info]:
        """Observations, rewards, terminations, truncations and infos of the step begun by `step_async`.

        Raises:
            PendingTimeoutError: after `timeout` seconds. The step runs to its end; but if an env it concerns was still
                at an abandoned command (`error.begun` is False), it has not begun anywhere and never will.
        """
        turn = self._expect("step", timeout)
        take = lambda replies: self._shown(self._finished(replies), self._infos)  # noqa: E731
        return self._collect(timeout, "step", take, turn)

    def step_wait_each(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, list[Told]]:
        """`step_wait` with the infos as they came."""
        turn = self._expect("step", timeout)
        return self._collect(
            timeout, "step", lambda replies: self._shown(self._finished(replies), list), turn
        )

    def _infos(self, told: list[Told] | Table) -> Info:
        """The infos of a step by their keys."""
        return batch_infos(self.num_envs, told) if told else {}

    def _shown(
        self, told: list[Told] | Table, infos: Callable[[list[Told] | Table], T]
    ) -> tuple[Any, Any, Any, Any, T]:
        """Observations, rewards, terminations and truncations of the last step, and what `infos` makes of the told."""
        buffers = self.buffers
        try:
            paid = buffers.rewards.copy(), buffers.terminated.copy(), buffers.truncated.copy()
            return self._batch(), *paid, infos(told)
        except BaseException:  # an interrupt
            self._owe_all((), told)
            raise

    def _owe_all(self, replies: Iterable[Reply | None], told: Iterable[Told] = ()) -> None:
        """Remember the ends of the step under way, of which the caller sees nothing."""
        known = [reply for reply in replies if reply is not None]
        told = list(told) or [item for reply in known for item in reply.told]
        ids = [item.env for item in told if item.env in self._resting and item.env not in self._owed]
        for worker, command in self._pending:
            if isinstance(command, Step):
                ids += ids_of(worker, command)
        alone = self._alone is not None and not self._pending
        failed = {failure.env for reply in known for failure in reply.failures}
        self._owe(range(self.num_envs) if alone else ids, told, failed)

    def step_some(self, indices: Sequence[int], actions: Sequence[Any]) -> list[StepResult]:
        """Step only the environments `indices`, with one action each; the others are left alone.

        An action may be anything: what is not in the action space reaches the env as it is.
        """
        chosen, actions = self._indices(indices, actions, "actions")
        write = functools.partial(write_some, self.buffers, chosen, actions)

        def take(replies: Sequence[Reply | None]) -> list[StepResult]:
            infos = by_env(self._finished(replies))
            return [StepResult(self._observation(i), *self._paid(i), infos.get(i, {})) for i in chosen]

        begin = lambda: self._begin_step(write(), sorted(chosen))  # noqa: E731
        return self._done("step_some", chosen, begin, "step", take)

    def _begin_step(self, loose: Loose, chosen: Sequence[int] | None = None) -> None:
        """Begin to step all envs, or only those `chosen`."""
        if chosen is None:
            self._began = time.perf_counter()
            if self._masked_by is None and not (self._owed or self._late_failures):
                self.buffers.flags.fill(False)
                place = self._next_place() if self.buffers.places > 1 else 0
                pending = self._pending
                for worker in self.workers:
                    worker.before, worker.place = worker.place, place
                    command = Step(None, place, of_group(loose, worker.first, worker.count))
                    pending.append((worker, command))
                    worker.begin(command)
                return
            self._check_one_is_left()
            for i in np.flatnonzero(~self.active).tolist():
                self._owed.setdefault(
                    i, Owed(0.0, False, False, Told(i, None, None, {"worker_masked": True}))
                )
            chosen = range(self.num_envs)
        failed = {failure.env for failure in self._late_failures}
        going = [i for i in chosen if i not in self._owed and i not in failed]
        self._resting = set(chosen).difference(going)
        self._clear_ends(going)
        place = self._next_place()
        for worker, members in self._by_worker(going, rest=True):
            self._begin(worker, Step(members, place, of_group(loose, worker.first, worker.count)))

    def _check_one_is_left(self) -> None:
        if self._masked_by is not None and not self.active.any():
            raise WorkerError(
                f"none of the {self.num_envs} environments is left: each failed and was masked out; make them anew, or "
                "have those that fail replaced (on_failure='restart')"
            ) from error_of(self._masked_by)

    def _paid(self, i: int) -> tuple[float, bool, bool]:
        """What the last step of an env gave: its reward, whether it terminated, and whether it was truncated."""
        buffers = self.buffers
        return float(buffers.rewards[i]), bool(buffers.terminated[i]), bool(buffers.truncated[i])

    def _flag(self, i: int, reward: float, terminated: bool, truncated: bool) -> None:
        buffers = self.buffers
        buffers.rewards[i], buffers.terminated[i], buffers.truncated[i] = reward, terminated, truncated

    def _next_place(self) -> int:
        if self.buffers.places > 1:
            for worker in self.workers:
                if worker.command is None and worker.place != self._place:  # it was on its own way
                    self._move(worker, [], self._place)
            self._place = self._observations.next_place(self._place)
        return self._place

    def _by_worker(self, chosen: Iterable[int], *, rest: bool = False) -> list[tuple[Worker, list[int]]]:
        """Environments as (worker, positions in its group); with `rest`, workers without any of them move on."""
        parts: dict[Worker, list[int]] = {}
        for i in chosen:
            worker = self._by_env[i]
            parts.setdefault(worker, []).append(i - worker.first)
        if rest:
            for worker in self.workers:
                if worker not in parts and worker.command is None:
                    self._move(worker, [], self._place)
        return list(parts.items())

    def _move(self, worker: Worker, members: Sequence[int], place: int) -> None:
        """Go to a place with the observations of those that do not step."""
        if len(members) < worker.count and worker.place != place:
            taken = set(members)
            ids = [worker.first + j for j in range(worker.count) if j not in taken]
            self._observations.carry(ids, worker.place, place)
        worker.before, worker.place = worker.place, place

    def _begin(self, worker: Worker, command: Any) -> None:
        self._pending.append((worker, command))
        self._launch(worker, command)

    def _clear_ends(self, ids: list[int]) -> None:
        self.buffers.terminated[ids] = self.buffers.truncated[ids] = False

    def _launch(self, worker: Worker, command: Any, *, bell: bool = False) -> None:
        if isinstance(command, Step | Reset):
            members = command.members
            assert members is not None
            if worker.place == command.place and self.buffers.places > 1:  # what it showed last must stay
                self._move(worker, [], self._observations.next_place(worker.place))
            self._move(worker, members, command.place)
            if isinstance(command, Step) and len(members) == worker.count and WHOLE not in command.loose:
                command.members = None
        worker.begin(command, bell=bell)

    # --- replies
    def _done(
        self,
        operation: str,
        ids: Iterable[int],
        begin: Callable[[], None],
        word: str,
        take: Callable[[list[Reply | None]], T],
    ) -> T:
        """What `take` makes of the replies to what `begin` begins."""
        return self._at_once(
            lambda: self._begun(operation, ids, begin), lambda: self._collect(None, word, take)
        )

    def _collect(
        self,
        timeout: float | None,
        word: str,
        take: Callable[[list[Reply | None]], T],
        turn: Turn | None = None,
    ) -> T:
        """The last part of an operation: what `take` makes of the replies, before another thread may begin the next."""
        now = self._turn.get("now", {}) if turn is None else turn
        me, mine = object(), False
        replies: dict[Worker, Reply | None] = {}
        try:
            mine = now.setdefault("waiter", me) is me and self._turn.get("now") is now
            if not mine:
                raise AlreadyPendingCallError(
                    f"Calling `{word}_wait` while another thread waits for the same call.", word
                )
            return take(self._receive(replies, timeout, word))
        except BaseException as error:
            mine = now.get("waiter") is me and self._turn.get("now") is now
            if mine and (self._deferred is not None or len(replies) < len(self._pending)):
                self._abandon(replies)
            elif mine and not isinstance(error, WorkerError):  # an interrupt
                self._owe_all(replies.values())
            if isinstance(error, Exception):
                self._check_open()  # another thread closed it meanwhile: that is why
            raise
        finally:
            if mine:
                self._pending, self._resting = [], NOBODY
                self._turn.clear()

    def _finished(self, replies: Sequence[Reply | None]) -> list[Told] | Table:
        """What the pending commands told, failures dealt with and debts paid."""
        told, failures = list[Told](), list[Failure]()
        try:
            found, failures = self._land(self._pending, replies)
            if not (failures or self._resting):
                return found
            told = list(found)
            if failures:
                self._recover(failures, told, self._pending)
            for i in sorted(self._resting & self._owed.keys()):
                told.append(self._paid_back(i))
            return told
        except BaseException:
            self._owe_all(replies, told)
            raise

    def _paid_back(self, i: int) -> Told:
        """The end that is owed to an env, as if it came now."""
        owed = self._owed.pop(i)
        self._flag(i, owed.reward, owed.terminated, owed.truncated)
        return owed.told

    def _receive(
        self, replies: dict[Worker, Reply | None], timeout: float | None, word: str
    ) -> list[Reply | None]:
        """The replies to what is pending, in its order; notes how long the caller waited for others."""
        waiting = 0.0
        try:
            deadline = None if timeout is None else time.monotonic() + timeout
            if self._deferred is not None:
                late, begin = self._deferred
                while late := [worker for worker in late if worker in self._late]:
                    pause = late[0].pause
                    for worker in wait_any(
                        late, late, deadline, lambda left, pause=pause: pause(min(left, 0.005))
                    ):
                        self._land_late(worker, *worker.take())
                self._deferred = None
                begin()
            pending = self._pending
            for worker, _ in reversed(pending):  # the caller's own group is the last
                if not worker.inline:
                    waiting = waiting or time.perf_counter()
                    if not worker.quick():
                        wait_any([worker], [worker for worker, _ in pending], deadline, worker.pause)
                replies[worker] = worker.take()[1]
        except DeadlineError:
            error = PendingTimeoutError(f"The call to `{word}_wait` has timed out after {timeout} second(s).")
            error.begun = self._deferred is None
            raise error from None
        if self._began:
            end = time.perf_counter()
            self._stepping += end - self._began
            self._waited += end - waiting if waiting else 0.0
            self._began = 0.0
        return [replies[worker] for worker, _ in pending]

    def _land_late(self, worker: Worker, command: Any, reply: Reply | None) -> None:
        """Keep of an abandoned step what must not be lost: ends of episodes, and failures."""
        if worker in self._late:
            self._late.remove(worker)
        if not isinstance(command, Step | Reset):
            return
        gone = worker.lost is not None
        reply = Reply() if gone or reply is None else reply
        failed = {failure.env for failure in reply.failures}
        self._stay(worker, failed)
        self._observations.keep(ids_of(worker, command), reply.columns, failed)
        self._late_failures += reply.failures
        if isinstance(command, Step):
            self._owe(ids_of(worker, command), reply.told, failed)

    def _stay(self, worker: Worker, failed: Iterable[int]) -> None:
        """What those showed before that failed, or whose worker is lost, stands, but for ends."""
        over = self.buffers.terminated | self.buffers.truncated
        hurt = worker.ids if worker.lost is not None else failed
        stay = [i for i in hurt if not over[i] or (self._same_step and i in failed)]
        self._observations.carry(stay, worker.before, worker.place)

    def _owe(self, ids: Iterable[int], told: Iterable[Told], failed: Set[int]) -> None:
        """Remember the ends of a step of these envs that the caller does not see."""
        buffers = self.buffers
        known = {item.env: item for item in told}
        for i in ids:
            if i not in failed and i not in self._owed and (buffers.terminated[i] or buffers.truncated[i]):
                item = known.get(i) or Told(i, IN_BUFFER, {} if self._same_step else None, {})
                final = self._final(item.final, i) if self._same_step else None
                item = Told(i, final, item.final_info, {**item.info, "late": True})
                self._owed[i] = Owed(*self._paid(i), item)

    def _final(self, final: Any, i: int) -> Any:
        """The last observation of an episode that was replaced; one that came nowhere is what was shown before."""
        if final is not IN_BUFFER:
            return final
        if self.buffers.final is not None:
            return self.buffers.final[i].copy()
        return self._observations.one(i, self._by_env[i].before)

    def _land(
        self, pending: Pending, replies: Sequence[Reply | None]
    ) -> tuple[list[Told] | Table, list[Failure]]:
        """Take over the replies of workers: infos, completed by the ends without any, and failures.

        The infos are one table only where nothing failed.
        """
        told, tables = list[Told](), list[Table]()
        failures, self._late_failures = self._late_failures, []
        if not any(replies) and not self.buffers.any_end():
            return told, failures
        for (worker, command), reply in zip(pending, replies, strict=True):
            if reply is not None:
                if reply.columns:
                    failed = {failure.env for failure in reply.failures} if reply.failures else ()
                    self._observations.keep(ids_of(worker, command), reply.columns, failed)
                failures += reply.failures
                if isinstance(reply.told, Table):
                    tables.append(reply.told)
                else:
                    told += reply.told
        if tables:
            if not (told or failures) and (table := Table.joined(tables, self.num_envs)) is not None:
                return table, failures
            told += itertools.chain.from_iterable(tables)
        if self._same_step and self.buffers.any_end():
            told = [
                item._replace(final=self._final(item.final, item.env)) if item.final is IN_BUFFER else item
                for item in told
            ]
            known = {item.env for item in told if item.final_info is not None}
            over = (self.buffers.terminated | self.buffers.truncated).nonzero()[0].tolist()
            silent = [i for i in over if i not in known]
            for worker, command in pending if silent else ():
                if type(command) is Step:
                    ids = ids_of(worker, command)
                    told += [Told(i, self._final(IN_BUFFER, i), {}, {}) for i in silent if i in ids]
        return told, failures

    # --- failures
    def _recover(self, failures: list[Failure], told: list[Told], pending: Pending) -> None:
        """Deal with the failures of an operation; `told` is then what all envs told, the replaced ones included.

        Args:
            failures: what failed.
            told: by the envs that took part.
            pending: what the workers were told.

        Raises:
            WorkerError: with the policy "raise", when an env failed too often, or when one was stepped after its end.
        """
        self._check_open()
        failures = distinct(failures)
        self._report(failures)
        stepped, given = set(self._resting), dict[int, int | None]()
        failed = {failure.env for failure in failures}
        for worker, command in pending:
            if isinstance(command, Step | Reset):
                self._stay(worker, failed.intersection(worker.ids))
            if isinstance(command, Step):
                stepped.update(ids_of(worker, command))
            elif isinstance(command, Reset):
                given.update(zip(ids_of(worker, command), command.seeds, strict=True))
        before: dict[int, tuple[list[Any], Owed]] = {}
        at_once, out = Counter[int](), set(np.flatnonzero(~self.active).tolist())
        while failures:
            at_once.update(failure.env for failure in failures)
            hurt = self._to_be_made_anew(failures, at_once)
            self._land_lost(hurt)
            known = {item.env: item for item in told}
            for i in hurt:
                if i not in before:
                    took_part = i in stepped, i in given
                    before[i] = self._before(i, *took_part, known.get(i), hurt[i])
            if self.on_failure == "mask":
                for failure in failures:
                    worker = self._by_env[failure.env]
                    self.active[failure.env] = False
                    self._masked_by = failure
                    worker.env_fns[failure.env - worker.first] = MaskedEnv
            fresh, failures = self._make_anew(hurt, given)
            again = {failure.env for failure in failures}
            told[:] = [item for item in told if item.env not in hurt]
            for i, failure in hurt.items():
                if i in out:  # its end was told when it was left out
                    self._observations.put(i, self._by_env[i].place, before[i][0])
                elif not self.active[i]:
                    info = {"worker_masked": True, "worker_error": str(error_of(failure))}
                    final = None if i in given else info
                    told += self._replaced_told(i, before[i], final, info, i in stepped or i in given)
                elif i not in again and self._by_env[i].lost is None:
                    why = error_of(failure).told
                    info = {**fresh.get(i, {}), **why}
                    if i in given:
                        told.append(Told(i, None, None, info))
                    else:
                        told += self._replaced_told(i, before[i], why, info, i in stepped)

    def _to_be_made_anew(self, failures: Sequence[Failure], at_once: Mapping[int, int]) -> dict[int, Failure]:
        """The envs that failed and those whose worker is lost with them, and why; raises where nothing is replaced."""
        for failure in failures:
            self._failed[failure.env] += failure.kind != "over"
        if self.on_failure == "raise" or any(failure.kind == "over" for failure in failures):
            raise_first(failures)
        hurt: dict[int, Failure] = {}
        for failure in failures:
            often = self._failed[failure.env] > self.max_restarts
            if self.on_failure == "restart" and (often or at_once[failure.env] > MOST_AT_ONCE):
                error = error_of(failure)
                times = (
                    f"{self.max_restarts} times (max_restarts)" if often else f"{MOST_AT_ONCE} times at once"
                )
                error.add_note(f"env {failure.env} was restarted {times} before this")
                raise error
            hurt.update(dict.fromkeys(self._lost_with(failure.env), failure))
        for failure in failures if self.warns else ():
            done = DEALT_WITH[self.on_failure]
            logger.warning("%s; %s (on_failure=%s)", error_of(failure), done, self.on_failure)
        return hurt | {failure.env: failure for failure in failures}

    def _lost_with(self, i: int) -> list[int]:
        worker = self._by_env[i]
        if worker.lost is None or self.backend is None:
            return []
        return [other for mate in self.backend.housemates(worker) for other in mate.ids]

    def _land_lost(self, hurt: Iterable[int]) -> None:
        """Keep what is whole of abandoned steps whose workers were lost with others; their envs are made anew."""
        gone = set(hurt)
        for worker in [worker for worker in self._late if not gone.isdisjoint(worker.ids)]:
            if not worker.answered():
                worker.lose(worker.death())
            self._land_late(worker, *worker.take())
        self._late_failures = [failure for failure in self._late_failures if failure.env not in gone]

    def _before(
        self, i: int, stepped: bool, given: bool, told: Told | None, failure: Failure
    ) -> tuple[list[Any], Owed]:
        """What an env showed last, and the end of its episode: that of the step, or that it is cut off after it.

        It was stepped or `given` a seed, or took no part.
        """
        worker, buffers = self._by_env[i], self.buffers
        last = self._observations.leaves(i, worker.before if stepped or given else worker.place)
        if not stepped or not (buffers.terminated[i] or buffers.truncated[i]):
            return last, Owed(0.0, False, True, Told(i, buffers.observations.rebuild(last), {}, {}))
        final, info = (told.final, told.final_info) if told is not None else (IN_BUFFER, {})
        if failure.env == i and failure.ending is not None:
            final, info = failure.ending
        if self._same_step:
            final = self._final(final, i)
        else:
            last = self._observations.leaves(i, worker.place)
        return last, Owed(*self._paid(i), Told(i, final, info, {}))

    def _replaced_told(
        self,
        i: int,
        before: tuple[list[Any], Owed],
        final_info: Mapping[str, Any] | None,
        info: Info,
        seen: bool,
    ) -> list[Told]:
        """The end of the episode of an env that was replaced, or left out; owed to it where nobody sees it now.

        An end that is owed already is that of the episode that the caller saw: of the env behind it nobody knew.
        """
        last, end = before
        told = Told(i, None, None, info)
        if self._same_step and final_info is not None:
            told = Told(i, end.told.final, {**(end.told.final_info or {}), **final_info}, info)
        if not (self._same_step and self.active[i]):
            self._observations.put(i, self._by_env[i].place, last)
        if i in self._owed:
            first = self._owed[i].told
            kept = {key: first.info[key] for key in ("late",) if key in first.info}
            told = Told(
                i, first.final, first.final_info, {**(kept if self._same_step else first.info), **info}
            )
            self._owed[i] = self._owed[i]._replace(told=told)
            return []
        if not seen:
            self._owed[i] = end._replace(told=told)
            return []
        self._flag(i, end.reward, end.terminated, end.truncated)
        return [told]

    def _make_anew(
        self, hurt: Iterable[int], given: dict[int, int | None]
    ) -> tuple[dict[int, Info], list[Failure]]:
        """Replace these envs, all at once, and reset them; the infos of their resets, and what failed again."""
        lost = [worker for worker in self.workers if worker.lost is not None and set(worker.ids) & set(hurt)]
        failures = self._start_anew(lost)
        alive = [i for i in sorted(hurt) if self.active[i] and self._by_env[i].lost is None]
        rebuilt = self._by_worker(i for i in alive if self._by_env[i] not in lost)
        failures += self._ask([(worker, Rebuild(members)) for worker, members in rebuilt])[1]
        failed = {failure.env for failure in failures}
        infos: dict[int, Info] = {}
        for i in hurt:
            self._replaced[i] += 1
        commands: Pending = []
        for worker, members in self._by_worker(i for i in alive if i not in failed):
            ids = [worker.first + j for j in members]
            seeds = [
                restart_seed(self._seeds[i], self._replaced[i]) if given.get(i) is None else given[i]
                for i in ids
            ]
            ends = [i - worker.first for i in ids if not self._same_step and i not in given]
            commands.append((worker, Reset(members, seeds, None, worker.place, ends)))
        replies, more = self._ask(commands)
        for (worker, command), reply in zip(commands, replies, strict=True):
            self._observations.keep(ids_of(worker, command), reply.columns, {item.env for item in more})
            infos.update({item.env: item.info for item in reply.told})
        return infos, failures + more

    def _start_anew(self, lost: Sequence[Worker]) -> list[Failure]:
        """Fresh workers in place of lost ones and of those who live with them, all at once; what failed."""
        if not lost or self.backend is None:
            return []
        workers = list(dict.fromkeys(mate for worker in lost for mate in self.backend.housemates(worker)))
        self._late = [worker for worker in self._late if worker not in workers]
        try:
            self.backend.start(workers)
            failures = _failures_of(workers, replies_of(workers))
            ready = [worker for worker in workers if worker.lost is None]
            self.backend.attach(ready, self._attach, self.buffers)
            return distinct(failures + _failures_of(ready, replies_of(ready)))
        except BaseException:  # an interrupt, or no process can be started: they stay lost
            for worker in workers:
                if worker.lost is None:
                    why = "it was interrupted while its worker was replaced"
                    worker.lose(Failure(worker.first, "make", why))
                worker.command = None
            raise

    def _ask(self, commands: Pending) -> tuple[list[Reply], list[Failure]]:
        """Tell workers something aside and wait for all of them."""
        workers = [worker for worker, _ in commands]
        try:
            for worker, command in commands:
                worker.begin(command)
            replies = replies_of(workers)
        except BaseException:
            for worker in workers:
                if worker.command is not None and not worker.inline:
                    worker.lose(Failure(worker.first, "make", "it was interrupted while it was replaced"))
                worker.command = None
            raise
        return replies, [failure for reply in replies for failure in reply.failures]

    def _report(self, failures: Sequence[Failure]) -> None:
        """Called with the failures of an operation before they are dealt with; for subclasses."""

    # --- methods and attributes of the environments
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute; one result per environment."""
        return self._at_once(lambda: self.call_async(name, *args, **kwargs), self.call_wait)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a call; `call_wait` returns its results."""
        if name in ("reset", "step", "close"):
            raise ValueError(f"{name!r} has a method of its own on the vector environment; use that")
        given = [(name, args, kwargs)] * self.num_envs
        self._begin_apply("call_async", f"call {name}", self._active(), call_attribute, given)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of `call_async`, in the order of the environments; None for those that were masked out."""
        answers = self._answers(timeout, self._expect("call", timeout))
        return tuple(answers.get(i) for i in range(self.num_envs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment: one value for all, or a list or tuple of one for each."""
        each = values if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ValueError(
                f"values must be a list or tuple of one value per environment ({self.num_envs}), got {len(each)}"
            )
        given: list[tuple[Any, ...]] = [("set_wrapper_attr", (name, value), {}) for value in each]
        begin = functools.partial(self._begin_apply, "set_attr", f"set {name}", self._active())
        self._at_once(lambda: begin(call_attribute, given), lambda: self._answers(None))

    def apply(
        self, function: Callable[..., Any], *args: Any, indices: Sequence[int] | None = None
    ) -> list[Any]:
        """`function(env, *args)` for each environment, or some of them, where they live."""
        chosen = list(range(self.num_envs))
        if indices is not None:
            chosen = self._indices(given := list(indices), given, "indices")[0]
        doing = getattr(function, "__name__", "apply")
        begin = functools.partial(self._begin_apply, "apply", doing, sorted(chosen))
        results = self._at_once(lambda: begin(function, [args] * self.num_envs), lambda: self._answers(None))
        return [results[i] for i in chosen]

    def _begin_apply(
        self,
        operation: str,
        doing: str,
        ids: Sequence[int],
        function: Callable[..., Any],
        args: Sequence[Any],
    ) -> None:
        """Begin something with the envs `ids`, of whose arguments `args` has those of all envs."""

        def begin() -> None:
            commands = [
                (worker, Apply(doing, function, [args[worker.first + j] for j in members], members))
                for worker, members in self._by_worker(ids)
            ]
            for worker, command in commands:  # before any is told: what one cannot be sent, none gets
                worker.pack(command)
            for worker, command in commands:
                self._begin(worker, command)

        self._begun(operation, ids, begin)

    def _answers(self, timeout: float | None, turn: Turn | None = None) -> dict[int, Any]:
        """What each env answered to a call."""

        def take(replies: Sequence[Reply | None]) -> dict[int, Any]:
            raise_first(distinct([failure for reply in replies if reply for failure in reply.failures]))
            answers: dict[int, Any] = {}
            for (worker, command), reply in zip(self._pending, replies, strict=True):
                if reply is not None and reply.value is not None:
                    answers.update(zip(ids_of(worker, command), reply.value, strict=True))
            return answers

        return self._collect(timeout, "call", take, turn)

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

    # --- environments on their own way: a worker answers as a whole, and an env whose worker is busy waits
    def send(self, env_ids: Sequence[int], actions: Sequence[Any]) -> None:
        """Begin to step these environments; `recv` returns each when it is ready.

        An environment takes its next action only after `recv` has returned its last result.
        """
        self._dispatch("send", env_ids, actions, "step")

    def send_reset(self, env_ids: Sequence[int], seeds: Sequence[int | None] | None = None) -> None:
        """Begin to reset these environments; `recv` returns their first observations."""
        ids = list(env_ids)
        self._dispatch("send_reset", ids, [None] * len(ids) if seeds is None else seeds, "reset")

    def _dispatch(self, operation: str, env_ids: Sequence[int], jobs: Sequence[Any], kind: str) -> None:
        self._enter(operation, flying=True)
        try:
            ids, jobs = self._indices(env_ids, jobs, "seeds" if kind == "reset" else "actions")
            jobs = list(map(plain_seed, jobs)) if kind == "reset" else jobs
            if not self._flying.keys().isdisjoint(ids):
                busy = [i for i in ids if i in self._flying]
                raise ValueError(
                    f"environments {busy} are still in flight: recv them before sending them again"
                )
            self._flying.update(dict.fromkeys(ids, time.monotonic()))
            for i, job in zip(ids, jobs, strict=True):
                if kind == "reset" and job is not None:
                    self._seeds[i] = job
                self._by_env[i].jobs[i] = kind, job
            self._set_to_work(dict.fromkeys(self._by_env[i] for i in ids))
        except BaseException:
            self._forget_lost()
            raise
        finally:
            self._turn.clear()

    def recv(self, min_envs: int = 1, timeout: float | None = None) -> Ready:
        """The environments that are ready, at least `min_envs` of those in flight.

        After `timeout` seconds it returns what there is, perhaps nothing; `late` names who kept it waiting.

        Raises:
            WorkerError: an environment failed and nothing replaces it; it is no longer in flight. The others are,
                or are ready, and come with the next call.
        """
        self._enter("recv", flying=True)
        try:
            whole(min_envs, "min_envs", 1)
            limit(timeout, "timeout")
            if not self._flying and not self._errors:
                raise ValueError("no environment is in flight: send some actions first")
            began = time.monotonic()
            deadline = None if timeout is None else began + timeout
            while True:
                self._collect_landed()
                if self._errors:
                    error, *others = self._errors
                    self._errors = []
                    for other in others:
                        for told in (f"also: {other}", *getattr(other, "__notes__", ())):
                            error.add_note(told)
                    raise error
                here = sum(len(landing.ids) for landing in self._landed)
                if (short := min(min_envs, len(self._flying)) - here) <= 0:
                    self._pace = (time.monotonic() - began) / max(here, 1)
                    break
                if short * self._pace > 2 * NAP and (deadline is None or time.monotonic() + NAP < deadline):
                    time.sleep(NAP)  # instead of being woken by each
                try:
                    self._wait_in_flight(deadline)
                except DeadlineError:
                    break
            return self._taken(timeout)
        except BaseException as error:
            self._forget_lost()
            if isinstance(error, Exception):
                self._check_open()
            raise
        finally:
            self._turn.clear()

    def _at_work(self) -> Pending:
        """The workers in flight, and what each is at."""
        return [(w, w.command) for w in self.workers if w.command is not None and w not in self._late]

    def _forget_lost(self) -> None:
        """Wait for nobody who, after an interrupt, is neither at work nor ready, nor waits for its worker."""
        here = set[int]().union(*(landing.ids for landing in self._landed))
        for worker in self.workers:
            if worker.command is None:
                worker.jobs = {}
            here.update(worker.jobs)
        here.update(i for worker, command in self._at_work() for i in ids_of(worker, command))
        self._flying = {i: sent for i, sent in self._flying.items() if i in here}

    def _wait_in_flight(self, deadline: float | None) -> None:
        late = any(worker.jobs for worker in self._late)
        sleep = time.sleep if self.backend is None else self.backend.wait_bell
        longest = 0.005 if late else 1.0
        wait_any((), self.workers, deadline, lambda left: sleep(min(left, longest)), self._answered)

    def _answered(self) -> list[Worker]:
        """Those at work, or at an abandoned command, that have an answer, or never will."""
        found = [] if self.backend is None else self.backend.answered()
        return [worker for worker in (*found, *self._inline) if worker.command is not None]

    def _set_to_work(self, workers: Iterable[Worker]) -> None:
        """Begin the next jobs of those of these workers that are free; their actions are written together."""
        going: list[tuple[Worker, str, dict[int, Any]]] = []
        actions: dict[int, Any] = {}
        for worker in workers:
            jobs = worker.jobs
            while jobs and worker.command is None:
                kind = next(iter(jobs.values()))[0]
                chosen = sorted(i for i, job in jobs.items() if job[0] == kind)
                given = {i: jobs.pop(i)[1] for i in chosen}
                for i in sorted(self._owed.keys() & given.keys()):
                    if kind == "step":
                        del given[i]
                        self._landed.append(self._landing([i], [self._paid_back(i)]))
                    else:
                        del self._owed[i]
                if given:
                    going.append((worker, kind, given))
                    if kind == "step":
                        actions |= given
                    break
        if not going:
            return
        loose = write_some(self.buffers, ids := list(actions), list(actions.values()))
        self._clear_ends(ids)
        again = []
        for worker, kind, given in going:
            members, place = [i - worker.first for i in given], self._observations.next_place(worker.place)
            command: Command
            if kind == "step":
                command = Step(members, place, of_group(loose, worker.first, worker.count))
            else:
                command = Reset(members, list(given.values()), None, place)
            try:
                self._launch(worker, command, bell=True)
            except BaseException as error:
                if worker.command is not command:  # an action cannot be sent
                    self._take_back(worker, command)
                    for i in given:
                        del self._flying[i]
                if worker.command is command or not isinstance(error, Exception):
                    raise
                told = f"this was to be sent to the environments {list(given)}, which are in flight no more"
                error.add_note(told)
                self._errors.append(error)
                again.append(worker)
        self._set_to_work(again)

    def _collect_landed(self) -> None:
        """Take over what workers in flight have answered, and give them their next jobs."""
        while True:
            if self._late:
                for worker in [worker for worker in self._answered() if worker in self._late]:
                    self._land_late(worker, *worker.take())
                    self._set_to_work([worker])
            ready = [(worker, worker.command) for worker in self._answered() if worker not in self._late]
            silent = [pair for pair in ready if pair[0].silent()]
            lost = [pair for pair in ready if pair[0].lost is not None]
            others = [[pair] for pair in ready if pair[0].lost is None and not pair[0].silent()]
            for landing in [silent, *others, lost]:
                # Those that a landing before them replaced are over.
                landing = [pair for pair in landing if pair[0].command is pair[1]]
                if landing:
                    self._land_in_flight(landing)
            if len(silent) == len(ready):
                return

    def _land_in_flight(self, landing: Pending) -> None:
        replies: list[Reply | None] = []
        told, failed, landed = list[Told](), set[int](), None
        interrupt: BaseException | None = None
        try:
            for worker, command in landing:
                try:
                    replies.append(worker.take()[1])
                except BaseException as error:  # an interrupt: what was taken before it lands
                    interrupt, landing = error, landing[: len(replies)]
                    taken = any(worker is other for other, _ in landing)
                    if worker.command is not command and not taken:  # the caller's own group was amid it
                        for i in ids_of(worker, command):
                            self._flying.pop(i, None)
                        self._land_late(worker, command, None)
                        self._set_to_work([worker])
                    break
            found, failures = self._land(landing, replies)
            told += found
            ids = [i for worker, command in landing for i in ids_of(worker, command)]
            if failures:
                others = self._at_work()
                try:
                    self._recover(failures, told, [*landing, *others])
                except BaseException as error:
                    if isinstance(error, Exception):
                        self._errors.append(error)
                    else:
                        interrupt = error
                    ended = self.buffers.terminated | self.buffers.truncated
                    failed = {failure.env for failure in failures}
                    failed |= {i for i in ids if self._by_env[i].lost is not None and not ended[i]}
                # Workers that were replaced meanwhile, with those who failed, never answer what they were at.
                gone = [pair for pair in others if pair[0].command is not pair[1]]
                also = [i for worker, command in gone for i in ids_of(worker, command)]
                landing, ids = [*landing, *gone], [*ids, *also]
                if failed:  # what they tell went with the error
                    failed.update(also)
                for i in failed:
                    self._flying.pop(i, None)
                ids = [i for i in ids if i not in failed]
            landed = self._landing(ids, told)
            self._landed.append(landed)
        except BaseException:  # an interrupt
            if not any(landed is other for other in self._landed):
                for worker, command in landing:
                    if isinstance(command, Step) and worker.command is not command:
                        self._owe(ids_of(worker, command), told, failed)
            raise
        self._set_to_work(worker for worker, _ in landing)
        if interrupt is not None:
            raise interrupt

    def _landing(self, ids: Sequence[int], told: Iterable[Told] = ()) -> Ready:
        """What these envs show, by columns, were paid and told now; copies."""
        chosen, buffers, infos = np.array(ids, dtype=np.int64), self.buffers, by_env(told)
        columns = self._observations.columns(ids, [self._by_env[i].place for i in ids])
        paid = buffers.rewards[chosen], buffers.terminated[chosen], buffers.truncated[chosen]
        return Ready(chosen, columns, *paid, [infos.get(i, {}) for i in ids], [])

    def _taken(self, timeout: float | None) -> Ready:
        landed = self._landed or [self._landing([])]
        ids, columns, rewards, terminated, truncated, infos, _ = zip(*landed, strict=True)
        taken = np.concatenate(ids)
        here, now = set(taken.tolist()), time.monotonic()
        flying = {i: sent for i, sent in self._flying.items() if i not in here}
        late = [i for i, sent in flying.items() if timeout is not None and now - sent >= timeout]
        ready = Ready(
            taken,
            self._observations.joined(columns),
            np.concatenate(rewards),
            np.concatenate(terminated),
            np.concatenate(truncated),
            list(itertools.chain.from_iterable(infos)),
            sorted(late),
        )
        self._landed, self._flying = [], flying  # last: an interrupt before it leaves all for the next call
        return ready

    @property
    def in_flight(self) -> list[int]:
        """The environments that were sent and not received."""
        return sorted(self._flying)

    # --- what is known
    def _active(self) -> list[int]:
        return np.flatnonzero(self.active).tolist()

    def _indices(
        self, indices: Sequence[int], partners: Sequence[Any], word: str
    ) -> tuple[list[int], list[Any]]:
        """Different environments that take part, and the `partners` (the `word` that goes with them), one for each."""
        chosen = [whole(i, "an index", 0) for i in indices]
        each = one_each(partners, len(chosen), word)
        if len(set(chosen)) != len(chosen) or any(i >= self.num_envs for i in chosen):
            raise ValueError(f"indices must be different numbers in [0, {self.num_envs}), got {chosen}")
        masked = [i for i in chosen if not self.active[i]]
        if masked:
            raise ValueError(f"environments {masked} were masked out after a failure")
        return chosen, each

    def stacked(self, parts: Sequence[Sequence[Any]]) -> Any:
        """A batch of observations of several, each given by the columns of its leaves."""
        return self._observations.joined(parts)

    def _batch(self) -> Any:
        return self._observations.batch(self._place)

    def _observation(self, i: int) -> Any:
        return self._observations.one(i, self._by_env[i].place)

    def observations(self) -> Any:
        """The present observations of all environments.

        While one is stepped, or reset, it is what it showed before where earlier observations are kept
        (`on_failure="restart"` or "mask", `ring` above 1); else it may be the new one already, or half of it.
        """
        amid = [isinstance(worker.command, Step | Reset) for worker in self.workers]
        places = [
            worker.before if at_work else worker.place
            for worker, at_work in zip(self.workers, amid, strict=True)
            for _ in range(worker.count)
        ]
        return self.buffers.observations.rebuild(self._observations.columns(range(self.num_envs), places))

    def observation_ring(self) -> Any:
        """The observations of the last `ring` steps, batched `[ring, num_envs, ...]`: views, not copies.

        `ring_position` is where the latest ones are; they go round, the next place after the last is the first.
        """
        layout = self.buffers.observations
        if layout.text or layout.objects:
            raise ValueError("a ring holds observations of fixed size only, not text or custom spaces")
        if self._observations.handouts:  # their places go round in no order
            raise ValueError("there is no ring of observations: pass ring= to make_vec")
        return layout.rebuild(self.buffers.obs)

    @property
    def ring_position(self) -> int:
        """The place of the latest observations in `observation_ring()`."""
        return self._place

    def stats(self) -> dict[str, Any]:
        """What is known of speed, memory and failures.

        `step_p50` and `step_p99` are seconds per step of each env, from a sample of its steps (NaN before the
        first; within 10 %); `wait_share` is the part of the time spent in steps in which the caller waited for
        others; `restarts` and `failures` count per env; `workers` has a row with pid and memory for each.
        """
        times = self.buffers.times.copy()
        for worker in self.workers:
            if (own := worker.own_times()) is not None:
                times[worker.first : worker.first + worker.count] = own
        p50, p99 = quantiles(times, 0.5, 0.99)
        return {
            "step_p50": p50,
            "step_p99": p99,
            "wait_share": self._waited / self._stepping if self._stepping else 0.0,
            "restarts": list(self._replaced),
            "failures": list(self._failed),
            "active": int(self.active.sum()),
            "workers": self.backend.stats() if self.backend is not None else [],
        }

    # --- the end
    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments; a worker that does not follow is killed, so this takes a few seconds at most."""
        limit(timeout, "timeout")
        self._pending, self._closing = [], True
        seconds = 0.0 if terminate else (2.0 if timeout is None else timeout)
        with self._close_lock:
            close_all(self.workers, self.backend, os.getpid(), seconds)
        self._finalizer.detach()  # only now: what an interrupt left is ended when nobody has this any more
        for worker in self.workers:  # who waits for one in another thread does so no longer
            if worker.command is not None and worker.lost is None and not worker.inline:
                worker.lost = Failure(worker.first, "wait", "it was closed", kind="died")

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and hasattr(self, "_finalizer"):
            self._finalizer()


NAP = 1e-4
"""Seconds that `recv` does not look for answers while it is short of several and they come slowly."""
_with_workers: weakref.WeakSet[VectorPool] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a fork of the process that made them: a command from here would be answered to the parent's next one."""
    for pool in list(_with_workers):
        pool.closed = pool._is_parents = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)


def close_all(workers: Sequence[Worker], backend: Backend | None, owner: int, seconds: float = 2.0) -> None:
    """Close workers and what they live in."""
    if os.getpid() != owner:
        return  # a fork of the process that made them: they are not ours to end
    for worker in workers:
        if worker.inline and worker.group is not None:
            with contextlib.suppress(Exception):
                worker.group.close()
    if backend is not None:
        backend.close(seconds)


def distinct(failures: Iterable[Failure]) -> list[Failure]:
    """One failure may be told by several workers: those that were lost together."""
    return sorted({id(failure): failure for failure in failures}.values(), key=lambda failure: failure.env)


def _failures_of(workers: Sequence[Worker], replies: Sequence[Reply]) -> list[Failure]:
    """What went wrong where environments were made; a worker that could not make its own is lost."""
    failures: list[Failure] = []
    for worker, reply in zip(workers, replies, strict=True):
        if reply.failures:
            failures += reply.failures
            if worker.lost is None:
                worker.lost = reply.failures[0]
    return failures


def groups(seed: int, n_groups: int, group_size: int, *, iteration: int = 0) -> list[int]:
    """Seeds for `reset` in which the environments of a group start alike and groups differ.

    Group g holds environments `g * group_size … (g + 1) * group_size - 1`.

    >>> a, b, c, d = groups(7, n_groups=2, group_size=2)
    >>> a == b, c == d, a == c
    (True, True, False)
    """
    if n_groups < 1 or group_size < 1:
        raise ValueError(f"n_groups and group_size must be at least 1, got {n_groups} and {group_size}")
    return [derive_seed(seed, "env", iteration, g) for g in range(n_groups) for _ in range(group_size)]


def plain_seed(seed: Any) -> int | None:
    """A seed as environments take it, whatever kind of whole number it is."""
    try:
        return None if seed is None else operator.index(seed)
    except TypeError:
        raise TypeError(f"a seed must be a whole number or None, got {seed!r:.80}") from None


def spread(seed: Seeds, n_envs: int) -> list[int | None]:
    """One seed per environment: of an int `seed + i`, of a sequence its own."""
    if not isinstance(seed, Iterable) or isinstance(seed, bytes | dict | set | frozenset):
        first = plain_seed(seed)
        return [None if first is None else first + i for i in range(n_envs)]
    seeds = [plain_seed(item) for item in seed]
    if len(seeds) != n_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={n_envs} but got "
            f"length={len(seeds)}."
        )
    return seeds


def _checked_mask(mask: Any, n_envs: int) -> Any:
    """`options["reset_mask"]` as Gymnasium wants it."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (n_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({n_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(  # (its users look for Gymnasium's words)
            "`options['reset_mask']` must contain a boolean array with at least one True value, "
            f"got reset_mask={mask}"
        )
    return mask
