"""Repositories that others wrote, or broke: something is said of each, and nothing is a traceback."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.lint import lint
from builder.lint.findings import Problem, Severity
from builder.lint.repository import Model
from builder.lint.rule import ERROR, all_rules, rule
from tests.lint.cases import CASES, ENSEMBLE, ONNX, PYTHON, WHOLE, graph

FOREIGN: dict[str, str | bytes] = {
    "auto/1/model.onnx": graph(),
    "auto_python/1/model.py": PYTHON,
    "torch/config.pbtxt": 'platform: "pytorch_libtorch" input [{name: "INPUT__0" data_type: TYPE_FP32 dims: [3]}]',
    "torch/1/model.pt": b"zip",
    "writer/config.pbtxt": 'backend: "vllm" instance_group [{ count: 1 kind: KIND_MODEL }]',
    "writer/1/model.json": '{"model": "facebook/opt-125m", "gpu_memory_utilization": 0.5}',
    "own/config.pbtxt": f'backend: "my_backend"\n{WHOLE.split(chr(10), 1)[1]}',
    "own/1/anything.bin": b"",
    "model.identity/1/model.identity": b"",
    "several/config.pbtxt": WHOLE,
    "several/configs/large.pbtxt": WHOLE.replace("8", "64", 1),
    "several/1/model.py": PYTHON,
    "several/3/model.py": PYTHON,
    "folder/config.pbtxt": ONNX,
    "folder/1/model.onnx/model.onnx": graph(),
    "plan/config.pbtxt": 'platform: "tensorrt_plan" max_batch_size: 4',
    "plan/1/model.plan": b"ftrt",
}


def test_what_others_wrote_has_no_errors(tmp_path: Path) -> None:
    for name, content in FOREIGN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    findings = lint(tmp_path)
    assert [str(finding) for finding in findings if finding.severity is Severity.ERROR] == []
    assert {finding.model for finding in findings if finding.code == "TR103"} == {
        "auto",
        "auto_python",
        "model.identity",
        "plan",
    }


@pytest.mark.parametrize(("triton", "unknown"), [(None, 1), ("24.04", 1), ("26.08", 0)])
def test_each_release_can_be_checked_for(triton: str | None, unknown: int, tmp_path: Path) -> None:
    """One of them has a field of 24.11, and says that it is for 24.10."""
    for name, case in CASES.items():
        case.write(tmp_path / name)
    assert [finding.code for finding in lint(tmp_path, triton)].count("TR607") == unknown


def test_no_damage_is_a_traceback(tmp_path: Path) -> None:
    """Cut, doubled and mixed bytes in every file that is read; the same damage every time."""
    chance = random.Random(7)
    files = {
        "p/config.pbtxt": WHOLE.encode(),
        "p/build.json": json.dumps({"triton": "24.10", "name": "p", "files": {"p": {"a": "b"}}, "plan": 3}).encode(),
        "p/1/serving.json": b'{"schema": 3, "kind": "encoder"}',
        "p/1/model.py": PYTHON.encode(),
        "o/config.pbtxt": ONNX.encode(),
        "o/1/model.onnx": graph(),
        "v/config.pbtxt": b'backend: "vllm"',
        "v/1/model.json": b'{"model": "/v/1/checkpoint"}',
        "t/config.pbtxt": b'backend: "tensorrt"',
        "t/build.json": b'{"plan": {"tensorrt": 3}}',
        "t/1/model.plan": b"plan",
        "e/config.pbtxt": ENSEMBLE.encode(),
    }
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    for _ in range(40):
        for name, content in files.items():
            (tmp_path / name).write_bytes(_damaged(content, chance))
        lint(tmp_path, chance.choice([None, "24.10", "26.08"]))


def _damaged(content: bytes, chance: random.Random) -> bytes:
    at, length = chance.randrange(len(content)), chance.randrange(12)
    kind = chance.randrange(5)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[at + length :]
    if kind == 2:
        return content[:at] + content[at : at + length] * 3 + content[at + length :]
    return content[:at] + chance.randbytes(length) + content[at + length :] if kind == 3 else content


def test_an_empty_repository_and_none_are_said_in_a_line(tmp_path: Path) -> None:
    (finding,) = lint(tmp_path)
    assert (finding.code, str(finding).split(";")[0]) == ("TR101", f"{tmp_path} holds no model")
    (finding,) = lint(tmp_path / "none")
    assert "is not a folder" in str(finding)


def test_a_link_that_leads_out_is_told(tmp_path: Path) -> None:
    CASES["whole"].write(tmp_path / "elsewhere")
    (tmp_path / "r" / "m").mkdir(parents=True)
    (tmp_path / "r" / "m" / "config.pbtxt").write_text(WHOLE)
    os.symlink(tmp_path / "elsewhere" / "1", tmp_path / "r" / "m" / "1")
    assert [finding.file for finding in lint(tmp_path / "r") if finding.code == "TR109"] == ["m/1"]


def test_a_rule_explains_itself_or_is_no_rule() -> None:
    for known in all_rules():
        assert known.what.endswith("."), known.code
        assert known.why, known.code
    with pytest.raises(ValueError, match="TR999 does not say why"):

        @rule("TR999", ERROR, wrong="a", right="b")
        def unexplained(model: Model) -> Iterator[Problem]:
            """Something."""
            yield Problem("never")

    with pytest.raises(ValueError, match="two rules have the code TR101"):

        @rule("TR101", ERROR, wrong="a", right="b")
        def again(model: Model) -> Iterator[Problem]:
            """Something.

            Because.
            """
            yield Problem("never")
