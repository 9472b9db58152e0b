"""What an agent trainer is put together from: an engine that can be trained, its optimizer, collectors, a warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shoal import envs
from shoal.core.errors import ConfigError
from shoal.rollout.collector import TrajectoryCollector
from shoal.rollout.episode import Role
from shoal.rollout.factory import EnvironmentSet, make_roles
from shoal.rollout.prompts import Prompter
from shoal.rollout.samplers.registry import close_engine
from shoal.train.agent_config import AgentConfig, Algorithm
from shoal.train.arithmetic import can_checkpoint
from shoal.train.critic import Critic, split_optimizer
from shoal.train.engine_clock import EngineClock
from shoal.train.policy import TrainableEngine, make_engine
from shoal.train.processes import Processes
from shoal.train.reference import BaseReference, Reference
from shoal.train.schedules import decayed
from shoal.train.sharding import ShardedEngine, shard_critic
from shoal.train.update import trained_parameters
from shoal.train.warmup import warm_up


def make_learner(config: AgentConfig, roles: dict[str, Role], processes: Processes) -> TrainableEngine:
    """The engine of a config on this process's device, with adapters if they are what is trained."""
    words = sorted({word for role in roles.values() for word in role.projection.words()})
    if config.engine.name == "ray" and processes.count > 1:
        from shoal.train.cluster_room import refuse_without_room

        refuse_without_room(config.engine.replicas, processes)
    device = processes.device(config.engine.device)
    engine = make_engine(replace(config.engine, device=device), words, config.seed)
    try:
        if config.algorithm.gradient_checkpointing and not can_checkpoint(engine.model):
            raise ConfigError(
                "algorithm.gradient_checkpointing=true has no effect on this model, whose layers cannot be computed "
                "twice: leave it out"
            )
        if not config.model.lora.rank:
            return engine
        from shoal.train.lora import add_lora

        return add_lora(engine, config.model.lora, config.engine.model, config.seed)
    except BaseException:
        close_engine(engine)  # it may have begun processes
        raise


def make_networks(
    config: AgentConfig, engine: TrainableEngine, kept: Path, processes: Processes
) -> tuple[TrainableEngine, Critic | None, Reference | BaseReference | None]:
    """The engine as it is trained, and the networks beside it: a critic, and what a KL penalty holds on to.

    Each is cut into shards once it is made, where they are to be, so that no more than two are whole at a time.
    """
    critic = Critic(engine) if config.algorithm.needs_critic else None
    if critic is not None and processes.sharded:
        shard_critic(critic, engine, processes)
    penalty, lora = config.algorithm.kl.coef, config.model.lora.rank
    copied = Reference(kept, engine, processes) if penalty and not lora else None
    trained: TrainableEngine = ShardedEngine(engine, processes) if processes.sharded else engine
    if penalty and lora:
        return trained, critic, BaseReference(trained)  # type: ignore[arg-type]
    return trained, critic, copied


def make_optimizer(
    config: AgentConfig, engine: TrainableEngine, critic: Critic | None
) -> torch.optim.Optimizer:
    """Adam over what is trained."""
    algorithm = config.algorithm
    return split_optimizer(
        trained_parameters(engine.model),
        critic,
        algorithm.learning_rate,
        algorithm.critic.learning_rate,
        algorithm.weight_decay,
    )


def set_rates(optimizer: torch.optim.Optimizer, algorithm: Algorithm, progress: float) -> None:
    """Learning rates by the schedule, from the finished share of the run alone."""
    rates = (algorithm.learning_rate, algorithm.critic.learning_rate)
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = decayed(rate, algorithm.lr_schedule, progress)


def describe(config: AgentConfig, engine: TrainableEngine, kinds: Sequence[str], processes: Processes) -> str:
    """One line: what is trained, on what."""
    size = sum(parameter.numel() for parameter in engine.model.parameters())
    groups, algorithm = config.es_manager.train, config.algorithm.adv_estimator
    several = f", {processes.count} processes" if processes.count > 1 else ""
    several += " (sharded)" if processes.sharded else ""
    return (
        f"{config.engine.name} engine with {size / 1e6:.2f}M parameters, {algorithm}, "
        f"{groups.env_groups} groups of {groups.group_size} on {', '.join(kinds)}{several}"
    )


def lockstep_collector(
    config: AgentConfig, side: EnvironmentSet, engine: TrainableEngine, clock: EngineClock, seed: int
) -> TrajectoryCollector:
    """Plays the envs of one side in this process; `clock` measures the engine."""
    return TrajectoryCollector(
        side.pool,
        side.tags,
        make_roles(config.custom_envs, side.tags, config.agent_proxy.max_turn),
        side.group_size,
        clock.around(engine),
        config.agent_proxy.prompt,
        seed,
    )


def warmed_up(
    config: AgentConfig,
    engine: TrainableEngine,
    roles: dict[str, Role],
    prompter: Prompter,
    processes: Processes,
) -> Iterator[float]:
    """The supervised steps of a config, which every process takes; yields the loss of each."""
    if not config.warmup.steps:
        return
    kinds = {tag: config.custom_envs[tag] for tag in roles}
    makers = {
        tag: (lambda kind=kind: envs.make(kind.env_type, **kind.env_config)) for tag, kind in kinds.items()
    }
    tokens = config.algorithm.micro_batch_tokens
    share = 1 / processes.count if processes.sharded else 1.0
    yield from warm_up(engine, makers, roles, prompter, config.warmup, tokens, config.seed, share)
