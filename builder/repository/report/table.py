"""Table of a build's variants for the screen."""

from __future__ import annotations

from rich.table import Table

from builder.repository.report.record import NOT_COMPARED, BuildReport


def report_table(report: BuildReport) -> Table:
    """Return a table with a row per variant: size, speed over PyTorch, two latencies, quality.

    The served variant is bold. Columns in which no variant but PyTorch has a value are left out.
    """
    pytorch = report.variants[0]
    shapes = list(pytorch.latency_ms)  # empty if another machine serves
    speeds = [variant.speed_up(pytorch) for variant in report.variants]
    columns: dict[str, list[str]] = {
        "MB": [f"{variant.size / 1e6:.1f}" for variant in report.variants],
        "speed": ["-" if speed is None else f"{speed:.1f}x" for speed in speeds],
    }
    for shape in dict.fromkeys([*shapes[:1], *shapes[-1:]]):
        columns[f"{shape}, ms"] = [_number(variant.latency_ms.get(shape), ".2f") for variant in report.variants]
    columns["error"] = [_number(variant.error, ".0e") for variant in report.variants]
    columns[report.metric] = [report.quality_in_words(variant) for variant in report.variants]
    for title, field in {
        f"worst of {report.samples}": "worst",
        "batched": "batch_agreement",
        "perplexity": "perplexity",
        "next token": "tokens",
        "same answer": "answers",
    }.items():
        columns[title] = [_number(getattr(variant, field)) for variant in report.variants]
    for name in dict.fromkeys(name for variant in report.variants for name in variant.measures):
        columns[name] = [variant.in_words(name) for variant in report.variants]
    shown = {title: values for title, values in columns.items() if set(values[1:] or values) != {"-"}}
    table = Table(title=f"{report.name}: {report.task}, {report.samples} samples", title_justify="left")
    table.add_column("", no_wrap=True)
    for title in shown:
        table.add_column(title, justify="right")
    for variant, *values in zip(report.variants, *shown.values(), strict=True):
        table.add_row(variant.name, *values, style="bold" if variant.name == report.chosen else None)
    notes = [NOT_COMPARED] if report.has_times_of_other_builds else []
    table.caption, table.caption_justify = "\n".join(map(str, (report.verdict, *report.verified_on, *notes))), "left"
    return table


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else f"{value:{form}}"
