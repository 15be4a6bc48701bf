"""Linear layers of a model, which LoRA adapters change. Knows modules; knows no architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class LinearLayer:
    """Layer of `inputs` and `outputs` numbers. `transposed`: its matrix is (inputs, outputs), as GPT-2's are."""

    inputs: int
    outputs: int
    transposed: bool = False


NO_LAYERS: Mapping[str, LinearLayer] = MappingProxyType({})


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


def head_layers(model: PreTrainedModel) -> dict[str, LinearLayer]:
    """Return the linear layers of a classifier after its base model, by name; the last one makes the logits."""
    if model.base_model is model or model.get_output_embeddings() is not None:
        return {}
    inside = f"{model.base_model_prefix}."
    return {name: layer for name, layer in linear_layers(model).items() if not name.startswith(inside)}


def body_layers(model: PreTrainedModel) -> dict[str, LinearLayer]:
    """Return the linear layers of `model` by name, except its output matrix and a classifier's head."""
    heads = head_layers(model)
    return {name: layer for name, layer in linear_layers(model).items() if name not in heads}
