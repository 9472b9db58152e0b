"""Actor-critic networks in torch: perceptrons for rows of numbers, convolutions for images, or your own.

All take rows `[B, D]` as `ObservationRows` makes them and answer `(parameters, value)`: logits of all
choices, or means of a Gaussian whose log deviation is the parameter `log_std`.
"""
# ruff: noqa: D102 (what is not documented here is in `ActorCritic`)

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.core.seeding import stream
from shoal.maths.initial_weights import initialize, orthogonal
from shoal.train.ppo.arrays.spaces import ActionRows, ObservationRows, Picture
from shoal.train.ppo.compiled.network import NetworkShape
from shoal.train.ppo.config import PPOConfig

logger = logging.getLogger(__name__)

MANY_NUMBERS = 1024
"""Of a table so large somebody wants to know that it is not taken for a picture."""

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


class ActorCritic(nn.Module):
    """What a learner needs: called, it answers action parameters `[B, n_parameters]` and values `[B]` at once."""

    log_std: nn.Parameter | None

    def policy(self, rows: Tensor) -> Tensor:
        """Action parameters."""
        return self(rows)[0]  # type: ignore[no-any-return]

    def value(self, rows: Tensor) -> Tensor:
        """Values."""
        return self(rows)[1]  # type: ignore[no-any-return]


def _log_std(actions: ActionRows, start: float) -> nn.Parameter | None:
    return None if actions.is_discrete else nn.Parameter(torch.full((actions.size,), float(start)))


def _empty(kind: Callable[..., nn.Module], *sizes: int) -> nn.Module:
    """A layer whose weights are still to be set.

    Not by `nn.utils.skip_init`, which imports a part of torch's compiler and sympy with it: 0.7 s.
    """
    layer = kind(*sizes, device="meta")
    for name, weight in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.empty(weight.shape, device="cpu")))
    return layer


def _perceptron(inputs: int, hidden: Sequence[int], outputs: int, activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [_empty(nn.Linear, inputs, units), ACTIVATIONS[activation]()]
        inputs = units
    return nn.Sequential(*layers, _empty(nn.Linear, inputs, outputs))


class MLPActorCritic(ActorCritic):
    """Separate perceptrons for actor and critic; the shape that the compiled path knows."""

    def __init__(self, inputs: int, actions: ActionRows, config: PPOConfig, *, seed: int = 0) -> None:
        super().__init__()
        hidden, activation = config.hidden, config.activation
        self.shape = NetworkShape(inputs, actions.n_parameters, hidden, activation, actions.groups)
        self.actor = _perceptron(inputs, hidden, actions.n_parameters, activation)
        self.critic = _perceptron(inputs, hidden, 1, activation)
        self.log_std = _log_std(actions, config.log_std_init)
        initialize(self.actor, seed, "actor", last_gain=0.01)
        initialize(self.critic, seed, "critic", last_gain=1.0)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(rows), self.value(rows)

    def policy(self, rows: Tensor) -> Tensor:
        return self.actor(rows)  # type: ignore[no-any-return]

    def value(self, rows: Tensor) -> Tensor:
        return self.critic(rows).squeeze(1)  # type: ignore[no-any-return]


class SDEActorCritic(MLPActorCritic):
    """Perceptrons for state-dependent exploration: the actor's last features stand behind its means.

    `log_std[F, A]` is of the weights by which noise is made of those features.
    """

    def __init__(self, inputs: int, actions: ActionRows, config: PPOConfig, *, seed: int = 0) -> None:
        if actions.is_discrete:
            raise ConfigError(f"sde=True is for continuous actions, got {actions.space}")
        super().__init__(inputs, actions, config, seed=seed)
        self.log_std = nn.Parameter(torch.full((config.hidden[-1], actions.size), float(config.log_std_init)))

    def policy(self, rows: Tensor) -> Tensor:
        """Means `[B, A]` and features `[B, F]`, side by side."""
        features = self.actor[:-1](rows)
        return torch.cat([self.actor[-1](features), features], dim=1)


class Encoder(nn.Module):
    """What an observation with images says, as `[B, width]`: convolutions for each image, a layer for its numbers."""

    def __init__(self, rows: ObservationRows, config: PPOConfig, *, numbers: int = 64, seed: int = 0) -> None:
        super().__init__()
        self.halved = config.precision == "bfloat16"  # between the pixels and what the heads read
        self._images = [(leaf, leaf.picture) for leaf in rows.leaves if leaf.picture is not None]
        self._n_numbers = rows.n_numbers
        towers = [_tower(picture, config.cnn) for _, picture in self._images]
        self.towers = nn.ModuleList(tower for tower, _ in towers)
        self.width = sum(width for _, width in towers)
        if self._n_numbers:
            self.numbers: nn.Module = nn.Sequential(_empty(nn.Linear, self._n_numbers, numbers), nn.ReLU())
            initialize(self.numbers, seed, "numbers", last_gain=2**0.5)
            self.width += numbers
        initialize(self.towers, seed, "towers", last_gain=2**0.5)

    def forward(self, rows: Tensor) -> Tensor:
        """What the heads read."""
        numbers, pixels = split_rows(rows, self._n_numbers)
        begin = self._images[0][0].start
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.halved):
            parts = [
                tower(_pixels(pixels[:, leaf.start - begin : leaf.stop - begin], picture)).float()
                for tower, (leaf, picture) in zip(self.towers, self._images, strict=True)
            ]
        if self._n_numbers:
            parts.append(self.numbers(numbers))
        return torch.cat(parts, dim=1)


