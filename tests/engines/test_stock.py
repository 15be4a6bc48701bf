"""The rules by which Triton's own backends refuse models, each with its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import SpecError
from builder.common.machine import VNNI
from builder.engines import onnxruntime, openvino, stock
from builder.engines.placement import place
from builder.engines.stock import Signature, Tensor
from builder.graphs.onnx.graph import Graph
from builder.options import make_spec
from builder.runtime.contract import FILE, dump
from builder.runtime.cpus import refuse_cpu
from builder.runtime.encoder.front import open_front
from builder.runtime.generation.service import Service
from tests.golden.repositories import graph
from tests.servings import decoder_serving, encoder_serving

GRAPH = Signature({"input_ids": Tensor("TYPE_INT64", (-1, -1))}, {"features": Tensor("TYPE_FP32", (-1, 384))})


def config(backend: str = "openvino", parameters: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "name": "encoder_model",
        "backend": backend,
        "max_batch_size": 0,
        "input": [{"name": "input_ids", "data_type": "TYPE_INT64", "dims": ["-1", "-1"]}],
        "output": [{"name": "features", "data_type": "TYPE_FP32", "dims": ["-1", "384"]}],
        "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
        "parameters": {name: {"string_value": value} for name, value in (parameters or {}).items()},
        **fields,
    }


def test_stock_rules_name_their_source_and_a_lower_case_pattern() -> None:
    for rule in (rule for backend in stock.STOCK_BACKENDS.values() for rule in backend.parameters):
        assert "src/" in rule.source
        assert rule.values is None or rule.values == rule.values.lower()
    assert all("src/" in rule["source"] for rule in stock.STOCK_BACKENDS["onnxruntime"].accelerators.values())


@pytest.mark.parametrize(
    ("backend", "name", "value", "right"),
    [
        ("openvino", "HINT_BF16", "NO", "YES"),
        ("openvino", "PERFORMANCE_HINT", "FAST", "latency"),
        ("openvino", "NUM_STREAMS", "-1", "AUTO"),
        ("openvino", "INFERENCE_NUM_THREADS", "two", "2"),
        ("onnxruntime", "execution_mode", "2", "1"),
        ("onnxruntime", "intra_op_thread_count", "two", "2"),
        ("onnxruntime", "enable_mem_arena", "yes", "on"),
    ],
)
def test_stock_refuses_a_value_that_the_backend_refuses(backend: str, name: str, value: str, right: str) -> None:
    (refused,) = stock.refusals(config(backend, {name: value}), "24.10")
    assert refused.startswith(f"the parameter {name} is {value!r}; Triton's {backend} backend takes ")
    assert not list(stock.refusals(config(backend, {name: right}), "24.10"))


def test_stock_lists_parameters_that_a_release_does_not_read() -> None:
    spinning = config("onnxruntime", {"session.intra_op.allow_spinning": "0"})
    assert stock.without_effect(spinning, None) == ["session.intra_op.allow_spinning"]
    entry = config("onnxruntime", {"session.use_device_allocator_for_initializers": "1"})
    assert stock.without_effect(entry, "24.10")
    assert not stock.without_effect(entry, "25.02")
    on_gpu_only = config("onnxruntime", {"gpu_mem_limit": "1"})
    assert stock.without_effect(on_gpu_only, None) == ["gpu_mem_limit"]


def test_stock_refuses_accelerators_unknown_to_the_release() -> None:
    def with_accelerator(name: str, **parameters: str) -> dict[str, Any]:
        accelerators = {"gpu_execution_accelerator": [{"name": name, "parameters": parameters}]}
        return config("onnxruntime", optimization={"execution_accelerators": accelerators})

    assert list(stock.refusals(with_accelerator("cuda"), "24.05"))
    assert not list(stock.refusals(with_accelerator("cuda", use_tf32="0"), "24.06"))
    assert list(stock.refusals(with_accelerator("tensorrt", trt_no_such="1"), None))
    assert not list(stock.refusals(with_accelerator("tensorrt", precision_mode="FP16"), None))


def test_stock_compares_shapes_and_types_as_the_backends_do() -> None:
    assert not list(stock.mismatches(config(), GRAPH))
    batched = config(max_batch_size=8, output=[{"name": "features", "data_type": "TYPE_FP32", "dims": [384]}])
    (refused,) = stock.mismatches(batched, GRAPH)
    assert refused == "config.pbtxt declares input_ids as [-1, -1, -1], the graph has [-1, -1]"
    halves = config("onnxruntime", output=[{"name": "features", "data_type": "TYPE_FP16", "dims": [-1, 384]}])
    assert "TYPE_FP16, the graph has TYPE_FP32" in next(iter(stock.mismatches(halves, GRAPH)))
    of_one_row = config("onnxruntime", output=[{"name": "features", "data_type": "TYPE_FP32", "dims": [1, 384]}])
    assert list(stock.mismatches(of_one_row, GRAPH)), "outputs are compared exactly"
    assert list(stock.mismatches(config(input=[]), GRAPH))


def test_openvino_backend_takes_full_batches_or_no_batch_at_all() -> None:
    assert stock.wrong_batch(config(), 3) is None
    assert stock.wrong_batch(config(max_batch_size=8), 8) is None
    assert "expected requests with batch size '8', got '3'" in str(stock.wrong_batch(config(max_batch_size=8), 3))
    assert stock.wrong_batch(config("onnxruntime", max_batch_size=8), 3) is None


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_engine_parameters_are_read_by_every_release(engine: str, arithmetic: str) -> None:
    served: Graph = graph(engine)
    object.__setattr__(served, "arithmetic", arithmetic)
    parameters = {"onnxruntime": onnxruntime, "openvino": openvino}[engine].parameters(served, 2, 3)
    for release in ("24.04", "25.09", None):
        assert not list(stock.refusals(config(engine, parameters), release))
        assert not stock.without_effect(config(engine, parameters), release)
    if engine == "openvino":
        assert (parameters["NUM_STREAMS"], parameters["INFERENCE_NUM_THREADS"]) == ("3", "6"), (
            "instances share one model"
        )


def test_place_refuses_spinning_in_triton_s_own_backends() -> None:
    spec = make_spec(model="m", threads=2, machine={"cores": 2}, serving={"spinning": False})
    with pytest.raises(SpecError, match="is for engines in process"):
        place(spec, graph("onnxruntime"), 2048, 128)


def test_stock_applies_the_rules_of_the_model_s_release(tmp_path: Path) -> None:
    model = tmp_path / "encoder_model" / "1" / "model.xml"
    model.parent.mkdir(parents=True)
    with pytest.raises(RuntimeError, match=r"unable to find .*1/model\.xml"):
        stock.model_file(config(), tmp_path / "encoder_model", "1", "model.xml")
    model.touch()
    assert stock.release_of(model) is None
    (tmp_path / "encoder_model" / "build.json").write_text(json.dumps({"triton": "24.10"}))
    assert stock.release_of(model) == "24.10"
    with pytest.raises(RuntimeError, match="unable to load model 'encoder_model': the parameter HINT_BF16 is 'NO'"):
        stock.refuse(config(parameters={"HINT_BF16": "NO"}), GRAPH, model)


def test_emitted_encoder_refuses_a_cpu_that_multiplies_in_bf16(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx512f avx512_bf16\n")
    with pytest.raises(RuntimeError, match="this CPU has avx512_bf16: OpenVINO would multiply in bf16"):
        refuse_cpu(openvino.BF16, (), cpuinfo)
    refuse_cpu((), (), cpuinfo)
    cpuinfo.write_text("processor : 0\nflags : fpu avx512f\n")
    refuse_cpu(openvino.BF16, (), cpuinfo)
    refuse_cpu(openvino.BF16, VNNI, tmp_path / "absent")


def test_emitted_model_refuses_a_cpu_whose_sums_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx2 avx512f\n")
    with pytest.raises(RuntimeError, match=r"has none of avx512_vnni, avx_vnni, amx_int8: .* would overflow"):
        refuse_cpu((), VNNI, cpuinfo)
    refuse_cpu((), (), cpuinfo)
    monkeypatch.setattr(refuse_cpu, "__defaults__", (cpuinfo,))
    for made, opened in ((encoder_serving, open_front), (decoder_serving, Service)):
        (tmp_path / FILE).write_text(dump(made(needs_cpus_with=VNNI)))
        with pytest.raises(RuntimeError, match="would overflow"):
            opened(tmp_path)
    for flags in ("flags : fpu avx2 avx_vnni", "Features : fp asimd"):  # the latter is of Arm
        cpuinfo.write_text(f"processor : 0\n{flags}\n")
        refuse_cpu((), VNNI, cpuinfo)
