"""Store the tables that all graphs of a model have, above all its embeddings, once in a file that each graph maps.

Knows ONNX files; knows nothing about the meaning of a table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import TensorProto

from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.weights import moved, pieces, size_of

FILE = "shared.data"
MIN_TABLE_BYTES = 1_000_000  # bytes of a table that is worth a place of its own

Content = tuple[int, tuple[int, ...], str]  # ONNX's type, shape and hash


def with_shared_tables(graphs: Sequence[Graph], folder: Path) -> list[Graph]:
    """Write `graphs` into `folder`, with the tables that all of them have in `FILE` there.

    Return them unchanged where there are no such tables.
    """
    models = [load_graph(graph.path) for graph in graphs]
    contents = [
        {tensor.name: _content(tensor) for tensor in model.graph.initializer if size_of(tensor) >= MIN_TABLE_BYTES}
        for model in models
    ]
    common = set.intersection(*(set(each.values()) for each in contents))
    if not common:
        return list(graphs)
    folder.mkdir(parents=True, exist_ok=True)
    tables = _written(models[0], contents[0], common, folder / FILE)
    for graph, model, each in zip(graphs, models, contents, strict=True):
        own = {name: tables[content] for name, content in each.items() if content in common}
        _save(model, own, folder / graph.path.name)
    return [replace(graph, path=folder / graph.path.name, beside=(folder / FILE,)) for graph in graphs]


def _content(tensor: TensorProto) -> Content:
    digest = hashlib.sha256()
    for piece in pieces(tensor):
        digest.update(piece)
    return tensor.data_type, tuple(tensor.dims), digest.hexdigest()


def _written(
    model: onnx.ModelProto, contents: Mapping[str, Content], common: set[Content], path: Path
) -> dict[Content, TensorProto]:
    """Return each of the `common` contents as a tensor whose values are in `path`."""
    tables: dict[Content, TensorProto] = {}
    with path.open("wb") as file:
        for tensor in model.graph.initializer:
            content = contents.get(tensor.name)
            if content is not None and content in common and content not in tables:
                tables[content] = moved(tensor, file, path)
    return tables


def _save(model: onnx.ModelProto, tables: Mapping[str, TensorProto], path: Path) -> None:
    """Write `model` with `tables`, by name, in place of its own."""
    others = [tensor for tensor in model.graph.initializer if tensor.name not in tables]
    del model.graph.initializer[:]
    model.graph.initializer.extend(others)
    save_graph(model, path)
    written = onnx.load(str(path), load_external_data=False)
    for name, table in tables.items():
        written.graph.initializer.append(table)
        written.graph.initializer[-1].name = name
    path.write_bytes(written.SerializeToString(deterministic=True))
