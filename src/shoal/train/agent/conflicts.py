"""Settings of agent training that exclude each other, and runs that could learn nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError
from shoal.rollout.samplers.sampler import Sampling
from shoal.train.agent.advantages import ESTIMATORS
from shoal.train.agent.losses import LOSSES

if TYPE_CHECKING:
    from shoal.train.agent.config import AgentConfig

_PLAIN_READERS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("step_advantage_weight", 1.0, ("gigpo", "graphgpo")),
    ("graph_discount", 0.1, ("graphgpo",)),
    ("gigpo.episode_reward", "return", ("gigpo",)),
    ("gigpo.statistics", "episodes", ("gigpo",)),
    ("critic.token_lambda", 1.0, ("bi_level_gae",)),
)
"""Settings of the algorithm that some estimators alone read, and their defaults."""
_CONFLICTS: tuple[tuple[Callable[[AgentConfig], Any], str], ...] = (
    (
        lambda c: c.model.lora.rank and (_is_tiny(c) or c.engine.name == "openai"),
        "model.lora.rank={c.model.lora.rank} needs a model of transformers, got engine.name={c.engine.name}: set it to "
        "huggingface or vllm, or model.lora.rank to 0",
    ),
    (
        lambda c: c.model.lora.rank and c.engine.train_last_layers is not None,
        "model.lora.rank={c.model.lora.rank} trains adapters in all layers, so engine.train_last_layers="
        "{c.engine.train_last_layers} would do nothing: set it to null, or model.lora.rank to 0",
    ),
    (
        lambda c: _is_tiny(c) and c.engine.model is not None,
        "engine.model={c.engine.model} has no effect on {tiny}: set engine.name=huggingface, or leave it out",
    ),
    (
        lambda c: _is_tiny(c) and c.engine.train_last_layers is not None,
        "engine.train_last_layers={c.engine.train_last_layers} has no effect on {tiny}: set engine.name=huggingface, "
        "or leave it out",
    ),
    (
        lambda c: _is_tiny(c) and c.engine.dtype != "float32",
        "engine.dtype={c.engine.dtype} has no effect on {tiny}: set engine.name=huggingface, or leave it out",
    ),
    (
        lambda c: (
            c.engine.batch_invariant
            and c.engine.played_by == "huggingface"
            and c.algorithm.precision != "float32"
        ),
        "engine.batch_invariant=true makes the update compute as the sampler does, and "
        "algorithm.precision={c.algorithm.precision} otherwise: leave precision out, and set engine.dtype=bfloat16",
    ),
    (
        lambda c: c.algorithm.loss_constant != 1 and c.algorithm.loss_aggregation != "constant",
        "algorithm.loss_constant={c.algorithm.loss_constant} has no effect with loss_aggregation="
        "{c.algorithm.loss_aggregation}: set loss_aggregation to constant, or leave loss_constant out",
    ),
    (
        lambda c: (c.algorithm.teacher is None) == (c.algorithm.needs == "teacher"),
        "algorithm.teacher={c.algorithm.teacher} and adv_estimator={c.algorithm.adv_estimator} do not fit: name the "
        "folder of a teacher for distillation, and none for others",
    ),
    (
        lambda c: c.algorithm.critic.warmup and c.algorithm.needs != "critic",
        "algorithm.critic.warmup={c.algorithm.critic.warmup} has no effect with adv_estimator="
        "{c.algorithm.adv_estimator}, which has no critic: leave it out",
    ),
    (
        lambda c: c.algorithm.filter_groups.max_num_gen_batches > 1 and not c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.max_num_gen_batches={c.algorithm.filter_groups.max_num_gen_batches} has no effect "
        "with filter_groups.enable=false: set enable to true, or the batches to 1",
    ),
    (
        lambda c: c.agent_proxy.reward_normalization.method != "mean_std" and not _estimator(c).normalized,
        "agent_proxy.reward_normalization.method={c.agent_proxy.reward_normalization.method} has no effect with "
        "adv_estimator={c.algorithm.adv_estimator}, which normalises in its own way: leave it out, or use {normalized}",
    ),
    (
        lambda c: c.agent_proxy.reward_normalization.grouping != "state" and not _estimator(c).grouped,
        "agent_proxy.reward_normalization.grouping={c.agent_proxy.reward_normalization.grouping} has no effect with "
        "adv_estimator={c.algorithm.adv_estimator}, which compares no groups: leave it out, or use one of {grouped}",
    ),
    (
        lambda c: (
            c.agent_proxy.reward_normalization.method == "identity"
            and c.algorithm.gigpo.statistics != "episodes"
        ),
        "algorithm.gigpo.statistics={c.algorithm.gigpo.statistics} has no effect with "
        "agent_proxy.reward_normalization.method=identity, which leaves rewards as they are: leave one of the two out",
    ),
)
"""When one setting would be ignored because of another, and what is said of it."""


def conflicts_of(config: AgentConfig) -> Iterator[str]:
    """A sentence for each setting that would have no effect beside the others."""
    algorithm = config.algorithm
    for registered in (_estimator(config), LOSSES[algorithm.policy_loss]):
        if registered.conflicts is not None:
            yield from registered.conflicts(algorithm)
    for name, plain, readers in _PLAIN_READERS:
        value = reduce(getattr, name.split("."), algorithm)
        if value != plain and algorithm.adv_estimator not in readers:
            yield (
                f"algorithm.{name}={value} is read by {' and '.join(readers)} alone, and has no effect with "
                f"adv_estimator={algorithm.adv_estimator}: leave it out"
            )
    names = {
        "tiny": "engine.replicas.engine=tiny" if config.engine.name == "ray" else "engine.name=tiny",
        "normalized": " or ".join(name for name in ESTIMATORS if ESTIMATORS[name].normalized),
        "grouped": ", ".join(name for name in ESTIMATORS if ESTIMATORS[name].grouped),
    }
    for excludes, message in _CONFLICTS:
        if excludes(config):
            yield message.format(c=config, **names)


def _estimator(config: AgentConfig) -> Any:
    return ESTIMATORS[config.algorithm.adv_estimator]


def _is_tiny(config: AgentConfig) -> bool:
    return config.engine.played_by == "tiny"


def refuse_without_signal(config: AgentConfig) -> None:
    """Check that groups can differ within, where that is what is learned from; a mere rollout may do without.

    Raises:
        ConfigError: nothing would ever be learned, or nothing but the format, or from other probabilities than the
            policy's.
    """
    _refuse_other_distribution(config)
    groups, algorithm = config.es_manager.train, config.algorithm
    rewards, estimator = config.agent_proxy.reward_normalization, ESTIMATORS[algorithm.adv_estimator]
    compared = rewards.grouping == "state" and not (estimator.normalized and rewards.method == "identity")
    if algorithm.filter_groups.enable:
        needs = "algorithm.filter_groups.enable=true leaves such groups out"
    elif estimator.grouped and algorithm.adv_estimator not in ("gigpo", "graphgpo") and compared:
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
    proxy = config.agent_proxy
    sampling = Sampling(1, proxy.temperature, (), proxy.top_p, proxy.top_k, proxy.min_p)
    if sampling.restricted and config.algorithm.rollout_correction.method == "none":
        limits = {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p")}
        given = ", ".join(f"agent_proxy.{name}={value}" for name, value in limits.items())
        raise ConfigError(
            f"{given} samples from other probabilities than the policy that is trained has: set "
            f"algorithm.rollout_correction.method=truncate (or mask), which weighs that, or leave them out"
        )
