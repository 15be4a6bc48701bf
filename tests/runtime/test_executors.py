"""Engines of encoders in process: equal numbers, in the verified precision."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from builder.building.families import encoder
from builder.common.errors import SpecError
from builder.common.machine import cpu
from builder.engines import graph_engine, openvino
from builder.engines.onnxruntime import loop_session
from builder.graphs.onnx.graph import Graph, save_graph
from builder.options import make_spec
from builder.repository.layout.encoder import bucketed, in_process
from builder.runtime.contract import FILE, Batching, ContractError, EncoderServing, Session, dump, load_encoder
from builder.runtime.cores import cores
from builder.runtime.encoder.executors import onnxruntime as on_onnxruntime
from builder.runtime.encoder.executors import openvino as on_openvino
from builder.runtime.encoder.front import open_front
from builder.runtime.generation.service import make_executor
from tests.servings import decoder_serving, encoder_serving

FEEDS = {"input_ids": np.array([[3, 1, 2], [5, 0, 0]]), "attention_mask": np.array([[1, 1, 1], [1, 0, 0]])}
SUMS = np.array([[6.0], [5.0]], np.float32)  # sum of the tokens without padding


@pytest.fixture(scope="module")
def graphs(module_folder: Callable[[str], Path]) -> Mapping[str, Graph]:
    """Return for each engine a graph that sums the tokens of each row."""
    folder = module_folder("graphs")
    nodes = [
        helper.make_node("Mul", ["input_ids", "attention_mask"], ["kept"]),
        helper.make_node("Cast", ["kept"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["real", "axis"], ["features"], keepdims=1),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "tokens"]) for name in FEEDS]
    output = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["rows", 1])
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    model = helper.make_model(
        helper.make_graph(nodes, "sums", inputs, [output], [axis]),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=9,
    )
    saved = save_graph(onnx.shape_inference.infer_shapes(model), folder / "model.onnx")
    arithmetic = openvino.arithmetic_on(cpu()["flags"])
    return {
        "onnxruntime": saved,
        "openvino": openvino.convert(saved, folder / "model.xml", arithmetic, half_weights=False),
    }


def _serving(graph: Graph, spinning: bool = False) -> EncoderServing:
    spec = make_spec(model="org/m", threads=1, serving={"spinning": spinning})
    return in_process(spec, encoder_serving(engine=None), graph, [{"input_ids": [5], "attention_mask": [1]}])


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_executor_runs_the_graph_in_its_folder(engine: str, graphs: Mapping[str, Graph], tmp_path: Path) -> None:
    graph = graphs[engine]
    (tmp_path / FILE).write_text(dump(_serving(graph)))
    serving = load_encoder(tmp_path)
    assert (serving.executor, serving.model, serving.engine) == (engine, graph.path.name, None)
    module = on_onnxruntime if engine == "onnxruntime" else on_openvino
    executor = module.Executor(graph.path.parent, serving)
    first = executor.infer(FEEDS)["features"]
    executor.infer({name: values[::-1] for name, values in FEEDS.items()})
    np.testing.assert_array_equal(first, SUMS, "an answer outlives the next call")


@pytest.mark.parametrize("spinning", [True, False])
def test_spinning_threads_stop_when_a_call_ends(
    spinning: bool, graphs: Mapping[str, Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spinning threads would occupy cores that send the answer; those of a decoder may spin until its next step."""
    graph, stated = graphs["onnxruntime"], {}
    set_entry = ort.SessionOptions.add_session_config_entry

    def noting(options: ort.SessionOptions, key: str, value: str) -> None:
        stated[key] = value
        set_entry(options, key, value)

    monkeypatch.setattr(ort.SessionOptions, "add_session_config_entry", noting)
    serving = _serving(graph, spinning)
    executor = on_onnxruntime.Executor(graph.path.parent, serving)
    np.testing.assert_array_equal(executor.infer(FEEDS)["features"], SUMS)
    assert (stated["session.intra_op.allow_spinning"], stated.get("session.force_spinning_stop")) == (
        ("1", "1") if spinning else ("0", None)
    )
    assert "session.force_spinning_stop" not in loop_session(2, spinning).entries


@pytest.mark.parametrize("alike", [None, "length"])
def test_buckets_are_for_openvino_only(alike: Any, graphs: Mapping[str, Graph]) -> None:
    serving = encoder_serving(batching=Batching(64, 8, 4, alike=alike))
    assert bucketed(serving, graphs["onnxruntime"]) == serving
    shapes = bucketed(serving, graphs["openvino"]).batching.buckets
    assert shapes == (() if alike else graph_engine("openvino").buckets(8, 32, 64)), (
        "a model that padding disturbs has none"
    )


def test_buckets_cover_calls_that_share_beginnings(graphs: Mapping[str, Graph]) -> None:
    serving = encoder_serving(batching=Batching(64, 8, 4, shares_prefixes=True))
    shapes = bucketed(serving, graphs["openvino"]).batching.buckets
    assert max(rows * length for rows, length in shapes) > 64


def test_openvino_refuses_a_precision_that_was_not_verified(graphs: Mapping[str, Graph]) -> None:
    graph = graphs["openvino"]
    if openvino.arithmetic_on(cpu()["flags"]) == "fp32":
        with pytest.raises(RuntimeError, match="was verified in bf16"):
            on_openvino.Executor(graph.path.parent, _serving(replace(graph, arithmetic="bf16")))
    else:  # in process, OpenVINO can be set to fp32 on any processor
        exact = on_openvino.Executor(graph.path.parent, _serving(replace(graph, arithmetic="fp32")))
        np.testing.assert_array_equal(exact.infer(FEEDS)["features"], SUMS)


@pytest.mark.parametrize(("limit", "most"), [("50000 100000", 1), ("max 100000", None), ("9900000 100000", None)])
def test_cores_respect_a_containers_quota(limit: str, most: int | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert cores(tmp_path / "cpu.max") == (most or len(os.sched_getaffinity(0)))
    assert cores(tmp_path / "absent") == len(os.sched_getaffinity(0))


def test_front_refuses_an_executor_that_was_not_emitted(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(dump(encoder_serving(executor="handles")))
    with pytest.raises(ContractError, match=r"serving\.json\.executor is 'handles', which is not here"):
        open_front(tmp_path)


@pytest.mark.parametrize("name", ["handles", "paged"])
def test_service_refuses_an_engine_that_was_not_emitted(name: str, tmp_path: Path) -> None:
    """The module "paged" is beside the engines, but is not an engine."""
    serving = decoder_serving(executor="in-process", session=Session(engine=name), model="model.onnx")
    with pytest.raises(ContractError, match=rf"serving\.json\.session\.engine is '{name}', which is not here"):
        make_executor(tmp_path, serving, None)


@pytest.mark.parametrize("module", [on_onnxruntime, on_openvino])
def test_executor_refuses_a_document_without_a_graph(module: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"serving\.json names no .* Build the model again"):
        module.Executor(tmp_path, encoder_serving(executor="onnxruntime"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "tensorrt", "precision": "fp16", "executor": "in-process"}, "on a GPU .* leave --executor out"),
        ({"instances": 2, "threads": 1, "machine": {"cores": 2}, "serving": {"front_instances": 1}}, "front_instances"),
        ({"serving": {"optimization_level": 1}}, "optimization_level .* --executor bls"),
    ],
)
def test_in_process_options_without_support_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        encoder.refuse_without_process(make_spec(model="m", **options))
    encoder.refuse_without_process(make_spec(model="m", **{**options, "executor": "bls"}))
