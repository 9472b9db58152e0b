"""What a rollout knows of language models: requests in, completions out, and the noise that picks the tokens.

Sampling is Gumbel-max over log-probabilities with noise keyed by the request, so the tokens of a request do
not depend on what else is in the batch, on order, padding, or the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, index
from typing import Any, Literal, NamedTuple, NotRequired, Protocol, TypedDict, get_args, runtime_checkable

import msgspec
import numpy as np

from shoal.core.errors import ConfigError, DataError, EngineError

Level = Literal["L0", "L1", "L2"]
"""L0 no promise; L1 the same tokens whatever the batching (up to float ties); L2 bit-equal log-probs too."""


Finish = Literal["stop", "length", "context"]
"""How a response ends: at a token or text that ends it, at its limit (or the context's), or before it began, since the
prompt leaves no room in the context; then it has no tokens."""
FINISHES = get_args(Finish)
ROUNDING = 1e-3
"""By how much a log-probability may be above 0: what servers compute in bfloat16 may be, a little."""


NO_NUMBERS = "must have finite log-probabilities of at most 0"
"""What is said of an answer whose log-probabilities are none, as those of spoiled weights."""


class Message(TypedDict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    images: NotRequired[int]  # pictures shown before the content; only samplers that take images see them


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are picked."""

    max_tokens: int = 64
    temperature: float = 1.0  # scores are divided by it before the softmax; 0 is greedy
    stop: tuple[str, ...] = ()  # texts after which a response ends; the stop text is part of it
    top_p: float = 1.0  # sample from the fewest tokens that have this much of the probability; 1 is off
    top_k: int = 0  # sample from so many of the likeliest tokens; 0 (or -1) is off
    # sample from tokens with at least this share of the likeliest one's probability; 0 is off
    min_p: float = 0.0

    @property
    def restricted(self) -> bool:
        """Whether some tokens cannot be sampled; log-probabilities are then of what is left."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop must be a tuple of texts, none of them empty, got {self.stop!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be at least 1, or 0 for all tokens, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")


class Key(msgspec.Struct, frozen=True, array_like=True):
    """Names the noise of one response: equal keys, equal noise."""

    seed: int
    path: tuple[int, ...]
    """Which response under this seed; of an env's episode its iteration, group, member and turn."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One prompt to complete."""

    prompt_ids: tuple[int, ...]
    key: Key
    sampling: Sampling = Sampling()
    images: tuple[str, ...] = ()  # data URLs or files, in the order in which the prompt shows them
    chat: tuple[int, ...] = ()
    """Names the chat that it goes on, whose prefixes a replica keeps; the path of its key but the last if empty."""
    version: int | None = None
    """Of the weights that shall answer, where a sampler holds several; the newest if not given."""


class Completion(msgspec.Struct, frozen=True, array_like=True):
    """What the model wrote."""

    token_ids: tuple[int, ...]  # the end-of-turn token included when it was sampled
    logprobs: tuple[float, ...]  # of each token as sampled (for greedy: at temperature 1)
    finish: Finish
    weights_version: int = 0


def checked(
    request: Request, answer: Any, vocabulary: int | None = None, *, exact: bool = True
) -> Completion:
    """A sampler's answer as a completion of this request, in plain numbers.

    Args:
        request: what was asked.
        answer: what the sampler returned.
        vocabulary: how many tokens there are, if that is known.
        exact: whether these are the model's own tokens, with their log-probabilities.

    Raises:
        EngineError: it is no completion, or not one of this request.
    """
    try:
        ids, logprobs = tuple(map(index, answer.token_ids)), tuple(map(float, answer.logprobs))
        finish, version = answer.finish, index(answer.weights_version)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"the sampler returned no completion: {str(answer)[:200]}") from error
    if not all(math.isfinite(value) and value <= ROUNDING for value in logprobs):
        raise EngineError(f"the sampler's answer {NO_NUMBERS}: {str(answer)[:200]}")
    limit = request.sampling.max_tokens
    if finish == "context":
        fits = not ids and not logprobs
    elif exact:
        fits = 1 <= len(ids) == len(logprobs) <= limit
    else:
        fits = not logprobs
    known = vocabulary is None or not ids or max(ids) < vocabulary
    if not (fits and known and finish in FINISHES and version >= 0 and min(ids, default=0) >= 0):
        raise EngineError(
            f"a completion has 1 to {limit} token ids below {vocabulary}, as many log-probabilities, and a finish of "
            f"{', '.join(FINISHES)} (that of a full context has no tokens); the sampler returned {str(answer)[:200]}"
        )
    return Completion(ids, logprobs, finish, version)


def vocabulary_of(sampler: Any) -> int | None:
    """How many tokens there are: the sampler's own number, or its tokenizer's; None where neither says it."""
    size = getattr(sampler, "vocabulary", None)
    if size is None:
        size = getattr(sampler.tokenizer, "size", None)
    return None if size is None else int(size)


class ChatTokenizer(Protocol):
    """Between text and the model's tokens."""

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt for a chat, up to where the assistant begins to write."""

    def extend(self, response_ids: tuple[int, ...], message: Message, /) -> tuple[int, ...]:
        """What follows `response_ids` in the context: the end of that turn, `message`, the next header."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text as tokens; text that looks like a control token stays plain text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, without control tokens."""


