"""Any causal language model of `transformers` as a sampler in this process; what trains it may share its network.

What is equal is computed once: prompts, what all prompts of a batch begin with, and (on a CPU) answers until they part.
A context that was computed before, by whichever episode, goes on from its scores, and one that begins like another
from its keys and values. Tokens are picked by keyed Gumbel noise over log-probabilities (level L1). Answers are rows of
a batch; on a GPU `slots` writes them, one CUDA graph a step.
"""

from __future__ import annotations

import inspect
import logging
import math
import shutil
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError, EngineError, needs_extra, reading
from shoal.samplers.huggingface.invariant import is_invariant, make_invariant
from shoal.samplers.models import looks_back
from shoal.samplers.sampler import Completion, Key, Level, Request, Sampling, refuse_strange, room_left
from shoal.samplers.tokenizers import TemplateTokenizer, first_difference, read_tokenizer

with needs_extra("the Hugging Face sampler", "llm"):
    import torch
    from torch import Tensor, nn
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from transformers import AutoModelForCausalLM, DynamicCache

    from shoal.samplers.huggingface.caches import (
        MIN_SHARED,
        Context,
        Prefix,
        PrefixStore,
        can_be_cropped,
        fill_cache,
        keep_rows,
        take_row,
        with_few_moves,
    )
    from shoal.samplers.huggingface.slots import Decoder, Row, Slots

logger = logging.getLogger(__name__)
ADAPTERS = {"shoal", "shoal-next"}
"""Names of what `load_adapter` puts on a model; there are two for a moment."""


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give what an optimizer has stepped a new version, which fused kernels do not."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    torch.autograd.graph.increment_version([w for w in weights if not hasattr(w, "full_tensor")])


register_optimizer_step_post_hook(_count_step)  # of all optimizers of this process


