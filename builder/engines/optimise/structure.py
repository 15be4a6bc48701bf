"""Units of a graph that can be removed whole: heads of an attention, neurons of a feed-forward.

Because attention is one operator (fused at export), a head is a slice of the three matrices before it and of the one
after it, in every architecture. A neuron is a column of the matrix before an activation and a row of the one after it.
Knows graphs; knows nothing about which units matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from builder.graphs.onnx.graph import Graph, load_whole
from builder.graphs.onnx.operators import ATTENTION
from builder.graphs.onnx.weights import values_of

ELEMENTWISE = ("Gelu", "Relu", "Elu", "Tanh", "Sigmoid", "Erf", "Mul", "Add", "Sub", "Div", "Pow", "Sqrt", "Softplus")


@dataclass(frozen=True)
class Maker:
    """Product, and perhaps its bias, whose output columns are units: names of initialisers."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class Structure:
    """Units side by side in one tensor, `units` x `size` features, read by one product.

    `makers`: what computes the units, those last that decide whether a unit is constant (values, not queries).
    `weight`, `bias`: of the product that reads them, (units * size, outputs) and (outputs,).
    """

    source: str  # the tensor of the units
    units: int
    size: int
    makers: tuple[Maker, ...]
    values: tuple[Maker, ...]
    weight: str
    bias: str | None
    attention: str | None  # the node, where the units are heads

    @property
    def kind(self) -> str:
        return "heads" if self.attention else "neurons"


def open_structures(graph: Graph) -> tuple[onnx.ModelProto, tuple[Structure, ...]]:
    """Return the model, to be changed, and its structures whose matrices serve nothing else, in execution order."""
    model = load_whole(graph.path)
    return model, structures_of(model)


def structures_of(model: onnx.ModelProto) -> tuple[Structure, ...]:
    """Return the structures of `model`, changed in place: each gets its own copy of shared tensors."""
    _unshare(model.graph)
    return _Finder(model.graph).structures()


def _unshare(graph: onnx.GraphProto) -> None:
    """Give each reader its own copy of a vector, or of a matrix of zeros, that several read.

    The exporter stores equal constants once, and those of two layers may be equal (all zero, in a pruned checkpoint)
    and yet be cut apart.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    readers = Counter(name for node in graph.node for name in node.input)
    for node in graph.node:
        for index, name in enumerate(node.input):
            tensor = weights.get(name)
            if tensor is None or readers[name] < 2 or node.op_type not in ("Add", "MatMul"):
                continue
            if len(tensor.dims) == 1 or (len(tensor.dims) == 2 and not values_of(tensor).any()):
                readers[name] -= 1
                node.input[index] = f"{name}.of.{node.output[0]}"
                graph.initializer.append(numpy_helper.from_array(np.array(values_of(tensor)), node.input[index]))


class _Finder:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self.producers = {output: node for node in graph.node for output in node.output}
        self.readers = Counter(name for node in graph.node for name in node.input)
        self.readers.update(output.name for output in graph.output)

    def structures(self) -> tuple[Structure, ...]:
        structures = []
        for node in self.graph.node:
            if node.op_type != "MatMul" or not self._own_matrix(node.input[1]):
                continue
            source, producer = node.input[0], self.producers.get(node.input[0])
            if producer is None or self.readers[source] != 1:
                continue
            bias = self._bias_after(node)
            if producer.op_type == ATTENTION:
                structures.append(self._heads(producer, node.input[1], bias))
            else:
                structures.append(self._neurons(source, node.input[1], bias))
        return tuple(structure for structure in structures if structure is not None)

    def _heads(self, attention: onnx.NodeProto, weight: str, bias: str | None) -> Structure | None:
        makers = [self._maker(name) for name in attention.input[:3]]
        if not all(makers):
            return None
        units = next(a.i for a in attention.attribute if a.name == "num_heads")
        known = tuple(maker for maker in makers if maker is not None)
        size = self.shapes[weight][0] // units
        return Structure(attention.output[0], units, size, known, known[2:], weight, bias, attention.name)

    def _neurons(self, source: str, weight: str, bias: str | None) -> Structure | None:
        makers = self._behind(source, activated=False)
        units = self.shapes[weight][0]
        if not makers or any(self.shapes[maker.weight][1] != units for maker in makers):
            return None
        return Structure(source, units, 1, makers, makers, weight, bias, None)

    def _behind(self, name: str, activated: bool) -> tuple[Maker, ...] | None:
        """Return the products behind elementwise operators; None if something else is there too."""
        maker = self._maker(name) if activated else None
        if maker is not None:
            return (maker,)
        node = self.producers.get(name)
        if node is None or node.op_type not in ELEMENTWISE:
            return None
        behind: list[Maker] = []
        for source in dict.fromkeys(node.input):
            if int(np.prod(self.shapes.get(source, (2,)))) == 1:
                continue  # a scalar constant
            makers = self._behind(source, activated=True)
            if makers is None:
                return None
            behind.extend(makers)
        return tuple(dict.fromkeys(behind))

    def _maker(self, name: str) -> Maker | None:
        """Return the MatMul, with the Add of its bias, that computes `name`; None if others read its tensors."""
        node, bias = self.producers.get(name), None
        if node is not None and node.op_type == "Add":
            vectors = [i for i in node.input if len(self.shapes.get(i, ())) == 1 and self.readers[i] == 1]
            products = [i for i in node.input if i not in vectors]
            if len(vectors) != 1 or len(products) != 1 or self.readers[products[0]] != 1:
                return None
            bias, node = vectors[0], self.producers.get(products[0])
        if node is None or node.op_type != "MatMul" or not self._own_matrix(node.input[1]):
            return None
        return Maker(node.input[1], bias)

    def _own_matrix(self, name: str) -> bool:
        return len(self.shapes.get(name, ())) == 2 and self.readers[name] == 1

    def _bias_after(self, product: onnx.NodeProto) -> str | None:
        for node in self.graph.node:
            if node.op_type == "Add" and product.output[0] in node.input and self.readers[product.output[0]] == 1:
                vectors = [i for i in node.input if len(self.shapes.get(i, ())) == 1 and self.readers[i] == 1]
                return vectors[0] if vectors else None
        return None


def keep_units(model: onnx.ModelProto, structure: Structure, remaining: Sequence[int]) -> Structure:
    """Leave only the units `remaining`, in their order, in place; return the structure as it is then."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}

    def cut(name: str, axis: int) -> None:
        values = numpy_helper.to_array(weights[name])
        size = values.shape[axis] // structure.units
        places = (np.asarray(remaining)[:, None] * size + np.arange(size)).ravel()
        weights[name].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values.take(places, axis)), name))

    for maker in structure.makers:
        cut(maker.weight, 1)
        if maker.bias is not None:
            cut(maker.bias, 0)
    cut(structure.weight, 0)
    for node in model.graph.node:
        if node.name == structure.attention:
            next(a for a in node.attribute if a.name == "num_heads").CopyFrom(
                helper.make_attribute("num_heads", len(remaining))
            )
    del model.graph.value_info[:]  # it contains the earlier sizes
    return replace(structure, units=len(remaining))
