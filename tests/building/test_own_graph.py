"""Graphs of other tools around which the build lays its front: their tensors, their weights and their answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from builder.building.keys import own_files
from builder.building.own_graph import graph_files, own_graph
from builder.building.variants import candidates
from builder.checkpoints.resolve import resolve
from builder.common.errors import SpecError, VerificationError
from builder.common.hashing import sha256_of
from builder.engines import infer_with
from builder.graphs.export.encoder import export
from builder.graphs.onnx.graph import Graph, load_whole, read_graph
from builder.options import BuildSpec, make_spec
from tests.adopted import write_aitune, write_navigator
from tests.tiny_encoders import make_checkpoint
from tests.verified_once import VerifiedOnce

Shape = list[str | int]
ROWS: Shape = ["rows", "tokens"]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
LABELS = {0: "bad", 1: "fair", 2: "good"}


def classifier(
    ids: str = "input_ids", logits: str = "logits", kind: int = INT64, shape: Shape | None = None, labels: int = 3
) -> ModelProto:
    """Return a graph whose logits are the id of the first token times a weight; inner values have the task's names."""
    mask = helper.make_tensor_value_info(ids.replace("input_ids", "attention_mask"), INT64, ROWS)
    inner = "input_ids" if ids != "input_ids" else "first"
    nodes = [
        helper.make_node("Slice", [ids, "start", "end", "axis"], [inner]),
        helper.make_node("Cast", [inner], ["float"], to=FLOAT),
        helper.make_node("MatMul", ["float", "weight"], [logits]),
    ]
    values = [
        numpy_helper.from_array(np.array([v], np.int64), name)
        for name, v in zip(("start", "end", "axis"), (0, 1, 1), strict=True)
    ]
    weight = numpy_helper.from_array(np.arange(1, labels + 1, dtype=np.float32)[None], "weight")
    takes = [helper.make_tensor_value_info(ids, kind, shape or ROWS), mask]
    gives = [helper.make_tensor_value_info(logits, FLOAT, ["rows", labels])]
    graph = helper.make_graph(nodes, "g", takes, gives, [*values, weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def saved(model: ModelProto, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path


@pytest.fixture
def task(tmp_path: Path) -> Graph:
    return read_graph(saved(classifier(), tmp_path / "task" / "model.onnx"))


@pytest.mark.parametrize(
    ("ids", "logits"), [("input_ids", "logits"), ("input_input_ids", "output_logits"), ("input_ids", "output_0")]
)
def test_own_graph_has_the_names_of_the_task(ids: str, logits: str, task: Graph, tmp_path: Path) -> None:
    graph = own_graph(saved(classifier(ids, logits), tmp_path / "own.onnx"), task, tmp_path / "given" / "model.onnx")
    assert (graph.inputs, graph.outputs) == (("input_ids", "attention_mask"), ("logits",))
    onnx.checker.check_model(str(graph.path), full_check=True)
    feeds = {name: np.array([[7, 1]], np.int64) for name in graph.inputs}
    answer = infer_with(graph, 1)(feeds)["logits"]
    np.testing.assert_array_equal(answer, [[7, 14, 21]])


def test_own_graph_accepts_the_inputs_that_it_leaves_out(task: Graph, tmp_path: Path) -> None:
    """Regression: the front sent token types to a graph without them, and the engine refused the call."""
    model = classifier()
    del model.graph.input[1]
    graph = own_graph(saved(model, tmp_path / "own.onnx"), task, tmp_path / "given" / "model.onnx")
    assert graph.inputs == ("input_ids", "attention_mask")
    feeds = {name: np.array([[7, 1]], np.int64) for name in graph.inputs}
    np.testing.assert_array_equal(infer_with(graph, 1)(feeds)["logits"], [[7, 14, 21]])


def test_own_graph_may_compute_an_input_that_it_leaves_out(task: Graph, tmp_path: Path) -> None:
    """Regression: the name of what it computes was that of the declared input, which no engine accepts."""
    model = classifier()
    mask = model.graph.input.pop(1).name
    model.graph.node.insert(0, helper.make_node("Identity", ["input_ids"], [mask]))
    graph = own_graph(saved(model, tmp_path / "own.onnx"), task, tmp_path / "given" / "model.onnx")
    onnx.checker.check_model(str(graph.path), full_check=True)
    feeds = {name: np.array([[7, 1]], np.int64) for name in graph.inputs}
    np.testing.assert_array_equal(infer_with(graph, 1)(feeds)["logits"], [[7, 14, 21]])


def test_own_graph_takes_no_weights_as_inputs(task: Graph, tmp_path: Path) -> None:
    """Regression: a graph of IR version 3 lists its weights among its inputs, and the front knows none of them."""
    model = classifier()
    weights = model.graph.initializer
    model.graph.input.extend(helper.make_tensor_value_info(w.name, w.data_type, list(w.dims)) for w in weights)
    graph = own_graph(saved(model, tmp_path / "own.onnx"), task, tmp_path / "given" / "model.onnx")
    assert graph.inputs == ("input_ids", "attention_mask")


def test_own_graph_with_a_cut_file_of_weights_is_refused(task: Graph, tmp_path: Path) -> None:
    path = with_weights_in("weights", tmp_path)
    (tmp_path / "weights").write_bytes(b"1234")
    with pytest.raises(SpecError, match="cannot be read as ONNX"):
        own_graph(path, task, tmp_path / "given" / "model.onnx")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (classifier(ids="tokens"), "takes tokens, .*the task takes input_ids, attention_mask .*: name them so"),
        (classifier(kind=TensorProto.INT32), "takes input_ids in INT32; the front expects INT64"),
        (classifier(shape=[1, 128]), r"of the fixed shape \[1, 128\]; rows and tokens vary"),
        (classifier(shape=["rows"]), r"of shape \[rows\]; the task has input_ids of shape \[rows, tokens\]"),
        (classifier(labels=2), r"of shape \[rows, 2\]; the checkpoint has logits of shape \[rows, 3\]"),
    ],
)
def test_own_graph_refuses_other_tensors_by_name(model: ModelProto, message: str, task: Graph, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        own_graph(saved(model, tmp_path / "own.onnx"), task, tmp_path / "given" / "model.onnx")


def with_weights_in(location: str, folder: Path) -> Path:
    """Return a graph of `folder` whose weight is in the file `location`, as other exporters name it."""
    model = classifier()
    weight = model.graph.initializer[-1]
    (folder / "weights").write_bytes(weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "12")):
        weight.external_data.add(key=key, value=value)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def test_graph_files_cover_weights_of_any_name(tmp_path: Path) -> None:
    """Regression: weights of a name other than the graph's had no part in the key of a build."""
    path = with_weights_in("weights", tmp_path)
    assert graph_files(path) == [path, tmp_path / "weights"]
    before = own_files(None, path)
    (tmp_path / "weights").write_bytes(np.arange(3, dtype=np.float32).tobytes())
    assert own_files(None, path) != before


def test_own_files_read_a_graph_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each key of a build parsed the whole graph again."""
    path, load, loads = with_weights_in("weights", tmp_path), onnx.load, list[str]()

    def counted(file: str, load_external_data: bool) -> ModelProto:
        loads.append(file)
        return load(file, load_external_data=load_external_data)

    monkeypatch.setattr(onnx, "load", counted)
    files = own_files(None, path)
    assert own_files(None, path) == files
    assert list(files["graph"]) == ["model.onnx", "weights"]
    assert len(loads) == 1
    saved(classifier(), path)
    assert list(own_files(None, path)["graph"]) == ["model.onnx"]


def test_own_graph_reads_weights_that_have_several_names(task: Graph, tmp_path: Path) -> None:
    path = with_weights_in("weights", tmp_path)
    os.link(tmp_path / "weights", tmp_path / "kept")
    given = own_graph(path, task, tmp_path / "given" / "model.onnx")
    np.testing.assert_array_equal(numpy_helper.to_array(load_whole(given.path).graph.initializer[-1]), [[1, 2, 3]])


@pytest.mark.parametrize(
    ("location", "message"),
    [("absent", "weights are in absent, which is not there"), ("../weights", "is outside its folder")],
)
def test_graph_files_refuse_weights_elsewhere(location: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpecError, match=message):
        graph_files(with_weights_in(location, tmp_path / "folder"))


@pytest.fixture(scope="module")
def checkpoint(module_folder: Callable[[str], Path]) -> Path:
    return make_checkpoint(module_folder("checkpoint"), "bert", "text-classification", LABELS)


@pytest.fixture(scope="module")
def verified(checkpoint: Path, module_folder: Callable[[str], Path]) -> VerifiedOnce:
    return VerifiedOnce(make_spec(model=str(checkpoint), name="tuned"), module_folder("verified"))


@pytest.fixture(scope="module")
def tuned(checkpoint: Path, module_folder: Callable[[str], Path]) -> ModelProto:
    """Return the checkpoint as ONNX, its tensors named as AITune names them."""
    folder = module_folder("tuned")
    model = load_whole(export(resolve(make_spec(model=str(checkpoint))), folder).graph.path)
    takes = [(value, f"input_{value.name}") for value in model.graph.input]
    gives = [(value, f"output_{value.name}") for value in model.graph.output]
    names = {value.name: name for value, name in takes + gives}
    for value, name in takes + gives:
        value.name = name
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return model


def spec_of(verified: VerifiedOnce, graph: Path, folder: Path) -> BuildSpec:
    return make_spec(model=verified.model, name="tuned", graph=graph, output=folder / "repository")


@pytest.mark.parametrize("write", [write_aitune, write_navigator])
def test_build_serves_the_graph_of_another_tool(
    write: Callable[[Path, Path, str], Path], verified: VerifiedOnce, tuned: ModelProto, tmp_path: Path
) -> None:
    model = write(saved(tuned, tmp_path / "tuned.onnx"), tmp_path / "theirs", "encoder")
    report = verified.build(spec_of(verified, model, tmp_path))
    assert report.chosen == "as given"
    assert report.graph_files == {"model.onnx": sha256_of(tmp_path / "tuned.onnx")}
    published = read_graph(tmp_path / "repository" / "tuned" / "1" / "model.onnx")
    assert published.inputs == ("input_ids", "attention_mask", "token_type_ids")
    assert published.outputs == ("logits",)


def test_build_refuses_a_graph_that_changed_after_it_was_read(
    verified: VerifiedOnce, tuned: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the report had the SHA-256 of a file that was not the served one."""
    file = saved(tuned, tmp_path / "tuned.onnx")

    def then_changed(*arguments: Any) -> Graph:
        graph = own_graph(*arguments)
        other = ModelProto.FromString(tuned.SerializeToString())
        other.producer_version = "another"
        saved(other, file)
        return graph

    monkeypatch.setattr(candidates, "own_graph", then_changed)
    with pytest.raises(SpecError, match=r"tuned\.onnx changed while it was verified"):
        verified.build(spec_of(verified, file, tmp_path))
    assert not (tmp_path / "repository" / "tuned").exists()


def test_build_fails_for_a_graph_with_other_answers(verified: VerifiedOnce, tuned: ModelProto, tmp_path: Path) -> None:
    other = ModelProto.FromString(tuned.SerializeToString())
    weight = next(tensor for tensor in other.graph.initializer if len(LABELS) in tensor.dims)
    weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), weight.name))
    model = write_aitune(saved(other, tmp_path / "tuned.onnx"), tmp_path / "theirs", "encoder")
    with pytest.raises(VerificationError, match="as given"):
        verified.build(spec_of(verified, model, tmp_path))
    assert not (tmp_path / "repository" / "tuned").exists()
