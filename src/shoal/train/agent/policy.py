"""The networks of a run: the one that is trained, its critic, and the one that a KL penalty holds on to."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import read_json
from shoal.maths.noise import torch_noise
from shoal.samplers.models import INVARIANT, looks_back, resolve_model
from shoal.samplers.registry import EngineConfig, make_engine
from shoal.samplers.sampler import of_inner, require_trainable, require_weights
from shoal.samplers.tiny import TinyNetwork
from shoal.train.agent.batch import Batching, MicroBatch, Sample, token_values
from shoal.train.agent.losses import entropy_of
from shoal.train.agent.weights import fill

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
    def logits(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        """Scores `[N, V]` of the tokens at the true places of `where [B, T]`, in row-major order.

        Args:
            ids: `[B, T]` whole samples, padded on the right.
            lengths: `[B]` true lengths.
            where: `[B, T]` bool; the first column must be False, since nothing predicts the first token.
            begins: `[B, T]` where the sample of each token begins, if rows hold several: attention stays within them,
                and positions start anew. `[3, B, T]` with the first place and the end of the shared prefix before it in
                the row that it continues, see `shoal.train.agent.batch.MicroBatch`.
        """

    @abstractmethod
    def hidden(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
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
    def shares_prefixes(self) -> bool:
        """Whether samples in a row may go on from what they share."""
        return False

    @property
    def context(self) -> int | None:
        """Tokens of the longest prompt and response together; None where the network does not say."""
        return None

    def twin(self) -> Policy:
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


class Around(Policy):
    """A policy around another one, whose network and files it shares: what it does not do itself, that one does."""

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner.module, inner.tokenizer, inner.pad_id)
        self.inner = inner
        self.weights_version = inner.weights_version

    logits = of_inner("logits")
    hidden = of_inner("hidden")
    width = of_inner("width")
    head = of_inner("head")
    shares_prefixes = of_inner("shares_prefixes")
    context = of_inner("context")
    save = of_inner("save")
    read = of_inner("read")
    own_weights = of_inner("own_weights")
    saved_weights = of_inner("saved_weights")


class TinyPolicy(Policy):
    """A `TinyNetwork` and its vocabulary."""

    module: Any
    shares_prefixes = True

    def logits(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        """See `Policy.logits`."""
        return self.module.head(self.hidden(ids, lengths, where, begins))  # type: ignore[no-any-return]

    def hidden(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        """See `Policy.hidden`."""
        del lengths  # padding is on the right, where nothing that counts looks
        if begins is None:
            begins = torch.zeros(len(ids), 1, dtype=torch.int64, device=ids.device)
        predicting = where.roll(-1, 1)  # the first column is False
        counts = predicting.sum(1)
        most = int(counts.max())
        if 2 * most > where.shape[1]:
            hidden: Tensor = self.module.hidden(ids, begins)
            return hidden[predicting]
        wanted = predicting.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        hidden = self.module.hidden(ids, begins, wanted=wanted)
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
        self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None, inputs: Inputs = None
    ) -> Tensor:
        """See `Policy.logits`; `inputs` are what is read besides, by the model's names: positions, and images."""
        if self.head is not None:
            return self.head(self.hidden(ids, lengths, where, begins, inputs))  # type: ignore[no-any-return]
        before = where[:, 1:]
        columns = before.any(0).nonzero()[:, 0]
        out = self.module(
            **self.reading(ids, lengths, begins, inputs), use_cache=False, logits_to_keep=columns
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
    def shares_prefixes(self) -> bool:  # type: ignore[override]
        """Whether samples in a row may go on from what they share: full attention that takes a mask of ours.

        It is tried: two samples with a prefix in one row, and each in a row of its own.
        """
        if self._implementation not in ("sdpa", "eager", INVARIANT) or looks_back(self.module) < math.inf:
            return False
        device = next(self.module.parameters()).device
        apart = torch.tensor([[1, 2, 3, 4, 0], [1, 2, 4, 3, 0]], device=device)  # the last column is not read
        joined = torch.tensor([[1, 2, 3, 4, 4, 3, 0]], device=device)
        begins = torch.tensor([[0, 0, 2, 2, 4, 4, 6]], device=device)
        prefixes = torch.tensor([[[0] * 7], [[0, 0, 2, 2, 2, 2, 0]]], device=device)
        spans = torch.cat([begins[None], prefixes])
        try:
            decoder: Any = self.module.get_decoder()  # type: ignore[operator]
            with torch.no_grad():
                expected = decoder(**_reads(apart, None), use_cache=False).last_hidden_state[:, 2:]
                found = decoder(**_reads(joined, spans, self._implementation), use_cache=False)
        except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
            message = "prompts of a group are not shared in training, the model takes no such rows: %s"
            logger.info(message, error)
            return False
        gap = (found.last_hidden_state[0, 2:] - expected.flatten(0, 1)).abs().max()
        return bool(gap <= 0.02 * expected.abs().max())

    def reading(
        self, ids: Tensor, lengths: Tensor, begins: Tensor | None, inputs: Inputs
    ) -> dict[str, Tensor]:
        """What the model is called with for rows of samples, without their last column, which nothing reads."""
        context = _reads(ids, begins, self._implementation, inputs)
        if inputs is not None:
            dtype = next(self.module.parameters()).dtype
            images = {name: value for name, value in inputs.items() if name != "position_ids"}
            context |= {n: v.to(dtype) if v.is_floating_point() else v for n, v in images.items()}
        elif (
            begins is None and not self.shares_prefixes
        ):  # more than attention: it may want to know of padding
            places = torch.arange(ids.shape[1] - 1, device=ids.device)
            context["attention_mask"] = (places < lengths[:, None]).long()
        return context

    @property
    def _implementation(self) -> str:
        return str(getattr(self.module.config.get_text_config(), "_attn_implementation", ""))  # type: ignore[union-attr, operator]

    def hidden(
        self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None, inputs: Inputs = None
    ) -> Tensor:
        """See `Policy.hidden`."""
        body: Any = self.module.get_decoder() if inputs is None else self.module.base_model  # type: ignore[operator]
        out = body(**self.reading(ids, lengths, begins, inputs), use_cache=False)
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
    ids: Tensor, begins: Tensor | None, implementation: str = "sdpa", inputs: Inputs = None
) -> dict[str, Tensor]:
    """What a model reads of rows without their last column, but for images.

    Padding on the right needs no mask: attention that counts never looks there. Packed samples differ in their
    positions; prefixes and branches, and samples with positions of their own, have a mask of ours.
    """
    if begins is None and inputs is None:
        return {"input_ids": ids[:, :-1]}
    places = torch.arange(ids.shape[1] - 1, device=ids.device)
    begins = torch.zeros_like(ids) if begins is None else begins
    if begins.ndim == 2 and inputs is None:
        return {"input_ids": ids[:, :-1], "position_ids": places - begins[:, :-1]}
    first, prefix, end = (begins if begins.ndim == 3 else begins.expand(3, *begins.shape))[:, :, :-1, None]
    seen = (places <= places[:, None]) & (places >= first) | (places >= prefix) & (places < end)
    mask = seen[:, None]
    if implementation not in ("sdpa", INVARIANT):  # the plain attention adds its mask to the scores
        mask = torch.zeros(mask.shape, device=ids.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    positions = places - (first - (end - prefix))[..., 0]
    if inputs is not None:
        positions = inputs["position_ids"][..., :-1]
    return {"input_ids": ids[:, :-1], "position_ids": positions, "attention_mask": mask}


# --- from a config, a sampler or a folder
def policy_of(sampler: Any) -> Policy:
    """The policy whose network a sampler of this process writes with.

    Raises:
        ConfigError: its network is not here.
    """
    module = getattr(sampler, "model", None)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{type(sampler).__name__} has no network in this process that could be trained")
    kind = TinyPolicy if isinstance(module, TinyNetwork) else HuggingFacePolicy
    return kind(module, sampler.tokenizer, sampler.pad_id)


def make_policy(config: EngineConfig, words: Sequence[str], seed: int) -> tuple[Policy, Any]:
    """The policy of a config, with fresh or pretrained weights, and what samples by them; close that.

    Raises:
        ConfigError: the weights of this sampler cannot follow an update.
    """
    if config.name == "openai":
        raise ConfigError(
            "engine.name=openai is for rollouts and evaluation: the weights of a server cannot follow each "
            "update. Train with engine.name=huggingface, or vllm to sample faster (both with "
            "engine.model=FOLDER), and play a server with `shoal rollout`"
        )
    here = "tiny" if config.played_by == "tiny" else "huggingface"
    if here != "tiny" and config.model is None:
        raise ConfigError(
            f"engine.model must be a model folder or a name that `shoal model get` knows, for "
            f"engine.name={config.name}, got none"
        )
    invariant = config.batch_invariant and config.played_by == here  # vLLM's order of additions is its own
    local: Any = make_engine(replace(config, name=here, batch_invariant=invariant), words, seed)
    policy = policy_of(local)
    if isinstance(policy, HuggingFacePolicy) and config.train_last_layers is not None:
        policy.freeze_all_but_last(config.train_last_layers)
    if config.name == here:
        return policy, local
    sampler: Any = make_engine(config, words, seed)
    try:
        require_trainable(sampler)
        require_weights(sampler)
    except ConfigError:
        sampler.close()
        raise
    return policy, sampler


def load_policy(
    folder: Path, *, device: str = "cpu", config: EngineConfig | None = None
) -> tuple[Policy, Any]:
    """The policy in a model folder or the `engine` folder of a checkpoint, and a sampler with its network.

    Args:
        folder: what `Policy.save` or transformers wrote.
        device: where the network lives.
        config: of the run, for what its sampler is set to beside its weights.

    Raises:
        DataError: the folder holds no model.
    """
    options: dict[str, Any] = {}
    if config is not None:
        options = {"max_batch": config.max_batch, "cache_tokens": config.cache_tokens, **config.template}
        options["batch_invariant"] = config.batch_invariant and config.played_by == "huggingface"
    file, described = folder / "engine.json", dict[str, Any]()
    if file.exists():
        described = read_json(file)
        if not isinstance(described, dict):
            raise DataError(f"{file} must be a mapping that names the engine, got {described!r:.80}")
    elif not (folder / "config.json").exists():  # which a bare model has
        hint = f"; the one of this checkpoint is {folder / 'engine'}" if (folder / "engine").is_dir() else ""
        raise DataError(f"{folder} is no model folder: it has neither config.json nor engine.json{hint}")
    sampler: Any
    if described.get("engine") == "tiny":
        from shoal.samplers.tiny import TinyEngine

        sampler = TinyEngine.load(folder, device=device)
    elif described.get("engine") == "huggingface-lora":
        from shoal.train.agent.lora import load_lora

        return load_lora(folder, device, **options)
    else:
        from shoal.samplers.huggingface.engine import HuggingFaceEngine

        dtype = described.get("dtype", "float32")
        sampler = HuggingFaceEngine.load(folder, device=device, dtype=dtype, **options)
    return policy_of(sampler), sampler


def load_engine(folder: Path, *, device: str = "cpu", config: EngineConfig | None = None) -> Any:
    """The sampler in the `engine` folder of a checkpoint, to play with; see `load_policy`."""
    return load_policy(folder, device=device, config=config)[1]


def load_teacher(folder: str, student: Policy) -> Policy:
    """A frozen network that scores what a student wrote, from a model folder or the `engine` folder of a checkpoint.

    Raises:
        ConfigError: it does not read the student's tokens.
    """
    device = str(next(student.module.parameters()).device)
    teacher, _ = load_policy(resolve_model(folder), device=device)
    sizes = [next(p for p in one.module.parameters() if p.dim() == 2).shape[0] for one in (teacher, student)]
    other = _read_otherwise(teacher.tokenizer, student.tokenizer)
    if other or sizes[0] < sizes[1]:
        raise ConfigError(
            f"algorithm.teacher={folder} has another vocabulary than the model that is trained ({sizes[0]} and "
            f"{sizes[1]} tokens{other}): choose a teacher of the same family"
        )
    teacher.module.requires_grad_(False)
    return teacher


def refuse_stranger(sampler: Any, policy: Any) -> None:
    """Check that what a sampler writes can be learned from by a policy that is given beside it.

    Raises:
        ConfigError: it is no policy; or the sampler tells no tokens, takes no weights, or has other tokens.
    """
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy must be a Policy, as shoal.train.agent.policy.policy_of(sampler) gives, got a "
            f"{type(policy).__name__}"
        )
    require_trainable(sampler)
    if getattr(sampler, "model", None) is not policy.module:
        require_weights(sampler)
    if other := _read_otherwise(sampler.tokenizer, policy.tokenizer):
        raise ConfigError(
            f"the sampler's tokens are not those of the policy that is trained{other}: give both the same tokenizer, "
            f"with the same words in the same order"
        )


