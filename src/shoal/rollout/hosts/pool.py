"""A vector env as a host: its envs are stepped abreast, in the thread that plays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from shoal.core.data import Status, ToolUse
from shoal.core.errors import (
    EngineError,
    EnvError,
    WorkerError,
    WorkerTimeoutError,
    format_error,
    with_frames,
)
from shoal.rollout.episode import Episode, Role
from shoal.rollout.hosts.episodes import Ask, Begin, Ended, Event, Refused, Reply, Use, Used
from shoal.rollout.hosts.host import Host
from shoal.rollout.prompts import Prompter
from shoal.rollout.tools.functions import filled, run_functions

Reset = tuple[str, dict[str, Any]]
Step = tuple[str, float, bool, bool, dict[str, Any]]


class EnvPool(Protocol):
    """Envs that can be reset and stepped a few at a time; `shoal.vector` provides them."""

    def reset_some(self, indices: Sequence[int], seeds: Sequence[int], /) -> Sequence[Reset]:
        """Reset these envs, each from its seed."""

    def step_some(self, indices: Sequence[int], actions: Sequence[Any], /) -> Sequence[Step]:
        """Step these envs; the others are left alone."""

    def close(self) -> None:
        """End the envs and their workers."""


class Failed(NamedTuple):
    """Why an episode ends before its time."""

    status: Status
    error: str
    own: bool = True
    """Whether its own env failed, and not one that another episode played in the same worker."""


class PoolHost:
    """Plays each episode in the env of its slot; what is said in one turn of the loop is done abreast.

    Args:
        pool: the envs.
        role_of: what the agent knows of the env of a slot, once it is reset.
        prompter: makes the prompts.
        env_retries: times an episode starts again after its env failed.
    """

    lost = False

    def __init__(
        self, pool: EnvPool, role_of: Callable[[int, str], Role], prompter: Prompter, env_retries: int
    ) -> None:
        self._pool, self._role_of, self._prompter, self._retries = pool, role_of, prompter, env_retries
        self._said: dict[int, tuple[Begin | Reply, asyncio.Future[Event]]] = {}
        self._begun: dict[int, Begin] = {}
        self._episodes: dict[int, Episode] = {}
        self._tries: dict[int, list[str]] = {}
        self._uses: dict[int, list[ToolUse | None]] = {}  # of slots that wait for tools beside the driver

    def tell(self, message: Begin | Reply) -> Awaitable[Event]:
        """The slot's answer, after those of all that is said in this turn of the loop."""
        loop = asyncio.get_running_loop()
        if not self._said:
            loop.call_soon(self._move)
        future: asyncio.Future[Event] = loop.create_future()
        self._said[message.slot] = message, future
        return future

    async def overdue(self) -> list[tuple[int, str]]:
        """The pool keeps its own time."""
        return []

    def give_up(self, slot: int, why: str) -> None:
        """The pool replaces what hangs."""

    async def close_envs(self, seconds: float) -> None:
        """They are the pool's."""

    def end(self) -> None:
        """The pool is its owner's."""

    # --- one step or reset of all slots that have a message
    def _move(self) -> None:
        said, self._said = self._said, {}
        try:
            events = self._events({slot: message for slot, (message, _) in said.items()})
        except BaseException as error:
            for _, future in said.values():
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for slot, (_, future) in said.items():
            if not future.done():
                future.set_result(events[slot])

    def _events(self, said: Mapping[int, Begin | Reply]) -> dict[int, Event]:
        failed: dict[int, Failed] = {}
        actions: dict[int, list[int | str]] = {}
        fresh = []
        for slot, message in said.items():
            if isinstance(message, Begin):
                self._begun[slot], self._tries[slot] = message, []
                fresh.append(slot)
            elif isinstance(message, Refused):
                failed[slot] = Failed(message.status, message.error)
            elif isinstance(message, Used):
                self._episodes[slot].use(filled(self._uses.pop(slot), message.uses))
                actions[slot] = []
            else:
                with _noted(slot, failed):
                    actions[slot] = self._episodes[slot].respond(message.completion)
        events: dict[int, Event] = self._use(said, actions)
        self._act(actions, failed)
        ready = [slot for slot in said if slot not in fresh and slot not in events]
        while ready or fresh:
            self._begin(fresh, failed)
            again = []
            for slot in [*ready, *fresh]:
                event = self._event(slot, failed)
                if event is None:
                    again.append(slot)
                else:
                    events[slot] = event
            ready, fresh, failed = [], again, {}
        return events

    def _use(
        self, said: Mapping[int, Begin | Reply], actions: dict[int, list[int | str]]
    ) -> dict[int, Event]:
        """Call what tools run here; slots that wait for others act later."""
        waiting: dict[int, Event] = {}
        for slot in [
            slot for slot in actions if self._episodes[slot].calls and not isinstance(said[slot], Used)
        ]:
            episode = self._episodes[slot]
            uses, left = run_functions(self._prompter.tools.tools, episode.calls)
            if left:
                self._uses[slot] = uses
                waiting[slot] = Use(slot, episode.turn, left)
                del actions[slot]
            else:
                episode.use(filled(uses, ()))
        return waiting

    def _event(self, slot: int, failed: dict[int, Failed]) -> Event | None:
        """What a slot asks, or how its episode ended; None where it is to be played again."""
        episode = self._episodes.get(slot)
        if slot not in failed and episode is not None and not episode.over:
            with _noted(slot, failed):
                return Ask(slot, *episode.question())
        why = failed.get(slot)
        if why is not None and not why.own:
            return None
        if why is not None and why.status == "env_error" and len(self._tries[slot]) < self._retries:
            self._tries[slot].append(why.error)
            return None
        if episode is None:
            assert why is not None
            episode = self._new(slot)
        self._episodes.pop(slot, None)
        whole = episode.trajectory() if why is None else episode.trajectory(why.status, why.error)
        return Ended(slot, whole, tuple(self._tries[slot]))

    def _new(self, slot: int) -> Episode:
        assignment, sampling = self._begun[slot].assignment, self._begun[slot].sampling
        role = self._role_of(slot, assignment.tag)
        return Episode(assignment.place, role, self._prompter, sampling)

    def _begin(self, slots: Sequence[int], failed: dict[int, Failed]) -> None:
        """Reset these envs; where one fails, each alone."""
        for slot in slots:
            self._episodes.pop(slot, None)
        try:
            resets = self._reset(slots) if slots else []
        except (WorkerError, EnvError):
            resets = []
            for slot in slots:
                try:
                    resets += self._reset([slot])
                except (WorkerError, EnvError) as error:
                    timeout = isinstance(error, WorkerTimeoutError)
                    known = {"worker_error": str(error), "worker_timeout": timeout}
                    failed[slot] = _failure(slot, "reset", getattr(error, "details", None) or known, slots)
        for slot, (observation, info) in resets:
            with _noted(slot, failed, "reset"):
                self._episodes[slot] = self._new(slot)
                self._episodes[slot].begin(observation, info)

    def _reset(self, slots: Sequence[int]) -> list[tuple[int, Reset]]:
        seeds = [self._begun[slot].assignment.place.env_seed for slot in slots]
        return list(zip(slots, self._pool.reset_some(slots, seeds), strict=True))

    def _act(self, actions: Mapping[int, list[int | str]], failed: dict[int, Failed]) -> None:
        """Step each env through the actions of its turn, all envs abreast."""
        pending = {slot: list(todo) for slot, todo in actions.items() if todo}
        while pending:
            now = {slot: todo.pop(0) for slot, todo in pending.items()}
            try:
                results = self._pool.step_some(list(now), list(now.values()))
            except WorkerError as error:  # an env failed for which there is no other
                if not error.details:
                    raise
                failed |= {
                    slot: _failure(slot, f"step({now[slot]!r})", error.details, self._episodes)
                    for slot in now
                }
                break
            for (slot, action), (observation, reward, terminated, truncated, info) in zip(
                now.items(), results, strict=True
            ):
                doing = f"step({action!r})"
                if info.get("worker_restarted"):
                    failed[slot] = _failure(slot, doing, info, self._episodes)
                else:
                    with _noted(slot, failed, doing):
                        self._episodes[slot].observe(observation, reward, terminated, truncated, info)
                if terminated or truncated or slot in failed or not pending[slot]:
                    del pending[slot]
        for slot in actions:
            if slot not in failed:
                self._episodes[slot].end_turn()


