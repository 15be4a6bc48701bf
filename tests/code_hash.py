"""A hash of code by what it does: a definition and all that it names, wherever that is in the project, without prose.

Comments, docstrings and annotations of types change nothing, nor does what stands beside a definition in its file.
What is reached by attributes of objects alone is not followed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = ("builder.", "scripts.", "tests.")

Place = tuple[str, str]  # a module, and the name of a definition in it


@functools.cache
def digest_of(module: str, *names: str) -> str:
    """The hash of definitions of a module of the project, 64 hexadecimal digits; without `names` of all of them."""
    return hashlib.sha256(repr(sorted(places_of(module, *names).items())).encode()).hexdigest()


def places_of(module: str, *names: str) -> dict[Place, str]:
    """What these definitions say, and all that they reach, by place."""
    found: dict[Place, str] = {}
    waiting = [(module, name) for name in names or _definitions(module)]
    while waiting:
        place = waiting.pop()
        if place in found:
            continue
        found[place], needed = _look(*place)
        waiting += needed
    return {place: said for place, said in found.items() if said}


def _look(module: str, name: str) -> tuple[str, Sequence[Place]]:
    """What a definition says, and the places of what it names. One that is no definition is a module, or not ours."""
    definition = _definitions(module).get(name)
    if isinstance(definition, tuple):
        return "imported", [definition]
    if definition is not None:
        return ast.dump(definition), [(module, node.id) for node in ast.walk(definition) if isinstance(node, ast.Name)]
    inside = f"{module}.{name}" if name else module
    return "", [(inside, other) for other in _definitions(inside)]


@functools.cache
def _definitions(module: str) -> Mapping[str, ast.stmt | Place]:
    """The definitions of a module by name; where a name is imported, from where. None of modules of other projects."""
    path = ROOT.joinpath(*module.split("."))
    file = next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
    if file is None or not module.startswith(PROJECT):
        return {}
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return dict(_named(ast.parse(file.read_text("utf-8")).body, package))


def _named(statements: Sequence[ast.stmt], package: str) -> Iterator[tuple[str, ast.stmt | Place]]:
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - statement.level] if statement.level else []
            source = ".".join([*parts, *filter(None, [statement.module])])
            yield from ((alias.asname or alias.name, (source, alias.name)) for alias in statement.names)
        elif isinstance(statement, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], (alias.name, "")) for alias in statement.names)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, _without_prose(statement)
        elif isinstance(statement, ast.If | ast.Try):
            yield from _named([*statement.body, *statement.orelse], package)
        else:
            targets = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
            yield from ((target, _without_prose(statement)) for target in targets if _is_assigned(statement, target))


def _is_assigned(statement: ast.stmt, name: str) -> bool:
    nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name)
    return any(isinstance(node.ctx, ast.Store) for node in nodes)


def _without_prose(statement: ast.stmt) -> ast.stmt:
    """In place."""
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [one for one in body if not _is_text(one)] or [ast.Pass()])
    return statement


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
