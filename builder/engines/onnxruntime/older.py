"""Rewrites a graph for the ONNX Runtime that serves it, so that it computes what this build's own computes.

`local_window_size` W of GroupQueryAttention lets W + 1 keys count before ONNX Runtime 1.24, and W from then on
(measured on 1.18.0 to 1.31.1; microsoft/onnxruntime, pull request 25927). Knows graphs and versions of ONNX Runtime;
knows nothing about models.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import onnx

from builder.common.releases import version_tuple
from builder.graphs.onnx.graph import Graph, nodes_of, read_graph

CHANGED = "1.24.0"
WINDOW = "local_window_size"


def for_runtime(graph: Graph, version: str, folder: Path) -> Graph:
    """Return `graph`, which this build's ONNX Runtime read, for `version`; unchanged if both compute the same.

    The metadata of a changed graph names the versions that it is for; the emitted code refuses to load it on others.
    """
    model = onnx.load(str(graph.path), load_external_data=False)
    windows = _windows(model)
    if not windows:
        return graph
    older = version_tuple(version) < version_tuple(CHANGED)
    for attribute in windows:
        attribute.i -= older
    model.metadata_props.add(key="onnxruntime_below" if older else "onnxruntime_from", value=CHANGED)
    target = folder / f"for-{version}"
    target.mkdir(parents=True, exist_ok=True)
    for file in graph.files:
        if file != graph.path:  # the weights, as they are
            os.link(file, target / file.name)
    path = target / graph.path.name
    path.write_bytes(model.SerializeToString(deterministic=True))
    return replace(graph, path=path, size=read_graph(path).size)


def unmarked_windows(path: Path) -> bool:
    """Return True if the graph in `path` has windows without metadata of the ONNX Runtime that they are for."""
    model = onnx.load(str(path), load_external_data=False)
    marks = {entry.key for entry in model.metadata_props} & {"onnxruntime_below", "onnxruntime_from"}
    return not marks and bool(_windows(model))


def _windows(model: onnx.ModelProto) -> list[onnx.AttributeProto]:
    return [a for node in nodes_of(model.graph) for a in node.attribute if a.name == WINDOW and a.i > 0]
