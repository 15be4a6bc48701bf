"""A model that Triton's own backend would refuse is refused by the Python-based backend that stands in for it.

The stand-ins load models here as they do in a server, from a folder and the configuration that Triton hands them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from onnx import TensorProto, helper

from builder.common.errors import ExportError
from builder.common.machine import cpu
from builder.common.releases import NEWEST
from builder.engines import onnxruntime, openvino
from builder.engines.stock import STOCK_BACKENDS, Parameter
from builder.graphs.onnx.graph import save_graph
from builder.repository.config.render import parse
from builder.serving.server.embedded import BACKENDS
from tests.golden.repositories import graph

FILES = {"onnxruntime": "model.onnx", "openvino": "model.xml"}
CONFIG = """
name: "m_model"
backend: "BACKEND"
max_batch_size: 0
input [{ name: "input_ids" data_type: TYPE_INT64 dims: [-1, -1] }]
output [{ name: "features" data_type: TYPE_FP32 dims: [-1, -1] }]
instance_group [{ count: 1 kind: KIND_CPU }]
"""
LIMITED = [rule for backend in STOCK_BACKENDS.values() for rule in backend.parameters if rule.values is not None]
ABSENT = ("CPU_EXTENSION_PATH", "ENABLE_BATCH_PADDING", "RESHAPE_IO_LAYERS", "TARGET_DEVICE", "COMPILATION_NUM_THREADS")
TF32_OFF = {"name": "cuda", "parameters": {"use_tf32": "0"}}


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}'


def accelerator(name: str, *parameters: str) -> str:
    pairs = " ".join(f'parameters {{ key: "{name}" value: "0" }}' for name in parameters)
    text = f'gpu_execution_accelerator [{{ name: "{name}" {pairs} }}]'
    return f"optimization {{ execution_accelerators {{ {text} }} }}"


# The precision that OpenVINO uses on this processor; the stand-in refuses to load without it.
OF_THIS_CPU = replace(graph("openvino"), arithmetic=openvino.arithmetic_on(cpu()["flags"]))
WRITTEN = {
    "onnxruntime": onnxruntime.parameters(graph("onnxruntime"), 1, 1),
    "openvino": openvino.parameters(OF_THIS_CPU, 1, 1),
}
AS_WRITTEN = {name: "".join(parameter(*pair) for pair in pairs.items()) for name, pairs in WRITTEN.items()}


@pytest.fixture(scope="module")
def files(module_folder: Callable[[str], Path]) -> Path:
    """Return a minimal graph over rows of tokens, in each engine's format."""
    folder = module_folder("graphs")
    tensors = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["rows", "tokens"]),
        helper.make_tensor_value_info("features", TensorProto.FLOAT, ["rows", "tokens"]),
    ]
    nodes = [helper.make_node("Cast", ["input_ids"], ["features"], to=TensorProto.FLOAT)]
    model = helper.make_model(helper.make_graph(nodes, "g", tensors[:1], tensors[1:]))
    model.ir_version = 10
    model.opset_import[0].version = 20
    saved = save_graph(model, folder / FILES["onnxruntime"])
    openvino.convert(saved, folder / FILES["openvino"], "fp32", half_weights=False)
    return folder


