"""Weights of transformers models in files, whose names may differ from those in the network.

Transformers keeps the experts of a layer in one tensor, and one tensor an expert in files, as others do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn


def read_weights(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The weights that `save_pretrained` wrote into `folder`, by the names that they have in `model`."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):  # large models are in several
        weights |= load_file(file)
    if weights.keys() <= model.state_dict().keys():
        return weights
    del weights
    kind = next(model.parameters()).dtype
    settings: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    read: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, **settings)
    return dict(read.state_dict())


def as_in_files(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names that they have in a network of the model in `folder`, by those that files have."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):  # a network without memory: it knows the names
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    renamed: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return renamed
