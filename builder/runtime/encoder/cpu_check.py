"""Check the CPU, in an encoder's adapter, before it serves."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def refuse_cpu(rounding: Collection[str], cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raise RuntimeError on a CPU that has one of the instruction sets `rounding`.

    There the engine would multiply in fewer bits than the answers were verified in.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    present = sorted(flags & set(rounding))
    if present:
        raise RuntimeError(
            f"this CPU has {', '.join(present)}: OpenVINO would multiply in bf16, and this model was verified in fp32. "
            "Build it on a CPU like this one, or with --engine onnxruntime"
        )
