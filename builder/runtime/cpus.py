"""Refuse CPUs on which an engine would compute otherwise than where its answers were verified."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def refuse_cpu(rounding: Collection[str], exact: Collection[str], cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raise RuntimeError on a CPU with one of the instruction sets `rounding`, or on x86 without any of `exact`.

    With the former OpenVINO would multiply in fewer bits. Without the latter, if there are any, ONNX Runtime adds two
    products of bytes in 16 bits (vpmaddubsw), which are too few.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    present = sorted(flags & set(rounding))
    if present:
        raise RuntimeError(
            f"this CPU has {', '.join(present)}: OpenVINO would multiply in bf16, and this model was verified in fp32. "
            "Build it on a CPU like this one, or with --engine onnxruntime"
        )
    if exact and "avx2" in flags and not flags & set(exact):
        raise RuntimeError(
            f"this CPU has none of {', '.join(exact)}: sums of this model's int8 products would overflow here, and its "
            "answers would be wrong. Serve it on a CPU with one of them, build it on a CPU like this one, which rounds "
            "weights to 7 bits, or build it with --precision fp32"
        )
