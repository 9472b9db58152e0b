"""Actor-critic networks in torch: perceptrons for rows of numbers, convolutions for images, or your own.

All take rows `[B, D]` as `ObservationRows` makes them and answer `(parameters, value)`: logits of all
choices, or means of a Gaussian whose log deviation is the parameter `log_std`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from shoal.maths.initial_weights import initialize
from shoal.rollout.arrays.spaces import ActionRows, Leaf, ObservationRows
from shoal.train.ppo.compiled.network import NetworkShape

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


class ActorCritic(nn.Module):
    """What a learner needs: `policy(rows)`, `value(rows)`, both at once when called, and maybe `log_std`."""

    log_std: nn.Parameter | None

    def policy(self, rows: Tensor) -> Tensor:
        """Action parameters `[B, n_parameters]`."""
        raise NotImplementedError

    def value(self, rows: Tensor) -> Tensor:
        """Values `[B]`."""
        raise NotImplementedError

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.policy(rows), self.value(rows)


def _log_std(actions: ActionRows, start: float) -> nn.Parameter | None:
    return None if actions.is_discrete else nn.Parameter(torch.full((actions.size,), float(start)))


def _perceptron(inputs: int, hidden: Sequence[int], outputs: int, activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.utils.skip_init(nn.Linear, inputs, units), ACTIVATIONS[activation]()]
        inputs = units
    return nn.Sequential(*layers, nn.utils.skip_init(nn.Linear, inputs, outputs))


class MLPActorCritic(ActorCritic):
    """Separate perceptrons for actor and critic; the shape that the compiled path knows."""

    def __init__(
        self, inputs: int, actions: ActionRows, *, hidden: Sequence[int] = (64, 64), activation: str = "tanh",
        log_std_init: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shape = NetworkShape(inputs, actions.n_parameters, tuple(hidden), activation, actions.groups)
        self.actor = _perceptron(inputs, hidden, actions.n_parameters, activation)
        self.critic = _perceptron(inputs, hidden, 1, activation)
        self.log_std = _log_std(actions, log_std_init)
        initialize(self.actor, seed, "actor", last_gain=0.01)
        initialize(self.critic, seed, "critic", last_gain=1.0)

    def policy(self, rows: Tensor) -> Tensor:
        """Action parameters."""
        return self.actor(rows)  # type: ignore[no-any-return]

    def value(self, rows: Tensor) -> Tensor:
        """Values."""
        return self.critic(rows).squeeze(1)  # type: ignore[no-any-return]


class CNNActorCritic(ActorCritic):
    """Convolutions for the images of an observation, its numbers beside them, two linear heads on top."""

    def __init__(
        self, rows: ObservationRows, actions: ActionRows, *, features: int = 512,
        hidden: Sequence[int] = (64,), log_std_init: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self._images = [leaf for leaf in rows.leaves if leaf.is_image]
        self._numbers = [leaf for leaf in rows.leaves if not leaf.is_image]
        self.towers = nn.ModuleList(_tower(leaf, features) for leaf in self._images)
        width = features * len(self._images)
        if self._numbers:
            size = sum(leaf.stop - leaf.start for leaf in self._numbers)
            self.numbers: nn.Module = nn.Sequential(
                nn.utils.skip_init(nn.Linear, size, hidden[-1]), nn.ReLU()
            )
            initialize(self.numbers, seed, "numbers", last_gain=2**0.5)
            width += hidden[-1]
        self.actor = nn.utils.skip_init(nn.Linear, width, actions.n_parameters)
        self.critic = nn.utils.skip_init(nn.Linear, width, 1)
        self.log_std = _log_std(actions, log_std_init)
        initialize(self.towers, seed, "towers", last_gain=2**0.5)
        initialize(self.actor, seed, "actor", last_gain=0.01)
        initialize(self.critic, seed, "critic", last_gain=1.0)

    def features(self, rows: Tensor) -> Tensor:
        """What both heads read."""
        parts = [
            tower(_picture(rows[:, leaf.start : leaf.stop], leaf))
            for tower, leaf in zip(self.towers, self._images, strict=True)
        ]
        if self._numbers:
            parts.append(self.numbers(torch.cat([rows[:, x.start : x.stop] for x in self._numbers], dim=1)))
        return torch.cat(parts, dim=1)

    def policy(self, rows: Tensor) -> Tensor:
        """Action parameters."""
        return self.actor(self.features(rows))  # type: ignore[no-any-return]

    def value(self, rows: Tensor) -> Tensor:
        """Values."""
        return self.critic(self.features(rows)).squeeze(1)  # type: ignore[no-any-return]

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Both, with the features computed once."""
        features = self.features(rows)
        return self.actor(features), self.critic(features).squeeze(1)


