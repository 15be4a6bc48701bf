"""Layers of a draft to ONNX: a step as decoder.py exports it, over tokens and hidden states.

Further input: hidden_states (batch, sequence, size), at the token before each of input_ids.
Outputs, at logits_positions: logits (positions, the draft's tokens); next_tokens (positions,) int64, the most probable
token of each by the target's ids; next_hidden_states (positions, size), which are read together with that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from builder.checkpoints.drafts.layers import DraftLayers
from builder.graphs.export.caches import ExportCache, exporting
from builder.graphs.export.decoder import (
    DecoderExport,
    cache_shapes,
    export_step,
    fused_layers,
    refuse_unfused,
    refused_by_name,
)
from builder.graphs.export.positions import PROBE
from builder.graphs.onnx.graph import MODEL_FILE
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import NEXT_HIDDEN_STATES, NEXT_TOKENS

ANSWERS = ("logits", NEXT_TOKENS, NEXT_HIDDEN_STATES)


class DraftGraph(torch.nn.Module):
    """Module that is exported."""

    def __init__(self, layers: DraftLayers) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        input_ids, position_ids, seqlens_k, total, positions, hidden_states, *past = tensors
        cache = ExportCache(past, seqlens_k, total)
        with exporting(cache):
            result = self.layers(
                input_ids, hidden_states, position_ids=position_ids, past_key_values=cache, use_cache=True
            )
        hidden = result.last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)
        logits = self.layers.logits(chosen)
        return logits, self.layers.tokens(logits), self.layers.following(chosen), *cache.outputs()


def draft_cache_shapes(layers: DraftLayers) -> tuple[LayerShape, ...]:
    """Return the shapes of the draft's own cache. Raises ExportError."""
    if layers.own_caches is not None:
        return tuple(LayerShape(heads, size) for heads, size in layers.own_caches)
    embeddings = layers.backbone.get_input_embeddings().weight
    zeros = embeddings.new_zeros((*PROBE.shape, layers.states.size))
    combined = layers.combine(embeddings.new_zeros((*PROBE.shape, embeddings.shape[1])), zeros)
    return cache_shapes(layers.backbone, inputs_embeds=combined)


def export_draft(layers: DraftLayers, folder: Path, max_length: int, caches: Sequence[LayerShape]) -> DecoderExport:
    """Export `layers` for rows of up to `max_length` tokens; `caches`: their `draft_cache_shapes`.

    Raises ExportError if no graph is correct.
    """
    path, model = folder / "exported" / MODEL_FILE, layers.backbone
    with refused_by_name(model):
        with fused_layers(model, max_length) as unfused:
            graph = export_step(DraftGraph(layers), caches, path, hidden_size=layers.states.size, answers=ANSWERS)
        attending = len(model.layers) if layers.own_caches is not None else sum(cache.heads > 0 for cache in caches)
        refuse_unfused(graph, caches, attending)
    return DecoderExport(graph, tuple(caches), attending, unfused)
