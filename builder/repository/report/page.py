"""A build's report as one HTML page: no script, no network, readable without knowledge of the build."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import jinja2

from builder.repository.config.render import templates
from builder.repository.report import charts
from builder.repository.report.record import NOT_COMPARED, BuildReport

PAGE = "report.html"  # in the folder of the front model
SHAPE = re.compile(r"(\d+)x(\d+)")


def render_page(template: str, **values: object) -> str:
    """Return a page from its template; everything that is not markup already is escaped."""
    return _environment(templates()).get_template(template).render(values)


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    return jinja2.Environment(loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, autoescape=True)


def page(report: BuildReport) -> str:
    """Return the whole page of a build's report."""
    base = report.variants[0]
    speeds = {variant.name: speed for variant in report.variants if (speed := variant.speed_up(base)) is not None}
    pictures = {
        **(_against_speed(report, speeds) if len(speeds) > 1 else {}),
        "Size, MB": charts.bars(
            {variant.name: variant.size / 1e6 for variant in report.variants}, "{:.1f}", report.chosen
        ),
        **_by_length(report),
    }
    measures = list(dict.fromkeys(name for variant in report.variants for name in variant.measures))
    cells = list(base.latency_ms)
    return render_page(
        "report.html.j2",
        report=report,
        charts=pictures,
        speeds=speeds,
        cells=cells,
        measures=measures,
        not_compared=NOT_COMPARED if report.has_times_of_other_builds else "",
    )


def _against_speed(report: BuildReport, speeds: Mapping[str, float]) -> Mapping[str, str]:
    """Return the charts of quality and speed of the variants that have a speed-up."""
    judged = {
        r.name: (speeds[r.name], r.quality)
        for r in report.variants
        if r.name in speeds and r.quality is not None and r.judged_samples is None
    }
    return {
        f"{report.metric.capitalize()} against speed": charts.points(
            judged, ("times PyTorch's speed", report.metric), report.chosen
        ),
        "Times PyTorch's speed, over all shapes measured": charts.bars(speeds, "{:.1f}x", report.chosen),
    }


def _by_length(report: BuildReport) -> Mapping[str, str]:
    """Return charts of latency by sequence length, one per batch size; none for a model that is measured by token."""
    batches = sorted({int(match[1]) for cell in report.variants[0].latency_ms if (match := SHAPE.fullmatch(cell))})
    return {
        f"Milliseconds by sequence length, batch of {batch}": charts.lines(
            {
                variant.name: {
                    float(match[2]): ms
                    for cell, ms in variant.latency_ms.items()
                    if (match := SHAPE.fullmatch(cell)) and int(match[1]) == batch
                }
                for variant in report.variants
                if variant.latency_ms
            },
            ("tokens", "ms"),
            report.chosen,
        )
        for batch in batches
    }
