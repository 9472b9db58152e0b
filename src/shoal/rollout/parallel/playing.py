"""What a rollout worker does: play its share of the episodes, each env at its own pace, and report every one.

The same code runs in the caller, in threads, in processes and on a cluster; only the link to the engine
differs. A failure ends one episode and is recorded with its cause; the others go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.core.data import Status, Trajectory
from shoal.core.errors import EngineError, WorkerDiedError, WorkerError
from shoal.rollout.episode import Episode
from shoal.rollout.parallel.env_calls import EnvFailedError, Seat, begin, close_all, step
from shoal.rollout.parallel.env_shelf import KEPT, EnvShelf, kind_of
from shoal.rollout.parallel.shares import Assignment, Connect, Played, Share, encode_report
from shoal.rollout.parallel.wire import Link
from shoal.rollout.prompts import Prompter
from shoal.rollout.samplers.sampler import Completion, Request

logger = logging.getLogger(__name__)


class StoppedError(WorkerError):
    """Nobody wants these episodes any more."""


@dataclass(frozen=True, slots=True)
class Here:
    """What shares that are played in the caller's own process have in common."""

    kept: EnvShelf = field(default_factory=EnvShelf)
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the episodes are to end at their next turn."""


def play_share(share: Share, connect: Connect, here: Here | None = None) -> Played:
    """Play all episodes of a share; each is reported through the link as soon as it is over."""
    link = connect.connect(share.number)
    try:
        return _Stage(share, link, here or Here(KEPT)).run()
    finally:
        close = getattr(link, "close", None)
        if close is not None and id(link) != id(connect):
            close()


class _Stage:
    """One share being played."""

    def __init__(self, share: Share, link: Link, here: Here) -> None:
        self.share, self.link, self.stop = share, link, here.stop
        self.prompter = Prompter(share.prompt, share.tokenizer)
        self.shelf = here.kept if share.keep_envs else EnvShelf()
        self.todo = deque(share.assignments)
        self.open = len(self.todo)
        self.done: list[int] = []
        self.seats: list[Seat] = []
        self.first: tuple[Assignment, ...] = ()  # those that begin together
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.hung = 0

    def run(self) -> Played:
        cpu = time.process_time()
        n_threads = min(self.share.threads or len(self.todo), len(self.todo))
        limits = self.share.limits
        self.first = self.share.assignments[:n_threads]
        if self.share.lockstep:
            self.link.entered([assignment.place.key() for assignment in self.first])
        try:
            if n_threads == 1 and limits.step_seconds is None and limits.episode_seconds is None:
                self._sit(Seat())
            else:
                self._start_threads(n_threads)
                self._supervise()
        finally:
            self.todo.clear()
            if not self.share.keep_envs:
                self.hung += close_all(self.shelf.clear(), limits.step_seconds)
        if self.error is not None:
            raise self.error
        return Played(tuple(self.done), time.process_time() - cpu, self.hung)

    def _start_threads(self, n: int) -> None:
        """Start so many threads, or as many as the system allows."""
        for _ in range(n):
            seat = Seat()
            thread = threading.Thread(target=self._sit, args=(seat,), daemon=True, name="shoal-episode")
            try:
                thread.start()
            except RuntimeError as error:
                if not self.seats:
                    raise
                logger.warning("%d instead of %d episodes are played at once: %s", len(self.seats), n, error)
                waiting = set(self.todo)  # of the announced ones, those that have to wait for a thread
                late = [assignment for assignment in self.first if assignment in waiting]
                self.first = tuple(assignment for assignment in self.first if assignment not in waiting)
                for assignment in late if self.share.lockstep else ():
                    self.link.left(assignment.place.key())
                return
            self.seats.append(seat)

    def _supervise(self) -> None:
        """Wait for the end, and give up on envs that do not answer."""
        limits = self.share.limits
        deadlines = [s for s in (limits.step_seconds, limits.episode_seconds) if s is not None]
        look = min(deadlines) / 4 if deadlines else None
        with self.changed:
            while self.open and self.error is None:
                self.changed.wait(look)
                now = time.monotonic()
                for seat in list(self.seats) if look is not None else ():
                    why = seat.overdue(now, limits)
                    if why is not None:
                        self._abandon(seat, why)

    def _abandon(self, seat: Seat, why: str) -> None:
        """The env does not come back: record the episode, leave its thread behind, and go on with another."""
        seat.abandoned = True
        self.seats.remove(seat)
        self.hung += 1
        assert seat.episode is not None
        assert seat.assignment is not None
        logger.warning("episode %d is given up: %s", seat.assignment.index, why)
        self._report(seat.assignment, seat.episode.trajectory("timeout", why))
        if self.todo:
            self._start_threads(1)

    def _sit(self, seat: Seat) -> None:
        """Play episodes until none is left."""
        try:
            assignment = self._next()
            while assignment is not None:
                trajectory = self._play_with_retries(assignment, seat)
                with self.changed:
                    if seat.abandoned:
                        return
                    seat.episode = None
                    following = self._next()  # before the last one leaves: lockstep is to wait for it
                    self._report(assignment, trajectory)
                assignment = following
        except BaseException as error:
            with self.changed:
                if not seat.abandoned:
                    self.error = error
                self.changed.notify_all()

    def _next(self) -> Assignment | None:
        """The next episode to play."""
        try:
            assignment = self.todo.popleft()
        except IndexError:
            return None
        if self.share.lockstep and assignment not in self.first:
            self.link.entered([assignment.place.key()])
        return assignment

    def _report(self, assignment: Assignment, trajectory: Trajectory) -> None:
        self.done.append(assignment.index)
        self.open -= 1
        report = encode_report(self.share.rollout, assignment.index, trajectory)
        self.link.left(assignment.place.key(), report)
        self.changed.notify_all()

    def _play_with_retries(self, assignment: Assignment, seat: Seat) -> Trajectory:
        seat.assignment = assignment
        for attempt in range(self.share.limits.env_retries + 1):
            trajectory = self._play(assignment, seat)
            if trajectory.status != "env_error" or seat.abandoned:
                break
            logger.warning("episode %d, attempt %d: %s", assignment.index, attempt + 1, trajectory.error)
        return trajectory

    def _play(self, assignment: Assignment, seat: Seat) -> Trajectory:
        """One episode in one env; whatever goes wrong is in the record."""
        share, tag = self.share, assignment.tag
        episode = Episode(assignment.place, share.roles[tag], self.prompter, share.sampling)
        seat.began = time.monotonic()  # before the episode: the supervisor looks at any time
        seat.episode = episode
        status: Status = "env_error"
        why: str | None = None
        kind = kind_of(share.env_fns[tag])
        env: Any = None
        try:
            env = seat.in_env("make", lambda: self.shelf.take(kind, share.env_fns[tag]))
            self._act(episode, env, seat)
            status = "ok"
        except EnvFailedError as error:
            why = str(error)
        except TimeoutError as error:
            status, why = "timeout", str(error)
        except EngineError as error:
            if isinstance(error, WorkerDiedError):  # the way to it is lost
                raise
            status, why = "engine_error", str(error)
        finally:
            if env is not None and status != "env_error" and not seat.abandoned:
                self.shelf.put(kind, env)
            elif env is not None:
                with contextlib.suppress(EnvFailedError):
                    seat.in_env("close", env.close)
        return episode.trajectory(status, why)

    def _act(self, episode: Episode, env: Any, seat: Seat) -> None:
        """The straight story of an episode."""
        seat.in_env("reset", partial(begin, episode, env))
        while not episode.over:
            completion = self._ask(episode.request())
            for action in episode.respond(completion):
                if seat.abandoned or seat.in_env(
                    f"step({action!r})", partial(_step, seat, episode, env, action)
                ):
                    break
            if seat.abandoned:
                return
            episode.end_turn()

    def _ask(self, request: Request) -> Completion:
        if self.stop.is_set():
            raise StoppedError("the rollout was ended before this episode")
        return self.link.generate([request], self.share.limits.request_seconds)[0]


def _step(seat: Seat, episode: Episode, env: Any, action: int | str) -> bool:
    """Step the env and tell the episode; whether that was the end of it."""
    result = step(env, action)
    if not seat.abandoned:
        episode.observe(*result)
    return result[2] or result[3]
