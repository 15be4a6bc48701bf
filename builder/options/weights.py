"""Options for weights that are stored in blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightOptions:
    """Options of int8-weights and int4-weights: inputs that share a scale, and whether a block has no zero point."""

    block_size: int
    symmetric: bool