@pytest.fixture
def load(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that writes a model and loads it in its stand-in; `release` goes to its build.json."""
    utilities = ModuleType("triton_python_backend_utils")
    utilities.__dict__.update(
        get_input_tensor_by_name=lambda request, name: SimpleNamespace(as_numpy=lambda: request.tensors[name]),
        InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(tensors=tensors, error=error),
        Tensor=lambda name, values: (name, np.array(values)),
        TritonError=str,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utilities)
    folder = tmp_path / "m_model"

    def into_stand_in(backend: str, text: str, release: str | None = None) -> Any:
        (folder / "1").mkdir(parents=True)
        for path in files.glob(f"{Path(FILES[backend]).stem}.*"):
            shutil.copy(path, folder / "1")
        if release is not None:
            (folder / "build.json").write_text(json.dumps({"triton": release}))
        config = parse(text.replace("BACKEND", backend), "m_model")
        arguments = {
            "model_config": json.dumps(MessageToDict(config, preserving_proto_field_name=True)),
            "model_repository": str(folder),
            "model_version": "1",
            "model_instance_kind": "GPU" if "KIND_GPU" in text else "CPU",
            "model_instance_device_id": "0",
        }
        model = _stand_in(backend).TritonPythonModel()
        model.initialize(arguments)
        return model

    return into_stand_in


def _stand_in(backend: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"stand_in_{backend}", BACKENDS / backend / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _request(rows: int) -> Any:
    tokens = np.arange(2 * rows, dtype=np.int64).reshape(rows, 2)
    return SimpleNamespace(tensors={"input_ids": tokens}, requested_output_names=lambda: ["features"])


@pytest.mark.parametrize("backend", FILES)
def test_stand_in_loads_and_answers_a_valid_model(backend: str, load: Callable[..., Any]) -> None:
    """The configuration contains every parameter that a build writes."""
    (answer,) = load(backend, CONFIG + AS_WRITTEN[backend], "24.10").execute([_request(3)])
    assert answer.error is None
    np.testing.assert_array_equal(answer.tensors[0][1], [[0, 1], [2, 3], [4, 5]])


@pytest.mark.parametrize("rule", LIMITED, ids=lambda rule: rule.name)
def test_stand_in_checks_every_limited_parameter(rule: Parameter, load: Callable[..., Any]) -> None:
    text = CONFIG.replace("KIND_CPU", rule.kind or "KIND_CPU") + parameter(rule.name, "no-such-value")
    message = rf"unable to load model 'm_model': the parameter {re.escape(rule.name)} is 'no-such-value'; Triton's"
    with pytest.raises(RuntimeError, match=message):
        load(rule.backend, text, NEWEST)


@pytest.mark.parametrize("name", ABSENT)
def test_stand_in_names_what_it_does_not_implement(name: str, load: Callable[..., Any]) -> None:
    text = CONFIG + AS_WRITTEN["openvino"] + parameter(name, "1")
    with pytest.raises(RuntimeError, match=f"the embedded server's openvino backend has no {name}: serve it in the"):
        load("openvino", text, NEWEST)


@pytest.mark.parametrize(
    ("added", "release", "message"),
    [
        (accelerator("no_such"), NEWEST, "the execution accelerator no_such is unknown"),
        (accelerator("cuda", "use_tf32"), "24.05", "the execution accelerator cuda is unknown .* of 24.05"),
        (accelerator("tensorrt", "no_such"), NEWEST, "the execution accelerator tensorrt has no parameter no_such"),
        (
            accelerator("tensorrt", "trt_cuda_graph_enable"),
            NEWEST,
            "the embedded server.s onnxruntime .* no tensorrt: serve",
        ),
    ],
)
def test_stand_in_checks_every_accelerator(added: str, release: str, message: str, load: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=message):
        load("onnxruntime", CONFIG.replace("KIND_CPU", "KIND_GPU") + added, release)


def test_stand_in_passes_the_cuda_accelerator_on(load: Callable[..., Any]) -> None:
    load("onnxruntime", CONFIG)  # makes its module importable
    config = {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [TF32_OFF]}}}
    arguments = {"model_instance_kind": "GPU", "model_instance_device_id": "0"}
    ((name, options), _) = _stand_in("onnxruntime")._providers(arguments, config)
    assert (name, options["use_tf32"]) == ("CUDAExecutionProvider", "0")


@pytest.mark.parametrize("backend", FILES)
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ('name: "input_ids"', 'name: "ids"', "declares the input ids, the graph has 1"),
        ('name: "features"', 'name: "logits"', "declares the output logits, the graph has 1"),
        ("input [{", "input [{ name: 'mask' data_type: TYPE_INT64 dims: [-1, -1] }, {", "declares 2 inputs"),
        ("TYPE_INT64 dims: [-1, -1]", "TYPE_INT64 dims: [-1]", r"declares input_ids as \[-1\], the graph has"),
        ("TYPE_FP32 dims: [-1, -1]", "TYPE_FP32 dims: [-1]", r"declares features as \[-1\], the graph has"),
        ("max_batch_size: 0", "max_batch_size: 8", r"declares input_ids as \[-1, -1, -1\], the graph has"),
    ],
)
def test_stand_in_refuses_a_configuration_unlike_the_graph(
    backend: str, right: str, wrong: str, message: str, load: Callable[..., Any]
) -> None:
    assert right in CONFIG
    with pytest.raises(RuntimeError, match=message):
        load(backend, CONFIG.replace(right, wrong, 1) + AS_WRITTEN[backend])


def test_stand_in_compares_types_for_onnx_runtime_alone(load: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="declares features as TYPE_FP16, the graph has TYPE_FP32"):
        load("onnxruntime", CONFIG.replace("TYPE_FP32", "TYPE_FP16"))


def test_stand_in_refuses_openvino_instances_on_a_gpu(load: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="Triton's openvino backend has instances of KIND_CPU only"):
        load("openvino", CONFIG.replace("KIND_CPU", "KIND_GPU") + AS_WRITTEN["openvino"])


def test_stand_in_of_openvino_runs_full_batches_only(load: Callable[..., Any]) -> None:
    text = CONFIG.replace("max_batch_size: 0", "max_batch_size: 3").replace("[-1, -1]", "[-1]")
    model = load("openvino", text + AS_WRITTEN["openvino"])
    right, wrong = model.execute([_request(3), _request(2)])
    assert right.error is None
    assert "expected requests with batch size '3', got '2'" in wrong.error


@pytest.mark.parametrize("backend", FILES)
def test_stand_in_refuses_a_missing_file(backend: str, load: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=r"unable to find .*1/other\.file' for model 'm_model'"):
        load(backend, CONFIG + 'default_model_filename: "other.file"')


def test_stand_in_refuses_a_graph_newer_than_the_release(load: Callable[..., Any], files: Path) -> None:
    """The graph is of opset 20 and IR version 10, which 24.04 does not read."""
    with pytest.raises(ExportError, match=r"needs opset 20 and IR version 10; Triton 24\.04 .* reads up to 20 and 9"):
        load("onnxruntime", CONFIG, "24.04")
