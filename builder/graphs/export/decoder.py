"""PyTorch decoder to ONNX: one graph for prefill and for decoding, its key/value cache updated in place.

Inputs, for `batch` rows of `sequence` new tokens each:
  input_ids, position_ids      (batch, sequence) int64
  seqlens_k                    (batch,) int32, tokens in the cache after this call, less one
  total_sequence_length        (1,) int32, the most tokens of any row after this call
  logits_positions             (positions,) int64, the tokens whose logits are computed: places in
                               input_ids, counted through all rows
  past_key_i, past_value_i     (batch, key heads, max_length, head size) of each layer with a cache of its own
  past_state_i_n               (batch, ...) float32, of each layer with states: its n-th
  appended_rows                (batch,) bool, the rows whose states advance; with states
  lora_rows                    (batch,) int64, each row's adapter: a row of the stacks; with adapters
  lora_a.LAYER, lora_b.LAYER   (adapters + 1, ...) float32, the stacks of a linear layer (lora.py)
Outputs: logits (positions, vocabulary) and present_key_i, present_value_i and present_state_i_n, to be bound to the
buffers of the past; for a draft that reads them, hidden_states (batch, sequence, size) of the new tokens.

Knows modules and their inputs; knows no architecture and no task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from builder.checkpoints.drafts.layers import TargetStates
from builder.common.errors import ExportError
from builder.graphs.export.architectures import (
    fused_attention,
    own_layers,
    refuse_sparse_attention,
    refuse_uncomputable,
)
from builder.graphs.export.cached_attention import CACHED
from builder.graphs.export.caches import ExportCache, ExportStates, cache_argument, exporting
from builder.graphs.export.failure import reason
from builder.graphs.export.indexers import disabled_indexers
from builder.graphs.export.latent import absorbed_attention, latent_layers, latent_shape
from builder.graphs.export.lora import AdapterCapacity, adaptable_layers, adding_lora, drop_unread_stacks
from builder.graphs.export.masks import chunks_within
from builder.graphs.export.positions import PROBE, are_close, first_position, looked_up, table_rows
from builder.graphs.export.program import export_graph
from builder.graphs.export.rotary import constant_frequencies, equal_positions, fused_rotary
from builder.graphs.export.sparse_experts import sparse_experts
from builder.graphs.export.states import fused_states, state_shapes
from builder.graphs.onnx.experts import order_experts
from builder.graphs.onnx.graph import MODEL_FILE, Graph
from builder.graphs.onnx.operators import CACHED_ATTENTION, STATEFUL
from builder.graphs.onnx.projections import merge_projections
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import HIDDEN_STATES
from builder.runtime.generation.executors.states import APPENDED_ROWS
from builder.runtime.lora import LORA_A, LORA_ROWS

STEP_INPUTS = ("input_ids", "position_ids", "seqlens_k", "total_sequence_length", "logits_positions")
ELSEWHERE = "the decode loop keeps nothing else between tokens. vLLM may serve it: --engine vllm"


@dataclass(frozen=True)
class DecoderExport:
    """`caches`: of each layer; `attentions`: layers with attention, those that share keys and values among them."""

    graph: Graph
    caches: tuple[LayerShape, ...]
    attentions: int
    rotary_left: tuple[str, ...] = ()  # functions that rotate and run as separate operators
    first_position: int = 0  # of a text's first token


class DecoderGraph(torch.nn.Module):
    """Module that is exported: `STEP_INPUTS` and the past by position, logits and the present out.

    rows: the model's `table_rows`, None if it takes position_ids, of which the first of a text is `first_position`.
    adapted: layers that adapters may change. states: what a draft reads, the last output.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        caches: Sequence[LayerShape],
        rows: Mapping[str, int] | None,
        adapted: Sequence[str] = (),
        states: TargetStates | None = None,
        first_position: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.caches = tuple(caches)
        self.rows = rows
        self.adapted = tuple(adapted)
        self.states = states
        self.projection = None if states is None else states.projection  # a child, so that its weights are exported
        self.first_position = first_position

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, ...]:
        input_ids, position_ids, seqlens_k, total, positions, *rest = tensors
        remaining = iter(rest)
        past = [next(remaining) if layer.heads else None for layer in self.caches for _ in ("key", "value")]
        kept = {
            index: [next(remaining) for _ in layer.states] for index, layer in enumerate(self.caches) if layer.states
        }
        states = ExportStates(kept, next(remaining)) if kept else None
        cache = ExportCache(past, seqlens_k, total, states)
        cache.token_positions = position_ids
        own = position_ids + self.first_position if self.first_position else position_ids
        explicit: dict[str, Any] = {"position_ids": own} if self.rows is None else {}
        if self.states is not None:
            explicit |= self.states.options
        tables = looked_up(self.model, self.rows or {}, position_ids)
        lora = adding_lora(self.model, self.adapted, tuple(remaining))
        with exporting(cache), tables, lora, logits_at(self.model, positions):
            result = self.model(input_ids=input_ids, **{cache_argument(self.model): cache}, use_cache=True, **explicit)
        hidden = () if self.states is None else (self.states.of(result),)
        return result.logits, *cache.outputs(), *hidden


