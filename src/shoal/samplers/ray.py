"""Replicas of a sampler as Ray actors: requests are spread over them, weights are put once and taken by all."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.core.errors import EngineError, needs_extra
from shoal.core.executors import Closing
from shoal.samplers.asking import RejectedError, RetryPolicy, SamplerClient, generate
from shoal.samplers.sampler import Completion, Facts, Request, Sampler, facts_of

with needs_extra("samplers as Ray actors", "parallel"):
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
LOST = (RayActorError, OutOfMemoryError, GetTimeoutError, ObjectLostError, TimeoutError)
"""What is raised of a replica that is gone, or does not answer."""
START_SECONDS = 30.0
"""After which a warning says which replicas have not started."""
PATIENCE = 180.0
"""Seconds in which one must have started in the place of another, without a timeout; Ray is slow to miss a machine."""
PAUSE = 0.5


class _Replica:
    """One sampler in an actor of its own.

    Args:
        make: makes it.
        *loaded: the calls with which the last weights were loaded, of a replica that takes the place of another.
    """

    def __init__(self, make: Callable[[], Sampler], *loaded: tuple[Any, ...]) -> None:
        self.inner: Any = make()
        self._client = SamplerClient(self.inner, retries=0)
        for method, what, version in loaded:
            self.load(method, ray.get(what), version)

    def facts(self) -> Facts:
        return facts_of(self.inner)

    def load(self, method: str, what: Any, version: int) -> None:
        if method == "load_weights":
            self.inner.load_weights(what, version)
            return
        with tempfile.TemporaryDirectory(prefix="shoal-adapter-") as folder:
            for name, data in what.items():
                (Path(folder) / name).write_bytes(data)
            self.inner.load_adapter(Path(folder), version)

    async def sample(self, request: Request) -> Completion:
        return await self._client.sample(request)


class RayEngine(Closing):
    """Completes prompts on replicas of a sampler; Ray must be running (`ray.init`).

    A replica that dies is replaced by one with the last weights, and once that has started, asked again.

    Args:
        make: makes one replica's sampler, there; it must be picklable (a function of a module, or a partial).
        replicas: how many.
        held: versions of the weights that each holds, see `Versions`.
        resources: of one replica, for Ray (`{"num_gpus": 1}`); one core by default.
        timeout: seconds after which a request, or the start of a replica, counts as failed.
        retries: times that a failed request is asked again.
    """

    def __init__(
        self,
        make: Callable[[], Sampler],
        replicas: int = 1,
        *,
        held: int = 1,
        resources: dict[str, Any] | None = None,
        timeout: float | None = None,
        retries: int = 2,
    ) -> None:
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {replicas}")
        if not ray.is_initialized():
            raise EngineError("Ray is not running: call ray.init() first, with the address of your cluster")
        self._actor = ray.remote(**(resources or {"num_cpus": 1}))(_Replica)
        self._make, self._held, self.timeout = make, held, timeout
        self.retry_policy = RetryPolicy(timeout, retries, 0.0, 0.0)
        self._loaded: tuple[tuple[Any, ...], ...] = ()  # weights of each version, and the adapter on them
        self.weights_version = 0
        self._actors = [self._actor.remote(make) for _ in range(replicas)]
        facts = self._first_facts()
        self._started = [True] * replicas
        self.tokenizer, self.level, self.capabilities, self.context, self.vocabulary = facts

    def _first_facts(self) -> Facts:
        """What the first replica says of itself once all have started."""
        facts = [actor.facts.remote() for actor in self._actors]
        waited, starting = 0.0, facts
        while starting:
            seconds = START_SECONDS if self.timeout is None else min(START_SECONDS, self.timeout - waited)
            _, starting = ray.wait(starting, num_returns=len(starting), timeout=seconds)
            waited += seconds
            if not starting:
                break
            late = f"{len(starting)} of {len(facts)} replicas have not started within {waited:g} s: {_room()}"
            if self.timeout is not None and waited >= self.timeout:
                raise EngineError(late)
            logger.warning("%s; still waiting", late)
        try:
            return ray.get(facts)[0]  # type: ignore[no-any-return]
        except LOST as error:
            raise EngineError(f"a replica could not start: {str(error).strip().splitlines()[-1]}") from error

    generate = generate

    async def sample(self, request: Request) -> Completion:
        """The answer of the replica of its chat, which keeps its prefixes; one that is gone is replaced."""
        number = sum(request.chat or request.key.path[:-1]) % len(self._open())
        actor = await self._running(number)
        try:
            async with asyncio.timeout(self.timeout):
                return await actor.sample.remote(request)  # type: ignore[no-any-return]
        except LOST as error:
            self._replace(number, actor, error)
            raise EngineError(f"replica {number} failed: {type(error).__name__}: {error}") from error
        except RayError as error:
            cause = getattr(error, "cause", None)
            said = cause if isinstance(cause, EngineError) else error
            raise EngineError(f"replica {number}: {said}") from error

    async def _running(self, number: int) -> Any:
        """A replica that has started: one that is lost before, on a machine that is dying, costs no attempt."""
        end = time.monotonic() + (PATIENCE if self.timeout is None else self.timeout)
        while not self._started[number]:
            actor = self._open()[number]
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    await actor.facts.remote()
                self._started[number] |= self._open()[number] is actor
            except LOST as error:
                self._replace(number, actor, error)
                if getattr(error, "actor_init_failed", False) or time.monotonic() > end:
                    raise EngineError(f"replica {number} does not start again: {error}") from error
                await asyncio.sleep(PAUSE)
        return self._open()[number]

    # --- weights
    def load_weights(self, weights: Any, version: int) -> None:
        """Weights by name, put into Ray's store once for all replicas."""
        self._load(*self._others(version), ("load_weights", ray.put(weights), version))

    def load_adapter(self, folder: Path, version: int) -> None:
        """A LoRA folder, on the weights that were loaded last; its files travel to the replicas."""
        files = {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}
        under = [call for call in self._loaded if call[0] == "load_weights" and self._held == 1]
        self._load(*under, *self._others(version), ("load_adapter", ray.put(files), version))

    def _others(self, version: int) -> list[tuple[Any, ...]]:
        """The calls by which the other versions were loaded that are still held beside this one."""
        others = [call for call in self._loaded if call[2] != version]
        return others[len(others) - self._held + 1 :] if self._held > 1 else []

    def _load(self, *loaded: tuple[Any, ...]) -> None:
        """Load the last of these in all replicas; where one does not take it, all are replaced, as they were before."""
        before, self._loaded = self._loaded, loaded
        actors = list(self._open())
        loading = [actor.load.remote(*loaded[-1]) for actor in actors]
        try:
            for number, done in enumerate(loading):
                try:
                    ray.get(done, timeout=self.timeout)
                except LOST as error:
                    self._replace(number, actors[number], error)
        except BaseException as error:
            self._loaded = before
            self.restart()
            if isinstance(error, RayTaskError):
                raise EngineError(f"a replica does not take the weights: {error.cause}") from error
            raise
        self.weights_version = loaded[-1][2]

    # --- the end
    def restart(self) -> None:
        """Replace all replicas by new ones with the last weights."""
        for number, actor in enumerate(list(self._open())):
            self._replace(number, actor)

    def close(self) -> None:
        """End the replicas."""
        actors, self._actors = self._actors, []
        for actor in actors if ray.is_initialized() else ():
            ray.kill(actor)

    def _open(self) -> list[Any]:
        if not (actors := self._actors):
            raise RejectedError("the replicas have ended: this sampler was closed")
        if not ray.is_initialized():
            raise RejectedError("the replicas have ended: their session of Ray was shut down")
        return actors

    def _replace(self, number: int, failed: Any, why: Exception | None = None) -> None:
        """Put a new replica in the place of `failed`, if nobody else has."""
        actors = self._open()
        if actors[number] is not failed:
            return
        if why is not None:
            logger.warning("replica %d failed (%s); it is replaced", number, type(why).__name__)
        ray.kill(failed)
        self._started[number] = False
        actors[number] = self._actor.remote(self._make, *self._loaded)


def _room() -> str:
    return f"the cluster has {ray.cluster_resources()}, of which {ray.available_resources()} are free"
