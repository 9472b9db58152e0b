"""Whether one Ray cluster has room for the replicas of all training processes: else some would wait for ever."""

from __future__ import annotations

from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.executors import connect_ray
from shoal.rollout.samplers.settings import ReplicaConfig
from shoal.train.processes import Processes

_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


def refuse_without_room(replicas: ReplicaConfig, processes: Processes) -> None:
    """Connect each process to its cluster, and count who shares one.

    Raises:
        ConfigError: the replicas of the processes on one cluster need more than it has; raised in all processes.
    """
    ray, _ = connect_ray()
    own = str(ray.get_runtime_context().gcs_address)
    places = processes.together(lambda: (own, dict(ray.cluster_resources())))
    for address, there in places:
        sharing = sum(other == address for other, _ in places)
        refuse_too_many(replicas, sharing, there)


def refuse_too_many(replicas: ReplicaConfig, sharing: int, there: dict[str, float]) -> None:
    """Check the replicas of `sharing` processes against all that a cluster has."""
    wanted: dict[str, Any] = dict(replicas.resources)
    each = {
        **wanted.pop("resources", {}),
        **{_NAMES[key]: wanted[key] for key in wanted.keys() & _NAMES.keys()},
    }
    total = sharing * replicas.count
    for name, amount in sorted(each.items()):
        if amount and total * amount > there.get(name, 0):
            raise ConfigError(
                f"{sharing} processes with engine.replicas.count={replicas.count} make {total} replicas, which need "
                f"{total * amount:g} of {name!r}; their Ray cluster has {there.get(name, 0):g}: start fewer processes "
                f"or replicas, ask for less in engine.replicas.resources, or add nodes first"
            )
