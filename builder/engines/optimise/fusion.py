"""LayerNormalization, Gelu and bias fusions by ONNX Runtime's own optimiser, applied once and saved.

Knows ONNX files; attention is fused before this, at export.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx.helper import get_attribute_value
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from builder.common.errors import ExportError
from builder.common.workplace import require_disk_space
from builder.engines.onnxruntime import save_optimised
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.operators import DOMAIN, STANDARD

STANDARD_DOMAINS = (*STANDARD, DOMAIN)


def fuse(graph: Graph, folder: Path, level: str = "O2") -> Graph:
    """Write the fused graph into `folder`, at a level of Optimum's.

    O1: basic rewrites; O2: fusions too; O3: an approximate GELU too. Attention is fused at export, at every level. Many
    weights stay in the file of `graph`.

    Raises ExportError if it would need an operator no release has, and RepositoryError if the disk is full:
    ONNX Runtime does not report a full disk.
    """
    path = folder / f"fused-{level}" / graph.path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    for file in path.parent.glob(f"{path.stem}.*"):  # of an earlier build, which others may have too
        file.unlink()
    require_disk_space(graph.path.stat().st_size, f"the files of {graph.path.name}, fused,")
    save_optimised(graph.path, path, extended=level != "O1", approximate_gelu=level in ("O3", "O4"))
    model = load_graph(path, graph.path.parent)
    _tidy(model, graph.ir_version)
    return save_graph(model, path)


def _tidy(model: onnx.ModelProto, ir_version: int) -> None:
    """Make the model readable by any release, in place. Raises ExportError if none has an operator."""
    used = {node.domain for node in model.graph.node} | {""}
    foreign = used - set(STANDARD_DOMAINS)
    if foreign:
        raise ExportError(f"the optimiser used operators of {', '.join(sorted(foreign))}, which stock servers lack")
    opsets = [entry for entry in model.opset_import if entry.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    _drop_defaults(model)
    for node in model.graph.node:
        del node.metadata_props[:]  # of PyTorch's export: still there if nothing was optimised
    model.ir_version = ir_version
    model.producer_version = ""


def _drop_defaults(model: onnx.ModelProto) -> None:
    """Drop attributes that have their default values.

    The optimiser writes all of them, also those that an operator lacks in an older release, which would then refuse
    the graph.
    """
    defaults = {
        (schema.name, name): onnx.AttributeProto.FromString(attribute._default_value)
        for schema in get_all_operator_schema()
        if schema.domain == DOMAIN
        for name, attribute in schema.attributes.items()
        if not attribute.required
    }
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        for attribute in list(node.attribute):
            default = defaults.get((node.op_type, attribute.name))
            if default is not None and default.name and get_attribute_value(default) == get_attribute_value(attribute):
                node.attribute.remove(attribute)
