"""Prune heads and neurons without retraining: remove the least important ones, and refit the matrices that read them.

1. Importance: the diagonal of the Fisher information of a mask over the units, on real inputs; here of the graph's own
   outputs under a Gaussian (random projections of them are differentiated), so that no labels are needed.
2. Mask search: which heads and neurons to remove for a target share of the layers at the least total importance.
3. Reconstruction: each matrix that reads pruned units, and its bias, is solved anew by least squares, layer by layer,
   so that its output on real inputs is what it was.

Source: Kwon et al., A Fast Post-Training Pruning Framework for Transformers (NeurIPS 2022), whose third step rescales
units where this one solves for the whole matrix. Knows modules and graphs; knows no architecture and no task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from builder.checkpoints.tasks.base import TaskGraph
from builder.common.errors import VerificationError
from builder.engines.optimise.activations import Feeds, watch
from builder.engines.optimise.compaction import Removed
from builder.engines.optimise.structure import Structure, keep_units, open_structures
from builder.graphs.onnx.graph import Graph, save_graph

PROJECTIONS = 4  # random projections of the outputs, each differentiated on all inputs
MIN_NORM = 1e-6
RIDGES = (0.01, 0.1, 1.0, 10.0, 100.0)  # candidates of the penalty on changes of a solved matrix


def prune(graph: Graph, module: TaskGraph, share: float, feeds: Sequence[Feeds], folder: Path) -> tuple[Graph, Removed]:
    """Write `graph` with `share` of the weights of its prunable layers removed.

    Raises VerificationError if the graph has less than that to remove.
    """
    model, structures = open_structures(graph)
    importance = fisher(model, module, structures, feeds)
    mask = search_mask([importance[s] for s in structures], [_cost(model, s) for s in structures], share)
    pruned = onnx.ModelProto.FromString(model.SerializeToString())
    shorter = {
        structure: keep_units(pruned, structure, units)
        for structure, units in zip(structures, mask, strict=True)
        if len(units) < structure.units
    }
    targets = _outputs(model, list(shorter), feeds)
    for structure, after in shorter.items():
        _reconstruct(pruned, after, targets[structure], feeds)
    count = {
        kind: (
            sum(s.units - len(k) for s, k in zip(structures, mask, strict=True) if s.kind == kind),
            sum(s.units for s in structures if s.kind == kind),
        )
        for kind in ("heads", "neurons")
    }
    removed = Removed(count["heads"][0], count["neurons"][0], count["heads"][1], count["neurons"][1])
    return save_graph(pruned, folder / "pruned" / graph.path.name), removed


def fisher(
    model: onnx.ModelProto, module: TaskGraph, structures: Sequence[Structure], feeds: Sequence[Feeds]
) -> dict[Structure, np.ndarray]:
    """Return (units,) for each structure: the mean square derivative of the outputs by a mask of the unit."""
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    linears = {_fingerprint(weight): layer for layer, weight in _matrices(module)}
    totals: dict[Structure, np.ndarray] = {}
    seen: dict[torch.nn.Module, torch.Tensor] = {}
    layers, hooks = [], []
    for structure in structures:
        layer = linears.get(_fingerprint(weights[structure.weight]))
        if layer is None:
            raise VerificationError(
                f"--prune needs the graph's matrices as the checkpoint has them, and {structure.weight} is not one of "
                "those"
            )
        layers.append(layer)
        hooks.append(layer.register_forward_pre_hook(lambda mod, args: seen.__setitem__(mod, args[0])))
        totals[structure] = np.zeros(structure.units)
    generator = torch.Generator().manual_seed(0)
    try:
        for feed in feeds:
            tensors = [torch.from_numpy(np.asarray(feed[name])) for name in module.inputs]
            mask = torch.from_numpy(np.asarray(feed["attention_mask"])).float()
            outputs = module(*tensors)
            for _ in range(PROJECTIONS):
                target = _projected(outputs, mask, generator)
                gradients = torch.autograd.grad(target, [seen[layer] for layer in layers], retain_graph=True)
                for structure, layer, gradient in zip(structures, layers, gradients, strict=True):
                    by_row = (seen[layer] * gradient).detach().reshape(len(mask), -1, structure.units, structure.size)
                    totals[structure] += by_row.sum(dim=(1, 3)).square().sum(dim=0).double().numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return totals


def _projected(outputs: Sequence[torch.Tensor], mask: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the sum of all outputs with signs drawn at random, () float32; those of padding count 0."""
    total = torch.zeros(())
    for output in outputs:
        signs = torch.randint(0, 2, output.shape, generator=generator).float() * 2 - 1
        if output.ndim > 1 and output.shape[1] == mask.shape[1]:
            signs = signs * mask.reshape(*mask.shape, *[1] * (output.ndim - 2))
        total = total + (output * signs).sum()
    return total


