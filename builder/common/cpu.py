"""Processor of this machine: its model, on which latencies were measured, and the instruction sets it offers."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def cpu() -> dict[str, Any]:
    """Return its model name, and those of FLAGS that it has."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = fields.get("flags", "").split()
    return {"model": fields.get("model name", platform.processor()), "flags": [f for f in FLAGS if f in flags]}
