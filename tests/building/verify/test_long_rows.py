"""The additional long row of a build exceeds every window, and fails if a window is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from transformers import PreTrainedModel

from builder.building.verify.generation import geometry_of
from builder.building.verify.long_rows import (
    MAX_ROW_TOKENS,
    ask_long_row,
    long_row,
    refuse_wrong_long_row,
    unreached,
    windows,
)
from builder.common.errors import VerificationError
from builder.engines.decoding import opened
from builder.graphs.export.decoder import cache_shapes, export_decoder
from builder.graphs.onnx.graph import Graph, read_graph
from tests.decoders import make_decoder
from tests.tiny_encoders import VOCABULARY


def test_long_row_passes_the_window_edge_token_by_token() -> None:
    config = make_decoder("mistral", sliding_window=700).config
    row = long_row(config, 100, 4096)
    assert len(row.tokens) == 700 + 256
    assert set(range(696, 705)) <= set(row.cuts)
    assert max(b - a for a, b in zip(row.cuts, row.cuts[1:], strict=False)) <= 256
    assert len(long_row(config, 100, 120).tokens) == 120


def test_long_row_warns_of_a_window_beyond_its_end() -> None:
    config = make_decoder("mistral", sliding_window=32768).config
    assert windows(config) == (32768,)
    assert len(long_row(config, 100, 40000).tokens) <= MAX_ROW_TOKENS
    assert "32768" in unreached(config, 40000)[0]
    assert unreached(config, 8192) == ()


@pytest.fixture(scope="module")
def windowed(module_folder: Callable[[str], Path]) -> tuple[Path, Graph]:
    folder = module_folder("windowed")
    return folder, export_decoder(make_decoder("mistral", num_hidden_layers=2), folder, 256).graph


def refuse_wrong_in(model: PreTrainedModel, graph: Graph) -> None:
    geometry = geometry_of(cache_shapes(model), 1, 256, VOCABULARY)
    refuse_wrong_long_row(ask_long_row(model, 256), opened(graph, 1)(geometry))


@pytest.mark.parametrize("wrong", [None, 15, 17, -1])
def test_graph_with_another_window_is_refused(windowed: tuple[Path, Graph], wrong: int | None) -> None:
    folder, graph = windowed
    model = make_decoder("mistral", num_hidden_layers=2)
    if wrong is None:
        refuse_wrong_in(model, graph)
        return
    proto = onnx.load(graph.path)
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "local_window_size":
                attribute.i = wrong
    path = folder / f"window_{wrong}.onnx"
    onnx.save(proto, path)
    with pytest.raises(VerificationError, match=r"after 1\d tokens .* windows in its configuration: 16"):
        refuse_wrong_in(model, replace(read_graph(path), path=path))
