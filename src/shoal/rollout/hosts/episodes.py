"""What a host does for one episode after another: reset, prompt, decode, project, step; everything but sampling.

An episode is a generator that yields a question to the model or a call of its env, and is sent the result; its caller
decides in which thread or process that happens. A failure ends one episode and is recorded with its cause.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
from gymnasium.spaces import Text

from shoal.core.data import Status, ToolUse, Trajectory, check_step_result, refuse_no_text
from shoal.core.errors import EngineError, format_error, where_it_hangs, with_frames
from shoal.core.executors import OwnThread, in_own_thread
from shoal.envs.actions import ToolCall
from shoal.rollout.episode import Episode, Role
from shoal.rollout.plan import Assignment
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.rollout.tools.chat import ToolChat
from shoal.rollout.tools.functions import filled, run_functions
from shoal.samplers.sampler import ChatTokenizer, Completion, Sampling

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
    tools: ToolChat | None = None

    @property
    def prompter(self) -> Prompter:
        """What makes the prompts, for one host."""
        return Prompter(self.prompt, self.tokenizer, self.tools)

    @property
    def close_seconds(self) -> float:
        """For which the end of envs is waited for."""
        return min(self.step_timeout or CLOSE_SECONDS, CLOSE_SECONDS)


def seconds_for(limits: Any, doing: str) -> float | None:
    """Seconds that an env may take for what it does; `limits` has `step_timeout` and `make_timeout`."""
    made = doing == MAKE and limits.make_timeout is not None
    return limits.make_timeout if made else limits.step_timeout  # type: ignore[no-any-return]


# --- messages of a driver and its hosts
class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Play this episode in a slot."""

    slot: int
    assignment: Assignment
    sampling: Sampling


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag="sampled"):
    """The model's response to the last `Ask` of a slot."""

    slot: int
    completion: Completion


class Used(msgspec.Struct, frozen=True, array_like=True, tag="used"):
    """The results of the calls of the last `Use` of a slot, in their order."""

    slot: int
    uses: tuple[ToolUse, ...]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """There is no response, or there are no tools: the episode of this slot ends here."""

    slot: int
    status: Status
    error: str


class Control(msgspec.Struct, frozen=True, array_like=True, tag="control"):
    """To all slots of a host at once: `LOOK` which of their envs are overdue, or `CLOSE` the envs."""

    slot: int


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
    first: bool  # of this attempt at the episode


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """An episode is over; `failed` has the causes of its attempts before this record."""

    slot: int
    trajectory: Trajectory
    failed: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """Of a host: it has its setup, and has done what a `Control` asks for."""

    slot: int
    pid: int
    overdue: tuple[tuple[int, str], ...] = ()
    """The slots whose env is overdue, and why."""


LOOK, CLOSE = -1, -2
"""In the place of a slot, where all of them are meant."""
Reply = Sampled | Used | Refused
Message = Begin | Reply | Control
Event = Ask | Use | Ended
encode = msgspec.msgpack.Encoder().encode
decode_message: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode
decode_event: Callable[[bytes], Event | Report] = msgspec.msgpack.Decoder(Event | Report).decode


class EnvFailedError(Exception):
    """An env raised, or answered what it must not."""

    status: Status = "env_error"
    """Of its episode; one with another status is not played again."""


class EnvReplacedError(EnvFailedError):
    """An env is gone with another one, which failed: the episode begins again, and that is not counted."""


# --- an episode
class Reset(NamedTuple):
    """The env shall be reset, and the episode begin with its observation."""

    episode: Episode


class Step(NamedTuple):
    """The env shall take this action, and its result be recorded in the episode; sent back is whether that ended it."""

    episode: Episode
    action: int | str


Playing = Generator[Ask | Use | Reset | Step, Any, Ended]


def played(begin: Begin, role: Role, prompter: Prompter, retries: int) -> Playing:
    """An episode up to its end; once more after its env failed, at most `retries` times."""
    failed: list[str] = []
    while True:
        episode = Episode(begin.assignment.place, role, prompter, begin.sampling)
        refused: Refused | None = None
        status: Status = "ok"
        why: str | None = None
        try:
            yield Reset(episode)
            refused = yield from _turns(begin.slot, episode, prompter)
        except EnvReplacedError:
            continue
        except EnvFailedError as error:
            status, why = error.status, str(error)
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # of the tokenizer or a template, say: the env has no part in it
            status, why = "engine_error", format_error(error)
            if isinstance(error, EngineError):
                why = str(error)
        if refused is not None:
            status, why = refused.status, refused.error
        if status != "env_error" or len(failed) >= retries:
            return Ended(begin.slot, episode.trajectory(status, why), tuple(failed))
        failed.append(str(why))


