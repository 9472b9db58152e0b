"""Low-rank adapters (LoRA, arXiv:2106.09685) on a transformers model: they are trained and saved, the base is neither.

The adapted model is the engine's model, so rollouts see every update at once; without its adapters it is the
reference of a KL penalty, and no second copy is held.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, DataError, missing_extra
from shoal.core.files import read_json
from shoal.core.seeding import derive_seed
from shoal.rollout.samplers.huggingface import HuggingFaceEngine
from shoal.rollout.samplers.models import resolve_model
from shoal.train.agent.config import Lora

KIND = "huggingface-lora"
ADAPTER = "adapter_model.safetensors"
_NAME = "default"


class LoraEngine(HuggingFaceEngine):
    """A Hugging Face engine whose adapters alone are trained.

    Args:
        engine: holds the base model, which is changed in place: it gets the adapters.
        lora: their rank and where they sit.
        base: the folder or name of the base model, written beside saved adapters.
        seed: of the adapters' first weights (half of them are zero, so the model says the same as before).
    """

    def __init__(self, engine: HuggingFaceEngine, lora: Lora, base: str, seed: int) -> None:
        try:
            import peft
        except ImportError as error:
            raise missing_extra("LoRA adapters", "llm") from error
        super().__init__(
            engine.model,
            engine.tokenizer.tokenizer,
            max_batch=engine.max_batch,
            prefix_tokens=engine.prefixes.max_tokens,
        )
        self.tokenizer = engine.tokenizer
        self.base = base
        self.base_sha256 = weights_sha256(engine.model)
        modules = lora.target_modules
        settings = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=modules if isinstance(modules, str) else list(modules),
            task_type="CAUSAL_LM",
        )
        device = next(self.model.parameters()).device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(derive_seed(seed, "init", "lora") % 2**63)
            try:
                self.model.add_adapter(settings, _NAME)  # type: ignore[operator]
            except ValueError as error:
                raise ConfigError(f"model.lora does not fit this model: {error}") from error
        for parameter in self.adapter_parameters().values():
            parameter.data = parameter.data.float()  # small updates would be lost in bfloat16
        self.model.eval()

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by the names they have in an adapter file."""
        return {
            "base_model.model." + name.replace(f".{_NAME}.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The base model for as long as this lasts."""
        self.model.disable_adapters()  # type: ignore[operator]
        try:
            yield
        finally:
            self.model.enable_adapters()  # type: ignore[operator]

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write an adapter folder that peft and servers read, with the tokenizer and the name of the base."""
        dtype = str(next(p for p in self.model.parameters() if not p.requires_grad).dtype)
        described = {
            "engine": KIND,
            "dtype": dtype.removeprefix("torch."),
            "base": self.base,
            "base_sha256": self.base_sha256,
        }
        (folder / "engine.json").write_text(json.dumps(described, indent=2))
        self.model.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]  # the adapters alone
        self.tokenizer.tokenizer.save_pretrained(folder)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The adapters that `save` wrote, for `load_weights`."""
        from safetensors.torch import load_file

        return dict(load_file(folder / ADAPTER))

    def load_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Take over adapter weights by name."""
        own = self.adapter_parameters()
        if own.keys() != weights.keys() or any(own[name].shape != weights[name].shape for name in own):
            wrong = sorted(own.keys() ^ weights.keys())[:3] or "their shapes"
            raise DataError(f"these adapters are of another network: {wrong} do not match")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
        self.prefixes.clear()
        self.weights_version = version


def add_lora(engine: Any, lora: Lora, base: str | None, seed: int) -> LoraEngine:
    """Put fresh adapters on the model of an engine.

    Raises:
        ConfigError: the engine has no transformers model.
    """
    if not isinstance(engine, HuggingFaceEngine) or base is None:
        raise ConfigError("model.lora needs engine.name: huggingface with an engine.model")
    where = Path(base)
    return LoraEngine(engine, lora, str(where.resolve()) if where.exists() else base, seed)


def load_lora(folder: Path, device: str = "cpu") -> LoraEngine:
    """The engine in a folder that `LoraEngine.save` wrote; its base model must still be where it was.

    Raises:
        DataError: the base model is not the one that the adapters were trained on.
    """
    described, settings = read_json(folder / "engine.json"), read_json(folder / "adapter_config.json")
    engine = HuggingFaceEngine.load(resolve_model(described["base"]), device=device, dtype=described["dtype"])
    modules = settings["target_modules"]
    lora = Lora(settings["r"], settings["lora_alpha"], modules, settings["lora_dropout"])
    adapted = LoraEngine(engine, lora, described["base"], 0)
    if adapted.base_sha256 != described["base_sha256"]:
        raise DataError(f"{folder} was trained on another model than {described['base']}: its weights differ")
    adapted.load_weights(adapted.read(folder), adapted.weights_version)
    return adapted


def merge_lora(folder: Path, target: Path) -> None:
    """Write the base model with the adapters of `folder` merged into its weights, as transformers loads it."""
    import peft

    described = read_json(folder / "engine.json")
    base = HuggingFaceEngine.load(resolve_model(described["base"]), dtype=described["dtype"])
    if weights_sha256(base.model) != described["base_sha256"]:
        raise DataError(f"{folder} was trained on another model than {described['base']}: its weights differ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers 5.23 by an old name
        merged = peft.PeftModel.from_pretrained(base.model, str(folder)).merge_and_unload()
    merged.save_pretrained(target)
    base.tokenizer.tokenizer.save_pretrained(target)


def weights_sha256(model: nn.Module) -> str:
    """One hash of all weights of a model, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
