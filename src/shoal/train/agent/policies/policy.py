"""The networks of a run: the one that is trained, its critic, and the one that a KL penalty holds on to."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.maths.noise import torch_noise
from shoal.samplers.models import INVARIANT
from shoal.samplers.sampler import of_inner
from shoal.train.agent.algorithms.losses import entropy_of
from shoal.train.agent.batch.packing import BY_BLOCKS, BY_MASK, MicroBatch, Sharing
from shoal.train.agent.policies.attention import RowMask
from shoal.train.agent.processes.weights import fill

logger = logging.getLogger(__name__)


Inputs = Mapping[str, Tensor] | None


class Policy(ABC):
    """A network and the tokens it reads: what is trained, asked for values, or held on to. It samples nothing.

    Args:
        module: the network; whoever samples from the same module sees every update at once.
        tokenizer: between text and its tokens.
        pad_id: fills rows up.
    """

    def __init__(self, module: nn.Module, tokenizer: Any, pad_id: int) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.pad_id = pad_id
        self.weights_version = 0
        """The iterations that these weights have behind them, whether or not they changed."""

    @abstractmethod
    def logits(self, ids: Tensor, lengths: Tensor, where: Tensor, starts: Tensor | None = None) -> Tensor:
        """Scores `[N, V]` of what comes behind the places before the true ones of `where [B, T]`, in row-major order.

        Args:
            ids: `[B, T]` samples, padded on the right; the last column is not read.
            lengths: `[B]` true lengths.
            where: `[B, T]` bool; the first column must be False, since nothing predicts the first token.
            starts: `[B, T]` where the sample of each token starts, if rows hold several: attention stays within them,
                and positions start anew. `[1 + 2 S, B, T]` with the first place and the end of each of the pieces of
                the row that it goes on from, see `shoal.train.agent.batch.packing.MicroBatch`.
        """

    @abstractmethod
    def hidden(self, ids: Tensor, lengths: Tensor, where: Tensor, starts: Tensor | None = None) -> Tensor:
        """Hidden states `[N, width]` that predict the tokens at the true places of `where`; see `logits`."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Size of a hidden state."""

    @property
    def head(self) -> nn.Module | None:
        """The layer that makes scores of hidden states, where nothing else does; they can then be made in parts."""
        return None

    @property
    def sharing(self) -> Sharing | None:
        """When samples in a row go on from what they share; None: the network cannot read such rows."""
        return None

    @property
    def context(self) -> int | None:
        """Tokens of the longest prompt and response together; None where the network does not say."""
        return None

    def copy(self) -> Policy:
        """The same policy with a network of its own, of equal weights."""
        return type(self)(copy.deepcopy(self.module), self.tokenizer, self.pad_id)

    # --- files
    @abstractmethod
    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what `load_policy` needs into an existing folder; `weights` by name in the place of the network's."""

    @abstractmethod
    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights that `save` wrote, by the names that `load_weights` wants."""

    def own_weights(self) -> Mapping[str, Tensor]:
        """What is saved and taken over, by name."""
        return self.module.state_dict(keep_vars=True)

    def saved_weights(self) -> Mapping[str, Tensor]:
        """Those of the network that `save` writes, by their names there."""
        return self.module.state_dict(keep_vars=True)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over weights by name, which every process has whole; of tied ones, one is enough."""
        fill(self.own_weights(), weights)
        self.weights_version = version


class WrappedPolicy(Policy):
    """A policy around another one, whose network and files it shares: what it does not do itself, that one does."""

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner.module, inner.tokenizer, inner.pad_id)
        self.inner = inner
        self.weights_version = inner.weights_version

    logits = of_inner("logits")
    hidden = of_inner("hidden")
    width = of_inner("width")
    head = of_inner("head")
    sharing = of_inner("sharing")
    context = of_inner("context")
    save = of_inner("save")
    read = of_inner("read")
    own_weights = of_inner("own_weights")
    saved_weights = of_inner("saved_weights")


