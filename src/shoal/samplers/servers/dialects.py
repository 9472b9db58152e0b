"""What differs from one kind of server to another: what it is asked, what it answers, how it loads weights.

Nothing is left to a server's defaults: several of them take top-p, top-k or penalties from the model's folder,
and then the log-probabilities would be of another distribution than the one sampled from. No seed is ever sent:
it does not make a batching server exact, and with it vllm's CPU build ends on the second piece of a long prompt.
"""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import DataError, EngineError
from shoal.samplers.registry import LogprobsMode
from shoal.samplers.sampler import ChatTokenizer, Completion, Request, Sampling
from shoal.samplers.tokenizers import ChatCodec


class Reply(NamedTuple):
    """What a server wrote, as it said it: nothing is checked yet."""

    token_ids: Any
    logprobs: Any
    finish: Any
    prompt: Any = None  # the ids that it read, or how many; None where it does not say

    def completion(self, request: Request, version: int, *, with_logprobs: bool) -> Completion:
        """The completion of a request; an `EngineError` says what is missing or wrong."""
        sent, ids, logprobs = request.prompt_ids, self.token_ids, self.logprobs
        used = self.prompt if isinstance(self.prompt, int | None) else len(self.prompt)
        if used not in (None, len(sent)) or (self.prompt != used and tuple(self.prompt) != sent):
            raise EngineError(f"the server changed the prompt: {len(sent)} tokens were sent, it used {used}")
        lists = isinstance(ids, list) and isinstance(logprobs, list)
        if with_logprobs and not (lists and len(ids) == len(logprobs)):
            counts = [len(x) if isinstance(x, list) else None for x in (ids, logprobs)]
            raise EngineError(
                f"the server's reply must have as many token ids as log-probabilities, got {counts[0]} and "
                f"{counts[1]}: it is too old for token ids, or of another kind than said"
            )
        if self.finish not in ("stop", "length"):
            raise EngineError(
                f"the server broke the response off ({str(self.finish)[:80]}): nothing of it is used"
            )
        return Completion(tuple(map(index, ids)), tuple(map(float, logprobs)), self.finish, version)


def ended_by_text(completion: Completion, request: Request, tokenizer: ChatTokenizer) -> Completion:
    """A completion up to the token with which the first of the request's stop texts is whole."""
    ids, stops = completion.token_ids, request.sampling.stop

    def stopped(n: int) -> bool:
        text = tokenizer.decode(ids[:n])
        return any(stop in text for stop in stops)

    if not stopped(len(ids)):
        return completion
    n = bisect_left(range(len(ids)), True, key=stopped)
    return Completion(ids[:n], completion.logprobs[:n], "stop", completion.weights_version)


def as_url(image: str) -> str:
    """A data URL for an image that may be the path of a PNG or JPEG file."""
    if image.startswith(("data:", "http:", "https:")):
        return image
    data = Path(image).read_bytes()
    kinds = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg"}
    kind = next((name for start, name in kinds.items() if data.startswith(start)), None)
    if kind is None:
        raise DataError(f"{image} is neither a PNG nor a JPEG file")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


Body = Callable[[Request, str, ChatTokenizer], dict[str, Any]]
"""What to post for a request to a model, by the name it has on the server."""
Read = Callable[[Mapping[str, Any], ChatTokenizer], Reply]
"""What came back."""


@dataclass(frozen=True)
class Dialect:
    """One kind of server: where to ask and how, and what it can do."""

    name: str
    owner: str  # what the server says of itself: `owned_by` of its models
    path: str
    body: Body
    read: Read
    by_tokens: bool = True  # prompts and responses are token ids with their log-probabilities
    logprobs: LogprobsMode = "raw"  # of the model, or of what was sampled from (processed), by default
    keeps_stop: bool = True
    """A response holds the stop text that ended it; else none is sent, and it is ended here."""
    knows_limits: bool = False  # processed ones are of the tokens that top_p, top_k and min_p leave
    adapter: str = ""  # the field of a request that names an adapter; "" where the server takes none
    adapter_routes: str = ""  # what stands before /load_lora_adapter
    context: str = ""  # where it tells its context, if not with the list of its models
    reload: Callable[[str], list[tuple[str, Any]]] | None = None
    """What to post for it to load a folder; the last call is made whatever becomes of those before."""
    asks_scores: dict[str, Any] = field(default_factory=dict)
    """What a request adds to be told the log-probabilities of its prompt."""
    scores: Callable[[Any, Sequence[int]], list[float]] | None = None
    """Those of a reply, from the second token of the prompt on."""


def _limits(sampling: Sampling, *, off: int = -1) -> dict[str, float]:
    """Which tokens may be sampled, said in full; `off` is no top-k."""
    top_k = sampling.top_k if sampling.top_k > 0 else off
    return {"top_p": sampling.top_p, "top_k": top_k, "min_p": sampling.min_p}


