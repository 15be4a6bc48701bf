"""PyTorch encoder-decoder to two ONNX graphs: an encoder that ends in the decoder's keys and values, and a step.

Encoder: input_ids, attention_mask (batch, sequence) int64; out come cross_key_i, cross_value_i of each decoder layer,
(batch, heads, sequence, head size).

Decoder, for `rows` rows of one new token each, that attend to the texts in `places` places:
  input_ids, position_ids            (rows, 1) int64
  seqlens_k                          (rows,) int32, tokens in the cache after this call, less one
  total_sequence_length              (1,) int32, the most of any row after this call
  logits_positions                   (positions,) int64, the rows whose logits are computed
  cross_rows                         (places, beams) int64, the rows that attend to a place; `beams` is fixed
  cross_places                       (rows,) int64, a row's place among those, place * beams + beam
  cross_seqlens_k, cross_total       (places,) and (1,) int32, tokens of each text less one, and the most of any
  cross_last                         (places, 1, all layers' keys and values) of each text's last token
  past_key_i, past_value_i           (rows, heads, max_length, head size)
  past_cross_key_i, ..value_i        (places, heads, max_source, head size)
Outputs: logits (positions, vocabulary) and a present_ for each past_, to be bound to the same buffers.

Knows modules and their inputs; knows no architecture and no task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from builder.common.errors import ExportError
from builder.graphs.export.architectures import fused_attention
from builder.graphs.export.attention import ONNXRUNTIME
from builder.graphs.export.cached_attention import CACHED
from builder.graphs.export.caches import CrossCache, ExportCache, exporting
from builder.graphs.export.decoder import STEP_INPUTS, cache_names, logits_at, refused_by_name
from builder.graphs.export.program import export_graph
from builder.graphs.onnx.graph import ENCODER_FILE, MODEL_FILE, Graph
from builder.graphs.onnx.operators import ATTENTION, CACHED_ATTENTION
from builder.graphs.onnx.projections import merge_projections
from builder.runtime.contract import LayerShape

CROSS_INPUTS = ("cross_rows", "cross_places", "cross_seqlens_k", "cross_total", "cross_last")


@dataclass(frozen=True)
class Seq2SeqExport:
    """Both graphs, each layer's cache, and how much of the encoder's attention is fused."""

    encoder: Graph
    decoder: Graph
    caches: tuple[LayerShape, ...]
    cross: tuple[LayerShape, ...]
    encoder_attentions: int


class EncoderGraph(torch.nn.Module):
    """Module that runs the encoder, then the decoder once, to collect the keys and values of its cross-attention.

    The decoder's own result is not used, and is not exported.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        input_ids, attention_mask = tensors
        hidden = self.model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.model.get_decoder()(
            input_ids=input_ids[:, :1],
            encoder_hidden_states=hidden,
            encoder_attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
        )
        layers = cache.cross_attention_cache.layers
        return tuple(tensor for layer in layers for tensor in (layer.keys, layer.values))


