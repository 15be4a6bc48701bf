"""Render a load test as one HTML page: no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from builder.repository.report import charts
from builder.repository.report.page import render_page
from builder.serving.load.compare import FigureComparison
from builder.serving.load.record import FIGURES, LoadMeasurement, LoadTestRun, estimate
from builder.serving.load.traffic import Level

Repeats = Mapping[Level, Sequence[LoadMeasurement]]  # of one model


def page(run: LoadTestRun, before: LoadTestRun | None = None, compared: Sequence[FigureComparison] = ()) -> str:
    """Return the whole page. With `before`, an earlier run, it also compares the two."""
    groups = run.repeats()
    models = list(dict.fromkeys(model for model, _ in groups))
    shown = [figure for figure in FIGURES if any(figure.of(load) is not None for load in run.loads)]
    rows = [
        [model, str(level), *(estimate(figure, loads) or "-" for figure in shown)]
        for (model, level), loads in groups.items()
    ]
    pictures: dict[str, str] = {}
    for model in models:
        of_model = _levels(run, model)
        pictures.update(_charts(model, of_model, {} if before is None else _levels(before, model)))
    return render_page(
        "load.html.j2",
        run=run,
        before=before,
        compared=compared,
        models=models,
        mix=len(models) > 1,
        repeats=max(map(len, groups.values())),
        titles=[figure.title for figure in shown],
        rows=rows,
        charts=pictures,
    )


def _levels(run: LoadTestRun, model: str) -> Repeats:
    return {level: loads for (name, level), loads in run.repeats().items() if name == model}


def _charts(model: str, levels: Repeats, before: Repeats) -> dict[str, str]:
    """Return the charts of one model: latency against throughput, queue and compute time, and its batches."""
    lines = {**_latencies(levels, ""), **(_latencies(before, " before") if before else {})}
    charts_by_title = {f"{model}: latency against throughput": charts.lines(lines, ("requests/s", "ms"), None)}
    streams = [load.client.stream for loads in levels.values() for load in loads if load.client.stream is not None]
    if streams:
        return {**charts_by_title, **_stream_charts(model, levels)}
    times = {
        str(level): {
            "queue": fmean([load.server.queue_ms for load in loads]),
            "compute": fmean([load.server.compute_ms for load in loads]),
        }
        for level, loads in levels.items()
    }
    charts_by_title[f"{model}: queue against compute, ms a request"] = charts.stacked(times, "{:.1f}")
    batches = {str(level): _batches(loads) for level, loads in levels.items()}
    charts_by_title[f"{model}: sizes of batches, % of executions"] = charts.stacked(batches, "")
    return charts_by_title


def _latencies(levels: Repeats, suffix: str) -> dict[str, dict[float, float]]:
    lines: dict[str, dict[float, float]] = {f"p50{suffix}": {}, f"p99{suffix}": {}}
    for loads in levels.values():
        rate = fmean([load.client.requests_per_s for load in loads])
        lines[f"p50{suffix}"][rate] = fmean([load.client.p50_ms for load in loads])
        lines[f"p99{suffix}"][rate] = fmean([load.client.p99_ms for load in loads])
    return lines


def _stream_charts(model: str, levels: Repeats) -> dict[str, str]:
    by_title = {}
    for title, names in {
        "ms to the first token": ("first_p50_ms", "first_p99_ms"),
        "ms from one token to the next": ("between_p50_ms", "between_p99_ms"),
    }.items():
        lines: dict[str, dict[float, float]] = {}
        for level, loads in levels.items():
            for name in names:
                values = [getattr(load.client.stream, name) for load in loads if load.client.stream is not None]
                lines.setdefault(name.split("_")[1], {})[level.value] = fmean(values)
        axis = "requests at once" if next(iter(levels)).kind == "concurrency" else "requests/s offered"
        by_title[f"{model}: {title}"] = charts.lines(lines, (axis, "ms"), None)
    tokens = {
        str(level): fmean([load.client.stream.tokens_per_s for load in loads if load.client.stream is not None])
        for level, loads in levels.items()
    }
    by_title[f"{model}: tokens/s"] = charts.bars(tokens, "{:.0f}", None)
    return by_title


def _batches(loads: Sequence[LoadMeasurement]) -> dict[str, float]:
    """Return the share in percent of executions by the number of requests in their batch, in doubling ranges."""
    counts: dict[int, int] = {}
    for load in loads:
        for size, count in load.server.batches.items():
            exponent = int(size).bit_length() - 1
            counts[exponent] = counts.get(exponent, 0) + count
    total = sum(counts.values()) or 1
    return {_range(exponent): 100 * counts[exponent] / total for exponent in sorted(counts)}


def _range(exponent: int) -> str:
    low, high = 1 << exponent, (2 << exponent) - 1
    return str(low) if low == high else f"{low}-{high}"
