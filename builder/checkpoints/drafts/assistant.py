"""Assistants of Gemma 4: layers without keys and values, which read those that the target's last layers keep.

Source: transformers' Gemma4AssistantForCausalLM and its SinglePositionMultiTokenCandidateGenerator
(generation/candidate_generator.py). The keys and values are among the hidden states that the draft reads of a token, so
that it caches them as its own. A token that the draft itself proposed has none: it reads those of the last token again,
in the same place and at the same position.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, KVSharingDict
from transformers.modeling_outputs import BaseModelOutputWithPast

from builder.checkpoints.drafts.layers import DraftLayers, TargetStates
from builder.checkpoints.model import read_configuration
from builder.common.errors import CheckpointError, first_line
from builder.common.replaced import replaced

Pair = tuple[torch.Tensor, torch.Tensor]


def load(folder: Path, model: str, target: PreTrainedModel) -> DraftLayers:
    """Load the assistant in `folder` for `target`, in fp32, and let `target` return the keys and values that it reads.

    Raises CheckpointError if weights are missing, unknown or of another shape, or if the two do not belong together.
    """
    config = read_configuration(folder, model)
    try:
        with sharing_all(config):
            assistant, info = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True, use_safetensors=True
            )
    except Exception as error:  # transformers raises errors of any type for a broken checkpoint
        raise CheckpointError(f"{model} does not load as an assistant: {first_line(error)}") from error
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"], *map(str, info["mismatched_keys"])})
    if wrong:
        raise CheckpointError(f"{wrong[0]} of the assistant {model} is missing, unknown or of another shape")
    return _layers(assistant, model, target)


def describe(folder: Path, model: str, target: PreTrainedModel) -> DraftLayers:
    """Return the layers without weights."""
    config = read_configuration(folder, model)
    with sharing_all(config):
        return _layers(AutoModelForCausalLM.from_config(config).float(), model, target)


@contextmanager
def sharing_all(config: PreTrainedConfig) -> Iterator[None]:
    """Let transformers create a model all of whose layers read another's keys and values.

    Its list of what layers share (5.23, configuration_gemma4.py) refuses a model in which none computes them.
    """
    kind: Any = type(config.get_text_config())
    modes = kind.kv_sharing_modes

    def shared(self: Any) -> list[str | None]:
        layers: int = self.num_hidden_layers
        return ["reuse"] * layers if self.num_kv_shared_layers == layers else modes.fget(self)

    with replaced((kind, "kv_sharing_modes", property(shared))):
        yield


class AssistantLayers(DraftLayers):
    """Layers of an assistant, over the embeddings of its target.

    What it returns of a token is its own hidden state, then the keys and values that the token came with.
    """

    in_place = True

    def __init__(self, assistant: Any, embeddings: torch.nn.Module, states: TargetStates, sizes: Mapping[str, Any]):
        head = assistant.lm_head if assistant.masked_embedding is None else OrderedHead(assistant)
        super().__init__(assistant.model, Projected(assistant.pre_projection), torch.nn.Identity(), head, states)
        self.embeddings, self.projection = embeddings, assistant.post_projection
        self.sizes = dict(sizes)  # (heads, head size) by kind of layer
        self.own_caches = tuple(self.sizes.values())

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        parts = [heads * size for heads, size in self.sizes.values() for _ in ("key", "value")]
        read, *kept = torch.split(hidden_states, [self.projection.out_features, *parts], dim=-1)
        tensors = iter(kept)
        pairs = {kind: (_heads(next(tensors), size), _heads(next(tensors), size)) for kind, size in self.sizes.items()}
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        result = self.backbone(
            inputs_embeds=self.combine(self.embeddings(input_ids), read),
            position_ids=position_ids + 1,  # of the token, which has no keys; the cache begins with those before it
            shared_kv_states=_Appended(pairs, past_key_values),
            past_key_values=past_key_values,
            logits_to_keep=slice(None),  # no number of last tokens, to which its layers would cut what they read
            **options,
        )
        return BaseModelOutputWithPast(last_hidden_state=torch.cat([result.last_hidden_state, *kept], dim=-1))

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden_states[..., : self.projection.in_features])

    def following(self, hidden_states: torch.Tensor) -> torch.Tensor:
        own, kept = hidden_states.tensor_split([self.projection.in_features], dim=-1)
        return torch.cat([self.projection(own), kept], dim=-1)


class Projected(torch.nn.Module):
    """Embeddings and hidden states side by side, projected to one vector."""

    def __init__(self, projection: torch.nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, embeddings: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return what the layers read, (batch, sequence, size)."""
        return self.projection(torch.cat([embeddings, hidden_states], dim=-1))  # type: ignore[no-any-return]


