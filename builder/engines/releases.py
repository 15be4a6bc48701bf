"""Triton releases: the ONNX Runtime each carries, and so the newest ONNX a repository for it may use.

ONNX Runtime versions are from Triton's framework compatibility matrix; opset and IR limits are from ONNX
Runtime's compatibility page (each ONNX Runtime reads every older opset and IR version).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    onnxruntime: str
    opset: int
    ir_version: int
    python: str


# The ONNX Runtime that first has what a graph may use, measured by loading and running such graphs on 1.17 to 1.23.
OPERATOR_NEEDS: dict[str, str] = {
    "GroupQueryAttention on CPU": "1.18.0",
    "GroupQueryAttention with softcap": "1.20.0",
    "GroupQueryAttention with attention_bias": "1.22.0",
    "GroupQueryAttention with an int8 cache": "1.31.0",
}

RELEASES: dict[str, Release] = {
    "24.04": Release("1.17.3", 20, 9, "3.10"),
    "24.05": Release("1.18.0", 21, 10, "3.10"),
    "24.06": Release("1.18.0", 21, 10, "3.10"),
    "24.07": Release("1.18.1", 21, 10, "3.10"),
    "24.08": Release("1.18.1", 21, 10, "3.10"),
    "24.09": Release("1.19.2", 21, 10, "3.10"),
    "24.10": Release("1.19.2", 21, 10, "3.10"),
    "24.11": Release("1.19.2", 21, 10, "3.10"),
    "24.12": Release("1.20.1", 21, 10, "3.12"),
    "25.01": Release("1.20.1", 21, 10, "3.12"),
    "25.02": Release("1.20.1", 21, 10, "3.12"),
    "25.03": Release("1.21.0", 22, 10, "3.12"),
    "25.04": Release("1.21.0", 22, 10, "3.12"),
    "25.05": Release("1.22.0", 23, 10, "3.12"),
    "25.06": Release("1.22.0", 23, 10, "3.12"),
    "25.07": Release("1.22.0", 23, 10, "3.12"),
    "25.08": Release("1.23.0", 23, 11, "3.12"),
    "25.09": Release("1.23.0", 23, 11, "3.12"),
    "25.10": Release("1.23.1", 23, 11, "3.12"),
}
