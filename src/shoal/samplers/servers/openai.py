"""Servers as samplers: vLLM, SGLang and llama.cpp by tokens, anything else that speaks OpenAI's API by messages.

With a tokenizer here, prompts and responses travel as token ids with their log-probabilities, and may be learned
from. Without one, messages do, for evaluation only. A server's batches decide its rounding: level L0.

vLLM and SGLang load new weights or an adapter from a folder. That they have them is not believed but checked, by the
log-probabilities of a fixed prompt: after each load, and before an answer counts that came over a new connection.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import EngineError, did_you_mean
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
    of_inner,
    room_left,
)
from shoal.samplers.servers.dialects import DIALECTS, Dialect, ended_by_text
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
    weights_version, retry_policy = of_inner("version", "_loaded"), of_inner("retry_policy", "client")
    server = of_inner("name", "_kind")
    """Which kind of server it is."""

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
            return (
                completion if self.dialect.keeps_stop else ended_by_text(completion, request, self.tokenizer)
            )
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


def _vocabulary_in(folder: Path) -> int | None:
    described = read_json(folder / "config.json")
    return described.get("text_config", described).get("vocab_size")  # type: ignore[no-any-return]


def _new_name(version: int) -> str:
    """Of an adapter on a server."""
    return check_name("adapter", f"shoal-{version}-{time.time_ns()}")
