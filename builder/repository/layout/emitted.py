"""Find the files of builder/runtime that a model needs: model.py, modules named in serving.json, and their imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from builder.common.distribution import RUNTIME
from builder.runtime.contract import EncoderServing, GenerationServing


def encoder_files(serving: EncoderServing) -> dict[str, Path]:
    """Return the emitted Python of an encoder, by its place in the model's folder."""
    modules = f"encoder/executors/{serving.executor}.py", f"encoder/tasks/{serving.task}.py"
    return emitted_files("encoder_model.py", *modules)


def generation_files(serving: GenerationServing) -> dict[str, Path]:
    """Return the emitted Python of a decode loop, by its place in the model's folder."""
    modules = f"generation/executors/{serving.executor_module}.py", f"generation/{serving.prompts_module}.py"
    return emitted_files("generation_model.py", *modules)


def emitted_files(model: str, *modules: str) -> dict[str, Path]:
    """Return `model` of builder/runtime, emitted as model.py, with every file that it or `modules` import.

    `modules` are the files that the emitted code imports by a name in serving.json.
    """
    reached: set[str] = set()
    found = [model, *modules]
    while found:
        file = found.pop()
        if file not in reached:
            reached.add(file)
            found += imported_files(file)
    files = {f"1/{file}": RUNTIME / file for file in sorted(reached - {model})}
    return {**files, "1/model.py": RUNTIME / model}


@cache
def imported_files(file: str) -> tuple[str, ...]:
    """Return the files of builder/runtime that `file` imports, also inside functions, and its package's __init__.py.

    Imports that only type checkers read, under `if TYPE_CHECKING`, do not count.
    """
    tree = ast.parse((RUNTIME / file).read_text("utf-8"))
    imports = [node for node in _run_by(tree) if isinstance(node, ast.ImportFrom) and node.level]
    packages = [folder / "__init__.py" for folder in PurePosixPath(file).parents[:-1]]
    return tuple(map(str, (*packages, *(target for node in imports for target in _targets(file, node)))))


def _run_by(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"):
            yield from _run_by(child)


def _targets(file: str, node: ast.ImportFrom) -> Iterator[PurePosixPath]:
    """Yield the files of a relative import: a module, or modules of a package."""
    package = PurePosixPath(file).parents[node.level - 1]
    if node.module is not None:
        package /= node.module.replace(".", "/")
        if not (RUNTIME / package).is_dir():
            yield package.with_suffix(".py")
            return
    yield from (package / f"{alias.name}.py" for alias in node.names)
