"""The cards that a model can be built for.

Compute capability: NVIDIA, "CUDA GPU Compute Capability"; memory: the cards' data sheets, the smallest of a name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuModel:
    name: str
    compute_capability: str
    memory_mb: int


CARDS = {
    name: GpuModel(f"NVIDIA {name.upper()}", capability, gigabytes << 10)
    for name, capability, gigabytes in (
        ("v100", "7.0", 16),
        ("t4", "7.5", 16),
        ("a100", "8.0", 40),
        ("a30", "8.0", 24),
        ("a10", "8.6", 24),
        ("a40", "8.6", 48),
        ("l4", "8.9", 24),
        ("l40s", "8.9", 48),
        ("h100", "9.0", 80),
        ("h200", "9.0", 141),
        ("b200", "10.0", 180),
    )
}
