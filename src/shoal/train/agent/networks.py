"""The networks of a run: what is trained, its critic, what a KL penalty holds on to, and their optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.core.files import verify_folder, write_folder
from shoal.maths.updates import decayed
from shoal.rollout.episode import Role
from shoal.rollout.factory import words_of_roles
from shoal.rollout.samplers.registry import close_engine
from shoal.rollout.tools.functions import Tool
from shoal.train.agent.config import AgentConfig, Algorithm
from shoal.train.agent.distributed import ALONE, Processes
from shoal.train.agent.policy import Around, Critic, Policy, make_policy, trained_parameters
from shoal.train.agent.sharding import ShardedPolicy, shard
from shoal.train.agent.update import MasterAdamW
from shoal.train.agent.weights import gather


def make_networked(
    config: AgentConfig, roles: dict[str, Role], processes: Processes, tools: Sequence[Tool] = ()
) -> tuple[Policy, Any]:
    """The policy of a config on this process's device, with adapters if they are what is trained, and its sampler."""
    words = words_of_roles(roles, tools)
    engine = replace(config.engine, device=processes.device(config.engine.device))
    if not config.model.lora.rank:
        return make_policy(engine, words, config.seed)
    from shoal.train.agent.lora import add_lora, refuse_unfit_peft, with_adapters

    refuse_unfit_peft()
    policy, sampler = make_policy(with_adapters(engine, config.model.lora.rank), words, config.seed)
    try:
        return add_lora(policy, config.model.lora, config.engine.model, config.seed), sampler
    except BaseException:
        close_engine(sampler)  # it may have begun processes
        raise


def make_networks(
    config: AgentConfig, policy: Policy, kept: Path, processes: Processes
) -> tuple[Policy, Critic | None, Reference | None]:
    """The policy as it is trained, and the networks beside it: a critic, and what a KL penalty holds on to.

    Each is cut into shards once it is made, where they are to be, so that no more than two are whole at a time.
    """
    critic = Critic(policy) if config.algorithm.needs == "critic" else None
    if critic is not None and processes.sharded:
        shard(critic, policy, processes, [critic.output])
    penalty, lora = config.algorithm.kl.coef, hasattr(policy, "without_adapters")
    reference = None
    if penalty and not lora:
        frozen = policy.twin()
        frozen.module.requires_grad_(False)
        cut = ShardedPolicy(frozen, processes) if processes.sharded else frozen
        reference = Reference(cut, kept, processes)
    trained: Policy = ShardedPolicy(policy, processes) if processes.sharded else policy
    if penalty and lora:
        reference = Reference(BasePolicy(trained))
    return trained, critic, reference


class Reference:
    """The weights that a KL penalty holds on to: those of the start of the run, kept in its folder.

    Args:
        policy: with these weights.
        folder: where they are kept for a run that is resumed; None where they never change.
        processes: who takes part in the run.
    """

    def __init__(self, policy: Policy, folder: Path | None = None, processes: Processes = ALONE) -> None:
        self.policy = policy
        self._folder, self._processes = folder, processes

    def keep(self, policy: Policy) -> None:
        """Take over the present weights of `policy`, in memory and on disk."""
        if self._folder is None:
            return
        self.policy.module.load_state_dict(policy.module.state_dict())
        weights = gather(policy.saved_weights(), self._processes.first)
        if self._processes.first:
            with write_folder(self._folder) as folder:
                policy.save(folder, weights)

    def load(self) -> None:
        """Read back what `keep` wrote."""
        if self._folder is not None:
            weights = self.policy.read(verify_folder(self._folder))
            self.policy.load_weights(weights, self.policy.weights_version)


class BasePolicy(Around):
    """The base model under LoRA adapters: the same network with them switched off."""

    inner: Any

    @property
    def head(self) -> nn.Module | None:
        """The inner one's, unless it has adapters itself: then scores are made at once, without them."""
        head: nn.Module | None = self.inner.head
        return None if head is None or trained_parameters(head) else head

    def logits(self, *read: Any) -> Tensor:
        """The inner one's, without adapters."""
        with self.inner.without_adapters():
            return self.inner.logits(*read)  # type: ignore[no-any-return]

    def hidden(self, *read: Any) -> Tensor:
        """The inner one's, without adapters."""
        with self.inner.without_adapters():
            return self.inner.hidden(*read)  # type: ignore[no-any-return]


def make_optimizer(config: AgentConfig, policy: Policy, critic: Critic | None) -> MasterAdamW:
    """Adam over what is trained."""
    algorithm = config.algorithm
    return split_optimizer(
        trained_parameters(policy.module),
        critic,
        algorithm.learning_rate,
        algorithm.critic.learning_rate,
        algorithm.weight_decay,
    )


def split_optimizer(
    policy: list[nn.Parameter], critic: Critic | None, rate: float, critic_rate: float, weight_decay: float
) -> MasterAdamW:
    """One Adam for both, each with its own rate."""
    groups: list[dict[str, Any]] = [{"params": policy, "lr": rate}]
    if critic is not None:
        groups.append({"params": trained_parameters(critic), "lr": critic_rate})
    return MasterAdamW(groups, weight_decay=weight_decay)


def set_rates(optimizer: MasterAdamW, algorithm: Algorithm, iteration: int, iterations: int) -> None:
    """Learning rates by the schedule, from the finished share of the run alone."""
    rates = [algorithm.learning_rate, algorithm.critic.learning_rate]
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = decayed(rate, algorithm.lr_schedule, iteration / iterations)
