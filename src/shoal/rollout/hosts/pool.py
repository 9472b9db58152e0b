"""A vector env as a host: its envs are stepped together, in the thread that plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from shoal.core.errors import EnvError, WorkerError, WorkerTimeoutError
from shoal.rollout.episode import Episode, Role
from shoal.rollout.hosts.episodes import (
    Begin,
    Ended,
    EnvFailedError,
    EnvReplacedError,
    Event,
    Playing,
    Reply,
    Reset,
    Step,
    advance,
    in_env,
    played,
)
from shoal.rollout.hosts.host import Host
from shoal.rollout.prompts import Prompter

Observed = tuple[str, dict[str, Any]]
Result = tuple[str, float, bool, bool, dict[str, Any]]


class EnvPool(Protocol):
    """Envs that can be reset and stepped a few at a time; `shoal.vector` provides them."""

    def reset_some(self, indices: Sequence[int], seeds: Sequence[int], /) -> Sequence[Observed]:
        """Reset these envs, each from its seed."""

    def step_some(self, indices: Sequence[int], actions: Sequence[Any], /) -> Sequence[Result]:
        """Step these envs; the others are left alone."""

    def close(self) -> None:
        """End the envs and their workers."""


class VectorHost(Host):
    """Plays each episode in the env of its index, modulo their number, once that is free.

    Messages of one turn of the loop become one step.
    """

    def __init__(
        self, pool: EnvPool, n_envs: int, roles: Mapping[str, Role], prompter: Prompter, env_retries: int
    ) -> None:
        super().__init__()
        self._pool, self._n_envs, self._roles = pool, n_envs, roles
        self._prompter, self._retries = prompter, env_retries
        self._messages: dict[int, Begin | Reply] = {}
        self._playing: dict[int, Playing] = {}
        self._env: dict[int, int] = {}  # by slot
        self._later: dict[int, Begin] = {}  # by env: an episode that waits for another one's end

    async def close_envs(self) -> None:
        """Forget what was played; the envs are the pool's."""
        self._messages, self._playing, self._env, self._later = {}, {}, {}, {}

    def _send(self, message: Begin | Reply) -> None:
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._move)
        self._messages[message.slot] = message

    # --- one step or reset of all slots that have a message
    def _move(self) -> None:
        messages, self._messages = self._messages, {}
        try:
            events = self._events(messages)
        except BaseException as error:
            for slot in messages:
                if not (future := self._open.pop(slot)).done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for event in events:
            self._receive(event)

    def _events(self, messages: Mapping[int, Begin | Reply]) -> list[Event]:
        """What each slot asks next, or how its episode ended."""
        results: dict[int, Any] = {}
        for slot, message in messages.items():
            if not isinstance(message, Begin):
                results[slot] = message
            elif (env := message.assignment.index % self._n_envs) in self._env.values():
                self._later[env] = message
            else:
                role = self._roles[message.assignment.tag]
                self._playing[slot] = played(message, role, self._prompter, self._retries)
                self._env[slot], results[slot] = env, None
        events: list[Event] = []
        while results:
            resets: dict[int, Episode] = {}
            steps: dict[int, Step] = {}
            for slot, result in results.items():
                event = self._go_on(slot, result)
                if isinstance(event, Reset):
                    resets[slot] = event.episode
                elif isinstance(event, Step):
                    steps[slot] = event
                else:
                    events.append(event)
            results = (self._step(steps) if steps else {}) | (self._reset(resets) if resets else {})
        return events

    def _go_on(self, slot: int, result: Any) -> Event | Reset | Step:
        event = advance(self._playing[slot], result)
        if isinstance(event, Ended):
            del self._playing[slot]
            if (later := self._later.pop(self._env.pop(slot), None)) is not None:
                self._send(later)
        return event

    def _reset(self, resets: Mapping[int, Episode]) -> dict[int, Any]:
        """Reset these envs; where one fails, each alone."""
        shown: dict[int, Observed] = {}
        results: dict[int, Any] = {}
        try:
            shown = self._shown(resets)
        except (WorkerError, EnvError):
            for slot, episode in resets.items():
                try:
                    shown |= self._shown({slot: episode})
                except (WorkerError, EnvError) as error:
                    timeout = isinstance(error, WorkerTimeoutError)
                    known = {"worker_error": str(error), "worker_timeout": timeout}
                    details = getattr(error, "details", None) or known
                    results[slot] = self._failure(slot, "reset", details, resets)
        begun = {slot: _recorded("reset", partial(resets[slot].begin, *one)) for slot, one in shown.items()}
        return results | begun

    def _shown(self, resets: Mapping[int, Episode]) -> dict[int, Observed]:
        seeds = [episode.place.env_seed for episode in resets.values()]
        return dict(
            zip(resets, self._pool.reset_some([self._env[slot] for slot in resets], seeds), strict=True)
        )

    def _step(self, steps: Mapping[int, Step]) -> dict[int, Any]:
        """Step these envs together; whether each episode has ended, or why its env failed."""
        results: dict[int, Any] = {}
        try:
            envs, actions = [self._env[slot] for slot in steps], [step.action for step in steps.values()]
            stepped = self._pool.step_some(envs, actions)
        except WorkerError as error:  # an env failed for which there is no other
            if not error.details:
                raise
            return {
                slot: self._failure(slot, f"step({step.action!r})", error.details, self._playing)
                for slot, step in steps.items()
            }
        for (slot, step), result in zip(steps.items(), stepped, strict=True):
            doing, (_, _, terminated, truncated, info) = f"step({step.action!r})", result
            if info.get("worker_restarted"):
                results[slot] = self._failure(slot, doing, info, self._playing)
            else:
                failed = _recorded(doing, partial(step.episode.observe, *result))
                results[slot] = failed or bool(terminated or truncated)
        return results

    def _failure(
        self, slot: int, doing: str, info: Mapping[str, Any], slots: Iterable[int]
    ) -> EnvFailedError:
        """Why an episode ends whose env failed, or that of another of these slots in the same worker."""
        env, summary = info.get("worker_env"), info.get("worker_summary")
        own = env == self._env[slot]
        words = f"{doing} failed: {summary}" if own else info.get("worker_error", "its env was replaced")
        if not own and env in {self._env[other] for other in slots}:
            return EnvReplacedError(words)
        error = EnvFailedError(words)
        if info.get("worker_timeout"):
            error = EnvFailedError(f"{words} (vector.step_timeout); its process was replaced")
            error.status = "timeout"
        return error


def _recorded(doing: str, record: Callable[[], None]) -> EnvFailedError | None:
    """Record what an env shows; one that returns what it must not has failed."""
    try:
        in_env(doing, record)
    except EnvFailedError as error:
        return error
    return None
