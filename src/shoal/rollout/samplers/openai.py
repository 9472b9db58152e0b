"""Servers as engines: vLLM, SGLang and llama.cpp by tokens, anything else that speaks OpenAI's API by messages.

With a tokenizer here, prompts and responses travel as token ids with their log-probabilities, and may be learned
from. Without one, messages do, for evaluation only. A server's batches decide its rounding: level L0.

Nothing is left to a server's defaults: several of them take top-p, top-k or penalties from the model's folder,
and then the log-probabilities would be of another distribution than the one sampled from. No seed is ever sent:
it does not make a batching server exact, and with it vllm's CPU build ends on the second piece of a long prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from shoal.core.errors import EngineError, did_you_mean
from shoal.core.registry import check_name
from shoal.rollout.images import as_url
from shoal.rollout.samplers.http import HttpClient, Patience, Question, RefusedError
from shoal.rollout.samplers.sampler import (
    Capabilities,
    ChatTokenizer,
    Completion,
    Level,
    Request,
    Sampling,
    room_left,
)
from shoal.rollout.samplers.tokenizers import ChatCodec

logger = logging.getLogger(__name__)

Server = Literal["auto", "vllm", "sglang", "llama.cpp", "openai"]
SERVERS = ("auto", "vllm", "sglang", "llama.cpp", "openai")
FULL = "context_length_exceeded"
"""What OpenAI's API calls a prompt that leaves no room in the context."""
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
LogprobsMode = Literal["raw", "processed"]


