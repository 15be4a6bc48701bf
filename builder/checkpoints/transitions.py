"""Biases that a checkpoint adds to its tags in a row, where they are decoded together.

Source: the `opf` package of openai/privacy-filter, _core/decoding.py (resolve_viterbi_biases_from_calibration_path).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from builder.checkpoints.json_files import read_json
from builder.common.errors import CheckpointError
from builder.runtime.encoder.tags import BIASES

FILE = "viterbi_calibration.json"
PREFIX = "transition_bias_"


def read_transition_biases(folder: Path) -> dict[str, float]:
    """Return the biases of the checkpoint in `folder`, by the names of `BIASES`; 0 each if it has none.

    Raises CheckpointError for anything else in their file: no other operating point than the default one is known.
    """
    empty = {"operating_points": {"default": {"biases": {f"{PREFIX}{name}": 0.0 for name in BIASES}}}}
    biases = read_json(folder / FILE, empty)
    for name in ("operating_points", "default", "biases"):
        biases = _only(biases, {name}, folder / FILE)[name]
    values = _only(biases, {f"{PREFIX}{name}" for name in BIASES}, folder / FILE)
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise CheckpointError(f"{folder / FILE} has {name} {str(value)[:100]!r}; expected a finite number")
    return {name: float(values[f"{PREFIX}{name}"]) for name in BIASES}


def _only(value: Any, keys: set[str], path: Path) -> dict[str, Any]:
    """Return `value`, a mapping of exactly `keys`. Raises CheckpointError."""
    if not isinstance(value, dict) or set(value) != keys:
        found = ", ".join(map(str, value))[:200] if isinstance(value, dict) else str(value)[:100]
        raise CheckpointError(f"{path} has {found or 'nothing'} where exactly {', '.join(sorted(keys))} is expected")
    return value
