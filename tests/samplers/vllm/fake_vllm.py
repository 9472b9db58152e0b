"""A stand-in for as much of vLLM 0.32 as shoal uses; `signatures` compares it with the real one where that is."""

import asyncio
import inspect
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar


class EngineDeadError(Exception):
    """The process of the model has died."""


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(SimpleNamespace):
    pass


class AsyncEngineArgs(SimpleNamespace):
    pass


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class AsyncLLM:
    """Answers each token by the next one, once the test lets the request go on.

    `made` has all that were started; `gate(prompt)` is awaited before a prompt is answered.
    """

    made: ClassVar = []

    def __init__(self, args):
        asyncio.get_running_loop()  # the real one begins to listen here
        network = SimpleNamespace(vocab_size=70, tie_word_embeddings=True)
        self.model_config = SimpleNamespace(max_model_len=64, hf_text_config=network)
        self.args, self.asked, self.calls, self.dead = args, [], [], False
        self.under_way, self.paused = 0, False
        self.output_processor, self.failure = SimpleNamespace(propagate_error=self.fail), asyncio.Event()
        AsyncLLM.made.append(self)

    @classmethod
    def from_engine_args(cls, engine_args, start_engine_loop=True, usage_context=None, stat_loggers=None):
        return cls(engine_args)

    async def gate(self, prompt):
        """Nothing is waited for."""

    async def generate(self, prompt, sampling_params, request_id, *, lora_request=None):
        if self.dead:
            raise EngineDeadError("gone")
        assert not self.paused
        self.asked.append((prompt, sampling_params, request_id, lora_request))
        self.under_way += 1
        try:
            gate = asyncio.ensure_future(self.gate(prompt["prompt_token_ids"]))
            failure = asyncio.ensure_future(self.failure.wait())
            try:
                await asyncio.wait({gate, failure}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gate.cancel()
                failure.cancel()
            if self.failure.is_set():
                raise EngineDeadError("gone")
            yield SimpleNamespace(finished=True, outputs=[self.output(prompt["prompt_token_ids"])])
        finally:
            self.under_way -= 1

    def fail(self, error):
        """All that is under way ends with an error."""
        assert isinstance(error, EngineDeadError)
        self.failure.set()

    def output(self, ids):
        written = [i + 1 for i in ids]
        logprobs = [{i: SimpleNamespace(logprob=-1.0)} for i in written]
        return SimpleNamespace(token_ids=written, logprobs=logprobs, finish_reason="length")

    async def pause_generation(self, *, mode="abort", clear_cache=True):
        self.calls.append(f"pause {mode} {clear_cache}")
        while self.under_way:
            await asyncio.sleep(0)
        self.paused = True

    async def resume_generation(self):
        self.calls.append("resume")
        self.paused = False

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append((method, sorted(path.name for path in Path(kwargs["weights_path"]).iterdir())))

    async def add_lora(self, lora_request):
        self.calls.append(f"add {lora_request.lora_name}")
        return True

    def get_tokenizer(self):
        return None

    def shutdown(self, timeout=None):
        self.calls.append("shutdown")


PLACES = {
    "vllm": {"SamplingParams": SamplingParams},
    "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
    "vllm.lora.request": {"LoRARequest": LoRARequest},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
    "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
    "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
    "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
}


def install(monkeypatch):
    """Put the stand-in where vLLM would be."""
    AsyncLLM.made = []
    for place, content in PLACES.items():
        parts = place.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if not isinstance(sys.modules.get(name), ModuleType) or name not in PLACES:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        module = ModuleType(place)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, place, module)
    monkeypatch.delitem(sys.modules, "shoal.samplers.vllm", raising=False)


def unknown_to(real):
    """What the stand-in has and the real `AsyncLLM` lacks: methods, and parameters of them."""
    found = []
    for name, ours in inspect.getmembers(AsyncLLM, inspect.isroutine):
        if name.startswith("__") or name in ("gate", "output", "fail"):
            continue
        theirs = getattr(real, name, None)
        if theirs is None:
            found.append(name)
            continue
        known = inspect.signature(theirs).parameters
        found += [
            f"{name}({parameter.name})"
            for parameter in inspect.signature(ours).parameters.values()
            if parameter.name not in known or known[parameter.name].kind != parameter.kind
        ]
    return found
