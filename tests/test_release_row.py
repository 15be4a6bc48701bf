"""Row of a new Triton release, read in the files of a clone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.release_row import row

BUILD = """DEFAULT_TRITON_VERSION_MAP = {
    "release_version": "2.99.0",
    "triton_container_version": "39.07",
    "ort_version": "9.9.1",
    "standalone_openvino_version": "2039.2.0",
    "rhel_py_version": "3.14.3",
}
"""
PAGE = """# Release Compatibility Matrix

## Container Name: vllm-python-py3

| Triton release version\t | NGC Tag\t | Python version\t | vLLM version | CUDA version | CUDA Driver version | Size |
| --- | --- | --- | --- | --- | --- | --- |
| 39.07 | nvcr.io/x:39.07-vllm-python-py3 | Python 3.13.3  | 0.99.1+7b9cb5b7.nv39.7| 14.3.0.035 | 710.43.02 | 10 GB |

## ONNX Runtime Versions

| Triton release version | ONNX Runtime |
| --- | --- |
| 39.07 | 9.9.0 |
"""


def _clone(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for command in (("init", "--initial-branch", "r39.07"), ("add", "."), (*author, "commit", "--message", "release")):
        subprocess.run(("git", "-C", str(folder), *command), check=True, capture_output=True)
    return folder


def test_row_takes_each_version_from_the_page_before_the_build(tmp_path: Path) -> None:
    clone = _clone(tmp_path, {"build.py": BUILD, "docs/introduction/compatibility.md": PAGE})
    found = row(clone, "39.07")
    assert str(found).splitlines()[0] == (
        '  { triton = "39.07", onnxruntime = "9.9.0", openvino = "2039.2.0", python = "3.13", cuda = "14.3", '
        'vllm = "0.99.1" },'
    )
    assert found.sources["onnxruntime"] == "r39.07:docs/introduction/compatibility.md, ONNX Runtime Versions"
    assert found.sources["openvino"] == "r39.07:build.py, standalone_openvino_version"
    tasks = "\n".join(found.open)
    assert "tensorrt is in neither file" in tasks
    assert "scripts/releases --limits 9.9.0" in tasks


def test_row_of_a_release_that_the_page_does_not_list_is_from_the_build(tmp_path: Path) -> None:
    page = PAGE.replace("| 39.07 |", "| 39.06 |")
    found = row(_clone(tmp_path, {"build.py": BUILD, "docs/introduction/compatibility.md": page}), "39.07")
    assert (found.values["onnxruntime"], found.values["python"]) == ("9.9.1", "3.14")
    assert not {"vllm", "cuda"} & set(found.values)
    assert sum("is in neither file" in task for task in found.open) == 3


def test_row_refuses_a_branch_that_is_not_there_or_not_released(tmp_path: Path) -> None:
    build = BUILD.replace("39.07", "39.07dev")
    clone = _clone(tmp_path, {"build.py": build, "docs/introduction/compatibility.md": PAGE})
    with pytest.raises(SystemExit, match=r"is of 39\.07dev: the release is not out yet"):
        row(clone, "39.07")
    with pytest.raises(SystemExit, match=r"has no r39\.08:build\.py"):
        row(clone, "39.08")