@contextmanager
def logits_at(model: PreTrainedModel, positions: torch.Tensor) -> Iterator[None]:
    """Apply the output matrix to some `positions` alone, (positions,) int64, counted through all rows.

    The product is over two axes, since one that reads a tied embedding by its rows cannot have more.
    """

    def chosen(head: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        hidden = arguments[0]  # (batch, sequence, hidden)
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)

    with model.get_output_embeddings().register_forward_pre_hook(chosen):
        yield


def export_decoder(
    model: PreTrainedModel,
    folder: Path,
    max_length: int,
    caches: tuple[LayerShape, ...] = (),
    capacity: AdapterCapacity | None = None,
    states: TargetStates | None = None,
) -> DecoderExport:
    """Export `model` for rows of up to `max_length` tokens. `caches`: its `cache_shapes`, where they are known.

    `capacity`: of adapters, None for none. `states`: the hidden states that a draft reads.
    Raises ExportError if no graph is correct.
    """
    path = folder / "exported" / MODEL_FILE
    caches = caches or cache_shapes(model)
    with refused_by_name(model):
        rows, first = table_rows(model), first_position(model)
        stacks = {} if capacity is None else capacity.shapes(adaptable_layers(model, use_cache=False))
        _refuse_later_tokens(model)
        refuse_sparse_attention(model, max_length)
        adapted = [name.removeprefix(LORA_A) for name in stacks if name.startswith(LORA_A)]
        step = DecoderGraph(model, caches, rows, adapted, states, first)
        after = () if states is None else (HIDDEN_STATES,)
        with fused_layers(model, max_length) as unfused:
            graph = export_step(step, caches, path, stacks=stacks, after=after)
        attending = sum(cache.heads > 0 or _shares(model.config, layer) for layer, cache in enumerate(caches))
        refuse_unfused(graph, caches, attending)
    return DecoderExport(graph, caches, attending, unfused, first)


@contextmanager
def fused_layers(model: PreTrainedModel, max_length: int) -> Iterator[tuple[str, ...]]:
    """Run with the layers of `model` as they are exported, for rows of up to `max_length` tokens.

    Yields the functions that rotate and stay separate operators. Raises ExportError.
    """
    replacements = (
        fused_attention(model),
        absorbed_attention(model),
        fused_states(model),
        constant_frequencies(model, max_length),
        sparse_experts(model),
        equal_positions(model),
        chunks_within(max_length),
        disabled_indexers(model, max_length),
    )
    with ExitStack() as replacing:
        for replacement in replacements:
            replacing.enter_context(replacement)
        unfused = replacing.enter_context(fused_rotary(model))
        model.set_attn_implementation(CACHED)
        yield unfused