class OpenAIEngine:
    """Completes prompts on a server.

    Args:
        url: of the server, without `/v1`.
        model: its name there; the first that the server lists if None.
        tokenizer: the model's tokenizer, with a chat template (`TemplateTokenizer`); None for messages.
        server: which kind it is; "auto" asks it.
        concurrency: requests under way at once; batching is the server's.
        context: longest prompt and response together, in tokens; what the server says of its model if None.
        patience: timeouts and retries of each request.
        api_key: sent as a bearer token.
        logprobs: which log-probabilities the server was told to give; the default of its kind if None.
    """

    level: Level = "L0"

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        tokenizer: ChatTokenizer | None = None,
        server: Server = "auto",
        concurrency: int = 64,
        context: int | None = None,
        patience: Patience | None = None,
        api_key: str | None = None,
        logprobs: LogprobsMode | None = None,
    ) -> None:
        if server not in SERVERS:
            raise ValueError(f"no kind of server named {server!r}.{did_you_mean(server, SERVERS)}")
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self.client = HttpClient(url, patience or Patience(), api_key)
        self.tokenizer: ChatTokenizer = tokenizer if tokenizer is not None else ChatCodec()
        try:
            self.server, self.model, known = self._identify(server, model)
            self.dialect = self._choose_dialect(tokenizer is not None)
        except BaseException:
            self.client.close()
            raise
        self.context = context if context is not None else known
        self.logprobs = logprobs or (self.dialect.logprobs if self.dialect else "raw")
        self.weights_version = 0
        self._adapter = ""
        self._concurrency = concurrency

    @property
    def capabilities(self) -> Capabilities:
        """What this server can do; exact tokens and log-probabilities need a tokenizer here."""
        by_tokens = self.dialect is not None
        return Capabilities(
            level=self.level,
            token_ids=by_tokens,
            logprobs=by_tokens,
            adapters=self.server in ("vllm", "sglang"),
            images=not by_tokens,
        )

    # --- rollouts
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order; raises the first failure after all have ended."""
        results = self.generate_each(requests)
        failed = [result for result in results if isinstance(result, EngineError)]
        if failed:
            raise EngineError(
                f"{len(failed)} of {len(results)} requests failed; the first: {failed[0]}"
            ) from failed[0]
        return [result for result in results if isinstance(result, Completion)]

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | EngineError]:
        """Like `generate`, with an error in the place of each request that has no answer."""
        version = self.weights_version
        asked = [self._question(request) for request in requests]
        questions = [question for question in asked if isinstance(question, Question)]
        replies = iter(self.client.post_each(questions, self._concurrency))
        return [
            self._completion(request, next(replies), version) if isinstance(question, Question) else question
            for request, question in zip(requests, asked, strict=True)
        ]

    def _question(self, request: Request) -> Question | Completion | EngineError:
        """What to post for a request; what there is to say of it where it cannot or need not be asked."""
        name = "/".join(map(str, (request.key, "request")))
        try:
            room = room_left(self, request)
            if not room:
                return Completion((), (), "context", self.weights_version)
            sampling = replace(request.sampling, max_tokens=room)
            if self.dialect is None:
                return Question("/v1/chat/completions", self._chat(request, sampling), name)
            return Question(self.dialect.path, self._tokens(request, sampling), name)
        except EngineError as error:
            return error

    def _tokens(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        """The body for a server that takes tokens."""
        assert self.dialect is not None
        if request.images:
            raise EngineError("a server that is asked in tokens takes no images: leave the tokenizer out")
        if self.logprobs == "raw" and sampling.temperature not in (0.0, 1.0):
            raise EngineError(
                f"this {self.server} server gives log-probabilities of temperature 1, not of "
                f"{sampling.temperature}: sample at 1 (or 0), or start it so that it gives those of the sampling "
                f"(vLLM: --logprobs-mode processed_logprobs) and say logprobs='processed'"
            )
        if sampling.restricted and not (self.logprobs == "processed" and self.dialect.knows_limits):
            raise EngineError(
                f"this {self.server} server gives log-probabilities of all tokens, not of those that top_p, top_k and "
                f"min_p leave: leave them out, or use vLLM with --logprobs-mode processed_logprobs and say "
                f"logprobs='processed'"
            )
        model = self._adapter if self.dialect.name == "sglang" else self.model
        asked = msgspec.structs.replace(request, sampling=sampling)
        return self.dialect.body(asked, model, getattr(self.tokenizer, "end_ids", ()))

    def _chat(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        """The body for a server that takes messages."""
        assert isinstance(self.tokenizer, ChatCodec)
        messages = self.tokenizer.messages(request.prompt_ids, [as_url(image) for image in request.images])
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.top_k > 0:  # these two are no part of OpenAI's own API: a server without them says so
            body["top_k"] = sampling.top_k
        if sampling.min_p > 0:
            body["min_p"] = sampling.min_p
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if messages[-1]["role"] == "assistant":  # a prefill
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return body

    def _completion(self, request: Request, reply: Any, version: int) -> Completion | EngineError:
        """What a reply says; an error if it says nothing that can be used."""
        if isinstance(reply, RefusedError) and reply.code == FULL:
            return Completion((), (), "context", version)
        if isinstance(reply, EngineError):
            return reply
        try:
            if self.dialect is not None:
                return Completion(*self.dialect.read(reply, request), version)
            choice = reply["choices"][0]
            text, reason = str(choice["message"]["content"] or ""), choice["finish_reason"]
        except EngineError as error:
            return error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            kind = "a chat completion" if self.dialect is None else f"{self.server}'s"
            refused = EngineError(f"the server's reply is none of {kind}: {_shown(reply)}")
            refused.__cause__ = error
            return refused
        if reason not in ("stop", "length"):
            return EngineError(
                f"the server broke the response off ({str(reason)[:80]}): nothing of it is used"
            )
        return Completion(self.tokenizer.encode(text), (), reason, version)

    # --- weights
    def load_adapter(self, folder: Path, version: int) -> None:
        """Swap in the LoRA adapter of a folder that the server can read; the one before is let go.

        vLLM must run with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`, SGLang with `--enable-lora`.
        """
        if not self.capabilities.adapters:
            raise EngineError(f"a {self.server} server takes no adapters while it runs")
        prefix = "/v1" if self.server == "vllm" else ""
        name = check_name("adapter", f"shoal-{version}-{time.time_ns()}")
        where = {"lora_name": name, "lora_path": str(Path(folder).resolve())}
        self.client.post(f"{prefix}/load_lora_adapter", where)
        before, self._adapter = self._adapter, name
        if self.server == "vllm":
            self.model = name
        self.weights_version = version
        if before:
            self.client.post(f"{prefix}/unload_lora_adapter", {"lora_name": before})

    def load_folder(self, folder: Path, version: int) -> None:
        """Have the server read whole weights from a folder that it can see (SGLang)."""
        if self.server != "sglang":
            raise EngineError(
                f"a {self.server} server cannot reload its weights: use an adapter, or the engine in process"
            )
        reply = self.client.post("/update_weights_from_disk", {"model_path": str(Path(folder).resolve())})
        if not reply.get("success", False):
            raise EngineError(f"the server did not take the weights: {reply.get('message', reply)}")
        self.weights_version = version

    def restart(self) -> None:
        """Give up requests that are under way and go on over new connections."""
        self.client.close()

    def close(self) -> None:
        """Give up requests that are under way and close the connections."""
        self.client.close()

    def __enter__(self) -> OpenAIEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _choose_dialect(self, by_tokens: bool) -> Dialect | None:
        if not by_tokens:
            return None
        if self.server not in DIALECTS:
            raise EngineError(
                f"{self.client.url} is no server that takes and gives token ids (it says it is {self.server!r}): "
                f"leave the tokenizer out to use it with messages, for evaluation, or say which kind it is with "
                f"server="
            )
        return DIALECTS[self.server]

    def _identify(self, server: Server, model: str | None) -> tuple[str, str, int | None]:
        """The kind of server, the name of the model and its context, asked for where they were not said."""
        if server != "auto" and model is not None:
            return server, model, None
        reply = self.client.get("/v1/models")
        try:
            listed = reply.get("data") or []
            names = [str(entry.get("id")) for entry in listed]
        except (AttributeError, TypeError) as error:
            raise EngineError(
                f"{self.client.url}/v1/models answered with no list of models: {str(reply)[:200]}"
            ) from error
        if model is None and not names:
            raise EngineError(f"{self.client.url} lists no model: say which with model=")
        if model is not None and names and model not in names:
            raise EngineError(f"{self.client.url} has no model {model!r}.{did_you_mean(model, names)}")
        owner = str(listed[0].get("owned_by")) if listed else ""
        kind = _OWNERS.get(owner, "openai") if server == "auto" else server
        name = model if model is not None else names[0]
        return kind, name, self._context_of(kind, listed[names.index(name)] if names else {})

    def _context_of(self, kind: str, entry: Any) -> int | None:
        """What the server says of the context; messages are not counted in tokens here, so there it says nothing."""
        if isinstance(self.tokenizer, ChatCodec):
            return None
        found = entry.get("max_model_len") if isinstance(entry, dict) else None
        if kind == "llama.cpp":
            try:
                found = self.client.get("/props")["default_generation_settings"]["n_ctx"]
            except RefusedError:  # an older one
                return None
            except (LookupError, TypeError) as error:
                raise EngineError(f"{self.client.url}/props says nothing of the context") from error
        return found if type(found) is int and found > 0 else None


def _shown(reply: Any) -> str:
    """The beginning of a reply, for a message."""
    try:
        return str(reply)[:200]
    except RecursionError:
        return "one that is nested without end"


PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""None, said in full: servers take other defaults from a model's folder."""


def _limits(sampling: Sampling) -> dict[str, float]:
    """Which tokens may be sampled, said in full."""
    return {
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
    }


class Answer(NamedTuple):
    """What a server wrote."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]


class Dialect(Protocol):
    """Requests and replies of one kind of server, in tokens."""

    name: str
    path: str
    logprobs: LogprobsMode
    """Whether log-probabilities are of the model (raw) or of what was sampled from (processed), by default."""
    knows_limits: bool
    """Whether processed ones are of the tokens that top_p, top_k and min_p leave."""

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
    knows_limits = True

    def body(self, request: Request, model: str, end_ids: Sequence[int]) -> dict[str, Any]:
        """Token ids in, ids and log-probabilities asked for."""
        sampling = request.sampling
        return {
            "model": model,
            "prompt": list(request.prompt_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            **_limits(sampling),
            **PENALTIES,
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
    knows_limits = False

    def body(self, request: Request, model: str, end_ids: Sequence[int]) -> dict[str, Any]:
        """Token ids in; the adapter is named where one is loaded."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "input_ids": list(request.prompt_ids),
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                **_limits(sampling),
                **PENALTIES,
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
    knows_limits = False

    def body(self, request: Request, model: str, end_ids: Sequence[int]) -> dict[str, Any]:
        """Token ids in; the samplers in our order, and no other."""
        sampling = request.sampling
        return {
            "prompt": list(request.prompt_ids),
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "samplers": ["temperature", "min_p", "top_k", "top_p"],
            **_limits(sampling),
            "top_k": max(0, sampling.top_k),
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
