"""The network of one expert and its PPO update in NumPy, and experts as files.

All parameters of a network are views of one flat vector, so that Adam is a few lines; a safetensors file has the layers
by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError, did_you_mean, needs_extra, reading
from shoal.maths.distributions import log_softmax
from shoal.maths.initial_weights import orthogonal
from shoal.maths.updates import clipped_surrogate
from shoal.skills.worlds.world import Floats, Ints, World

Params = dict[str, Floats]
KEYS = (
    "torso/0/weight", "torso/0/bias", "torso/1/weight", "torso/1/bias",
    "actor/weight", "actor/bias", "critic/weight", "critic/bias",
)  # fmt: skip


NEVER = -1e4
"""The logit of an action that is left out; in float32 its exponential is 0."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of an expert's network."""

    inputs: int
    hidden: int
    actions: int

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Shapes in the order of the flat vector; the last head is actor and critic side by side."""
        head = self.actions + 1
        return (
            (self.inputs, self.hidden), (self.hidden,), (self.hidden, self.hidden), (self.hidden,),
            (self.hidden, head), (head,),
        )  # fmt: skip


class Losses(NamedTuple):
    """Means over a minibatch."""

    policy: float
    value: float
    entropy: float


class Network:
    """Two hidden ReLU layers shared by an actor and a critic head."""

    def __init__(self, shape: Shape, flat: Floats | None = None) -> None:
        self.shape = shape
        size = sum(int(np.prod(layer)) for layer in shape.layers)
        self.flat: Floats = np.zeros(size, np.float32) if flat is None else flat
        self.w0, self.b0, self.w1, self.b1, self.wh, self.bh = _views(self.flat, shape)

    @classmethod
    def initial(cls, shape: Shape, rng: np.random.Generator) -> Network:
        """Orthogonal weights; a nearly uniform policy."""
        net = cls(shape)
        net.w0[:] = orthogonal(net.w0.shape, 2**0.5, rng)
        net.w1[:] = orthogonal(net.w1.shape, 2**0.5, rng)
        net.wh[:, :-1] = orthogonal((shape.hidden, shape.actions), 0.01, rng)
        net.wh[:, -1:] = orthogonal((shape.hidden, 1), 1.0, rng)
        return net

    @classmethod
    def from_params(cls, params: Mapping[str, Floats], name: str = "an expert") -> Network:
        """The network of an expert, called `name`; a `DataError` says which array it has not as it should be."""
        if set(params) != set(KEYS):
            wrong = sorted(set(params) ^ set(KEYS))
            raise DataError(
                f"{name} must have exactly the arrays {', '.join(KEYS)}; wrong: {', '.join(wrong)}"
            )
        arrays = {key: np.asarray(array) for key, array in params.items()}
        first, last = arrays["torso/0/weight"].shape, arrays["actor/bias"].shape
        if (len(first), len(last)) != (2, 1):
            raise DataError(
                f"{name}: its first weight must be a matrix and its actor bias a vector, got shapes {first} and {last}"
            )
        net = cls(Shape(*first, *last))
        for key, view in net.views().items():
            if arrays[key].shape != view.shape:
                raise DataError(f"{name}: {key!r} must have shape {view.shape}, got {arrays[key].shape}")
            if arrays[key].dtype.kind != "f":
                raise DataError(f"{name}: {key!r} must hold numbers as float32 does, got {arrays[key].dtype}")
            with np.errstate(over="ignore"):
                view[...] = arrays[key]
            if not np.isfinite(view).all():
                raise DataError(
                    f"{name}: {key!r} has numbers that are not finite, so the training diverged; lower its "
                    "learning rate"
                )
        return net

    def views(self) -> Params:
        """The layers by name, sharing memory with the network."""
        arrays = (
            self.w0, self.b0, self.w1, self.b1,
            self.wh[:, :-1], self.bh[:-1], self.wh[:, -1:], self.bh[-1:],
        )  # fmt: skip
        return dict(zip(KEYS, arrays, strict=True))

    def params(self) -> Params:
        """The layers by name, copied."""
        return {key: np.ascontiguousarray(view) for key, view in self.views().items()}

    def mask_inputs(self, columns: Sequence[int]) -> Floats:
        """Set the weights of these inputs to 0; returns a mask of `flat` that is 0 on them and 1 elsewhere."""
        mask = np.ones_like(self.flat)
        _views(mask, self.shape)[0][list(columns)] = 0
        self.flat *= mask
        return mask

    def exclude_actions(self, actions: Sequence[int]) -> None:
        """Give these actions probability 0; their gradients are 0 too, so it stays."""
        self.wh[:, list(actions)] = 0
        self.bh[list(actions)] = NEVER

    def copy(self) -> Network:
        """The same parameters in memory of their own."""
        return Network(self.shape, self.flat.copy())

    def forward(self, observations: Floats) -> tuple[Floats, Floats]:
        """`[B, actions]` log-probabilities and `[B]` values."""
        hidden = np.maximum(observations @ self.w0 + self.b0, 0)
        hidden = np.maximum(hidden @ self.w1 + self.b1, 0)
        heads = hidden @ self.wh + self.bh
        return log_softmax(heads[:, :-1]), heads[:, -1]

    def gradient(
        self,
        observations: Floats,  # [B, inputs]
        actions: Ints,  # [B]
        old_logprobs: Floats,  # [B]
        advantages: Floats,  # [B]
        returns: Floats,  # [B]
        *,
        clip: float,
        entropy_coef: float,
        value_coef: float,
    ) -> tuple[Floats, Losses]:
        """Gradient of the clipped PPO loss (arXiv:1707.06347, eq. 7 and 9) with respect to `flat`."""
        count = len(actions)
        every = np.arange(count)
        hidden0 = np.maximum(observations @ self.w0 + self.b0, 0)
        hidden1 = np.maximum(hidden0 @ self.w1 + self.b1, 0)
        heads = hidden1 @ self.wh + self.bh
        logprobs, values = log_softmax(heads[:, :-1]), heads[:, -1]
        probs = np.exp(logprobs)
        entropy = -(probs * logprobs).sum(1)
        surrogate, slope = clipped_surrogate(logprobs[every, actions], old_logprobs, advantages, clip)
        d_heads = np.empty_like(heads)
        d_logits = probs * (slope[:, None] + entropy_coef * (logprobs + entropy[:, None]))
        d_logits[every, actions] -= slope
        d_heads[:, :-1] = d_logits / count
        d_heads[:, -1] = 2 * value_coef / count * (values - returns)
        out = np.empty_like(self.flat)
        g_w0, g_b0, g_w1, g_b1, g_wh, g_bh = _views(out, self.shape)
        np.matmul(hidden1.T, d_heads, out=g_wh)
        g_bh[:] = d_heads.sum(0)
        d_hidden = (d_heads @ self.wh.T) * (hidden1 > 0)
        np.matmul(hidden0.T, d_hidden, out=g_w1)
        g_b1[:] = d_hidden.sum(0)
        d_hidden = (d_hidden @ self.w1.T) * (hidden0 > 0)
        np.matmul(observations.T, d_hidden, out=g_w0)
        g_b0[:] = d_hidden.sum(0)
        losses = Losses(
            float(-surrogate.mean()), float(((values - returns) ** 2).mean()), float(entropy.mean())
        )
        return out, losses


def check_expert(world: World, net: Network, skill: str) -> None:
    """Raise a `DataError` for an expert that was made for other actions or observations than a world has."""
    shape = net.shape
    if (shape.inputs, shape.actions) != (world.obs_size, world.n_actions):
        raise DataError(
            f"the expert of {skill!r} was made for {shape.inputs} numbers in an observation and {shape.actions} "
            f"actions; this world shows {world.obs_size} and has {world.n_actions}. Train the skill again, or use the "
            "world that it was trained in."
        )


class Adam:
    """Adam (arXiv:1412.6980): moments of a flat vector of float32, and the step that they lead to."""

    def __init__(self, size: int) -> None:
        self.mean = np.zeros(size, np.float32)
        self.square = np.zeros(size, np.float32)
        self.count = 0

    def step(self, flat: Floats, gradient: Floats, lr: float, max_norm: float) -> None:
        """Move `flat` in place, by a gradient whose norm is clipped to `max_norm`."""
        norm = float(np.sqrt(np.dot(gradient, gradient)))
        if norm > max_norm:
            gradient = gradient * np.float32(max_norm / norm)
        self.count += 1
        self.mean += np.float32(0.1) * (gradient - self.mean)
        self.square += np.float32(0.001) * (gradient * gradient - self.square)
        rate = np.float32(lr / (1 - 0.9**self.count))
        spread = np.sqrt(self.square * np.float32(1 / (1 - 0.999**self.count)))
        flat -= rate * self.mean / (spread + np.float32(1e-5))


def _views(flat: Floats, shape: Shape) -> list[Floats]:
    views, at = [], 0
    for layer in shape.layers:
        size = int(np.prod(layer))
        views.append(flat[at : at + size].reshape(layer))
        at += size
    return views


Arrays = dict[str, NDArray]
_MIXTURE_KEY = re.compile(r"expert_(0|[1-9][0-9]*)/(.+)")
_NOTE = "shoal"  # all metadata under one key: with several, the order in the file, and its sha256, would vary


def build_remapping(
    dependency_skill_names: Sequence[str],
    new_skill_global_expert_idx: int,
    completed_skills: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[int, int], dict[int, int]]:
    """Global to local and local to global indices of the experts that a training loads, both ascending.

    Args:
        dependency_skill_names: skills whose experts the training needs.
        new_skill_global_expert_idx: expert of the skill to train.
        completed_skills: `{name: {"expert_idx": …}}`.

    Raises:
        ValueError: a dependency that is not among the completed skills, or an expert below 0.

    >>> done = {"Collect Wood": {"expert_idx": 0}, "Collect Stone": {"expert_idx": 2}}
    >>> build_remapping(["Collect Wood", "Collect Stone"], 7, done)
    ({0: 0, 2: 1, 7: 2}, {0: 0, 1: 2, 2: 7})
    """
    for name in dependency_skill_names:
        if name not in completed_skills:
            raise ValueError(
                f"dependency {name!r} is not among the completed skills.{did_you_mean(name, completed_skills)}"
            )
    needed = {int(completed_skills[name]["expert_idx"]) for name in dependency_skill_names}
    chosen = sorted({*needed, new_skill_global_expert_idx})
    if chosen[0] < 0:
        raise ValueError(f"expert indices must not be negative, got {chosen[0]}")
    return {index: local for local, index in enumerate(chosen)}, dict(enumerate(chosen))


def join_mixture(experts: Mapping[int, Mapping[str, NDArray]]) -> Arrays:
    """One flat set of arrays `expert_<local>/<key>` of several experts."""
    return {
        f"expert_{local}/{key}": array for local, params in experts.items() for key, array in params.items()
    }


def split_mixture(arrays: Mapping[str, NDArray]) -> dict[int, Arrays]:
    """The experts in what `join_mixture` made, by local index."""
    experts: dict[int, Arrays] = {}
    for key, array in arrays.items():
        match = _MIXTURE_KEY.fullmatch(key)
        if not match:
            raise DataError(f"{key!r} is not an expert's array; expected expert_<number>/<name>")
        experts.setdefault(int(match[1]), {})[match[2]] = array
    return dict(sorted(experts.items()))


def encode(arrays: Mapping[str, NDArray], note: Mapping[str, Any] | None = None) -> bytes:
    """A safetensors file; equal arrays and notes give equal bytes."""
    data: bytes = _safetensors().save(
        {key: np.ascontiguousarray(array) for key, array in arrays.items()},
        metadata={_NOTE: json.dumps(dict(note or {}), sort_keys=True)},
    )
    return data


def decode(data: bytes, name: str) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and note of a safetensors file; a `DataError` names the file that is broken."""
    with reading(name, "is not a safetensors file of shoal"):
        arrays = _safetensors().load(data)
        size = int.from_bytes(data[:8], "little")
        return arrays, json.loads(json.loads(data[8 : 8 + size]).get("__metadata__", {}).get(_NOTE, "{}"))


def _safetensors() -> Any:
    with needs_extra("training skills", "train"):
        import safetensors.numpy
    return safetensors.numpy
