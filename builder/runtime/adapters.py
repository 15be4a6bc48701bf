"""Check Triton's tensors and publish a model's metrics on Triton's /metrics, for every adapter (`*_model.py`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

Family = tuple[str, str, str]  # a name, COUNTER or GAUGE, and a description


def check_tensors_survive() -> None:
    """Raise RuntimeError if tensors are corrupted on their way (a stub built for numpy 1, run with numpy 2)."""
    sent = np.array([1, 2, 3], dtype=np.int64)
    arrived = pb_utils.Tensor("check", sent).as_numpy()
    if not np.array_equal(sent, arrived):
        raise RuntimeError(
            f"this Python backend corrupts tensors ({sent.tolist()} arrives as {arrived.tolist()}) with numpy "
            f"{np.__version__}: install numpy below 2 in the interpreter that Triton runs"
        )


class Metrics:
    """Metrics of `model` in `version`: build_repo_NAME for a gauge, build_repo_NAME_total for a counter.

    Each value is a message to the server: only changes are sent.
    """

    def __init__(self, families: Sequence[Family], model: str, version: str) -> None:
        self.kinds = {name: kind for name, kind, _ in families}
        self.families = {  # keeps references: a metric is removed with its family
            name: pb_utils.MetricFamily(
                name=f"build_repo_{name}" + ("_total" if kind == "COUNTER" else ""),
                description=description,
                kind=getattr(pb_utils.MetricFamily, kind),
            )
            for name, kind, description in families
        }
        # labelled by version: Triton removes metrics with the same labels of two processes when either process ends
        labels = {"model": model, "version": version}
        self.metrics = {name: family.Metric(labels=labels) for name, family in self.families.items()}
        self.sent = dict.fromkeys(self.kinds, 0.0)  # initial values in Triton
        self.due_at = 0.0

    def due(self) -> bool:
        """Return True if values are to be published now: once a second."""
        now = time.monotonic()
        if now < self.due_at:
            return False
        self.due_at = now + 1
        return True

    def publish(self, values: Mapping[str, float]) -> None:
        """Send those of `values` that changed, by the names of their families; a counter's value is its sum so far."""
        for name, value in values.items():
            change = value - self.sent[name]
            if self.kinds[name] == "GAUGE" and change:
                self.metrics[name].set(value)
            elif change > 0:
                self.metrics[name].increment(change)
            self.sent[name] = value
