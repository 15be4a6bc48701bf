"""Check Triton's tensors, in every adapter, before it serves."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton


def check_tensors_survive() -> None:
    """Raise RuntimeError if tensors are corrupted on their way (a stub built for numpy 1, run with numpy 2)."""
    sent = np.array([1, 2, 3], dtype=np.int64)
    arrived = pb_utils.Tensor("check", sent).as_numpy()
    if not np.array_equal(sent, arrived):
        raise RuntimeError(
            f"this Python backend corrupts tensors ({sent.tolist()} arrives as {arrived.tolist()}) with numpy "
            f"{np.__version__}: install numpy below 2 in the interpreter that Triton runs"
        )
