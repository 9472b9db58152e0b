"""Servers as samplers: vLLM, SGLang and llama.cpp by tokens, anything else that speaks OpenAI's API by messages.

With a tokenizer here, prompts and responses travel as token ids with their log-probabilities, and may be learned
from. Without one, messages do, for evaluation only. A server's batches decide its rounding: level L0.

vLLM and SGLang load new weights or an adapter from a folder. That they have them is not believed but checked, by the
log-probabilities of a fixed prompt: after each load, and before an answer counts that came over a new connection.

Nothing is left to a server's defaults: several of them take top-p, top-k or penalties from the model's folder,
and then the log-probabilities would be of another distribution than the one sampled from. No seed is ever sent:
it does not make a batching server exact, and with it vllm's CPU build ends on the second piece of a long prompt.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import shutil
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.core.errors import DataError, EngineError, did_you_mean
from shoal.core.executors import Closing
from shoal.core.files import read_json, write_folder
from shoal.core.registry import check_name
from shoal.samplers.asking import RejectedError, RetryPolicy, generate, retried
from shoal.samplers.registry import LogprobsMode, Server
from shoal.samplers.sampler import (
    Capabilities,
    ChatTokenizer,
    Completion,
    Key,
    Level,
    Request,
    Sampling,
    room_left,
)
from shoal.samplers.servers.http import HttpClient
from shoal.samplers.tokenizers import ChatCodec

logger = logging.getLogger(__name__)

FULL = "context_length_exceeded"
"""What OpenAI's API calls a prompt that leaves no room in the context."""
FULL_IN_WORDS = (
    "maximum context length",  # vLLM, SGLang
    "longer than the model's context length",  # SGLang
    "exceeds the available context size",  # llama.cpp
)
"""How servers say it that have no name for it."""
PROBE = "The quick brown fox jumps over the lazy dog, and 3 + 4 = 7."
"""What the fixed prompt says by which a server's weights are known."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a server answers with since it was last told to load something; at first its own weights."""

    version: int = 0
    adapter: str = ""  # the name of an adapter there; "" where all weights were loaded
    folder: Path | None = None