class OrderedHead(torch.nn.Module):
    """Output layer that computes the logits of the tokens of some clusters; the others get one that is lower."""

    def __init__(self, assistant: Any) -> None:
        super().__init__()
        embedder = assistant.masked_embedding
        self.centroids, self.matrix = embedder.centroids, assistant.lm_head
        self.count = embedder.centroid_intermediate_top_k
        self.register_buffer("tokens", embedder.token_ordering.long().reshape(embedder.num_centroids, -1))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the logits, (positions, vocabulary); `hidden_states`: (positions, size)."""
        clusters = self.centroids(hidden_states).topk(self.count, dim=-1).indices
        tokens = self.tokens[clusters].flatten(-2)  # type: ignore[index]
        known = (self.matrix.weight[tokens] @ hidden_states.unsqueeze(-1)).squeeze(-1)
        lowest = known.amin(dim=-1, keepdim=True) - 1
        return lowest.repeat(1, self.matrix.out_features).scatter(-1, tokens, known)


class _Appended(KVSharingDict):  # type: ignore[misc]
    """Keys and values by kind of layer, which the first layer of each kind appends to `cache`."""

    def __init__(self, pairs: Mapping[str, Pair], cache: Cache | None) -> None:
        self.cache, self.waiting = cache, {kind: index for index, kind in enumerate(pairs)}
        super().__init__(pairs)

    def __getitem__(self, kind: str) -> Pair:
        pair: Pair = super().__getitem__(kind)
        index = self.waiting.pop(kind, None)
        if self.cache is not None and index is not None:
            self.cache.update(*pair, index)
        return pair


def _heads(values: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    """Return `values`, (batch, sequence, heads * size), as (batch, heads, sequence, size); `sizes`: both."""
    return torch.unflatten(values, -1, sizes).transpose(1, 2)


def _layers(assistant: Any, model: str, target: PreTrainedModel) -> DraftLayers:
    """Return the layers of `assistant`. Raises CheckpointError if `target` is not the model that it drafts for."""
    own, text, decoder = assistant.config.get_text_config(), target.config.get_text_config(), target.get_decoder()
    if not hasattr(text, "kv_sharing_modes"):
        raise CheckpointError(f"{model} is an assistant of Gemma 4; the model is {target.config.model_type}")
    sizes, theirs = _sizes(own), _sizes(text)
    wrong = [
        f"{name} {json.dumps(value)}, where the model has {json.dumps(other)}"
        for name, value, other in (
            ("a vocabulary of", own.vocab_size, text.vocab_size),
            ("hidden states of", assistant.config.backbone_hidden_size, text.hidden_size),
            *(
                (f"heads of keys in its {kind} layers, (heads, size)", size, theirs.get(kind))
                for kind, size in sizes.items()
            ),
        )
        if value != other
    ]
    if wrong:
        raise CheckpointError(f"{model} is an assistant for a model with {wrong[0]}")
    for kind in sizes:
        layer = max(index for index, mode in enumerate(_unshared(text)) if mode == kind)
        decoder.layers[layer].self_attn.store_full_length_kv = True  # without layers that share them, none does
    size = text.hidden_size + sum(2 * heads * size for heads, size in sizes.values())
    states = TargetStates((text.num_hidden_layers,), size, shared=tuple(sizes))
    return AssistantLayers(assistant, target.get_input_embeddings(), states, sizes)


def _sizes(config: Any) -> dict[str, tuple[int, int]]:
    """Return (heads, head size) of the keys by kind of layer."""
    return {
        kind: (config.per_layer_config[index].num_key_value_heads, config.per_layer_config[index].head_dim)
        for index, kind in enumerate(config.layer_types)
    }


def _unshared(config: Any) -> list[str]:
    """Return the kinds of the layers with keys and values of their own, which are the first ones."""
    kinds: list[str] = config.layer_types[: config.num_hidden_layers - (config.num_kv_shared_layers or 0)]
    return kinds
