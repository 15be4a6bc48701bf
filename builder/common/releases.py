"""Triton releases: what each carries and a repository for it may use. The facts are in releases.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

_TABLE = tomllib.loads((Path(__file__).parent / "releases.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Release:
    """One Triton release. `opset`, `ir_version`: the highest that its ONNX Runtime reads.

    `onnxruntime`, `openvino`: of its own backends; `in_process`, `openvino_in_process`: the ONNX Runtime and OpenVINO
    that the emitted requirements pin in its interpreter. `tensorrt`, `cuda`, `vllm`: None if not known.
    """

    triton: str
    onnxruntime: str
    openvino: str
    python: str
    opset: int
    ir_version: int
    in_process: str
    openvino_in_process: str
    tensorrt: str | None = None
    cuda: str | None = None
    vllm: str | None = None


@dataclass(frozen=True)
class Fix:
    """Fix of a defect.

    `what`: what clients can do to a server older than the release `since`; `source`: where that is from.
    """

    since: str
    what: str
    source: str


@dataclass(frozen=True)
class GpuWheel:
    """An onnxruntime-gpu that runs in process: the compute capabilities that its CUDA kernels are compiled for.

    `cuda`: the version that it needs; `driver`: the least one; `ptx`: the compute capability from which on the driver
    compiles the kernels itself.
    """

    kernels: tuple[str, ...]
    cuda: str
    driver: str
    ptx: str | None = None

    def runs_on(self, capability: str) -> bool:
        """Return True if a card of `capability` has kernels: of its major version and no later minor one, or by PTX."""
        card = version_tuple(capability)
        compiled = any(card[0] == own[0] and own <= card for own in map(version_tuple, self.kernels))
        return compiled or (self.ptx is not None and version_tuple(self.ptx) <= card)


# By ONNX Runtime: the highest opset and IR version that it reads.
OPSET_LIMITS: dict[str, tuple[int, int]] = {version: (opset, ir) for version, (opset, ir) in _TABLE["limits"].items()}
RELEASES: dict[str, Release] = {
    row["triton"]: Release(
        **row,
        opset=OPSET_LIMITS[row["onnxruntime"]][0],
        ir_version=OPSET_LIMITS[row["onnxruntime"]][1],
        in_process=_TABLE["in_process"][row["python"]],
        openvino_in_process=_TABLE["openvino_in_process"][row["python"]],
    )
    for row in _TABLE["release"]
}
FIXES: tuple[Fix, ...] = tuple(Fix(**row) for row in _TABLE["fixes"])
GPU_WHEELS: dict[str, GpuWheel] = {
    version: GpuWheel(**{**row, "kernels": tuple(row["kernels"])}) for version, row in _TABLE["gpu_wheels"].items()
}
# Options of tritonserver that not every release here knows, and the first release that does.
OPTIONS: dict[str, str] = _TABLE["options"]
NEWEST = next(reversed(RELEASES))
SENDERS_SINCE = "24.06"  # models that are not decoupled may answer later (python_backend, r24.06)
# Features that a graph may use, and the first ONNX Runtime that has each.
OPERATOR_NEEDS: dict[str, str] = _TABLE["operators"]


def version_tuple(text: str) -> tuple[int, ...]:
    """Return a version such as "10.5.0.18" as numbers that compare."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def missing_fixes(triton: str) -> list[Fix]:
    """Return the fixes that a release is too old to have, the oldest first."""
    return [fix for fix in FIXES if version_tuple(triton) < version_tuple(fix.since)]


def runtime_of(triton: str, in_process: bool) -> str:
    """Return the version of the ONNX Runtime that runs a graph: that of Triton's interpreter or of its own backend."""
    return RELEASES[triton].in_process if in_process else RELEASES[triton].onnxruntime


def runtime_has(need: str, triton: str, in_process: bool) -> bool:
    """Return True if that ONNX Runtime has the feature `need`, a name in OPERATOR_NEEDS."""
    return version_tuple(runtime_of(triton, in_process)) >= version_tuple(OPERATOR_NEEDS[need])


def releases_with_tensorrt(least: str) -> list[str]:
    """Return the releases whose TensorRT is known to be at least `least`, the oldest first."""
    return [
        name
        for name, release in RELEASES.items()
        if release.tensorrt is not None and version_tuple(release.tensorrt) >= version_tuple(least)
    ]
