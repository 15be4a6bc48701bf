"""Assignment of tests to workers: tests that share an expensive fixture run together.

pytest-xdist's own groups are a suffix of a test's id, which pytest 9.2 does not let it add; so the fixtures that a test
takes are read off its file and the conftest.py above it: tests of the served repository are one group, and so are those
that take a fixture which their file, or the conftest.py of their folder, creates once for all of them.

A fixture is recognised by its name: in the arguments, in a mark of the function, in `getfixturevalue("name")` or as
autouse; not if the name is computed, in a `pytestmark`, or in test classes.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parent.parent
SHARED = Path(__file__).with_name("conftest.py")


class Sharing(LoadScopeScheduling):  # type: ignore[misc]  # where mypy does not read xdist
    """Scheduler that sends a group of tests to one worker, the largest first; every other test is its own group."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid) or nodeid


@dataclass(frozen=True)
class Function:
    """Test or fixture: the fixtures that it requests, if it is created once for several tests, and if it is autouse."""

    takes: tuple[str, ...]
    once: bool
    everywhere: bool


def group_of(nodeid: str) -> str | None:
    """Return the group of a test by its id; None if it shares nothing.

    Other fixtures of tests/conftest.py form no group: each worker creates its own.
    """
    path, _, test = nodeid.partition("[")[0].partition("::")
    file = ROOT / path
    files = (file, file.with_name("conftest.py"), SHARED)
    everywhere = [name for where in files for name, function in _functions(where).items() if function.everywhere]
    needed = dict(entry for name in (test, *everywhere) for entry in _needed(files, name))
    if (SHARED, "repository") in needed:
        return "served"
    groups = {where for (where, _), function in needed.items() if function.once and where != SHARED}
    return str(min(groups, key=lambda where: where == file)) if groups else None


def _needed(files: Sequence[Path], name: str) -> Iterator[tuple[tuple[Path, str], Function]]:
    """Yield the function `name` of the first of `files` that defines it, and all fixtures that it needs."""
    for depth, file in enumerate(files):
        if function := _functions(file).get(name):
            yield (file, name), function
            for taken in function.takes:
                yield from _needed(files[depth + 1 :] if taken == name else files, taken)
            return


@functools.cache
def _functions(file: Path) -> Mapping[str, Function]:
    tree = ast.parse(file.read_text("utf-8")) if file.is_file() else ast.Module([], [])
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {one.name: _read(one) for one in functions}


def _read(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    decorators = " ".join(map(ast.unparse, function.decorator_list))
    once = "scope='module'" in decorators or "scope='session'" in decorators
    arguments = (*function.args.args, *function.args.kwonlyargs)
    takes = (*(argument.arg for argument in arguments), *_by_name(function))
    return Function(takes, once, "autouse=True" in decorators)


def _by_name(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the fixtures that the marks and calls of a function name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".usefixtures", ".getfixturevalue")):
            yield from (str(name.value) for name in node.args if isinstance(name, ast.Constant))