def refuse_unfused(graph: Graph, caches: Sequence[LayerShape], attending: int) -> None:
    """Raise ExportError if one of the `attending` layers of `graph`, or a state, is not fused."""
    if graph.operators[CACHED_ATTENTION] != attending:
        raise ExportError(f"{graph.operators[CACHED_ATTENTION]} of its {attending} layers use the fused attention")
    states, fused = sum(len(cache.states) for cache in caches), sum(graph.operators[name] for name in STATEFUL)
    if fused != states:
        raise ExportError(f"{fused} of the {states} states of its layers use a fused operator")


def cache_shapes(model: PreTrainedModel, **inputs: torch.Tensor) -> tuple[LayerShape, ...]:
    """Return the shapes of each layer's cache, found by a run over three tokens. `inputs`: of it, without token ids.

    Raises ExportError, which names the model.
    """
    with refused_by_name(model):
        refuse_uncomputable(model)
    own = own_layers(model)
    if own is not None:
        return own
    shapes, latent = [], latent_layers(model)
    with refused_by_name(model):
        with torch.no_grad(), _without_padding(model.config):
            result = model(**(inputs or {"input_ids": PROBE}), use_cache=True)
        past: Any = getattr(result, cache_argument(model), None)
        if past is None:
            _refuse_later_tokens(model)
            raise ExportError(f"it returns no cache of keys and values (past_key_values); {ELSEWHERE}")
        if type(past) is EncoderDecoderCache and not past.cross_attention_cache.get_seq_length():
            past = past.self_attention_cache
        if type(past) is not DynamicCache:  # a model's own cache is a subclass, and stores more
            raise ExportError(f"its cache keeps more than the keys and values of its own layers; {ELSEWHERE}")
        for index, layer in enumerate(past.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            states = state_shapes(model, layer)
            if keys is None and (states or _shares(model.config, index) or _keeps_nothing(model.config, index)):
                shapes.append(LayerShape(0, 0, states))
                continue
            if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or keys.dim() != 4:
                raise ExportError(
                    f"layer {index} keeps no keys and values: it has no attention, or uses those of another layer; "
                    f"{ELSEWHERE}"
                )
            if index in latent:
                cached = latent_shape(latent[index])
                shapes.append(LayerShape(cached.heads, cached.size, states))
            else:  # the operators take keys and values of one size
                shapes.append(LayerShape(int(keys.shape[1]), int(max(keys.shape[3], values.shape[3])), states))
    return tuple(shapes)


def _shares(config: PreTrainedConfig, layer: int) -> bool:
    """Return True if a layer attends to the keys and values of an earlier one."""
    modes = getattr(config.get_text_config(), "kv_sharing_modes", None)
    return modes is not None and modes[layer] == "reuse"


def _keeps_nothing(config: PreTrainedConfig, layer: int) -> bool:
    """Return True if a layer keeps nothing of a text: a block of units alone, or attention to an image."""
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    return layer in (getattr(text, "cross_attention_layers", None) or ()) or (
        types is not None and types[layer] in ("mlp", "moe")
    )


def _refuse_later_tokens(model: PreTrainedModel) -> None:
    """Raise ExportError if a token of `model` sees those after it, as in a model of prefixes (PaliGemma)."""
    if model.device.type == "meta":
        return  # it has no values to compare
    with torch.no_grad():
        alone, followed = (model(input_ids=ids, use_cache=True).logits[0, 0] for ids in (PROBE[:, :1], PROBE))
    if not are_close(alone, followed):
        raise ExportError("its tokens see those after them; the fused attention over a cache is causal")


@contextmanager
def refused_by_name(model: PreTrainedModel) -> Iterator[None]:
    """Turn any error inside into an ExportError that names `model`; its attention is restored."""
    before = model.config._attn_implementation
    refused = f"{model.config.model_type} cannot be served for generation"
    try:
        yield
    except Exception as error:  # whatever the model's own code raises
        raise ExportError(f"{refused}: {reason(error)}") from error
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _without_padding(config: PreTrainedConfig) -> Iterator[None]:
    """Treat no token as padding: to warn of it GPT-2 looks for it among ids, which have no values on the meta device.

    The value is written past the configuration's own check, since some architectures accept nothing but a number.
    """
    settings = vars(config)
    padding = {"pad_token_id": settings["pad_token_id"]} if "pad_token_id" in settings else {}
    settings.update(dict.fromkeys(padding))
    try:
        yield
    finally:
        settings.update(padding)


def cache_names(kind: str, layers: int) -> list[str]:
    """Return the names of caches of `kind`, such as past, in the order of a graph's inputs and outputs."""
    return [f"{kind}_{part}_{layer}" for layer in range(layers) for part in ("key", "value")]


def _names(kind: str, caches: Sequence[LayerShape]) -> list[str]:
    """Return the names of keys and values of `kind`, such as past, then those of the states."""
    attending = [index for index, cache in enumerate(caches) if cache.heads]
    states = [
        f"{kind}_state_{index}_{number}" for index, cache in enumerate(caches) for number in range(len(cache.states))
    ]
    return [*(f"{kind}_{part}_{index}" for index in attending for part in ("key", "value")), *states]


def export_step(
    module: torch.nn.Module,
    caches: Sequence[LayerShape],
    path: Path,
    *,
    hidden_size: int = 0,
    stacks: Mapping[str, tuple[int, ...]] | None = None,
    answers: Sequence[str] = ("logits",),
    after: Sequence[str] = (),
) -> Graph:
    """Export a step over `caches`: `module` takes `STEP_INPUTS` and the past by position, then `stacks` of adapters.

    It returns `answers`, the present, and the outputs `after` it. `hidden_size`: of the hidden states that it takes
    after `STEP_INPUTS`, (batch, sequence, size); 0: it takes none. Raises ExportError.
    """
    names = ("batch", "sequence", "max_length", "positions")
    batch, sequence, length, positions = (torch.export.Dim(name) for name in names)
    shapes: list[dict[int, Any]] = [{0: batch, 1: sequence}, {0: batch, 1: sequence}, {0: batch}, {}, {0: positions}]
    tensors = [
        torch.arange(2 * 7).reshape(2, 7) % 5 + 3,
        torch.arange(7).repeat(2, 1),
        torch.tensor([6, 6], dtype=torch.int32),
        torch.tensor([7], dtype=torch.int32),
        torch.tensor([3, 6, 13]),
    ]
    before: list[str] = []
    if hidden_size:
        tensors.append(torch.linspace(-1, 1, 2 * 7 * hidden_size).reshape(2, 7, hidden_size))
        shapes.append({0: batch, 1: sequence})
        before.append(HIDDEN_STATES)
    for cache in caches:
        for _ in ("key", "value") if cache.heads else ():
            tensors.append(torch.zeros((2, cache.heads, 40, cache.size)))
            shapes.append({0: batch, 2: length})
    past = _names("past", caches)
    states = [torch.zeros((2, *shape)) for cache in caches for shape in cache.states]
    if states:
        tensors += [*states, torch.ones(2, dtype=torch.bool)]
        shapes += [{0: batch}] * (len(states) + 1)
        past.append(APPENDED_ROWS)
    if stacks:
        tensors += [torch.zeros(2, dtype=torch.int64), *(torch.zeros(shape) for shape in stacks.values())]
        shapes += [{0: batch}, *({} for _ in stacks)]
        past += [LORA_ROWS, *stacks]
    outputs = [*answers, *_names("present", caches), *after]
    return export_graph(path, module, tensors, shapes, [*STEP_INPUTS, *before, *past], outputs, _rewrite)


def _rewrite(model: onnx.ModelProto) -> None:
    """Rewrite in place what operators take in another form than torch exports it."""
    merge_projections(model)
    drop_unread_stacks(model.graph)
    order_experts(model)