class CNNActorCritic(Encoder, ActorCritic):
    """Convolutions for the images of an observation, its numbers beside them, two linear heads on top."""

    def __init__(
        self, rows: ObservationRows, actions: ActionRows, config: PPOConfig, *, seed: int = 0
    ) -> None:
        super().__init__(rows, config, seed=seed)
        self.actor = _empty(nn.Linear, self.width, actions.n_parameters)
        self.critic = _empty(nn.Linear, self.width, 1)
        self.log_std = _log_std(actions, config.log_std_init)
        initialize(self.actor, seed, "actor", last_gain=0.01)
        initialize(self.critic, seed, "critic", last_gain=1.0)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        features = Encoder.forward(self, rows)
        return self.actor(features), self.critic(features).squeeze(1)


class RecurrentActorCritic(ActorCritic):
    """An encoder, an LSTM (Hochreiter & Schmidhuber 1997) or GRU (arXiv:1406.1078), and two linear heads.

    What is remembered of an env is a row `[S]`: the hidden state, and for an LSTM the cell state behind it.
    """

    def __init__(
        self, rows: ObservationRows, actions: ActionRows, config: PPOConfig, *, seed: int = 0
    ) -> None:
        super().__init__()
        self.units, self.is_lstm = config.memory_units, config.recurrent == "lstm"
        self.memory_size = self.units * (2 if self.is_lstm else 1)
        self.encoder: nn.Module
        if rows.dtype == np.uint8:
            self.encoder = Encoder(rows, config, numbers=config.hidden[-1], seed=seed)
            width = self.encoder.width
        else:
            layers = _perceptron(rows.size, config.hidden[:-1], config.hidden[-1], config.activation)
            self.encoder = nn.Sequential(*layers, ACTIVATIONS[config.activation]())
            initialize(self.encoder, seed, "encoder", last_gain=2**0.5)
            width = config.hidden[-1]
        self.core = (nn.LSTM if self.is_lstm else nn.GRU)(width, self.units)
        self.actor = _empty(nn.Linear, self.units, actions.n_parameters)
        self.critic = _empty(nn.Linear, self.units, 1)
        self.log_std = _log_std(actions, config.log_std_init)
        initialize_core(self.core, seed)
        initialize(self.actor, seed, "actor", last_gain=0.01)
        initialize(self.critic, seed, "critic", last_gain=1.0)

    def step(self, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Action parameters `[N, P]`, values `[N]` and hidden states afterwards `[N, S]`."""
        told, memory = self._core(self.encoder(rows)[None], memory)
        return self.actor(told[0]), self.critic(told[0]).squeeze(1), memory

    def along(self, rows: Tensor, memory: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        """Action parameters `[M, P]` and values `[M]` of rows `[M, D]` that follow each other as `pieces` say.

        Args:
            rows: in any order.
            memory: `[N, S]` before the first rows.
            pieces: in what order the rows come; each piece begins with a row of `memory` or with nothing.
        """
        features = self.encoder(rows)
        begin = torch.cat([memory, memory.new_zeros(1, memory.shape[1])])[pieces.begin]
        told, _ = self._core(features[pieces.rows], begin)
        told = told[pieces.step, pieces.piece]
        return self.actor(told), self.critic(told).squeeze(1)

    def _core(self, features: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_lstm:
            told, last = self.core(features, memory[None].contiguous())
            return told, last[0]
        hidden, cell = (part[None].contiguous() for part in memory.split(self.units, dim=1))
        told, (hidden, cell) = self.core(features, (hidden, cell))
        return told, torch.cat([hidden[0], cell[0]], dim=1)


class Pieces(NamedTuple):
    """Rows `[M]` as sequences side by side, padded to the longest: pieces of episodes, none of which goes on."""

    rows: Tensor  # [L, K] which row stands where; behind the end of a piece its first one again
    begin: Tensor  # [K] the row of memory it begins with; -1 for nothing
    step: Tensor  # [M] where each row stands in `rows`
    piece: Tensor  # [M]


def pieces_of(sequences: Sequence[tuple[int, Sequence[int]]], n_rows: int) -> Pieces:
    """Sequences, each given by its row of memory (-1 for nothing) and its rows, side by side."""
    longest = max(len(rows) for _, rows in sequences)
    table = np.zeros((longest, len(sequences)), np.int64)
    step, piece = np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64)
    for k, (_, rows) in enumerate(sequences):
        table[:, k] = rows[0]
        table[: len(rows), k] = rows
        step[list(rows)], piece[list(rows)] = np.arange(len(rows)), k
    begin = np.array([memory for memory, _ in sequences], np.int64)
    return Pieces(*(torch.from_numpy(array) for array in (table, begin, step, piece)))


def initialize_core(core: nn.Module, seed: int) -> None:
    """Orthogonal weights for each gate of a recurrent layer and zero biases, from the run's seed."""
    gates = 4 if isinstance(core, nn.LSTM) else 3
    for name, parameter in core.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(parameter)
            continue
        for k, gate in enumerate(parameter.detach().chunk(gates)):
            chance = stream(seed, "init", "core", name, k)
            gate.copy_(torch.from_numpy(orthogonal((gate.shape[0], gate.shape[1]), 1.0, chance)))


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

    def _shaped(self, rows: Tensor) -> Any:
        whole: dict[str, Any] = {}
        packed = self._rows.dtype == np.uint8
        numbers, pixels = split_rows(rows, self._rows.n_numbers) if packed else (rows, rows)
        begin = min((leaf.start for leaf in self._rows.leaves if leaf.is_image), default=0)
        for leaf in self._rows.leaves:
            if leaf.is_image:
                part = pixels[:, leaf.start - begin : leaf.stop - begin]
            else:
                part = numbers[:, leaf.start : leaf.stop]
            if isinstance(leaf.space, spaces.Box | spaces.MultiBinary):
                part = part.reshape(-1, *(leaf.space.shape or (1,)))
            part = part / 255.0 if leaf.is_image else part
            if not leaf.path:
                return part
            inner = whole
            for key in leaf.path[:-1]:
                inner = inner.setdefault(key, {})
            inner[leaf.path[-1]] = part
        return whole


def split_rows(rows: Tensor, n_numbers: int) -> tuple[Tensor, Tensor]:
    """Rows of an observation with images as (numbers, pixels), from bytes, or from floats one after the other."""
    if rows.dtype == torch.uint8 and n_numbers:
        # (`contiguous` copies no row that is alone, and its stride is that of the whole row.)
        numbers = rows[:, : 4 * n_numbers].clone(memory_format=torch.contiguous_format)
        return numbers.view(torch.float32), rows[:, 4 * n_numbers :]
    return rows[:, :n_numbers], rows[:, n_numbers:]


def _pixels(rows: Tensor, picture: Picture) -> Tensor:
    """Rows of pixels as `[B, channels, height, width]` in [0, 1].

    On a CPU the channels of a pixel lie side by side in memory, where convolutions find their gradients sooner.
    """
    shaped = rows.reshape(-1, *picture.shape).permute(0, *(axis + 1 for axis in picture.order))
    shaped = shaped.reshape(-1, picture.channels, picture.height, picture.width)
    if shaped.device.type == "cpu":
        shaped = shaped.contiguous(memory_format=torch.channels_last)
    return shaped / 255.0


Layers = tuple[nn.Module, int]  # and how many features come out


def _tower(picture: Picture, kind: str) -> Layers:
    """The convolutions `kind`; "auto" is nature's from 36 pixels on and small ones below."""
    if kind == "auto":
        kind = "nature" if min(picture.height, picture.width) >= 36 else "small"
    return _impala(picture) if kind == "impala" else _plain(picture, kind)


def _plain(picture: Picture, kind: str) -> Layers:
    """The convolutions of Mnih et al. (2015), or small ones."""
    channels, height, width = picture.channels, picture.height, picture.width
    nature, small = [(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)], [(32, 3, 1, 1), (64, 3, 2, 1)]
    layers: list[nn.Module] = []
    for units, size, stride, padding in nature if kind == "nature" else small:
        layers += [_empty(nn.Conv2d, channels, units, size, stride, padding), nn.ReLU()]
        height, width = ((side + 2 * padding - size) // stride + 1 for side in (height, width))
        channels = units
    if min(height, width) < 1:
        raise ConfigError(
            f"the convolutions cnn='nature' need pictures of at least 36 x 36 pixels, got "
            f"{picture.height} x {picture.width}; use cnn='small' or 'auto'"
        )
    flat = _empty(nn.Linear, channels * height * width, 512)
    return nn.Sequential(*layers, nn.Flatten(), flat, nn.ReLU()), 512


class _Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.first, self.second = (_empty(nn.Conv2d, units, units, 3, 1, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(torch.relu(x))))  # type: ignore[no-any-return]


def _impala(picture: Picture) -> Layers:
    """The residual network of Espeholt et al. (2018, arXiv:1802.01561), of 15 convolutions."""
    channels, height, width = picture.channels, picture.height, picture.width
    layers: list[nn.Module] = []
    for units in (16, 32, 32):
        layers += [_empty(nn.Conv2d, channels, units, 3, 1, 1), nn.MaxPool2d(3, 2, 1)]
        layers += [_Residual(units), _Residual(units)]
        channels, height, width = units, (height + 1) // 2, (width + 1) // 2
    flat = _empty(nn.Linear, channels * height * width, 256)
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), flat, nn.ReLU()), 256


