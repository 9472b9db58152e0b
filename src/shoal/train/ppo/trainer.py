"""`PPOTrainer`: PPO driven by the caller's loop, an episode or a vectorised rollout at a time.

For whole runs with workers, evaluation and exact resume there is `PPO`; the mathematics is the same object.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from torch import nn

from shoal.core.errors import OTHER_CHECKPOINT, ConfigError, reading
from shoal.core.seeding import derive_seed, stream
from shoal.train.ppo.agent import PPOAgent
from shoal.train.ppo.arrays.steps import EnvSlice, SeededEpisodes, StepRollout, VectorSteps
from shoal.train.ppo.checkpoint import (
    Checkpoint,
    checkpoint_folder,
    describe_policy,
    load_checkpoint,
    other_shapes,
    read_space,
    save_checkpoint,
)
from shoal.train.ppo.collect import EpisodeLog, mean_of
from shoal.train.ppo.config import PPOConfig, check_whole, choose_device, read_config
from shoal.train.ppo.ctrl_c import CtrlCWaits
from shoal.train.ppo.policy import mask_rows, observation_rows

Array = np.ndarray
LONGEST_EPISODE = 10_000


class Selected(NamedTuple):
    """One action and what the policy thinks of it."""

    action: Any
    logprob: float
    value: float


@dataclasses.dataclass(slots=True)
class Known:
    """What is under way in environments that a trainer learns from."""

    collector: Any  # an EnvSlice or VectorSteps, between calls without its `envs`
    log: EpisodeLog
    gone: weakref.ref[Any]  # drops this with the caller's last reference to them
    first: int  # the number of the first episode, where it is a single env
    memory: Array | None = None  # [N, S] what a recurrent policy remembers
    sums: Array | None = None  # [N] of the rewards, where they are normalised


class HasVectorEnv(Protocol):
    """Something around a vector env, such as `shoal.vector.ParallelEnv`."""

    envs: VectorEnv


class PPOTrainer:
    """Learns a policy from environments that the caller owns.

    A call that fails changes nothing; its environments begin new episodes in the next call. Ctrl-C waits for the end of
    an update; a second one ends it halfway, and then all but `load` is refused.

    Args:
        network: an `nn.Module` (see `OwnNetwork`), or None for one that fits the spaces.
        learning_rate: of Adam, before its schedule.
        device: "cpu", "cuda", "mps" or "auto".
        seed: all randomness is derived from it.
        num_episodes: the length of the run, for schedules; None keeps them at their start.
        config: all settings; single ones may also be given by keyword.
        observation_space: needed only to use the policy before the first environment is seen.
        action_space: likewise.
        path: "compiled", "torch" or "auto".
    """

    def __init__(
        self, network: nn.Module | None = None, *, learning_rate: float | None = None, device: str = "cpu",
        seed: int = 0, num_episodes: int | None = None, config: PPOConfig | None = None,
        observation_space: gym.Space | None = None, action_space: gym.Space | None = None, path: str = "auto",
        **settings: Any,
    ) -> None:  # fmt: skip
        if learning_rate is not None:
            settings["learning_rate"] = learning_rate
        base = config or PPOConfig()
        self.config = read_config({**dataclasses.asdict(base), **settings})
        _refuse_squashing(self.config)
        self.device, self.path = choose_device(device), path
        self.seed = check_whole("seed", seed)
        self.total_episodes = None if num_episodes is None else check_whole("num_episodes", num_episodes, 1)
        self._own_network = network
        self._agent: PPOAgent | None = None
        self._spaces: tuple[gym.Space, gym.Space] | None = None
        self._known: dict[int, Known] = {}  # by id of the env
        self._masked = False  # whether the envs give action masks
        self._selecting: PPOAgent | None = None  # who answers `select_action`, with a memory of its own
        self.log = EpisodeLog(1, replayable=False)  # all episodes, whatever env they came from
        if (observation_space is None) != (action_space is None):
            raise ConfigError("give both observation_space and action_space, or none")
        if observation_space is not None and action_space is not None:
            self._meet(observation_space, action_space, 1)

    @property
    def agent(self) -> PPOAgent:
        """The policy and its statistics.

        Raises:
            ConfigError: there is none yet, or an update ended halfway (a second Ctrl-C, or it diverged).
        """
        if self._agent is None:
            raise ConfigError(
                "the trainer knows no spaces yet: train an episode first, or give "
                "observation_space and action_space"
            )
        self._agent.refuse_torn()
        return self._agent

    @property
    def num_episodes(self) -> int:
        """Episodes finished so far."""
        return self.log.n_episodes

    def train_episode(self, env: gym.Env) -> dict[str, float]:
        """Play one episode of a single environment, then update; returns the metrics.

        An episode longer than 10,000 steps (or the env's time limit) is learned from in parts.
        """
        if not isinstance(env, gym.Env):
            raise ConfigError(
                f"train_episode takes one gymnasium.Env, got {type(env).__name__}; a vector env goes into "
                "train_episode_vectorized"
            )
        limit = env.spec.max_episode_steps if env.spec is not None else None
        n_steps = min(limit or LONGEST_EPISODE, LONGEST_EPISODE)
        return self._train(env, self._take_env, 1, n_steps, until_done=True)

    def train_episode_vectorized(self, vec_env: VectorEnv | HasVectorEnv) -> dict[str, float]:
        """Collect `n_steps` of every environment, then update; returns the metrics.

        Works with `make_vec`, `ParallelEnv` and every autoreset mode. `n_completed_episodes` says
        how many episodes ended meanwhile.
        """
        envs = vec_env if isinstance(vec_env, VectorEnv) else getattr(vec_env, "envs", None)
        if not isinstance(envs, VectorEnv):  # a ParallelEnv is one with another face
            raise ConfigError(
                f"train_episode_vectorized takes a vector env, got {type(vec_env).__name__}; a single environment "
                "goes into train_episode"
            )
        return self._train(envs, self._take_vector_env, envs.num_envs, self.config.n_steps)

    def _take_env(self, env: gym.Env, known: Known | None) -> Any:
        seeded = SeededEpisodes(env, self.seed, 0)
        if known is not None:
            seeded.episode = known.first + int(known.log.started[0])
            known.collector.envs = [seeded]
            return known.collector
        self._meet(env.observation_space, env.action_space, 1)
        seeded.episode = self.num_episodes
        _, info = seeded.reset()
        seeded.episode -= 1
        return EnvSlice([seeded], masked="action_mask" in info)

    def _take_vector_env(self, vec_env: VectorEnv, known: Known | None) -> Any:
        if known is not None:
            known.collector.envs = vec_env
            return known.collector
        self._meet(vec_env.single_observation_space, vec_env.single_action_space, vec_env.num_envs)
        seeds: Any = [derive_seed(self.seed, "env", i, 0) & 0x7FFFFFFF for i in range(vec_env.num_envs)]
        try:
            _, infos = vec_env.reset(seed=seeds)
        except gym.error.Error:  # written as one (gymnasium's own CartPole): one generator for all
            seeds = seeds[0]
            _, infos = vec_env.reset(seed=seeds)
        return VectorSteps(vec_env, masked="action_mask" in infos, seed=seeds)

    def _train(
        self, env: Any, take: Callable[[Any, Known | None], Any], n_envs: int, n_steps: int, **how: bool
    ) -> dict[str, float]:  # fmt: skip
        """A rollout, an update and its metrics.

        After a failure, or Ctrl-C in a rollout, these envs begin new episodes; Ctrl-C in an update waits for its end.
        """
        known = self._known.pop(id(env), None)
        collector = take(env, known)
        if known is None:
            forget, key = self._known.pop, id(env)
            gone = weakref.ref(env, lambda _: forget(key, None))
            self._masked = self._masked or collector.masked
            known = Known(collector, EpisodeLog(n_envs, replayable=False), gone, self.num_episodes)
            collector.reset()
        agent = self.agent
        agent.attend(n_envs, known.memory, known.sums)
        memory = copy(agent.memory)
        rollout = collector.collect(agent, agent.noise(n_steps), **how)
        rollout.memory = memory
        with CtrlCWaits() as ctrl_c:
            metrics = self.update(rollout)
            ended = known.log.add(rollout)
            known.memory = agent.memory
            known.sums = None if agent.reward_norm is None else agent.reward_norm.sums
            collector.envs = ()
            self._known[id(env)] = known
            self.log.n_steps += rollout.rewards.size if rollout.valid is None else int(rollout.valid.sum())
            self.log.n_episodes += len(ended)
            self.log.recent.extend(ended)
        ctrl_c.pass_on()
        counts = {"n_completed_episodes": len(ended), "n_envs": n_envs}
        counts |= {"episodes": self.log.n_episodes, "steps": self.log.n_steps}
        return {**mean_of(ended), "reward_mean": self.log.mean_reward, **counts, **metrics}

    def update(self, rollout: StepRollout) -> dict[str, float]:
        """One PPO update from a rollout that this policy collected."""
        return self.agent.improve(rollout, self.progress)

    @property
    def progress(self) -> float:
        """The finished share of `num_episodes`."""
        return min(1.0, self.num_episodes / self.total_episodes) if self.total_episodes else 0.0

    def select_action(
        self, observation: Any, *, mask: Any = None, deterministic: bool = False, draw: int = 0, start: bool = False
    ) -> Selected:  # fmt: skip
        """The action for one observation; `draw` numbers the draws, the same one gives the same action.

        A recurrent policy remembers the observations of earlier calls; `start=True` begins an episode.
        """
        if self._selecting is None or self._selecting.learner is not self.agent.learner:
            self._selecting = self.agent.alone()
        agent, self._selecting.iteration = self._selecting, self.agent.iteration
        if start:
            agent.forget(0)
        if mask is None and self._masked:
            raise ValueError("the policy is trained with action masks and must act with them: give mask=")
        row, masks = observation_rows(agent.obs_rows, observation), mask_rows(agent.action_rows, mask)
        actions = np.zeros((1, agent.action_rows.size), agent.action_rows.dtype)
        logprob = np.zeros(1, np.float32)
        chance = stream(self.seed, "select", agent.iteration, draw)
        value = agent.value_of(row)
        agent.act(row, masks, agent.draw(chance, 1), actions, logprob, deterministic)
        return Selected(agent.action_rows.to_env(actions)[0], float(logprob[0]), value)

    def save(self, root: Path | str) -> Path:
        """Write a checkpoint under `root`; returns its folder.

        Environments are the caller's: on `load` they begin new episodes.
        """
        agent, (obs, act) = self.agent, self._spaces or (None, None)
        assert obs is not None
        assert act is not None
        weights, optimizer, statistics = agent.state()
        values, _ = self.log.state()
        policy = describe_policy(
            obs, act, agent.learner.network, self.config, agent.obs_norm is not None, masked=self._masked
        )
        training = {
            "config": dataclasses.asdict(self.config), "seed": self.seed, "n_envs": agent.n_envs,
            "num_episodes": self.total_episodes, **values,
        }  # fmt: skip
        checkpoint = Checkpoint(policy, training, weights, optimizer, statistics, {"started": np.zeros(1)})
        return save_checkpoint(checkpoint_folder(root, self.log.n_steps), checkpoint)

    def load(self, path: Path | str) -> None:
        """Take over settings, weights, optimizer, statistics and counters from a checkpoint."""
        saved = load_checkpoint(path)
        obs, act = (read_space(saved.policy[key]) for key in ("observation_space", "action_space"))
        if self._spaces not in (None, (obs, act)):
            raise ConfigError(
                f"the checkpoint is for spaces {obs} and {act}, this trainer has {self._spaces}"
            )
        training, config = saved.training, read_config(saved.training["config"])
        _refuse_squashing(config)
        agent = PPOAgent(
            obs, act, config, n_envs=int(training["n_envs"]), seed=int(training["seed"]),
            network=self._own_network, path=self.path, device=self.device,
        )  # fmt: skip
        if wrong := other_shapes(saved.weights, agent.state()[0]):
            raise ConfigError("the checkpoint belongs to another network:\n  " + "\n  ".join(wrong))
        with reading(path, OTHER_CHECKPOINT):
            agent.load_state(saved.weights, saved.optimizer, saved.statistics)
        self._agent, self._spaces, self._masked = agent, (obs, act), saved.policy.get("masked", False)
        self.config, self.seed = config, agent.seed
        self.total_episodes = training.get("num_episodes")
        self.log.load_state(training, self.log.state()[1])
        self._known.clear()
        self._selecting = None

    def _meet(self, obs: gym.Space, act: gym.Space, n_envs: int) -> None:
        if self._agent is not None:
            if self._spaces != (obs, act):
                raise ConfigError(
                    f"the environment has spaces {obs} and {act}, this trainer learns {self._spaces}"
                )
            return
        self._agent = PPOAgent(
            obs, act, self.config, n_envs=n_envs, seed=self.seed,
            network=self._own_network, path=self.path, device=self.device,
        )  # fmt: skip
        self._spaces = (obs, act)


def _refuse_squashing(config: PPOConfig) -> None:
    if config.squash:
        raise ConfigError(
            "squash=True wraps environments, and PPOTrainer steps the caller's: wrap them in "
            "shoal.train.ppo.envs.SquashedActions instead"
        )