class OwnNetwork(ActorCritic):
    """A user's module: called with observations in the space's shape, answers `(parameters, values)`.

    Box observations come as float tensors `[B, *shape]` (uint8 images divided by 255), Discrete as one-hot,
    Dict as a dict of these. `parameters` are logits `[B, total choices]` or means `[B, action size]`. A
    parameter `log_std` of the module is used for continuous actions; without one it is added here.
    """

    def __init__(
        self, module: nn.Module, rows: ObservationRows, actions: ActionRows, log_std_init: float
    ) -> None:
        super().__init__()
        self.module = module
        self._rows = rows
        self._outputs = actions.n_parameters
        own = getattr(module, "log_std", None)
        self.log_std = own if isinstance(own, nn.Parameter) else _log_std(actions, log_std_init)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The module's answer, checked."""
        answer = self.module(self._shaped(rows))
        if not (isinstance(answer, tuple | list) and len(answer) == 2):
            raise TypeError(
                f"the network must return (action parameters, values), got {type(answer).__name__}"
            )
        parameters, values = answer
        if parameters.shape != (len(rows), self._outputs):
            raise ValueError(
                f"the network must return action parameters of shape [batch, {self._outputs}] for this "
                f"action space, got {list(parameters.shape)} for a batch of {len(rows)}"
            )
        return parameters, values.reshape(len(rows))

    def policy(self, rows: Tensor) -> Tensor:
        """Action parameters."""
        return self(rows)[0]  # type: ignore[no-any-return]

    def value(self, rows: Tensor) -> Tensor:
        """Values."""
        return self(rows)[1]  # type: ignore[no-any-return]

    def _shaped(self, rows: Tensor) -> Any:
        whole: dict[str, Any] = {}
        for leaf in self._rows.leaves:
            part = rows[:, leaf.start : leaf.stop]
            if isinstance(leaf.space, spaces.Box | spaces.MultiBinary):
                part = part.reshape(len(rows), *(leaf.space.shape or (1,)))
            part = part / 255.0 if leaf.is_image else part
            if not leaf.path:
                return part
            inner = whole
            for key in leaf.path[:-1]:
                inner = inner.setdefault(key, {})
            inner[leaf.path[-1]] = part
        return whole


def _tower(leaf: Leaf, features: int) -> nn.Sequential:
    """The convolutions of Mnih et al. (2015); small ones for images under 36 pixels."""
    shape = leaf.space.shape or ()
    channels, height, width = (shape[2], *shape[:2]) if _channels_last(shape) else shape
    nature, small = [(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)], [(32, 3, 1, 1), (64, 3, 2, 1)]
    plan = nature if min(height, width) >= 36 else small
    layers: list[nn.Module] = []
    for units, size, stride, padding in plan:
        layers += [nn.utils.skip_init(nn.Conv2d, channels, units, size, stride, padding), nn.ReLU()]
        height, width = ((side + 2 * padding - size) // stride + 1 for side in (height, width))
        channels = units
    flat = channels * height * width
    return nn.Sequential(*layers, nn.Flatten(), nn.utils.skip_init(nn.Linear, flat, features), nn.ReLU())


def _channels_last(shape: tuple[int, ...]) -> bool:
    return shape[2] <= shape[0]


def _picture(rows: Tensor, leaf: Leaf) -> Tensor:
    """Rows of uint8 pixels as `[B, channels, height, width]` in [0, 1]."""
    shape = leaf.space.shape or ()
    picture = rows.reshape(len(rows), *shape) / 255.0
    return picture.permute(0, 3, 1, 2) if _channels_last(shape) else picture


def build_network(
    rows: ObservationRows, actions: ActionRows, *, hidden: Sequence[int], activation: str,
    log_std_init: float, seed: int, network: nn.Module | None = None,
) -> ActorCritic:  # fmt: skip
    """The network for these spaces: the user's own, a CNN when there are images, else a perceptron."""
    if isinstance(network, ActorCritic):
        return network
    if network is not None:
        return OwnNetwork(network, rows, actions, log_std_init)
    if any(leaf.is_image for leaf in rows.leaves):
        return CNNActorCritic(rows, actions, log_std_init=log_std_init, seed=seed)
    return MLPActorCritic(
        rows.size, actions, hidden=hidden, activation=activation, log_std_init=log_std_init, seed=seed
    )


def n_weights(network: nn.Module) -> int:
    """How many numbers a network learns."""
    return int(np.sum([p.numel() for p in network.parameters()]))


def copied(tensor: Tensor) -> np.ndarray:
    """The values of a tensor as an array of their own."""
    return np.array(tensor.detach().cpu().numpy(), copy=True)


class ExportedPolicy(nn.Module):
    """Raw observation rows to action parameters, normalisation included."""

    mean: Tensor
    scale: Tensor

    def __init__(self, network: Any, mean: Tensor | None, scale: Tensor | None) -> None:
        super().__init__()
        self.network = network
        self.normalizes = mean is not None
        self.register_buffer("mean", mean if mean is not None else torch.zeros(1))
        self.register_buffer("scale", scale if scale is not None else torch.ones(1))

    def forward(self, observation: Tensor) -> Tensor:
        """Action parameters `[batch, n]`."""
        if self.normalizes:
            observation = ((observation - self.mean) * self.scale).clamp(-10.0, 10.0)
        return self.network.policy(observation)  # type: ignore[no-any-return]


def write_onnx(policy: ExportedPolicy, n_inputs: int, path: Path) -> Path:
    """Export with a free batch size and check the file."""
    import onnx

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own future
        torch.onnx.export(
            policy.eval(), (torch.zeros(1, n_inputs),), str(path), input_names=["observation"],
            output_names=["action_parameters"], dynamic_axes={"observation": {0: "batch"}}, dynamo=False,
        )  # fmt: skip
    onnx.checker.check_model(onnx.load(str(path)))
    return path