def build_network(
    rows: ObservationRows, actions: ActionRows, config: PPOConfig, *, seed: int, network: nn.Module | None = None
) -> ActorCritic:  # fmt: skip
    """The network for these spaces: the user's own, a recurrent one, a CNN for images, else a perceptron."""
    if network is not None and config.sde:
        raise ConfigError("sde=True builds a network, but one was given; leave out either")
    if network is not None and config.recurrent != "none":
        raise ConfigError(
            f"recurrent={config.recurrent!r} builds a network, but one was given; leave out either"
        )
    for name, usual in (("precision", "float32"), ("cnn", "auto")):
        given = getattr(config, name)
        if given != usual and (network is not None or rows.dtype != np.uint8):
            raise ConfigError(
                f"{name}={given!r} is of the convolutions that are built for images, and there are none here; "
                "leave it out"
            )
    if isinstance(network, ActorCritic):
        return network
    if network is not None:
        return OwnNetwork(network, rows, actions, config.log_std_init)
    _warn_of_tables(rows)
    if config.sde and (config.recurrent != "none" or rows.dtype == np.uint8):
        raise ConfigError("sde=True is for perceptrons, not for images or recurrent policies")
    if config.recurrent != "none":
        return RecurrentActorCritic(rows, actions, config, seed=seed)
    if rows.dtype == np.uint8:
        return CNNActorCritic(rows, actions, config, seed=seed)
    kind = SDEActorCritic if config.sde else MLPActorCritic
    return kind(rows.size, actions, config, seed=seed)


