"""The settings of a rollout that the YAML keeps under `agent_proxy`, and how it is spread over workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from shoal.core.configuration import from_mapping
from shoal.core.errors import ConfigError
from shoal.rollout.factory import EnvironmentConfig, EnvTag, EsManager, VectorConfig
from shoal.rollout.parallel.server import Schedule
from shoal.rollout.prompts import PromptConfig
from shoal.rollout.samplers.sampler import Sampling
from shoal.rollout.samplers.settings import check_settings

Backend = Literal["auto", "serial", "threads", "processes", "loky", "ray"]
BACKENDS = ("serial", "threads", "processes", "loky", "ray")


@dataclass(frozen=True)
class ParallelConfig:
    """How a parallel rollout is run; nothing here changes a trajectory."""

    backend: Backend = "auto"
    """Where workers run; "auto" is "processes"."""
    schedule: Schedule = "adaptive"
    """When the engine runs: "greedy" (whenever something waits), "adaptive" (it may wait for what is expected
    at once), or "barrier" (lockstep)."""
    episodes_at_once: int | None = None
    """Of one worker; its whole share if not given."""
    max_batch: int = 4096
    """Requests that the engine gets at once, at most."""
    step_timeout: float | None = None
    """Seconds after which an env that does not answer is given up and its episode ends as "timeout"; with
    `make_timeout` those of `vector` if neither is given."""
    make_timeout: float | None = None
    """Seconds that the constructor of an env may take; `step_timeout` if not given."""
    episode_timeout: float | None = None
    """Seconds after which an episode ends as "timeout"."""
    request_timeout: float | None = None
    """Seconds within which the engine must answer a request."""
    engine_timeout: float | None = None
    """Seconds of one call of the engine, after which it counts as hung."""
    engine_retries: int = 1
    """Further attempts for a request that the engine failed to answer."""
    engine_restarts: int = 3
    """Times that an engine which crashed or hangs begins anew, where it can (vllm, ray, openai)."""
    env_retries: int = 1
    """Times an episode starts again, in a fresh env, after its env failed."""
    max_deaths: int = 3
    """Workers that may die while they play one episode alone; then it ends as "env_error"."""
    ray_options: dict[str, Any] = field(default_factory=dict)
    """Of each worker's Ray task: `num_cpus`, `resources`, `runtime_env`, …"""
    keep_envs: bool = False
    """Keep envs in their workers for the next rollout instead of making new ones, until the manager is closed (on
    "loky" and "ray" they then end with their process, without their `close`)."""

    def __post_init__(self) -> None:
        limits = ("step_timeout", "make_timeout", "episode_timeout", "request_timeout", "engine_timeout")
        retries = dict.fromkeys(("engine_retries", "engine_restarts", "env_retries"), 0)
        check_settings(self, limits, **retries, max_batch=1, max_deaths=1, episodes_at_once=1)


@dataclass(frozen=True)
class RolloutSettings:
    """How the agent meets its envs."""

    max_turn: int | None = None
    """Turns after which an episode is truncated; what the env or its tag says if not given."""
    max_tokens: int = 8
    """Tokens of one response."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Sample from the fewest tokens that have this much of the probability; 1 is off."""
    top_k: int = 0
    """Sample from so many of the likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability; 0 is off."""
    stop: tuple[str, ...] = ("</action>",)
    """Texts after which a response ends."""
    prompt: PromptConfig = PromptConfig()
    use_parallel_rollout: bool = False
    """Play episodes on workers that make their own envs, with one shared engine."""
    parallel_n_jobs: int = -1
    """Workers; -1 adapts to the machine and to what the envs need, at most one per core."""
    parallel: ParallelConfig = ParallelConfig()

    def __post_init__(self) -> None:
        if self.parallel_n_jobs != -1 and self.parallel_n_jobs < 1:
            raise ConfigError(
                f"parallel_n_jobs must be -1 (as many as pay) or at least 1, got {self.parallel_n_jobs}"
            )
        check_settings(self, max_turn=1)
        try:
            self.sampling()
        except ValueError as error:
            raise ConfigError(f"agent_proxy: {error}") from error

    def sampling(self, *, greedy: bool = False) -> Sampling:
        """How tokens are picked, in training or greedily."""
        if greedy:
            return Sampling(self.max_tokens, 0.0, self.stop)
        return Sampling(self.max_tokens, self.temperature, self.stop, self.top_p, self.top_k, self.min_p)


@dataclass(frozen=True)
class RolloutConfig:
    """What a rollout reads; a whole training config has these fields too."""

    seed: int = 0
    agent_proxy: RolloutSettings = RolloutSettings()
    es_manager: EsManager = EsManager()
    custom_envs: dict[str, EnvTag] = field(default_factory=dict)
    use_parallel_envs: bool = True
    vector: VectorConfig = VectorConfig()

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def environments(self) -> EnvironmentConfig:
        """The part that says which envs there are."""
        return EnvironmentConfig(self.es_manager, self.custom_envs, self.use_parallel_envs, self.vector)


def rollout_config(config: Any) -> RolloutConfig:
    """The rollout's part of a config: an object or mapping with these keys, training ones among them."""
    if isinstance(config, Mapping):
        own = {item.name for item in fields(RolloutConfig)}
        values = {key: config[key] for key in config if key in own}
        proxy = values.get("agent_proxy", {})
        training = {"format_penalty", "reward_normalization", "overlong_buffer", "overlong_penalty"}
        values["agent_proxy"] = {key: proxy[key] for key in proxy if key not in training}
        return from_mapping(RolloutConfig, values)
    return RolloutConfig(**{item.name: getattr(config, item.name) for item in fields(RolloutConfig)})
