"""PyTorch encoder to ONNX: attention fused where the architecture allows it, counted either way.

Knows modules and their inputs; knows no architecture and no task.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import onnx
import torch
from transformers import PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.linear_layers import head_layers
from builder.checkpoints.tasks.base import TaskGraph, encoder_task
from builder.common.errors import ExportError
from builder.common.workplace import find_disk_full_error
from builder.graphs.export.architectures import fused_attention
from builder.graphs.export.attention import ONNXRUNTIME, UNFUSED
from builder.graphs.export.failure import reason
from builder.graphs.export.lora import (
    AdapterCapacity,
    adaptable_layers,
    adding_lora,
    drop_unread_stacks,
    replacing_heads,
)
from builder.graphs.export.program import export_graph
from builder.graphs.export.recurrence import recurrent_operators
from builder.graphs.export.rows import TASK_INPUTS, Rows, rows_of
from builder.graphs.export.shared_prefixes import SHARED, share_prefixes
from builder.graphs.export.sparse_experts import sparse_experts
from builder.graphs.onnx.bands import split_bands
from builder.graphs.onnx.experts import order_experts
from builder.graphs.onnx.graph import MODEL_FILE, Graph
from builder.graphs.onnx.operators import ATTENTION, CACHED_ATTENTION
from builder.runtime.encoder.call_inputs import TOKEN_SOURCES
from builder.runtime.lora import LORA_A, LORA_HEAD, LORA_ROWS

EXAMPLE = (7, 5)  # tokens of each row of the example: sizes that no axis is specialised on
NO_STACKS: Mapping[str, tuple[int, ...]] = MappingProxyType({})


@dataclass(frozen=True)
class Export:
    """Exported graph, its module, and how much of its attention is fused.

    `shares_prefixes`: True if the graph computes equal beginnings of rows once.
    """

    graph: Graph
    module: TaskGraph
    attentions: int  # fused
    layers: int
    warning: str | None
    shares_prefixes: bool = False


class AdaptedGraph(torch.nn.Module):
    """`task` with adapters in its model; the row of the stacks for each row, and the `stacks`, come last."""

    def __init__(self, task: TaskGraph, stacks: Sequence[str]) -> None:
        super().__init__()
        self.task = task
        self.layers = [name.removeprefix(LORA_A) for name in stacks if name.startswith(LORA_A)]
        self.heads = [name.removeprefix(LORA_HEAD) for name in stacks if name.startswith(LORA_HEAD)]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = len(self.task.inputs)
        lora = own + 1 + 2 * len(self.layers)
        heads = dict(zip(self.heads, tensors[lora:], strict=True))
        with (
            adding_lora(self.task.model, self.layers, tensors[own:lora]),
            replacing_heads(self.task.model, heads, tensors[own]),
        ):
            outputs: tuple[torch.Tensor, ...] = self.task(*tensors[:own])
        return outputs


def export(
    checkpoint: Checkpoint, folder: Path, shares_prefixes: bool = False, capacity: AdapterCapacity | None = None
) -> Export:
    """Export the task's graph into `folder`. Raises ExportError if no graph can be made at all, or takes no adapters.

    With `shares_prefixes`, a decoder whose answers stay the same computes equal beginnings of rows once. `capacity`: of
    adapters, None for none.
    """
    module, rows = task_graph(checkpoint), rows_of(checkpoint)
    stacks = _stacks(checkpoint, module, capacity)
    path = folder / "exported" / MODEL_FILE
    layers = int(checkpoint.config.num_hidden_layers)
    shared = share_prefixes(module, rows) if shares_prefixes else None
    if shared is not None:
        graph = _try_export(shared, rows, path, SHARED)
        if not isinstance(graph, str) and _attentions(graph) == layers:
            return Export(graph, module, layers, layers, None, shares_prefixes=True)
    graph = unfused = _try_export(module, rows, path, ONNXRUNTIME, stacks)
    attentions = 0 if isinstance(graph, str) else _attentions(graph)
    if not attentions:
        graph = _try_export(module, rows, path, UNFUSED, stacks)
    if isinstance(graph, str):
        raise ExportError(f"{checkpoint.source} ({checkpoint.config.model_type}) does not export: {graph}")
    warning = None
    if attentions < layers:
        follows = f"{checkpoint.config.model_type} does not follow transformers' attention interface"
        why = unfused if isinstance(unfused, str) else follows
        warning = (
            f"{attentions} of {layers} attentions are fused ({why}); the others run as separate operators, which is "
            "right but slower and takes memory quadratic in the length"
        )
    return Export(graph, module, attentions, layers, warning)


def _stacks(checkpoint: Checkpoint, module: TaskGraph, capacity: AdapterCapacity | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the stacks of adapters by input; none without a capacity. Raises ExportError."""
    if capacity is None:
        return {}
    try:
        return {**capacity.shapes(adaptable_layers(module.model), head_layers(module.model))}
    except Exception as error:  # whatever the model's own code raises
        raise ExportError(f"{checkpoint.source} ({checkpoint.config.model_type}): {reason(error)}") from error


