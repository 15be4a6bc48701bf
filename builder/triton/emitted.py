"""Which files of builder/runtime are emitted with each kind of model, and where they lie in its version folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from builder.engines import engine

RUNTIME = Path(__file__).parent.parent / "runtime"
TASKS = "encoder/tasks"
# Engines that a front can run itself, by `Graph.engine`.
IN_PROCESS: Mapping[str, Literal["onnxruntime", "openvino"]] = {"onnxruntime": "onnxruntime", "openvino": "openvino"}
SHARED_FILES = ("contract.py", "fields.py", "panics.py", "tensors_check.py", "tokens.py")
EXECUTOR_FILES = {  # by EncoderServing.executor
    "bls": ("encoder/executors/bls.py",),
    **{name: engine(name).EMITTED_FILES for name in IN_PROCESS},
}
# of every encoder: all but the tasks and the executors, of which each has its own
ENCODER = (
    *sorted(str(file.relative_to(RUNTIME)) for file in (RUNTIME / "encoder").glob("*.py")),
    "encoder/tasks/__init__.py",
    "encoder/executors/__init__.py",
)
GENERATION = tuple(sorted(str(file.relative_to(RUNTIME)) for file in (RUNTIME / "generation").rglob("*.py")))
GENERATING = {
    **{name: name for name in (*SHARED_FILES, "sessions.py", "cores.py")},
    "model.py": "generation_model.py",
    **{name: name for name in GENERATION},
}
SHARED = {
    **{name: name for name in ("contract.py", "cores.py", "fields.py", "tensors_check.py")},
    "model.py": "shared_model.py",
    **{name: name for name in sorted(str(file.relative_to(RUNTIME)) for file in (RUNTIME / "shared").rglob("*.py"))},
}
RUNTIME_FILES: Mapping[
    str, Mapping[str, str]
] = {  # kind of model -> file in the version folder -> file in builder/runtime
    **{
        f"encoder, {executor}": {"model.py": "encoder_model.py"}
        | {name: name for name in (*SHARED_FILES, *ENCODER, *files)}
        for executor, files in EXECUTOR_FILES.items()
    },
    "generating": GENERATING,
    "shared": SHARED,
    "tensorrt-llm": {"model.py": "tensorrt_llm_model.py"},
}


def runtime_files(kind: str) -> dict[str, bytes | Path]:
    """The emitted Python of a kind of model, in version 1."""
    return {f"1/{target}": RUNTIME / source for target, source in RUNTIME_FILES[kind].items()}


def task_files(module: str) -> tuple[str, ...]:
    """The emitted task and the tasks it builds on, found by its own relative imports."""
    found = [f"{module}.py"]
    for line in (RUNTIME / TASKS / f"{module}.py").read_text("utf-8").splitlines():
        if line.startswith("from .") and not line.startswith("from .."):
            found.extend(task_files(line.split()[1][1:]))
    return tuple(found)
