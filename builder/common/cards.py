"""List the cards that a model can be built for.

Compute capability: NVIDIA, "CUDA GPU Compute Capability"; memory: the cards' data sheets, the smallest of a name, or
what nvidia-smi prints where that is known to be less.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuModel:
    name: str
    compute_capability: str
    memory_mb: int


CARDS = {
    name: GpuModel(f"NVIDIA {name.upper()}", capability, megabytes)
    for name, capability, megabytes in (
        ("v100", "7.0", 16 << 10),
        ("t4", "7.5", 15360),
        ("a100", "8.0", 40 << 10),
        ("a30", "8.0", 24 << 10),
        ("a10", "8.6", 24 << 10),
        ("a40", "8.6", 48 << 10),
        ("l4", "8.9", 23034),
        ("l40s", "8.9", 48 << 10),
        ("h100", "9.0", 80 << 10),
        ("h200", "9.0", 141 << 10),
        ("b200", "10.0", 180 << 10),
    )
}
