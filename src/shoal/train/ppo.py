"""PPO on parallel environments: collect, estimate, update, report, until enough steps are seen."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from shoal.core.errors import (
    ConfigError,
    EnvError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    did_you_mean,
)
from shoal.core.executors import available_cpus
from shoal.rollout.spaces import ActionRows, ObservationRows
from shoal.rollout.steps import EnvSlice, StepRollout, VectorSteps
from shoal.train.compiled_learner import CompiledLearner
from shoal.train.policy_networks import ActorCritic, build_network, n_weights
from shoal.train.ppo_agent import PPOAgent
from shoal.train.ppo_checkpoints import (
    Checkpoint,
    checkpoint_folder,
    describe_space,
    load_checkpoint,
    save_checkpoint,
)
from shoal.train.ppo_config import PPOConfig
from shoal.train.ppo_envs import EnvFactory, EnvSource, try_env
from shoal.train.ppo_episodes import EpisodeLog
from shoal.train.ppo_evaluation import Evaluation, evaluate
from shoal.train.ppo_learners import make_learner
from shoal.train.ppo_workers import StartMethod, WorkerSteps

logger = logging.getLogger(__name__)
Metrics = dict[str, float]
Callback = Callable[[Metrics], bool | None]
Collector = EnvSlice | VectorSteps | WorkerSteps

REPLAY_LIMIT = 10_000
"""Longer episodes are broken off (and bootstrapped) at a checkpoint: resuming would take too long."""
MAX_RECOVERIES = 3
BACKENDS = ("auto", "serial", "process")


class PPO:
    """Proximal policy optimisation of one policy on `n_envs` environments.

    `PPO("CartPole-v1", n_envs=8, seed=0).learn(100_000)` trains; the same seed gives the same weights bit for
    bit with any backend and number of workers, killed and resumed or not.

    Args:
        env: a Gymnasium id, `module:Class`, or a function that returns an environment.
        n_envs: how many of them.
        seed: of the run; all randomness is derived from it.
        config: how to learn; single settings may also be given by keyword (`learning_rate=1e-3`).
        network: an own `nn.Module` (see `OwnNetwork`); None builds one for the spaces.
        backend: "serial" steps all envs in this process, "process" in workers, "auto" measures and chooses.
        num_workers: worker processes; None for one per core.
        start_method: of the workers: "spawn", "forkserver" or "fork"; None for the safe default.
        device: "cpu", "cuda", "mps", or "auto" for the best there is.
        path: "compiled" for the kernels, "torch" for autograd, "auto" for kernels where they fit.
        env_kwargs: for the environment.
    """

    def __init__(
        self, env: EnvSource, *, n_envs: int = 8, seed: int = 0, config: PPOConfig | None = None,
        network: nn.Module | None = None, backend: str = "auto", num_workers: int | None = None,
        start_method: StartMethod | None = None, device: str = "cpu", path: str = "auto",
        env_kwargs: Mapping[str, Any] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        _check_call(n_envs, backend, num_workers, start_method, settings)
        self.config = dataclasses.replace(config or PPOConfig(), **settings)
        self.n_envs, self.seed = n_envs, seed
        self.backend, self.num_workers, self.start_method = backend, num_workers, start_method
        self.factory = EnvFactory(env, seed, dict(env_kwargs or {}))
        self.facts = try_env(self.factory)
        self.obs_rows = ObservationRows(self.facts.observation_space)
        self.action_rows = ActionRows(self.facts.action_space)
        config = self.config
        built = build_network(
            self.obs_rows, self.action_rows, hidden=config.hidden, activation=config.activation,
            log_std_init=config.log_std_init, seed=seed, network=network,
        )  # fmt: skip
        self._single_thread = n_weights(built) < 300_000
        self.device = choose_device(device)
        learner = make_learner(
            built, self.action_rows, path=path, device=self.device, adam_eps=config.adam_eps
        )
        self.agent = PPOAgent(learner, self.obs_rows, self.action_rows, config, n_envs, seed)
        self.log = EpisodeLog(n_envs)
        self.workers = 0
        self._collector: Collector | None = None
        self._now: np.ndarray | None = None  # observations at which the next rollout begins

    @property
    def network(self) -> ActorCritic:
        """The torch module with the current weights."""
        return self.agent.learner.network

    @property
    def path(self) -> str:
        """Which learner it is: `compiled` or `torch`."""
        return "compiled" if isinstance(self.agent.learner, CompiledLearner) else "torch"

    def learn(
        self, total_timesteps: int | None = None, *, num_episodes: int | None = None,
        callback: Callback | None = None,
    ) -> PPO:  # fmt: skip
        """Train until the run has seen `total_timesteps` env steps or `num_episodes` episodes in all.

        Args:
            total_timesteps: env steps of all environments together, those of earlier calls included.
            num_episodes: finished episodes, likewise.
            callback: gets the metrics after every update; returning False stops.
        """
        for metrics in self.updates(total_timesteps, num_episodes=num_episodes):
            if callback is not None and callback(metrics) is False:
                break
        return self

    def updates(
        self, total_timesteps: int | None = None, *, num_episodes: int | None = None
    ) -> Iterator[Metrics]:
        """`learn`, one update at a time: yields the metrics of each."""
        if (total_timesteps or 0) < 1 and (num_episodes or 0) < 1:
            raise ConfigError(
                f"give total_timesteps or num_episodes, at least 1, got {total_timesteps} and {num_episodes}"
            )
        seconds, first_step = 0.0, self.log.n_steps
        while self.progress(total_timesteps, num_episodes) < 1.0:
            progress = self.progress(total_timesteps, num_episodes)
            started = time.perf_counter()
            with self._threads():
                rollout = self._collect(total_timesteps)
                metrics = self.agent.improve(rollout, progress)
            ended = self.log.add(rollout)
            self._now = rollout.obs[-1]
            seconds += time.perf_counter() - started
            yield {
                "iteration": self.agent.iteration,
                "steps": self.log.n_steps,
                "episodes": self.log.n_episodes,
                "seconds": seconds,
                "steps_per_second": (self.log.n_steps - first_step) / max(seconds, 1e-9),
                "reward": float(np.mean([e.reward for e in ended])) if ended else math.nan,
                "length": float(np.mean([e.length for e in ended])) if ended else math.nan,
                "reward_mean": self.log.mean_reward,
                "length_mean": self.log.mean_length,
                "n_completed_episodes": len(ended),
                "n_envs": self.n_envs,
                **metrics,
            }

    def progress(self, total_timesteps: int | None, num_episodes: int | None) -> float:
        """The finished share of the run."""
        by_steps = self.log.n_steps / total_timesteps if total_timesteps else 0.0
        by_episodes = self.log.n_episodes / num_episodes if num_episodes else 0.0
        return min(1.0, max(by_steps, by_episodes))

    def evaluate(
        self, episodes: int = 10, *, deterministic: bool = True, frames: list[Any] | None = None
    ) -> Evaluation:
        """Play on a single environment of its own, with seeds of its own; training does not notice."""
        factory = dataclasses.replace(self.factory, stream="eval")
        env = factory(0, render_mode="rgb_array") if frames is not None else factory(0)
        try:
            with self._threads():
                return evaluate(
                    self.agent.act, env, episodes=episodes, deterministic=deterministic, frames=frames
                )
        finally:
            env.close()

    def save(self, root: Path | str, **extra: Any) -> Path:
        """Write `root/step_…`, from which `load` continues exactly; returns the folder.

        Episodes longer than 10,000 steps are broken off here, in this run too: playing them again would take
        too long.
        """
        long = self.log.longer_than(REPLAY_LIMIT)
        if long and self._collector is not None:
            self._collector.restart(long)
            self.log.restarted(long)
            self._now = None
        return save_checkpoint(checkpoint_folder(root, self.log.n_steps), self.checkpoint(**extra))

    def checkpoint(self, **extra: Any) -> Checkpoint:
        """All of the run, as it would be saved."""
        weights, optimizer, statistics = self.agent.state()
        values, episodes = self.log.state()
        if self._now is not None:
            episodes["now"] = self._now
        policy = {
            "env": self.factory.name,
            "env_kwargs": _plain(self.factory.kwargs),
            "observation_space": describe_space(self.facts.observation_space),
            "action_space": describe_space(self.facts.action_space),
            "network": self._network_name(),
            "hidden": list(self.config.hidden),
            "activation": self.config.activation,
            "normalize_obs": self.agent.obs_norm is not None,
        }
        training = {
            "config": dataclasses.asdict(self.config), "seed": self.seed, "n_envs": self.n_envs,
            "begun": self._collector is not None, **values, **extra,
        }  # fmt: skip
        return Checkpoint(policy, training, weights, optimizer, statistics, episodes)

    @classmethod
    def load(
        cls, checkpoint: Path | str, env: EnvSource | None = None, *, network: nn.Module | None = None,
        backend: str = "auto", num_workers: int | None = None, start_method: StartMethod | None = None,
        device: str = "cpu", path: str = "auto", env_kwargs: Mapping[str, Any] | None = None,
    ) -> PPO:  # fmt: skip
        """Continue the run that `save` wrote, bit for bit.

        Args:
            checkpoint: its folder, or a folder of them (the newest is taken).
            env: needed when the run's environment was given as a function; must be the same.
            network: needed when the run had its own; the weights are put into it.
            backend: where environments run; free to differ from before.
            num_workers: likewise.
            start_method: likewise.
            device: likewise.
            path: "compiled", "torch" or "auto"; only the same one continues bit for bit.
            env_kwargs: for an `env` given as a function.

        Raises:
            DataError: the checkpoint is broken.
            ConfigError: it belongs to another environment or network.
        """
        saved = load_checkpoint(checkpoint)
        training, policy = saved.training, saved.policy
        ppo = cls(
            env if env is not None else policy["env"], n_envs=training["n_envs"], seed=training["seed"],
            config=read_config(training["config"]), network=network, backend=backend,
            num_workers=num_workers, start_method=start_method, device=device, path=path,
            env_kwargs=env_kwargs if env_kwargs is not None else policy["env_kwargs"],
        )  # fmt: skip
        ppo.check_same(saved)
        ppo.agent.load_state(saved.weights, saved.optimizer, saved.statistics)
        ppo.log.load_state(training, saved.episodes)
        ppo._now = saved.episodes.get("now")
        if training["begun"]:
            ppo._resume = True
        return ppo

    def check_same(self, saved: Checkpoint) -> None:
        """Raise a `ConfigError` that lists the differences if a checkpoint is of another env or network."""
        mine = self.checkpoint()
        wrong = [
            f"{key}: the checkpoint has {saved.policy.get(key)!r}, this run {mine.policy[key]!r}"
            for key in ("env", "observation_space", "action_space", "network")
            if saved.policy.get(key) != mine.policy[key]
        ]
        for name in sorted({*saved.weights, *mine.weights}):
            theirs, ours = (getattr(c.weights.get(name), "shape", None) for c in (saved, mine))
            if theirs != ours:
                wrong.append(f"weight {name}: the checkpoint has shape {theirs}, this network {ours}")
        if wrong:
            raise ConfigError("the checkpoint belongs to another run:\n  " + "\n  ".join(wrong))

    def close(self) -> None:
        """End workers and environments; the policy stays usable."""
        if self._collector is not None:
            self._collector.close()
            self._collector = None
            self._resume = True

    def __enter__(self) -> PPO:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    _resume = False  # the next collector begins where the episodes stand

    def _collect(self, total_timesteps: int | None) -> StepRollout:
        noise = self.agent.noise(self.config.n_steps)
        for attempt in range(MAX_RECOVERIES + 1):
            if self._collector is None:
                self._collector = self._start(total_timesteps)
            try:
                return self._collector.collect(self.agent, noise)
            except WorkerError as error:
                if not isinstance(error, WorkerDiedError | WorkerTimeoutError):  # it would raise again
                    cause = error.__cause__
                    raise EnvError(str(cause if isinstance(cause, EnvError) else error)) from error
                if attempt == MAX_RECOVERIES:
                    raise
                warnings.warn(
                    f"a worker failed ({error}); workers are started again and the rollout is repeated, "
                    "nothing is lost", RuntimeWarning, stacklevel=3,
                )  # fmt: skip
                self.close()
        raise AssertionError("unreachable")

    def _start(self, total_timesteps: int | None) -> Collector:
        self.workers = self._choose_workers(total_timesteps)
        collector = self._make_collector()
        collector.reset()
        if self._resume and self.agent.iteration > 0:
            histories = [self._env_actions(i) for i in range(self.n_envs)]
            now = collector.resume(self.log.started.tolist(), histories)
            if self._now is not None:
                strangers = [i for i in range(self.n_envs) if not np.array_equal(now[i], self._now[i])]
                if strangers:
                    logger.warning(
                        "env %s did not come back to its state when its episode was played again: the "
                        "environment is not a function of its seed and actions. A new episode begins there.",
                        strangers,
                    )
                    collector.restart(strangers)
                    self.log.restarted(strangers)
        self._resume = False
        return collector

    def _env_actions(self, i: int) -> list[Any]:
        rows = self.log.actions_since_reset(i)
        return self.action_rows.to_env(rows) if len(rows) else []

    def _make_collector(self) -> Collector:
        masked = self.facts.masked
        if self.workers == 0:
            return EnvSlice([self.factory(i) for i in range(self.n_envs)], masked=masked)
        learner = self.agent.learner
        if isinstance(learner, CompiledLearner):
            return WorkerSteps(
                self.factory, self.facts, n_envs=self.n_envs, n_steps=self.config.n_steps,
                num_workers=self.workers, network=learner.compiled, start_method=self.start_method,
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
        if self.backend == "serial" or (self.backend == "auto" and self.num_workers == 0):
            return 0
        workers = min(self.num_workers or available_cpus(), self.n_envs)
        if self.backend == "process" or self.num_workers is not None:
            return max(1, workers)
        chosen = workers if workers_pay(
            self.facts.step_seconds, self.config.n_steps, self.n_envs, workers,
            compiled=self.path == "compiled", steps=total_timesteps or 1_000_000,
        ) else 0  # fmt: skip
        logger.info(
            "a step takes %.0f us: %s", 1e6 * self.facts.step_seconds,
            f"{chosen} workers" if chosen else "stepping in this process",
        )  # fmt: skip
        return chosen

    def _network_name(self) -> str:
        network = self.agent.learner.network
        own = getattr(network, "module", None)
        return type(own if own is not None else network).__name__

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """One torch thread for small networks on the CPU, where more only wait for each other."""
        before = torch.get_num_threads()
        if self.path == "compiled" or not self._single_thread or self.device != "cpu" or before == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


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


def choose_device(device: str) -> str:
    """The device to use; "auto" is CUDA, then Apple's, then the CPU.

    Raises:
        ConfigError: it is not there, or no device.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    name = device.partition(":")[0]
    if name not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"device must be cpu, cuda, mps or auto, got {device!r}")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[name]:
        raise ConfigError(f"device {device!r} is not available here; use --device auto")
    return device


