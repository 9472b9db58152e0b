"""One response in the making: picks its tokens, notes them, and knows when it ends."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.rollout.samplers.sampler import Completion, Noise, Request
from shoal.rollout.samplers.tokenizers import TemplateTokenizer


class Row:
    """One response in the making."""

    def __init__(self, request: Request, tokenizer: TemplateTokenizer, room: int) -> None:
        self.request = request
        self.ended = False
        self._tokenizer, self._room = tokenizer, room
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
        self.ended = self.ended or len(self._ids) >= self._room
        return pick

    @property
    def written(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._ids)

    def _stopped(self) -> bool:
        stops = self.request.sampling.stop
        if not stops:
            return False
        tail = self._tokenizer.decode(self._ids[-4 * max(map(len, stops)) :])
        return any(stop in tail for stop in stops)

    def completion(self, version: int) -> Completion:
        """The response, once it has ended."""
        return Completion(tuple(self._ids), tuple(self._logprobs), self._finish, version)
