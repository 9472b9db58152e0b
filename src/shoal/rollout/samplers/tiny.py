"""The tiny engine: a language model small enough to learn an environment on a laptop within a minute.

Every batch is run in chunks of one fixed shape and equal prompts are computed once, so with one torch thread
not only the tokens but the log-probabilities are bit-equal whatever else is in the batch (level L2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError, missing_extra
from shoal.core.files import read_json
from shoal.core.seeding import derive_seed
from shoal.rollout.samplers.sampler import Completion, Level, Noise, Request, room_left
from shoal.rollout.samplers.tiny_vocabulary import END, PAD, TinyTokenizer

try:
    import torch
    from safetensors.torch import load_file
    from torch import Tensor

    from shoal.rollout.samplers.tiny_network import TinyNetwork, TinyShape
except ImportError as error:
    raise missing_extra("the tiny engine", "train") from error

ROWS = 32
"""Rows of a chunk; smaller batches are filled with padding."""
BUCKET = 8
"""Prompts are padded on the left to a multiple of this many tokens."""


class TinyEngine:
    """Completes prompts with a `TinyNetwork`.

    Args:
        words: action words that are one token each.
        shape: sizes of the network.
        seed: of the initial weights.
        device: where the network lives.
    """

    def __init__(
        self,
        words: Sequence[str] = (),
        shape: TinyShape | None = None,
        *,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.tokenizer = TinyTokenizer(words)
        self.model = TinyNetwork(
            shape or TinyShape(), self.tokenizer.size, derive_seed(seed, "init", "tiny") % 2**63
        ).to(device)
        self.device = torch.device(device)
        self.weights_version = 0
        self.pad_id = PAD

    @property
    def level(self) -> Level:
        """L2 on a CPU with one torch thread, else L1."""
        return "L2" if self.device.type == "cpu" and torch.get_num_threads() == 1 else "L1"

    # --- rollouts
    @property
    def context(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self.model.shape.context

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order."""
        groups: dict[tuple[int, int], list[int]] = {}
        done: dict[int, Completion] = {}
        for index, request in enumerate(requests):
            room = room_left(self, request)
            padded = -(-len(request.prompt_ids) // BUCKET) * BUCKET
            if room:
                groups.setdefault((padded, room), []).append(index)
            else:
                done[index] = Completion((), (), "context", self.weights_version)
        with torch.inference_mode():
            for (padded, room), members in groups.items():
                unique = {requests[i].prompt_ids: None for i in members}
                place = {prompt: row for row, prompt in enumerate(unique)}
                prefix = self._prefill(list(unique), padded)
                for first in range(0, len(members), ROWS):
                    chunk = members[first : first + ROWS]
                    rows = [place[requests[i].prompt_ids] for i in chunk]
                    rows += rows[-1:] * (ROWS - len(rows))
                    answers = self._decode([requests[i] for i in chunk], prefix.rows(rows, room), room)
                    done.update(zip(chunk, answers, strict=True))
        return [done[index] for index in range(len(requests))]

    def _prefill(self, prompts: list[tuple[int, ...]], padded: int) -> _Prefix:
        shape = self.model.shape
        parts: list[_Prefix] = []
        for first in range(0, len(prompts), ROWS):
            ids = np.full((ROWS, padded), PAD, dtype=np.int64)
            start = np.full(ROWS, padded - 1, dtype=np.int64)
            for row, prompt in enumerate(prompts[first : first + ROWS]):
                start[row] = padded - len(prompt)
                ids[row, start[row] :] = prompt
            begin = torch.from_numpy(start).to(self.device)
            size = (2, ROWS, shape.heads, padded, shape.width // shape.heads)
            cache = [torch.zeros(size, device=self.device) for _ in range(shape.layers)]
            hidden = self.model.hidden(torch.from_numpy(ids).to(self.device), begin, cache)[:, -1]
            parts.append(_Prefix(cache, hidden, begin))
        return parts[0] if len(parts) == 1 else _Prefix.join(parts)

    def _decode(self, requests: list[Request], prefix: _Prefix, room: int) -> list[Completion]:
        """Sample one chunk token by token, up to `room`, until every row has ended."""
        padded = prefix.padded
        hidden, n = prefix.hidden, len(requests)
        temperature = np.array([request.sampling.temperature for request in requests])
        scale = torch.ones(ROWS, 1, device=self.device)
        scale[:n, 0] = torch.from_numpy(1 / np.where(temperature == 0, 1, temperature)).float()
        noise = np.zeros((n, room, self.tokenizer.size))
        for row in np.flatnonzero(temperature).tolist():
            noise[row] = Noise(requests[row].key).rows(room, self.tokenizer.size)
        stops = [tuple(map(self.tokenizer.encode, request.sampling.stop)) for request in requests]
        written: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        live = dict.fromkeys(range(n))
        for step in range(room):
            scores = (self.model.head(hidden) * scale).log_softmax(-1)[:n].cpu().numpy()
            picks = (scores + noise[:, step]).argmax(-1)
            for row in list(live):
                pick = int(picks[row])
                written[row].append(pick)
                logprobs[row].append(float(scores[row, pick]))
                if pick == END or any(tuple(written[row][-len(stop) :]) == stop for stop in stops[row]):
                    del live[row]
            if not live or step + 1 == room:
                break
            ids = torch.full((ROWS, 1), PAD, dtype=torch.int64)
            ids[:n, 0] = torch.from_numpy(picks)
            hidden = self.model.hidden(ids.to(self.device), prefix.start, prefix.cache, padded + step)[:, -1]
        return [
            Completion(tuple(ids), tuple(lps), "length" if row in live else "stop", self.weights_version)
            for row, (ids, lps) in enumerate(zip(written, logprobs, strict=True))
        ]

    # --- files
    @classmethod
    def load(cls, folder: Path, *, device: str = "cpu") -> TinyEngine:
        """The engine of a folder that a policy wrote; a `DataError` says which file does not fit."""
        described: dict[str, Any] = read_json(folder / "engine.json")
        try:
            engine = cls(described["words"], TinyShape(**described["shape"]), device=device)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{folder / 'engine.json'} does not describe a tiny engine: {error}") from error
        engine.load_weights(dict(load_file(folder / "model.safetensors")), engine.weights_version)
        return engine

    def load_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Take over weights by name; `version` marks the completions they produce."""
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise DataError(f"these weights are of another network: {error}") from error
        self.weights_version = version


@dataclass(frozen=True)
class _Prefix:
    """Computed prompts: a cache a layer `[2, B, H, S, D]`, last hidden states `[B, W]`, starts `[B]`."""

    cache: list[Tensor]
    hidden: Tensor
    start: Tensor
    padded: int = 0

    @classmethod
    def join(cls, parts: list[_Prefix]) -> _Prefix:
        caches = [torch.cat(layer, 1) for layer in zip(*(part.cache for part in parts), strict=True)]
        return cls(caches, torch.cat([p.hidden for p in parts]), torch.cat([p.start for p in parts]))

    def rows(self, rows: list[int], room: int) -> _Prefix:
        """These rows, with room for `room` more tokens."""
        index = torch.tensor(rows, device=self.start.device)
        padded = self.cache[0].shape[3]
        caches = []
        for layer in self.cache:
            grown = layer.new_zeros(
                (*layer.shape[:1], len(rows), layer.shape[2], padded + room, layer.shape[4])
            )
            grown[:, :, :, :padded] = layer.index_select(1, index)
            caches.append(grown)
        return _Prefix(caches, self.hidden[index], self.start[index], padded)
