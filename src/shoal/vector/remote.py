"""Lanes on a Ray cluster: the same shares, on other machines, with the same results. Needs `[parallel]`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from gymnasium.vector import AutoresetMode

from shoal.core.errors import WorkerDiedError, missing_extra
from shoal.vector.actions import Loose, read
from shoal.vector.failures import Failure, died, error_of, from_exception, portable, timed_out
from shoal.vector.opening import Parts, Rules, description_of, parts_of, private_slots
from shoal.vector.plan import even_cuts
from shoal.vector.sending import pickled
from shoal.vector.share import CATCH, EnvFn, Extras, Share
from shoal.vector.slots import Slots
from shoal.vector.spaces import Layout
from shoal.vector.waiting import SLICE
from shoal.vector.worker import About

logger = logging.getLogger(__name__)
START_SECONDS = 120.0


class Host:
    """What runs in a Ray actor: one share with slots of its own; rows travel as arrays."""

    def __init__(self, first: int, env_fns: bytes) -> None:
        import pickle

        self.first = first
        self.env_fns: list[EnvFn] = pickle.loads(env_fns)

    def make(self) -> Any:
        """Make the environments; what they are, or the failure."""
        self.envs: list[Any] = []
        try:
            for fn in self.env_fns:
                self.envs.append(fn())
        except CATCH as error:
            return portable(from_exception(self.first + len(self.envs), "make", error))
        return [
            About(env.observation_space, env.action_space, dict(env.metadata), env.render_mode, env.spec)
            for env in self.envs
        ]

    def attach(
        self, observations: Layout, actions: Layout, autoreset: AutoresetMode, check_nan: bool
    ) -> None:
        """Lay out the share's own slots; env j of the share is env j there."""
        self.slots = Slots(len(self.envs), observations, actions)
        self.share = Share(self.env_fns, 0, self.slots, autoreset, check_nan=check_nan, envs=self.envs)

    def run(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        """One operation; the reply and the rows it wrote."""
        extras: Extras | None = getattr(self.share, operation)(*arguments)
        if extras is not None:
            for failure in extras.failures:
                failure.env += self.first
                portable(failure)
            extras.infos = [(env + self.first, *rest) for env, *rest in extras.infos]  # type: ignore[misc]
        slots = self.slots
        rows = [None if array is None else array[0] for array in slots.obs]
        return extras, rows, slots.final, slots.rewards, slots.terminated, slots.truncated


class RayLane:
    """A share in a Ray actor."""

    inline = False

    def __init__(self, backend: RayBackend, first: int, count: int, slots: Slots) -> None:
        self.backend, self.first, self.count, self.slots = backend, first, count, slots
        self.ring = 0
        self.rings_bell = False
        self.lost: Failure | None = None
        self.home: Any = None
        self._all = range(count)
        self.reply: Any = None
        self._job: tuple[Any, ...] = ()
        self._begun = 0.0

    def start_step(self, members: Sequence[int] | None, loose: Loose, ring: int) -> None:
        """Begin to step all envs of the share, or only `members`."""
        chosen = self._all if members is None else members
        self._begin("step", (read(self.slots, self.first, chosen, loose), list(chosen), 0), ring)

    def start(self, operation: str, *args: Any) -> None:
        """Begin another operation of `Share`, by name."""
        if operation == "reset":
            self._begin(operation, (*args[:-1], 0), args[-1])
        else:
            self._begin(operation, args, self.ring)

    def _begin(self, operation: str, arguments: tuple[Any, ...], ring: int) -> None:
        # An actor answers in order, so a late reply can only be in front of this one, never instead of it.
        self._job = (operation, arguments, ring)
        self.reply = self.backend.actors[self.first].run.remote(operation, arguments)
        self._begun = time.monotonic()

    def finished(self) -> bool:
        """The reply is there, or never will be."""
        return self.lost is not None or bool(self.backend.ray.wait([self.reply], timeout=0)[0])

    def check(self) -> None:
        """Notice an actor that is overdue."""
        limit = self.backend.step_timeout
        if self.lost is not None or limit is None or self.finished():
            return
        # one share is stepped in a row, so it may take as long as all of its envs together
        if time.monotonic() - self._begun > limit * self.count:
            self.lost = timed_out(self.first, self._job[0], None, None, limit * self.count)
            self.backend.kill(self.first)

    def finish(self, timeout: float | None = None) -> Extras | None:
        """The reply; a dead actor gives the failure of its first env."""
        ray = self.backend.ray
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.lost is None:
            left = SLICE if deadline is None else max(0.0, min(SLICE, deadline - time.monotonic()))
            try:
                answer = ray.get(self.reply, timeout=left)
            except ray.exceptions.GetTimeoutError:
                self.check()
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError from None
            except ray.exceptions.RayActorError as error:
                self.lost = died(self.first, self._job[0], None, -1, None, str(error))
                self.lost.pid = None
            else:
                return self._land(*answer)
        return Extras(failures=[self.lost])

    def _land(
        self, extras: Extras | None, rows: Any, final: Any, rewards: Any, terminated: Any, truncated: Any
    ) -> Extras | None:
        slots, part = self.slots, slice(self.first, self.first + self.count)
        operation, arguments, ring = self._job
        if operation in ("step", "reset"):
            members = list(arguments[1] if operation == "step" else arguments[0])
            ids = [self.first + j for j in members]
            for target, row in zip(slots.obs, rows, strict=True):
                if row is not None:
                    target[ring, ids] = row[members]
            slots.rewards[part], slots.terminated[part], slots.truncated[part] = (
                rewards,
                terminated,
                truncated,
            )
            if final[0] is not None:
                slots.final[0][part] = final[0]
        return extras

    def close(self, timeout: float) -> None:
        """Close the envs."""
        if self.lost is None:
            with contextlib.suppress(Exception):
                actor = self.backend.actors[self.first]
                self.backend.ray.get(actor.run.remote("close", ()), timeout=max(timeout, 0.01))


class RayBackend:
    """The actors of a pool. Ray is started here when it is not running: locally, without its dashboard."""

    def __init__(self, step_timeout: float | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise missing_extra("the Ray backend", "parallel") from error
        if not ray.is_initialized():
            logger.info("starting a local Ray; call ray.init() first to use a cluster")
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        self.ray, self.step_timeout = ray, step_timeout
        self.actors: dict[int, Any] = {}
        self.env_fns: dict[int, Sequence[EnvFn]] = {}
        self.attachment: tuple[Any, ...] = ()
        self.lanes: list[RayLane] = []

    def start(self, first: int, env_fns: Sequence[EnvFn]) -> Any:
        """Begin an actor; returns the reference of what it says of its environments."""
        # Ray's own restarts would hide that an episode was cut, so they are off.
        host = self.ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(Host)
        self.env_fns[first] = env_fns
        self.actors[first] = host.remote(first, pickled(env_fns))
        return self.actors[first].make.remote()

    def describe(self, reply: Any) -> list[About]:
        """Wait for what an actor says."""
        try:
            answer = self.ray.get(reply, timeout=START_SECONDS)
        except self.ray.exceptions.RayActorError as error:
            raise WorkerDiedError(f"a Ray actor died while it made its environments: {error}") from error
        if isinstance(answer, Failure):
            raise error_of(answer)
        abouts: list[About] = answer
        return abouts

    def kill(self, first: int) -> None:
        """End an actor at once."""
        with contextlib.suppress(Exception):
            self.ray.kill(self.actors[first])

    def revive(self, lane: RayLane) -> Sequence[RayLane]:
        """A fresh actor for a lost lane."""
        self.kill(lane.first)
        self.describe(self.start(lane.first, self.env_fns[lane.first]))
        self.ray.get(self.actors[lane.first].attach.remote(*self.attachment))
        lane.lost = None
        return [lane]

    def wait_bell(self, seconds: float) -> None:
        """Sleep until an actor that is at work has an answer."""
        replies = [lane.reply for lane in self.lanes if lane.reply is not None and lane.lost is None]
        if replies:
            self.ray.wait(replies, timeout=min(max(seconds, 0.001), 0.02))

    def stats(self) -> list[dict[str, Any]]:
        """Ray's own tools tell about actors."""
        return []

    def close(self, seconds: float) -> None:
        """End all actors."""
        del seconds
        for first in self.actors:
            self.kill(first)


def open_ray(
    env_fns: Sequence[EnvFn], rules: Rules, *, num_workers: int | None, step_timeout: float | None
) -> Parts:
    """Ray actors with a share each, as the arguments of a `VectorPool`."""
    backend = RayBackend(step_timeout)
    n_envs = len(env_fns)
    n_workers = num_workers or max(1, int(backend.ray.cluster_resources().get("CPU", 1)))
    cuts = even_cuts(n_envs, min(n_workers, n_envs))
    try:
        replies = [backend.start(lo, env_fns[lo:hi]) for lo, hi in cuts]
        description = description_of([about for reply in replies for about in backend.describe(reply)])
        slots = private_slots(description, rules.places)
        observations = Layout.shared(description.observation_spaces)
        actions = Layout.shared(description.action_spaces)
        backend.attachment = (observations, actions, rules.autoreset, rules.check_nan)
        backend.ray.get([actor.attach.remote(*backend.attachment) for actor in backend.actors.values()])
        backend.lanes = [RayLane(backend, lo, hi - lo, slots) for lo, hi in cuts]
    except BaseException:
        backend.close(0.0)
        raise
    return parts_of(backend.lanes, slots, description, rules, backend)
