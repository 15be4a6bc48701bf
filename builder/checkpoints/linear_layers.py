"""Linear layers of a model, which LoRA adapters change. Knows modules; knows no architecture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class LinearLayer:
    """Layer of `inputs` and `outputs` numbers. `transposed`: its matrix is (inputs, outputs), as GPT-2's are."""

    inputs: int
    outputs: int
    transposed: bool = False


def linear_layers(model: PreTrainedModel) -> dict[str, LinearLayer]:
    """Return the linear layers of `model` by name, except its output matrix."""
    head, layers = model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        if module is head:
            continue
        if isinstance(module, torch.nn.Linear):
            layers[name] = LinearLayer(module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            layers[name] = LinearLayer(inputs, outputs, transposed=True)
    return layers
