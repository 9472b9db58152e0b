"""Low-rank adapters (LoRA, arXiv:2106.09685) on a transformers model: they are trained and saved, the base is neither.

The adapted model is the sampler's model, so rollouts see every update at once, or the adapters are loaded into what
samples (vllm, replicas on Ray); without its adapters it is the reference of a KL penalty, and no second copy is held.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.core.errors import ConfigError, DataError, MissingExtraError, needs_extra, pip_line, reading
from shoal.core.files import read_json
from shoal.core.seeding import derive_seed
from shoal.maths.noise import torch_noise
from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.samplers.models import resolve_model
from shoal.samplers.registry import EngineConfig
from shoal.train.agent.config import Lora
from shoal.train.agent.policies.huggingface import HuggingFacePolicy
from shoal.train.agent.policies.policy import Policy, weights_sha256

ADAPTER = "adapter_model.safetensors"
_NAME = "default"
_OLD_NAME = ".is_gradient_checkpointing"
"""A warning of transformers 5.23 about the name by which peft 0.21 asks it."""


class LoraPolicy(HuggingFacePolicy):
    """A Hugging Face policy whose adapters alone are trained.

    The model of the policy that it is made of is changed in place: it gets the adapters, whose first weights follow
    from the seed (half of them are zero, so the model says the same as before). The folder or name of the `base` model
    is written beside saved adapters.
    """

    def __init__(self, policy: HuggingFacePolicy, lora: Lora, base: str, seed: int) -> None:
        super().__init__(policy.module, policy.tokenizer, policy.pad_id)
        self.base = base
        self.base_sha256 = weights_sha256(policy.module)
        settings = _settings(lora)
        device = next(self.module.parameters()).device
        with torch_noise(derive_seed(seed, "init", "lora"), device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", _OLD_NAME, FutureWarning)
            # tied adapters are refused below
            warnings.filterwarnings("ignore", "Model has .tie_word_embeddings", UserWarning)
            try:
                self.module.add_adapter(settings, _NAME)  # type: ignore[operator]
            except ValueError as error:
                raise ConfigError(f"model.lora does not fit this model: {error}") from error
        _refuse_tied(self.module, lora)
        for parameter in self.own_weights().values():
            parameter.data = parameter.data.float()  # small updates would be lost in bfloat16
        self.module.eval()

    def own_weights(self) -> dict[str, nn.Parameter]:
        """The trained parameters by the names they have in an adapter file."""
        return {
            "base_model.model." + name.replace(f".{_NAME}.", "."): parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }

    def copy(self) -> HuggingFacePolicy:
        """A policy with a network of its own, of equal weights and adapters, all of them its own."""
        return HuggingFacePolicy(copy.deepcopy(self.module), self.tokenizer, self.pad_id)

    def saved_weights(self) -> dict[str, Tensor]:
        """The adapters alone."""
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The base model for as long as this lasts."""
        self.module.disable_adapters()  # type: ignore[operator]
        try:
            yield
        finally:
            self.module.enable_adapters()  # type: ignore[operator]

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write an adapter folder that peft and servers read, with the tokenizer and the name of the base."""
        frozen = next(p for p in self.module.parameters() if not p.requires_grad)
        described = {"engine": "huggingface-lora", "dtype": str(frozen.dtype).removeprefix("torch.")}
        described |= {"base": self.base, "base_sha256": self.base_sha256}
        (folder / "engine.json").write_text(json.dumps(described, indent=2))
        self.module.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]  # the adapters alone
        self.tokenizer.tokenizer.save_pretrained(folder)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The adapters that `save` wrote, for `load_weights`; a `DataError` if they are of another base model."""
        from safetensors.torch import load_file

        _refuse_other_base(folder, self.base_sha256)
        return dict(load_file(folder / ADAPTER))


def _refuse_tied(model: Any, lora: Lora) -> None:
    """Check that adapters are not on one of two layers with one weight: a merge would change the other, too.

    Raises:
        ConfigError: they are on the embedding or the output layer of a model that ties these.
    """
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    bare = [getattr(layer, "base_layer", layer) for layer in layers]
    if None in bare or bare[0].weight is not bare[1].weight:
        return
    names = [name.rpartition(".")[2] for name, part in model.named_modules() if part in layers]
    adapted = [name for name, layer, inner in zip(names, layers, bare, strict=True) if layer is not inner]
    if adapted:
        raise ConfigError(
            f"model.lora.target_modules={lora.target_modules} puts adapters on {' and '.join(adapted)}, whose weight "
            f"is that of {' and '.join(names)} in this model (tied embeddings): a merged model would differ from the "
            f"trained one. Leave {' and '.join(adapted)} out"
        )


