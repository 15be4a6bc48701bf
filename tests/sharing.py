"""Which worker runs which tests: what shares something expensive stays together.

pytest-xdist's own groups are a suffix of a test's id, which pytest 9.2 does not let it add; so the fixtures that a test
takes are read off its file and the conftest.py above it: tests of the served repository are one group, and so are those
that take a fixture which their file, or the conftest.py of their folder, makes once for all of them.
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
    """Tests of a group go to one worker, the largest group first; every other test is a group of its own."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid) or nodeid


@dataclass(frozen=True)
class Function:
    """A test or a fixture: the fixtures that it takes, and whether it is made once for several tests."""

    takes: tuple[str, ...]
    once: bool


def group_of(nodeid: str) -> str | None:
    """The group of a test by its id; None where it shares nothing.

    What every worker may have of its own, the other fixtures of tests/conftest.py, makes no group.
    """
    path, _, test = nodeid.partition("[")[0].partition("::")
    file = ROOT / path
    needed = dict(_needed((file, file.with_name("conftest.py"), SHARED), test))
    if (SHARED, "repository") in needed:
        return "served"
    made = {where for (where, _), function in needed.items() if function.once and where != SHARED}
    return str(min(made, key=lambda where: where == file)) if made else None


def _needed(files: Sequence[Path], name: str) -> Iterator[tuple[tuple[Path, str], Function]]:
    """A function of the first of `files` that has it, and the fixtures that it needs, with those that these need."""
    for place, file in enumerate(files):
        if function := _functions(file).get(name):
            yield (file, name), function
            for taken in function.takes:
                yield from _needed(files[place + 1 :] if taken == name else files, taken)
            return


@functools.cache
def _functions(file: Path) -> Mapping[str, Function]:
    tree = ast.parse(file.read_text("utf-8")) if file.is_file() else ast.Module([], [])
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {one.name: Function(tuple(arg.arg for arg in one.args.args), _once(one)) for one in functions}


def _once(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = " ".join(map(ast.unparse, function.decorator_list))
    return "scope='module'" in decorators or "scope='session'" in decorators
