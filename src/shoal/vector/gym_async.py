"""`AsyncVectorEnv` with the constructor of Gymnasium's: a drop-in where worker death, hangs and text matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, logger, spaces
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from shoal.core.executors import available_cpus
from shoal.vector.failures import Failure
from shoal.vector.launch import START_METHODS
from shoal.vector.opening import Rules, open_processes
from shoal.vector.pool import VectorPool
from shoal.vector.standing import Description


class AsyncVectorEnv(VectorPool):
    """Environments in worker processes, with the arguments and errors of `gymnasium.vector.AsyncVectorEnv`.

    Args:
        env_fns: functions that make the environments.
        shared_memory: accepted; observations of fixed size always go through shared memory.
        copy: return copies of the observations.
        context: "forkserver" (default), "spawn" or "fork".
        daemon: accepted; workers always end with their parent.
        worker: not supported: a worker speaks shoal's own protocol.
        observation_mode: "same", "different" or `(batched space, single space)`.
        autoreset_mode: Gymnasium's.
        max_concurrency: how many environments may be at work at once.
        **options: of `make_vec`: `num_workers`, `step_timeout`, `on_failure`, …
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Any = None,
        observation_mode: Any = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        **options: Any,
    ) -> None:
        if worker is not None:
            raise ValueError("a custom `worker` is not supported: put what it does into the env or a wrapper")
        if context is not None and context not in START_METHODS:
            raise ValueError(f"context must be one of {START_METHODS} or None, got {context!r}")
        if max_concurrency is not None:
            if not isinstance(max_concurrency, int | np.integer):
                raise ValueError(
                    f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}."
                )
            if max_concurrency < 1:
                raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")
        mode = autoreset_mode if isinstance(autoreset_mode, AutoresetMode) else AutoresetMode(autoreset_mode)
        self.env_fns, self.shared_memory, self.daemon = env_fns, shared_memory, daemon
        self.context, self.observation_mode, self.max_concurrency = context, observation_mode, max_concurrency
        options.setdefault("num_workers", min(len(env_fns), max_concurrency or available_cpus()))
        given = [field.name for field in dataclasses.fields(Rules) if field.name in options]
        rules = Rules(mode, **{name: options.pop(name) for name in given})
        parts = open_processes(
            list(env_fns),
            rules,
            method=context or "forkserver",
            describe=lambda found: spaces_by_mode(_static(found, shared_memory), observation_mode),
            **options,
        )
        super().__init__(**parts, copy_observations=copy)
        if isinstance(observation_mode, tuple):
            self.single_observation_space = observation_mode[1]

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close as Gymnasium does: with a warning, and after `timeout` by force, when a call is pending."""
        if self._state is not None:
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._state}` to complete.")
        super().close_extras(timeout, terminate)

    def tell(self, failures: list[Failure]) -> None:
        """Log failures as Gymnasium does."""
        for failure in failures:
            logger.error(f"Received the following error from Worker-{failure.env} - Shutting it down")
            logger.error(failure.trace or failure.summary)
        if self.recovery.policy == "raise":
            logger.error("Raising the last exception back to the main process.")


def _static(found: Description, shared_memory: bool) -> Description:
    # As Gymnasium does it; `make_vec` and shared_memory=False take such spaces.
    space = found.observation_spaces[0]
    if shared_memory and type(space).__module__.partition(".")[0] != "gymnasium":
        raise ValueError(
            f"the custom space {space} has no place in shared memory: pass shared_memory=False, or use make_vec"
        )
    if shared_memory and isinstance(space, spaces.Graph | spaces.Sequence):
        raise TypeError(  # (its users look for Gymnasium's words)
            f"{space} has a dynamic shape so its not possible to make a static shared memory. "
            "Pass shared_memory=False, or use make_vec"
        )
    return found


def spaces_by_mode(found: Description, mode: Any) -> Description:
    """The description with its observation space batched as `mode` asks.

    Raises:
        RuntimeError: when the environments' spaces are not as the mode says.
    """
    each, n_envs = found.observation_spaces, len(found.observation_spaces)
    first = each[0]
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(item, Space) for item in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
            )
        batched, first = mode
    elif mode == "same":
        batched = batch_space(first, n_envs)
    elif mode == "different":
        batched = batch_differing_spaces(each)
    else:
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch "
            f"observation space, actual got {mode}"
        )
    if mode == "same":
        if any(space != first for space in each):
            raise RuntimeError(
                "AsyncVectorEnv(..., observation_mode='same') however some of the sub-environments observation "
                "spaces are not equivalent. If this is intentional, use `observation_mode='different'` instead."
            )
    elif any(not is_space_dtype_shape_equiv(space, first) for space in each):
        raise RuntimeError(
            "AsyncVectorEnv(..., observation_mode='different' or custom space) however the sub-environment's "
            "observation spaces do not share a common shape and dtype."
        )
    if any(space != found.action_spaces[0] for space in found.action_spaces):
        raise RuntimeError(
            f"Some environments have an action space different from `{found.action_spaces[0]}`. "
            "In order to batch actions, the action spaces from all environments must be equal."
        )
    return found._replace(observation_space=batched)
