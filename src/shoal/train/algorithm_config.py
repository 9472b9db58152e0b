"""The `algorithm` part of the settings of agent training: how trajectories change the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from shoal.core.errors import ConfigError
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


def refuse_not_positive(settings: Any, *names: str) -> None:
    """A `ConfigError` for the first of these settings that is not above 0 and finite."""
    for name in names:
        if not 0 < getattr(settings, name) < math.inf:
            raise ConfigError(f"{name} must be positive, got {getattr(settings, name)}")


def refuse_negative(settings: Any, *names: str) -> None:
    """A `ConfigError` for the first of these settings that is below 0 or not finite."""
    for name in names:
        if not 0 <= getattr(settings, name) < math.inf:
            raise ConfigError(f"{name} must be 0 or positive, got {getattr(settings, name)}")


@dataclass(frozen=True)
class FilterGroups:
    """Which groups are learned from."""

    enable: bool = True
    """Leave out groups whose members all got the same task reward: they say nothing."""
    max_num_gen_batches: int = 1
    """Batches of groups to play, at most, until `env_groups` with signal are there."""

    def __post_init__(self) -> None:
        if self.max_num_gen_batches < 1:
            raise ConfigError(f"max_num_gen_batches must be at least 1, got {self.max_num_gen_batches}")


@dataclass(frozen=True)
class Critic:
    """The value network of estimators that need one (`gae`, `turn_gae`, `bi_level_gae`)."""

    gae_lambda: float = 0.95
    token_lambda: float = 1.0
    """Trace decay within a turn (`bi_level_gae`)."""
    learning_rate: float = 1e-3
    value_clip: float | None = 0.5

    def __post_init__(self) -> None:
        for name in ("gae_lambda", "token_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        refuse_not_positive(self, "learning_rate")
        if self.value_clip is not None and not self.value_clip > 0:
            raise ConfigError(f"value_clip must be positive, or null for none, got {self.value_clip}")


@dataclass(frozen=True)
class KLPenalty:
    """Holding on to the weights that the run started from."""

    coef: float = 0.0
    """0 keeps no reference model."""
    estimator: KLEstimator = "k3"
    """`k2` and `k3` pull; the gradient of `k1` is noise that averages to none, so it only tells the KL."""

    def __post_init__(self) -> None:
        refuse_negative(self, "coef")


@dataclass(frozen=True)
class RolloutCorrection:
    """Importance weights for an engine whose log-probs differ from the trainer's."""

    method: Literal["none", "truncate", "mask"] = "none"
    cap: float = 2.0
    """The largest weight; with `mask`, its inverse is the smallest."""

    def __post_init__(self) -> None:
        if not self.cap >= 1:
            raise ConfigError(f"cap must be at least 1, got {self.cap}")


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
        refuse_not_positive(
            self,
            "learning_rate",
            "epochs",
            "minibatch_size",
            "micro_batch_tokens",
            "max_grad_norm",
            "loss_constant",
        )
        refuse_negative(self, "clip_ratio_low", "clip_ratio_high", "weight_decay")
        if self.clip_ratio_low > 1:
            raise ConfigError(f"clip_ratio_low must be at most 1, got {self.clip_ratio_low}")
        if not math.isfinite(self.entropy_coef):
            raise ConfigError(f"entropy_coef must be a finite number, got {self.entropy_coef}")
        if not 0 < self.rollout_filter_ratio <= 1:
            raise ConfigError(f"rollout_filter_ratio must be in (0, 1], got {self.rollout_filter_ratio}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(f"dual_clip must be above 1, got {self.dual_clip}")

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator works with values."""
        return self.adv_estimator in CRITIC_ESTIMATORS
