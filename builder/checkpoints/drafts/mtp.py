"""Multi-token prediction: a layer of the checkpoint itself, after its last, that guesses the token after the next one.

The checkpoints of DeepSeek V3 and GLM-4 MoE have the layer; transformers leaves it out of the model. Source:
arXiv:2412.19437, section 2.2; transformers' MtpModel (modeling_layers.py), which gives the layer's normed output to the
next step, as SGLang does (deepseek_nextn.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from builder.checkpoints.drafts import own_layer_of
from builder.checkpoints.drafts.layers import DraftLayers, TargetStates
from builder.common.errors import CheckpointError

PER_LAYER = ("layer_types", "mlp_layer_types")  # settings with an entry for each layer
JOINING = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
NORM, HEAD, EMBEDDINGS = "shared_head.norm.weight", "shared_head.head.weight", "embed_tokens.weight"
PLACES = {NORM: "model.norm.weight", HEAD: "lm_head.weight", EMBEDDINGS: "model.embed_tokens.weight"}


class Joined(torch.nn.Module):
    """Embeddings and hidden states, each with a norm of its own, projected to one vector."""

    def __init__(self, norm: torch.nn.Module, size: int) -> None:
        super().__init__()
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)

    def forward(self, embeddings: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return what the layer reads, (batch, sequence, size)."""
        joined = torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1)
        return self.eh_proj(joined)  # type: ignore[no-any-return]


def load(folder: Path, files: Sequence[Path], model: str, target: PreTrainedModel) -> DraftLayers:
    """Load the layer of `target`'s own checkpoint, in fp32. Raises CheckpointError."""
    begin = f"model.layers.{own_layer_of(folder)}."
    stored: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            own = [key for key in weights.keys() if key.startswith(begin)]  # noqa: SIM118
            stored.update((key.removeprefix(begin), weights.get_tensor(key).float()) for key in own)
    missing = [name for name in (*JOINING, NORM) if name not in stored]
    if missing:
        raise CheckpointError(f"{model} has no weight {begin}{missing[0]}, which its layer that guesses needs")
    head, embeddings = target.get_output_embeddings().weight, target.get_input_embeddings().weight
    state = {PLACES[HEAD]: head.detach(), PLACES[EMBEDDINGS]: embeddings.detach()}
    state.update((PLACES.get(name, f"model.layers.0.{name}"), stored[name]) for name in stored if name not in JOINING)
    try:
        layer, info = type(target).from_pretrained(
            None, config=_config(target), dtype=torch.float32, output_loading_info=True, state_dict=state
        )
    except Exception as error:  # transformers raises errors of any type for a broken checkpoint
        raise CheckpointError(f"the layer {begin} of {model} does not load: {error}") from error
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"], *map(str, info["mismatched_keys"])})
    if wrong:
        raise CheckpointError(
            f"the layer {begin} of {model} is not one of {target.config.model_type}: {wrong[0]} is missing, unknown or "
            "of another shape"
        )
    layers = _layers(layer, target)
    with torch.no_grad():
        for name, parameter in _places(layers).items():
            if parameter.shape != stored[name].shape:
                raise CheckpointError(f"{begin}{name} of {model} has the shape {tuple(stored[name].shape)}")
            parameter.copy_(stored[name])
    return layers


def describe(target: PreTrainedModel) -> DraftLayers:
    """Return the layer without weights."""
    return _layers(type(target)(_config(target)).float(), target)


def _config(target: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of a model whose only layer is as the target's last."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    for name in PER_LAYER:
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[-1:])
    if hasattr(config, "first_k_dense_replace"):  # the first layers have no experts
        config.first_k_dense_replace = 0
    return config


def _layers(layer: PreTrainedModel, target: PreTrainedModel) -> DraftLayers:
    backbone, size = layer.get_decoder(), target.config.hidden_size
    states = TargetStates((target.config.num_hidden_layers,), size)
    head = layer.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    return DraftLayers(backbone, Joined(backbone.norm, size), torch.nn.Identity(), head, states)


def _places(layers: DraftLayers) -> Mapping[str, torch.Tensor]:
    assert isinstance(layers.combine, Joined)
    return dict(layers.combine.named_parameters())