def add_lora(policy: Policy, lora: Lora, base: str | None, seed: int) -> LoraPolicy:
    """Put fresh adapters on the model of a policy.

    Raises:
        ConfigError: the policy has no transformers model.
    """
    if not isinstance(policy, HuggingFacePolicy) or base is None:
        raise ConfigError("model.lora needs engine.name: huggingface (or vllm) with an engine.model")
    where = Path(base)
    return LoraPolicy(policy, lora, str(where.resolve()) if where.exists() else base, seed)


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM makes room for (`max_lora_rank`)."""


def with_adapters(engine: EngineConfig, rank: int) -> EngineConfig:
    """The settings of a sampler, with room for adapters of this rank where that must be asked for (vllm)."""
    room = min((known for known in VLLM_RANKS if known >= rank), default=rank)
    return replace(engine, vllm={"enable_lora": True, "max_lora_rank": room, **engine.vllm})


def load_lora(folder: Path, device: str = "cpu", **options: Any) -> tuple[LoraPolicy, HuggingFaceEngine]:
    """The policy in a folder that `LoraPolicy.save` wrote, and a sampler with these options.

    The base model must still be where it was.

    Raises:
        DataError: the folder is broken, says more than is read of it, or was trained on another base model.
    """
    with _named(folder):
        lora, described, engine = _read(folder, device=device, **options)
        adapted = add_lora(
            HuggingFacePolicy(engine.model, engine.tokenizer, engine.pad_id), lora, described["base"], 0
        )
        adapted.base = described["base"]
        adapted.load_weights(adapted.read(folder), adapted.weights_version)
    return adapted, engine


def merge_lora(folder: Path, target: Path) -> None:
    """Write the base model with the adapters of `folder` merged into its weights, as transformers loads it.

    Raises:
        DataError: as for `load_lora`.
    """
    import peft

    with _named(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", _OLD_NAME, FutureWarning)
        _, _, base = _read(folder)
        if not (folder / ADAPTER).is_file():  # peft would ask the Hub for it
            raise FileNotFoundError(folder / ADAPTER)
        merged = peft.PeftModel.from_pretrained(base.model, str(folder)).merge_and_unload()
    merged.save_pretrained(target)
    base.tokenizer.tokenizer.save_pretrained(target)


_PLACE = ("base_model_name_or_path", "inference_mode", "peft_version", "revision")
"""What of the settings of adapters says nothing of what they do."""


def refuse_unfit_peft() -> None:
    """Check that peft is there, and as new as the installed transformers asks for.

    Raises:
        MissingExtraError: it is not; the message says which version is.
    """
    with needs_extra("LoRA adapters", "llm"):
        import peft  # noqa: F401
        from transformers.integrations.peft import MIN_PEFT_VERSION
        from transformers.utils.peft_utils import check_peft_version
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        raise MissingExtraError(
            f"LoRA adapters need peft>={MIN_PEFT_VERSION} with transformers {version('transformers')}, and peft is "
            f"{version('peft')}: in the clone of shoal, run {pip_line('llm')}, which installs versions that fit"
        ) from error


def _settings(lora: Lora) -> Any:
    """Of adapters, as peft knows them."""
    refuse_unfit_peft()
    import peft

    modules = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    settings = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    return peft.LoraConfig(**settings, target_modules=modules, task_type="CAUSAL_LM")


def _read(folder: Path, **options: Any) -> tuple[Lora, dict[str, Any], HuggingFaceEngine]:
    """The adapters that a folder is of, what `engine.json` says of them, and the base model they were trained on."""
    described, settings = read_json(folder / "engine.json"), read_json(folder / "adapter_config.json")
    lora = Lora(settings["r"], settings["lora_alpha"], settings["target_modules"], settings["lora_dropout"])
    known = _settings(lora).to_dict()
    for name, given in settings.items():
        if name not in known and given:  # one that is off or empty does nothing
            raise DataError(
                f"adapter_config.json says {name}={given!r}, a setting that the peft installed here does not know: "
                "install the one that wrote it"
            )
        made = known.get(name, given)
        if name not in _PLACE and made != (set(given) if isinstance(made, set) else given):
            raise DataError(
                f"adapter_config.json says {name}={given!r}, and shoal trains with {made!r} alone"
            )
    engine = HuggingFaceEngine.load(resolve_model(described["base"]), dtype=described["dtype"], **options)
    _refuse_other_base(folder, weights_sha256(engine.model))
    return lora, described, engine


def _refuse_other_base(folder: Path, sha256: str) -> None:
    """See that the adapters in a folder were trained on a base model of these weights."""
    described = read_json(folder / "engine.json")
    if sha256 != described["base_sha256"]:
        raise DataError(f"{folder} was trained on another model than {described['base']}: its weights differ")


def _named(folder: Path) -> AbstractContextManager[None]:
    """Whatever is wrong with a folder of adapters is a `DataError` that names it."""
    advice = ": copy all its files again, and keep their base model where it was"
    return reading(folder, "does not load as LoRA adapters", advice)
