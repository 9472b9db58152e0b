"""What a rollout worker does: play its share of the episodes, each env at its own pace, and report every one.

The same code runs in the caller, in threads, in processes and on a cluster; only the link to the engine
differs. A failure ends one episode and is recorded with its cause; the others go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NoReturn, Protocol

import msgspec
from gymnasium.spaces import Text

from shoal.core.data import Status, Trajectory, check_step_result, refuse_no_text
from shoal.core.errors import EngineError, WorkerError, format_error, where_it_hangs, with_frames
from shoal.core.executors import OwnThread
from shoal.core.processes import STANDSTILL
from shoal.rollout.episode import Episode, EpisodeId, Role
from shoal.rollout.parallel.transport import Link, Schedule
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.rollout.samplers.sampler import (
    ChatTokenizer,
    Completion,
    Engine,
    Key,
    Request,
    Sampling,
    generate_each,
)
from shoal.rollout.samplers.settings import check_settings

logger = logging.getLogger(__name__)

Backend = Literal["auto", "serial", "threads", "processes", "loky", "ray"]
MAKE = "make"


# --- what a worker is given, and what it reports
@dataclass(frozen=True)
class ParallelConfig:
    """How a parallel rollout is run; nothing here changes a trajectory."""

    backend: Backend = "auto"
    """Where workers run; "auto" is "processes"."""
    schedule: Schedule = "adaptive"
    """When the engine runs: "greedy" (whenever something waits), "adaptive" (it may wait for what is expected
    at once), or "barrier" (lockstep)."""
    episodes_at_once: int | None = None
    """Of one worker; its whole share if not given."""
    max_batch: int = 4096
    """Requests that the engine gets at once, at most."""
    step_timeout: float | None = None
    """Seconds after which an env that does not answer is given up and its episode ends as "timeout"; with
    `make_timeout` those of `vector` if neither is given."""
    make_timeout: float | None = None
    """Seconds that the constructor of an env may take; `step_timeout` if not given."""
    episode_timeout: float | None = None
    """Seconds after which an episode ends as "timeout"."""
    request_timeout: float | None = None
    """Seconds within which the engine must answer a request."""
    engine_timeout: float | None = None
    """Seconds of one call of the engine, after which it counts as hung."""
    engine_retries: int = 1
    """Further attempts for a request that the engine failed to answer."""
    engine_restarts: int = 3
    """Times that an engine which crashed or hangs begins anew, where it can (vllm, ray, openai)."""
    env_retries: int = 1
    """Times an episode starts again, in a fresh env, after its env failed."""
    max_deaths: int = 3
    """Workers that may die while they play one episode alone; then it ends as "env_error"."""
    ray_options: dict[str, Any] = field(default_factory=dict)
    """Of each worker's Ray task: `num_cpus`, `resources`, `runtime_env`, …"""
    keep_envs: bool = False
    """Keep envs in their workers for the next rollout instead of making new ones, until the manager is closed (on
    "loky" and "ray" they then end with their process, without their `close`)."""

    def __post_init__(self) -> None:
        limits = ("step_timeout", "make_timeout", "episode_timeout", "request_timeout", "engine_timeout")
        retries = dict.fromkeys(("engine_retries", "engine_restarts", "env_retries"), 0)
        check_settings(self, limits, **retries, max_batch=1, max_deaths=1, episodes_at_once=1)

    def seconds_for(self, doing: str) -> float | None:
        """Seconds that an env may take for what it does."""
        return self.make_timeout if doing == MAKE and self.make_timeout is not None else self.step_timeout

    @property
    def deadlines(self) -> list[float]:
        """Those that somebody has to keep an eye on."""
        kept = self.step_timeout, self.make_timeout, self.episode_timeout
        return [seconds for seconds in kept if seconds is not None]


@dataclass(frozen=True, slots=True)
class Assignment:
    """One episode to play; `index` is its place among all of the rollout."""

    index: int
    place: EpisodeId
    tag: str


