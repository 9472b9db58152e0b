"""The settings of a rollout that the YAML keeps under `agent_proxy`, and how it is spread over workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal

from shoal.core.configuration import check_settings, plain_values
from shoal.core.errors import ConfigError
from shoal.core.executors import available_memory
from shoal.rollout.factory import EnvironmentConfig, VectorConfig, part_of
from shoal.rollout.prompts import PromptConfig
from shoal.rollout.rewards.settings import RewardConfig
from shoal.rollout.tools.chat import MAX_TURNS
from shoal.rollout.tools.toolbox import ToolConfig
from shoal.samplers.asking import Schedule
from shoal.samplers.sampler import Sampling

MOST_AT_ONCE, ENV_MEMORY = 64, 64 << 20
"""Episodes of one host at once, at most, and free memory in bytes that each needs, where nothing else is said."""
Backend = Literal["auto", "serial", "thread", "process", "loky", "threading", "multiprocessing", "ray"]
"""Where episodes are played: the caller's thread, threads, processes, tasks of joblib, or Ray actors."""


@dataclass(frozen=True)
class ParallelConfig:
    """How a parallel rollout is run; nothing here changes a trajectory."""

    backend: Backend = "auto"
    """Where episodes are played; "auto" is "process"."""
    schedule: Schedule = "adaptive"
    """When an engine that works in batches runs: "adaptive", whenever it is free and something waits, or "barrier",
    when all episodes at play have asked (lockstep)."""
    episodes_at_once: int | None = None
    """Episodes that one host plays at once: so many live envs and threads (of each kind of env that is played). If not
    given, at most 64, and fewer where the hosts together would have less than 64 MiB of free memory for each; so 128
    on two cores. More may be faster where the model answers slowly and many requests at a time."""
    max_batch: int = 4096
    """Requests that the engine gets at once, at most."""
    step_timeout: float | None = None
    """Seconds after which an env that does not answer is given up with its host, and its episode is played again; with
    `make_timeout` those of `vector` if neither is given. Nothing is given up in the caller's thread ("serial")."""
    make_timeout: float | None = None
    """Seconds that the constructor of an env may take; `step_timeout` if not given."""
    episode_timeout: float | None = None
    """Seconds after which an episode ends as "timeout"."""
    engine_timeout: float | None = None
    """Seconds of one call of an engine in this process, after which it counts as hung."""
    engine_retries: int = 1
    """Further attempts for a request that an engine in this process failed to answer; servers and replicas have
    `retries` of their own."""
    engine_restarts: int = 3
    """Times that an engine which crashed or hangs begins anew, where it can (vllm, ray)."""
    env_retries: int = 1
    """Times an episode starts again, in a fresh env, after its env failed."""
    max_deaths: int = 3
    """Hosts that an episode may kill, or hang in; then it ends as "env_error" or "timeout"."""
    ray_options: dict[str, Any] = field(default_factory=dict)
    """Of each Ray actor: `num_cpus` (0 if not given: `parallel_n_jobs` alone says how many), `resources`, …"""
    keep_envs: bool = False
    """Keep envs for the next rollout instead of making new ones, until the manager is closed (not with joblib)."""

    def __post_init__(self) -> None:
        limits = ("step_timeout", "make_timeout", "episode_timeout", "engine_timeout")
        retries = dict.fromkeys(("engine_retries", "engine_restarts", "env_retries"), 0)
        check_settings(self, limits, **retries, max_batch=1, max_deaths=1, episodes_at_once=1)

    def within(self, vector: VectorConfig, backend: str, n_hosts: int) -> ParallelConfig:
        """These settings, with limits for what has none: of time as the envs have them, of episodes by the memory."""
        at_once, step, make = self.episodes_at_once, self.step_timeout, self.make_timeout
        if at_once is None:
            room = available_memory() // (ENV_MEMORY * n_hosts) if backend != "ray" else MOST_AT_ONCE
            at_once = max(1, min(MOST_AT_ONCE, room))
        if step is None and make is None:
            step, make = vector.limit, vector.make_timeout
        return replace(self, episodes_at_once=at_once, step_timeout=step, make_timeout=make)


@dataclass(frozen=True)
class RolloutSettings:
    """How the agent meets its envs."""

    max_turn: int | None = None
    """Turns after which an episode is truncated; what the env or its tag says if not given."""
    max_tokens: int | Literal["auto"] = 8
    """Tokens of one response, at most. `auto`: as many as the longest action of the envs needs; 64 for free text."""
    temperature: float = 1.0
    """Of sampling in training: 1 samples from the model's own probabilities, 0 takes the likeliest token."""
    top_p: float = 1.0
    """Sample from the fewest tokens that have this much of the probability; 1 is off."""
    top_k: int = 0
    """Sample from so many of the likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability; 0 is off."""
    stop: tuple[str, ...] = ("</action>",)
    """Texts after which a response ends."""
    prompt: PromptConfig = PromptConfig()
    tools: tuple[str | ToolConfig, ...] = ()
    """What the model may call: functions (`module:name`), MCP servers, or the record of a run."""
    max_tool_turns: int = MAX_TURNS
    """Answers with calls of tools in an episode, at most, beside its turns; behind the last it is truncated."""
    use_parallel_rollout: bool = False
    """Play episodes on workers that make their own envs, with one shared engine."""
    parallel_n_jobs: int = -1
    """Workers; -1 is one per core."""
    parallel: ParallelConfig = ParallelConfig()

    def __post_init__(self) -> None:
        check_jobs(self.parallel_n_jobs, "parallel_n_jobs")
        check_settings(self, max_turn=1, max_tool_turns=1)
        try:
            Sampling(
                1 if self.max_tokens == "auto" else self.max_tokens,
                self.temperature, self.stop, self.top_p, self.top_k, self.min_p,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def token_limit(self) -> int:
        """`max_tokens` as a number.

        Raises:
            ConfigError: it is `auto`, and nobody has looked at the envs and the tokenizer yet.
        """
        if self.max_tokens == "auto":
            raise ConfigError(
                "agent_proxy.max_tokens=auto needs an engine that shoal makes: give a number of tokens"
            )
        return self.max_tokens

    def sampling(self, *, greedy: bool = False) -> Sampling:
        """How tokens are picked, in training or greedily."""
        limit = self.token_limit
        if greedy:
            return Sampling(limit, 0.0, self.stop)
        return Sampling(limit, self.temperature, self.stop, self.top_p, self.top_k, self.min_p)


def check_jobs(value: Any, name: str) -> None:
    """Refuse what is no number of workers."""
    if isinstance(value, bool) or not isinstance(value, Integral) or (value != -1 and value < 1):
        raise ConfigError(f"{name} must be -1 (as many as pay) or at least 1, got {value!r}")


@dataclass(frozen=True)
class RolloutConfig(EnvironmentConfig):
    """What a rollout reads; a whole training config has these fields too."""

    seed: int = 0
    agent_proxy: RolloutSettings = RolloutSettings()
    rewards: tuple[str | RewardConfig, ...] = ()


def rollout_config(config: Any) -> RolloutConfig:
    """The rollout's part of a config: an object or mapping with these keys, training ones among them."""
    proxy = plain_values(config.get("agent_proxy")) if isinstance(config, Mapping) else None
    if isinstance(proxy, Mapping):
        training = {"format_penalty", "reward_normalization", "overlong_buffer", "overlong_penalty"}
        config = {**config, "agent_proxy": {key: proxy[key] for key in proxy if key not in training}}
    return part_of(RolloutConfig, config)
