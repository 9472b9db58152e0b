"""What `backend="ray"` uses of Ray, in this process: an actor is two threads, a node some resources and a port."""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


class RayError(Exception):
    """As Ray's."""


def dead_because(why: str) -> RayError:
    return RayError(f"The actor died.\n\tclass_name: Host\nThe actor is dead because {why}. It had a name.")


class RuntimeEnvSetupError(RayError):
    """As Ray's."""


class NodeAffinitySchedulingStrategy:
    """As Ray's."""

    def __init__(self, node_id: str, soft: bool, _spill_on_unavailable: bool = False) -> None:
        self.node_id, self.soft = node_id, soft
        assert _spill_on_unavailable is soft


class Reference:
    """An answer that is there, or will be."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None

    def settle(self, answer: Any = None, error: Exception | None = None) -> None:
        if not self.there.is_set():
            self.answer, self.error = answer, error
            self.there.set()


class Method:
    """A method of an actor: its calls are answered one after the other, in a thread of its own."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.calls: queue.SimpleQueue[tuple[Reference, tuple[Any, ...]]] = queue.SimpleQueue()

    def options(self, *, concurrency_group: str) -> Method:
        assert self is getattr(self.actor, concurrency_group)
        return self

    def remote(self, *args: Any) -> Reference:
        reference = Reference()
        self.actor.open.append(reference)
        if self.actor.death:
            self.actor.end(self.actor.death)
        else:
            self.calls.put((reference, args))
        return reference


class Actor:
    """One of `kind`, once it has a place."""

    def __init__(self, cluster: ThreadCluster, kind: Kind, args: Sequence[Any]) -> None:
        self.cluster, self.kind, self.args = cluster, kind, args
        self.node = ""
        self.death: RayError | None = None
        self.open: list[Reference] = []
        self.run, self.look = Method(self), Method(self)

    def begin(self, node: str) -> None:
        self.node, instance = node, self.kind.kind(*self.args)
        for name in ("run", "look"):
            method, call = getattr(self, name), getattr(instance, name)
            threading.Thread(target=self._serve, args=(method, call), daemon=True).start()

    def _serve(self, method: Method, call: Any) -> None:
        self.cluster.here.node = self.node
        while True:
            reference, args = method.calls.get()
            try:
                reference.settle(call(*args))
            except Exception as error:
                reference.settle(error=error)

    def end(self, error: RayError) -> None:
        self.death = error
        for reference in self.open:
            reference.settle(error=error)


class Kind:
    """A class whose instances are actors."""

    def __init__(
        self, cluster: ThreadCluster, kind: type, options: Mapping[str, Any], strategy: Any = None
    ) -> None:
        self.cluster, self.kind, self.given, self.strategy = cluster, kind, options, strategy
        needs = {
            "CPU": options.get("num_cpus"),
            "GPU": options.get("num_gpus"),
            **options.get("resources", {}),
        }
        self.holds = {name: amount for name, amount in needs.items() if amount}
        self.needs = self.holds if "num_cpus" in options else {"CPU": 1, **self.holds}

    def options(self, *, scheduling_strategy: Any) -> Kind:
        return Kind(self.cluster, self.kind, self.given, scheduling_strategy)

    def remote(self, *args: Any) -> Actor:
        actor = Actor(self.cluster, self, args)
        self.cluster.actors.append(actor)
        self.cluster.place()
        return actor


