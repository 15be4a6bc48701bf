"""Rules of the project as a whole: its package, its emitted files, its code."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import PreTrainedConfig
from tritonclient.grpc import service_pb2

import builder
from builder.checkpoints.tasks import all_tasks
from builder.checkpoints.tasks.base import EncoderTask, model_class_names
from builder.common.distribution import RUNTIME
from builder.runtime.encoder.task import Task as RuntimeTask
from tests.decoders import DECODERS
from tests.seq2seqs import SEQ2SEQS
from tests.tiny_encoders import ARCHITECTURES

ROOT = Path(__file__).parent.parent


def test_public_names_can_be_imported() -> None:
    assert sorted(builder.__all__) == builder.__all__
    for name in builder.__all__:
        assert getattr(builder, name) is not None
    assert callable(builder.build)
    with pytest.raises(AttributeError):
        builder.nothing  # noqa: B018


def test_every_task_has_samples_and_an_emitted_module() -> None:
    for task in all_tasks().values():
        assert len(task.samples) >= 10
        if isinstance(task, EncoderTask):
            steps = ("inputs", "outputs", "read", "answer")
            assert [step for step in steps if getattr(task.runtime, step) is getattr(RuntimeTask, step)] == []
            assert task.metric
            assert 0 < task.threshold <= 1


def test_one_task_is_inferred_for_each_head() -> None:
    """Two tasks of one head must differ in `claims` or `precedence`; otherwise the order of their files decides."""
    for head in {next(iter(model_class_names(task.auto_class()).values())) for task in all_tasks().values()}:
        claiming = [task for task in all_tasks().values() if task.claims(PreTrainedConfig(architectures=[head]), None)]
        best = max(task.precedence for task in claiming)
        inferred = [task.name for task in claiming if task.precedence == best]
        assert len(inferred) == 1, f"{head}: {inferred}"


def test_tasks_name_no_architecture_and_architectures_no_task() -> None:
    for path in [*ROOT.glob("builder/checkpoints/tasks/*.py"), *ROOT.glob("builder/runtime/**/*.py")]:
        text = path.read_text().lower().replace('"opt"', "")  # a side of TensorRT's profiles
        for name in (*ARCHITECTURES, *DECODERS, *SEQ2SEQS):
            assert not re.search(rf"\b{re.escape(name)}\b", text), f"{path.name} names {name}"
    for path in ROOT.glob("builder/graphs/export/**/*.py"):
        for name in all_tasks():
            assert name not in path.read_text(), f"{path.name} names {name}"


def test_emitted_python_imports_only_its_requirements() -> None:
    pinned = (RUNTIME / "requirements.txt").read_text()
    packages = set(re.findall(r"^([\w-]+)==", pinned, re.MULTILINE))
    base = {"numpy", "tokenizers", "triton_python_backend_utils", *sys.stdlib_module_names}
    more = {
        "generation": {"jinja2", "llguidance"},
        "executors": packages - {"onnxruntime", "openvino", "jinja2", "llguidance"},  # one module imports each for all
        "recipe": {"tensorrt", "polygraphy"},
    }
    libraries = {"sessions.py": {"onnxruntime"}, "open_vino.py": {"openvino", "sys"}}
    for path in RUNTIME.rglob("*.py"):
        allowed = base | more.get(path.parent.name, set()) | libraries.get(path.name, set())
        for name in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE):
            assert name in allowed, (
                f"{path.name} imports {name}: pin it in builder/runtime/requirements.txt; import ONNX Runtime and "
                "OpenVINO from builder/runtime/onnx_runtime.py and open_vino.py"
            )
    for path in RUNTIME.rglob("*.py"):
        alone = path.name == "open_vino.py"  # imported only for models that need it, for which it is installed
        assert alone or not re.search(r"^(?:from|import) openvino", path.read_text(), re.MULTILINE), path.name
    assert re.search(r"^numpy==1\.", pinned, re.MULTILINE), "numpy 2 corrupts tensors in the older containers"


def test_constructors_call_super_instead_of_a_named_class() -> None:
    for path in ROOT.glob("builder/**/*.py"):
        assert not re.search(r"\b[A-Z]\w+\.__init__\(self", path.read_text("utf-8")), path


def test_protobuf_is_not_older_than_the_code_of_the_client() -> None:
    """Regression: protobuf 6.33.0 was allowed, with which tritonclient 2.73 is not imported."""
    found = re.search(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+)", Path(service_pb2.__file__).read_text())
    assert found is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (required,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "protobuf")
    lowest = min(Version(one.version) for one in required.specifier if one.operator == ">=")
    assert lowest >= Version(".".join(found.groups()))
