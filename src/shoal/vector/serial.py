"""All environments in the caller's thread: the reference that all other backends equal."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shoal.vector.buffers import plain_target, write_actions
from shoal.vector.env_group import NOTHING, Step
from shoal.vector.infos import Info, batch_infos
from shoal.vector.vector_env import VectorPool, one_at_a_time


class SerialVectorEnv(VectorPool):
    """All environments in the caller's thread: a plain step crosses no worker."""

    @one_at_a_time
    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Info]:
        """Step every environment with its action."""
        self._check_idle("step")
        buffers = self.buffers
        target = plain_target(buffers)
        if (
            self._policy.masked_by is not None
            or self._policy.cut
            or target is None
            or type(actions) is not np.ndarray
            or actions.dtype != target.dtype
            or actions.shape != target.shape
        ):
            self._step_all(write_actions(buffers, actions))
            return self._end("step", None, self._step_result)
        began = time.perf_counter()
        self._broken = "the last step failed or was interrupted"
        buffers.flags.fill(False)
        worker = self.workers[0]
        assert worker.group is not None
        given = list(actions if actions.ndim == 1 else actions.copy())
        reply = worker.group.step(given)
        infos: Info = {}
        if reply is not NOTHING:
            told = self._take([reply], [(worker, Step(None, {}, given))])
            infos = batch_infos(self.num_envs, told) if told else {}
        result = (*self._arrays(), infos)
        if self._remembers:
            self._policy.remember()
        self._broken = ""
        self._steps += 1
        self._seconds += time.perf_counter() - began
        return result