def _shared(request: Request, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """What vLLM and SGLang are sent alike; penalties too, since they take others from a model's folder."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        **_limits(sampling),
        **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        "stop": list(sampling.stop),
        "stop_token_ids": list(getattr(tokenizer, "end_ids", ())),
    }


def _only(values: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(values, list) or len(values) != 1 or not isinstance(values[0], Mapping):
        raise EngineError(f"expected one entry in the reply's {name}, got {str(values)[:100]}")
    return values[0]


def _vllm_body(request: Request, model: str, tokenizer: ChatTokenizer) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.sampling.max_tokens,
        **_shared(request, tokenizer),
        "include_stop_str_in_output": True,
        "logprobs": 0,
        "return_token_ids": True,
    }


def _vllm_read(reply: Mapping[str, Any], tokenizer: ChatTokenizer) -> Reply:
    choice = _only(reply.get("choices"), "choices")
    ids, why, prompt = map(choice.get, ("token_ids", "finish_reason", "prompt_token_ids"))
    return Reply(ids, (choice.get("logprobs") or {}).get("token_logprobs"), why, prompt)


def _vllm_reload(folder: str) -> list[tuple[str, Any]]:
    """Between requests; without the prefixes that it keeps."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    return [
        ("/pause?mode=wait", {}),
        ("/collective_rpc", reload),
        ("/reset_prefix_cache", {}),
        ("/resume", {}),
    ]


def _vllm_scores(reply: Any, ids: Sequence[int]) -> list[float]:
    """`{id: {"logprob": …}, …}` for each token of the prompt; nothing for the first."""
    rows = _only(reply["choices"], "choices")["prompt_logprobs"]
    return [row[str(i)]["logprob"] for row, i in zip(rows[1:], ids[1:], strict=True)]


def _sglang_body(request: Request, model: str, tokenizer: ChatTokenizer) -> dict[str, Any]:
    sampling = {
        "max_new_tokens": request.sampling.max_tokens,
        **_shared(request, tokenizer),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    ids = list(request.prompt_ids)
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1}


def _sglang_read(reply: Mapping[str, Any], tokenizer: ChatTokenizer) -> Reply:
    """`[log-probability, id, …]` for each token of the output."""
    meta = reply.get("meta_info") or {}
    pairs, used = meta.get("output_token_logprobs"), meta.get("prompt_tokens")
    if pairs is None:
        return Reply(reply.get("output_ids"), None, None, used)
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    return Reply([pair[1] for pair in pairs], [pair[0] for pair in pairs], kind, used)


def _sglang_reload(folder: str) -> list[tuple[str, Any]]:
    return [("/update_weights_from_disk", {"model_path": folder, "flush_cache": True})]


def _sglang_scores(reply: Any, ids: Sequence[int]) -> list[float]:
    """`[log-probability, id, …]` for each token of the prompt; of the first there is none."""
    return [row[0] for row in reply["meta_info"]["input_token_logprobs"][1:]]


def _llama_cpp_body(request: Request, model: str, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """The samplers in our order, and no other."""
    sampling = request.sampling
    return {
        "prompt": list(request.prompt_ids),
        "n_predict": sampling.max_tokens,
        "temperature": sampling.temperature,
        "samplers": ["temperature", "min_p", "top_k", "top_p"],
        **_limits(sampling, off=0),
        "repeat_penalty": 1.0,
        "stop": [],  # of a response that it ended the tokens would lack the stop text
        "n_probs": 1,
        "return_tokens": True,
        "cache_prompt": True,
    }


def _llama_cpp_read(reply: Mapping[str, Any], tokenizer: ChatTokenizer) -> Reply:
    """The chosen token of each entry of `completion_probabilities`, which has none for parts of a character."""
    chosen, used, ids = map(reply.get, ("completion_probabilities", "tokens_evaluated", "tokens"))
    if not isinstance(chosen, list) or any("id" not in c or "logprob" not in c for c in chosen):
        return Reply(ids, None, None, used)
    if ids and ids != [c["id"] for c in chosen]:
        raise EngineError(
            f"llama.cpp returned {len(chosen)} log-probabilities of the {len(ids)} tokens that it wrote: it leaves out "
            f"those that end amid a character"
        )
    kind = {"limit": "length", "eos": "stop", "word": "stop"}.get(str(reply.get("stop_type")))
    return Reply([c["id"] for c in chosen], [c["logprob"] for c in chosen], kind, used)


def _chat_body(request: Request, model: str, tokenizer: ChatTokenizer) -> dict[str, Any]:
    assert isinstance(tokenizer, ChatCodec)
    sampling = request.sampling
    messages = tokenizer.messages(request.prompt_ids, [as_url(image) for image in request.images])
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": sampling.max_tokens}
    body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
    if sampling.top_k > 0:  # these two are no part of OpenAI's own API: a server without them says so
        body["top_k"] = sampling.top_k
    if sampling.min_p > 0:
        body["min_p"] = sampling.min_p
    if messages[-1]["role"] == "assistant":  # a prefill
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    return body


def _chat_read(reply: Mapping[str, Any], tokenizer: ChatTokenizer) -> Reply:
    choice = _only(reply.get("choices"), "choices")
    text = choice["message"]["content"]
    if not isinstance(text, str | None):
        raise TypeError("the content of the message is no text")
    return Reply(tokenizer.encode(text or ""), (), choice["finish_reason"])


DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("vllm", "vllm", "/v1/completions", _vllm_body, _vllm_read, knows_limits=True,
                adapter="model", adapter_routes="/v1", reload=_vllm_reload,
                asks_scores={"prompt_logprobs": 1}, scores=_vllm_scores),
        Dialect("sglang", "sglang", "/generate", _sglang_body, _sglang_read, logprobs="processed",
                adapter="lora_path", reload=_sglang_reload, asks_scores={"logprob_start_len": 0},
                scores=_sglang_scores),  # its OpenAI routes give no token ids
        Dialect("llama.cpp", "llamacpp", "/completion", _llama_cpp_body, _llama_cpp_read,
                keeps_stop=False, context="/props"),
        Dialect("openai", "", "/v1/chat/completions", _chat_body, _chat_read, by_tokens=False,
                keeps_stop=False),
    )
}  # fmt: skip
