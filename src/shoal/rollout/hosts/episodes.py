"""What a host does for one episode after another: reset, prompt, decode, project, step; everything but sampling.

An episode is a generator that yields what to ask the model and gets what it said; who drives it decides in which
thread or process it plays. A failure ends one episode and is recorded with its cause.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from gymnasium.spaces import Text

from shoal.core.data import Status, ToolUse, Trajectory, check_step_result, refuse_no_text
from shoal.core.errors import EngineError, format_error, where_it_hangs, with_frames
from shoal.core.executors import OwnThread
from shoal.envs.actions import ToolCall
from shoal.rollout.episode import Episode, Role
from shoal.rollout.plan import Assignment
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.rollout.samplers.sampler import ChatTokenizer, Completion, Sampling
from shoal.rollout.tools.functions import filled, run_functions

MAKE = "make"
CLOSE_SECONDS = 10.0
"""For which the end of an env is waited for, at most."""


@dataclass(frozen=True)
class Setup:
    """All that a host needs to play the episodes of a config."""

    env_fns: Mapping[str, Callable[[], Any]]
    roles: Mapping[str, Role]
    prompt: PromptConfig
    tokenizer: ChatTokenizer
    env_retries: int = 1
    step_timeout: float | None = None
    make_timeout: float | None = None

    @property
    def close_seconds(self) -> float:
        """For which the end of envs is waited for."""
        return min(self.step_timeout or CLOSE_SECONDS, CLOSE_SECONDS)


def seconds_for(limits: Any, doing: str) -> float | None:
    """Seconds that an env may take for what it does; `limits` has `step_timeout` and `make_timeout`."""
    made = doing == MAKE and limits.make_timeout is not None
    return limits.make_timeout if made else limits.step_timeout  # type: ignore[no-any-return]


# --- what a driver and a host say to each other
class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Play this episode in a slot."""

    slot: int
    assignment: Assignment
    sampling: Sampling


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """What the model said to the last `Ask` of a slot."""

    slot: int
    completion: Completion


class Used(msgspec.Struct, frozen=True, array_like=True, tag="used"):
    """What came of the calls of the last `Use` of a slot, in their order."""

    slot: int
    uses: tuple[ToolUse, ...]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The model said nothing, or tools are gone: the episode of this slot ends here."""

    slot: int
    status: Status
    error: str


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """An episode waits for the model."""

    slot: int
    turn: int
    new_ids: tuple[int, ...]
    goes_on: bool
    """Whether `new_ids` follow the last prompt and its response."""
    images: tuple[str, ...] = ()


class Use(msgspec.Struct, frozen=True, array_like=True, tag="use"):
    """An episode waits for tools that run beside the driver."""

    slot: int
    turn: int
    calls: tuple[ToolCall, ...]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """An episode is over; `failed` says what its tries before this record failed with."""

    slot: int
    trajectory: Trajectory
    failed: tuple[str, ...] = ()


Event = Ask | Use | Ended
Reply = Answer | Used | Refused


class EnvFailedError(Exception):
    """An env raised, or answered what it must not."""


class _RefusedError(Exception):
    """The model said nothing, or tools are gone."""


# --- one episode after another
class Slot:
    """Plays one episode after another; its envs, one a tag, live in the thread that calls it."""

    def __init__(self, number: int, setup: Setup, prompter: Prompter) -> None:
        self.number, self._setup, self._prompter = number, setup, prompter
        self._envs: dict[str, Any] = {}
        self._story: Generator[Ask | Use, Reply, Ended] | None = None
        self._inside: tuple[str, float, int] | None = None

    def handle(self, message: Begin | Reply) -> Event:
        """Go on with what the driver says, up to the next question to the model or the end of the episode."""
        try:
            if isinstance(message, Begin):
                if self._story is not None:  # an episode that was broken off
                    self._story.close()
                self._story = self._play(message.assignment, message.sampling)
                return next(self._story)
            assert self._story is not None, "an answer came before the episode began"
            return self._story.send(message)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def close_envs(self) -> None:
        """Break off the episode, if one is open, and close the envs."""
        if self._story is not None:
            self._story.close()
            self._story = None
        while self._envs:
            self._close(self._envs.popitem()[1])

    def overdue(self) -> str | None:
        """What the env is at for longer than it may, and where in the user's own code."""
        if (inside := self._inside) is None:
            return None
        doing, since, thread = inside
        seconds = seconds_for(self._setup, doing)
        if seconds is None or time.monotonic() - since <= seconds:
            return None
        limit = "make_timeout, else step_timeout" if doing == MAKE else "step_timeout"
        frame = sys._current_frames().get(thread)
        where = where_it_hangs(traceback.extract_stack(frame)) if frame is not None else ""
        return f"{doing} failed: no answer within {seconds:g} s{where} ({limit})"

    # --- the story of an episode
    def _play(self, assignment: Assignment, sampling: Sampling) -> Generator[Ask | Use, Reply, Ended]:
        """An episode up to its end; once more in a fresh env after its env failed."""
        setup, failed = self._setup, list[str]()
        while True:
            episode = Episode(assignment.place, setup.roles[assignment.tag], self._prompter, sampling)
            status, why = yield from self._try(assignment.tag, episode)
            if status != "env_error" or len(failed) >= setup.env_retries:
                return Ended(self.number, episode.trajectory(status, why), tuple(failed))
            failed.append(str(why))

    def _try(self, tag: str, episode: Episode) -> Generator[Ask | Use, Reply, tuple[Status, str | None]]:
        """One try at an episode; how it ended."""
        try:
            env = self._envs.pop(tag, None)
            if env is None:
                env = self._in_env(MAKE, self._setup.env_fns[tag])
            broken = False
            try:
                self._in_env("reset", partial(reset_env, episode, env))
                yield from self._turns(episode, env)
            except EnvFailedError:
                broken = True
                raise
            finally:
                if broken:
                    self._close(env)
                else:
                    self._envs[tag] = env
        except EnvFailedError as error:
            return "env_error", str(error)
        except _RefusedError as error:
            return error.args
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # of the tokenizer or a template, say: the env has no part in it
            return "engine_error", str(error) if isinstance(error, EngineError) else format_error(error)
        return "ok", None

    def _turns(self, episode: Episode, env: Any) -> Generator[Ask | Use, Reply, None]:
        while not episode.over:
            turn, new_ids, goes_on, images = episode.question()
            reply = yield Ask(self.number, turn, new_ids, goes_on, images)
            if isinstance(reply, Refused):
                raise _RefusedError(reply.status, reply.error)
            assert isinstance(reply, Answer), "an answer was asked for"
            for action in episode.respond(reply.completion):
                step = partial(step_env, episode, env, action)
                if self._in_env(f"step({action!r})", step):
                    break
            if episode.calls:
                uses, left = run_functions(self._prompter.tools.tools, episode.calls)
                came = (yield Use(self.number, turn, left)) if left else Used(self.number, ())
                if isinstance(came, Refused):
                    raise _RefusedError(came.status, came.error)
                assert isinstance(came, Used), "results were asked for"
                episode.use(filled(uses, came.uses))
            episode.end_turn()

    def _in_env(self, doing: str, call: Callable[[], Any]) -> Any:
        self._inside = doing, time.monotonic(), threading.get_ident()
        try:
            return in_env(doing, call)
        finally:
            self._inside = None

    def _close(self, env: Any) -> None:
        with contextlib.suppress(EnvFailedError):
            self._in_env("close", env.close)


