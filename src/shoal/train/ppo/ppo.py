"""PPO on parallel environments: collect, estimate, update, report, until enough steps are seen."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from gymnasium.envs.registration import EnvSpec
from torch import nn

from shoal.core.errors import OTHER_CHECKPOINT, ConfigError, reading
from shoal.core.executors import Closing
from shoal.core.workers import StartMethod
from shoal.envs.catalogue import Wrapper, names_batch, wrapper_name
from shoal.maths.updates import decayed
from shoal.train.ppo.agent import PPOAgent
from shoal.train.ppo.checkpoint import (
    Checkpoint,
    check_same,
    checkpoint_folder,
    describe_policy,
    load_run,
    save_checkpoint,
)
from shoal.train.ppo.collect import Episode, EpisodeLog, Experience, mean_of
from shoal.train.ppo.config import (
    LARGEST,
    PPOConfig,
    check_places,
    check_settings,
    check_whole,
    choose_device,
    read_config,
)
from shoal.train.ppo.ctrl_c import CtrlCWaits
from shoal.train.ppo.envs import EnvFactory, EnvSource, try_env
from shoal.train.ppo.evaluation import Evaluation, evaluate
from shoal.train.ppo.learner import CompiledLearner
from shoal.train.ppo.native import BatchFactory
from shoal.train.ppo.networks import ActorCritic
from shoal.train.ppo.presets import NO_PRESET, preset_for

logger = logging.getLogger(__name__)
Metrics = dict[str, float]
Callback = Callable[[Metrics], bool | None]

REPLAY_LIMIT = 10_000
"""Longer episodes are broken off (and bootstrapped) at a checkpoint: resuming would take too long."""


class PPO(Closing):
    """Proximal policy optimisation of one policy on `n_envs` environments.

    `PPO("CartPole-v1", n_envs=8, seed=0).learn(100_000)` trains; the same seed gives the same weights bit for
    bit with any number of workers, killed and resumed or not. On a native batch a resumed run begins new episodes.

    Args:
        env: what `shoal.envs.resolve` takes: a name, `module:Class`, or a function that returns an environment; or what
            `make_vec(backend="native")` takes.
        n_envs: how many of them; None for the preset's, else 8.
        seed: of the run; all randomness is derived from it.
        total_timesteps: length of the run, over which schedules run; None for as much as `learn` was asked for.
        config: how to learn; single settings may also be given by keyword (`learning_rate=1e-3`), on top of it or of
            the preset.
        network: an own `nn.Module` (see `OwnNetwork`); None builds one for the spaces.
        backend: "serial" steps all envs in this process, "process" in workers, "native" is the environment's own
            batch (another implementation), "auto" takes that for names as "ale:Pong-v5", else measures and chooses.
        num_workers: worker processes; None for one per core.
        start_method: of the workers: "spawn", "forkserver" or "fork"; None for the safe default.
        device: "cpu", "cuda", "mps", or "auto" for the best there is.
        path: "compiled" for the kernels, "torch" for autograd, "auto" for kernels where they fit.
        env_kwargs: for the environment.
        wrappers: put around each environment, the first innermost: callables, or "module:Name".
        preset: "auto" takes the settings tuned for the environment if there are any and `env` is its id or spec (what
            a function makes may be wrapped), "none" takes none, or a name of `PRESETS`; a `config` takes the place of
            its settings. `preset` says afterwards which one it is.
        atari: show a game of ale_py as the literature does; None for what the preset says.
        frame_stack: show the last so many observations as one; None for what the preset says.
    """

    def __init__(
        self, env: EnvSource, *more: Any, n_envs: int | None = None, seed: int = 0,
        total_timesteps: int | None = None, config: PPOConfig | None = None,
        network: nn.Module | None = None, backend: str = "auto", num_workers: int | None = None,
        start_method: StartMethod | None = None, device: str = "cpu", path: str = "auto",
        env_kwargs: Mapping[str, Any] | None = None, wrappers: Sequence[Wrapper] = (), preset: str = "auto",
        atari: bool | None = None, frame_stack: int | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        if more:
            raise ConfigError(
                "PPO takes one argument without a name, the environment, and builds the network for it: "
                f"PPO({more[0]!r}), got PPO({', '.join(map(repr, (env, *more)))})"
            )
        named = env if isinstance(env, str) else env.id if isinstance(env, EnvSpec) else ""
        backend = "native" if backend == "auto" and names_batch(env) else backend
        native = backend == "native"
        tuned = preset_for(named, preset, native=native) or NO_PRESET
        n_envs = tuned.n_envs if n_envs is None else n_envs
        check_settings(settings)
        self.n_envs = n_envs = check_whole("n_envs", n_envs, 1, LARGEST)
        self.seed = seed = check_whole("seed", seed)
        check_places(backend, num_workers, start_method)
        base = config if config is not None else PPOConfig(**tuned.settings)
        self.config = dataclasses.replace(base, **settings)
        self.preset = tuned.name if config is None else None
        if self.preset is not None:
            told = "%s with the settings of its preset (%s); preset='none' takes none"
            logger.info(told, env, tuned.source)
        self.factory = (BatchFactory if native else EnvFactory)(
            env, seed, {**tuned.env_kwargs, **(env_kwargs or {})},
            wrappers=tuple(wrappers) or tuned.wrappers,
            atari=tuned.atari if atari is None else atari,
            frame_stack=tuned.frame_stack if frame_stack is None else frame_stack, squash=self.config.squash,
        )  # fmt: skip
        self.facts = try_env(self.factory)
        if not named and config is None and preset == "auto" and preset_for(self.facts.id):
            told = "what a function makes has the default settings: preset=%r takes those tuned for it"
            logger.info(told, self.facts.id)
        self.device = choose_device(device)
        self.agent = PPOAgent(
            self.facts.observation_space, self.facts.action_space, self.config, n_envs=n_envs, seed=seed,
            network=network, path=path, device=self.device,
        )  # fmt: skip
        self.obs_rows, self.action_rows = self.agent.obs_rows, self.agent.action_rows
        self._single_thread = sum(p.numel() for p in self.network.parameters()) < 300_000
        self.total_timesteps = total_timesteps
        if total_timesteps is not None:
            check_whole("total_timesteps", total_timesteps, 1)
        self._decayed = 0.0  # how far schedules are on their way, from 0 to 1
        self.log = EpisodeLog(n_envs, replayable=not native)
        self._experience = Experience(
            self.factory, self.facts, self.agent, self.log, backend=backend, num_workers=num_workers,
            start_method=start_method,
        )  # fmt: skip

    @property
    def network(self) -> ActorCritic:
        """The torch module with the current weights."""
        return self.agent.learner.network

    @property
    def workers(self) -> int:
        """Worker processes that step the environments; 0 when this process does."""
        return self._experience.workers

    @property
    def path(self) -> str:
        """Which learner it is: `compiled` or `torch`."""
        return "compiled" if isinstance(self.agent.learner, CompiledLearner) else "torch"

    def learn(
        self, total_timesteps: int | None = None, *, num_episodes: int | None = None,
        callback: Callback | None = None,
    ) -> PPO:  # fmt: skip
        """Train for `total_timesteps` more env steps, or until `num_episodes` more episodes have ended.

        Schedules run over the `total_timesteps` of the class, or else over all that was asked for so far. A rate that
        has decayed does not rise again, so a second call without it trains on with rates near 0, and a warning says so.
        Ctrl-C waits for the update in progress, after which the run can be saved or go on; a second one ends at once,
        and then the last checkpoint is what there is.

        Args:
            total_timesteps: env steps of all environments together; the last rollout may exceed them.
            num_episodes: finished episodes.
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
        _check_limits(total_timesteps, num_episodes)
        steps = None if total_timesteps is None else self.log.n_steps + total_timesteps
        episodes = None if num_episodes is None else self.log.n_episodes + num_episodes
        length = (steps, episodes) if self.total_timesteps is None else (self.total_timesteps, None)
        self._warn_of_decayed(length)
        yield from self._train(steps, episodes, lambda: max(self._decayed, self.progress(*length)))

    def updates_until(self, total_timesteps: int | None, num_episodes: int | None) -> Iterator[Metrics]:
        """Train until the run has seen so many env steps, or episodes, in all; schedules run over them."""
        _check_limits(total_timesteps, num_episodes)
        yield from self._train(
            total_timesteps, num_episodes, lambda: self.progress(total_timesteps, num_episodes)
        )

    def _warn_of_decayed(self, length: tuple[int | None, int | None]) -> None:
        """Say it where a schedule ended with an earlier call, and so holds its rate in this one."""
        schedules = ("lr_schedule", "clip_schedule", "ent_schedule")
        names = [name for name in schedules if getattr(self.config, name) != "constant"]
        now = self.progress(*length)
        goes_on_at = max(now, self._decayed)
        if names and (now < self._decayed or now == 1.0):
            rate = decayed(self.config.learning_rate, self.config.lr_schedule, goes_on_at)
            logger.warning(
                "this call of learn begins with schedules (%s) that an earlier one has run to %.0f%% of their way, and "
                "they do not go back: the learning rate starts at %.3g. For a run in several calls, state the length "
                "of the whole once: PPO(..., total_timesteps=N), or PPO.load(..., total_timesteps=N)",
                ", ".join(names), 100 * goes_on_at, rate,
            )  # fmt: skip

    def _train(
        self, total_timesteps: int | None, num_episodes: int | None, share: Callable[[], float]
    ) -> Iterator[Metrics]:
        self.agent.refuse_torn()
        seconds, first_step, ctrl_c = 0.0, self.log.n_steps, CtrlCWaits()
        while self.progress(total_timesteps, num_episodes) < 1.0:
            self._decayed = share()
            started = time.perf_counter()
            with ctrl_c:
                ended, metrics = self._update(total_timesteps)
            seconds += time.perf_counter() - started
            yield {
                "iteration": self.agent.iteration,
                "steps": self.log.n_steps,
                "episodes": self.log.n_episodes,
                "seconds": seconds,
                "steps_per_second": (self.log.n_steps - first_step) / max(seconds, 1e-9),
                **mean_of(ended),
                "reward_mean": self.log.mean_reward,
                "length_mean": self.log.mean_length,
                "n_completed_episodes": len(ended),
                "n_envs": self.n_envs,
                **metrics,
            }
            ctrl_c.pass_on()

    def _update(self, total_timesteps: int | None) -> tuple[list[Episode], Metrics]:
        """Collect, estimate and learn once; the episodes that ended, and the update's metrics."""
        memory = copy(self.agent.memory)
        try:
            with self._threads():
                rollout = self._experience.collect(total_timesteps)
                metrics = self.agent.improve(rollout, self._decayed)
        except BaseException:  # the environments went on, the log did not: they are played again from it
            self.agent.memory = memory
            self._experience.close()
            raise
        self._experience.now = rollout.obs[-1]
        return self.log.add(rollout), metrics

    def progress(self, total_timesteps: int | None, num_episodes: int | None) -> float:
        """The finished share of the run."""
        by_steps = self.log.n_steps / total_timesteps if total_timesteps else 0.0
        by_episodes = self.log.n_episodes / num_episodes if num_episodes else 0.0
        return min(1.0, max(by_steps, by_episodes))

    def evaluate(
        self, episodes: int = 10, *, deterministic: bool = True, frames: list[Any] | None = None,
        seed: int | None = None,
    ) -> Evaluation:  # fmt: skip
        """Play on a single environment of its own, with seeds of its own; training does not notice.

        Args:
            episodes: how many.
            deterministic: the likeliest action instead of a drawn one.
            frames: filled with what the environment renders at every step.
            seed: of the episodes; the run's own if not given.
        """
        factory = dataclasses.replace(self.factory, stream="eval", seed=self.seed if seed is None else seed)
        env = factory(0) if frames is None else factory.rendered()
        try:
            with self._threads():
                return evaluate(
                    self.agent.alone(), env, episodes=episodes, deterministic=deterministic, frames=frames
                )
        finally:
            env.close()

    def save(self, root: Path | str, **extra: Any) -> Path:
        """Write `root/step_…`, from which `load` continues exactly; returns the folder.

        Episodes longer than 10,000 steps are broken off here, in this run too: playing them again would take
        too long.

        Raises:
            ConfigError: an update ended halfway (a second Ctrl-C, or it diverged): load the last checkpoint.
        """
        if (long := self.log.longer_than(REPLAY_LIMIT)) and not self.factory.native:
            self._experience.break_off(long)
        return save_checkpoint(checkpoint_folder(root, self.log.n_steps), self.checkpoint(**extra))

    def checkpoint(self, **extra: Any) -> Checkpoint:
        """All of the run, as it would be saved."""
        self.agent.refuse_torn()
        weights, optimizer, statistics = self.agent.state()
        values, episodes = self.log.state()
        if self._experience.now is not None:
            episodes["now"] = self._experience.now
        if self.agent.memory is not None:
            episodes["memory"] = self.agent.memory.copy()
        policy = describe_policy(
            self.facts.observation_space, self.facts.own_action_space, self.network, self.config,
            self.agent.obs_norm is not None, self.factory.name, _plain(self.factory.kwargs),
            native=self.factory.native, wrappers=[wrapper_name(wrapper) for wrapper in self.factory.wrappers],
            atari=self.factory.atari, frame_stack=self.factory.frame_stack, masked=self.facts.masked,
        )  # fmt: skip
        training = {
            "config": dataclasses.asdict(self.config), "seed": self.seed, "n_envs": self.n_envs,
            "begun": self._experience.collector is not None or self._experience.goes_on,
            "total_timesteps": self.total_timesteps, "decayed": self._decayed, **values, **extra,
        }  # fmt: skip
        if told := [key for key, value in self.factory.kwargs.items() if not _is_json(value)]:
            training["env_kwargs_told"] = told  # as text, which no environment is made with
        return Checkpoint(policy, training, weights, optimizer, statistics, episodes)

    @classmethod
    def load(
        cls, checkpoint: Path | str, env: EnvSource | None = None, *, network: nn.Module | None = None,
        backend: str = "auto", num_workers: int | None = None, start_method: StartMethod | None = None,
        device: str = "cpu", path: str = "auto", env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Wrapper] | None = None, total_timesteps: int | None = None,
    ) -> PPO:  # fmt: skip
        """Continue the run that `save` wrote, bit for bit; on a native batch with new episodes.

        Args:
            checkpoint: its folder, or a folder of them (the newest is taken).
            env: needed when the run's environment was given as a function; must be the same.
            network: needed when the run had its own; the weights are put into it.
            backend: where environments run; free to differ from before.
            num_workers: likewise.
            start_method: likewise.
            device: likewise.
            path: "compiled", "torch" or "auto"; only the same one continues bit for bit.
            env_kwargs: those of the run if not given; needed when they are not numbers, text, lists or dicts.
            wrappers: those of the run if not given; needed when they are not of an importable module.
            total_timesteps: the run's new length, those before included; schedules stand where they are in it.

        Raises:
            DataError: the checkpoint is broken.
            ConfigError: it belongs to another environment or network.
        """
        saved = load_run(checkpoint)
        training, policy = saved.training, saved.policy
        if env_kwargs is None and (told := training.get("env_kwargs_told")):
            raise ConfigError(
                f"a checkpoint holds only numbers, text, lists and dicts of an environment's arguments, and this run's "
                f"{', '.join(told)} had others; give them again: env_kwargs=..."
            )
        if backend == "auto" and policy.get("native"):
            backend = "native"
        ppo = cls(
            env if env is not None else policy["env"], n_envs=training["n_envs"], seed=training["seed"],
            config=read_config(training["config"]), network=network, backend=backend,
            num_workers=num_workers, start_method=start_method, device=device, path=path,
            env_kwargs=env_kwargs if env_kwargs is not None else policy["env_kwargs"],
            wrappers=policy.get("wrappers", ()) if wrappers is None else wrappers, preset="none",
            atari=policy.get("atari", False), frame_stack=policy.get("frame_stack", 0),
            total_timesteps=total_timesteps or training["total_timesteps"],
        )  # fmt: skip
        check_same(saved, ppo.checkpoint())
        with reading(checkpoint, OTHER_CHECKPOINT):
            ppo.agent.load_state(saved.weights, saved.optimizer, saved.statistics)
            ppo.log.load_state(training, saved.episodes)
            ppo._decayed = float(training["decayed"]) if total_timesteps is None else 0.0
            if ppo.agent.memory is not None:
                ppo.agent.memory = saved.episodes["memory"].copy()
        ppo._experience.now = saved.episodes.get("now")
        ppo._experience.goes_on = bool(training["begun"])
        return ppo

    def close(self) -> None:
        """End workers and environments; the policy stays usable."""
        self._experience.close()

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


def _check_limits(total_timesteps: int | None, num_episodes: int | None) -> None:
    if total_timesteps is None and num_episodes is None:
        raise ConfigError("say how long to train: total_timesteps or num_episodes")
    for name, given in (("total_timesteps", total_timesteps), ("num_episodes", num_episodes)):
        if given is not None and not given >= 1:
            raise ConfigError(f"{name} must be at least 1, got {given}")


def _plain(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Environment arguments as JSON can hold them; others as their text, for the record only."""
    return {key: value if _is_json(value) else repr(value) for key, value in kwargs.items()}


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return isinstance(value, str | int | float | bool | type(None))
