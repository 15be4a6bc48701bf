"""Folders of other tools that `--graph` reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from builder.building.graph_folders import graph_file
from builder.common.errors import SpecError
from tests.adopted import write_aitune, write_navigator


def written(file: Path, content: str = "graph") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


def test_graph_file_accepts_a_file_and_a_folder(tmp_path: Path) -> None:
    file = written(tmp_path / "bare" / "model.onnx")
    assert graph_file(file) == graph_file(file.parent) == file


@pytest.mark.parametrize("write", [write_aitune, write_navigator])
def test_graph_file_reads_the_repositories_of_other_tools(
    write: Callable[[Path, Path, str], Path], tmp_path: Path
) -> None:
    source = written(tmp_path / "tuned.onnx")
    model = write(source, tmp_path / "repository", "encoder")
    file = model / "1" / "model.onnx"
    assert file.read_text() == "graph"
    assert graph_file(tmp_path / "repository") == graph_file(model) == graph_file(model / "1") == file


def test_graph_file_reads_a_folder_of_graph_and_weights(tmp_path: Path) -> None:
    source, weights = written(tmp_path / "model_raw.onnx"), written(tmp_path / "model_raw.onnx.data")
    model = write_aitune(source, tmp_path / "repository", "encoder", [weights])
    assert graph_file(model) == model / "1" / "model.onnx" / "model.onnx"
    assert graph_file(model / "1") == model / "1" / "model.onnx" / "model.onnx"


def test_graph_file_takes_the_newest_version_and_its_file_name(tmp_path: Path) -> None:
    for version in (2, 10, 9):
        file = written(tmp_path / "encoder" / str(version) / "tuned.onnx", str(version))
    assert file.parent.name == "9"
    written(tmp_path / "encoder" / "config.pbtxt", 'backend: "onnxruntime"\ndefault_model_filename: "tuned.onnx"')
    assert graph_file(tmp_path / "encoder").read_text() == "10"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has nothing; expected an ONNX file"),
        ({"status.yaml": "", "trt/model.plan": ""}, "has status.yaml, trt; expected an ONNX file"),
        ({"a/1/model.onnx": "", "b/1/model.onnx": ""}, "has several models: a, b; give the folder of one"),
        ({"config.pbtxt": ""}, "has no version"),
        ({"config.pbtxt": "name: ", "1/model.onnx": ""}, "not a Triton model configuration"),
        (
            {"config.pbtxt": 'platform: "tensorrt_plan"', "1/model.plan": ""},
            r"the backend tensorrt_plan \(model.plan\); only ONNX graphs",
        ),
        ({"config.pbtxt": 'platform: "torch_aoti"', "1/model.pt2": ""}, r"the backend torch_aoti \(model.pt2\)"),
        ({"config.pbtxt": 'backend: "python"', "1/model.onnx": ""}, "the backend python"),
        (
            {"config.pbtxt": 'default_model_filename: "../../other.onnx"', "1/model.onnx": ""},
            r"default_model_filename is ../../other.onnx; expected a name without folders",
        ),
        ({"1/model.plan": ""}, "has no 1/model.onnx, but model.plan; .*not TensorRT plans"),
        ({"1/model.onnx/weights": ""}, "has no 1/model.onnx/model.onnx, but weights"),
    ],
)
def test_graph_file_refuses_by_name(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        written(tmp_path / name, content)
    with pytest.raises(SpecError, match=message):
        graph_file(tmp_path)


def test_graph_file_refuses_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file or folder"):
        graph_file(tmp_path / "absent")
