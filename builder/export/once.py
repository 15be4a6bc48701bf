"""torch.onnx.export without the work that it does again at every export, or again for every node.

What comes out is the same: the table of operators is made once a process instead of once an export; an operator has
the type that it had when it was captured instead of being run once more to find it; and a rewriting rule is tried
where the operator is that it ends in, instead of at every node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir
import torch
from onnxscript.rewriter import RewriteRule
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes.type_promotion import _TypePromotionInterpreter, get_type_promotion_rule


@contextmanager
def nothing_twice() -> Iterator[None]:
    """Export without repetition within the `with`."""
    replaced: list[tuple[Any, str, object]] = [
        (ONNXRegistry, "from_torchlib", staticmethod(_operators)),
        (_TypePromotionInterpreter, "run_node", _promoted),
        (RewriteRule, "try_rewrite", _rewritten),
    ]
    before = [vars(owner)[name] for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)


@functools.cache
def _operators(opset_version: int) -> ONNXRegistry:
    """Nobody changes it: an export that brings no operators of its own only reads it."""
    return _from_torchlib(opset_version=opset_version)


def _promoted(interpreter: _TypePromotionInterpreter, node: torch.fx.Node) -> Any:
    """The value of a node after its promotion, as the nodes after it see it: it has the type that it was captured with,
    since the pass casts the result of a promoted operator back to that."""
    if "val" not in node.meta:
        return _run_node(interpreter, node)
    if rule := get_type_promotion_rule(node, interpreter.type_promotion_table):
        with interpreter._set_current_node(node):
            interpreter._maybe_promote_node(node, rule)
    return node.meta["val"]


def _rewritten(rule: RewriteRule, model: object, graph: object, node: onnx_ir.Node, **options: Any) -> Any:
    """What replaces the pattern whose first output is made by `node`, if the pattern is there."""
    if not rule._target_pattern.output_nodes[0].op.matches(node.op_type):
        return None
    return _try_rewrite(rule, model, graph, node, **options)


_from_torchlib: Callable[..., ONNXRegistry] = ONNXRegistry.from_torchlib
_run_node: Callable[..., Any] = _TypePromotionInterpreter.run_node
_try_rewrite: Callable[..., Any] = RewriteRule.try_rewrite