def in_env(doing: str, call: Callable[[], Any]) -> Any:
    """Call into an env, and mark what it raises as the env's own.

    Raises:
        EnvFailedError: it raised something, be it `SystemExit`, but not Ctrl-C.
    """
    process, code = os.getpid(), 0
    try:
        return call()
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise EnvFailedError(f"{doing} failed: {with_frames(error)}") from error
    finally:
        if os.getpid() != process:  # a child that the env forked must not go on as a second host
            os._exit(code)


def step_env(episode: Episode, env: Any, action: int | str) -> bool:
    """Step the env and record the result; returns whether the episode ended."""
    observation, reward, terminated, truncated, info = check_step_result(env.step(action), "step")
    _refuse_no_text(env, observation)
    episode.observe(observation, reward, terminated, truncated, info)
    return bool(terminated or truncated)


def reset_env(episode: Episode, env: Any) -> None:
    """Reset the env and begin the episode."""
    observation, info = check_step_result(env.reset(seed=episode.place.env_seed), "reset")
    _refuse_no_text(env, observation)
    episode.begin(observation, info)


def _refuse_no_text(env: Any, observation: Any) -> None:
    """As a vector env does, by which envs are stepped in lockstep."""
    if isinstance(getattr(env, "observation_space", None), Text):
        refuse_no_text(observation)


# --- many episodes at once
class SlotThreads:
    """Slots, each in a thread of its own, where an env may keep what lives in one thread.

    Args:
        setup: what they play.
        reply: called in a slot's thread with each `Ask` and `Ended`.
    """

    def __init__(self, setup: Setup, reply: Callable[[Event], None]) -> None:
        self._setup, self._reply = setup, reply
        self._prompter = Prompter(setup.prompt, setup.tokenizer)
        self._slots: dict[int, tuple[Slot, OwnThread]] = {}

    def post(self, message: Begin | Reply) -> None:
        """Have the slot's thread go on with this message."""
        if message.slot not in self._slots:
            slot = Slot(message.slot, self._setup, self._prompter)
            self._slots[message.slot] = slot, OwnThread("shoal-episode")
        slot, thread = self._slots[message.slot]
        thread.submit(partial(self._handle, slot, message))

    def _handle(self, slot: Slot, message: Begin | Reply) -> None:
        self._reply(slot.handle(message))

    def overdue(self) -> list[tuple[int, str]]:
        """Slots whose env does not answer, and what it is at."""
        found = [(number, slot.overdue()) for number, (slot, _) in list(self._slots.items())]
        return [(number, why) for number, why in found if why is not None]

    def leave(self, number: int) -> None:
        """Leave a slot behind whose env does not come back; the next episode of that number has another."""
        self._slots.pop(number)[1].end()

    def close_envs(self) -> list[Future[None]]:
        """Close all envs, each in its thread after what that is at."""
        return [thread.submit(slot.close_envs) for slot, thread in self._slots.values()]

    def end(self) -> None:
        """End the threads, each after what it is at."""
        for _, thread in self._slots.values():
            thread.end()
        self._slots.clear()


def close_all(envs: list[Any], seconds: float) -> int:
    """Close envs, each within so many seconds; returns how many threads are left behind in one."""
    failed: list[Any] = []

    def close(env: Any) -> None:
        try:
            in_env("close", env.close)
        except EnvFailedError:
            failed.append(env)

    threads = [threading.Thread(target=close, args=(env,), daemon=True) for env in envs]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    for env in list(failed):  # one that refuses another thread than that which made it
        with contextlib.suppress(EnvFailedError):
            in_env("close", env.close)
    return sum(thread.is_alive() for thread in threads)
