"""A causal language model of transformers as a policy, and whether it may read several samples in one row."""

from __future__ import annotations

import json
import logging
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.samplers.models import INVARIANT, looks_back
from shoal.train.agent.batch.packing import BY_BLOCKS, BY_MASK, Batching, MicroBatch, Sharing, token_values
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.policies.attention import RowMask
from shoal.train.agent.policies.policy import Inputs, Policy, score

logger = logging.getLogger(__name__)


class HuggingFacePolicy(Policy):
    """A causal language model of `transformers` and its tokenizer (a `TemplateTokenizer`)."""

    module: Any

    def freeze_all_but_last(self, layers: int) -> None:
        """Leave only the last `layers` decoder layers and the final norm trainable."""
        decoder: Any = self.module.get_decoder()  # type: ignore[operator]
        blocks, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
        if blocks is None or norm is None:
            raise ConfigError(
                f"train_last_layers={layers} needs a model whose decoder has `layers` and a `norm`, as Llama's, and "
                f"{type(self.module).__name__} has not: set it to null, or train adapters with model.lora.rank"
            )
        if not 1 <= layers <= len(blocks):
            raise ConfigError(f"train_last_layers must be in [1, {len(blocks)}], got {layers}")
        self.module.requires_grad_(False)
        for part in [*blocks[-layers:], norm]:
            part.requires_grad_(True)

    def logits(
        self, ids: Tensor, lengths: Tensor, where: Tensor, starts: Tensor | None = None, inputs: Inputs = None
    ) -> Tensor:
        """See `Policy.logits`; `inputs` are what is read besides, by the model's names: positions, and images."""
        if self.head is not None:
            return self.head(self.hidden(ids, lengths, where, starts, inputs))  # type: ignore[no-any-return]
        before = where[:, 1:]
        columns = before.any(0).nonzero()[:, 0]
        out = self.module(
            **self.reading(ids, lengths, starts, inputs), use_cache=False, logits_to_keep=columns
        )
        return out.logits[before[:, columns]]  # type: ignore[no-any-return]

    @property
    def head(self) -> nn.Module | None:
        """The output layer, unless the model scales or caps scores: with it, they are made for trained tokens alone."""
        return self.module.get_output_embeddings() if self._plain_head else None  # type: ignore[operator, no-any-return]

    @cached_property
    def _plain_head(self) -> bool:
        """Whether scores are the output layer of hidden states and nothing else (some models scale or cap them)."""
        head = getattr(self.module, "get_output_embeddings", lambda: None)()
        if head is None:
            return False
        device = next(self.module.parameters()).device
        ids = torch.tensor([[1, 2, 3, 4]], device=device)  # one may be padding, all of whose scores are 0
        with torch.no_grad():
            scores = self.module(input_ids=ids, use_cache=False).logits
            hidden = self.module.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[operator]
            return torch.equal(head(hidden), scores)

    @cached_property
    def sharing(self) -> Sharing | None:  # type: ignore[override]
        """When samples in a row go on from what they share, which full attention can that takes a mask of ours.

        It is tried: two samples with a prefix in one row, and each in a row of its own.
        """
        if self._implementation not in ("sdpa", "eager", INVARIANT) or looks_back(self.module) < math.inf:
            return None
        device = next(self.module.parameters()).device
        apart = torch.tensor([[1, 2, 3, 4, 0], [1, 2, 4, 3, 0]], device=device)  # the last column is not read
        joined = torch.tensor([[1, 2, 3, 4, 4, 3, 0]], device=device)
        starts = torch.tensor([[0, 0, 2, 2, 4, 4, 6]], device=device)
        prefixes = torch.tensor([[[0] * 7], [[0, 0, 2, 2, 2, 2, 0]]], device=device)
        spans, lengths = torch.cat([starts[None], prefixes]), torch.tensor([7])
        calls = self._implementation == "sdpa" and device.type == "cpu"  # one a block: dear on a GPU
        try:
            decoder: Any = self.module.get_decoder()  # type: ignore[operator]
            with torch.no_grad():
                expected = decoder(**_reads(apart, lengths, None), use_cache=False).last_hidden_state[:, 2:]
                for sharing in (BY_BLOCKS, BY_MASK) if calls else (BY_MASK,):
                    reads = _reads(joined, lengths, spans, self._implementation, sharing=sharing)
                    found = decoder(**reads, use_cache=False).last_hidden_state[0, 2:]
                    gap = (found - expected.flatten(0, 1)).abs().max()
                    if gap <= 0.02 * expected.abs().max():
                        return sharing
        except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
            message = "prompts of a group are not shared in training, the model takes no such rows: %s"
            logger.info(message, error)
        return None

    def reading(
        self, ids: Tensor, lengths: Tensor, starts: Tensor | None, inputs: Inputs
    ) -> dict[str, Tensor]:
        """What the model is called with for rows of samples, without their last column, which nothing reads."""
        sharing = BY_MASK if starts is None else self.sharing
        context = _reads(ids, lengths, starts, self._implementation, inputs, sharing=sharing)
        if inputs is not None:
            dtype = next(self.module.parameters()).dtype
            images = {name: value for name, value in inputs.items() if name != "position_ids"}
            context |= {n: v.to(dtype) if v.is_floating_point() else v for n, v in images.items()}
        # more than attention: it may want to know of padding
        elif starts is None and self.sharing is None:
            places = torch.arange(ids.shape[1] - 1, device=ids.device)
            context["attention_mask"] = (places < lengths[:, None]).long()
        return context

    @property
    def _implementation(self) -> str:
        return str(getattr(self.module.config.get_text_config(), "_attn_implementation", ""))  # type: ignore[union-attr, operator]

    def hidden(
        self, ids: Tensor, lengths: Tensor, where: Tensor, starts: Tensor | None = None, inputs: Inputs = None
    ) -> Tensor:
        """See `Policy.hidden`."""
        body: Any = self.module.get_decoder() if inputs is None else self.module.base_model  # type: ignore[operator]
        out = body(**self.reading(ids, lengths, starts, inputs), use_cache=False)
        return out.last_hidden_state[where[:, 1:]]  # type: ignore[no-any-return]

    @property
    def width(self) -> int:
        """Size of a hidden state."""
        return int(self.module.config.hidden_size)  # type: ignore[union-attr, arg-type]

    @property
    def context(self) -> int | None:
        """Tokens of the longest prompt and response together; None where the model does not say."""
        limit = getattr(self.module.config, "max_position_embeddings", None)
        return int(limit) if limit else None

    # --- files
    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write a folder that `transformers` and `load` read; `weights` by name in the place of the network's own."""
        dtype = str(next(self.module.parameters()).dtype).removeprefix("torch.")
        (folder / "engine.json").write_text(json.dumps({"engine": "huggingface", "dtype": dtype}))
        self.module.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
        self.tokenizer.tokenizer.save_pretrained(folder)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights that `save` wrote, for `load_weights`."""
        from shoal.samplers.huggingface.engine import read_weights

        return read_weights(folder, self.module)


def _reads(
    ids: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    implementation: str = "sdpa",
    inputs: Inputs = None,
    *,
    sharing: Sharing | None = BY_MASK,
) -> dict[str, Tensor]:
    """What a model reads of rows without their last column, but for images.

    Padding on the right needs no mask: attention that counts never looks there. Packed samples differ in their
    positions; prefixes and branches, samples with positions of their own, and attention in blocks have a mask of ours.
    """
    if starts is None and inputs is None:
        return {"input_ids": ids[:, :-1]}
    places = torch.arange(ids.shape[1] - 1, device=ids.device)
    starts = torch.zeros_like(ids) if starts is None else starts
    if starts.ndim == 2 and inputs is None and sharing is not BY_BLOCKS:
        return {"input_ids": ids[:, :-1], "position_ids": places - starts[:, :-1]}
    starts = (starts if starts.ndim == 3 else starts[None])[:, :, :-1]
    first, *spans = starts
    positions = places - first + sum(end - begin for begin, end in zip(spans[::2], spans[1::2], strict=True))
    if inputs is not None:
        positions = inputs["position_ids"][..., :-1]
    if sharing is BY_BLOCKS:
        mask: Tensor = RowMask.of(starts, lengths)
    else:
        seen = (places <= places[:, None]) & (places >= first[..., None])
        for begin, end in zip(spans[::2], spans[1::2], strict=True):
            seen |= (places >= begin[..., None]) & (places < end[..., None])
        mask = seen[:, None]
        if implementation not in ("sdpa", INVARIANT):  # the plain attention adds its mask to the scores
            mask = torch.zeros(mask.shape, device=ids.device).masked_fill(
                ~mask, torch.finfo(torch.float32).min
            )
    return {"input_ids": ids[:, :-1], "position_ids": positions, "attention_mask": mask}


# --- whether samples may share a row
LENGTHS = (23, 14, 9)
"""Tokens of the samples of the trial: the last two share a row, behind each other."""


def safe_batching(policy: Policy, wanted: Batching, model: str = "this model", rows: int = 0) -> Batching:
    """`wanted`, or `padded` where packing would be wrong for this policy, which is warned of as `model`.

    `rows` are those of positions that samples have of their own; 0 where they are counted.
    """
    if wanted == "padded" or (fault := packing_fault(policy, rows)) is None:
        return wanted
    logger.warning("samples are not packed into rows (algorithm.batching=padded) by %s: %s", model, fault)
    return "padded"


def packing_fault(policy: Policy, rows: int = 0) -> str | None:
    """What goes wrong when this model gets two samples in one row, or None if nothing does.

    The second sample of a row must not change when the first does (not even by rounding: masked tokens count
    nothing), and must have the log-probabilities that it has alone.
    """
    parameter = next(policy.module.parameters())
    tolerance = 1e-3 if parameter.dtype == torch.float32 else 0.1
    samples, changed = _trial(policy, 0, rows), _trial(policy, 7, rows)
    changed[2] = samples[2]
    try:
        packed, other = (_logprobs(policy, each, "packed") for each in (samples, changed))
        alone = _logprobs(policy, samples, "padded")
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        lines = str(error).strip().splitlines() or [""]
        return f"it does not take packed rows ({type(error).__name__}: {lines[0]})"
    leak = float(np.abs(packed[2] - other[2]).max())
    if not leak <= 1e-6:
        return (
            f"a sample's log-probs change by {leak:.2g} with the sample before it in the row (recurrent or "
            f"linear-attention layers, positions counted along the row, or a mask that is ignored)"
        )
    gap = max(float(np.abs(a - b).max()) for a, b in zip(packed, alone, strict=True))
    if not gap <= tolerance:
        return f"log-probs in a packed row differ by {gap:.2g} from those alone (positions that do not start anew)"
    return None


def _trial(policy: Policy, start: int, rows: int) -> list[Sample]:
    """Samples of arbitrary tokens that every vocabulary has (special ones count as well as any)."""
    embedding = next(p for p in policy.module.parameters() if p.dim() == 2)
    below = min(200, embedding.shape[0])
    ids = (np.arange(sum(LENGTHS)) * 37 + 11 + start) % below
    parts = np.split(ids, np.cumsum(LENGTHS)[:-1])
    counted = [np.tile(np.arange(len(part)), (rows, 1)) if rows else None for part in parts]
    pairs = zip(parts, counted, strict=True)
    return [Sample(tuple(part.tolist()), np.arange(1, len(part)), {}, places) for part, places in pairs]


def _logprobs(policy: Policy, samples: list[Sample], batching: Batching) -> list[np.ndarray]:
    def compute(micro: MicroBatch) -> Tensor:
        return score(policy, micro, 1.0).logprobs

    device = str(next(policy.module.parameters()).device)
    return list(token_values(samples, compute, 4096, policy.pad_id, device, batching))
