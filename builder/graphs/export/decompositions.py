"""Decompose operators that ONNX lacks, node by node.

torch.onnx.export decomposes them in a second trace of the whole program, which takes half of the time of an export.
Knows the nodes of a program and the memory of their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch.utils import _pytree

ATEN = torch.ops.aten
CASTS = frozenset({ATEN.to.device, ATEN.to.dtype, ATEN.to.dtype_layout, ATEN.to.other})
RENAMED = {  # to the one operator that torch's table decomposes each into
    ATEN.__and__.Tensor: ATEN.bitwise_and.Tensor,
    ATEN.item.default: ATEN._local_scalar_dense.default,
    ATEN.min.other: ATEN.minimum.default,
    ATEN.max.other: ATEN.maximum.default,
}
WRITES = {  # to the operator that returns a new tensor instead
    ATEN.add_.Tensor: ATEN.add.Tensor,
    ATEN.div_.Tensor: ATEN.div.Tensor,
    ATEN.mul_.Tensor: ATEN.mul.Tensor,
    ATEN.scatter_.src: ATEN.scatter.src,
    ATEN.scatter_.value: ATEN.scatter.value,
}


def decompose(graph: torch.fx.Graph) -> None:
    """Replace in place the operators of transformers' models that need no trace for it."""
    inputs = _decompose_dropouts(graph)
    for node in list(graph.nodes):
        if node.target in RENAMED:
            node.target = RENAMED[node.target]
        elif node.target in WRITES and _keeps_type(node) and _writes_unseen(node, inputs):
            node.target = WRITES[node.target]
        elif node.target == ATEN.copy_.default:
            _decompose_part(graph, node, inputs)
        elif node.target == ATEN.square.default:
            node.target, node.args = ATEN.mul.Tensor, (node.args[0], node.args[0])
        elif node.target == ATEN.index_add.default and not node.kwargs:
            _decompose_index_add(node)
        elif any(user.op == "output" for user in node.users):
            continue
        elif node.target in CASTS:
            _decompose_cast(graph, node)
        elif node.target == ATEN.detach_.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _decompose_dropouts(graph: torch.fx.Graph) -> dict[int, int]:
    """Remove dropouts without effect; return, by the storage of each result, that of its input.

    PyTorch returns the input itself, so that writes into the result change it. torch.export captures a copy of it
    (torch/_decomp/decompositions.py, dropout, 2.13).
    """
    inputs: dict[int, int] = {}
    for node in list(graph.nodes):
        if node.target != ATEN.dropout.default or any(user.op == "output" for user in node.users):
            continue
        source, probability, is_training = node.args
        if is_training and probability:
            continue
        assert isinstance(source, torch.fx.Node)
        inputs.update({own: read for own in _memory(node, inputs) for read in _memory(source, inputs)})
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    return inputs


def _decompose_cast(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Turn `Tensor.to` into a cast, or into nothing if its tensor has that type already and is not to be copied."""
    source, dtype = node.args[0], node.meta["val"].dtype
    assert isinstance(source, torch.fx.Node)
    if source.meta["val"].dtype != dtype or _copies(node):
        with graph.inserting_before(node):
            source = graph.call_function(ATEN._to_copy.default, (source,), {"dtype": dtype})
        source.meta = dict(node.meta)
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def _copies(node: torch.fx.Node) -> bool:
    """Return True if `node` is a `Tensor.to(copy=True)`."""
    target: Any = node.target
    place = [argument.name for argument in target._schema.arguments].index("copy")
    return bool(node.args[place] if place < len(node.args) else node.kwargs.get("copy"))


def _decompose_index_add(node: torch.fx.Node) -> None:
    """Turn an addition to some rows into one to the elements of those rows."""
    added, axis, index, source = node.args
    assert isinstance(axis, int)
    before = axis % node.meta["val"].dim()
    node.target = ATEN.index_put.default
    node.args = (added, [*[None] * before, index], source, True)


def _decompose_part(graph: torch.fx.Graph, node: torch.fx.Node, inputs: Mapping[int, int]) -> None:
    """Turn `whole[first:last] += values`, which Python completes by a copy of the part to itself, into a new whole.

    Outputs of a program keep the names of their nodes, so a whole that is one stays.
    """
    part, changed = node.args[:2]
    if not isinstance(changed, torch.fx.Node) or changed.target not in WRITES:
        return
    written = changed.args[0]
    if not (_is_slice(part) and _is_slice(written) and part.args == written.args):
        return
    whole, *place = part.args
    assert isinstance(whole, torch.fx.Node)
    after = [user for user in whole.users if node < user]
    own = {whole: {written, part, *after}, written: {changed}, changed: {node}, part: {node}}
    if any(user > written and user not in own.get(one, ()) for one in _sharing(node, inputs) for user in one.users):
        return
    if any(user.op == "output" for user in after):
        return
    if whole.op != "call_function" or not _keeps_type(changed) or node.users:
        return
    changed.target = WRITES[changed.target]
    node.target, node.args = ATEN.slice_scatter.default, (whole, changed, *place)
    node.meta["val"] = whole.meta["val"]
    for user in after:
        user.replace_input_with(whole, node)
    graph.erase_node(part)


def _is_slice(node: object) -> TypeGuard[torch.fx.Node]:
    return isinstance(node, torch.fx.Node) and node.target == ATEN.slice.Tensor


def _keeps_type(node: torch.fx.Node) -> bool:
    """Return True if `node` writes values of the type of the memory, which another operator would promote."""
    other = node.args[1]
    values = other.meta["val"] if isinstance(other, torch.fx.Node) else None
    return values is None or (isinstance(values, torch.Tensor) and values.dtype == node.meta["val"].dtype)


def _writes_unseen(node: torch.fx.Node, inputs: Mapping[int, int]) -> bool:
    """Return True if the nodes after `node` see the memory that it writes into only through its result."""
    return all(one.op == "call_function" and all(user <= node for user in one.users) for one in _sharing(node, inputs))


def _sharing(node: torch.fx.Node, inputs: Mapping[int, int]) -> list[torch.fx.Node]:
    """Return the nodes before `node` whose tensors share the memory that it writes into."""
    written = node.args[0]
    assert isinstance(written, torch.fx.Node)
    memory = _memory(written, inputs)
    return [one for one in node.graph.nodes if one < node and memory & _memory(one, inputs)]


def _memory(node: torch.fx.Node, inputs: Mapping[int, int]) -> set[int]:
    """Return the storages of the tensors of `node`: views share one, and `inputs` has those of removed dropouts."""
    tensors = _pytree.tree_leaves(node.meta.get("val"))
    storages = (one.untyped_storage()._cdata for one in tensors if isinstance(one, torch.Tensor))
    return {inputs.get(storage, storage) for storage in storages}
