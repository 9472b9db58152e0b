"""Replicas of any engine as Ray actors: requests are spread over them, weights are put once and taken by all."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import EngineError, needs_extra
from shoal.rollout.samplers.batching import as_sampler
from shoal.rollout.samplers.sampler import (
    Capabilities,
    ChatTokenizer,
    Completion,
    Engine,
    Level,
    Request,
    capabilities_of,
    vocabulary_of,
)

with needs_extra("engines as Ray actors", "parallel"):
    import ray
    from ray.exceptions import (
        GetTimeoutError,
        ObjectLostError,
        OutOfMemoryError,
        RayActorError,
        RayError,
        RayTaskError,
    )

logger = logging.getLogger(__name__)
LOST = (RayActorError, OutOfMemoryError, GetTimeoutError, ObjectLostError)
"""What is raised of a replica that is gone, or does not answer."""
START_SECONDS = 30.0
"""After which a replica that has not started is spoken of."""


class _Facts(NamedTuple):
    """What is the same of every replica."""

    tokenizer: ChatTokenizer
    level: Level
    capabilities: Capabilities
    context: int | None
    vocabulary: int | None


class _Replica:
    """One engine in an actor of its own; made anew it has the last weights, or it is not made."""

    def __init__(self, make: Callable[[], Engine], *told: Any) -> None:
        self.engine: Any = make()
        self._sampler = as_sampler(self.engine)
        for place in range(0, len(told), 3):
            self.call(*told[place : place + 3])

    def facts(self) -> _Facts:
        engine = self.engine
        context = getattr(engine, "context", None)
        return _Facts(engine.tokenizer, engine.level, capabilities_of(engine), context, vocabulary_of(engine))

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.engine, method)(*arguments)

    async def sample(self, request: Request) -> Completion:
        return await self._sampler.sample(request)


class RayEngine:
    """Completes prompts on replicas of an engine; Ray must be running (`ray.init`).

    A replica that dies is made anew with the last weights, and its requests are asked again.

    Args:
        make: makes one replica's engine, there; it must be picklable (a function of a module, or a partial).
        replicas: how many.
        resources: of one replica, for Ray (`{"num_gpus": 1}`); one core by default.
        timeout: seconds after which a batch counts as failed.
        retries: times that a failed batch is asked again.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        replicas: int = 1,
        *,
        resources: dict[str, Any] | None = None,
        timeout: float | None = None,
        retries: int = 2,
    ) -> None:
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {replicas}")
        if not ray.is_initialized():
            raise EngineError("Ray is not running: call ray.init() first, with the address of your cluster")
        self._actor = ray.remote(**(resources or {"num_cpus": 1}))(_Replica)
        self._make, self.timeout, self.retries = make, timeout, retries
        self._last: tuple[Any, ...] = ()  # what replicas made anew are told: weights, and the adapter on them
        self._lock = threading.Lock()  # an engine that hangs is restarted by another thread
        self._restarts = 0
        self.weights_version = 0
        self._actors = [self._actor.remote(make) for _ in range(replicas)]
        self._starting = set(range(replicas))  # those that have not answered yet
        facts = self._first_facts()
        self.tokenizer, self.level, self.capabilities, self.context, self.vocabulary = facts

    def _first_facts(self) -> _Facts:
        """What the first replica says once all have started."""
        told = [actor.facts.remote() for actor in self._actors]
        try:
            facts: list[_Facts] = [self._answer(home, answer) for home, answer in enumerate(told)]
        except GetTimeoutError as error:
            late = len(self._starting)
            raise EngineError(
                f"{late} of {len(told)} replicas have not started within {self.timeout} s: {_room()}"
            ) from error
        except LOST as error:
            raise EngineError(f"a replica could not start: {str(error).strip().splitlines()[-1]}") from error
        return facts[0]

    def _answer(self, home: int, answer: Any) -> Any:
        """What a replica answers; while there is no room for one to start, that is said."""
        try:
            while (
                self.timeout is None
                and home in self._starting
                and not ray.wait([answer], timeout=START_SECONDS)[0]
            ):
                self._open()
                logger.warning("still waiting for replica %d to start: %s", home, _room())
            found = ray.get(answer, timeout=self.timeout)
        except SystemExit:  # so Ray ends who waits when it is shut down
            self._open()
            raise
        self._starting.discard(home)
        return found

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order; an episode stays with its replica, whose prefixes it can use."""
        n, shares = len(self._open()), dict[int, list[int]]()
        for index, request in enumerate(requests):
            shares.setdefault(_home(request, n), []).append(index)
        done: dict[int, Completion] = {}
        restarts = self._restarts
        for attempt in range(self.retries + 1):
            actors = list(self._open())
            asked = {
                home: actors[home].call.remote("generate", tuple(requests[i] for i in share))
                for home, share in shares.items()
            }
            for home, answer in asked.items():
                try:
                    completions = self._answer(home, answer)
                except LOST as error:
                    if restarts != self._restarts:  # it hung, and nobody waits for it any more
                        raise EngineError("the replicas were made anew before the answer came") from error
                    self._renew(home, actors[home], error)  # also after the last attempt: for the next batch
                    if attempt == self.retries:
                        raise EngineError(
                            f"replica {home} failed {attempt + 1} times; the last: {type(error).__name__}: {error}"
                        ) from error
                except RayTaskError as error:
                    cause = error.cause if isinstance(error.cause, EngineError) else error
                    raise EngineError(f"replica {home}: {cause}") from error
                except RayError as error:
                    raise EngineError(
                        f"replica {home}: its answer cannot be read: {_first(error)}"
                    ) from error
                else:
                    done.update(zip(shares.pop(home), completions, strict=True))
            if not shares:
                break
        return [done[index] for index in range(len(requests))]

    async def sample(self, request: Request) -> Completion:
        """The completion of a request from the replica of its episode, which batches what waits there.

        Raises:
            EngineError: the replica could not answer, or was lost too often.
        """
        for attempt in range(self.retries + 1):
            actors = self._open()
            home = _home(request, len(actors))
            actor = actors[home]
            try:
                async with asyncio.timeout(self.timeout):
                    return await actor.sample.remote(request)  # type: ignore[no-any-return]
            except (TimeoutError, *LOST) as error:
                self._renew(home, actor, error)
                if attempt == self.retries:
                    told = f"{type(error).__name__}: {error}"
                    raise EngineError(
                        f"replica {home} failed {attempt + 1} times; the last: {told}"
                    ) from error
            except RayTaskError as error:
                cause = error.cause if isinstance(error.cause, EngineError) else error
                raise EngineError(f"replica {home}: {cause}") from error
            except RayError as error:
                raise EngineError(f"replica {home}: its answer cannot be read: {_first(error)}") from error
        raise AssertionError

    def load_weights(self, weights: Any, version: int) -> None:
        """Weights by name, put into Ray's store once for all replicas."""
        self._tell("load_weights", ray.put(weights), version)

    def load_adapter(self, folder: Path, version: int) -> None:
        """A LoRA folder that every replica can read."""
        self._tell("load_adapter", Path(folder), version)

    def restart(self) -> None:
        """Make all replicas anew, with the last weights."""
        self._restarts += 1
        for home, actor in enumerate(list(self._actors)):
            self._renew(home, actor)

    def close(self) -> None:
        """End the replicas."""
        actors, self._actors = self._actors, []  # first, so that none is made anew meanwhile
        for actor in actors if ray.is_initialized() else ():
            ray.kill(actor)

    def _open(self) -> list[Any]:
        if not (actors := self._actors):
            raise EngineError("the replicas have ended: this engine was closed")
        if not ray.is_initialized():
            raise EngineError("the replicas have ended: their session of Ray was shut down")
        return actors

    def _tell(self, method: str, what: Any, version: int) -> None:
        """Tell all replicas; where one does not take it, or the wait is cut short, all are made anew as they were."""
        actors, before = list(self._open()), self._last
        under = before[:3] if method == "load_adapter" and "load_weights" in before else ()
        self._last = (*under, method, what, version)  # first: one that is made anew meanwhile has it too
        try:
            told = [actor.call.remote(method, what, version) for actor in actors]
            for home, answer in enumerate(told):
                try:
                    self._answer(home, answer)
                except LOST as error:
                    self._renew(home, actors[home], error)
                except RayTaskError as error:
                    raise EngineError(f"replica {home} does not take the weights: {error.cause}") from error
        except BaseException:  # some have it and others do not
            self._last = before
            self.restart()
            raise
        self.weights_version = version

    def _renew(self, home: int, failed: Any, why: Exception | None = None) -> None:
        """Make a replica anew in the place of `failed`, if nobody else has."""
        with self._lock:
            actors = self._open()
            if actors[home] is not failed:
                return
            if why is not None:
                logger.warning("replica %d failed (%s); it is made anew", home, type(why).__name__)
            ray.kill(failed)
            actors[home] = self._actor.remote(self._make, *self._last)
            self._starting.add(home)


def _first(error: RayError) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _room() -> str:
    return f"the cluster has {ray.cluster_resources()}, of which {ray.available_resources()} are free"


def _home(request: Request, n: int) -> int:
    """Which replica an episode belongs to: its members and groups dealt out in turn."""
    return sum(request.key.path[1:-1]) % n