def search_mask(importance: Sequence[np.ndarray], costs: Sequence[float], share: float) -> list[list[int]]:
    """Return the units each structure keeps: `share` of all cost removed, at the least importance removed.

    importance: (units,) of each structure; costs: of one of its units. Expensive units (heads) and cheap ones (neurons)
    are each removed in the order of their importance; every number of removed expensive ones is tried. Each structure
    keeps one. Raises VerificationError if that is less than `share`.
    """
    total = sum(len(values) * cost for values, cost in zip(importance, costs, strict=True))
    places = [
        (float(value), cost, index, int(unit))
        for index, (values, cost) in enumerate(zip(importance, costs, strict=True))
        for unit, value in enumerate(values)
        if unit != int(np.argmax(values))
    ]
    divide = (min(costs) * max(costs)) ** 0.5 if costs else 0.0
    dear = sorted(unit for unit in places if unit[1] > divide)
    cheap = sorted(unit for unit in places if unit[1] <= divide)
    target = share * total
    reachable = sum(unit[1] for unit in places) / total if total else 0.0
    if share > reachable:
        raise VerificationError(
            f"--prune {share} is more than can be removed: {reachable:.2f} of the weights of the attentions and "
            f"feed-forwards ({len(costs)} found) whose units can be told apart. Nothing was published: ask for less"
        )
    value_of = np.concatenate([[0.0], np.cumsum([unit[0] for unit in cheap])])
    cost_of = np.concatenate([[0.0], np.cumsum([unit[1] for unit in cheap])])
    best: tuple[float, int, int] | None = None
    lost = paid = 0.0
    for count in range(len(dear) + 1):
        rest = int(np.searchsorted(cost_of, target - paid - 1e-9))
        if rest < len(cost_of) and (best is None or lost + value_of[rest] < best[0]):
            best = (lost + float(value_of[rest]), count, rest)
        if count < len(dear):
            lost, paid = lost + dear[count][0], paid + dear[count][1]
    assert best is not None
    removed = {(unit[2], unit[3]) for unit in [*dear[: best[1]], *cheap[: best[2]]]}
    return [[u for u in range(len(values)) if (index, u) not in removed] for index, values in enumerate(importance)]


def _cost(model: onnx.ModelProto, structure: Structure) -> float:
    """Return the weights of one unit: its columns before, its rows after."""
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in model.graph.initializer}
    return (sum(sizes[maker.weight] for maker in structure.makers) + sizes[structure.weight]) / structure.units


def _outputs(
    model: onnx.ModelProto, structures: Sequence[Structure], feeds: Sequence[Feeds]
) -> dict[Structure, list[np.ndarray]]:
    """Return the output of the product after each structure on the tokens of each feed, without its bias.

    Each is (tokens, outputs).
    """
    makers = {node.input[1]: str(node.output[0]) for node in model.graph.node if node.op_type == "MatMul"}
    products = {structure: makers[structure.weight] for structure in structures}
    by_structure: dict[Structure, list[np.ndarray]] = {structure: [] for structure in structures}
    for values, feed in zip(watch(model, list(products.values()), feeds), feeds, strict=True):
        for structure, name in products.items():
            by_structure[structure].append(_of_tokens(values[name], feed))
    return by_structure


