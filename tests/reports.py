"""A build report with invented values, for tests that publish, list and transfer versions without a build."""

from __future__ import annotations

from builder.repository.report.record import BuildReport, MeasuredVariant

REPORT = BuildReport(
    name="front",
    task="feature-extraction",
    triton="24.10",
    engine="onnxruntime",
    checkpoint={"source": "org/name"},
    versions={"torch": "2"},
    cpu={"model": "a CPU", "flags": []},
    attention={"fused": 0, "layers": 0},
    operators={},
    quantised=None,
    variants=(MeasuredVariant("fp32", 1, {}),),
    metric="cosine",
    threshold=0.99,
    samples=0,
    padding=0.0,
    warnings=(),
    files={},
)