def _turns(
    slot: int, episode: Episode, prompter: Prompter
) -> Generator[Ask | Use | Step, Any, Refused | None]:
    """Turn after turn, up to the end of the episode, or to a refusal."""
    first = True
    while not episode.over:
        request, known = episode.request(), episode.known
        reply: Reply = yield Ask(slot, episode.turn, request.prompt_ids[known:], known > 0, request.images)
        if isinstance(reply, Refused):
            return reply
        assert isinstance(reply, Sampled)
        for action in episode.respond(reply.completion):
            if (yield Step(episode, action)):
                break
        if episode.calls and prompter.tools is not None:
            uses, left = run_functions(prompter.tools.tools, episode.calls)
            reply = Used(slot, ())
            if left:
                reply, first = (yield Use(slot, episode.turn, left, first)), False
            if isinstance(reply, Refused):
                return reply
            assert isinstance(reply, Used)
            episode.use(filled(uses, reply.uses))
        episode.end_turn()
    return None


def advance(playing: Playing, result: Any) -> Event | Reset | Step:
    """What an episode asks next, or its end; `result` is what it asked for, or an exception."""
    try:
        return playing.throw(result) if isinstance(result, Exception) else playing.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


# --- one episode after another
class Slot:
    """Plays one episode after another; its envs, one a tag, live in the thread that calls it."""

    def __init__(self, setup: Setup, prompter: Prompter) -> None:
        self._setup, self._prompter = setup, prompter
        self._envs: dict[str, Any] = {}
        self._playing: Playing | None = None
        # The call into an env, since when, in which thread.
        self._inside: tuple[str, float, int] | None = None

    def handle(self, message: Begin | Reply) -> Event:
        """Go on with a message of the driver, up to the next question to the model or the end of the episode."""
        sent: Any = message
        if isinstance(message, Begin):
            if self._playing is not None:  # an episode that was broken off
                self._playing.close()
            role = self._setup.roles[message.assignment.tag]
            self._playing, sent = played(message, role, self._prompter, self._setup.env_retries), None
        assert self._playing is not None, "a reply came before the episode began"
        while isinstance(event := advance(self._playing, sent), Reset | Step):
            try:
                sent = self._do(event)
            except Exception as error:  # whatever it is, the driver waits for an answer
                sent = error
        return event

    def close_envs(self) -> None:
        """Break off the episode, if one is open, and close the envs."""
        if self._playing is not None:
            self._playing.close()
            self._playing = None
        while self._envs:
            self._close(self._envs.popitem()[1])

    def overdue(self) -> str | None:
        """The call into the env that takes longer than it may, and where in the user's own code it is."""
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

    def _do(self, event: Reset | Step) -> bool:
        """Reset or step the env, which is closed if it fails; whether the episode has ended."""
        episode = event.episode
        tag = episode.role.tag
        if tag not in self._envs:
            self._envs[tag] = self._in_env(MAKE, self._setup.env_fns[tag])
        env = self._envs[tag]
        try:
            if isinstance(event, Step):
                step = partial(step_env, episode, env, event.action)
                return bool(self._in_env(f"step({event.action!r})", step))
            self._in_env("reset", partial(reset_env, episode, env))
            return False
        except EnvFailedError:
            self._close(self._envs.pop(tag))
            raise

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

    `send` is called with each event, in the thread of its slot, and with each report.
    """

    def __init__(self, setup: Setup, send: Callable[[Event | Report], object]) -> None:
        self._setup, self._send = setup, send
        self._prompter = setup.prompter
        self._slots: dict[int, tuple[Slot, OwnThread]] = {}

    def post(self, message: Message) -> None:
        """Have the thread of a slot go on with a message, or report on all slots."""
        if not isinstance(message, Control):
            if message.slot not in self._slots:
                slot = Slot(self._setup, self._prompter)
                self._slots[message.slot] = slot, OwnThread("shoal-episode")
            slot, thread = self._slots[message.slot]
            thread.submit(partial(self._handle, slot, message))
        elif message.slot == LOOK:
            found = [(number, slot.overdue()) for number, (slot, _) in self._slots.items()]
            overdue = tuple((number, why) for number, why in found if why is not None)
            self._send(Report(LOOK, os.getpid(), overdue))
        else:
            in_own_thread(partial(self._close, self.close_envs()), "shoal-close")

    def _handle(self, slot: Slot, message: Begin | Reply) -> None:
        self._send(slot.handle(message))

    def _close(self, closing: list[Future[None]]) -> None:
        wait(closing)
        self._send(Report(CLOSE, os.getpid()))

    def close_envs(self) -> list[Future[None]]:
        """Close all envs, each in its thread after the call that is under way."""
        return [thread.submit(slot.close_envs) for slot, thread in self._slots.values()]

    def end(self) -> None:
        """Close all envs and end the threads, each after the call that is under way."""
        self.close_envs()
        for _, thread in self._slots.values():
            thread.end()
        self._slots.clear()


def close_env(env: Any) -> None:
    """Close an env, for which `CLOSE_SECONDS` are waited; here if it refuses another thread than that which made it."""
    closing = in_own_thread(partial(in_env, "close", env.close), "shoal-close")
    if wait([closing], CLOSE_SECONDS).done and closing.exception() is not None:
        with contextlib.suppress(EnvFailedError):
            in_env("close", env.close)
