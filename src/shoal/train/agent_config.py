"""The settings of agent training, as the YAML names them. Unknown keys are errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.core.errors import ConfigError
from shoal.rollout.engine_config import EngineConfig as EngineConfig
from shoal.rollout.factory import EnvTag, EsManager, VectorConfig
from shoal.rollout.settings import RolloutSettings
from shoal.train.agent_conflicts import refuse_ignored
from shoal.train.group_advantages import Method
from shoal.train.packing import Batching
from shoal.train.rollout_filter import FilterType
from shoal.train.token_losses import Aggregation, KLEstimator

Estimator = Literal[
    "grpo",
    "dr_grpo",
    "gigpo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gae",
    "turn_gae",
    "bi_level_gae",
]
CRITIC_ESTIMATORS = ("gae", "turn_gae", "bi_level_gae")


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


@dataclass(frozen=True)
class FilterGroups:
    """Which groups are learned from."""

    enable: bool = True
    """Leave out groups whose members all got the same task reward: they say nothing."""
    max_num_gen_batches: int = 1
    """Batches of groups to play, at most, until `env_groups` with signal are there."""


@dataclass(frozen=True)
class Critic:
    """The value network of estimators that need one (`gae`, `turn_gae`, `bi_level_gae`)."""

    gae_lambda: float = 0.95
    token_lambda: float = 1.0
    """Trace decay within a turn (`bi_level_gae`)."""
    learning_rate: float = 1e-3
    value_clip: float | None = 0.5


@dataclass(frozen=True)
class KLPenalty:
    """Holding on to the weights that the run started from."""

    coef: float = 0.0
    """0 keeps no reference model."""
    estimator: KLEstimator = "k3"


@dataclass(frozen=True)
class RolloutCorrection:
    """Importance weights for an engine whose log-probs differ from the trainer's."""

    method: Literal["none", "truncate", "mask"] = "none"
    cap: float = 2.0


@dataclass(frozen=True)
class Algorithm:
    """How trajectories change the weights."""

    adv_estimator: Estimator = "grpo"
    gamma: float = 1.0
    """Discount per turn; below 1, shorter solutions are worth more."""
    step_advantage_weight: float = 1.0
    """GiGPO: weight of the step-level advantage beside the episode's."""
    policy_loss: Literal["clip", "gspo", "cispo"] = "clip"
    loss_aggregation: Aggregation = "token_mean"
    loss_constant: float = 1.0
    """Tokens a sequence is divided by, for `loss_aggregation: constant`."""
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    dual_clip: float | None = None
    """Bound on the loss of tokens with negative advantage (above 1; 3 is usual)."""
    entropy_coef: float = 0.02
    learning_rate: float = 1e-3
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From `learning_rate` at the first iteration to 0 after the last."""
    weight_decay: float = 0.0
    epochs: int = 1
    minibatch_size: int = 256
    """Samples of one gradient step."""
    micro_batch_tokens: int = 16384
    """Tokens, padding included, that go through the network at once; changes memory, not results."""
    batching: Batching = "auto"
    """How samples share the rows of a micro-batch: `padded` (in order), `bucketed` (like lengths together), `packed`
    (several in a row, attention within each), `auto` (packed where lengths differ enough to pay); changes speed."""
    gradient_checkpointing: bool = False
    """Compute each layer a second time in the backward pass: less memory, the same gradients, about a third slower."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic of the update (autocast); weights and optimizer keep theirs. See `logprob_gap_max`."""
    max_grad_norm: float = 1.0
    rollout_filter_ratio: float = 1.0
    """Share of the groups played to learn from: those that score highest; 1 keeps all."""
    rollout_filter_type: FilterType = "std"
    """Score of a group: the spread of its members' task rewards (`std`), or the best one less the mean (`max_mean`)."""
    filter_groups: FilterGroups = FilterGroups()
    critic: Critic = Critic()
    kl: KLPenalty = KLPenalty()
    rollout_correction: RolloutCorrection = RolloutCorrection()

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"gamma must be in (0, 1], got {self.gamma}")
        for name in (
            "learning_rate",
            "epochs",
            "minibatch_size",
            "micro_batch_tokens",
            "max_grad_norm",
            "loss_constant",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.rollout_filter_ratio <= 1:
            raise ConfigError(f"rollout_filter_ratio must be in (0, 1], got {self.rollout_filter_ratio}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(f"dual_clip must be above 1, got {self.dual_clip}")

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator works with values."""
        return self.adv_estimator in CRITIC_ESTIMATORS


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
        for key in ("use_parallel_rollout", "parallel_n_jobs", "parallel"):
            del values["agent_proxy"][key]
        return values
