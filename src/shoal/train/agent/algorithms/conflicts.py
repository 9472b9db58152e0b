"""Settings of agent training that exclude each other, those that rarely help, and runs that could learn nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING

from shoal.core.errors import ConfigError
from shoal.samplers.sampler import Sampling
from shoal.train.agent.algorithms.advantages import ESTIMATORS
from shoal.train.agent.algorithms.losses import LOSSES, unread_bounds

if TYPE_CHECKING:
    from shoal.train.agent.config import AgentConfig


_OF_TRANSFORMERS = (("model", None), ("train_last_layers", None), ("dtype", "float32"))
"""Settings of the engine that a tiny one does not read, and their defaults."""


def conflicts_of(config: AgentConfig) -> Iterator[str]:
    """A sentence for each setting that would have no effect beside the others."""
    algorithm, engine, rank = config.algorithm, config.engine, config.model.lora.rank
    rewards, tiny = config.agent_proxy.reward_normalization, config.engine.played_by == "tiny"
    estimator = ESTIMATORS[algorithm.adv_estimator]
    yield from unread_bounds(algorithm)
    for name in dict.fromkeys(name for one in ESTIMATORS for name in ESTIMATORS[one].reads):
        value, default = [reduce(getattr, name.split("."), one) for one in (algorithm, type(algorithm)())]
        if value != default and name not in estimator.reads:
            readers = " and ".join(one for one in ESTIMATORS if name in ESTIMATORS[one].reads)
            yield (
                f"algorithm.{name}={value} is read by {readers} alone, and has no effect with "
                f"adv_estimator={algorithm.adv_estimator}: leave it out"
            )
    if rank and tiny:
        yield (
            f"model.lora.rank={rank} needs a model of transformers, got engine.name={engine.name}: set it to "
            f"huggingface or vllm, or model.lora.rank to 0"
        )
    for name, plain in _OF_TRANSFORMERS if tiny else ():
        if (value := getattr(engine, name)) != plain:
            kind = "engine.replicas.engine" if engine.name == "ray" else "engine.name"
            yield (
                f"engine.{name}={value} has no effect on {kind}=tiny: set engine.name=huggingface, or leave it out"
            )
    if config.trainer.lag and not config.agent_proxy.use_parallel_rollout:
        yield (
            f"trainer.lag={config.trainer.lag} plays beside learning, on hosts: set "
            f"agent_proxy.use_parallel_rollout=true, or trainer.lag=0"
        )
    if engine.copy == "process" and (not config.trainer.lag or engine.name == "ray"):
        yield (
            f"engine.copy=process has no effect with trainer.lag={config.trainer.lag} and engine.name={engine.name}: "
            f"leave it out, or set trainer.lag to 1 or more with tiny or huggingface"
        )
    if engine.batch_invariant and engine.played_by == "huggingface" and algorithm.precision != "float32":
        yield (
            f"engine.batch_invariant=true makes the update compute as the sampler does, and algorithm.precision="
            f"{algorithm.precision} otherwise: leave precision out, and set engine.dtype=bfloat16"
        )
    if algorithm.kl.coef and algorithm.kl.estimator == "k1" and algorithm.kl.place == "loss":
        yield (
            f"algorithm.kl.estimator=k1 with kl.coef={algorithm.kl.coef} pulls nowhere, since its gradient is noise "
            f"with mean 0: use k2, or k3 as the paper of GRPO does, or set kl.place to reward, or kl.coef to 0"
        )
    if algorithm.loss_constant != 1 and algorithm.loss_aggregation != "constant":
        yield (
            f"algorithm.loss_constant={algorithm.loss_constant} has no effect with loss_aggregation="
            f"{algorithm.loss_aggregation}: set loss_aggregation to constant, or leave loss_constant out"
        )
    if (algorithm.teacher is None) == (algorithm.needs == "teacher"):
        yield (
            f"algorithm.teacher={algorithm.teacher} and adv_estimator={algorithm.adv_estimator} do not fit: name the "
            f"folder of a teacher for distillation, and none for others"
        )
    if algorithm.needs == "teacher" and algorithm.kl.coef and algorithm.kl.place == "reward":
        yield (
            f"algorithm.kl.place=reward has no effect with adv_estimator={algorithm.adv_estimator}, which reads no "
            f"rewards: set it to loss, or kl.coef to 0"
        )
    if algorithm.critic.warmup and algorithm.needs != "critic":
        yield (
            f"algorithm.critic.warmup={algorithm.critic.warmup} has no effect with adv_estimator="
            f"{algorithm.adv_estimator}, which has no critic: leave it out"
        )
    if (batches := algorithm.filter_groups.max_num_gen_batches) > 1 and not algorithm.filter_groups.enable:
        yield (
            f"algorithm.filter_groups.max_num_gen_batches={batches} has no effect with filter_groups.enable=false: set "
            f"enable to true, or the batches to 1"
        )
    if rewards.method != "mean_std" and not estimator.normalized:
        normalized = " or ".join(name for name in ESTIMATORS if ESTIMATORS[name].normalized)
        yield (
            f"agent_proxy.reward_normalization.method={rewards.method} has no effect with adv_estimator="
            f"{algorithm.adv_estimator}, which normalises in its own way: leave it out, or use {normalized}"
        )
    if rewards.grouping != "state" and not estimator.grouped:
        grouped = ", ".join(name for name in ESTIMATORS if ESTIMATORS[name].grouped)
        yield (
            f"agent_proxy.reward_normalization.grouping={rewards.grouping} has no effect with adv_estimator="
            f"{algorithm.adv_estimator}, which compares no groups: leave it out, or use one of {grouped}"
        )
    if rewards.method == "identity" and algorithm.gigpo.statistics != "episodes":
        yield (
            f"algorithm.gigpo.statistics={algorithm.gigpo.statistics} has no effect with "
            f"agent_proxy.reward_normalization.method=identity, which leaves rewards as they are: leave one of the two "
            f"out"
        )


def doubts_of(config: AgentConfig, samples: int) -> Iterator[str]:
    """A sentence, with the remedy, for each setting that may spoil a run of at most so many `samples` an iteration."""
    algorithm, iterations = config.algorithm, config.trainer.iterations
    if (warmup := algorithm.critic.warmup) >= iterations:
        yield f"algorithm.critic.warmup={warmup}: in all of the {iterations} iterations the critic learns alone"
    steps = algorithm.epochs * math.ceil(samples / (algorithm.minibatch_size or samples))
    if steps > 1 and not LOSSES[algorithm.policy_loss].bounds:
        yield (
            f"algorithm.policy_loss={algorithm.policy_loss} has no ratios, which tell how far the policy has moved, "
            f"and up to {steps} gradient steps a batch may take it too far: set algorithm.minibatch_size=null and "
            f"algorithm.epochs=1, or algorithm.policy_loss=clip"
        )


def refuse_without_signal(config: AgentConfig) -> None:
    """Check that groups can differ within, where that is what is learned from; a mere rollout may do without.

    Raises:
        ConfigError: nothing would ever be learned, or nothing but the format, or from other probabilities than the
            policy's.
    """
    groups, algorithm, proxy = config.es_manager.train, config.algorithm, config.agent_proxy
    sampling = Sampling(1, proxy.temperature, (), proxy.top_p, proxy.top_k, proxy.min_p)
    # ratios compare with the policy, which is not what was sampled from where tokens are left out
    if sampling.restricted and algorithm.rollout_correction.method == "none":
        limits = {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p")}
        given = ", ".join(f"agent_proxy.{name}={value}" for name, value in limits.items())
        raise ConfigError(
            f"{given} samples from other probabilities than the policy that is trained has: set "
            f"algorithm.rollout_correction.method=truncate (or mask), which weighs that, or leave them out"
        )
    rewards, estimator = proxy.reward_normalization, ESTIMATORS[algorithm.adv_estimator]
    compared = rewards.grouping == "state" and not (estimator.normalized and rewards.method == "identity")
    if algorithm.filter_groups.enable:
        needs = "algorithm.filter_groups.enable=true leaves such groups out"
    elif estimator.grouped and algorithm.adv_estimator != "gigpo" and compared:
        needs = f"algorithm.adv_estimator={algorithm.adv_estimator} learns from what differs within groups"
    else:
        return
    if groups.group_size == 1:
        raise ConfigError(
            f"a group of es_manager.train.group_size=1 has no other member to differ from, and {needs}: raise it"
        )
    if proxy.temperature == 0:
        raise ConfigError(
            f"agent_proxy.temperature=0 plays all members of a group alike, and {needs}: set it to 1, say"
        )
