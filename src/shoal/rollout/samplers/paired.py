"""A network that is trained here beside an engine that samples for it: vLLM, or replicas on a cluster.

The sampler takes over the weights before the first batch after any change. It rounds differently than the
trainer, so see `algorithm.rollout_correction`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.rollout.capabilities import Capabilities, capabilities_of
from shoal.rollout.samplers.sampler import ChatTokenizer, Completion, Level, Request


class PairedEngine:
    """Completes prompts with `sampler` and trains `learner`; everything about training is the learner's.

    Args:
        learner: an engine with gradients (`TinyEngine`, `HuggingFaceEngine`).
        sampler: an engine that takes weights (`VllmEngine`, `RayEngine`).
    """

    def __init__(self, learner: Any, sampler: Any) -> None:
        self.learner, self.sampler = learner, sampler
        self._sampled_with: tuple[int, int] | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("learner", "sampler"):  # while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.learner, name)

    def __copy__(self) -> Any:
        """Copies (a critic, a frozen reference) sample nothing: they are copies of the learner."""
        return copy.copy(self.learner)

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The learner's."""
        tokenizer: ChatTokenizer = self.learner.tokenizer
        return tokenizer

    @property
    def level(self) -> Level:
        """The sampler's."""
        level: Level = self.sampler.level
        return level

    @property
    def capabilities(self) -> Capabilities:
        """Trained here, sampled there."""
        there = capabilities_of(self.sampler)
        return Capabilities(there.level, there.token_ids, there.logprobs, gradients=True, weights=True)

    @property
    def weights_version(self) -> int:
        """The learner's."""
        return int(self.learner.weights_version)

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self.learner.weights_version = version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order, by the weights as they are now."""
        self._synchronise()
        completions: list[Completion] = self.sampler.generate(requests)
        return completions

    def load_weights(self, weights: Any, version: int) -> None:
        """Take over weights by name, here and, before the next batch, there."""
        self.learner.load_weights(weights, version)

    def save(self, folder: Path, weights: Any = None) -> None:
        """The learner's files."""
        self.learner.save(folder, weights)

    def restart(self) -> None:
        """Begin anew with the sampler."""
        self.sampler.restart()
        self._sampled_with = None

    def close(self) -> None:
        """End the sampler."""
        self.sampler.close()

    def hand_over(self, weights: dict[str, Any]) -> None:
        """Give the sampler these weights as the present ones, where the learner has them in shards."""
        self.sampler.load_weights(weights, self.weights_version)
        self._sampled_with = self._stamp()

    def _synchronise(self) -> None:
        if self._stamp() != self._sampled_with:
            self.hand_over(
                {name: tensor.detach() for name, tensor in self.learner.model.state_dict().items()}
            )

    def _stamp(self) -> tuple[int, int]:
        parameters = self.learner.model.parameters()
        return self.weights_version, sum(parameter._version for parameter in parameters)
