"""Row of builder/common/releases.toml for a Triton release, from a clone of triton-inference-server/server.

python -m scripts.release_row CLONE YY.MM

The clone needs the release's branch, rYY.MM, and no work tree. Prints the row, the file that each value is from, and
what is left to do.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builder.common.releases import OPSET_LIMITS, RELEASES

BUILD, COMPATIBILITY = "build.py", "docs/introduction/compatibility.md"
VLLM, ONNXRUNTIME = "## Container Name: vllm-python-py3", "## ONNX Runtime Versions"
COLUMNS = ("triton", "onnxruntime", "openvino", "python", "tensorrt", "cuda", "vllm")


@dataclass
class Row:
    """Values by column, the source of each, and what is left to do."""

    values: dict[str, str]
    sources: dict[str, str] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        pairs = ", ".join(f'{name} = "{self.values[name]}"' for name in COLUMNS if name in self.values)
        sources = [f"# {name}: {source}" for name, source in self.sources.items()]
        return "\n".join([f"  {{ {pairs} }},", *sources, *(f"# to do: {task}" for task in self.open)])


def row(clone: Path, triton: str) -> Row:
    """Return the row of a release. Raises SystemExit if the clone does not have its branch."""
    build, page = (_show(clone, f"r{triton}", path) for path in (BUILD, COMPATIBILITY))
    versions = _version_map(build)
    if versions["triton_container_version"] != triton:
        raise SystemExit(f"r{triton}:{BUILD} is of {versions['triton_container_version']}: the release is not out yet")
    found = Row({"triton": triton})

    def take(column: str, value: str | None, source: str) -> None:
        if value is not None and column not in found.values:
            found.values[column], found.sources[column] = value, f"r{triton}:{source}"

    of_vllm, of_runtime = _cells(page, VLLM, triton), _cells(page, ONNXRUNTIME, triton)
    if of_runtime:
        take("onnxruntime", of_runtime[1], f"{COMPATIBILITY}, {ONNXRUNTIME.strip('# ')}")
    take("onnxruntime", versions.get("ort_version"), f"{BUILD}, ort_version")
    take("openvino", versions.get("standalone_openvino_version"), f"{BUILD}, standalone_openvino_version")
    if of_vllm:
        _, _, python, vllm, cuda, *_ = of_vllm
        where = f"{COMPATIBILITY}, {VLLM.strip('# ')}"
        take("python", _first_two(python), where)
        take("cuda", _first_two(cuda), where)
        take("vllm", vllm.partition("+")[0], where)
    take("python", _first_two(versions.get("rhel_py_version", "")), f"{BUILD}, rhel_py_version")
    missing = [column for column in COLUMNS if column not in found.values]
    found.open += [f"{column} is in neither file: look it up, or leave it out" for column in missing]
    runtime = found.values.get("onnxruntime")
    if runtime is not None and runtime not in OPSET_LIMITS:
        found.open.append(f"[limits] has no {runtime}: scripts/releases --limits {runtime}")
        found.open.append(f"CUDA's kernels of {runtime}: scripts/releases --kernels {runtime}")
    if triton in RELEASES:
        known = {name: getattr(RELEASES[triton], name) for name in COLUMNS}
        other = sorted(name for name, value in found.values.items() if known[name] not in (None, value))
        found.open += [f"releases.toml has {name} {known[name]} for this release" for name in other]
    return found


def _show(clone: Path, branch: str, path: str) -> str:
    command = ("git", "-C", str(clone), "show", f"{branch}:{path}")
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode:
        raise SystemExit(
            f"{clone} has no {branch}:{path} ({shown.stderr.strip()}): fetch the branch, if it is released"
        )
    return shown.stdout


def _version_map(build: str) -> dict[str, str]:
    """Return DEFAULT_TRITON_VERSION_MAP of a build.py."""
    found = re.search(r"^DEFAULT_TRITON_VERSION_MAP = (\{.*?^\})", build, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"{BUILD} has no DEFAULT_TRITON_VERSION_MAP: read its versions by hand")
    versions: dict[str, str] = ast.literal_eval(found[1])
    return versions


def _cells(page: str, heading: str, triton: str) -> list[str]:
    """Return the cells of a release's line in the table under `heading`; none if it has no such line."""
    _, _, section = page.partition(f"\n{heading}\n")
    for line in section.partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] == triton:
            return cells
    return []


def _first_two(version: str) -> str | None:
    """Return the first two numbers of a version, as in 3.12; None if there are none."""
    found = re.search(r"\d+\.\d+", version)
    return None if found is None else found[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/releases --row", description=__doc__)
    parser.add_argument("clone", type=Path, help="a clone of triton-inference-server/server")
    parser.add_argument("triton", metavar="YY.MM", help="the release")
    options = parser.parse_args(arguments)
    print(row(options.clone, options.triton))


if __name__ == "__main__":
    main()
