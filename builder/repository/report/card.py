"""Model card of a served model: Markdown with the metadata that the Hub reads (huggingface.co/docs/hub/model-cards).

It says only what build.json and evaluations.json contain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from builder.common.distribution import own_version
from builder.repository.report.evaluations import EvaluationRecord
from builder.repository.report.record import BuildReport

QUANTISED = ("int8", "int4", "fp8")  # precisions, in the names of variants
TABLE_BREAK = str.maketrans({"|": "\\|", "\n": " "})
Rows = Sequence[Sequence[str]]


def model_card(report: BuildReport, evaluations: Sequence[EvaluationRecord], signed: bool) -> str:
    """Return the card of the version that `report` is of, as Markdown. `signed`: it has a signature."""
    sections = [
        _metadata(report, evaluations),
        f"# {report.name}\n\n{_about(report)}",
        *_quality(report, evaluations),
        *_speed(report),
        _provenance(report, signed),
        *(["## Shortcomings\n\n" + "\n".join(f"- {text}" for text in report.warnings)] if report.warnings else []),
    ]
    return "\n\n".join(sections) + "\n"


def _metadata(report: BuildReport, evaluations: Sequence[EvaluationRecord]) -> str:
    from huggingface_hub import EvalResult, ModelCardData  # takes 0.3 s

    about = report.checkpoint
    results = [
        EvalResult(
            task_type=report.task,
            dataset_type=record.data["name"],
            dataset_name=record.data["name"],
            dataset_split=record.data["split"] or None,
            metric_type=name,
            metric_value=round(value, 4),
        )
        for record in evaluations
        for name, value in record.served.items()
    ]
    licences = about.get("license") or []
    is_quantised = any(precision in report.served.name for precision in QUANTISED)
    data = ModelCardData(
        model_name=report.name,
        base_model=about["source"] if about.get("revision") else None,  # a folder's name is none of the Hub's
        base_model_relation="quantized" if is_quantised else None,
        license=licences[0] if len(licences) == 1 else "other" if licences else None,
        pipeline_tag=report.task,
        tags=["triton", report.engine],
        eval_results=results or None,
    )
    return f"---\n{data}\n---"


def _about(report: BuildReport) -> str:
    about = report.checkpoint
    revision = f", revision {about['revision']}" if about.get("revision") else ""
    served = report.served
    text = (
        f"`{about['source']}`{revision} for {report.task}, version {report.version}, as a model of Triton Inference "
        f"Server {report.triton}: {served.name}, {served.size / 1e6:.1f} MB, engine {report.engine}, on "
        f"{report.target}.\n\n{report.verdict[0].upper()}{report.verdict[1:]}."
    )
    bases, sets = about.get("base_model") or [], about.get("datasets") or []
    lines = [f"Base models of the checkpoint: {', '.join(bases)}."] if bases else []
    lines += [f"Data sets that its card names: {', '.join(sets)}."] if sets else []
    return "\n\n".join([text, *lines])


def _quality(report: BuildReport, evaluations: Sequence[EvaluationRecord]) -> Iterator[str]:
    """Yield the section of what was measured on the samples of the build, and on labelled data."""
    tables = [*_on_samples(report), *_on_budget(report), *map(_on_labelled_data, evaluations)]
    if tables:
        yield "\n\n".join(["## Quality", *tables])


def _on_samples(report: BuildReport) -> Iterator[str]:
    served = report.served
    measures = {
        report.metric: served.quality,
        f"{report.metric}, worst of {report.samples} samples": served.worst,
        "perplexity": served.perplexity,
        **(served.measures if report.budget is None else served.ranking),
    }
    rows = [(name, f"{value:.4f}") for name, value in measures.items() if value is not None]
    if rows:
        yield f"Against PyTorch on the {report.samples} samples of the build:\n\n" + _table(("", served.name), rows)


def _on_budget(report: BuildReport) -> Iterator[str]:
    """Yield the table of the data of --budget, if it had one."""
    if report.budget is not None:
        pytorch, data = report.variants[0], report.budget
        rows = [(name, pytorch.in_words(name), report.served.in_words(name)) for name in pytorch.scores]
        yield (
            f"On {data['name']} ({data['kind']}, {data['count']}), by the build, where {data['allowed']} was allowed, "
            "with the 95% interval of the difference:\n\n" + _table(("", "PyTorch", report.served.name), rows)
        )


def _on_labelled_data(record: EvaluationRecord) -> str:
    data = record.data
    rows = [
        (name, f"{value:.4f}", f"{record.served[name]:.4f}", _interval(record, name))
        for name, value in record.pytorch.items()
    ]
    return (
        f"On {data['name']} ({data['kind']}, {data['count']}), {record.evaluated}, {record.server}:\n\n"
        + _table(("", "PyTorch", "served", "difference, 95% interval"), rows)
        + (f"\n\n{record.beyond}" if record.beyond else "")
    )


def _interval(record: EvaluationRecord, name: str) -> str:
    difference = f"{record.served[name] - record.pytorch[name]:+.4f}"
    return difference + (" ({:+.4f} to {:+.4f})".format(*record.interval[name]) if name in record.interval else "")


def _speed(report: BuildReport) -> Iterator[str]:
    """Yield the section of latencies, if the build measured them."""
    pytorch, served = report.variants[0], report.served
    if not served.latency_ms:
        return
    rows = [
        (shape, f"{pytorch.latency_ms[shape]:.2f}" if shape in pytorch.latency_ms else "", f"{ms:.2f}")
        for shape, ms in served.latency_ms.items()
    ]
    speed = served.speed_up(pytorch)
    summary = "" if speed is None else f" {speed:.1f} times PyTorch's speed over all shapes."
    yield (
        f"## Speed\n\nMedian milliseconds on {report.cpu['model']}, measured by the build.{summary}\n\n"
        + _table(("shape", "PyTorch", served.name), rows)
    )


def _provenance(report: BuildReport, signed: bool) -> str:
    weights = report.checkpoint.get("weights_sha256")
    rows = [
        ("packages", ", ".join(f"{name} {number}" for name, number in report.versions.items())),
        *([("weights, SHA-256", weights)] if weights else []),
        *((f"adopted {name}, SHA-256", digest) for name, digest in report.graph_files.items()),
        ("build key", report.build_key or "none"),
        ("files", f"{sum(map(len, report.files.values()))}, with SHA-256 in build.json"),
        ("signature", "model.sig, which `build-repo verify` checks" if signed else "none"),
    ]
    return f"## Provenance\n\n{_table(('', ''), rows)}\n\nWritten by `build-repo card` {own_version()}."


def _table(headings: Sequence[str], rows: Rows) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.translate(TABLE_BREAK) for cell in line) + " |" for line in lines)
