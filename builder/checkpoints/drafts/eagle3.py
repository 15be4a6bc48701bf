"""Checkpoints of EAGLE-3: one layer of a Llama over a token and three of the target's hidden states.

Source: arXiv:2503.01840 and https://github.com/SafeAILab/EAGLE, eagle/model/cnets.py; the names of weights and settings
that SpecForge and speculators write, as vLLM (llama_eagle3.py) and SGLang (llama_eagle3.py) read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from builder.checkpoints.drafts import EAGLE3
from builder.checkpoints.drafts.layers import DraftLayers, TargetStates
from builder.checkpoints.json_files import mapping_in, read_json
from builder.checkpoints.model import check_configuration
from builder.common.errors import CheckpointError

LAYER = "transformer_layer_config"  # in which speculators keeps the settings of the layer
STATES = 3  # of the target's layers
IDS, KNOWN = "d2t", "t2d"  # the target's id of each token of the draft, less its own; and which tokens have one
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"


def load(folder: Path, files: Sequence[Path], model: str, target: PreTrainedModel) -> DraftLayers:
    """Load the draft in `folder` for `target`, in fp32, with the target's embeddings where it has none of its own.

    Raises CheckpointError if weights are missing, unknown or of another shape, or if the two do not belong together.
    """
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            weights.update((_name(key), stored.get_tensor(key)) for key in stored.keys())  # noqa: SIM118
    document = read_json(folder / "config.json")
    ids = weights.pop(IDS, None)
    weights.pop(KNOWN, None)  # says the same
    config = _config(document, model, target)
    rows = document.get("draft_vocab_size") or config.vocab_size
    if ids is None and rows != config.vocab_size:
        raise CheckpointError(f"{model} has no weight {IDS}, which says what its {rows} tokens are")
    shared = {EMBEDDINGS: target.get_input_embeddings(), HEAD: target.get_output_embeddings()}
    for name, module in shared.items():
        if name not in weights and (name == EMBEDDINGS or ids is None):
            weights[name] = module.weight.detach()  # type: ignore[union-attr,assignment]
    layers = _layers(document, config, rows, target, _target_ids(ids, rows, model, target))
    places = _places(layers)
    _refuse_others(model, weights, places)
    with torch.no_grad():
        for name, parameter in places.items():
            parameter.copy_(weights[name])
    return layers


def describe(folder: Path, model: str, target: PreTrainedModel) -> DraftLayers:
    """Return the layers without weights."""
    document = read_json(folder / "config.json")
    config = _config(document, model, target)
    return _layers(document, config, document.get("draft_vocab_size") or config.vocab_size, target, None)


def target_layers(document: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the layers whose inputs a draft reads, of a target with `count`: indices into its `hidden_states`.

    speculators states those; SpecForge states, in `eagle_config`, the layers whose outputs they are.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    if document.get(name):
        return tuple(document[name])
    nested = (document.get("eagle_config") or {}).get(name)
    return tuple(layer + 1 for layer in nested) if nested else (2, count // 2, count - 3)


class EagleLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """Layer of a Llama whose attention reads embeddings and hidden states side by side, each with a norm of its own.

    `before`: True if the residual is the normed hidden state.
    """

    def __init__(self, config: LlamaConfig, before: bool) -> None:
        super().__init__(config, 0)
        self.hidden_norm, self.before = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps), before
        for name in ("q_proj", "k_proj", "v_proj"):
            rows, bias = getattr(self.self_attn, name).out_features, config.attention_bias
            setattr(self.self_attn, name, torch.nn.Linear(2 * config.hidden_size, rows, bias=bias))

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the layer's output, (batch, sequence, size). `hidden_states`: both, (batch, sequence, 2 * size)."""
        embeddings, states = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(states)
        read = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        attended: torch.Tensor = (normed if self.before else states) + self.self_attn(hidden_states=read, **options)[0]
        return attended + self.mlp(self.post_attention_layernorm(attended))  # type: ignore[no-any-return]


