"""LoRA adapters in a graph: each linear layer adds x @ A[row] @ B[row], for the row's own adapter.

The head of a classifier is replaced by that of the row's adapter, which has labels of its own. The stacks of all
adapters are inputs of the graph, so that one is added by writing into them, and rows with different adapters share a
call. Inputs: builder/runtime/lora.py. Knows modules; knows no architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from transformers import PreTrainedModel

from builder.checkpoints.linear_layers import NO_LAYERS, LinearLayer, body_layers, head_layers
from builder.common.errors import ExportError
from builder.options import BuildSpec
from builder.runtime.lora import LORA_A, LORA_B, LORA_HEAD, LORA_ROWS, STACKS

PROBE = (7, 3)  # rows and tokens
WITHOUT_LAYERS = "adapters can change none of its layers: build it without --adapters"


@dataclass(frozen=True)
class AdapterCapacity:
    """Adapters that a model takes: `adapters` at once, each of `rank` at most in any layer.

    `layers`: the last parts of the names of those that adapters may change; empty: all. `labels`: most of an adapter's
    own head; None for as many as the model's.
    """

    adapters: int
    rank: int
    layers: tuple[str, ...] = ()
    labels: int | None = None

    @classmethod
    def of(cls, spec: BuildSpec) -> AdapterCapacity:
        """Return the capacity that `spec` asks for."""
        names = (spec.adapter_layers or "").split(",")
        return cls(spec.adapters, spec.adapter_rank, tuple(filter(None, map(str.strip, names))), spec.adapter_labels)

    def chosen(self, layers: Mapping[str, LinearLayer]) -> dict[str, LinearLayer]:
        """Return those of `layers` that adapters may change. Raises ExportError for none, or if one is missing."""
        if not layers:
            raise ExportError(WITHOUT_LAYERS)
        known = {name.rpartition(".")[2] for name in layers}
        missing = [name for name in self.layers if name not in known]
        if missing:
            raise ExportError(
                f"--adapter-layers names {missing[0]}, which adapters cannot change; in this model they can change "
                f"{', '.join(sorted(known))}"
            )
        return {name: one for name, one in layers.items() if not self.layers or name.rpartition(".")[2] in self.layers}

    def bytes(self, model: PreTrainedModel) -> int:
        """Return the bytes of the stacks of `model`, and of as many adapters as their files have them."""
        shapes = self.shapes(body_layers(model), head_layers(model))
        copies = {name: (2 * self.adapters + 1, *shape[1:]) for name, shape in shapes.items()}
        return sum(math.prod(shape) for shape in copies.values()) * np.dtype(np.float32).itemsize

    def shapes(
        self, layers: Mapping[str, LinearLayer], heads: Mapping[str, LinearLayer] = NO_LAYERS
    ) -> dict[str, tuple[int, int, int]]:
        """Return the shapes of the stacks by input of the graph; their first rows are for no adapter.

        Raises ExportError for no layers, and for a requested layer that is not one of `layers`.
        """
        shapes = {}
        for name, layer in self.chosen(layers).items():
            shapes[f"{LORA_A}{name}"] = self.adapters + 1, layer.inputs, self.rank
            shapes[f"{LORA_B}{name}"] = self.adapters + 1, self.rank, layer.outputs
        for name, layer in heads.items():
            outputs = max(self.labels or 0, layer.outputs) if name == list(heads)[-1] else layer.outputs
            shapes[f"{LORA_HEAD}{name}"] = self.adapters + 1, layer.inputs + 1, outputs
        return shapes


def adaptable_layers(model: PreTrainedModel, **options: Any) -> dict[str, LinearLayer]:
    """Return the linear layers that read all tokens of each row in their order, found by a run with `options`.

    Others, such as an expert's, read some tokens of all rows together, and cannot tell whose they are; or they read
    something else as well, such as positions that all rows share. In a classifier, layers that read one vector of each
    row count too; those of its head do not, because adapters replace it.
    """
    layers = body_layers(model)
    shapes = {PROBE, PROBE[:1]} if head_layers(model) else {PROBE}
    reads_rows: dict[str, list[bool]] = {name: [] for name in layers}

    def note(name: str, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        reads_rows[name].append(isinstance(arguments[0], torch.Tensor) and tuple(arguments[0].shape[:-1]) in shapes)

    with ExitStack() as hooks, torch.no_grad():
        for name in layers:
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(partial(note, name)))
        model(input_ids=torch.arange(5, 5 + PROBE[0] * PROBE[1]).reshape(PROBE), **options)
    return {name: layer for name, layer in layers.items() if reads_rows[name] and all(reads_rows[name])}


@contextmanager
def adding_lora(model: PreTrainedModel, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Add LoRA to the layers `names` of `model`.

    `tensors`: the row of the stacks of each row of the call, (batch,), then A and B of each layer.
    """

    def add(index: int, module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
        a, b = (stack.index_select(0, tensors[0]) for stack in tensors[1 + 2 * index : 3 + 2 * index])
        return output + _by_row(lambda x: x @ a @ b, arguments[0])

    with ExitStack() as hooks:
        for index, name in enumerate(names):
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(add, index)))
        yield


@contextmanager
def replacing_heads(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> Iterator[None]:
    """Replace the layers of a classifier's head by those of each row's adapter, which `tensors` have by layer.

    `rows`: the row of the stacks of each row of the call, (batch,); row 0 keeps the layers as they are. Outputs
    beyond a row's own labels are 0.
    """

    def replace(stack: torch.Tensor, module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], own: Any) -> Any:
        head = stack.index_select(0, rows)
        answer = _by_row(lambda x: x @ head[:, :-1] + head[:, -1:], arguments[0])
        padded = torch.nn.functional.pad(own, (0, stack.shape[-1] - own.shape[-1]))
        return torch.where(rows.reshape(-1, *[1] * (own.dim() - 1)) == 0, padded, answer)

    with ExitStack() as hooks:
        for name, stack in tensors.items():
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(replace, stack)))
        yield


def _by_row(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return `product` of `x`, (batch, tokens, numbers), or (batch, numbers) for one vector of each row."""
    return product(x) if x.dim() > 2 else product(x.unsqueeze(1)).squeeze(1)


def drop_unread_stacks(graph: onnx.GraphProto) -> None:
    """Remove the stacks of layers whose own code the graph does not run: adapters would have no effect there.

    Raises ExportError if no stack is left.
    """
    read = {name for node in graph.node for name in node.input}
    stacks = [value for value in graph.input if value.name.startswith((LORA_ROWS, *STACKS))]
    unread = [value for value in stacks if value.name not in read]
    if unread and len(unread) == len(stacks):
        raise ExportError(WITHOUT_LAYERS)
    for value in unread:
        graph.input.remove(value)
