"""How each kind of server takes a prompt and gives tokens with their log-probabilities.

Nothing is left to a server's defaults: several of them take top-p, top-k or penalties from the model's folder,
and then the log-probabilities would be of another distribution than the one sampled from. No seed is ever sent:
it does not make a batching server exact, and with it vllm's CPU build ends on the second piece of a long prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Literal, NamedTuple, Protocol

from shoal.core.errors import EngineError
from shoal.rollout.samplers.sampler import Request

Finish = Literal["stop", "length"]
LogprobsMode = Literal["raw", "processed"]


PLAIN: dict[str, float] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""No sampler beside the temperature, said in full: servers take other defaults from a model's folder."""


class Answer(NamedTuple):
    """What a server wrote."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish


class Dialect(Protocol):
    """Requests and replies of one kind of server, in tokens."""

    name: str
    path: str
    logprobs: LogprobsMode
    """Whether log-probabilities are of the model (raw) or of what was sampled from (processed), by default."""

    def body(self, request: Request, model: str, end_ids: Sequence[int]) -> dict[str, Any]:
        """What to post."""
        ...

    def read(self, reply: Mapping[str, Any], request: Request) -> Answer:
        """What came back; an `EngineError` says what is missing."""
        ...


class VllmDialect:
    """`/v1/completions` of vLLM with token ids in and out."""

    name = "vllm"
    path = "/v1/completions"
    logprobs: LogprobsMode = "raw"

    def body(self, request: Request, model: str, end_ids: Sequence[int]) -> dict[str, Any]:
        """Token ids in, ids and log-probabilities asked for."""
        sampling = request.sampling
        return {
            "model": model,
            "prompt": list(request.prompt_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            **PLAIN,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": list(end_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }

    def read(self, reply: Mapping[str, Any], request: Request) -> Answer:
        """`token_ids` and `logprobs.token_logprobs` of the only choice."""
        choice = _only(reply.get("choices"), "choices")
        seen = choice.get("prompt_token_ids")
        if seen is not None and tuple(seen) != request.prompt_ids:
            raise EngineError(
                f"the server changed the prompt: {len(request.prompt_ids)} tokens were sent, it used {len(seen)}"
            )
        ids = choice.get("token_ids")
        values = (choice.get("logprobs") or {}).get("token_logprobs")
        return _answer(ids, values, choice.get("finish_reason"))


class SglangDialect:
    """`/generate` of SGLang: its OpenAI routes do not give token ids."""

    name = "sglang"
    path = "/generate"
    logprobs: LogprobsMode = "processed"

    def body(self, request: Request, model: str, end_ids: Sequence[int]) -> dict[str, Any]:
        """Token ids in; the adapter is named where one is loaded."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "input_ids": list(request.prompt_ids),
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                **PLAIN,
                "stop": list(sampling.stop),
                "stop_token_ids": list(end_ids),
                "no_stop_trim": True,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        return {**body, "lora_path": model} if model else body

    def read(self, reply: Mapping[str, Any], request: Request) -> Answer:
        """`[log-probability, id, …]` for each token of the output."""
        meta = reply.get("meta_info") or {}
        _same_length(meta.get("prompt_tokens"), request)
        pairs = meta.get("output_token_logprobs")
        if pairs is None:
            return _answer(reply.get("output_ids"), None, None)
        reason = meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, Mapping) else reason
        return _answer([pair[1] for pair in pairs], [pair[0] for pair in pairs], kind)


class LlamaCppDialect:
    """`/completion` of the llama.cpp server."""

    name = "llama.cpp"
    path = "/completion"
    logprobs: LogprobsMode = "raw"

    def body(self, request: Request, model: str, end_ids: Sequence[int]) -> dict[str, Any]:
        """Token ids in; temperature is the only sampler."""
        sampling = request.sampling
        return {
            "prompt": list(request.prompt_ids),
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "samplers": ["temperature"],
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
            "stop": list(sampling.stop),
            "n_probs": 1,
            "return_tokens": True,
            "cache_prompt": True,
        }

    def read(self, reply: Mapping[str, Any], request: Request) -> Answer:
        """The chosen token of each entry of `completion_probabilities`."""
        _same_length(reply.get("tokens_evaluated"), request)
        chosen = reply.get("completion_probabilities")
        if not isinstance(chosen, list) or any("id" not in c or "logprob" not in c for c in chosen):
            return _answer(reply.get("tokens"), None, None)
        kind = {"limit": "length", "eos": "stop", "word": "stop"}.get(str(reply.get("stop_type")))
        return _answer([c["id"] for c in chosen], [c["logprob"] for c in chosen], kind)


DIALECTS: dict[str, Dialect] = {d.name: d for d in (VllmDialect(), SglangDialect(), LlamaCppDialect())}


def _only(values: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(values, list) or len(values) != 1 or not isinstance(values[0], Mapping):
        raise EngineError(f"expected one entry in the reply's {name}, got {str(values)[:100]}")
    return values[0]


def _same_length(used: Any, request: Request) -> None:
    if isinstance(used, int) and used != len(request.prompt_ids):
        raise EngineError(
            f"the server changed the prompt: {len(request.prompt_ids)} tokens were sent, it used {used}"
        )


def _answer(ids: Any, logprobs: Any, reason: Any) -> Answer:
    if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
        counts = [len(x) if isinstance(x, list) else None for x in (ids, logprobs)]
        raise EngineError(
            f"the server's reply must have as many token ids as log-probabilities, got {counts[0]} and "
            f"{counts[1]}: it is too old for token ids, or of another kind than said"
        )
    if reason not in ("stop", "length"):
        raise EngineError(f"the server broke the response off ({str(reason)[:80]}): nothing of it is used")
    return Answer(tuple(map(index, ids)), tuple(map(float, logprobs)), reason)