def read_config(values: Mapping[str, Any]) -> PPOConfig:
    """The config in a checkpoint; unknown settings are an error."""
    _check_settings(values)
    plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return PPOConfig(**plain)


def _check_settings(settings: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(PPOConfig)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"no PPO setting named {name!r}.{did_you_mean(name, known)}")


def _check_call(
    n_envs: int, backend: str, num_workers: int | None, start_method: str | None, settings: Mapping[str, Any]
) -> None:
    _check_settings(settings)
    if n_envs < 1:
        raise ConfigError(f"n_envs must be at least 1, got {n_envs}")
    if backend not in BACKENDS:
        raise ConfigError(f"no backend named {backend!r}.{did_you_mean(backend, BACKENDS)}")
    if num_workers is not None and num_workers < 0:
        raise ConfigError(f"num_workers must not be negative, got {num_workers}")
    if backend == "process" and num_workers == 0:
        raise ConfigError("backend='process' needs at least one worker, got num_workers=0")
    have = multiprocessing.get_all_start_methods()
    if start_method is not None and start_method not in have:
        raise ConfigError(
            f"this system has no start method {start_method!r}.{did_you_mean(start_method, have)}"
        )


def _plain(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Environment arguments as JSON can hold them; others as their text, for the record only."""
    simple = (str, int, float, bool, type(None))
    return {
        key: cast(Any, value if isinstance(value, simple) else repr(value)) for key, value in kwargs.items()
    }
