"""A policy as an ONNX file, through torch's exporter when it works offline, checked by onnx itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class ExportedPolicy(nn.Module):
    """Raw observation rows to action parameters, normalisation included."""

    mean: Tensor
    scale: Tensor

    def __init__(self, network: Any, mean: Tensor | None, scale: Tensor | None) -> None:
        super().__init__()
        self.network = network
        self.normalizes = mean is not None
        self.register_buffer("mean", mean if mean is not None else torch.zeros(1))
        self.register_buffer("scale", scale if scale is not None else torch.ones(1))

    def forward(self, observation: Tensor) -> Tensor:
        """Action parameters `[batch, n]`."""
        if self.normalizes:
            observation = ((observation - self.mean) * self.scale).clamp(-10.0, 10.0)
        return self.network.policy(observation)  # type: ignore[no-any-return]


def write_onnx(policy: ExportedPolicy, n_inputs: int, path: Path) -> Path:
    """Export with a free batch size and check the file."""
    import onnx

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own future
        torch.onnx.export(
            policy.eval(), (torch.zeros(1, n_inputs),), str(path), input_names=["observation"],
            output_names=["action_parameters"], dynamic_axes={"observation": {0: "batch"}}, dynamo=False,
        )  # fmt: skip
    onnx.checker.check_model(onnx.load(str(path)))
    return path
