"""External weights: a graph behaves the same as with inline weights, and rewriting it does not rewrite their file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from builder.engines.onnxruntime import open_session
from builder.engines.openvino.lowering import page_attention
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import export_decoder
from builder.graphs.export.program import to_onnx
from builder.graphs.onnx.graph import Graph, load_graph, load_whole, save_graph
from builder.graphs.onnx.likeliest import finding_likeliest
from builder.graphs.onnx.weights import computed, computing, made_of, place_of, values_of
from builder.options import WeightOptions
from tests.decoders import make_decoder


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4-weights"])
def test_graph_has_the_same_weights_inside_and_in_a_file(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for name, limit in (("inside", 10**9), ("beside", 1000)):
        monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", limit)
        if (precision, name) == ("fp32", "beside"):  # cached exports have inline weights
            monkeypatch.setattr("builder.graphs.export.program.to_onnx", to_onnx)
        graph = fuse(export_decoder(make_decoder("llama"), tmp_path / name, 128).graph, tmp_path / name)
        if precision != "fp32":
            graph = quantise_weights(graph, precision, WeightOptions(32, True), tmp_path / name).graph
        assert len(graph.files) == 1 + (name == "beside")
        model = load_whole(graph.path)
        outputs.append({tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer})
        open_session(graph.path, threads=1)
    inside, beside = outputs
    assert inside.keys() == beside.keys()
    for name, values in inside.items():
        np.testing.assert_array_equal(values, beside[name])


def test_derived_weights_do_not_go_into_the_file_of_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", 1000)
    wide = np.arange(2048, dtype=np.float32).reshape(2, 1024)
    graph = onnx.helper.make_graph([], "g", [], [], [onnx.numpy_helper.from_array(wide, "wide")])
    saved = save_graph(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    before = (tmp_path / "model.onnx.data").read_bytes()
    (tensor,) = load_graph(saved.path).graph.initializer
    assert place_of(tensor) is not None
    np.testing.assert_array_equal(values_of(tensor), wide)
    derived = made_of(tensor, "tall", (1024, 2), lambda rows: wide[:, rows].T)
    assert place_of(derived) is None
    np.testing.assert_array_equal(values_of(derived), wide.T)
    assert (tmp_path / "model.onnx.data").read_bytes() == before


def test_computed_weight_is_written_in_pieces_and_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", 1000)
    monkeypatch.setattr("builder.graphs.onnx.weights.PIECE", 4096)
    wide, reads = np.arange(33 * 1000, dtype=np.float32).reshape(33, 1000), []

    def rows(places: slice) -> np.ndarray:
        reads.append(places)
        return wide[:, places].T

    with computing():
        tensor = computed("tall", onnx.TensorProto.FLOAT, (1000, 33), rows)
        twice = made_of(tensor, "twice", (1000, 66), lambda places: np.concatenate([rows(places)] * 2, axis=1))
        assert not tensor.raw_data
        assert not twice.raw_data
        assert reads == []
        model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor, twice]))
        saved = save_graph(model, tmp_path / "model.onnx")
    assert len(reads) > 30
    assert max(min(places.stop, 1000) - places.start for places in reads) < 40
    tall, both = onnx.load(str(saved.path)).graph.initializer
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tall), wide.T)
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(both), np.concatenate([wide.T, wide.T], axis=1))
    with pytest.raises(FileNotFoundError):
        values_of(tensor)


def test_new_weights_are_appended_to_the_file_of_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving a graph to its own path neither rewrites nor loses its weights."""
    monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", 1000)
    values = {name: np.full(1024, number, np.float32) for number, name in enumerate(("first", "second"))}
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in values.items()]
    saved = save_graph(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], tensors)), tmp_path / "m.onnx")
    data = tmp_path / "m.onnx.data"
    before, node = data.read_bytes(), data.stat().st_ino
    model = load_graph(saved.path)
    values["third"] = np.full(2048, 3, np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(values["third"], "third"))
    save_graph(model, saved.path)
    assert data.stat().st_ino == node
    assert data.read_bytes().startswith(before)
    read = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(str(saved.path)).graph.initializer}
    assert read.keys() == values.keys()
    for name, array in values.items():
        np.testing.assert_array_equal(read[name], array)


