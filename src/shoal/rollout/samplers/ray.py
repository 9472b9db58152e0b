"""Replicas of any engine as Ray actors: requests are spread over them, weights are put once and taken by all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import EngineError, missing_extra
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

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
except ImportError as error:
    raise missing_extra("engines as Ray actors", "parallel") from error

logger = logging.getLogger(__name__)


class _Facts(NamedTuple):
    """What is the same of every replica."""

    tokenizer: ChatTokenizer
    level: Level
    capabilities: Capabilities
    context: int | None
    vocabulary: int | None


class _Replica:
    """One engine in an actor of its own."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self.engine: Any = make()

    def facts(self) -> _Facts:
        engine = self.engine
        context = getattr(engine, "context", None)
        return _Facts(engine.tokenizer, engine.level, capabilities_of(engine), context, vocabulary_of(engine))

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.engine, method)(*arguments)


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
        self._last: tuple[str, Any, int] | None = None  # what replicas made anew must be told
        self.weights_version = 0
        self._actors = [self._actor.remote(make) for _ in range(replicas)]
        facts = self._first_facts()
        self.tokenizer, self.level, self.capabilities, self.context, self.vocabulary = facts

    def _first_facts(self) -> _Facts:
        """What the first replica says once it has started; while there is no room for it, that is said."""
        facts = self._actors[0].facts.remote()
        try:
            while not ray.wait([facts], timeout=self.timeout or 30.0)[0]:
                if self.timeout is not None:
                    raise EngineError(f"no replica has started within {self.timeout} s: {_room()}")
                logger.warning("still waiting for a first replica to start: %s", _room())
            found: _Facts = ray.get(facts)
        except RayActorError as error:
            raise EngineError(f"a replica could not start: {str(error).strip().splitlines()[-1]}") from error
        return found

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order; an episode stays with its replica, whose prefixes it can use."""
        n, shares = len(self._open()), dict[int, list[int]]()
        for index, request in enumerate(requests):
            shares.setdefault(_home(request, n), []).append(index)
        done: dict[int, Completion] = {}
        for attempt in range(self.retries + 1):
            actors = self._open()
            asked = {
                home: actors[home].call.remote("generate", [requests[i] for i in share])
                for home, share in shares.items()
            }
            for home, answer in asked.items():
                try:
                    completions = ray.get(answer, timeout=self.timeout)
                except (RayActorError, GetTimeoutError) as error:
                    logger.warning("replica %d failed (%s); it is made anew", home, type(error).__name__)
                    self._renew(home)  # also after the last attempt: for the next batch
                    if attempt == self.retries:
                        raise EngineError(
                            f"replica {home} failed {attempt + 1} times; the last: {type(error).__name__}: {error}"
                        ) from error
                except RayTaskError as error:
                    cause = error.cause if isinstance(error.cause, EngineError) else error
                    raise EngineError(f"replica {home}: {cause}") from error
                else:
                    done.update(zip(shares.pop(home), completions, strict=True))
            if not shares:
                break
        return [done[index] for index in range(len(requests))]

    def load_weights(self, weights: Any, version: int) -> None:
        """Weights by name, put into Ray's store once for all replicas."""
        self._tell("load_weights", ray.put(weights), version)

    def load_adapter(self, folder: Path, version: int) -> None:
        """A LoRA folder that every replica can read."""
        self._tell("load_adapter", Path(folder), version)

    def restart(self) -> None:
        """Make all replicas anew, with the last weights."""
        for home in range(len(self._actors)):
            self._renew(home)

    def close(self) -> None:
        """End the replicas."""
        actors, self._actors = self._actors, []  # first, so that none is made anew meanwhile
        for actor in actors:
            ray.kill(actor)

    def _open(self) -> list[Any]:
        if not (actors := self._actors):
            raise EngineError("the replicas have ended: this engine was closed")
        return actors

    def _tell(self, method: str, what: Any, version: int) -> None:
        told = [actor.call.remote(method, what, version) for actor in self._open()]
        for home, answer in enumerate(told):
            try:
                ray.get(answer, timeout=self.timeout)
            except (RayActorError, GetTimeoutError) as error:
                logger.warning("replica %d failed (%s); it is made anew", home, type(error).__name__)
                self._last = (method, what, version)
                self._renew(home)
            except RayTaskError as error:
                raise EngineError(f"replica {home} does not take the weights: {error.cause}") from error
        self._last, self.weights_version = (method, what, version), version

    def _renew(self, home: int) -> None:
        actors = self._open()
        ray.kill(actors[home])
        actors[home] = self._actor.remote(self._make)
        if self._last is not None:
            method, what, version = self._last
            try:
                ray.get(actors[home].call.remote(method, what, version), timeout=self.timeout)
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                raise EngineError(
                    f"replica {home}, made anew, does not take the last weights: {type(error).__name__}: {error}"
                ) from error


def _room() -> str:
    return f"the cluster has {ray.cluster_resources()}, of which {ray.available_resources()} are free"


def _home(request: Request, n: int) -> int:
    """Which replica an episode belongs to: its members and groups dealt out in turn."""
    return (request.key.group + request.key.member) % n