class TinyPolicy(Policy):
    """A `TinyNetwork` and its vocabulary."""

    module: Any

    @property
    def sharing(self) -> Sharing:
        """See `Policy.sharing`."""
        return BY_BLOCKS if next(self.module.parameters()).device.type == "cpu" else BY_MASK

    def logits(self, ids: Tensor, lengths: Tensor, where: Tensor, starts: Tensor | None = None) -> Tensor:
        """See `Policy.logits`."""
        return self.module.head(self.hidden(ids, lengths, where, starts))  # type: ignore[no-any-return]

    def hidden(self, ids: Tensor, lengths: Tensor, where: Tensor, starts: Tensor | None = None) -> Tensor:
        """See `Policy.hidden`."""
        if starts is None:
            starts = torch.zeros_like(ids)
        masks = None
        if ids.device.type == "cpu":  # a call a block: dear on a GPU
            whole = RowMask.of(starts if starts.ndim == 3 else starts[None], lengths)
            masks = whole, whole
        predicting = where.roll(-1, 1)  # the first column is False
        counts = predicting.sum(1)
        most = int(counts.max())
        if 2 * most > where.shape[1]:
            hidden: Tensor = self.module.hidden(ids, starts, masks=masks)
            return hidden[predicting]
        wanted = predicting.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        if masks is not None:
            masks = whole, whole.at(wanted)
        hidden = self.module.hidden(ids, starts, wanted=wanted, masks=masks)
        return hidden[torch.arange(most, device=ids.device) < counts[:, None]]

    @property
    def width(self) -> int:
        """Size of a hidden state."""
        return int(self.module.shape.width)

    @property
    def head(self) -> nn.Module:
        """The layer that makes scores of hidden states."""
        return self.module.head  # type: ignore[no-any-return]

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and response together."""
        return int(self.module.shape.context)

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write `engine.json` and `model.safetensors`."""
        words, shape = list(self.tokenizer.words), asdict(self.module.shape)
        described = {"engine": "tiny", "words": words, "shape": shape}
        (folder / "engine.json").write_text(json.dumps(described, indent=2))
        save_file(weights or dict(self.module.state_dict()), folder / "model.safetensors")

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights that `save` wrote."""
        return dict(load_file(folder / "model.safetensors"))


def weights_sha256(model: nn.Module) -> str:
    """One hash of all weights of a model, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --- passes
Precision = Literal["float32", "bfloat16"]