def _failure(slot: int, doing: str, info: Mapping[str, Any], slots: Any) -> Failed:
    """What an episode ends with when an env failed, its own or one of the same worker."""
    env, summary = info.get("worker_env"), info.get("worker_summary")
    words = f"{doing} failed: {summary}" if env == slot else info.get("worker_error", "its env was replaced")
    status: Status = "env_error"
    if info.get("worker_timeout"):
        status, words = "timeout", f"{words} (vector.step_timeout); its process was replaced"
    return Failed(status, str(words), env == slot or env not in slots)


@contextlib.contextmanager
def _noted(slot: int, failed: dict[int, Failed], doing: str | None = None) -> Iterator[None]:
    """An env that answers what it must not to `doing`, or a prompt that cannot be made, ends its own episode."""
    try:
        yield
    except Exception as error:
        if doing is not None:
            failed[slot] = Failed("env_error", f"{doing} failed: {with_frames(error)}")
        else:
            plain = isinstance(error, TimeoutError | EngineError)
            failed[slot] = Failed("engine_error", str(error) if plain else format_error(error))


class PoolHosts:
    """The one host of a pool."""

    count = 1

    def __init__(self, host: PoolHost) -> None:
        self._host = host

    async def host(self, number: int) -> Host | None:
        """The host."""
        return self._host

    async def spare(self) -> Host:
        """The same; it is never lost."""
        return self._host

    async def dismiss(self, host: Host) -> None:
        """It stays."""

    async def rest(self, *, keep_envs: bool) -> None:
        """Its envs stay."""

    async def close(self) -> None:
        """The pool is its owner's."""

    def pids(self) -> list[int]:
        """They are the pool's."""
        return []
