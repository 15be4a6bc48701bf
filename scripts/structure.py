"""Print figures about the structure and the language of a checkout: python -m scripts.structure [FOLDER].

With `--helpers` it lists private functions of one statement that are called once, the candidates for inlining.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ORDER = [
    "cli",
    "commands",
    "clusters",
    "serving",
    "building",
    "repository",
    "engines",
    "graphs",
    "checkpoints",
    "options",
    "common",
    "runtime",
]  # as in pyproject.toml; imports go from left to right
RELATIVE_OPENINGS = ("What", "Whether", "Of", "How", "That", "Where", "Who")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/structure")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent.parent)
    parser.add_argument("--helpers", action="store_true")
    options = parser.parse_args()
    trees = {
        path.relative_to(options.folder): ast.parse(path.read_text())
        for path in sorted((options.folder / "builder").rglob("*.py"))
    }
    if options.helpers:
        print(
            *(f"{path}:{node.lineno} {node.name}" for path, node in _called_once(trees) if _is_simple(node)),
            sep="\n",
        )
        return
    for name, figure in _figures(options.folder, trees).items():
        print(f"{name:55} {figure}")


def _figures(folder: Path, trees: Mapping[Path, ast.Module]) -> dict[str, object]:
    imports = _imports(trees)
    pairs = {(source, target) for source, target in imports if source != target}
    called_once = [node for _, node in _called_once(trees)]
    docstrings = [text for tree in trees.values() for text in _docstrings(tree)]
    openings = Counter(text.split()[0].rstrip(",:;") for text in docstrings if text.split())
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    files = Counter(path.name for path in trees if path.name != "__init__.py")
    backward = [pair for pair in imports if set(pair) <= set(ORDER) and ORDER.index(pair[0]) > ORDER.index(pair[1])]
    return {
        "direct packages and modules of builder/": len({_unit(path) for path in trees} - {"__init__"}),
        "dependencies between them": len(pairs),
        "imports against the order of the layers": len(backward)
        if {"checkpoints", "graphs"} <= {a for a, _ in imports}
        else "no layers",
        "packages in the largest import cycle": max(map(len, _cycles(pairs)), default=0),
        "private functions that are called once": len(called_once),
        "of these, of a single statement": sum(map(_has_one_statement, called_once)),
        "of these, without a block of their own": sum(map(_is_simple, called_once)),
        "class names that occur twice or more": sum(count > 1 for count in classes.values()),
        "file names that occur twice or more": sum(count > 1 for count in files.values()),
        "docstrings": len(docstrings),
        **{f"docstrings that open with {word!r}": openings[word] for word in RELATIVE_OPENINGS},
        "files of builder/": len(trees),
        "lines of builder/": sum(len((folder / path).read_text().splitlines()) for path in trees),
        "lines of CHANGELOG.md": len((folder / "CHANGELOG.md").read_text().splitlines()),
    }


def _unit(path: Path) -> str:
    """Return the direct package or module of builder/ that a file belongs to."""
    return path.parts[1].removesuffix(".py")


def _imports(trees: Mapping[Path, ast.Module]) -> list[tuple[str, str]]:
    """Return each statement that imports from builder/, as (importing, imported) direct packages."""
    known = {_unit(path) for path in trees}
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "builder":
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("builder."):
                targets = [str(node.module).split(".")[1]]
            elif isinstance(node, ast.Import):
                targets = [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("builder.")]
            else:
                continue
            found += [(_unit(path), target) for target in targets if target in known]
    return [(source, target) for source, target in found if source != "__init__"]


def _cycles(pairs: set[tuple[str, str]]) -> list[set[str]]:
    """Return the groups of packages that import each other, directly or not."""
    reached = {source: {source} for pair in pairs for source in pair}
    changed = True
    while changed:
        changed = False
        for source, target in pairs:
            new = reached[target] - reached[source]
            reached[source] |= new
            changed = changed or bool(new)
    groups = [{other for other in reached[name] if name in reached[other]} for name in reached]
    return [group for group in groups if len(group) > 1]


def _called_once(trees: Mapping[Path, ast.Module]) -> Iterator[tuple[Path, Function]]:
    """Yield the private functions and methods whose name occurs once besides their definition, in their own file."""
    for path, tree in trees.items():
        uses = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        for node in ast.walk(tree):
            if isinstance(node, Function) and re.match(r"_[^_]", node.name) and uses[node.name] == 1:
                yield path, node


def _has_one_statement(node: Function) -> bool:
    return len([statement for statement in node.body if not _is_docstring(statement)]) == 1


def _is_simple(node: Function) -> bool:
    """Return True if the function is one statement without a block, which can be inlined."""
    return _has_one_statement(node) and not hasattr(node.body[-1], "body")


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            yield text


if __name__ == "__main__":
    main()