def _read_otherwise(one: Any, other: Any) -> str:
    """Which token two tokenizers do not have alike, for a message; empty if they read all alike."""
    if one is other:
        return ""
    known, wanted = _vocabulary(one), _vocabulary(other)
    for number, token in wanted.items():
        if known.get(number, token) != token:
            return f", of which {token!r} is another one"
    text = "The quick brown fox: 3 + 4 = 7? <action>Up</action>"
    return "" if one.encode(text) == other.encode(text) else ", which cut texts otherwise"


def _vocabulary(tokenizer: Any) -> dict[int, str]:
    """The tokens by their numbers, where a tokenizer says them."""
    if hasattr(tokenizer, "tokens"):
        return dict(enumerate(tokenizer.tokens))
    tokens: dict[str, int] = getattr(getattr(tokenizer, "tokenizer", None), "get_vocab", dict)()
    return {number: token for token, number in tokens.items()}


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


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen, in a fixed order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


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
    """Log-probabilities of the trained tokens of a micro-batch.

    More than `SCORES` scores are made part by part, and made again in the backward pass, so that memory does not grow
    with the vocabulary times the tokens.

    Args:
        policy: the network.
        micro: what it reads.
        temperature: at which tokens are sampled.
        precision: of matrix products.
        entropy: whether it is computed, and whether with a gradient.
    """

    def part(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores.float()
        if temperature not in (0.0, 1.0):  # by a tensor, as samplers do: a GPU multiplies by 1 / a number
            scores = scores / scores.new_tensor(temperature)
        logprobs = scores.log_softmax(-1)
        known = logprobs.gather(1, targets[:, None])[:, 0]
        with torch.set_grad_enabled(entropy == "trained" and torch.is_grad_enabled()):
            return known, known if entropy == "none" else entropy_of(logprobs)

    def part_of_hidden(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return part(head(hidden), targets)  # type: ignore[misc]

    head = policy.head
    rows = len(micro.targets) if head is None else max(1, SCORES // int(head.weight.shape[0]))  # type: ignore[union-attr, operator, index, arg-type]
    with autocast(policy.module, precision):
        if len(micro.targets) <= rows:
            scores = policy.logits(*micro.read)
            parts = [part(scores, micro.targets)]
        else:
            hidden = policy.hidden(*micro.read)
            pairs = zip(hidden.split(rows), micro.targets.split(rows), strict=True)
            parts = [checkpoint(part_of_hidden, *pair, use_reentrant=False) for pair in pairs]
    known, entropies = (torch.cat(list(tensors)) for tensors in zip(*parts, strict=True))
    return Scored(known, None if entropy == "none" else entropies)


class Critic(nn.Module):
    """A body of the policy's shape, started from its weights, and one linear output that starts at 0.

    Args:
        policy: whose network is copied.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._body = policy.twin()
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

    def forward(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        """Values `[N]` of the contexts before the true places of `where [B, T]`, in row-major order."""
        hidden = self._body.hidden(ids, lengths, where, begins)
        return cast(Tensor, self.output(hidden.float())[:, 0].clone())  # hooks on the result want no view


LENGTHS = (23, 14, 9)
"""Tokens of the samples of the trial: the last two share a row, behind each other."""


def safe_batching(policy: Policy, wanted: Batching, model: str = "this model", rows: int = 0) -> Batching:
    """`wanted`, or `padded` where packing would be wrong for a `model`, which is warned of.

    Args:
        policy: the model.
        wanted: how samples are to share rows.
        model: what it is called.
        rows: of positions that samples have of their own; 0 where they are counted.
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
            f"linear-attention layers, or a mask that is ignored)"
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