def autocast(model: nn.Module, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Matrix products in bfloat16 if asked for; sums that need it stay in float32."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(next(model.parameters()).device.type, torch.bfloat16)


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of this model that can be computed again in the backward pass."""
    return [part for part in model.modules() if hasattr(part, "gradient_checkpointing")]


def dropouts(model: nn.Module) -> list[nn.Module]:
    """The parts of adapters that drop out while a model is trained."""
    return [
        part
        for name, part in model.named_modules()
        if "lora_dropout" in name and isinstance(part, nn.Dropout) and part.p > 0
    ]


@contextlib.contextmanager
def training_mode(model: nn.Module, checkpointing: bool, seed: int | None = None) -> Iterator[None]:
    """The layers of `model` are computed again in the backward pass if asked for, and adapters drop out by `seed`.

    The model itself stays in evaluation mode: what it computes is what the engine computed. Without a seed nothing
    drops out.
    """
    layers = checkpointed_layers(model) if checkpointing else []
    drops = dropouts(model) if seed is not None else []
    again = partial(checkpoint, use_reentrant=False)
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == INVARIANT:
        from shoal.samplers.huggingface.invariant import checkpoint_contexts

        again = partial(again, context_fn=checkpoint_contexts)
    before = [part.gradient_checkpointing for part in layers]
    for part in layers:
        # set here, since the methods of transformers that do it change names between versions
        part.gradient_checkpointing = True  # type: ignore[assignment]
        part._gradient_checkpointing_func = again  # type: ignore[assignment]
    switched = [*layers, *drops]
    for part in switched:
        part.training = True  # of this module alone: its parts keep their mode
    device = next(model.parameters()).device
    try:
        with contextlib.nullcontext() if seed is None or not drops else torch_noise(seed, device):
            yield
    finally:
        for part in switched:
            part.training = False
        for part, was in zip(layers, before, strict=True):
            part.gradient_checkpointing = was


SCORES = 1 << 25
"""Scores that are made at once, in numbers: 128 MB in float32, of which a pass holds about four copies."""


class Scored(NamedTuple):
    """What a network says of the trained tokens of all samples."""

    logprobs: Tensor  # [M] as sampled at the temperature
    entropy: Tensor | None  # [M] in nats, of the distribution that each was drawn from; None if not asked for


def score(
    policy: Policy,
    micro: MicroBatch,
    temperature: float,
    precision: Precision = "float32",
    entropy: Literal["none", "reported", "trained"] = "none",
) -> Scored:
    """Log-probabilities of the trained tokens of a micro-batch; an `entropy` that is "trained" has a gradient, too.

    More than `SCORES` scores are made part by part, and made again in the backward pass, so that memory does not grow
    with the vocabulary times the tokens.
    """

    def part(scores: Tensor, targets: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = scores.float()
        if temperature not in (0.0, 1.0):  # by a tensor, as samplers do: a GPU multiplies by 1 / a number
            scores = scores / scores.new_tensor(temperature)
        logprobs = scores.log_softmax(-1)
        if places is None:
            known = logprobs.gather(1, targets[:, None])[:, 0]
        else:  # in one dimension, where the backward pass adds up in order
            known = logprobs.flatten().gather(0, places * logprobs.shape[1] + targets)
        with torch.set_grad_enabled(entropy == "trained" and torch.is_grad_enabled()):
            if entropy == "none":
                return known, known
            found = entropy_of(logprobs)
            return known, found if places is None else found.gather(0, places)

    def part_of_hidden(hidden: Tensor, targets: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
        return part(head(hidden), targets, places)  # type: ignore[misc]

    head = policy.head
    count = len(micro.targets) if micro.places is None else int(micro.places[-1]) + 1
    most = count if head is None else max(1, SCORES // int(head.weight.shape[0]))  # type: ignore[union-attr, operator, index, arg-type]
    with autocast(policy.module, precision):
        if count <= most:
            parts = [part(policy.logits(*micro.read), micro.targets, micro.places)]
        else:
            pieces = _pieces(policy.hidden(*micro.read), micro, most)
            parts = [checkpoint(part_of_hidden, *piece, use_reentrant=False) for piece in pieces]
    known, entropies = (torch.cat(list(tensors)) for tensors in zip(*parts, strict=True))
    return Scored(known, None if entropy == "none" else entropies)


def _pieces(hidden: Tensor, micro: MicroBatch, most: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """At most so many hidden states, the targets that they predict, and which of them predicts each."""
    if micro.places is None:
        yield from zip(hidden.split(most), micro.targets.split(most), itertools.repeat(None))
        return
    ends = torch.arange(most, len(hidden), most, device=hidden.device)
    sizes = torch.searchsorted(micro.places, ends).diff(prepend=ends.new_zeros(1)).tolist()
    sizes.append(len(micro.targets) - sum(sizes))
    parts = zip(hidden.split(most), micro.targets.split(sizes), micro.places.split(sizes), strict=True)
    for number, (states, targets, places) in enumerate(parts):
        yield states, targets, places - number * most


def prompt_logprobs(policy: Policy, ids: Sequence[int]) -> list[float]:
    """Log-probabilities of the tokens after the first, each after those before it."""
    row = torch.tensor([ids], device=next(policy.module.parameters()).device)
    where = torch.ones_like(row, dtype=torch.bool)
    where[:, 0] = False
    with torch.no_grad():
        scores = policy.logits(row, row.new_tensor([len(ids)]), where)
        return scores.float().log_softmax(-1).gather(1, row[0, 1:, None])[:, 0].tolist()


class Critic(nn.Module):
    """A body of the policy's shape, started from its weights, and one linear output that starts at 0."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._body = policy.copy()
        self.model = self._body.module
        device = next(self.model.parameters()).device
        with torch_noise():  # the weights are set below
            self.output = nn.Linear(self._body.width, 1, device=device)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def saved_weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name: all but frozen weights, which are those of the policy's model."""
        every = self.state_dict(keep_vars=True)
        return {name: v for name, v in every.items() if v.requires_grad or not isinstance(v, nn.Parameter)}

    def forward(self, ids: Tensor, lengths: Tensor, where: Tensor, starts: Tensor | None = None) -> Tensor:
        """Values `[N]` of the contexts before the true places of `where [B, T]`, in row-major order."""
        hidden = self._body.hidden(ids, lengths, where, starts)
        return cast(Tensor, self.output(hidden.float())[:, 0].clone())  # hooks on the result want no view