class HuggingFaceEngine:
    """Completes prompts with a model of `transformers`.

    Args:
        model: an `AutoModelForCausalLM`.
        tokenizer: its tokenizer, with a chat template.
        max_batch: rows that are decoded at once.
        prefix_tokens: tokens whose keys and values are kept for contexts that begin with them; 0 for none, and then
            every prompt is computed.
        cache_tokens: tokens of all answers under way, prompts included, for which a static cache has room; each
            step is a CUDA graph then. 0 decodes without graphs.
        template_settings: passed to the chat template.
    """

    level: Level

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_batch: int = 32,
        prefix_tokens: int = 16_384,
        cache_tokens: int = 0,
        **template_settings: Any,
    ) -> None:
        self.model: nn.Module = model.eval()
        self.level = "L2" if is_invariant(model) else "L1"
        self.tokenizer = TemplateTokenizer(tokenizer, model=model, **template_settings)
        self.max_batch = max_batch
        self.weights_version = 0
        self.prefixes = PrefixStore(prefix_tokens)
        self.device: torch.device = next(self.model.parameters()).device
        # what is known of episodes is found, used and replaced by one call at a time
        self._alone = threading.Lock()
        self.prompt_tokens = self.computed_tokens = self.decoded_tokens = 0
        """Tokens of the distinct prompts of all batches, how many were computed, and how many tokens of answers."""
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.pad_id = int(pad or 0)
        limit = getattr(model.config, "max_position_embeddings", None)
        self.context = int(limit) if limit else None
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        self._known: int | None = getattr(embedding, "num_embeddings", None)
        self.vocabulary = max(len(tokenizer), self._known or 0)
        self._memory: tuple[int, ...] = ()
        self._decoder: Decoder | None = None
        if cache_tokens and self._decodes_in_slots(cache_tokens):
            self._decoder = Decoder(self, Slots(self.model, max_batch, cache_tokens))
            self.sample = self._decoder.sample
            """Answers a request as soon as there is a slot for it."""

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        cache_tokens: int = 0,
        batch_invariant: bool = False,
        **options: Any,
    ) -> HuggingFaceEngine:
        """The sampler of a model folder on disk, with `options` of the sampler; nothing is fetched or run.

        Args:
            folder: of the model.
            device: where the network lives.
            dtype: of its weights.
            cache_tokens: see the class; used on CUDA devices only.
            batch_invariant: compute each token alike whatever else is in the batch.
            **options: of the sampler.

        Raises:
            ConfigError: the model cannot be made `batch_invariant`, see `make_invariant`.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise DataError(f"{folder} is not a model folder: it has no config.json")
        model = read_model(folder, dtype=dtype).to(device).eval()
        if batch_invariant:
            make_invariant(model)
        slots = cache_tokens if model.device.type == "cuda" else 0
        return cls(model, read_tokenizer(folder), cache_tokens=slots, **options)

    # --- rollouts
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order."""
        self._refuse_stateful()
        if self._decoder is not None:
            return [future.result() for future in self._decoder.submit(requests)]
        with self._alone:
            return self.decode_rows(requests)

    def decode_rows(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order, by batches whose rows all begin at once."""
        rooms = [room_left(self, request) for request in requests]
        self.weights_changed()
        full = Completion((), (), "context", self.weights_version)
        done = {i: full for i, room in enumerate(rooms) if not room}
        order = sorted(set(range(len(requests))) - done.keys(), key=lambda i: self._to_compute(requests[i]))
        with torch.inference_mode():
            for first in range(0, len(order), self.max_batch):
                chunk = order[first : first + self.max_batch]
                rows = [Row(requests[i], self.tokenizer, rooms[i]) for i in chunk]
                self.follow(rows)
                if going := [row for row in rows if not row.ended]:
                    self._complete(going)
                answers = [row.completion(self.weights_version) for row in rows]
                done.update(zip(chunk, answers, strict=True))
        return [done[i] for i in range(len(requests))]

    def weights_changed(self) -> bool:
        """Forget what other weights computed; whether the weights lie elsewhere in memory than at the last call."""
        # versions change whenever weights do, by `load_weights` or in place by an optimizer
        weights = [*self.model.parameters()]
        self.prefixes.valid_for((self.weights_version, sum(weight._version for weight in weights)))
        before, self._memory = self._memory, tuple(weight.data_ptr() for weight in weights)
        return before != self._memory

    def _to_compute(self, request: Request) -> int:
        """How many tokens of a prompt are not known yet."""
        known = self.prefixes.find(request.prompt_ids)
        return len(request.prompt_ids) - (len(known.tokens) if known else 0)

    def follow(self, rows: list[Row]) -> None:
        """Write what is known to follow: as long as the scores of a row's context were computed before."""
        self.prompt_tokens += sum(map(len, {row.request.prompt_ids for row in rows}))
        while True:
            known = [(self.prefixes.scores(tokens), members) for (tokens, _), members in alike(rows).items()]
            groups = [(scores, members) for scores, members in known if scores is not None]
            if not groups:
                return
            self.pick(torch.stack([scores for scores, _ in groups]), [members for _, members in groups])
            rows = [row for _, members in groups for row in members if not row.ended]

    def _complete(self, rows: list[Row]) -> None:
        """Rows whose prompts and answers are the same so far have one row of the cache, until they differ."""
        groups = list(alike(rows).values())
        contexts = [members[0].context for members in groups]
        cache, scores, mask, select = self.compute(contexts)
        keep_rows(cache, select, room=len(rows))
        scores, mask, keeps = scores[select], mask[select], self.keeps_prefixes
        while True:
            self.prefixes.remember(contexts, scores)
            self.pick(scores, groups)
            going: dict[tuple[int, int], list[Row]] = {}
            for group, members in enumerate(groups):
                for row in members:
                    if not row.ended:
                        going.setdefault((group, row.written[-1]), []).append(row)
                if keeps and any(row.ended for row in members):  # the last token was picked and never fed
                    self.prefixes.keep(take_row(cache, group, mask[group], contexts[group]))
            if not going:
                return
            branches = list(going)
            branches = [branches[number] for number in with_few_moves([group for group, _ in branches])]
            if (stay := [group for group, _ in branches]) != list(range(len(mask))):
                chosen = torch.tensor(stay, device=mask.device)
                keep_rows(cache, chosen)
                mask = mask[chosen]
            groups = [going[branch] for branch in branches]
            contexts = [members[0].context for members in groups]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            fed = torch.tensor([token for _, token in branches], device=mask.device)
            self.decoded_tokens += len(branches)
            out = self._forward(fed[:, None], mask, cache)
            cache, scores = out.past_key_values, out.logits[:, -1]

    def compute(self, contexts: list[Context]) -> tuple[Any, Tensor, Tensor, Tensor]:
        """The cache, the next token's scores and the mask of distinct contexts, and the row of each context in them."""
        distinct = list(dict.fromkeys(contexts))
        prefixes = self._with_shared(distinct, [self.prefixes.find(context) for context in distinct])
        rest = [c[len(k.tokens) :] if k else c for c, k in zip(distinct, prefixes, strict=True)]
        self.computed_tokens += sum(map(len, rest))
        ids, mask = self._pad_left(rest)
        cache = None
        if any(prefixes):
            cache = DynamicCache()
            mask = torch.cat([fill_cache(cache, prefixes), mask], 1)
        out = self._forward(ids, mask, cache)
        index = {context: group for group, context in enumerate(distinct)}
        select = torch.tensor([index[context] for context in contexts], device=ids.device)
        return out.past_key_values, out.logits[:, -1], mask, select

    @property
    def keeps_prefixes(self) -> bool:
        """Whether keys and values are kept for prompts that go on."""
        return self.prefixes.max_tokens > 0 and self._can_share

    def _with_shared(self, contexts: list[Context], prefixes: list[Prefix | None]) -> list[Prefix | None]:
        """Prefixes of contexts, where what all of them begin with is more than is known of one."""
        length = min(min(first_difference(contexts[0], context), len(context) - 1) for context in contexts)
        wanting = [prefix is None or len(prefix.tokens) < length for prefix in prefixes]
        if sum(wanting) < 2 or length < MIN_SHARED or not self.prefixes.max_tokens or not self._can_share:
            return prefixes
        tokens = contexts[0][:length]
        ids, mask = self._pad_left([tokens])
        cache = self._forward(ids, mask, None).past_key_values
        self.computed_tokens += length
        shared = take_row(cache, 0, mask[0], tokens)
        self.prefixes.keep(shared)
        return [shared if wants else prefix for prefix, wants in zip(prefixes, wanting, strict=True)]

    @cached_property
    def _can_share(self) -> bool:
        """Whether contexts may go on from keys and values that are kept, with a gap behind them: it is tried.

        Not where layers keep something else, or count places in the row.
        """
        if looks_back(self.model) < math.inf:
            return False
        contexts: list[Context] = [(1, 2, 3, 4), (1, 2, 3, 1, 2, 3, 4)]
        alone = [self._forward(*self._pad_left([context]), None) for context in contexts]
        if not can_be_cropped(alone[0].past_key_values):
            return False
        cache, (ids, mask) = DynamicCache(), self._pad_left([context[3:] for context in contexts])
        begun = take_row(alone[0].past_key_values, 0, mask.new_tensor([1, 1, 1, 0]), (1, 2, 3))
        mask = torch.cat([fill_cache(cache, [begun, begun]), mask], 1)
        scores = self._forward(ids, mask, cache).logits[:, -1]
        gap = (scores - torch.cat([out.logits[:, -1] for out in alone])).abs().max()
        return bool(gap <= (1e-3 if scores.dtype == torch.float32 else 0.02) * scores.abs().max())

    def pick(self, scores: Tensor, groups: Sequence[Sequence[Row]]) -> None:
        """Sample or choose the next token of each row, from the scores of its group, and note it."""
        temperatures = [members[0].request.sampling.temperature or 1.0 for members in groups]
        temperature = torch.tensor(temperatures, device=scores.device)[:, None]
        logprobs = (scores.float() / temperature).log_softmax(-1).cpu().numpy()
        for array, members in zip(logprobs, groups, strict=True):
            for row in members:
                row.take(array)

    def _refuse_stateful(self) -> None:
        """Refuse a network that takes no cache of keys and values: with one that it ignores, answers would be wrong."""
        takes = inspect.signature(self.model.forward).parameters
        if "past_key_values" not in takes and {"cache_params", "state"} & takes.keys():
            raise EngineError(
                f"{type(self.model).__name__} keeps a state in the place of keys and values, and shoal samples from "
                "models that take past_key_values alone: use a transformer, or a server that runs this model "
                "(engine.name=openai)"
            )

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Any:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        read = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return self.model(**read, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def _pad_left(self, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), self.pad_id, dtype=np.int64)
        mask = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        self.refuse_unknown(int(ids.max()))
        return torch.from_numpy(ids).to(self.device), torch.from_numpy(mask).to(self.device)

    def refuse_unknown(self, token: int) -> None:
        """Raise an `EngineError` for a token that the network does not know: a GPU would be of no use any more."""
        if self._known is not None and token >= self._known:
            raise EngineError(
                f"the prompt has token {token}, and the network knows {self._known}: its tokenizer is of "
                f"another model, or got tokens added; copy tokenizer and weights of one model"
            )

    def _decodes_in_slots(self, cache_tokens: int) -> bool:
        """Whether slots write what rows write: it is tried with two short prompts."""
        asked = [Request((1, 2, 3), Key(0, (n,)), Sampling(4)) for n in range(2)]
        asked.append(Request((1, 2, 3, 1, 2, 3, 4), Key(0, (2,)), Sampling(6)))
        try:
            if not self._can_share:
                raise EngineError("its layers do not keep all tokens")
            decoder = Decoder(self, Slots(self.model, min(3, self.max_batch), cache_tokens))
            found = [future.result() for future in decoder.submit(asked)]
            gap = max(
                abs(a - b)
                for one, other in zip(found, self.decode_rows(asked), strict=True)
                for a, b in zip(one.logprobs[:1], other.logprobs[:1], strict=True)
            )
            if gap > (1e-3 if self.model.dtype == torch.float32 else 0.2):
                raise EngineError(f"log-probabilities are {gap:.2g} apart")
        except EngineError as error:
            logger.warning("%s is decoded without CUDA graphs: %s", type(self.model).__name__, error)
            return False
        finally:
            self.prefixes.clear()
        return True

    # --- weights
    def load_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Take over weights by name, and use no adapter any more; tied weights may be left out."""
        model: Any = self.model
        state = model.state_dict(keep_vars=True)
        own = {n.replace(".base_layer.", "."): t for n, t in state.items() if not ADAPTERS & {*n.split(".")}}
        refuse_strange(own, weights)
        with self._drained(), torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
        if loaded := ADAPTERS & getattr(model, "peft_config", {}).keys():
            model.delete_adapter(sorted(loaded))
        self.prefixes.clear()
        self.weights_version = version

    def load_adapter(self, folder: Path, version: int) -> None:
        """Put the LoRA adapter of a folder on the model, in the place of the one before.

        Raises:
            DataError: it is broken, or of another model; the one before stays.
        """
        folder = Path(folder)
        if not (folder / "adapter_model.safetensors").is_file():
            raise DataError(f"{folder} is no adapter: it has no adapter_model.safetensors")
        with self._drained():
            self._put_adapter(folder)
        self.weights_version = version

    def _put_adapter(self, folder: Path) -> None:
        model: Any = self.model
        before = model.active_adapters() if getattr(model, "_hf_peft_config_loaded", False) else []
        name = min(ADAPTERS - {*before})
        self.prefixes.clear()
        try:
            with (
                reading(folder, "does not load as an adapter of this model"),
                needs_extra("LoRA adapters", "llm"),
                warnings.catch_warnings(),
            ):
                # there are two for a moment
                warnings.filterwarnings("ignore", "Already found a `peft_config`")
                found = model.load_adapter(str(folder), adapter_name=name)
                strange = set(getattr(found, "unexpected_keys", ()))  # transformers 4 only warns of them
                strange |= {key for key in getattr(found, "missing_keys", ()) if f".{name}." in f"{key}."}
                if strange:  # they were left out, or set at random
                    listed = ", ".join(sorted(strange)[:3])
                    raise ValueError(f"{len(strange)} of its weights do not fit ({listed})")
        except BaseException:
            if before:
                model.set_adapter(before)
            if name in getattr(model, "peft_config", ()):
                model.delete_adapter(name)
            raise
        model.set_adapter(name)
        if before:
            model.delete_adapter(before)
        model.eval()

    def _drained(self) -> AbstractContextManager[None]:
        """Meanwhile no answer is under way."""
        return nullcontext() if self._decoder is None else self._decoder.drained()


def read_model(folder: Path, kind: Any = AutoModelForCausalLM, **settings: Any) -> Any:
    """The model of a folder on disk, of a class of transformers; nothing is fetched or run.

    Raises:
        DataError: files are broken, or weights are not there: transformers would set them at random, and go on.
    """
    settings |= {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with reading(folder, "does not load as a model"):
        model, found = kind.from_pretrained(folder, **settings, **options)
    absent = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    if absent:
        raise DataError(
            f"{folder} does not load as a model: {len(absent)} of its weights are not there, or of another shape than "
            f"config.json says ({', '.join(sorted(absent)[:3])}): copy all its files, or choose another class of model"
        )
    return model


def read_weights(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The weights that `save_pretrained` wrote into `folder`, by the names that they have in `model`."""
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):  # large models are in several
        weights |= load_file(file)
    if weights.keys() <= model.state_dict().keys():
        return weights
    del weights
    return dict(read_model(folder, dtype=next(model.parameters()).dtype).state_dict())


def as_in_files(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names that they have in a network of the model in `folder`, by those that files have.

    Transformers keeps the experts of a layer in one tensor, and one tensor an expert in files, as others do.
    """
    from transformers import AutoConfig
    from transformers.core_model_loading import revert_weight_conversion

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):  # a network without memory: it knows the names
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    renamed: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return renamed


def write_model(named: Mapping[str, Tensor], source: Path, folder: Path) -> None:
    """Write weights, by their names in files, and what describes the model in `source`, where others can load them."""
    from safetensors.torch import save_file

    distinct = {name: tensor.detach().cpu().clone() for name, tensor in named.items()}
    save_file(distinct, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, folder)


def alike(rows: Sequence[Row]) -> dict[tuple[Context, float], list[Row]]:
    """Rows by what their next token is drawn from: the context and the temperature."""
    found: dict[tuple[Context, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row.context, row.request.sampling.temperature), []).append(row)
    return found
