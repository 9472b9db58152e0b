"""Samplers without a model, for tests and for trying an env: scripted answers, or uniformly random valid words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.core.seeding import stream
from shoal.samplers.sampler import Completion, Key, Level, Request
from shoal.samplers.tokenizers import END, TinyTokenizer


class ScriptedEngine:
    """Answers with what a function says for a prompt's text and its key.

    Args:
        answer: `(prompt text, key) -> response text`.
        words: words that are one token each.
    """

    level: Level = "L2"

    def __init__(self, answer: Callable[[str, Key], str], words: Sequence[str] = ()) -> None:
        self.tokenizer = TinyTokenizer(words)
        self.weights_version = 0
        self._answer = answer

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order; every token has log-probability 0."""
        completions = []
        for request in requests:
            said = self._answer(self.tokenizer.decode(request.prompt_ids), request.key)
            ids = self.tokenizer.encode(said) or (END,)  # who says nothing ends at once
            kept = ids[: request.sampling.max_tokens]
            finish = "stop" if len(kept) == len(ids) else "length"
            completions.append(Completion(kept, (0.0,) * len(kept), finish, self.weights_version))  # type: ignore[arg-type]
        return completions


class RandomEngine(ScriptedEngine):
    """Answers `<action>word</action>` with one of `words`, drawn from the noise that the key names."""

    def __init__(self, words: Sequence[str]) -> None:
        if not words:
            raise ValueError("RandomEngine needs at least one word to choose from, got none")
        super().__init__(self._choose, words)
        self._words = tuple(words)

    def _choose(self, prompt: str, key: Key) -> str:
        rng = stream(key.seed, "random engine", *key.path)
        return f"<action>{self._words[int(rng.integers(len(self._words)))]}</action>"