class DecoderGraph(torch.nn.Module):
    """One step of the decoder over caches that are inputs."""

    def __init__(self, model: PreTrainedModel, layers: int) -> None:
        super().__init__()
        self.model = model
        self.layers = layers

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, ...]:
        (
            input_ids,
            position_ids,
            seqlens_k,
            total,
            positions,
            rows,
            places,
            cross_seqlens_k,
            cross_total,
            last,
            *past,
        ) = tensors
        own, others = past[: 2 * self.layers], past[2 * self.layers :]
        cache = ExportCache(own, seqlens_k, total)
        cache.positions = position_ids
        cache.cross = CrossCache(others, cross_seqlens_k, cross_total, rows, places, last)
        both = EncoderDecoderCache(cache, cache.cross)
        both.is_updated = dict.fromkeys(range(len(others) // 2), True)
        # The hidden states of the encoder are in the cross cache; the model does not read these.
        nothing = torch.zeros((1, 1, 1)).expand(input_ids.shape[0], 1, int(self.model.config.hidden_size))
        with exporting(cache), _positions_by_row(self.model.get_decoder()), logits_at(self.model, positions):
            result = self.model(
                encoder_outputs=(nothing,), decoder_input_ids=input_ids, past_key_values=both, use_cache=True
            )
        return result.logits, *cache.outputs(), *cache.cross.outputs()


@contextmanager
def _positions_by_row(decoder: torch.nn.Module) -> Iterator[None]:
    """Give each row its own position: decoders take one for the whole batch from the tokens in the cache.

    Some decoders put an axis before that of the positions.
    """

    def by_row(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.reshape(-1, 1, output.shape[-1])

    with ExitStack() as hooks:
        for name, module in decoder.named_modules():
            if name.rsplit(".", 1)[-1] == "embed_positions":
                hooks.enter_context(module.register_forward_hook(by_row))
        yield


def export_seq2seq(model: PreTrainedModel, folder: Path, beams: int) -> Seq2SeqExport:
    """Export both graphs of `model`, for up to `beams` rows per text. Raises ExportError if none is correct."""
    caches, cross = seq2seq_shapes(model)
    exported = folder / "exported"
    with refused_by_name(model):
        with fused_attention(model):
            model.set_attn_implementation(ONNXRUNTIME)
            encoder = _export_encoder(EncoderGraph(model), len(cross), exported / ENCODER_FILE)
            model.set_attn_implementation(CACHED)
            decoder = _export_decoder(DecoderGraph(model, len(caches)), caches, cross, beams, exported / MODEL_FILE)
        fused, expected = decoder.operators[CACHED_ATTENTION], len(caches) + len(cross)
        if fused != expected:
            raise ExportError(f"{fused} of its {expected} decoder attentions are fused")
    return Seq2SeqExport(encoder, decoder, caches, cross, encoder.operators[ATTENTION])


def seq2seq_shapes(model: PreTrainedModel) -> tuple[tuple[LayerShape, ...], tuple[LayerShape, ...]]:
    """Return the shapes of each decoder layer's own cache and of its cache of the text. Raises ExportError."""
    ids = torch.ones((1, 3), dtype=torch.long)
    with refused_by_name(model):
        with torch.no_grad():
            result = model(input_ids=ids, decoder_input_ids=ids[:, :1], use_cache=True)
        past = getattr(result, "past_key_values", None)
        if not isinstance(past, EncoderDecoderCache):
            raise ExportError("it returns no keys and values (past_key_values) of its decoder and of the text")
    return _shapes(past.self_attention_cache), _shapes(past.cross_attention_cache)


def _shapes(cache: DynamicCache) -> tuple[LayerShape, ...]:
    return tuple(LayerShape(int(layer.keys.shape[1]), int(layer.keys.shape[3])) for layer in cache.layers)


def _export_encoder(module: EncoderGraph, layers: int, path: Path) -> Graph:
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    mask = torch.ones((2, 7), dtype=torch.long)
    mask[1, 5:] = 0
    tensors = [torch.arange(14).reshape(2, 7) % 5 + 3, mask]
    inputs, outputs = ["input_ids", "attention_mask"], cache_names("cross", layers)
    return export_graph(path, module, tensors, [axes, axes], inputs, outputs, merge_projections)


def _export_decoder(
    module: DecoderGraph, caches: Sequence[LayerShape], cross: Sequence[LayerShape], beams: int, path: Path
) -> Graph:
    names = ("rows", "places", "max_length", "max_source", "positions")
    rows, places, length, source, positions = (torch.export.Dim(name) for name in names)
    width = sum(2 * shape.heads * shape.size for shape in cross)
    tensors: list[torch.Tensor] = [
        torch.tensor([[3], [4], [5]]),
        torch.tensor([[6], [6], [6]]),
        torch.tensor([6, 6, 6], dtype=torch.int32),
        torch.tensor([7], dtype=torch.int32),
        torch.tensor([2, 0, 1, 0]),
        torch.zeros((2, beams), dtype=torch.long),
        torch.zeros(3, dtype=torch.long),
        torch.tensor([4, 4], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.zeros((2, 1, width)),
    ]
    axes: list[dict[int, Any]] = [
        {0: rows}, {0: rows}, {0: rows}, {}, {0: positions}, {0: places}, {0: rows}, {0: places}, {}, {0: places},
    ]  # fmt: skip
    for shapes, first, axis, size in ((caches, rows, length, 40), (cross, places, source, 50)):
        for shape in shapes:
            for _ in ("key", "value"):
                tensors.append(torch.zeros((3 if first is rows else 2, shape.heads, size, shape.size)))
                axes.append({0: first, 2: axis})
    past = [*cache_names("past", len(caches)), *cache_names("past_cross", len(cross))]
    outputs = ["logits", *cache_names("present", len(caches)), *cache_names("present_cross", len(cross))]
    return export_graph(path, module, tensors, axes, [*STEP_INPUTS, *CROSS_INPUTS, *past], outputs, merge_projections)
