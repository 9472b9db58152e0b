"""Methods and attributes of the environments of a pool, wherever they live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.vector.failures import Failure
from shoal.vector.operations import Operations
from shoal.vector.recovery import raise_first
from shoal.vector.standing import Pending


class Asking(Operations):
    """A pool whose environments can be asked and told things."""

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute; one result per environment."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a call; `call_wait` returns its results."""
        self._ready("call_async")
        if name in ("reset", "step", "close"):
            raise ValueError(f"{name!r} has a method of its own on the vector environment; use that")
        for lane in self.lanes:
            lane.start("call", name, args, kwargs, list(range(lane.count)))
            self._pending.append((lane, range(lane.count)))
        self._state = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of `call_async`, in the order of the environments."""
        self._expect("call")
        pending, self._pending, self._state = self._pending, [], None
        replies = self._gather(pending, timeout, "call")
        raise_first([f for reply in replies if reply for f in reply.failures])
        return tuple(value for reply in replies if reply for value in reply.value)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment: one value for all, or a list or tuple of one for each."""
        self._ready("set_attr")
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                f"values must be a list or tuple of one value per environment ({self.num_envs}), "
                f"got {len(values)}"
            )
        pending: list[Pending] = []
        for lane in self.lanes:
            part = values[lane.first : lane.first + lane.count]
            lane.start("set_attr", name, list(part), list(range(lane.count)))
            pending.append((lane, range(lane.count)))
        replies = self._gather(pending, None, "set_attr")
        raise_first([f for reply in replies if reply for f in reply.failures])

    def apply(
        self, function: Callable[..., Any], *args: Any, indices: Sequence[int] | None = None
    ) -> list[Any]:
        """`function(env, *args)` for each environment, or some of them, where they live."""
        self._ready("apply")
        chosen = list(range(self.num_envs)) if indices is None else self._indices(indices, indices, "indices")
        pending: list[Pending] = []
        for lane, part in self.by_lane(sorted(chosen)):
            lane.start("apply", function, args, part)
            pending.append((lane, part))
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        for (lane, members), reply in zip(pending, self._gather(pending, None, "apply"), strict=True):
            if reply is not None:
                failures += reply.failures
                results.update(zip([lane.first + j for j in members], reply.value or [], strict=False))
        raise_first(failures)
        return [results[i] for i in chosen]

    def render(self) -> tuple[Any, ...]:
        """What every environment renders."""
        return self.call("render")

    @property  # type: ignore[override]
    def np_random_seed(self) -> Any:
        """The seed of every environment's generator."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> Any:
        """Every environment's generator (from other processes: copies)."""
        return self.get_attr("np_random")