@dataclass(frozen=True)
class Share:
    """What one worker plays, and all it needs for it; its numbers are that of the rollout and its own in it."""

    rollout: int
    number: int
    assignments: tuple[Assignment, ...]
    env_fns: Mapping[str, Callable[[], Any]]
    roles: Mapping[str, Role]
    prompt: PromptConfig
    tokenizer: ChatTokenizer
    sampling: Sampling
    settings: ParallelConfig = ParallelConfig()
    threads: int | None = None
    """Episodes played at once; all of them if not given."""
    lockstep: bool = False
    """Tell the engine which episodes are at play."""
    kinds: Mapping[str, Hashable] | None = None
    """What makes the envs of two shares of one kind, by tag: then envs are kept for the next share of this process
    instead of being closed."""

    def part(self, number: int, assignments: Sequence[Assignment]) -> Share:
        """The share of a worker that plays only these episodes."""
        tags = {assignment.tag for assignment in assignments}
        env_fns = {tag: env_fn for tag, env_fn in self.env_fns.items() if tag in tags}
        return replace(self, number=number, assignments=tuple(assignments), env_fns=env_fns)


class Connect(Protocol):
    """The way from a worker to the shared engine, as it can be sent to the worker."""

    def connect(self, asker: int) -> Link:
        """Open it."""


@dataclass(frozen=True, slots=True)
class Played:
    """How a share went."""

    cpu_seconds: float
    hung: int  # threads left behind in an env that does not answer


def encode_report(rollout: int, index: int, trajectory: Trajectory, failed: Sequence[str] = ()) -> bytes:
    """A finished episode as bytes, with what its tries before `failed` with.

    One that cannot be written is reported without its turns, and why.
    """
    try:
        return msgspec.msgpack.encode((rollout, index, trajectory, failed))
    except (OverflowError, TypeError, ValueError, msgspec.MsgspecError) as error:
        why = f"its record cannot be written: {format_error(error)}"
        lost = replace(trajectory, turns=(), success=False, status="env_error", error=why)
        return msgspec.msgpack.encode((rollout, index, lost, failed))


decode_report: Callable[[bytes], tuple[int, int, Trajectory, list[str]]]
decode_report = msgspec.msgpack.Decoder(tuple[int, int, Trajectory, list[str]]).decode
"""What `encode_report` wrote."""


# --- envs
class Seat:
    """A thread and the envs that wait in it for their next episode, by kind: an env lives and dies in one thread.

    The thread is one of its own, or the one that makes the seat.
    """

    def __init__(self, *, own: bool) -> None:
        self.envs: dict[Hashable, Any] = {}
        self.thread = OwnThread("shoal-episode") if own else None
        self.caller = threading.get_ident()

    def fits(self, own: bool) -> bool:
        """Whether its thread is one of its own, or the present one."""
        return (
            self.thread is not None if own else self.thread is None and self.caller == threading.get_ident()
        )

    def run(self, call: Callable[[], Any]) -> None:
        """Do it there; what has a thread of its own is not waited for."""
        if self.thread is None:
            call()
        else:
            self.thread.submit(call)

    def close(self) -> Future[None] | None:
        """Close the envs, after what the thread is at, and end it; a future where that is one of its own."""
        if self.thread is None:
            self._close()
            return None
        closing = self.thread.submit(self._close)
        self.thread.end()
        return closing

    def _close(self) -> None:
        close_all(list(self.envs.values()))
        self.envs.clear()


class EnvShelf:
    """Seats that nobody plays in."""

    def __init__(self) -> None:
        self._idle: list[Seat] = []
        self._closed = False
        self._lock = threading.Lock()

    def take(self, kind: Hashable, *, own: bool) -> Seat:
        """A seat with a thread of its own, or in the present one; where there is one, with an env of this kind."""
        with self._lock:
            fitting = [seat for seat in self._idle if seat.fits(own)]
            if fitting:
                seat = next((seat for seat in fitting if kind in seat.envs), fitting[-1])
                self._idle.remove(seat)
                return seat
        return Seat(own=own)

    def put(self, seat: Seat) -> None:
        """The seat is free; once the shelf is closed, its envs are too."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._idle.append(seat)
        if closed:
            seat.close()

    def close(self, seconds: float | None = None) -> int:
        """Close all envs, each within so many seconds if given; returns how many threads are left behind in one."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        return len(wait([closing for seat in idle if (closing := seat.close())], seconds).not_done)


KEPT = EnvShelf()
"""Envs of this process that outlive a share (`Share.kinds`)."""


class EnvFailedError(Exception):
    """An env raised, or answered what it must not."""


