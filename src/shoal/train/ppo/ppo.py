"""PPO on parallel environments: collect, estimate, update, report, until enough steps are seen."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from shoal.core.data import check_flags, reward_of
from shoal.core.errors import OTHER_CHECKPOINT, ConfigError, EnvError, reading
from shoal.core.executors import Closing
from shoal.core.seeding import stream
from shoal.core.workers import StartMethod
from shoal.envs.catalogue import Wrapper, wrapper_name
from shoal.rollout.arrays.spaces import AS_FLOAT32
from shoal.rollout.arrays.steps import SeededEpisodes, mask_of
from shoal.train.ppo.agent import PPOAgent
from shoal.train.ppo.checkpoint import (
    Checkpoint,
    check_same,
    checkpoint_folder,
    describe_policy,
    load_run,
    save_checkpoint,
)
from shoal.train.ppo.collect import EpisodeLog, Experience, mean_of
from shoal.train.ppo.config import (
    LARGEST,
    PPOConfig,
    check_places,
    check_settings,
    check_whole,
    choose_device,
    read_config,
)
from shoal.train.ppo.envs import EnvFactory, EnvSource, try_env
from shoal.train.ppo.learner import CompiledLearner
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
    bit with any backend and number of workers, killed and resumed or not.

    Args:
        env: what `shoal.envs.resolve` takes: a name, `module:Class`, or a function that returns an environment.
        n_envs: how many of them; None for the preset's, else 8.
        seed: of the run; all randomness is derived from it.
        config: how to learn; single settings may also be given by keyword (`learning_rate=1e-3`), on top of it or of
            the preset.
        network: an own `nn.Module` (see `OwnNetwork`); None builds one for the spaces.
        backend: "serial" steps all envs in this process, "process" in workers, "auto" measures and chooses.
        num_workers: worker processes; None for one per core.
        start_method: of the workers: "spawn", "forkserver" or "fork"; None for the safe default.
        device: "cpu", "cuda", "mps", or "auto" for the best there is.
        path: "compiled" for the kernels, "torch" for autograd, "auto" for kernels where they fit.
        env_kwargs: for the environment.
        wrappers: put around each environment, the first innermost: callables, or "module:Name".
        preset: "auto" takes the settings tuned for the environment if there are any, "none" takes none, or a name of
            `PRESETS`; a `config` takes the place of its settings. `preset` says afterwards which one it is.
        atari: show a game of ale_py as the literature does; None for what the preset says.
        frame_stack: show the last so many observations as one; None for what the preset says.
    """

    def __init__(
        self, env: EnvSource, *, n_envs: int | None = None, seed: int = 0, config: PPOConfig | None = None,
        network: nn.Module | None = None, backend: str = "auto", num_workers: int | None = None,
        start_method: StartMethod | None = None, device: str = "cpu", path: str = "auto",
        env_kwargs: Mapping[str, Any] | None = None, wrappers: Sequence[Wrapper] = (), preset: str = "auto",
        atari: bool | None = None, frame_stack: int | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        tuned = preset_for(env if isinstance(env, str) else "", preset) or NO_PRESET
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
        self.factory = EnvFactory(
            env, seed, {**tuned.env_kwargs, **(env_kwargs or {})},
            wrappers=tuple(wrappers) or tuned.wrappers,
            atari=tuned.atari if atari is None else atari,
            frame_stack=tuned.frame_stack if frame_stack is None else frame_stack, squash=self.config.squash,
        )  # fmt: skip
        self.facts = try_env(self.factory)
        self.device = choose_device(device)
        self.agent = PPOAgent(
            self.facts.observation_space, self.facts.action_space, self.config, n_envs=n_envs, seed=seed,
            network=network, path=path, device=self.device,
        )  # fmt: skip
        self.obs_rows, self.action_rows = self.agent.obs_rows, self.agent.action_rows
        self._single_thread = sum(p.numel() for p in self.network.parameters()) < 300_000
        self.log = EpisodeLog(n_envs)
        self._booked = 0  # updates whose rollouts are in the log
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
        if total_timesteps is None and num_episodes is None:
            raise ConfigError("say how long to train: total_timesteps or num_episodes")
        for name, given in (("total_timesteps", total_timesteps), ("num_episodes", num_episodes)):
            if given is not None and not given >= 1:
                raise ConfigError(f"{name} must be at least 1, got {given}")
        self._refuse_torn()
        seconds, first_step = 0.0, self.log.n_steps
        while self.progress(total_timesteps, num_episodes) < 1.0:
            progress = self.progress(total_timesteps, num_episodes)
            started, remembered = time.perf_counter(), self.agent.remembered()
            try:
                with self._threads():
                    rollout = self._experience.collect(total_timesteps)
                    metrics = self.agent.improve(rollout, progress)
                ended = self.log.add(rollout)
                self._experience.now = rollout.obs[-1]
            except BaseException:  # the environments went on, the log did not: they are played again from it
                self.agent.memory = remembered  # first: a second Ctrl-C may cut the closing short
                self._experience.close()
                raise
            seconds += time.perf_counter() - started
            row = {
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
            self._booked = self.agent.iteration  # no sooner: what is saved on Ctrl-C has told its row
            yield row

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
                    self.agent.alone(), env, episodes=episodes, deterministic=deterministic, frames=frames
                )
        finally:
            env.close()

    def save(self, root: Path | str, **extra: Any) -> Path:
        """Write `root/step_…`, from which `load` continues exactly; returns the folder.

        Episodes longer than 10,000 steps are broken off here, in this run too: playing them again would take
        too long.

        Raises:
            ConfigError: Ctrl-C came between an update and its books: the last checkpoint is what there is.
        """
        self._refuse_torn()
        if long := self.log.longer_than(REPLAY_LIMIT):
            self._experience.break_off(long)
        return save_checkpoint(checkpoint_folder(root, self.log.n_steps), self.checkpoint(**extra))

    def _refuse_torn(self) -> None:
        if not self.is_whole:
            raise ConfigError(
                "the run was interrupted between an update and its books; load the last checkpoint to go on"
            )

    @property
    def is_whole(self) -> bool:
        """Whether weights and episodes are of one moment; only Ctrl-C at a rare moment makes them differ."""
        return self._booked == self.agent.iteration

    def checkpoint(self, **extra: Any) -> Checkpoint:
        """All of the run, as it would be saved."""
        weights, optimizer, statistics = self.agent.state()
        values, episodes = self.log.state()
        if self._experience.now is not None:
            episodes["now"] = self._experience.now
        if self.agent.memory is not None:
            episodes["memory"] = self.agent.memory.copy()
        policy = describe_policy(
            self.facts.observation_space, self.facts.own_action_space, self.network, self.config,
            self.agent.obs_norm is not None, self.factory.name, _plain(self.factory.kwargs),
            wrappers=[wrapper_name(wrapper) for wrapper in self.factory.wrappers], atari=self.factory.atari,
            frame_stack=self.factory.frame_stack,
        )  # fmt: skip
        training = {
            "config": dataclasses.asdict(self.config), "seed": self.seed, "n_envs": self.n_envs,
            "begun": self._experience.collector is not None or self._experience.goes_on, **values, **extra,
        }  # fmt: skip
        if told := [key for key, value in self.factory.kwargs.items() if not _is_json(value)]:
            training["env_kwargs_told"] = told  # as text, which no environment is made with
        return Checkpoint(policy, training, weights, optimizer, statistics, episodes)

    @classmethod
    def load(
        cls, checkpoint: Path | str, env: EnvSource | None = None, *, network: nn.Module | None = None,
        backend: str = "auto", num_workers: int | None = None, start_method: StartMethod | None = None,
        device: str = "cpu", path: str = "auto", env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Wrapper] | None = None,
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
            env_kwargs: those of the run if not given; needed when they are not numbers, text, lists or dicts.
            wrappers: those of the run if not given; needed when they are not of an importable module.

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
        ppo = cls(
            env if env is not None else policy["env"], n_envs=training["n_envs"], seed=training["seed"],
            config=read_config(training["config"]), network=network, backend=backend,
            num_workers=num_workers, start_method=start_method, device=device, path=path,
            env_kwargs=env_kwargs if env_kwargs is not None else policy["env_kwargs"],
            wrappers=policy.get("wrappers", ()) if wrappers is None else wrappers, preset="none",
            atari=policy.get("atari", False), frame_stack=policy.get("frame_stack", 0),
        )  # fmt: skip
        check_same(saved, ppo.checkpoint())
        with reading(checkpoint, OTHER_CHECKPOINT):
            ppo.agent.load_state(saved.weights, saved.optimizer, saved.statistics)
            ppo.log.load_state(training, saved.episodes)
            if ppo.agent.memory is not None:
                ppo.agent.memory = saved.episodes["memory"].copy()
        ppo._booked = ppo.agent.iteration
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


class Evaluation(NamedTuple):
    """How a policy did."""

    returns: list[float]
    lengths: list[int]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Population deviation of the returns."""
        return float(np.std(self.returns))


LONGEST_EVALUATION = 100_000
"""Steps of one episode; an error beyond, since an environment without end would never return."""


def evaluate(
    player: PPOAgent, env: SeededEpisodes, *, episodes: int, deterministic: bool, frames: list[Any] | None
) -> Evaluation:  # fmt: skip
    """Play episodes 0, 1, … of `env`'s stream and report their returns.

    Args:
        player: the policy, for one env.
        env: a single environment that nothing else uses.
        episodes: how many.
        deterministic: the likeliest action instead of a drawn one.
        frames: filled with what `env.render()` shows, for a video.
    """
    check_whole("episodes", episodes, 1)
    rows, actions = player.obs_rows, player.action_rows
    obs = np.zeros((1, rows.size), rows.dtype)
    shape = (1, actions.size)
    chosen, logprob = np.zeros(shape, actions.dtype), np.zeros(1, np.float32)
    returns, lengths = [], []
    for episode in range(episodes):
        env.episode = episode
        observation, info = env.reset()
        player.forget(0)
        chance = stream(env.seed, env.stream, "actions", episode)
        total, length, masks = 0.0, 0, np.zeros((1, 0), np.uint8)
        masked = actions.is_discrete and "action_mask" in info
        while True:
            if frames is not None:
                frames.append(env.render())
            rows.encode_one(observation, obs[0])
            if not np.isfinite(rows.numbers(obs)).all():
                raise EnvError(
                    f"evaluation episode {episode}, step {length}: the observation must be finite ({AS_FLOAT32})"
                )
            if masked:
                masks = mask_of(info, actions.n_parameters, 0).reshape(1, -1).astype(np.uint8)
                if any(actions.forbidden(masks)):
                    raise EnvError(
                        f"evaluation episode {episode}, step {length}: the action mask allows no action"
                    )
            player.act(obs, masks, player.draw(chance, 1), chosen, logprob, deterministic)
            try:
                observation, reward, terminated, truncated, info = env.step(actions.to_env(chosen)[0])
                check_flags(terminated, truncated)
                paid = reward_of(reward)
            except Exception as error:  # an env may raise whatever it likes
                raise EnvError(
                    f"evaluation failed in episode {episode}, step {length}, action {chosen[0].tolist()}: {error!r}"
                ) from error
            if not math.isfinite(paid):
                raise EnvError(
                    f"evaluation episode {episode}, step {length}: reward must be finite, got {paid}"
                )
            total, length = total + paid, length + 1
            if terminated or truncated:
                break
            if length >= LONGEST_EVALUATION:
                raise EnvError(
                    f"evaluation episode {episode} did not end in {LONGEST_EVALUATION} steps; give the "
                    "environment a time limit (gymnasium.wrappers.TimeLimit)"
                )
        returns.append(total)
        lengths.append(length)
    return Evaluation(returns, lengths)


def _plain(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Environment arguments as JSON can hold them; others as their text, for the record only."""
    return {key: value if _is_json(value) else repr(value) for key, value in kwargs.items()}


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return isinstance(value, str | int | float | bool | type(None))
