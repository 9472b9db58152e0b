"""The networks beside the policy: a critic, and what a KL penalty holds on to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.core.files import verify_folder, write_folder
from shoal.train.agent.config import AgentConfig
from shoal.train.agent.optimizer import trained_parameters
from shoal.train.agent.policies.policy import Critic, Policy, WrappedPolicy
from shoal.train.agent.policies.sharding import ShardedPolicy, shard
from shoal.train.agent.processes.distributed import ALONE, Processes
from shoal.train.agent.processes.weights import fill, gather


def make_networks(
    config: AgentConfig, policy: Policy, folder: Path, processes: Processes
) -> tuple[Policy, Critic | None, Reference | None]:
    """The policy as it is trained, its critic, and what a KL penalty holds on to, which is kept in `folder`.

    Each is cut into shards once it is made, where they are to be, so that no more than two are whole at a time.
    """
    critic = Critic(policy) if config.algorithm.needs == "critic" else None
    if critic is not None and processes.sharded:
        shard(critic, policy, processes, [critic.output])
    penalized, lora = config.algorithm.kl.coef, hasattr(policy, "without_adapters")
    held: Policy | None = None
    if penalized and not lora:
        held = policy.copy()
        held.module.requires_grad_(False)
        held = ShardedPolicy(held, processes) if processes.sharded else held
    trained: Policy = ShardedPolicy(policy, processes) if processes.sharded else policy
    if penalized and lora:
        held = HeldAdapters(trained)
    return trained, critic, None if held is None else Reference(held, folder, processes)


class Reference:
    """The weights that a KL penalty holds on to, those of `algorithm.kl.anchor`, kept for a run that is resumed."""

    def __init__(self, policy: Policy, folder: Path, processes: Processes = ALONE) -> None:
        self.policy = policy
        self._folder, self._processes = folder, processes

    def keep(self, policy: Policy) -> None:
        """Take over the present weights of `policy`, in memory and on disk."""
        if isinstance(self.policy, HeldAdapters):
            self.policy.keep()
        else:
            self.policy.module.load_state_dict(policy.module.state_dict())
        weights = gather(policy.saved_weights(), self._processes.first)
        if self._processes.first:
            with write_folder(self._folder) as folder:
                policy.save(folder, weights)

    def load(self) -> None:
        """Read back what `keep` wrote."""
        weights = self.policy.read(verify_folder(self._folder))
        self.policy.load_weights(weights, self.policy.weights_version)


class HeldAdapters(WrappedPolicy):
    """The model with the LoRA adapters of an earlier moment, in the place of the present ones while it reads.

    At the start adapters change nothing: then it is the base model.
    """

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self._held = {name: weight.detach().clone() for name, weight in inner.own_weights().items()}

    def keep(self) -> None:
        """Take over the present adapters."""
        fill(self._held, self.inner.own_weights())

    def own_weights(self) -> Mapping[str, Tensor]:
        """The adapters that are held."""
        return self._held

    @property
    def head(self) -> nn.Module | None:
        """The inner one's, unless it has adapters itself: then scores are made at once, with those that are held."""
        head: nn.Module | None = self.inner.head
        return None if head is None or trained_parameters(head) else head

    def logits(self, *read: Any) -> Tensor:
        """The inner one's, with the adapters that are held."""
        with self._in_place():
            return self.inner.logits(*read)

    def hidden(self, *read: Any) -> Tensor:
        """The inner one's, with the adapters that are held."""
        with self._in_place():
            return self.inner.hidden(*read)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        own = self.inner.own_weights()
        present = {name: weight.detach().clone() for name, weight in own.items()}
        fill(own, self._held)
        try:
            yield
        finally:
            fill(own, present)
