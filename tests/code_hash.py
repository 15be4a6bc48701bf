"""Hash of a definition and all project definitions that it reaches, without comments and docstrings.

Comments, docstrings and type annotations change nothing, nor do the neighbours of a definition in its file. All
definitions of a name count, in any branch of the file, and so do the statements that change it in place:
`NAME[...] = x`, `NAME.update(x)`. It does not follow attributes of objects, decorators that enter functions into a
table, or changes that another module makes to this one's names.
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
    """Return the SHA-256 of definitions of a project module in hexadecimal; without `names`, of all of them."""
    return hashlib.sha256(repr(sorted(places_of(module, *names).items())).encode()).hexdigest()


def places_of(module: str, *names: str) -> dict[Place, str]:
    """Return the text of these definitions and of all that they reach, by place."""
    texts: dict[Place, str] = {}
    waiting = [(module, name) for name in names or _definitions(module)]
    while waiting:
        where = waiting.pop()
        if where in texts:
            continue
        texts[where], needed = _look(*where)
        waiting += needed
    return {where: text for where, text in texts.items() if text}


def _look(module: str, name: str) -> tuple[str, Sequence[Place]]:
    """Return the text of a definition and the places that it names; a name without definition may be a module."""
    if definitions := _definitions(module).get(name):
        texts, needed = zip(*(_read(module, definition) for definition in definitions), strict=True)
        return "\n".join(texts), [where for places in needed for where in places]
    inside = f"{module}.{name}" if name else module
    return "", [(inside, other) for other in _definitions(inside)]


def _read(module: str, definition: ast.stmt | Place) -> tuple[str, Sequence[Place]]:
    if isinstance(definition, tuple):
        return "imported", [definition]
    return ast.dump(definition), [(module, node.id) for node in ast.walk(definition) if isinstance(node, ast.Name)]


@functools.cache
def _definitions(module: str) -> Mapping[str, Sequence[ast.stmt | Place]]:
    """Return the definitions of a project module by name; an imported name maps to its place."""
    path = ROOT.joinpath(*module.split("."))
    file = next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
    if file is None or not module.startswith(PROJECT):
        return {}
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    definitions: dict[str, list[ast.stmt | Place]] = {}
    for name, definition in _named(ast.parse(file.read_text("utf-8")).body, package):
        definitions.setdefault(name, []).append(definition)
    return definitions


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
        else:
            within = list(_named(_within(statement), package))
            yield from within
            changed = {*_changed(statement), *(name for name, _ in within)}
            yield from ((name, _without_prose(statement)) for name in sorted(changed))


def _within(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements in all branches of a statement; none for a simple one."""
    branches = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    bodies = [getattr(branch, name, ()) for branch in branches for name in ("body", "orelse", "finalbody")]
    return [inside for body in bodies for inside in body]


def _changed(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement outside of functions assigns, or whose values it may change."""
    for node in ast.walk(statement):
        store = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        if store or isinstance(node, ast.Expr):
            yield from (name.id for name in ast.walk(node) if isinstance(name, ast.Name))


def _without_prose(statement: ast.stmt) -> ast.stmt:
    """Remove docstrings and annotations in place."""
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
