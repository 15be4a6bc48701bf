"""A decoder's step for beam searches, and for the rows beside them: each runs only the part that it needs."""

from __future__ import annotations

from pathlib import Path

from builder.graphs.onnx.beam_branches import attend_alone
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.likeliest import add_likeliest


def for_searches(graph: Graph, beams: int, folder: Path) -> Graph:
    """Write `graph`, the step of an encoder-decoder for up to `beams` rows per text, into `folder` as it is served."""
    model = load_graph(graph.path)
    add_likeliest(model)
    attend_alone(model, beams)
    return save_graph(model, folder / "searches" / graph.path.name)


def finding_likeliest(graph: Graph) -> Graph:
    """Return `graph`, a decoder's, with the outputs that a search reads: in its own file, whose weights stay there."""
    model = load_graph(graph.path)
    add_likeliest(model)
    return save_graph(model, graph.path)