class OpenAIEngine(Closing):
    """Completes prompts on a server.

    Args:
        url: of the server, without `/v1`.
        model: its name there; the first that the server lists if None.
        tokenizer: the model's tokenizer, with a chat template (`TemplateTokenizer`); None for messages.
        server: which kind it is; "auto" asks it.
        concurrency: requests under way at once; batching is the server's.
        context: longest prompt and response together, in tokens; what the server says of its model if None.
        retry_policy: timeouts and retries of each request.
        api_key: sent as a bearer token.
        logprobs: which log-probabilities the server was told to give; the default of its kind if None.
        model_folder: the model that is trained, as files: `load_weights` needs it.
        weights_folder: where weights and adapters are written for the server, which must find them by the same path;
            `load_weights` needs it, and without it an adapter is loaded from where it lies.
        tolerance: of `confirm`.
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
        retry_policy: RetryPolicy | None = None,
        api_key: str | None = None,
        logprobs: LogprobsMode | None = None,
        model_folder: Path | None = None,
        weights_folder: Path | None = None,
        tolerance: float = 0.1,
    ) -> None:
        if server not in ("auto", *DIALECTS):
            raise ValueError(
                f"no kind of server named {server!r}.{did_you_mean(server, ('auto', *DIALECTS))}"
            )
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        if context is not None and context < 1:
            raise ValueError(f"context must be at least 1, or None, got {context}")
        self.tokenizer: ChatTokenizer = tokenizer if tokenizer is not None else ChatCodec()
        self._model_folder, self._weights_folder, self._tolerance = model_folder, weights_folder, tolerance
        self._loaded, self.client = Loaded(), HttpClient(url, retry_policy, api_key)
        try:
            self._kind, self.model, known = self._identify(server, model)
            self.dialect = self._kind if tokenizer is not None else DIALECTS["openai"]
            if tokenizer is not None and not self.dialect.by_tokens:
                raise EngineError(
                    f"{self.client.url} is no server that takes and gives token ids (it says it is "
                    f"{self.server!r}): leave the tokenizer out to use it with messages, for evaluation, or say "
                    f"which kind it is with server="
                )
        except BaseException:
            self.close()
            raise
        self.context = context if context is not None else known
        self.vocabulary = None if model_folder is None else _vocabulary_in(model_folder)
        """How many tokens the network that is trained knows, often more than its tokenizer; None is not known."""
        self.logprobs = logprobs or self.dialect.logprobs
        self._free, self._concurrency = asyncio.Semaphore(concurrency), concurrency
        self._expected: tuple[float, ...] | None = None
        self._checking, self._checked, self._refused = asyncio.Lock(), 0, 0

    @property
    def weights_version(self) -> int:
        """The version of what answers are made with."""
        return self._loaded.version

    @property
    def retry_policy(self) -> RetryPolicy:
        """Timeouts and retries of each request."""
        return self.client.retry_policy

    @property
    def server(self) -> str:
        """Which kind of server it is."""
        return self._kind.name

    @property
    def capabilities(self) -> Capabilities:
        """What this server can do; exact tokens and log-probabilities need a tokenizer here."""
        by_tokens = self.dialect.by_tokens
        weights = self._kind.reload is not None and None not in (self._model_folder, self._weights_folder)
        return Capabilities(by_tokens, by_tokens, weights, adapters=bool(self._kind.adapter))

    # --- rollouts
    generate = generate

    async def sample(self, request: Request) -> Completion:
        """The answer of the server to a request that is made once, from any event loop.

        Raises:
            RejectedError: it rejected the request, or would.
            EngineError: it did not answer, or with what is no completion.
        """
        return await self.client.loop.within(self._answer(request))

    async def _answer(self, request: Request) -> Completion:
        loaded, room = self._loaded, room_left(self, request)
        if not room:
            return Completion((), (), "context", loaded.version)
        body = self._body(request, room, loaded.adapter)
        refused, reply = None, None
        async with self._free:
            try:
                reply = await self.client.attempt("POST", self.dialect.path, body)
            except RejectedError as error:
                if error.code == FULL or any(words in str(error) for words in FULL_IN_WORDS):
                    return Completion((), (), "context", loaded.version)
                refused = error
        await self._check_answer(loaded)  # one that was restarted refuses an adapter, which it does not know
        if refused is not None:
            raise refused
        return self._completion(request, reply, loaded.version)

    def close(self) -> None:
        """Give up requests that are under way; nothing is answered any more, and what was written is removed."""
        self.client.close()
        self._remove(self._loaded.folder)

    def _body(self, request: Request, room: int, adapter: str) -> dict[str, Any]:
        """What to post for a request."""
        asked = msgspec.structs.replace(request, sampling=replace(request.sampling, max_tokens=room))
        if self.dialect.by_tokens:
            self._check_tokens(request)
        try:
            body = self.dialect.body(asked, self.model, self.tokenizer)
        except (OSError, ValueError) as error:
            raise RejectedError(f"a picture cannot be sent ({type(error).__name__}): {error}") from error
        return body | {self._kind.adapter: adapter} if adapter else body

    def _check_tokens(self, request: Request) -> None:
        """Refuse what a server that is asked in tokens cannot answer with the right log-probabilities."""
        sampling = request.sampling
        if request.images:
            raise RejectedError("a server that is asked in tokens takes no images: leave the tokenizer out")
        if self.logprobs == "raw" and sampling.temperature not in (0.0, 1.0):
            raise RejectedError(
                f"this {self.server} server gives log-probabilities of temperature 1, not of "
                f"{sampling.temperature}: sample at 1 (or 0), or start it so that it gives those of the sampling "
                f"(vLLM: --logprobs-mode processed_logprobs) and say logprobs='processed'"
            )
        if sampling.restricted and not (self.logprobs == "processed" and self.dialect.knows_limits):
            raise RejectedError(
                f"this {self.server} server gives log-probabilities of all tokens, not of those that top_p, top_k and "
                f"min_p leave: leave them out, or use vLLM with --logprobs-mode processed_logprobs and say "
                f"logprobs='processed'"
            )

    def _completion(self, request: Request, reply: Any, version: int) -> Completion:
        """What a reply says."""
        try:
            said = self.dialect.read(reply, self.tokenizer)
            completion = said.completion(request, version, with_logprobs=self.dialect.by_tokens)
            return completion if self.dialect.keeps_stop else _ended(completion, request, self.tokenizer)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = f"{self.server}'s" if self.dialect.by_tokens else "a chat completion"
            raise EngineError(f"the server's reply is none of {kind}: {reply!s:.200}") from error

    # --- weights
    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Let the server take over weights by name, as `state_dict` of the `transformers` model has them.

        vLLM must run with `VLLM_SERVER_DEV_MODE=1`. Whether the server has them `confirm` says.
        """
        if not self.capabilities.weights:
            raise EngineError(
                "weights need vLLM or SGLang, and OpenAIEngine(..., model_folder=, weights_folder=)"
            )
        from shoal.samplers.huggingface.engine import as_in_files, write_model

        assert self._model_folder is not None
        with write_folder(self._place(version)) as folder:
            write_model(as_in_files(self._model_folder, weights), self._model_folder, folder)
        self._take(Loaded(version, folder=self._place(version)))

    def load_adapter(self, folder: Path, version: int) -> None:
        """Swap in the LoRA adapter of a folder that the server can read; the one before is let go.

        vLLM must run with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`, SGLang with `--enable-lora`.
        """
        if not self.capabilities.adapters:
            raise EngineError(f"a {self.server} server takes no adapters while it runs")
        if self._weights_folder is not None:  # a server that is restarted needs it once more
            with write_folder(self._place(version)) as copied:
                shutil.copytree(folder, copied, dirs_exist_ok=True)
            folder = self._place(version)
        self._take(Loaded(version, _new_name(version), Path(folder).resolve()))

    @cached_property
    def probe(self) -> tuple[int, ...]:
        """The fixed prompt of which `confirm` compares the log-probabilities."""
        ids = self.tokenizer.start([{"role": "user", "content": PROBE}])
        return ids[: len(ids) if self.context is None else self.context - 1]

    def confirm(self, expected: Sequence[float]) -> None:
        """Check that the server has what was loaded last, now and before answers count that come by new connections.

        Where it has not, it is told once more.

        Args:
            expected: log-probabilities of the tokens of `probe` after the first, by the weights that were loaded.

        Raises:
            EngineError: the server's own differ by more than `tolerance` on average, also after a second load.
        """
        self._expected, self._checked = tuple(expected), -1
        self.client.loop.run(retried(partial(self._check, 0), self.retry_policy, "confirm"))

    def _place(self, version: int) -> Path:
        return Path(f"{self._weights_folder}-{version}").resolve()

    def _remove(self, folder: Path | None) -> None:
        if folder is not None and self._weights_folder is not None:  # else it is the caller's
            shutil.rmtree(folder, ignore_errors=True)

    def _take(self, new: Loaded) -> None:
        """Tell the server to load something, and forget what it had before."""
        before, self._expected = self._loaded, None
        try:
            self.client.loop.run(retried(partial(self._load, new), self.retry_policy, "load"))
        except RejectedError as error:
            raise EngineError(
                f"the server does not load version {new.version}: {error}. Start it as docs/servers.md says, where it "
                f"can read {new.folder}"
            ) from error
        if before.folder != new.folder:
            self._remove(before.folder)
        if before.adapter:
            try:
                unused = {"lora_name": before.adapter}
                self.client.post(f"{self._kind.adapter_routes}/unload_lora_adapter", unused)
            except EngineError as error:  # nothing depends on it
                logger.warning("the server keeps the adapter before: %s", error)

    async def _load(self, new: Loaded) -> None:
        """Tell the server once to load something."""
        if new.adapter:
            where = {"lora_name": new.adapter, "lora_path": str(new.folder)}
            try:
                await self.client.attempt("POST", f"{self._kind.adapter_routes}/load_lora_adapter", where)
            except RejectedError as error:
                if "already" not in str(error):
                    # an attempt whose answer was lost has loaded it: the name is of this call
                    raise
        else:
            assert self._kind.reload is not None
            *calls, last = self._kind.reload(str(new.folder))
            try:
                for path, body in calls:
                    await self.client.attempt("POST", path, body)
            finally:
                await self.client.attempt("POST", *last)
        self._loaded, self._refused = new, self.client.refused

    async def _check_answer(self, loaded: Loaded) -> None:
        """Raise unless an answer that just came was made with what is `loaded`.

        A process that was restarted answers by new connections alone. So an answer counts if the server was found to
        be right after the last connection was made, and nothing was loaded since the answer was asked for.
        """
        if self._expected is None:
            return
        await self._check(self.client.connections)
        if self._loaded is not loaded:
            raise EngineError("the server was restarted while it answered: its answer does not count")

    async def _check(self, connections: int) -> None:
        """Find the server right once, after so many connections were made; load again what it has lost."""
        async with self._checking:
            if self._checked >= connections:
                return
            kept, gap = self._loaded, math.inf
            again = replace(kept, adapter=_new_name(kept.version) if kept.adapter else "")
            if self._refused == self.client.refused:  # else it was away, and may have come back without them
                gap = await self._gap()
            if not gap <= self._tolerance:
                logger.warning("the server may have lost version %d: it is loaded again", kept.version)
                await self._load(again)
                gap = await self._gap()
            if not gap <= self._tolerance:
                raise RejectedError(
                    f"{self.client.url} does not have version {kept.version} of the weights: its log-probabilities of "
                    f"a fixed prompt must differ from the policy's by at most {self._tolerance:g} on average, and "
                    f"differ by {gap:.3g} after a second load of {kept.folder}. Start it as docs/servers.md says; if "
                    f"it computes in another precision, raise engine.server.tolerance"
                )
            self._checked = self.client.connections

    async def _gap(self) -> float:
        """How much the server's log-probabilities of `probe` differ from what is expected, on average."""
        expected, kind = self._expected, self._kind
        assert expected is not None
        assert kind.scores is not None
        asked = Request(self.probe, Key(0, ()), Sampling(1))
        body = self._body(asked, 1, self._loaded.adapter) | kind.asks_scores
        try:
            async with self._alone() if self._loaded.adapter else nullcontext():
                reply = await self.client.attempt("POST", kind.path, body)
            found = kind.scores(reply, self.probe)
            return sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(expected)
        except RejectedError:
            if not self._loaded.adapter:
                raise
            return math.inf  # it knows no such adapter
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(f"the server gave no log-probabilities of a prompt: {error}") from error

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Nothing else is under way.

        vLLM (0.32, on a CPU) ends when it is asked for log-probabilities of a prompt with an adapter beside others.
        """
        taken = 0
        try:
            while taken < self._concurrency:
                await self._free.acquire()
                taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()

    def _identify(self, server: Server, model: str | None) -> tuple[Dialect, str, int | None]:
        """The kind of server, the name of the model and its context, asked for where they were not said."""
        if server != "auto" and model is not None:
            return DIALECTS[server], model, None
        reply = self.client.get("/v1/models")
        try:
            listed = reply.get("data") or []
            names = [entry["id"] for entry in listed]
            if not all(isinstance(name, str) for name in names):
                raise TypeError("the name of a model is no text")
        except (AttributeError, LookupError, TypeError) as error:
            raise EngineError(
                f"{self.client.url}/v1/models answered with no list of models: {str(reply)[:200]}"
            ) from error
        if model is None and not names:
            raise EngineError(f"{self.client.url} lists no model: say which with model=")
        if model is not None and names and model not in names:
            raise EngineError(f"{self.client.url} has no model {model!r}.{did_you_mean(model, names)}")
        owner = str(listed[0].get("owned_by")) if listed else ""
        owners = {dialect.owner: dialect.name for dialect in DIALECTS.values()}
        kind = DIALECTS[owners.get(owner, "openai") if server == "auto" else server]
        name = model if model is not None else names[0]
        return kind, name, self._context_of(kind, listed[names.index(name)] if names else {})

    def _context_of(self, kind: Dialect, entry: Any) -> int | None:
        """What the server says of the context; messages are not counted in tokens here, so there it says nothing."""
        if isinstance(self.tokenizer, ChatCodec):
            return None
        found = entry.get("max_model_len") if isinstance(entry, dict) else None
        if kind.context:
            try:
                found = self.client.get(kind.context)["default_generation_settings"]["n_ctx"]
            except RejectedError:  # an older one
                return None
            except (LookupError, TypeError) as error:
                raise EngineError(f"{self.client.url}{kind.context} says nothing of the context") from error
        return found if type(found) is int and found > 0 else None


# --- what differs from one kind of server to another
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


def _vocabulary_in(folder: Path) -> int | None:
    described = read_json(folder / "config.json")
    return described.get("text_config", described).get("vocab_size")  # type: ignore[no-any-return]


def _new_name(version: int) -> str:
    """Of an adapter on a server."""
    return check_name("adapter", f"shoal-{version}-{time.time_ns()}")


def _ended(completion: Completion, request: Request, tokenizer: ChatTokenizer) -> Completion:
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