def test_shared_weights_file_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache may contain a hard link to a file of an earlier build in the same folder."""
    monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", 1000)
    exported = export_decoder(make_decoder("llama"), tmp_path, 128).graph
    (tmp_path / "others").mkdir()
    for file in fuse(exported, tmp_path).files:
        os.link(file, tmp_path / "others" / file.name)
    before = {file.name: file.read_bytes() for file in (tmp_path / "others").iterdir()}
    assert len(before) == 2
    for level in ("O1", "O2"):
        fused = fuse(exported, tmp_path, level)
        assert not fused.path.samefile(tmp_path / "others" / fused.path.name)
    assert {file.name: file.read_bytes() for file in (tmp_path / "others").iterdir()} == before


def _saved(path: Path, **values: np.ndarray) -> Graph:
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in values.items()]
    return save_graph(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], tensors)), path)


def _read(graph: Graph) -> dict[str, np.ndarray]:
    tensors = load_whole(graph.path).graph.initializer
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Return two weights, large enough to be stored externally."""
    monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", 1000)
    return {name: np.full(1 << 16, number, np.float32) for number, name in enumerate(("first", "second"))}


def test_graphs_of_one_export_store_its_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", 1000)
    exported = export_decoder(make_decoder("llama"), tmp_path, 128).graph
    fused = fuse(exported, tmp_path)
    weights, before = exported.path.with_name("model.onnx.data"), _read(exported)
    for graph in (fused, fuse(exported, tmp_path, "O1"), finding_likeliest(fused), page_attention(exported, tmp_path)):
        assert graph.path.with_name("model.onnx.data").samefile(weights), graph.path
        same = _read(graph)
        for name in before.keys() & same.keys():
            np.testing.assert_array_equal(same[name], before[name])
    for name, values in _read(exported).items():
        np.testing.assert_array_equal(values, before[name])


def test_graph_stores_few_weights_of_its_own_inside(tmp_path: Path, large: dict[str, np.ndarray]) -> None:
    saved = _saved(tmp_path / "a" / "m.onnx", **large)
    model, own = load_graph(saved.path), np.arange(1000, dtype=np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(own, "own"))
    other = save_graph(model, tmp_path / "b" / "m.onnx")
    assert (tmp_path / "b" / "m.onnx.data").samefile(tmp_path / "a" / "m.onnx.data")
    for name, values in {**large, "own": own}.items():
        np.testing.assert_array_equal(_read(other)[name], values)


@pytest.mark.parametrize("how", ["one is left out", "one is new"])
def test_graph_of_other_weights_has_its_own_file(how: str, tmp_path: Path, large: dict[str, np.ndarray]) -> None:
    """The new file contains only the weights that the graph reads."""
    saved = _saved(tmp_path / "a" / "m.onnx", **large)
    model = load_graph(saved.path)
    wanted = dict(large)
    if how == "one is new":
        wanted["second"] = np.full(1 << 16, 7, np.float32)
        model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(wanted["second"], "second"))
    else:
        del model.graph.initializer[1], wanted["second"]
    other = save_graph(model, tmp_path / "b" / "m.onnx")
    assert not (tmp_path / "b" / "m.onnx.data").samefile(tmp_path / "a" / "m.onnx.data")
    assert other.size < 1.1 * sum(array.nbytes for array in wanted.values())
    for graph, expected in ((other, wanted), (saved, large)):
        for name, values in expected.items():
            np.testing.assert_array_equal(_read(graph)[name], values)


def test_hard_linked_weights_file_is_not_appended_to(tmp_path: Path, large: dict[str, np.ndarray]) -> None:
    saved, more = _saved(tmp_path / "m.onnx", **large), np.full(1 << 16, 3, np.float32)
    os.link(tmp_path / "m.onnx.data", tmp_path / "kept")
    before, model = (tmp_path / "kept").read_bytes(), load_graph(saved.path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(more, "third"))
    again = save_graph(model, saved.path)
    assert (tmp_path / "kept").read_bytes() == before
    for name, values in {**large, "third": more}.items():
        np.testing.assert_array_equal(_read(again)[name], values)


def test_changed_weights_are_not_taken_for_the_original_ones(tmp_path: Path, large: dict[str, np.ndarray]) -> None:
    """The kernel with its folded factor is stored inline, and all other weights stay in their file."""
    numbers = np.random.default_rng(0).standard_normal((16, 16, 3)).astype(np.float32)
    weights = {"matrix": large["second"].reshape(64, -1), "kernel": numbers, "factor": np.array(3, np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["convolved"]),
        helper.make_node("Mul", ["convolved", "factor"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "matrix"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 16, None]) for name in "xy"]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    saved = save_graph(model, tmp_path / "exported" / "m.onnx")
    fused = fuse(saved, tmp_path)
    assert fused.operators["Mul"] == 0
    assert fused.path.with_name("m.onnx.data").samefile(saved.path.with_name("m.onnx.data"))
    x = np.random.default_rng(1).standard_normal((1, 16, 66)).astype(np.float32)
    before, after = (open_session(one.path, threads=1).run(None, {"x": x})[0] for one in (saved, fused))
    np.testing.assert_allclose(after, before, rtol=1e-4)
