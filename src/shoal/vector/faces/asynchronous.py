"""Gymnasium's `AsyncVectorEnv`, arguments and errors, over worker processes of shoal's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium import Space, logger
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from shoal.vector.make import Options, env_fns_of, open_workers, planned
from shoal.vector.spaces import check_whole
from shoal.vector.vector_env import Description, VectorPool


class AsyncVectorEnv(VectorPool):
    """Environments in worker processes, with the arguments and errors of `gymnasium.vector.AsyncVectorEnv`.

    Args:
        env_fns: functions that make the environments.
        shared_memory: accepted; observations of fixed size always go through shared memory, all others by message.
        copy: return copies of the observations.
        context: "forkserver" (default), "spawn" or "fork".
        daemon: accepted; workers always end with their parent.
        worker: not supported: a worker speaks shoal's own protocol.
        observation_mode: "same", "different" or `(batched space, single space)`.
        autoreset_mode: Gymnasium's.
        max_concurrency: how many environments may be at work at once; default: `num_workers` of `make_vec`.
        **options: of `make_vec`: `num_workers`, `step_timeout`, `on_failure`, …; `check_nan` is off.
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
        if max_concurrency is not None:
            check_whole(max_concurrency, "max_concurrency", 1)
        mode = autoreset_mode if isinstance(autoreset_mode, AutoresetMode) else AutoresetMode(autoreset_mode)
        self.env_fns, self.shared_memory, self.daemon = env_fns, shared_memory, daemon
        self.context, self.observation_mode, self.max_concurrency = context, observation_mode, max_concurrency
        options = {"num_workers": max_concurrency, "check_nan": False, **options}
        chosen = Options("process", start_method=context, autoreset=mode, copy=copy, **options)  # type: ignore[arg-type]
        fns = env_fns_of(list(env_fns), None, None, ())
        describe = functools.partial(spaces_by_mode, mode=observation_mode)
        super().__init__(*open_workers(fns, planned(fns, chosen), chosen, describe), **chosen.policy)
        if isinstance(observation_mode, tuple):
            self.single_observation_space = observation_mode[1]

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close as Gymnasium does: with a warning, and after `timeout` by force, when a call is pending."""
        if (state := self._state) is not None:
            logger.warn(f"Calling `close` while waiting for a pending call to `{state}` to complete.")
        super().close_extras(timeout, terminate)


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
