"""Servers as engines: vLLM, SGLang and llama.cpp by tokens, anything else that speaks OpenAI's API by messages.

With a tokenizer here, prompts and responses travel as token ids with their log-probabilities, and may be learned
from. Without one, messages do, for evaluation only. A server's batches decide its rounding: level L0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from shoal.core.errors import EngineError, did_you_mean
from shoal.core.registry import check_name
from shoal.rollout.capabilities import Capabilities
from shoal.rollout.images import as_url
from shoal.rollout.samplers.chat_codec import ChatCodec
from shoal.rollout.samplers.dialects import DIALECTS, Dialect, LogprobsMode
from shoal.rollout.samplers.http import HttpClient, Patience
from shoal.rollout.samplers.sampler import ChatTokenizer, Completion, Level, Request

logger = logging.getLogger(__name__)

Server = Literal["auto", "vllm", "sglang", "llama.cpp", "openai"]
SERVERS = ("auto", "vllm", "sglang", "llama.cpp", "openai")
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}


class OpenAIEngine:
    """Completes prompts on a server.

    Args:
        url: of the server, without `/v1`.
        model: its name there; the first that the server lists if None.
        tokenizer: the model's tokenizer, with a chat template (`TemplateTokenizer`); None for messages.
        server: which kind it is; "auto" asks it.
        concurrency: requests under way at once; batching is the server's.
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
            self.server, self.model = self._identify(server, model)
            self.dialect = self._choose_dialect(tokenizer is not None)
        except BaseException:
            self.client.close()
            raise
        self.logprobs = logprobs or (self.dialect.logprobs if self.dialect else "raw")
        self.weights_version = 0
        self._adapter = ""
        self._concurrency = concurrency
        self._pool = self._new_pool()

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._concurrency, thread_name_prefix="shoal-openai")

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
        return list(self._pool.map(self._try, requests))

    def _try(self, request: Request) -> Completion | EngineError:
        try:
            return self.complete(request)
        except EngineError as error:
            return error

    def complete(self, request: Request) -> Completion:
        """The completion of one request, in the calling thread."""
        if not request.prompt_ids:
            raise EngineError("a prompt must have at least one token, got none")
        name, version = "/".join(map(str, (request.key, "request"))), self.weights_version
        if self.dialect is None:
            return self._chat(request, name, version)
        if request.images:
            raise EngineError("pictures cannot travel with token ids: leave the tokenizer out")
        if self.logprobs == "raw" and request.sampling.temperature not in (0.0, 1.0):
            raise EngineError(
                f"this server gives log-probabilities at temperature 1, and temperature "
                f"{request.sampling.temperature} was asked for: use 1 or 0, or start the server so that it gives "
                f"those of the sampling (vLLM: --logprobs-mode processed_logprobs) and say logprobs='processed'"
            )
        model = self._adapter if self.dialect.name == "sglang" else self.model
        body = self.dialect.body(request, model, getattr(self.tokenizer, "end_ids", ()))
        reply = self.client.post(self.dialect.path, body, name=name)
        try:
            answer = self.dialect.read(reply, request)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"the server's reply is none of {self.server}'s: {str(reply)[:200]}") from error
        return Completion(answer.token_ids, answer.logprobs, answer.finish, version)

    def _chat(self, request: Request, name: str, version: int) -> Completion:
        assert isinstance(self.tokenizer, ChatCodec)
        sampling = request.sampling
        messages = self.tokenizer.messages(request.prompt_ids, [as_url(image) for image in request.images])
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if messages[-1]["role"] == "assistant":  # a prefill
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        reply = self.client.post("/v1/chat/completions", body, name=name)
        try:
            choice = reply["choices"][0]
            text, reason = str(choice["message"]["content"] or ""), choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"the server's reply is no chat completion: {str(reply)[:200]}") from error
        if reason not in ("stop", "length"):
            raise EngineError(f"the server broke the response off ({reason}): nothing of it is used")
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
        """Leave requests that hang to themselves and go on over new connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._new_pool()
        self.client.close()

    def close(self) -> None:
        """Wait for requests under way and close the connections."""
        self._pool.shutdown()
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

    def _identify(self, server: Server, model: str | None) -> tuple[str, str]:
        """The kind of server and the name of the model, asked for where they were not said."""
        if server != "auto" and model is not None:
            return server, model
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
        return kind, model if model is not None else names[0]
