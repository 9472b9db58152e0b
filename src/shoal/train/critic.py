"""A critic beside the policy: the value of a context before each token that the model wrote."""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.train.policy import TrainableEngine


class Critic(nn.Module):
    """A body of the policy's shape, started from its weights, and one linear output that starts at 0.

    Args:
        engine: whose network is copied; it must be able to give hidden states.
    """

    def __init__(self, engine: TrainableEngine) -> None:
        super().__init__()
        if not hasattr(engine, "hidden_at"):
            raise ConfigError(
                f"estimators with a critic need an engine that gives hidden states, {type(engine).__name__} does not"
            )
        self._body = copy.copy(engine)
        self.model = copy.deepcopy(engine.model)
        self._body.model = self.model  # type: ignore[misc]
        width = self._body.hidden_width  # type: ignore[attr-defined]
        device = next(self.model.parameters()).device
        with torch.random.fork_rng(devices=[]):  # the weights are set below; global state stays as it was
            self.output = nn.Linear(width, 1, device=device)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        """Values `[N]` of the contexts before the true places of `where [B, T]`, in row-major order."""
        hidden = self._body.hidden_at(ids, lengths, where, begins)  # type: ignore[attr-defined]
        return cast(Tensor, self.output(hidden.float())[:, 0].clone())  # hooks on the result want no view


def split_optimizer(
    policy: list[nn.Parameter], critic: Critic | None, rate: float, critic_rate: float, weight_decay: float
) -> torch.optim.AdamW:
    """One Adam for both, each with its own rate."""
    groups: list[dict[str, object]] = [{"params": policy, "lr": rate}]
    if critic is not None:
        trained = [parameter for parameter in critic.parameters() if parameter.requires_grad]
        groups.append({"params": trained, "lr": critic_rate})
    return torch.optim.AdamW(groups, weight_decay=weight_decay, fused=True)
