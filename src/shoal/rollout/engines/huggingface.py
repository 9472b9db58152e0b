"""Any causal language model of `transformers` as an engine that can also be trained here.

Prompts that are equal are computed once, rows that have ended leave the batch, and the picks are keyed Gumbel
noise over log-probabilities (level L1).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, DataError, EngineError, missing_extra
from shoal.rollout.engine import Completion, Level, Noise, Request
from shoal.rollout.engines.chat_template import TemplateTokenizer

try:
    import torch
    from torch import Tensor, nn
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as error:
    raise missing_extra("the Hugging Face engine", "llm") from error


class HuggingFaceEngine:
    """Completes prompts with a model of `transformers`.

    Args:
        model: an `AutoModelForCausalLM`.
        tokenizer: its tokenizer, with a chat template.
        max_batch: rows that are decoded at once.
        template_settings: passed to the chat template.
    """

    level: Level = "L1"

    def __init__(self, model: Any, tokenizer: Any, *, max_batch: int = 32, **template_settings: Any) -> None:
        self.model: nn.Module = model.eval()
        self.tokenizer = TemplateTokenizer(tokenizer, **template_settings)
        self.max_batch = max_batch
        self.weights_version = 0
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.pad_id = int(pad or 0)
        limit = getattr(model.config, "max_position_embeddings", None)
        self._context = int(limit) if limit else None

    @classmethod
    def load(cls, folder: Path | str, *, device: str = "cpu", dtype: str = "float32") -> HuggingFaceEngine:
        """The engine of a model folder on disk; nothing is fetched and no code of the folder runs."""
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise DataError(f"{folder} is not a model folder: it has no config.json")
        settings = {"local_files_only": True, "trust_remote_code": False}
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), use_safetensors=True, **settings
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, **settings)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder} does not load as a model: {error}") from error
        return cls(model.to(device), tokenizer)

    def freeze_all_but_last(self, layers: int) -> None:
        """Leave only the last `layers` decoder layers and the final norm trainable."""
        decoder: Any = self.model.get_decoder()  # type: ignore[operator]
        if not 1 <= layers <= len(decoder.layers):
            raise ConfigError(f"train_last_layers must be in [1, {len(decoder.layers)}], got {layers}")
        self.model.requires_grad_(False)
        for part in [*decoder.layers[-layers:], decoder.norm]:
            part.requires_grad_(True)

    # --- rollouts
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order."""
        for request in requests:
            self._check(request)
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
        done: dict[int, Completion] = {}
        with torch.inference_mode():
            for first in range(0, len(order), self.max_batch):
                chunk = order[first : first + self.max_batch]
                done.update(zip(chunk, self._complete([requests[i] for i in chunk]), strict=True))
        return [done[i] for i in range(len(requests))]

    def _check(self, request: Request) -> None:
        length = len(request.prompt_ids)
        if not length:
            raise EngineError("a prompt must have at least one token, got none")
        if self._context and length + request.sampling.max_tokens > self._context:
            raise EngineError(
                f"a prompt of {length} tokens and a response of up to {request.sampling.max_tokens} do not fit "
                f"the model's context of {self._context}: shorten the prompt (less history)"
            )

    def _complete(self, requests: list[Request]) -> list[Completion]:
        rows = [_Row(request, self.tokenizer) for request in requests]
        places = {request.prompt_ids: None for request in requests}
        index = {prompt: place for place, prompt in enumerate(places)}
        ids, mask = self._pad_left(list(places))
        out = self._forward(ids, mask, None)
        select = torch.tensor([index[request.prompt_ids] for request in requests], device=ids.device)
        cache, scores, mask = out.past_key_values, out.logits[:, -1], mask[select]
        cache.batch_select_indices(select)
        scores = scores[select]
        live = list(range(len(rows)))
        while True:
            picks = self._pick(scores, [rows[i] for i in live])
            keep = [place for place, i in enumerate(live) if not rows[i].ended]
            if not keep:
                return [row.completion(self.weights_version) for row in rows]
            if len(keep) < len(live):
                chosen = torch.tensor(keep, device=mask.device)
                cache.batch_select_indices(chosen)
                mask, live, picks = (
                    mask[chosen],
                    [live[place] for place in keep],
                    [picks[place] for place in keep],
                )
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], 1)
            out = self._forward(torch.tensor(picks, device=mask.device)[:, None], mask, cache)
            cache, scores = out.past_key_values, out.logits[:, -1]

    def _pick(self, scores: Tensor, rows: Sequence[_Row]) -> list[int]:
        """Sample or choose the next token of each row and note it."""
        heat = torch.tensor([row.request.sampling.temperature or 1.0 for row in rows], device=scores.device)
        logprobs = (scores.float() / heat[:, None]).log_softmax(-1).cpu().numpy()
        return [row.take(logprobs[place]) for place, row in enumerate(rows)]

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Any:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def _pad_left(self, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), self.pad_id, dtype=np.int64)
        mask = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        device = next(self.model.parameters()).device
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    # --- training
    def logits_at(self, ids: Tensor, lengths: Tensor, where: Tensor) -> Tensor:
        """Scores `[N, V]` of the tokens at the true places of `where [B, T]`, in row-major order."""
        mask = (torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]).long()
        before = where[:, 1:]
        columns = before.any(0).nonzero()[:, 0]
        out = self.model(
            input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=False, logits_to_keep=columns
        )
        return out.logits[before[:, columns]]  # type: ignore[no-any-return]

    def hidden_at(self, ids: Tensor, lengths: Tensor, where: Tensor) -> Tensor:
        """Hidden states `[N, width]` that predict the tokens at the true places of `where`."""
        mask = (torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]).long()
        decoder: Any = self.model.get_decoder()  # type: ignore[operator]
        out = decoder(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=False)
        return out.last_hidden_state[where[:, 1:]]  # type: ignore[no-any-return]

    @property
    def hidden_width(self) -> int:
        """Size of a hidden state."""
        return int(self.model.config.hidden_size)  # type: ignore[union-attr, arg-type]

    # --- files
    def save(self, folder: Path) -> None:
        """Write a folder that `transformers` and `load` read."""
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        (folder / "engine.json").write_text(json.dumps({"engine": "huggingface", "dtype": dtype}))
        self.model.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.tokenizer.save_pretrained(folder)

    def load_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Take over weights by name; tied weights may be left out."""
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
        if unexpected or set(missing) - tied:
            wrong = sorted({*unexpected, *(set(missing) - tied)})[:3]
            raise DataError(f"these weights are of another network: {wrong} do not match")
        self.weights_version = version


class _Row:
    """One response in the making."""

    def __init__(self, request: Request, tokenizer: TemplateTokenizer) -> None:
        self.request = request
        self.ended = False
        self._tokenizer = tokenizer
        self._noise = Noise(request.key) if request.sampling.temperature else None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: Any = "length"

    def take(self, logprobs: np.ndarray) -> int:
        """Choose a token from `[V]` log-probabilities, and see whether the response ends with it."""
        noisy = logprobs if self._noise is None else logprobs + self._noise.rows(1, len(logprobs))[0]
        pick = int(noisy.argmax())
        self._ids.append(pick)
        self._logprobs.append(float(logprobs[pick]))
        if pick in self._tokenizer.end_ids or self._stopped():
            self.ended, self._finish = True, "stop"
        self.ended = self.ended or len(self._ids) >= self.request.sampling.max_tokens
        return pick

    def _stopped(self) -> bool:
        stops = self.request.sampling.stop
        if not stops:
            return False
        tail = self._tokenizer.decode(self._ids[-4 * max(map(len, stops)) :])
        return any(stop in tail for stop in stops)

    def completion(self, version: int) -> Completion:
        return Completion(tuple(self._ids), tuple(self._logprobs), self._finish, version)
