"""The networks of a run: what is trained, its critic, what a KL penalty holds on to, and their optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.files import verify_folder, write_folder
from shoal.train.agent.config import AgentConfig
from shoal.train.agent.optimizer import trained_parameters
from shoal.train.agent.policies.policy import Around, Critic, Policy
from shoal.train.agent.policies.sharding import ShardedPolicy, shard
from shoal.train.agent.processes.distributed import ALONE, Processes
from shoal.train.agent.processes.weights import fill, gather


def make_networks(
    config: AgentConfig, policy: Policy, kept: Path, processes: Processes
) -> tuple[Policy, Critic | None, Reference | None]:
    """The policy as it is trained, and the networks beside it: a critic, and what a KL penalty holds on to.

    Each is cut into shards once it is made, where they are to be, so that no more than two are whole at a time.
    """
    critic = Critic(policy) if config.algorithm.needs == "critic" else None
    if critic is not None and processes.sharded:
        shard(critic, policy, processes, [critic.output])
    kl, lora = config.algorithm.kl, hasattr(policy, "without_adapters")
    reference = None
    if kl.coef and not lora:
        frozen = policy.twin()
        frozen.module.requires_grad_(False)
        cut = ShardedPolicy(frozen, processes) if processes.sharded else frozen
        reference = Reference(cut, kept, processes)
    trained: Policy = ShardedPolicy(policy, processes) if processes.sharded else policy
    if kl.coef and lora:
        warmed = kl.anchor == "warmup"
        reference = (
            Reference(KeptAdapters(trained), kept, processes) if warmed else Reference(BasePolicy(trained))
        )
    return trained, critic, reference


class Reference:
    """The weights that a KL penalty holds on to, those of `algorithm.kl.anchor`, kept in the run's folder.

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
        if isinstance(self.policy, KeptAdapters):
            self.policy.keep()
        else:
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

    def _reading(self) -> AbstractContextManager[None]:
        """The network is the one that is asked, for as long as this lasts."""
        return self.inner.without_adapters()  # type: ignore[no-any-return]

    @property
    def head(self) -> nn.Module | None:
        """The inner one's, unless it has adapters itself: then scores are made at once, without them."""
        head: nn.Module | None = self.inner.head
        return None if head is None or trained_parameters(head) else head

    def logits(self, *read: Any) -> Tensor:
        """The inner one's, as `_reading` makes it."""
        with self._reading():
            return self.inner.logits(*read)  # type: ignore[no-any-return]

    def hidden(self, *read: Any) -> Tensor:
        """The inner one's, as `_reading` makes it."""
        with self._reading():
            return self.inner.hidden(*read)  # type: ignore[no-any-return]


class KeptAdapters(BasePolicy):
    """The model with the LoRA adapters of an earlier moment, in the place of the present ones while it reads."""

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self._kept = {name: weight.detach().clone() for name, weight in inner.own_weights().items()}

    @torch.no_grad()
    def keep(self) -> None:
        """Take over the present adapters."""
        for name, weight in self.inner.own_weights().items():
            self._kept[name].copy_(weight)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over adapters by name, which every process has whole."""
        fill(self._kept, weights)
        self.weights_version = version

    @contextmanager
    def _reading(self) -> Iterator[None]:
        own = self.inner.own_weights()
        present = {name: weight.detach().clone() for name, weight in own.items()}
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(self._kept[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in own.items():
                    weight.copy_(present[name])