@runtime_checkable
class Sampler(Protocol):
    """Anything that completes prompts: by `async sample(request) -> Completion`, or in batches.

    One that works in batches has `generate(requests)` alone, which gives one completion a request, in order.

    It may have more: `context`, the longest prompt and response together, in tokens, with which `max_tokens` is capped
    to the room that is left, and a prompt that leaves none is answered by no tokens and finish "context"; `vocabulary`,
    how many tokens its network knows; `retry_policy`, if it has time limits of its own; `load_weights(weights,
    version)`, by name, and `load_adapter(folder, version)`, of LoRA, where `version` marks the completions that they
    produce; `probe`, a prompt, and `confirm(logprobs)`, called after each load with what the loaded weights say of it;
    `restart()`, called from another thread, which begins anew with the last weights after a crash; `close()`.
    """

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Between text and this model's tokens."""

    @property
    def level(self) -> Level:
        """How exactly completions repeat."""

    @property
    def weights_version(self) -> int:
        """The version of the weights that it samples by."""


def room_left(sampler: Any, request: Request) -> int:
    """How many tokens a response may have: `max_tokens`, or what is left of the context; 0 if nothing is.

    Raises:
        EngineError: the prompt is empty.
    """
    if not request.prompt_ids:
        raise EngineError("a prompt must have at least one token, got none")
    context = getattr(sampler, "context", None)
    if context is None:
        return request.sampling.max_tokens
    return max(0, min(request.sampling.max_tokens, int(context) - len(request.prompt_ids)))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a sampler can promise and do."""

    token_ids: bool  # prompts and responses are the model's own tokens
    logprobs: bool  # completions carry the log-probability of each token
    weights: bool = False  # takes weights by name: `load_weights(weights, version)`
    adapters: bool = False  # takes a LoRA folder between two calls: `load_adapter(folder, version)`

    @property
    def trainable(self) -> bool:
        """Whether its completions may be learned from: exact tokens with their log-probabilities."""
        return self.token_ids and self.logprobs


def capabilities_of(sampler: Sampler) -> Capabilities:
    """What a sampler states of itself, or what can be seen of one that states nothing."""
    stated = getattr(sampler, "capabilities", None)
    if isinstance(stated, Capabilities):
        return stated
    weights, adapters = hasattr(sampler, "load_weights"), hasattr(sampler, "load_adapter")
    return Capabilities(token_ids=True, logprobs=True, weights=weights, adapters=adapters)


class Facts(NamedTuple):
    """What a sampler elsewhere says of itself once."""

    tokenizer: ChatTokenizer
    level: Level
    capabilities: Capabilities
    context: int | None
    vocabulary: int | None


def facts_of(sampler: Any) -> Facts:
    """What is told of a sampler where it is asked from elsewhere."""
    context = getattr(sampler, "context", None)
    return Facts(sampler.tokenizer, sampler.level, capabilities_of(sampler), context, vocabulary_of(sampler))


def require_trainable(sampler: Sampler) -> None:
    """Raise a `ConfigError` that says why the completions of this sampler may not be learned from."""
    known = capabilities_of(sampler)
    lacking = [name for name in ("token_ids", "logprobs") if not getattr(known, name)]
    if lacking:
        raise ConfigError(
            f"{type(sampler).__name__} is for evaluation only: its completions lack {' and '.join(lacking)}. "
            f"Use a server that returns them (vLLM, SGLang, llama.cpp with a tokenizer here), or a local model"
        )


def require_weights(sampler: Sampler) -> None:
    """Raise a `ConfigError` unless the sampler can follow the updates of a training run."""
    if not capabilities_of(sampler).weights:
        raise ConfigError(
            f"{type(sampler).__name__} cannot take over weights between batches, so it would go on sampling from "
            f"the first ones while another model is trained: use one that can (vllm in process, a vLLM or "
            f"SGLang server, ray with tiny, huggingface or vllm replicas), or a model that is trained itself (tiny, "
            f"huggingface)"
        )


def refuse_strange(own: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Check that weights by name fill a network before the first of them is put in place; of tied ones, one is enough.

    Args:
        own: the network's tensors by name; tied ones are one object (`state_dict(keep_vars=True)`).
        weights: what is to take their place.

    Raises:
        DataError: they are of another network; all is as it was.
    """
    wrong = [n for n, value in weights.items() if n not in own or own[n].shape != value.shape]
    filled = {id(own[n]) for n in weights if n in own}
    wrong += [name for name, tensor in own.items() if id(tensor) not in filled]
    if wrong:
        raise DataError(f"these weights are of another network: {sorted(wrong)[:3]} do not match")


def of_inner(name: str, inner: str = "inner") -> Any:
    """For the body of a class around something: what the thing inside, its attribute `inner`, has by that name."""
    return property(attrgetter(f"{inner}.{name}"))


def restricted(logprobs: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Log-probabilities of what is sampled from: renormalised over the tokens that are left, -inf for the others.

    `min_p` and `top_k` look at all tokens, `top_p` at what they leave (the order of vLLM). Tokens that are as likely as
    the last one that stays stay too, so that their order in the vocabulary says nothing.

    Args:
        logprobs: `[V]` of all tokens, at the temperature.
        sampling: what restricts them; if nothing does, or they are no numbers, `logprobs` come back as they are.
    """
    if not sampling.restricted or np.isnan(logprobs).any():
        return logprobs
    values = logprobs.astype(np.float64)
    least = -np.inf
    if sampling.min_p > 0:
        least = values.max() + np.log(sampling.min_p)
    if 0 < sampling.top_k < len(values):
        least = max(least, np.partition(values, -sampling.top_k)[-sampling.top_k])
    kept = values >= least
    if sampling.top_p < 1:
        ranked = np.sort(values[kept])[::-1]
        mass = np.cumsum(np.exp(ranked - ranked[0]))
        last = int(np.searchsorted(mass, sampling.top_p * mass[-1]))
        kept &= values >= ranked[min(last, len(ranked) - 1)]
    left = values[kept]
    highest = left.max()
    found = np.full(len(values), -np.inf)
    found[kept] = left - (highest + np.log(np.exp(left - highest).sum()))
    return found
