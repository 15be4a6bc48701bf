"""Read what the source of a Python model defines and which models it calls. It runs nothing.

Only literal names can be read: a call of a model whose name is computed is not found here.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CLASS = "TritonPythonModel"
CACHED_FILES = 512  # models of one kind share files, and several rules read each


@dataclass(frozen=True)
class BlsCall:
    """Call of another model: an InferenceRequest in the source. `outputs`: the literal names of requested outputs."""

    model: str
    outputs: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class PythonSource:
    """Source of a module.

    `names`: what its top level defines or imports; `methods`: of the class that Triton instantiates, if it is here.
    """

    names: frozenset[str]
    methods: frozenset[str] | None
    calls: tuple[BlsCall, ...]
    takes_sender: bool  # True if it calls get_response_sender of a request


def read_source(path: Path) -> PythonSource | None:
    """Return the source of a file; None if it does not parse, which another rule reports."""
    try:
        return _read(path.read_bytes()) if path.is_file() else None
    except OSError:
        return None


@functools.lru_cache(CACHED_FILES)
def _read(content: bytes) -> PythonSource | None:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == CLASS]
    methods = None
    if classes and not [base for base in classes[0].bases if ast.unparse(base) != "object"]:
        functions = [node for node in classes[0].body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        methods = frozenset(function.name for function in functions)
    nodes = list(ast.walk(tree))
    takes_sender = any(isinstance(node, ast.Attribute) and node.attr == "get_response_sender" for node in nodes)
    return PythonSource(frozenset(_bound(nodes)), methods, tuple(_calls(nodes)), takes_sender)


@functools.lru_cache(CACHED_FILES)
def syntax_error(content: bytes, python: tuple[int, int]) -> str | None:
    """Return why a file does not compile with a Python of this version; None if it does."""
    try:
        ast.parse(content, feature_version=python)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # MemoryError: nested too deeply
        return str(error) or "it is nested too deeply"
    return None


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that importing a module binds, as far as the syntax shows; "*" for an import of everything."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _calls(nodes: Iterable[ast.AST]) -> Iterator[BlsCall]:
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "InferenceRequest":
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            model = _text(keywords.get("model_name"))
            names = keywords.get("requested_output_names")
            outputs = map(_text, names.elts if isinstance(names, ast.List | ast.Tuple) else ())
            if model is not None:
                yield BlsCall(model, tuple(name for name in outputs if name is not None), node.lineno)


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
