"""Remove the units that a checkpoint pruned in training still computes.

A unit whose outputs nothing reads (its rows in the next matrix are zero) is dropped; a constant one (its own columns
are zero) is folded into the bias that follows. This is exact. Units are found by their numbers, because checkpoints of
block movement pruning (Lagunas et al., 2021, https://arxiv.org/abs/2109.04838) keep their full size and say nothing.
Knows graphs; knows nothing about models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from builder.engines.optimise.activations import watch
from builder.engines.optimise.structure import Structure, keep_units, structures_of
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.weights import take_in, values_of


@dataclass(frozen=True)
class Removed:
    """Number of units removed, and of all units."""

    heads: int
    neurons: int
    all_heads: int
    all_neurons: int


def compact(graph: Graph, folder: Path) -> tuple[Graph, Removed | None]:
    """Write `graph` without its empty units into `folder`; unchanged, with None, if there are none."""
    model = load_graph(graph.path)
    structures = structures_of(model)
    empty = {s: _empty(model, s) for s in structures}
    if not any(len(units) for units in empty.values()):
        return graph, None
    take_in(model.graph)
    constants = _constants(model, structures)
    removed_units = {"heads": 0, "neurons": 0}
    for structure, units in empty.items():
        remaining = [unit for unit in range(structure.units) if unit not in units] or [0]
        _fold(model, structure, constants[structure.source], [u for u in units if u not in remaining])
        keep_units(model, structure, remaining)
        removed_units[structure.kind] += structure.units - len(remaining)
    total = {kind: sum(s.units for s in structures if s.kind == kind) for kind in removed_units}
    removed = Removed(removed_units["heads"], removed_units["neurons"], total["heads"], total["neurons"])
    return save_graph(model, folder / "compacted" / graph.path.name), removed


def _empty(model: onnx.ModelProto, structure: Structure) -> list[int]:
    """Return units that nothing reads, and units that are constant where the constant can go into a bias."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    unread = ~_used(values_of(weights[structure.weight]), structure.units, axis=0)
    constant = np.full(structure.units, structure.bias is not None)
    for maker in structure.values:
        if constant.any():
            constant &= ~_used(values_of(weights[maker.weight]), structure.units, axis=1)
    return [int(unit) for unit in np.flatnonzero(unread | constant)]


def _used(matrix: np.ndarray, units: int, axis: int) -> np.ndarray:
    """Return which units, side by side along `axis`, have a value other than zero."""
    by_unit = np.moveaxis(matrix, axis, 0).reshape(units, -1)
    return np.asarray(by_unit.any(axis=1))


def _constants(model: onnx.ModelProto, structures: tuple[Structure, ...]) -> dict[str, np.ndarray]:
    """Return the tensors of all units at the first position of some tokens, where a constant unit shows its value."""
    feed = {value.name: np.ones((1, 4), np.int64) for value in model.graph.input}
    values = next(watch(model, [structure.source for structure in structures], [feed]))
    return {name: value.reshape(-1, value.shape[-1])[0] for name, value in values.items()}


def _fold(model: onnx.ModelProto, structure: Structure, values: np.ndarray, units: list[int]) -> None:
    """Add the constant `units` to the bias after them; units that nothing reads contribute nothing."""
    if structure.bias is None or not units:
        return
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    places = (np.asarray(units)[:, None] * structure.size + np.arange(structure.size)).ravel()
    matrix = numpy_helper.to_array(weights[structure.weight]).astype(np.float64)
    bias = numpy_helper.to_array(weights[structure.bias]) + values[places] @ matrix[places]
    weights[structure.bias].CopyFrom(numpy_helper.from_array(bias.astype(np.float32), structure.bias))