def _side_by_side(embeddings: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    return torch.cat([embeddings, hidden_states], dim=-1)


def _name(key: str) -> str:
    """Return the name of a weight without what formats put before it."""
    return key.removeprefix("model.").replace("midlayer.", "layers.0.")


def _config(document: dict[str, Any], model: str, target: PreTrainedModel) -> LlamaConfig:
    """Return the configuration of the layer. Raises CheckpointError for one that is unknown, or of another target."""
    settings = {**document, **mapping_in(document, LAYER, model)}
    try:
        config = check_configuration(LlamaConfig.from_dict(settings), model)
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises errors of any type for a broken file
        raise CheckpointError(f"the config.json of {model} is not one of EAGLE-3: {error}") from error
    kind, vocabulary = settings.get("model_type", "llama"), target.config.get_text_config().vocab_size
    if kind not in ("llama", EAGLE3):
        raise CheckpointError(f"{model} is an EAGLE-3 draft with a layer of the type {kind}; expected llama")
    if config.num_hidden_layers != 1:
        raise CheckpointError(f"{model} is an EAGLE-3 draft of {config.num_hidden_layers} layers; expected one")
    if config.vocab_size != vocabulary:
        raise CheckpointError(
            f"{model} is an EAGLE-3 draft for a vocabulary of {config.vocab_size} tokens; the model has {vocabulary}"
        )
    return config


def _layers(
    document: dict[str, Any], config: LlamaConfig, rows: int, target: PreTrainedModel, ids: torch.Tensor | None
) -> DraftLayers:
    backbone = LlamaModel(config)
    backbone.layers[0] = EagleLayer(config, bool(document.get("norm_before_residual")))
    norm, backbone.norm = backbone.norm, torch.nn.Identity()
    text = target.config.get_text_config()
    read = target_layers(document, text.num_hidden_layers)
    if len(read) != STATES or not all(layer in range(text.num_hidden_layers) for layer in read):
        raise CheckpointError(
            f"an EAGLE-3 draft reads the inputs of {STATES} layers, here {', '.join(map(str, read))}; the model has "
            f"{text.num_hidden_layers} layers"
        )
    projection = torch.nn.Linear(STATES * text.hidden_size, config.hidden_size, bias=bool(document.get("bias")))
    head = torch.nn.Linear(config.hidden_size, rows, bias=False)
    return DraftLayers(backbone, _side_by_side, norm, head, TargetStates(read, config.hidden_size, projection), ids)


def _target_ids(ids: torch.Tensor | None, rows: int, model: str, target: PreTrainedModel) -> torch.Tensor | None:
    """Return the target's id of each of the draft's tokens. Raises CheckpointError for one that the target lacks."""
    if ids is None:
        return None
    own = torch.arange(len(ids)) + ids.long()
    vocabulary = target.config.get_text_config().vocab_size
    if len(own) != rows or not 0 <= int(own.min()) <= int(own.max()) < vocabulary:
        raise CheckpointError(
            f"{IDS} of {model} has {len(own)} tokens with ids up to {int(own.max())}; expected {rows}, of the "
            f"{vocabulary} of the model"
        )
    return own


def _places(layers: DraftLayers) -> dict[str, torch.Tensor]:
    """Return the parameters by the names that checkpoints give them."""
    assert layers.states.projection is not None
    projection = {f"fc.{name}": value for name, value in layers.states.projection.named_parameters()}
    own = {**dict(layers.backbone.named_parameters()), **projection}
    return {**own, "norm.weight": layers.norm.weight, HEAD: layers.head.weight}  # type: ignore[dict-item]


def _refuse_others(model: str, weights: Mapping[str, torch.Tensor], places: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError unless the `weights` are those of the `places`."""
    missing, unknown = sorted(places.keys() - weights.keys()), sorted(weights.keys() - places.keys())
    if missing or unknown:
        what = f"has no weight {missing[0]}" if missing else f"has a weight {unknown[0]}, which is not known here"
        raise CheckpointError(f"{model} is an EAGLE-3 draft by its config.json and {what}")
    for name, place in places.items():
        if weights[name].shape != place.shape:
            raise CheckpointError(
                f"{name} of {model} has the shape {tuple(weights[name].shape)}; for this model it would have "
                f"{tuple(place.shape)}: the draft was trained for another one"
            )