def _reconstruct(
    pruned: onnx.ModelProto, structure: Structure, targets: Sequence[np.ndarray], feeds: Sequence[Feeds]
) -> None:
    """Solve the matrix and bias that read `structure`, in place in `pruned`, to approximate `targets`.

    min ||x w' + b' - targets||^2 / ||targets||^2 + ridge ||w' - w||^2 over the tokens of `feeds`, x as the pruned graph
    has it. Each token has the same weight: a few have outputs a hundred times those of others (Sun et al., Massive
    Activations in Large Language Models, 2024) and would dominate, although they are normalised right after. The ridge
    is the one with the least error on every fourth token, which the fit does not use. If none lowers that error,
    nothing is changed: a few hundred tokens do not determine a matrix of a million values.
    """
    weights = {tensor.name: tensor for tensor in pruned.graph.initializer}
    start = numpy_helper.to_array(weights[structure.weight]).astype(np.float64)
    width = len(start) + (structure.bias is not None)
    seen, unseen = (_Normal(np.zeros((width, width)), np.zeros((width, start.shape[1]))) for _ in range(2))
    for values, target, feed in zip(watch(pruned, [structure.source], feeds), targets, feeds, strict=True):
        x = _of_tokens(values[structure.source], feed).astype(np.float64)
        missing = target - x @ start
        x = np.hstack([x, np.ones((len(x), 1))]) if structure.bias is not None else x
        size = 1 / np.maximum(np.linalg.norm(target, axis=1, keepdims=True), MIN_NORM)
        x, missing = x * size, missing * size
        held_out = np.arange(len(x)) % 4 == 3
        seen.add(x[~held_out], missing[~held_out])
        unseen.add(x[held_out], missing[held_out])
    best = min((unseen.error(seen.solve(ridge)), ridge) for ridge in RIDGES)
    if best[0] >= 0:
        return
    change = _Normal(seen.gram + unseen.gram, seen.targets + unseen.targets).solve(best[1])
    solved = (start + change[: len(start)]).astype(np.float32)
    weights[structure.weight].CopyFrom(numpy_helper.from_array(solved, structure.weight))
    if structure.bias is not None:
        bias = numpy_helper.to_array(weights[structure.bias]) + change[-1].astype(np.float32)
        weights[structure.bias].CopyFrom(numpy_helper.from_array(bias.astype(np.float32), structure.bias))


@dataclass
class _Normal:
    """Normal equations of a least-squares problem, summed up call by call: inputs y, residual m."""

    gram: np.ndarray  # y^T y
    targets: np.ndarray  # y^T m

    def add(self, inputs: np.ndarray, missing: np.ndarray) -> None:
        self.gram += inputs.T @ inputs
        self.targets += inputs.T @ missing

    def solve(self, ridge: float) -> np.ndarray:
        """Solve the equations; `ridge` is relative to the mean square of an input."""
        firmness = ridge * max(np.trace(self.gram) / len(self.gram), 1e-12)
        return np.linalg.solve(self.gram + firmness * np.eye(len(self.gram)), self.targets)

    def error(self, change: np.ndarray) -> float:
        """Return the squared error after `change`, less that of no change: below zero where it helps."""
        return float(np.sum(change * (self.gram @ change - 2 * self.targets)))


def _of_tokens(values: np.ndarray, feed: Feeds) -> np.ndarray:
    """Return (batch, sequence, features) as (tokens, features), padding left out."""
    return values.reshape(-1, values.shape[-1])[np.asarray(feed["attention_mask"]).astype(bool).ravel()]


def _matrices(module: torch.nn.Module) -> list[tuple[torch.nn.Module, np.ndarray]]:
    """Return layers with a matrix, and the matrix as a graph has it, (inputs, outputs)."""
    matrices: list[tuple[torch.nn.Module, np.ndarray]] = []
    for layer in module.modules():
        weight = getattr(layer, "weight", None)
        if isinstance(layer, torch.nn.Linear):
            matrices.append((layer, layer.weight.detach().T.contiguous().numpy()))
        elif isinstance(weight, torch.Tensor) and weight.ndim == 2 and type(layer).__name__ == "Conv1D":
            matrices.append((layer, weight.detach().contiguous().numpy()))
    return matrices


def _fingerprint(matrix: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    return matrix.shape, hashlib.sha256(np.ascontiguousarray(matrix).tobytes()).digest()
