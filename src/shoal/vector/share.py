"""A share of the environments and everything that can be asked of it.

Whoever owns a share (the caller, a thread, a worker process) passes actions in; results land in the share's
rows of the slots, and what does not fit there comes back as `Extras`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from shoal.vector.extras import Extras
from shoal.vector.failures import from_exception
from shoal.vector.rows import EnvFn
from shoal.vector.stepping import CATCH, Stepping

__all__ = ["CATCH", "EnvFn", "Extras", "Share"]


class Share(Stepping):
    """Environments that are stepped, reset, asked and closed one after another in one thread."""

    def reset(
        self, members: Sequence[int], seeds: Sequence[int | None], options: dict[str, Any] | None, ring: int
    ) -> Extras | None:
        """Reset the envs `members`, each with its seed."""
        extras = Extras()
        columns: dict[int, list[Any]] = {i: [None] * len(members) for i in self._beside}
        for at, (j, seed) in enumerate(zip(members, seeds, strict=True)):
            self._word[0] = j
            try:
                obs, info = self.envs[j].reset(seed=seed, options=options)
                self.put(at, j, obs, ring, columns)
            except CATCH as error:
                extras.failures.append(from_exception(self.first + j, "reset", error, None, os.getpid()))
                continue
            self._ended[j] = False
            self.rewards[j], self.terminated[j], self.truncated[j] = 0.0, False, False
            if info:
                extras.infos.append((self.first + j, None, None, info))
        extras.columns = columns
        return extras if (columns or extras.infos or extras.failures) else None

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], members: Sequence[int]) -> Extras:
        """Call a method, or read an attribute, of each of the envs."""
        extras = Extras(value=[])
        for j in members:
            try:
                attribute = self.envs[j].get_wrapper_attr(name)
                result = attribute(*args, **kwargs) if callable(attribute) else attribute
            except CATCH as error:
                extras.failures.append(
                    from_exception(self.first + j, f"call {name}", error, None, os.getpid())
                )
                result = None
            extras.value.append(result)
        return extras

    def apply(self, function: Callable[..., Any], args: Sequence[Any], members: Sequence[int]) -> Extras:
        """`function(env, *args)` for each of the envs."""
        extras = Extras(value=[])
        for j in members:
            result = None
            try:
                result = function(self.envs[j], *args)
            except CATCH as error:
                name = getattr(function, "__name__", "apply")
                extras.failures.append(from_exception(self.first + j, name, error, None, os.getpid()))
            extras.value.append(result)
        self.take_steps()
        return extras

    def set_attr(self, name: str, values: Sequence[Any], members: Sequence[int]) -> Extras:
        """Set an attribute of each of the envs, on the wrapper that has it."""
        extras = Extras()
        for j, value in zip(members, values, strict=True):
            try:
                self.envs[j].set_wrapper_attr(name, value)
            except CATCH as error:
                extras.failures.append(
                    from_exception(self.first + j, f"set {name}", error, None, os.getpid())
                )
        self.take_steps()
        return extras

    def rebuild(self, members: Sequence[int]) -> Extras:
        """Throw these envs away and make them anew."""
        extras = Extras()
        for j in members:
            with contextlib.suppress(Exception):
                self.envs[j].close()
            try:
                self.envs[j] = self.env_fns[j]()
                self._ended[j] = False
            except CATCH as error:
                extras.failures.append(from_exception(self.first + j, "make", error, None, os.getpid()))
        self.take_steps()
        return extras

    def await_reset(self, members: Sequence[int]) -> None:
        """Treat the episodes of these envs as ended."""
        for j in members:
            self._ended[j] = True

    def detach(self) -> None:
        """Point everything it writes to elsewhere: its thread hangs, and its rows belong to a successor."""
        self.rewards, self.terminated, self.truncated = (
            item.copy() for item in (self.rewards, self.terminated, self.truncated)
        )
        if self._final is not None:
            self._final = self._final.copy()
        for writers in self._writers:
            for writer in writers:
                if writer is not None:
                    writer.detach()

    def close(self) -> None:
        """Close every env; one that fails does not keep the others open."""
        problems: list[BaseException] = []
        for env in self.envs:
            try:
                env.close()
            except CATCH as error:
                problems.append(error)
        self.envs, self._steps = [], []
        if problems:
            raise problems[0]
