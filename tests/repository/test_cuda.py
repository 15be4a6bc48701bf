"""Repositories for ONNX Runtime on a GPU, built without one: the CUDA graph is verified on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from builder import build
from builder.engines import infer_with
from builder.graphs.onnx.graph import read_graph
from builder.options import make_spec
from builder.repository.check import check
from builder.repository.config.render import parse
from builder.repository.report.record import read_report
from tests.tiny_encoders import make_checkpoint


@pytest.fixture(scope="module")
def built(module_folder: Callable[[str], Path]) -> Path:
    folder = module_folder("cuda")
    checkpoint = make_checkpoint(folder / "checkpoint", "bert", "feature-extraction")
    options = {"task": "feature-extraction", "target": "cuda", "triton": "25.08", "output": folder / "repository"}
    for precision in ("fp16", "bf16"):
        build(make_spec(model=str(checkpoint), name=precision, precision=precision, **options))
    return folder / "repository"


def _graph(built: Path, precision: str) -> onnx.ModelProto:
    return onnx.load(str(built / f"{precision}_model" / "1" / "model.onnx"))


def test_cuda_attention_takes_lengths_in_place_of_the_mask(built: Path) -> None:
    model = _graph(built, "fp16")
    attentions = [node for node in model.graph.node if node.op_type == "MultiHeadAttention"]
    masks = {node.input[4] for node in attentions}
    (node_of_masks,) = [node for node in model.graph.node if set(node.output) & masks]
    assert (len(attentions), node_of_masks.op_type) == (2, "ReduceSum")
    run = infer_with(read_graph(built / "fp16_model" / "1" / "model.onnx"), 1)
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    ids = np.array([[5, 6, 7, 0, 0], [8, 9, 10, 11, 12]])
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0}
    together = run(feed)["features"][0, :3]
    alone = run({name: values[:1, :3] for name, values in feed.items()})["features"][0]
    np.testing.assert_allclose(together, alone, atol=2e-2)
    other = run({**feed, "input_ids": np.where(mask, ids, 77)})["features"][0, :3]
    np.testing.assert_array_equal(other, together, "what pads a row says nothing")


def test_cuda_keeps_fp32_where_it_has_no_bf16_kernel(built: Path) -> None:
    model = _graph(built, "bf16")
    made_by = {output: node for node in model.graph.node for output in node.output}
    attention = next(node for node in model.graph.node if node.op_type == "MultiHeadAttention")
    for name in attention.input[:3]:
        cast = made_by[name]
        assert (cast.op_type, next(a.i for a in cast.attribute if a.name == "to")) == ("Cast", onnx.TensorProto.FLOAT)
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    assert onnx.TensorProto.BFLOAT16 in kinds
    assert onnx.TensorProto.FLOAT16 not in kinds


def test_cuda_refuses_a_release_with_unknown_kernels(built: Path) -> None:
    assert check(built) == []
    (problem,) = check(built, "24.10")
    assert problem.startswith("bf16_model: which bf16 kernels the ONNX Runtime of Triton 24.10 has")


def test_cuda_build_puts_the_engine_on_the_gpu_and_reports_no_speed(built: Path) -> None:
    config = parse((built / "fp16_model" / "config.pbtxt").read_text(), "fp16_model")
    assert [group.kind for group in config.instance_group] == [config.instance_group[0].KIND_GPU]
    report = read_report(built, "fp16")
    assert report.target == "cuda"
    assert all(measured.latency_ms == {} for measured in report.variants)
    assert "speed was not measured" in report.warnings[0]
    assert [column.header for column in report.table().columns][:3] == ["", "MB", "error"]
    page = (built / "fp16" / "report.html").read_text()
    assert "times PyTorch" not in page
    assert json.loads((built / "fp16" / "build.json").read_text())["chosen"] == "fp16 CUDA"