@dataclass(slots=True, eq=False)
class Player:
    """A thread that plays one episode after another, as its supervisor sees it."""

    assignment: Assignment | None = None
    seat: Seat = field(default_factory=partial(Seat, own=False))
    failed: list[str] = field(default_factory=list)
    """What its tries at its episode failed with, see `ParallelConfig.env_retries`."""
    episode: Episode | None = None
    failure: str | None = None
    """Why this try has failed, while its env is closed."""
    began: float = 0.0
    inside: list[Any] | None = None
    """What the env is at, and since when."""
    thread: int = 0
    """In which it plays."""
    abandoned: bool = False
    in_caller: bool = True
    """Whether Ctrl-C, which comes in the main thread alone, would be the caller's."""

    def overdue(self, now: float, settings: ParallelConfig) -> str | None:
        """Why this player's episode has to be given up, if it has."""
        if self.episode is None:
            return None
        if (inside := self.inside) is not None:
            seconds = settings.seconds_for(inside[0])
            if seconds is not None and now - inside[1] > seconds:
                limit = "make_timeout, else step_timeout" if inside[0] == MAKE else "step_timeout"
                return f"{inside[0]} failed: no answer within {seconds:g} s{self.place()} ({limit})"
        if settings.episode_timeout is not None and now - self.began > settings.episode_timeout:
            return f"the episode did not end within {settings.episode_timeout:g} s"
        return None

    def place(self) -> str:
        """Where in the user's own code its thread is."""
        frame = sys._current_frames().get(self.thread)
        return where_it_hangs(traceback.extract_stack(frame)) if frame is not None else ""

    def spare(self, seconds: float) -> None:
        """So much of its time does not count."""
        self.began += seconds
        if (inside := self.inside) is not None:
            inside[1] += seconds

    def in_env(self, doing: str, call: Callable[[], Any]) -> Any:
        """Call into the env, so that what it raises is told apart from all else.

        Raises:
            EnvFailedError: it raised something, be it `SystemExit` or a cancellation, but not Ctrl-C of the caller.
        """
        process, failure = os.getpid(), None
        self.inside = [doing, time.monotonic()]
        try:
            return call()
        except BaseException as error:
            failure = error
            main = threading.current_thread() is threading.main_thread()
            if isinstance(error, KeyboardInterrupt) and self.in_caller and main:
                raise
            raise EnvFailedError(f"{doing} failed: {with_frames(error)}") from error
        finally:
            self.inside = None
            if os.getpid() != process:
                _end_forked(failure)


def _end_forked(error: BaseException | None) -> NoReturn:
    """A child that the env forked came back from the env: it must not go on as a second worker."""
    code = 0
    with contextlib.suppress(BaseException):
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def step_env(player: Player, episode: Episode, env: Any, action: int | str) -> bool:
    """Step the env and tell the episode; whether that was the end of it."""
    observation, reward, terminated, truncated, info = check_step_result(env.step(action), "step")
    _refuse_no_text(env, observation)
    if not player.abandoned:
        episode.observe(observation, reward, terminated, truncated, info)
    return bool(terminated or truncated)


def reset_env(episode: Episode, env: Any) -> None:
    """Reset the env for an episode, and tell the episode."""
    observation, info = check_step_result(env.reset(seed=episode.place.env_seed), "reset")
    _refuse_no_text(env, observation)
    episode.begin(observation, info)


def _refuse_no_text(env: Any, observation: Any) -> None:
    """As a vector env does, by which envs are stepped in lockstep."""
    if isinstance(getattr(env, "observation_space", None), Text):
        refuse_no_text(observation)


def close_all(envs: Sequence[Any], seconds: float | None = None) -> int:
    """Close envs, each within so many seconds if given; returns how many threads are left behind in one."""
    if seconds is None:
        for env in envs:
            _close(env, [])
        return 0
    failed: list[Any] = []
    threads = [threading.Thread(target=_close, args=(env, failed), daemon=True) for env in envs]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    close_all(list(failed))  # those that refuse another thread than that which made them
    return sum(thread.is_alive() for thread in threads)


def _close(env: Any, failed: list[Any]) -> None:
    try:
        Player().in_env("close", env.close)
    except EnvFailedError:
        failed.append(env)


