"""The settings of agent training, as the YAML names them. Unknown keys are errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.core.errors import ConfigError
from shoal.rollout.factory import EnvTag, EsManager, VectorConfig
from shoal.rollout.samplers.settings import EngineConfig as EngineConfig
from shoal.rollout.settings import RolloutSettings
from shoal.train.agent_conflicts import refuse_ignored
from shoal.train.algorithm_config import CRITIC_ESTIMATORS as CRITIC_ESTIMATORS
from shoal.train.algorithm_config import Algorithm as Algorithm
from shoal.train.algorithm_config import Critic as Critic
from shoal.train.algorithm_config import Estimator as Estimator
from shoal.train.algorithm_config import FilterGroups as FilterGroups
from shoal.train.algorithm_config import KLPenalty as KLPenalty
from shoal.train.algorithm_config import RolloutCorrection as RolloutCorrection
from shoal.train.algorithm_config import refuse_negative, refuse_not_positive
from shoal.train.group_advantages import Method


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (LoRA, arXiv:2106.09685) in the place of training all weights (huggingface)."""

    rank: int = 0
    """0 trains the weights themselves."""
    alpha: float = 32.0
    """The adapters' output is scaled by `alpha / rank`."""
    target_modules: str | list[str] = "all-linear"
    """Names of layers, such as `[q_proj, v_proj]`, or `all-linear`."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"lora.rank must be at least 0, got {self.rank}")
        refuse_not_positive(self, "alpha")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout must be in [0, 1), got {self.dropout}")


@dataclass(frozen=True)
class ModelConfig:
    """What of the model is trained."""

    lora: Lora = Lora()


@dataclass(frozen=True)
class RewardNormalization:
    """How rewards become advantages."""

    grouping: Literal["state", "inductive", "batch"] = "state"
    """Compare within a start state, within a kind of env, or within the whole batch."""
    method: Method = "mean_std"


@dataclass(frozen=True)
class AgentProxy(RolloutSettings):
    """How the agent meets its envs, and what its rewards become."""

    format_penalty: float = 0.0
    """Taken off per turn without a valid action; added after normalisation, never part of the spread."""
    reward_normalization: RewardNormalization = RewardNormalization()

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_negative(self, "format_penalty", "temperature")
        for name in ("max_tokens", "max_turn"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Warmup:
    """Supervised steps on random play, or on play of the env's expert.

    With `expert: 0`, actions are uniformly random valid ones: the format is learned, and nothing of the task.
    """

    steps: int = 0
    batch_size: int = 64
    learning_rate: float = 1e-3
    expert: float = 0.0
    """Share of actions that come from the env's expert (Sokoban's solver, say), where it knows one."""

    def __post_init__(self) -> None:
        refuse_negative(self, "steps")
        refuse_not_positive(self, "batch_size", "learning_rate")
        if not 0 <= self.expert <= 1:
            raise ConfigError(f"warmup.expert must be in [0, 1], got {self.expert}")


@dataclass(frozen=True)
class TrainerConfig:
    """The loop."""

    iterations: int = 100
    eval_every: int = 10
    """Iterations between held-out evaluations; there is always one at the end."""
    save_every: int = 5
    """Iterations between checkpoints; there is always one at the end."""
    keep_checkpoints: int = 3
    save_trajectories_every: int = 10
    """Iterations between files in `trajectories/`."""
    tensorboard: bool = True
    """Write TensorBoard files beside `metrics.jsonl`."""
    wandb: bool = False
    """Send the same rows to Weights & Biases (package `wandb`; `WANDB_MODE=offline` keeps them here)."""
    wandb_project: str = "shoal"
    sharding: Literal["none", "full"] = "none"
    """With several processes: `none`, each holds all weights and optimizer state; `full`, parameters, gradients and
    optimizer state are cut into one shard a process (FSDP2). Changes memory, not results; alone it does nothing."""
    stop_at_success: float | None = None
    """End early when a held-out evaluation reaches this success rate."""

    def __post_init__(self) -> None:
        for name in ("iterations", "eval_every", "save_every", "keep_checkpoints", "save_trajectories_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.stop_at_success is not None and not 0 < self.stop_at_success <= 1:
            raise ConfigError(f"stop_at_success must be in (0, 1], or null, got {self.stop_at_success}")


@dataclass(frozen=True)
class AgentConfig:
    """Everything about a run of agent training."""

    seed: int = 0
    run_dir: str | None = None
    """The run folder; `runs/<config name>` (or the next free number) if not given."""
    resume: bool = False
    engine: EngineConfig = EngineConfig()
    model: ModelConfig = ModelConfig()
    agent_proxy: AgentProxy = AgentProxy()
    es_manager: EsManager = EsManager()
    custom_envs: dict[str, EnvTag] = field(default_factory=dict)
    use_parallel_envs: bool = True
    vector: VectorConfig = VectorConfig()
    algorithm: Algorithm = Algorithm()
    warmup: Warmup = Warmup()
    trainer: TrainerConfig = TrainerConfig()
    next_step: str = ""
    """A line that the command shows when the run is done."""

    def __post_init__(self) -> None:
        refuse_ignored(self)

    def comparable(self) -> dict[str, Any]:
        """What must be equal for a run to be continued: all that can change its results."""
        from shoal.core.configuration import to_mapping

        values = to_mapping(self)
        for key in ("run_dir", "resume", "vector", "use_parallel_envs", "next_step", "trainer"):
            del values[key]
        if self.algorithm.lr_schedule != "constant":  # the rate of an iteration depends on how many there are
            values["trainer"] = {"iterations": self.trainer.iterations}
        for key in ("use_parallel_rollout", "parallel_n_jobs", "parallel"):
            del values["agent_proxy"][key]
        return values
