"""Sums of Prometheus counters over gateways."""

from __future__ import annotations

from collections.abc import Iterable


def total_of(metrics: Iterable[object], counter: str) -> int:
    """Return the sum of the attribute `counter` of each of `metrics`, over all of its labels."""
    samples = (
        sample
        for each in metrics
        for metric in getattr(each, counter).collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )
    return int(sum(sample.value for sample in samples))
