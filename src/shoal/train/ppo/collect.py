"""Where PPO's rollouts come from: environments in this process or in workers, replaced when they die.

A failed worker costs the rollout that it was in: it is collected again, from the same weights and noise. The log of
episodes keeps the actions that are needed to play those again that are under way.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import deque
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shoal.core.errors import EnvError, WorkerDiedError, WorkerTimeoutError
from shoal.core.executors import available_cpus, free_cpus
from shoal.core.workers import StartMethod
from shoal.train.ppo.agent import PPOAgent
from shoal.train.ppo.arrays.steps import EnvSlice, StepRollout, VectorSteps
from shoal.train.ppo.envs import EnvFactory, EnvFacts, make_envs
from shoal.train.ppo.learner import CompiledLearner
from shoal.train.ppo.native import BatchFactory
from shoal.train.ppo.workers import WorkerSteps

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode."""

    env: int
    reward: float  # undiscounted sum
    length: int
    step: int  # env steps of the run when it ended


def mean_of(episodes: Collection[Episode]) -> dict[str, float]:
    """Their mean reward and length; NaN of none."""
    if not episodes:
        return {"reward": math.nan, "length": math.nan}
    return {name: float(np.mean([getattr(e, name) for e in episodes])) for name in ("reward", "length")}


class EpisodeLog:
    """Follows episodes across rollouts; if `replayable` it keeps the actions since each env's last reset."""

    def __init__(self, n_envs: int, *, replayable: bool = True) -> None:
        self.n_envs = n_envs
        self.replayable = replayable
        self.recent: deque[Episode] = deque(maxlen=100)
        self.n_episodes = 0
        self.n_steps = 0
        self.started = np.ones(n_envs, np.int64)  # episodes begun in each env
        self.returns = np.zeros(n_envs)  # so far, of the episode under way
        self.lengths = np.zeros(n_envs, np.int64)
        self._actions: list[list[Array]] = [[] for _ in range(n_envs)]

    def add(self, rollout: StepRollout) -> list[Episode]:
        """Take a rollout in; returns the episodes that ended, in the order of their ends."""
        rewards, done = rollout.rewards, rollout.done
        n_steps, n_envs = rewards.shape
        valid = rollout.valid
        ended: list[Episode] = []
        begins = [0] * n_envs
        if done.any():
            for t, i in np.argwhere(done).tolist():
                length = int(self.lengths[i]) + _count(valid, begins[i], t + 1, i)
                reward = float(self.returns[i] + rewards[begins[i] : t + 1, i].sum())
                step = self.n_steps + ((t + 1) * n_envs if valid is None else int(valid[: t + 1].sum()))
                ended.append(Episode(i, reward, length, step))
                self.restarted([i])
                begins[i] = t + 1
        for i in range(n_envs):
            self.lengths[i] += _count(valid, begins[i], n_steps, i)
            if self.replayable and begins[i] < n_steps:
                self._actions[i].append(rollout.actions[begins[i] :, i].copy())
        if any(begins):
            for i in range(n_envs):
                self.returns[i] += rewards[begins[i] :, i].sum()
        else:
            self.returns += rewards.sum(axis=0)
        self.n_steps += n_steps * n_envs if valid is None else int(valid.sum())
        self.n_episodes += len(ended)
        self.recent.extend(ended)
        return ended

    def restarted(self, indices: list[int]) -> None:
        """Forget the episodes of envs, which ended or were broken off."""
        for i in indices:
            self.returns[i], self.lengths[i] = 0.0, 0
            self.started[i] += 1
            self._actions[i].clear()

    def longer_than(self, limit: int) -> list[int]:
        """Envs whose present episode has more steps than `limit`."""
        return [int(i) for i in np.flatnonzero(self.lengths > limit)]

    def actions_since_reset(self) -> dict[int, Array]:
        """`[steps, A]` rows of actions of each env that has taken some in its present episode."""
        return {i: np.concatenate(parts) for i, parts in enumerate(self._actions) if parts}

    @property
    def mean_reward(self) -> float:
        """Over the last 100 episodes; NaN before the first."""
        return mean_of(self.recent)["reward"]

    @property
    def mean_length(self) -> float:
        """Over the last 100 episodes; NaN before the first."""
        return mean_of(self.recent)["length"]

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """(JSON values, arrays) for a checkpoint."""
        recent = [[e.env, e.reward, e.length, e.step] for e in self.recent]
        values = {"n_episodes": self.n_episodes, "n_steps": self.n_steps, "recent": recent}
        arrays = {name: getattr(self, name).copy() for name in ("started", "returns", "lengths")}
        arrays |= {f"actions.{i}": actions for i, actions in self.actions_since_reset().items()}
        return values, arrays

    def load_state(self, values: dict[str, Any], arrays: dict[str, Array]) -> None:
        """What `state` gave."""
        self.n_episodes, self.n_steps = int(values["n_episodes"]), int(values["n_steps"])
        self.recent = deque(
            (Episode(int(e), float(reward), int(n), int(step)) for e, reward, n, step in values["recent"]),
            maxlen=100,
        )  # fmt: skip
        for name in ("started", "returns", "lengths"):
            setattr(self, name, arrays[name].copy())
        kept = [arrays.get(f"actions.{i}") for i in range(self.n_envs)]
        self._actions = [[] if actions is None else [actions] for actions in kept]


