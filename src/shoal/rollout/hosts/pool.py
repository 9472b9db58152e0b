"""A vector env as a host: its envs are stepped abreast, in the thread that plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from shoal.core.errors import EnvError, WorkerError, WorkerTimeoutError
from shoal.rollout.episode import Episode, Role
from shoal.rollout.hosts.episodes import (
    Begin,
    EnvFailedError,
    EnvReplacedError,
    Event,
    Reply,
    Reset,
    Step,
    Story,
    in_env,
    story,
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


class PoolHost(Host):
    """Plays each episode in the env of its slot; what is said in one turn of the loop is done abreast.

    Args:
        pool: the envs.
        role_of: what the agent knows of the env of a slot, asked again when it is reset.
        prompter: makes the prompts.
        env_retries: times an episode starts again after its env failed.
    """

    def __init__(
        self, pool: EnvPool, role_of: Callable[[int, str], Role], prompter: Prompter, env_retries: int
    ) -> None:
        self._pool, self._role_of, self._prompter, self._retries = pool, role_of, prompter, env_retries
        self._said: dict[int, tuple[Begin | Reply, asyncio.Future[Event]]] = {}
        self._stories: dict[int, Story] = {}

    def tell(self, message: Begin | Reply) -> Awaitable[Event]:
        """The slot's answer, after those of all that is said in this turn of the loop."""
        loop = asyncio.get_running_loop()
        if not self._said:
            loop.call_soon(self._move)
        future: asyncio.Future[Event] = loop.create_future()
        self._said[message.slot] = message, future
        return future

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
        """What each slot asks next, or how its episode ended."""
        answers: dict[int, Any] = {}
        for slot, message in said.items():
            answers[slot] = message
            if isinstance(message, Begin):
                role = self._role_of(slot, message.assignment.tag)
                self._stories[slot] = story(message, role, self._prompter, self._retries)
                answers[slot] = None
        events: dict[int, Event] = {}
        while answers:
            resets: dict[int, Episode] = {}
            steps: dict[int, Step] = {}
            for slot, answer in answers.items():
                wish = self._go_on(slot, answer)
                if isinstance(wish, Reset):
                    resets[slot] = wish.episode
                elif isinstance(wish, Step):
                    steps[slot] = wish
                else:
                    events[slot] = wish
            answers = (self._step(steps) if steps else {}) | (self._reset(resets) if resets else {})
        return events

    def _go_on(self, slot: int, answer: Any) -> Event | Reset | Step:
        going = self._stories[slot]
        try:
            return going.throw(answer) if isinstance(answer, EnvFailedError) else going.send(answer)
        except StopIteration as end:
            del self._stories[slot]
            return end.value  # type: ignore[no-any-return]

    def _reset(self, resets: Mapping[int, Episode]) -> dict[int, Any]:
        """Reset these envs; where one fails, each alone."""
        shown: dict[int, Observed] = {}
        answers: dict[int, Any] = {}
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
                    answers[slot] = _failure(slot, "reset", details, resets)

        def begin(slot: int, observed: Observed) -> None:
            episode = resets[slot]
            episode.role = self._role_of(slot, episode.role.tag)
            episode.begin(*observed)

        recorded = {slot: _recorded("reset", partial(begin, slot, one)) for slot, one in shown.items()}
        return answers | recorded

    def _shown(self, resets: Mapping[int, Episode]) -> dict[int, Observed]:
        seeds = [episode.place.env_seed for episode in resets.values()]
        return dict(zip(resets, self._pool.reset_some(list(resets), seeds), strict=True))

    def _step(self, steps: Mapping[int, Step]) -> dict[int, Any]:
        """Step these envs, all abreast; whether each episode has ended, or why its env failed."""
        answers: dict[int, Any] = {}
        try:
            results = self._pool.step_some(list(steps), [step.action for step in steps.values()])
        except WorkerError as error:  # an env failed for which there is no other
            if not error.details:
                raise
            return {
                slot: _failure(slot, f"step({step.action!r})", error.details, self._stories)
                for slot, step in steps.items()
            }
        for (slot, step), result in zip(steps.items(), results, strict=True):
            doing, (_, _, terminated, truncated, info) = f"step({step.action!r})", result
            if info.get("worker_restarted"):
                answers[slot] = _failure(slot, doing, info, self._stories)
            else:
                failed = _recorded(doing, partial(step.episode.observe, *result))
                answers[slot] = failed or bool(terminated or truncated)
        return answers


def _recorded(doing: str, record: Callable[[], None]) -> EnvFailedError | None:
    """Record what an env shows; an env that answers what it must not has failed."""
    try:
        in_env(doing, record)
    except EnvFailedError as error:
        return error
    return None


def _failure(slot: int, doing: str, info: Mapping[str, Any], slots: Container[object]) -> EnvFailedError:
    """What an episode ends with when its env failed, or one of the same worker that another one of `slots` plays."""
    env, summary = info.get("worker_env"), info.get("worker_summary")
    words = f"{doing} failed: {summary}" if env == slot else info.get("worker_error", "its env was replaced")
    if env != slot and env in slots:
        return EnvReplacedError(words)
    error = EnvFailedError(words)
    if info.get("worker_timeout"):
        error = EnvFailedError(f"{words} (vector.step_timeout); its process was replaced")
        error.status = "timeout"
    return error
