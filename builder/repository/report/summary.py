"""Summary of a build's measurements in a few hundred bytes: the parameter `report` of the front's configuration.

build.json has all of them, but lies in the repository; a client that speaks to Triton alone reads this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from typing import Any

from builder.repository.config.entries import RepositoryEntry
from builder.repository.report.record import BuildReport

REPORT = "report"


def summary(report: BuildReport, day: date) -> dict[str, Any]:
    """Return the served variant beside PyTorch. Times are medians in milliseconds by shape, sizes in bytes."""
    pytorch, served = report.variants[0], next(variant for variant in report.variants if variant.name == report.chosen)
    cells = list(served.latency_ms)
    shown = dict.fromkeys([*cells[:1], *cells[-1:]])
    speed = served.speed_up(pytorch)
    timed = {} if speed is None else {"speed_up": round(speed, 2)}
    return {
        "variant": served.name,
        "engine": report.engine,
        "target": report.target,
        "triton": report.triton,
        "size": served.size,
        **({} if report.memory is None else {"memory": sum(report.memory.values())}),
        **timed,
        "latency_ms": {cell: float(f"{served.latency_ms[cell]:.3g}") for cell in shown},
        "metric": report.metric,
        "quality": served.quality,
        "samples": report.samples,
        "cpu": report.cpu["model"],
        "measured": day.isoformat(),
    }


def with_summary(entries: Sequence[RepositoryEntry], report: BuildReport) -> tuple[RepositoryEntry, ...]:
    """Return `entries`, the front model first, with the summary in the front's configuration."""
    front, *others = entries
    document = json.dumps(summary(report, date.today()), ensure_ascii=False, separators=(",", ":"))
    config = replace(front.config, parameters={**front.config.parameters, REPORT: document})
    return replace(front, config=config), *others