def _count(valid: Array | None, start: int, stop: int, i: int) -> int:
    return stop - start if valid is None else int(valid[start:stop, i].sum())


logger = logging.getLogger(__name__)
Collector = EnvSlice | VectorSteps | WorkerSteps

MAX_RECOVERIES = 3


class Experience:
    """Rollouts of one agent on `log.n_envs` environments, begun anew or where the episodes in `log` stand."""

    def __init__(
        self, factory: EnvFactory, facts: EnvFacts, agent: PPOAgent, log: EpisodeLog, *, backend: str,
        num_workers: int | None, start_method: StartMethod | None,
    ) -> None:  # fmt: skip
        self.factory, self.facts, self.agent, self.log = factory, facts, agent, log
        self.n_envs = log.n_envs
        self.backend, self.num_workers, self.start_method = backend, num_workers, start_method
        self.workers = 0
        self.collector: Collector | None = None
        self.now: np.ndarray | None = None
        """Observations at which the next rollout begins."""
        self.goes_on = False
        """The next collector begins where the episodes stand."""

    def collect(self, total_timesteps: int | None) -> StepRollout:
        """The next rollout; workers that died are started again, at most three times in a row."""
        n_steps = self.agent.config.n_steps
        noise, before = self.agent.noise(n_steps), copy(self.agent.memory)
        for attempt in range(MAX_RECOVERIES + 1):
            try:
                if self.collector is None:
                    self._start(total_timesteps)
                assert self.collector is not None
                memory = copy(self.agent.memory)  # less that of episodes which could not be played again
                rollout = self.collector.collect(self.agent, noise)
                rollout.memory = memory
                return rollout
            except (WorkerDiedError, WorkerTimeoutError) as error:
                if attempt == MAX_RECOVERIES:
                    raise
                warnings.warn(
                    f"a worker failed ({error}); workers are started again and the rollout is repeated, "
                    "nothing is lost", RuntimeWarning, stacklevel=3,
                )  # fmt: skip
                self.close()
                self.agent.memory = copy(before)
            except Exception as error:  # of an env in a worker: a note names it
                named = [note for note in getattr(error, "__notes__", ()) if note.startswith("env ")]
                if not named:
                    raise
                raise EnvError(named[0]) from error
        raise AssertionError("unreachable")

    def _start(self, total_timesteps: int | None) -> None:
        self.workers = self._choose_workers(total_timesteps)
        if isinstance(learner := self.agent.learner, CompiledLearner):  # while it learns, its workers rest
            learner.assisted = self.workers > 1 and free_cpus() > 1
        collector = self._make_collector()
        if isinstance(collector, WorkerSteps):
            self.workers = collector.envs.num_envs  # fewer where smaller shares would end no sooner
        try:
            self._begin(collector)
        except BaseException:
            collector.close()
            raise
        self.collector, self.goes_on = collector, False

    def _begin(self, collector: Collector) -> None:
        if isinstance(self.factory, BatchFactory):
            self._begin_batch(self.factory, collector)
            return
        collector.reset()
        if self.goes_on and self.agent.iteration > 0:
            taken = self.log.actions_since_reset()
            to_env = self.agent.action_rows.to_env
            histories = [to_env(taken[i]) if i in taken else [] for i in range(self.n_envs)]
            now = collector.resume(self.log.started.tolist(), histories)
            if self.now is not None:
                strangers = [i for i in range(self.n_envs) if not np.array_equal(now[i], self.now[i])]
                if strangers:
                    logger.warning(
                        "env %s did not come back to its state when its episode was played again: the "
                        "environment is not a function of its seed and actions. A new episode begins there.",
                        strangers,
                    )
                    collector.restart(strangers)
                    self._broken_off(strangers)

    def _begin_batch(self, factory: BatchFactory, collector: Collector) -> None:
        """Begin new episodes: a native batch cannot be brought back into the middle of those under way."""
        assert isinstance(collector, VectorSteps)
        if self.goes_on and self.agent.iteration > 0:
            logger.warning(
                "new episodes begin in all %d environments: a native batch cannot play those again that were under "
                "way, so this run is not equal bit for bit to one that was not interrupted", self.n_envs,
            )  # fmt: skip
            self._broken_off(list(range(self.n_envs)))
        collector.seed = factory.seeds(collector.envs, self.log.started.tolist())
        collector.reset()

    def _broken_off(self, envs: list[int]) -> None:
        self.log.restarted(envs)
        for i in envs:
            self.agent.broken_off(i)

    def _make_collector(self) -> Collector:
        masked = self.facts.masked
        if isinstance(self.factory, BatchFactory):
            return VectorSteps(self.factory.batch(self.n_envs), masked=masked)
        if self.workers == 0:
            return EnvSlice(make_envs(self.factory, 0, self.n_envs, self.facts.tried), masked=masked)
        learner = self.agent.learner
        if isinstance(learner, CompiledLearner):
            return WorkerSteps(
                self.factory, self.facts, n_envs=self.n_envs, n_steps=self.agent.config.n_steps,
                num_workers=self.workers, network=learner, start_method=self.start_method,
            )  # fmt: skip
        from shoal.vector import make_vec

        makers = [partial(self.factory, i) for i in range(self.n_envs)]
        envs = make_vec(
            makers, self.n_envs, backend="process", num_workers=self.workers,
            start_method=self.start_method, autoreset="same_step", check_nan=False,
        )  # fmt: skip
        return VectorSteps(envs, masked=masked)

    def _choose_workers(self, total_timesteps: int | None) -> int:
        """0 for in-process stepping."""
        if self.backend in ("serial", "native") or (self.backend == "auto" and self.num_workers == 0):
            return 0
        if self.backend == "process" or self.num_workers is not None:
            return max(1, min(self.num_workers or available_cpus(), self.n_envs))
        free = free_cpus()
        workers = min(free, self.n_envs)
        chosen = workers if workers_pay(
            self.facts.step_seconds, self.agent.config.n_steps, self.n_envs, workers,
            compiled=isinstance(self.agent.learner, CompiledLearner), steps=total_timesteps or 1_000_000,
        ) else 0  # fmt: skip
        logger.info(
            "a step takes %.0f us, and %d of %d cores are free: %s", 1e6 * self.facts.step_seconds, free,
            available_cpus(), f"{chosen} workers" if chosen else "stepping in this process",
        )  # fmt: skip
        return chosen

    def break_off(self, envs: list[int]) -> None:
        """Begin new episodes in these environments."""
        if self.collector is not None:
            self.collector.restart(envs)
        self._broken_off(envs)
        self.now = None

    def close(self) -> None:
        """End workers and environments; the next rollout goes on where they were."""
        collector, self.collector = self.collector, None
        if collector is not None:
            self.goes_on = True
            collector.close()


START_SECONDS = 2.0  # of worker processes with numpy and gymnasium
EXCHANGE_SECONDS = {True: 4e-4, False: 1.2e-4}  # per rollout (compiled), per step of all envs (torch)


def workers_pay(
    step_seconds: float, n_steps: int, n_envs: int, workers: int, *, compiled: bool, steps: int
) -> bool:
    """Whether worker processes would save more time over `steps` env steps than they cost."""
    if workers < 2:
        return False
    in_process = step_seconds * n_steps * n_envs
    exchange = EXCHANGE_SECONDS[compiled] * (1 if compiled else n_steps)
    saved = in_process * (1 - 1 / workers) - exchange
    return saved * steps / (n_steps * n_envs) > START_SECONDS
