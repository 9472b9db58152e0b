"""What a rollout knows of language models: requests in, completions out, and the noise that picks the tokens.

Sampling is Gumbel-max over log-probabilities with noise keyed by the request, so the tokens of a request do
not depend on what else is in the batch, on order, padding, or the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Protocol, TypedDict, runtime_checkable

import msgspec
import numpy as np

from shoal.core.errors import EngineError
from shoal.core.seeding import stream

Level = Literal["L0", "L1", "L2"]
"""L0 no promise; L1 the same tokens whatever the batching (up to float ties); L2 bit-equal log-probs too."""


class Message(TypedDict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str
    images: NotRequired[int]  # pictures shown before the content; only engines that take images see them


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are picked."""

    max_tokens: int = 64
    temperature: float = 1.0  # scores are divided by it before the softmax; 0 is greedy
    stop: tuple[str, ...] = ()  # texts after which a response ends; the stop text is part of it

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")


class Key(msgspec.Struct, frozen=True, array_like=True):
    """Names the noise of one response: equal keys, equal noise."""

    seed: int
    iteration: int
    group: int
    member: int
    turn: int


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One prompt to complete."""

    prompt_ids: tuple[int, ...]
    key: Key
    sampling: Sampling = Sampling()
    images: tuple[str, ...] = ()  # data URLs or files, in the order in which the prompt shows them


class Completion(msgspec.Struct, frozen=True, array_like=True):
    """What the engine wrote."""

    token_ids: tuple[int, ...]  # the end-of-turn token included when it was sampled
    logprobs: tuple[float, ...]  # of each token as sampled (for greedy: at temperature 1)
    finish: Literal["stop", "length"]
    weights_version: int = 0


def as_completion(answer: Any) -> Completion | Exception:
    """What an engine answered to one request, numbers of NumPy and the like as plain ones.

    Returns:
        The completion, or the exception that stands in its place; an `EngineError` for anything else.
    """
    if isinstance(answer, Completion):
        ids, logprobs = answer.token_ids, answer.logprobs
        plain = type(ids) is type(logprobs) is tuple
        if plain and (not ids or (type(ids[0]) is int and logprobs and type(logprobs[0]) is float)):
            return answer
        try:
            numbers = tuple(map(int, ids)), tuple(map(float, logprobs))
            return Completion(*numbers, answer.finish, int(answer.weights_version))
        except (TypeError, ValueError) as error:
            return EngineError(f"the engine gave a completion that is none ({error}): {answer!r}")
    if isinstance(answer, EngineError | TimeoutError):
        return answer
    if isinstance(answer, Exception):
        refused = EngineError(f"the engine failed: {type(answer).__name__}: {answer}")
        refused.__cause__ = answer
        return refused
    return EngineError(f"the engine must answer with a Completion, it gave {answer!r}")


class ChatTokenizer(Protocol):
    """Between text and the engine's tokens."""

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt for a chat, up to where the assistant begins to write."""
        ...

    def extend(self, response_ids: tuple[int, ...], message: Message) -> tuple[int, ...]:
        """What follows `response_ids` in the context: the end of that turn, `message`, the next header."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text as tokens; text that looks like a control token stays plain text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, without control tokens."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Anything that completes prompts."""

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Between text and this engine's tokens."""
        ...

    @property
    def level(self) -> Level:
        """How exactly completions repeat."""
        ...

    weights_version: int

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order."""
        ...


class EngineAround:
    """An engine around another one, to which it leaves whatever it does not do itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Any = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The engine's."""
        return self._engine.tokenizer  # type: ignore[no-any-return]

    @property
    def level(self) -> Level:
        """The engine's."""
        return self._engine.level  # type: ignore[no-any-return]

    @property
    def weights_version(self) -> int:
        """The engine's."""
        return self._engine.weights_version  # type: ignore[no-any-return]

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self._engine.weights_version = version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The engine's."""
        return self._engine.generate(requests)  # type: ignore[no-any-return]


class Noise:
    """The Gumbel noise of one response, token after token."""

    __slots__ = ("_rng",)

    def __init__(self, key: Key) -> None:
        self._rng = stream(key.seed, "sampling", key.iteration, key.group, key.member, key.turn)

    def rows(self, n_tokens: int, vocabulary: int) -> np.ndarray:
        """`[n_tokens, vocabulary]` float64 for the next tokens of the response."""
        uniform = self._rng.random((n_tokens, vocabulary))
        np.maximum(uniform, np.finfo(np.float64).tiny, out=uniform)
        return -np.log(-np.log(uniform))