class ThreadCluster:
    """Nodes `n0`, `n1` … with so much of everything each; `ray` is the module that is connected to it."""

    exceptions = types.SimpleNamespace(RayError=RayError, RuntimeEnvSetupError=RuntimeEnvSetupError)

    def __init__(self, *nodes: Mapping[str, float]) -> None:
        self.resources: dict[str, Mapping[str, float]] = {}
        self.ports: dict[str, socket.socket] = {}
        self.unnoticed: set[str] = set()
        """Nodes that are lost and still counted as alive."""
        self.actors: list[Actor] = []
        self.stillborn: list[RayError] = []
        """What the next actors die of before they have a place."""
        self.here = threading.local()
        self.lock = threading.Lock()
        self.job = 1
        for node in nodes:
            self.add_node(node)

    def enter(self, patch: pytest.MonkeyPatch) -> ThreadCluster:
        """Be what `import ray` finds."""
        strategies = types.SimpleNamespace(NodeAffinitySchedulingStrategy=NodeAffinitySchedulingStrategy)
        for name, module in (
            ("ray", self),
            ("ray.util", self),
            ("ray.util.scheduling_strategies", strategies),
        ):
            patch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
        return self

    def add_node(self, resources: Mapping[str, float]) -> str:
        name = f"n{len(self.resources)}"
        self.resources[name], self.ports[name] = resources, socket.create_server(("127.0.0.1", 0))
        self.place()
        return name

    def lose_node(self, name: str, noticed: bool = True) -> None:
        """Its port closes and its actors die."""
        self.ports[name].close()
        self.unnoticed |= set() if noticed else {name}
        for actor in self.actors:
            if actor.node == name:
                actor.end(dead_because("its node has died"))

    def free(self, name: str) -> dict[str, float]:
        at_work = [actor.kind.holds for actor in self.actors if actor.node == name and not actor.death]
        return {k: n - sum(holds.get(k, 0) for holds in at_work) for k, n in self.resources[name].items()}

    def place(self) -> None:
        """Begin those who wait, where there is room for them: where they wish, else where most is free."""
        with self.lock:  # actors end in any thread, and each begins once
            for actor in self.actors:
                if actor.node or actor.death:
                    continue
                if self.stillborn:
                    actor.end(self.stillborn.pop(0))
                    continue
                names = sorted(self.resources, key=lambda name: -self.free(name).get("CPU", 0))
                names = [name for name in names if self.ports[name].fileno() >= 0]
                wish = actor.kind.strategy
                if isinstance(wish, NodeAffinitySchedulingStrategy):
                    names = [wish.node_id, *(names if wish.soft else [])]
                for name in names:
                    if all(self.free(name).get(k, 0) >= n for k, n in actor.kind.needs.items()):
                        actor.begin(name)
                        break

    def close(self) -> None:
        for port in self.ports.values():
            port.close()

    # --- the functions of Ray's module
    def is_initialized(self) -> bool:
        return self.job > 0

    def shutdown(self) -> None:
        self.job = 0

    def get_runtime_context(self) -> Any:
        node = getattr(self.here, "node", "the caller's")
        return types.SimpleNamespace(
            get_job_id=lambda: self.job, get_node_id=lambda: node, gcs_address="127.0.0.1:1"
        )

    def remote(
        self, *, max_restarts: int, max_task_retries: int, concurrency_groups: Any, **options: Any
    ) -> Any:
        assert (max_restarts, max_task_retries, concurrency_groups) == (0, 0, {"look": 1})
        for name in ("num_cpus", "num_gpus"):
            if not options.get(name, 0) >= 0:
                raise ValueError(f"{name} must be at least 0")
        return lambda kind: Kind(self, kind, options)

    def get(self, reference: Reference, timeout: float | None = None) -> Any:
        if not reference.there.wait(30.0 if timeout is None else timeout):
            raise RayError("no answer in time")
        if reference.error is not None:
            raise reference.error
        return reference.answer

    def wait(
        self, references: Sequence[Reference], num_returns: int = 1, timeout: float | None = None
    ) -> Any:
        end = time.monotonic() + (30.0 if timeout is None else timeout)
        while True:
            self.place()
            ready = [reference for reference in references if reference.there.is_set()]
            if len(ready) >= num_returns or time.monotonic() >= end:
                return ready, [reference for reference in references if reference not in ready]
            time.sleep(5e-4)

    def kill(self, actor: Actor) -> None:
        actor.end(dead_because("it was killed"))
        self.place()

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name,
                "Alive": port.fileno() >= 0 or name in self.unnoticed,
                "Resources": self.resources[name],
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": port.getsockname()[1] if port.fileno() >= 0 else 1,
            }
            for name, port in self.ports.items()
        ]

    def cluster_resources(self) -> dict[str, float]:
        return self._sum(self.resources)

    def available_resources(self) -> dict[str, float]:
        return self._sum({name: self.free(name) for name in self.resources})

    @staticmethod
    def _sum(each: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        names = {name for resources in each.values() for name in resources}
        return {name: sum(resources.get(name, 0) for resources in each.values()) for name in names}
