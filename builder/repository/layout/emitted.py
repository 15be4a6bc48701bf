"""Files of builder/runtime that each kind of model gets, and their places in its version folder."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from builder.common.folders import RUNTIME

TASKS = "encoder/tasks"
EXECUTORS = "encoder/executors"
EVERYWHERE = ("contract.py", "fields.py", "metrics.py", "tensors_check.py", "typed_json.py")
WITH_TEXT = (*EVERYWHERE, "panics.py", "tokens.py")


def with_imports(file: str) -> tuple[str, ...]:
    """Return `file` of builder/runtime and the modules there that it imports through relative imports."""
    files = [file]
    for node in ast.walk(ast.parse((RUNTIME / file).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            folder = Path(file).parents[node.level - 1]
            files.extend(with_imports(f"{folder / node.module.replace('.', '/')}.py"))
    return tuple(dict.fromkeys(files))


EXECUTOR_FILES = {  # by EncoderServing.executor
    file.stem: with_imports(f"{EXECUTORS}/{file.name}")
    for file in sorted((RUNTIME / EXECUTORS).glob("*.py"))
    if file.stem != "__init__"
}
# Files of every encoder: all but the tasks and the executors, of which an encoder gets one each.
ENCODER = (
    *sorted(str(file.relative_to(RUNTIME)) for file in (RUNTIME / "encoder").glob("*.py")),
    f"{TASKS}/__init__.py",
    f"{EXECUTORS}/__init__.py",
)
GENERATION = tuple(sorted(str(file.relative_to(RUNTIME)) for file in (RUNTIME / "generation").rglob("*.py")))
GENERATING = {
    **{name: name for name in (*WITH_TEXT, "sessions.py", "onnx_runtime.py", "spaces.py", "cores.py")},
    "model.py": "generation_model.py",
    **{name: name for name in GENERATION},
}
WAITING = ("encoder/__init__.py", "encoder/waiting.py")  # the queue of its front
SHARED = {
    **{name: name for name in (*EVERYWHERE, "cores.py", *WAITING)},
    "model.py": "shared_model.py",
    **{name: name for name in sorted(str(file.relative_to(RUNTIME)) for file in (RUNTIME / "shared").rglob("*.py"))},
}
RUNTIME_FILES: Mapping[
    str, Mapping[str, str]
] = {  # kind of model -> file in the version folder -> file in builder/runtime
    **{
        f"encoder, {executor}": {"model.py": "encoder_model.py"}
        | {name: name for name in (*WITH_TEXT, *ENCODER, *files)}
        for executor, files in EXECUTOR_FILES.items()
    },
    "generating": GENERATING,
    "shared": SHARED,
    "tensorrt-llm": {"model.py": "tensorrt_llm_model.py"},
}


def runtime_files(kind: str) -> dict[str, bytes | Path]:
    """Return the emitted Python of a kind of model, in version 1."""
    return {f"1/{target}": RUNTIME / source for target, source in RUNTIME_FILES[kind].items()}


def task_files(module: str) -> tuple[str, ...]:
    """Return the file of the emitted task and of the modules that it imports."""
    return with_imports(f"{TASKS}/{module}.py")