def _warn_of_tables(rows: ObservationRows) -> None:
    for leaf in rows.leaves:
        shape = leaf.space.shape or ()
        if not leaf.is_image and len(shape) >= 2 and leaf.stop - leaf.start >= MANY_NUMBERS:
            logger.warning(
                "observations of shape %s and type %s go through a perceptron: if they are pictures, give them as "
                "uint8 (0 to 255), for which there are convolutions",
                shape,
                leaf.space.dtype,
            )


def as_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Named arrays as tensors that share their memory; a module that loads them copies."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def copied(tensor: Tensor) -> np.ndarray:
    """The values of a tensor as an array of their own."""
    return np.array(tensor.detach().cpu().numpy(), copy=True)


class ExportedPolicy(nn.Module):
    """Raw observation rows to action parameters, normalisation and squashing into `bounds` (low, high) included."""

    mean: Tensor
    scale: Tensor

    def __init__(
        self, network: Any, mean: Tensor | None, scale: Tensor | None, bounds: tuple[Tensor, Tensor] | None
    ) -> None:
        super().__init__()
        self.bounds = bounds
        self.network = network
        self.normalizes = mean is not None
        self.n_parameters: int | None = None
        if isinstance(network, SDEActorCritic) and network.log_std is not None:
            self.n_parameters = network.log_std.shape[1]  # not the features behind the means
        self.register_buffer("mean", mean if mean is not None else torch.zeros(1))
        self.register_buffer("scale", scale if scale is not None else torch.ones(1))

    def forward(self, observation: Tensor) -> Tensor:
        """Action parameters `[batch, n]`."""
        if self.normalizes:
            n = len(self.mean)  # pictures stand behind the numbers, and stay as they are
            numbers = ((observation[:, :n] - self.mean) * self.scale).clamp(-10.0, 10.0)
            observation = torch.cat([numbers, observation[:, n:]], dim=1)
        parameters: Tensor = self.network.policy(observation)[:, : self.n_parameters]
        if self.bounds is None:
            return parameters
        low, high = self.bounds
        return (low + 0.5 * (parameters.tanh() + 1.0) * (high - low)).maximum(low).minimum(high)


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
