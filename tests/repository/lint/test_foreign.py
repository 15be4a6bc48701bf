"""Foreign or broken repositories: each has a finding, and none causes a traceback."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from builder.cli import main
from builder.repository.lint import lint
from builder.repository.lint.findings import Problem, Severity
from builder.repository.lint.repository import RepositoryModel
from builder.repository.lint.rule import all_rules, rule
from tests.repository.lint.cases import CASES, ENSEMBLE, ONNX, PYTHON, WHOLE, graph

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


def test_lint_finds_no_errors_in_repositories_of_others(tmp_path: Path) -> None:
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
def test_lint_checks_for_each_release(triton: str | None, unknown: int, tmp_path: Path) -> None:
    """One of them has a field of 24.11, and says that it is for 24.10."""
    for name, case in CASES.items():
        case.write(tmp_path / name)
    assert [finding.code for finding in lint(tmp_path, triton)].count("TR607") == unknown


def test_lint_of_damaged_files_raises_nothing(tmp_path: Path) -> None:
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


READ = ("config.pbtxt", "build.json", "serving.json", "model.onnx", "model.py", "model.xml", "model.json")
DAMAGED = (
    b"",
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b"input { " * 20_000,
    b"(" * 5_000,
    b"null",
    b"[1]",
    b'{"kind": []}',
)


@pytest.mark.parametrize("name", ["topics", "writes"])
def test_lint_finds_damaged_files_of_a_build(
    name: str, built: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a truncated model.onnx and a deeply nested serving.json ended the check in a traceback."""
    chance = random.Random(11)
    repository = Path(shutil.copytree(built(name), tmp_path / "r", copy_function=os.link))
    for path in sorted(path for path in repository.glob("*/**/*") if path.name in READ):
        content = path.read_bytes()
        contents = [*DAMAGED, content[: len(content) // 2], content[:-1], b"\xff" + content, chance.randbytes(300)]
        if isinstance(document := _json(content), dict):
            contents += [
                json.dumps({**document, key: chance.choice(WRONG)}).encode() for key in chance.sample([*document], 5)
            ]
        for damaged in chance.sample(contents, 8):
            path.unlink()  # it is a link to the file that others read
            path.write_bytes(damaged)
            assert not [str(finding) for finding in lint(repository) if "could not be checked" in finding.found]
        path.write_bytes(content)
    assert main(["check", str(repository)]) == 0, capsys.readouterr().err


WRONG: tuple[Any, ...] = (None, 3, -1, "x", [], {}, [1], {"a": 1}, 10**30)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.parametrize("name", ["config.pbtxt", "build.json", "1/serving.json", "1/model.onnx", "1/model.py"])
def test_lint_finds_a_fifo_or_folder_in_place_of_a_file(name: str, tmp_path: Path) -> None:
    """Regression: a check waited for ever for data that never came."""
    CASES["whole"].write(tmp_path / "m")
    path = tmp_path / "m" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    script = f"import sys; from builder.cli import main; sys.exit(main(['check', {str(tmp_path)!r}]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert f"{name} is neither a file nor a folder" in done.stdout + done.stderr
    path.unlink()
    path.mkdir()
    assert not [str(finding) for finding in lint(tmp_path) if "could not be checked" in finding.found]


def test_lint_reports_a_failing_rule_as_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CASES["whole"].write(tmp_path / "m")

    def fail(model: RepositoryModel) -> Iterator[Problem]:
        raise KeyError("dims")

    broken = dataclasses.replace(next(rule for rule in all_rules() if rule.scope is RepositoryModel), check=fail)
    monkeypatch.setattr("builder.repository.lint.all_rules", lambda: (broken,))
    (finding,) = lint(tmp_path)
    assert (finding.severity, finding.model) == (broken.severity, "m")
    assert "could not be checked (KeyError: 'dims')" in finding.found


def test_lint_reports_an_empty_or_missing_repository(tmp_path: Path) -> None:
    (finding,) = lint(tmp_path)
    assert (finding.code, str(finding).split(";")[0]) == ("TR101", f"{tmp_path} holds no model")
    (finding,) = lint(tmp_path / "none")
    assert "is not a folder" in str(finding)


def test_lint_finds_a_link_out_of_the_repository(tmp_path: Path) -> None:
    CASES["whole"].write(tmp_path / "elsewhere")
    (tmp_path / "r" / "m").mkdir(parents=True)
    (tmp_path / "r" / "m" / "config.pbtxt").write_text(WHOLE)
    os.symlink(tmp_path / "elsewhere" / "1", tmp_path / "r" / "m" / "1")
    assert [finding.file for finding in lint(tmp_path / "r") if finding.code == "TR109"] == ["m/1"]


def test_rule_without_explanation_is_refused() -> None:
    for known in all_rules():
        assert known.what.endswith("."), known.code
        assert known.why, known.code
    with pytest.raises(ValueError, match="TR999 does not say why"):

        @rule("TR999", wrong="a", right="b")
        def unexplained(model: RepositoryModel) -> Iterator[Problem]:
            """Something."""
            yield Problem("never")

    with pytest.raises(ValueError, match="two rules have the code TR101"):

        @rule("TR101", wrong="a", right="b")
        def again(model: RepositoryModel) -> Iterator[Problem]:
            """Something.

            Because.
            """
            yield Problem("never")

    with pytest.raises(ValueError, match="annotate its argument with one of Repository"):

        @rule("TR999", wrong="a", right="b")
        def unannotated(model) -> Iterator[Problem]:  # type: ignore[no-untyped-def]
            """Something.

            Because.
            """
            yield Problem("never")
