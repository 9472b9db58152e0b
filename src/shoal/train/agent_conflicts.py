"""Settings that would have no effect beside each other: refused, so that nobody believes they were at work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from shoal.train.agent_config import AgentConfig, Algorithm

NORMALIZED = ("grpo", "gigpo")
"""Estimators that read `reward_normalization.method`."""
GROUPED = (*NORMALIZED, "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Estimators that compare rewards within `reward_normalization.grouping`."""


def refuse_ignored(config: AgentConfig) -> None:
    """Check the settings of a run against each other.

    Raises:
        ConfigError: one of them would be ignored because of another; the message names both and the way out.
    """
    for conflict in (*_of_model(config), *_of_algorithm(config.algorithm), *_of_rewards(config)):
        raise ConfigError(conflict)


def refuse_without_signal(config: AgentConfig) -> None:
    """Check that groups can differ within, where that is what is learned from; a mere rollout may do without.

    Raises:
        ConfigError: nothing would ever be learned, or nothing but the format.
    """
    _refuse_other_distribution(config)
    groups, algorithm = config.es_manager.train, config.algorithm
    compared = config.agent_proxy.reward_normalization.grouping == "state"
    if algorithm.filter_groups.enable:
        needs = "algorithm.filter_groups.enable=true leaves such groups out"
    elif algorithm.adv_estimator in GROUPED and algorithm.adv_estimator != "gigpo" and compared:
        needs = f"algorithm.adv_estimator={algorithm.adv_estimator} learns from what differs within groups"
    else:
        return
    if groups.group_size == 1:
        raise ConfigError(
            f"a group of es_manager.train.group_size=1 has no other member to differ from, and {needs}: raise it"
        )
    if config.agent_proxy.temperature == 0:
        raise ConfigError(
            f"agent_proxy.temperature=0 plays all members of a group alike, and {needs}: set it to 1, say"
        )


def _refuse_other_distribution(config: AgentConfig) -> None:
    """Ratios compare the policy with what was sampled from, which is not the policy where tokens are left out."""
    sampling = config.agent_proxy.sampling()
    if sampling.restricted and config.algorithm.rollout_correction.method == "none":
        limits = {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p")}
        told = ", ".join(f"agent_proxy.{name}={value}" for name, value in limits.items())
        raise ConfigError(
            f"{told} samples from other probabilities than the policy that is trained has: set "
            f"algorithm.rollout_correction.method=truncate (or mask), which weighs that, or leave them out"
        )


def _of_model(config: AgentConfig) -> Iterator[str]:
    engine, lora = config.engine, config.model.lora
    if lora.rank and engine.name != "huggingface":
        yield (
            f"model.lora.rank={lora.rank} needs engine.name=huggingface, got {engine.name}: set it, or "
            f"model.lora.rank to 0"
        )
    if lora.rank and engine.train_last_layers is not None:
        yield (
            f"model.lora.rank={lora.rank} trains adapters in all layers, so engine.train_last_layers="
            f"{engine.train_last_layers} would do nothing: set it to null, or model.lora.rank to 0"
        )
    replicas = engine.name == "ray" and engine.replicas.engine == "tiny"
    if engine.name == "tiny" or replicas:
        tiny = "engine.replicas.engine=tiny" if replicas else "engine.name=tiny"
        for name, plain in (("model", None), ("train_last_layers", None), ("dtype", "float32")):
            if getattr(engine, name) != plain:
                yield (
                    f"engine.{name}={getattr(engine, name)} has no effect on {tiny}: "
                    f"set engine.name=huggingface, or leave it out"
                )


def _of_algorithm(algorithm: Algorithm) -> Iterator[str]:
    estimator = algorithm.adv_estimator
    if algorithm.dual_clip is not None and algorithm.policy_loss != "clip":
        yield (
            f"algorithm.dual_clip={algorithm.dual_clip} has no effect with policy_loss="
            f"{algorithm.policy_loss}: set it to null, or policy_loss to clip"
        )
    if algorithm.policy_loss == "cispo" and algorithm.clip_ratio_low != 0.2:
        yield (
            f"algorithm.clip_ratio_low={algorithm.clip_ratio_low} has no effect with policy_loss=cispo, which bounds "
            f"weights from above alone: leave it out"
        )
    if algorithm.loss_constant != 1 and algorithm.loss_aggregation != "constant":
        yield (
            f"algorithm.loss_constant={algorithm.loss_constant} has no effect with loss_aggregation="
            f"{algorithm.loss_aggregation}: set loss_aggregation to constant, or leave loss_constant out"
        )
    if algorithm.step_advantage_weight != 1 and estimator != "gigpo":
        yield (
            f"algorithm.step_advantage_weight={algorithm.step_advantage_weight} is gigpo's and has no effect "
            f"with adv_estimator={estimator}: leave it out"
        )
    if algorithm.critic.token_lambda != 1 and estimator in ("gae", "turn_gae"):
        yield (
            f"algorithm.critic.token_lambda={algorithm.critic.token_lambda} is bi_level_gae's and has no "
            f"effect with adv_estimator={estimator}: set critic.gae_lambda, or leave it out"
        )
    groups = algorithm.filter_groups
    if groups.max_num_gen_batches > 1 and not groups.enable:
        yield (
            f"algorithm.filter_groups.max_num_gen_batches={groups.max_num_gen_batches} has no effect with "
            f"filter_groups.enable=false: set enable to true, or the batches to 1"
        )


def _of_rewards(config: AgentConfig) -> Iterator[str]:
    settings, estimator = config.agent_proxy.reward_normalization, config.algorithm.adv_estimator
    if settings.method != "mean_std" and estimator not in NORMALIZED:
        yield (
            f"agent_proxy.reward_normalization.method={settings.method} has no effect with adv_estimator="
            f"{estimator}, which normalises in its own way: leave it out, or use {' or '.join(NORMALIZED)}"
        )
    if settings.grouping != "state" and estimator not in GROUPED:
        yield (
            f"agent_proxy.reward_normalization.grouping={settings.grouping} has no effect with adv_estimator="
            f"{estimator}, which compares no groups: leave it out, or use one of {', '.join(GROUPED)}"
        )