# --- the episodes
@dataclass(frozen=True, slots=True)
class InCaller:
    """What shares that are played in the caller's own process have in common."""

    kept: EnvShelf = field(default_factory=EnvShelf)
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the episodes are to end at their next turn."""
    passing: bool = False
    """Each is played in a thread that ends with it, in which no env can be kept."""


def play_share(share: Share, connect: Connect, here: InCaller | None = None) -> Played:
    """Play all episodes of a share; each is reported through the link as soon as it is over."""
    link = connect.connect(share.number)
    try:
        return _Worker(share, link, here).run()
    finally:
        close = getattr(link, "close", None)
        if close is not None and id(link) != id(connect):
            close()


class _Worker:
    """One share being played."""

    def __init__(self, share: Share, link: Link, here: InCaller | None) -> None:
        self.in_caller, here = here is not None, here or InCaller(KEPT)
        self.share, self.link, self.stop = share, link, here.stop
        self.passing = here.passing and share.kinds is not None
        self.prompter = Prompter(share.prompt, share.tokenizer)
        self.kinds: Mapping[str, Hashable] = share.kinds or {tag: tag for tag in share.env_fns}
        self.shelf = EnvShelf() if share.kinds is None else here.kept
        self.todo = deque[Assignment]()
        self.open = len(share.assignments)
        self.players: list[Player] = []
        self.first: tuple[Assignment, ...] = ()  # those that begin together
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.hung = 0

    def run(self) -> Played:
        cpu = time.process_time()
        n_threads = min(self.share.threads or self.open, self.open)
        settings = self.share.settings
        self.first = self.share.assignments[:n_threads]
        self.todo.extend(self.share.assignments[n_threads:])
        if self.share.lockstep:
            self.link.entered([assignment.place.key() for assignment in self.first])
        try:
            if n_threads == 1 and not (settings.deadlines or self.passing):
                self._start(Player(self.first[0]), own=False)
            else:
                for place, assignment in enumerate(self.first):
                    if not self._start(Player(assignment)):
                        self._play_fewer(place)
                        break
                self._supervise()
        finally:
            with self.changed:
                self.todo.clear()
            if self.share.kinds is None:
                self.hung += self.shelf.close(settings.step_timeout)
        if self.error is not None:
            raise self.error
        return Played(time.process_time() - cpu, self.hung)

    def _start(self, player: Player, *, own: bool = True, spared: bool = False) -> bool:
        """Let it play, in a thread of its own if the system allows one more, as it must where nobody plays yet.

        Raises:
            RuntimeError: there is no thread at all, and this one cannot be spared.
        """
        kind = None if player.assignment is None else self.kinds[player.assignment.tag]
        try:
            player.seat = self.shelf.take(kind, own=own)
        except RuntimeError as error:
            if not self.players and not spared:
                raise
            logger.warning("%d episodes are played at once, and not one more: %s", len(self.players), error)
            return False
        self.players.append(player)
        player.seat.run(partial(self._play_all, player))
        return True

    def _play_fewer(self, place: int) -> None:
        """Those of the announced episodes that have to wait for a thread are not waited for."""
        late, self.first = self.first[place:], self.first[:place]
        with self.changed:
            self.todo.extendleft(reversed(late))
        for assignment in late if self.share.lockstep else ():
            self.link.left(assignment.place.key())

    def _supervise(self) -> None:
        """Wait for the end, and give up on envs that do not answer."""
        settings = self.share.settings
        look = min(settings.deadlines) / 4 if settings.deadlines else None
        with self.changed:
            while self.open and self.error is None:
                before = time.monotonic()
                self.changed.wait(look)
                if look is None:
                    continue
                now = time.monotonic()
                for player in list(self.players):
                    if now - before >= look + STANDSTILL:
                        player.spare(now - before - look)
                    why = player.overdue(now, settings)
                    if why is not None:
                        self._abandon(player, why)

    def _abandon(self, player: Player, why: str) -> None:
        """The env does not come back: leave its thread behind, and go on with another.

        The episode is over, unless its env had failed before and only its `close` hangs: then it is tried again as if
        that had come back.
        """
        player.abandoned = True
        player.seat.close()
        self.players.remove(player)
        self.hung += 1
        assert player.episode is not None
        assert player.assignment is not None
        status: Status = "timeout"
        if player.failure is not None:
            status, why = "env_error", f"{player.failure}, and {why}"
            again = Player(player.assignment, failed=[*player.failed, why])
            if len(again.failed) <= self.share.settings.env_retries and self._start(again, spared=True):
                return
        self._report(player.assignment, player.episode.trajectory(status, why), player.failed)
        if self.todo:
            self._start(Player())

    def _play_all(self, player: Player) -> None:
        player.in_caller, player.thread, seated = self.in_caller, threading.get_ident(), True
        try:
            assignment = player.assignment or self._next(player.seat)
            while assignment is not None:
                player.assignment = assignment
                trajectory = self._play(assignment, player)
                with self.changed:
                    if player.abandoned:
                        return
                    player.episode = player.failure = None
                    retries = self.share.settings.env_retries
                    if trajectory.status == "env_error" and len(player.failed) < retries:
                        player.failed.append(str(trajectory.error))
                        continue
                    failed, player.failed = player.failed, []
                    # before the last one leaves: lockstep is to wait for it
                    following = self._next(player.seat)
                    if following is None:  # before the report: who waits for that may close what is free
                        self.shelf.put(player.seat)
                        seated = False
                    self._report(assignment, trajectory, failed)
                assignment = following
        except BaseException as error:
            with self.changed:
                if not player.abandoned:
                    self.error = error
                self.changed.notify_all()
        finally:
            if seated and not player.abandoned:
                self.shelf.put(player.seat)

    def _next(self, seat: Seat) -> Assignment | None:
        """The next episode to play, rather one whose env is in the seat."""
        with self.changed:
            if not self.todo:
                return None
            place = 0
            if len(self.kinds) > 1:
                fits = (place for place, item in enumerate(self.todo) if self.kinds[item.tag] in seat.envs)
                place = next(fits, 0)
            assignment = self.todo[place]
            del self.todo[place]
        if self.share.lockstep and assignment not in self.first:
            self.link.entered([assignment.place.key()])
        return assignment

    def _report(self, assignment: Assignment, trajectory: Trajectory, failed: Sequence[str]) -> None:
        self.open -= 1
        report = encode_report(self.share.rollout, assignment.index, trajectory, failed)
        self.link.left(assignment.place.key(), report)
        self.changed.notify_all()

    def _play(self, assignment: Assignment, player: Player) -> Trajectory:
        """One episode in one env; whatever goes wrong is in the record."""
        share, tag, seat = self.share, assignment.tag, player.seat
        kind = self.kinds[tag]
        episode = Episode(assignment.place, share.roles[tag], self.prompter, share.sampling)
        player.began = time.monotonic()  # before the episode: the supervisor looks at any time
        player.episode = episode
        status: Status = "env_error"
        why: str | None = None
        env: Any = None
        try:
            env = seat.envs.pop(kind, None)
            if env is None:
                env = player.in_env(MAKE, share.env_fns[tag])
            player.in_env("reset", partial(reset_env, episode, env))
            self._act(episode, env, player)
            status = "ok"
        except EnvFailedError as error:
            why = str(error)
        except TimeoutError as error:
            status, why = "timeout", str(error)
        except WorkerError:  # the way to the engine is lost, or nobody wants the episode any more
            raise
        except EngineError as error:
            status, why = "engine_error", str(error)
        except Exception as error:  # of the tokenizer or a template, say: the env has no part in it
            status, why = "engine_error", format_error(error)
            logger.warning("episode %d ends: %s", assignment.index, why, exc_info=True)
        finally:
            if env is not None and status != "env_error" and not player.abandoned:
                seat.envs[kind] = env
            elif env is not None:
                player.failure = why
                with contextlib.suppress(EnvFailedError):
                    player.in_env("close", env.close)
        return episode.trajectory(status, why)

    def _act(self, episode: Episode, env: Any, player: Player) -> None:
        """The straight story of an episode after its reset."""
        while not episode.over:
            for action in episode.respond(self._ask(episode.request())):
                step = partial(step_env, player, episode, env, action)
                if player.abandoned or player.in_env(f"step({action!r})", step):
                    break
            if player.abandoned:
                return
            episode.end_turn()

    def _ask(self, request: Request) -> Completion:
        if self.stop.is_set():
            raise WorkerError("the rollout was ended before this episode")
        return self.link.generate([request], self.share.settings.request_timeout)[0]


@dataclass
class LocalLink:
    """The link of episodes that are played in the caller, one after another: it calls the engine itself.

    An episode that is given up may still be at the engine: `turn` lets the next one wait for it.
    """

    engine: Engine
    on_report: Callable[[Any, bytes], None]
    retries: int = 1
    turn: threading.Lock = field(default_factory=threading.Lock)
    engine_seconds: float = 0.0
    batches: int = 0

    def connect(self, asker: int) -> LocalLink:
        """This object."""
        return self

    def generate(self, requests: Sequence[Request], timeout: float | None = None) -> list[Completion]:
        """Ask the engine, again if it fails."""
        with self.turn:
            began = time.perf_counter()
            answers = generate_each(self.engine, requests, retries=self.retries)
            self.engine_seconds += time.perf_counter() - began
            self.batches += 1
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers  # type: ignore[return-value]

    def entered(self, keys: Sequence[Key]) -> None:
        """Nobody waits for others here."""

    def left(self, key: Key, report: bytes = b"") -> None:
        """An episode is over."""
        self.on_report(0, report)