def task_graph(checkpoint: Checkpoint) -> TaskGraph:
    """Return the module that is exported.

    Its inputs are those that the tokeniser makes and the model takes, then the task's own.
    """
    task = encoder_task(checkpoint.task)
    accepted = inspect.signature(checkpoint.model.forward).parameters
    produced = checkpoint.tokenizer.model_input_names
    names = [name for name in TOKEN_SOURCES if name in accepted and name in produced]
    return task.graph(checkpoint, (*names, *task.extra_inputs))


def _attentions(graph: Graph) -> int:
    return graph.operators[ATTENTION] + graph.operators[CACHED_ATTENTION]


def _try_export(
    module: TaskGraph, rows: Rows, path: Path, attention: str, stacks: Mapping[str, tuple[int, ...]] = NO_STACKS
) -> Graph | str:
    """Return the graph of `module` with an implementation of attention, or the reason why there is none."""
    model: PreTrainedModel = module.model
    before = model.config._attn_implementation
    try:
        own = nullcontext() if attention == UNFUSED else fused_attention(model)
        with own, sparse_experts(model), recurrent_operators(module):
            model.set_attn_implementation(attention)
            return export_module(module, rows, path, stacks)
    except Exception as error:  # torch.export raises whatever the model's own code raises
        if find_disk_full_error(error) is not None:
            raise  # an error of the disk, not of the model
        return reason(error)
    finally:
        model.set_attn_implementation(before)


def export_module(
    module: TaskGraph, rows: Rows, path: Path, stacks: Mapping[str, tuple[int, ...]] = NO_STACKS
) -> Graph:
    """Export `module` with dynamic batch and sequence axes; `stacks`: shapes of those of adapters, by input."""
    batch, sequence = (torch.export.Dim(name) for name in ("batch", "sequence"))
    example = rows.feeds(module.inputs, EXAMPLE)
    tensors = [torch.from_numpy(example[name]) for name in module.inputs]
    own = {name: torch.export.Dim(axis) for name, axis in TASK_INPUTS.items()}
    axes = [{0: batch, 1: own.get(name, sequence)} for name in module.inputs]
    if not stacks:
        return export_graph(path, module, tensors, axes, module.inputs, module.outputs, _rewrite)
    tensors += [torch.zeros(len(EXAMPLE), dtype=torch.int64), *(torch.zeros(shape) for shape in stacks.values())]
    axes += [{0: batch}, *({} for _ in stacks)]
    adapted = AdaptedGraph(module, tuple(stacks))
    return export_graph(path, adapted, tensors, axes, [*module.inputs, LORA_ROWS, *stacks], module.outputs, _rewrite)


def _rewrite(model: onnx.ModelProto) -> None:
    """Rewrite in place what operators take in another form than torch exports it."""
    drop_unread_stacks(model.graph)
    order_experts(model)
    split_bands(model)
