"""Triton releases: what each carries, and so what a repository for it may use. The facts are in releases.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

_TABLE = tomllib.loads((Path(__file__).parent / "releases.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Release:
    """`opset`, `ir_version`: the highest its ONNX Runtime reads. tensorrt, cuda, vllm: None where not known."""

    triton: str
    onnxruntime: str
    openvino: str
    python: str
    opset: int
    ir_version: int
    tensorrt: str | None = None
    cuda: str | None = None
    vllm: str | None = None


RELEASES: dict[str, Release] = {
    row["triton"]: Release(
        **row, opset=_TABLE["limits"][row["onnxruntime"]][0], ir_version=_TABLE["limits"][row["onnxruntime"]][1]
    )
    for row in _TABLE["release"]
}
NEWEST = next(reversed(RELEASES))
# What a graph may use, and the ONNX Runtime that first has it.
OPERATOR_NEEDS: dict[str, str] = _TABLE["operators"]


def version_tuple(text: str) -> tuple[int, ...]:
    """ "10.5.0.18" as numbers that compare."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def with_tensorrt(least: str) -> list[str]:
    """The releases whose TensorRT is known to be at least `least`, the oldest first."""
    return [
        name
        for name, release in RELEASES.items()
        if release.tensorrt is not None and version_tuple(release.tensorrt) >= version_tuple(least)
    ]
