"""LoRA adapters in a graph: each linear layer adds x @ A[row] @ B[row], for the row's own adapter.

The stacks of all adapters are inputs of the graph, so that one is added by writing into them, and rows with different
adapters share a call. Inputs: builder/runtime/lora.py. Knows modules; knows no architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from transformers import PreTrainedModel

from builder.checkpoints.linear_layers import LinearLayer, linear_layers
from builder.common.errors import ExportError
from builder.options import BuildSpec
from builder.runtime.lora import LORA_A, LORA_B, LORA_ROWS

PROBE = (2, 3)  # rows and tokens
NO_LAYERS = "adapters can change none of its layers: build it without --adapters"


@dataclass(frozen=True)
class AdapterCapacity:
    """Adapters that a model takes: `adapters` at once, each of `rank` at most in any layer.

    `layers`: the last parts of the names of those that adapters may change; empty: all.
    """

    adapters: int
    rank: int
    layers: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: BuildSpec) -> AdapterCapacity:
        """Return the capacity that `spec` asks for."""
        names = (spec.adapter_layers or "").split(",")
        return cls(spec.adapters, spec.adapter_rank, tuple(filter(None, map(str.strip, names))))

    def chosen(self, layers: Mapping[str, LinearLayer]) -> dict[str, LinearLayer]:
        """Return those of `layers` that adapters may change. Raises ExportError for none, or if one is missing."""
        if not layers:
            raise ExportError(NO_LAYERS)
        known = {name.rpartition(".")[2] for name in layers}
        missing = [name for name in self.layers if name not in known]
        if missing:
            raise ExportError(
                f"--adapter-layers names {missing[0]}, which adapters cannot change; in this model they can change "
                f"{', '.join(sorted(known))}"
            )
        return {name: one for name, one in layers.items() if not self.layers or name.rpartition(".")[2] in self.layers}

    def bytes(self, layers: Mapping[str, LinearLayer]) -> int:
        """Return the bytes of the stacks of `layers`, and of the matrices of as many adapters as they were read."""
        copies = {name: (2 * self.adapters + 1, *shape[1:]) for name, shape in self.shapes(layers).items()}
        return sum(math.prod(shape) for shape in copies.values()) * np.dtype(np.float32).itemsize

    def shapes(self, layers: Mapping[str, LinearLayer]) -> dict[str, tuple[int, int, int]]:
        """Return the shapes of the stacks by input of the graph; their first rows are for no adapter.

        Raises ExportError for no layers, and for a requested layer that is not one of `layers`.
        """
        shapes = {}
        for name, layer in self.chosen(layers).items():
            shapes[f"{LORA_A}{name}"] = self.adapters + 1, layer.inputs, self.rank
            shapes[f"{LORA_B}{name}"] = self.adapters + 1, self.rank, layer.outputs
        return shapes


def adaptable_layers(model: PreTrainedModel, **options: Any) -> dict[str, LinearLayer]:
    """Return the linear layers that read all tokens of each row in their order, found by a run with `options`.

    Others, such as an expert's, read some tokens of all rows together, and cannot tell whose they are; or they read
    something else as well, such as positions that all rows share.
    """
    layers = linear_layers(model)
    reads_rows: dict[str, list[bool]] = {name: [] for name in layers}

    def note(name: str, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        reads_rows[name].append(isinstance(arguments[0], torch.Tensor) and tuple(arguments[0].shape[:-1]) == PROBE)

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
        return output + arguments[0] @ a @ b

    with ExitStack() as hooks:
        for index, name in enumerate(names):
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(add, index)))
        yield


def drop_unread_stacks(graph: onnx.GraphProto) -> None:
    """Remove the stacks of layers whose own code the graph does not run: adapters would have no effect there.

    Raises ExportError if no stack is left.
    """
    read = {name for node in graph.node for name in node.input}
    stacks = [value for value in graph.input if value.name.startswith((LORA_ROWS, LORA_A, LORA_B))]
    unread = [value for value in stacks if value.name not in read]
    if unread and len(unread) == len(stacks):
        raise ExportError(NO_LAYERS)
    for value in unread:
        graph.input.remove(value)
