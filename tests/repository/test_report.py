"""The report of a repository, as a table and as a self-contained page."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from builder.building.pipeline import build
from builder.building.variants.candidates import requested_variants
from builder.cli import main
from builder.common.errors import RepositoryError
from builder.common.machine import cpu
from builder.engines import openvino
from builder.options import Serving, make_spec
from builder.repository.check import check, verdicts
from builder.repository.config.entries import Config, RepositoryEntry
from builder.repository.lint import lint
from builder.repository.lint.rules import provenance
from builder.repository.report import charts
from builder.repository.report.page import page
from builder.repository.report.record import BuildReport, MeasuredVariant, read_report, summary, with_summary
from tests.pages import shows_every_text, stands_alone
from tests.reports import REPORT
from tests.trained import token_classification

VARIANTS = ("fp32", "bf16 OpenVINO", "int8", "int8-static", "int8-static OpenVINO", "int8-weights, int8 cache", "int4")


@pytest.mark.slow
def test_report_explains_the_choice_of_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build with `auto` and labels; check the scores, sentence, table and page, and `check` on another processor."""
    model, samples = token_classification()
    output = tmp_path / "model_repository"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = make_spec(model=str(model), name="tags", samples=samples, precision="auto", output=output)
    built = build(spec)
    report = read_report(output, "tags")
    assert report == built
    names = [measured.name for measured in report.variants]
    assert names[0] == "PyTorch fp32"
    real = f"{openvino.arithmetic_on(cpu()['flags'])} OpenVINO"  # bf16 if this processor has it
    assert {"fp32", real, "int8", "int8-static", "int8-static OpenVINO", "int8-weights OpenVINO"} <= set(names)
    assert report.samples == 50, "the other half was calibrated on"
    assert report.variants[0].scores["entity F1"] > 0.99
    chosen = next(measured for measured in report.variants if measured.name == report.chosen)
    assert chosen.scores["entity F1"] >= 0.99 * report.variants[0].scores["entity F1"]
    assert report.choice is not None
    assert report.choice.startswith(f"chose {report.chosen}: ")
    assert list((tmp_path / "cache" / "build-repo" / "measured").glob("*.json"))
    console = Console(width=240, record=True)
    console.print(report.table())
    shown = console.export_text()
    assert [name for name in names if name not in shown] == []
    html = (output / "tags" / "report.html").read_text()
    assert html == page(report)
    assert check(output) == []
    stands_alone(html)
    assert html.count("<svg") == 5
    assert report.choice.split(":")[0] in html
    assert report.chosen is not None
    variant = next(v for v in requested_variants(spec, cpu()["flags"]) if v.name == report.chosen.split(",")[0])
    assert report.tuned_for == tuple(flag for flag in variant.fast_with if flag in cpu()["flags"])
    assert _found(output, "TR803") == [], "chosen on this processor"


@pytest.mark.parametrize(
    ("tuned_for", "flags", "warned"),
    [
        (["avx512_vnni", "avx_vnni"], ["avx2"], True),
        (["avx512_vnni", "avx_vnni"], ["avx2", "avx_vnni"], False),
        ([], ["avx2"], False),
    ],
)
def test_lint_warns_of_a_choice_for_another_processor(
    tuned_for: list[str], flags: list[str], warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = {"name": "tags", "tuned_for": tuned_for, "cpu": {"model": "the one with VNNI", "flags": tuned_for}}
    (tmp_path / "tags").mkdir()
    (tmp_path / "tags" / "build.json").write_text(json.dumps(built))
    (tmp_path / "tags" / "config.pbtxt").write_text('backend: "python"')
    monkeypatch.setattr(provenance, "cpu", lambda: {"model": "another", "flags": flags})
    findings = _found(tmp_path, "TR803")
    assert len(findings) == warned
    assert all("tags: chosen on the one with VNNI for its avx512_vnni or avx_vnni" in text for text in findings)


@pytest.mark.parametrize(("release", "warned"), [("24.10", True), ("25.05", True), ("25.06", False), ("26.08", False)])
def test_lint_warns_of_a_release_with_known_defects(release: str, warned: bool, tmp_path: Path) -> None:
    for name in ("tags", "tags_model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "build.json").write_text(json.dumps({"name": "tags", "triton": release}))
        (tmp_path / name / "config.pbtxt").write_text('backend: "python"')
    findings = "".join(_found(tmp_path, "TR804"))
    assert ("one HTTP request with too large a shape ends the server" in findings) == warned
    assert ("CVE-2025-23310" in findings) == (release < "25.07")
    assert _found(tmp_path, "TR804", "24.10")[0].startswith("tags: Triton 24.10 lacks fixes: ")
    assert len(_found(tmp_path, "TR804", "24.10")) == 1


def _found(repository: Path, code: str, triton: str | None = None) -> list[str]:
    return [str(finding) for finding in lint(repository, triton) if finding.code == code]


def test_report_page_is_written_beside_the_model_or_to_output(
    small_repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Path(shutil.copytree(small_repository, tmp_path / "model_repository"))
    report = read_report(output, "topics")
    assert json.loads((output / "topics" / "build.json").read_text())["verified"] is True
    assert verdicts(output) == {"topics": report.verdict}
    assert report.verdict.startswith("verified: fp32 against PyTorch ")
    console = Console(width=240, record=True)
    console.print(report.table())
    assert report.verdict in " ".join(console.export_text().split())
    assert main(["check", str(output)]) == 0
    assert f"topics: {report.verdict}" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    html = (output / "topics" / "report.html").read_text()
    (output / "topics" / "report.html").unlink()
    assert main(["report", "topics"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model_repository"], "nothing is left in the current folder"
    assert (output / "topics" / "report.html").read_text() == html
    assert main(["report", "topics", "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == html
    with pytest.raises(RepositoryError, match=r"no build\.json of topic; it has topics"):
        read_report(output, "topic")
    assert main(["report", "topics", "--repository", str(output), "-o", str(tmp_path / "no" / "page.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    (output / "topics" / "build.json").write_text("{}")
    with pytest.raises(RepositoryError, match="not a report of this version"):
        read_report(output, "topics")


def test_chart_axes_have_round_numbers_and_escaped_labels() -> None:
    chart = charts.points({"a<b": (1.0, 0.9977), "c": (6.1, 1.0)}, ("speed", "cosine"), "c")
    assert "a&lt;b" in chart
    assert [number in chart for number in (">0.9975<", ">0.9980<", ">1.0000<", ">2<", ">6<")] == [True] * 5
    assert charts.bars({"none": 0.0}, "{:.1f}", None).count("<rect") == 1
    flat = charts.lines({"one": {16.0: 2.0, 64.0: 2.0}}, ("tokens", "ms"), None)
    assert "nan" not in flat.lower()


def test_report_prints_no_speed_up_of_times_from_two_builds() -> None:
    """Regression: a build printed a speed-up of "59x" over cached PyTorch times of an earlier build."""
    pytorch = MeasuredVariant("PyTorch fp32", 80, {"1x16": 8.0, "8x64": 80.0}, timed_in="2026-11-22T10:00:00.000+00:00")
    int8 = MeasuredVariant("int8", 20, {"1x16": 2.0, "8x64": 20.0}, quality=0.997)
    report = replace(REPORT, variants=(pytorch, int8), chosen="int8", samples=32)
    assert "speed_up" not in summary(report, date(2026, 11, 22))
    for shown in (_printed(report), page(report)):
        assert "4.0x" not in shown
        assert "times of an earlier build" in shown
    together = replace(report, variants=(replace(pytorch, timed_in=int8.timed_in), int8))
    for shown in (_printed(together), page(together)):
        assert "4.0x" in shown
        assert "times of an earlier build" not in shown


def test_report_shows_a_variant_that_was_not_timed() -> None:
    """An int8 form that misses the quality is not timed, and the one with layers in fp32 that is served is."""
    pytorch = MeasuredVariant("PyTorch fp32", 80, {"1x16": 8.0, "8x64": 80.0})
    missed = MeasuredVariant("int8", 20, {}, quality=0.9)
    missed_early = replace(missed, name="int8-static", judged_samples=8)
    served = MeasuredVariant("int8, 1 layers fp32", 25, {"1x16": 2.0, "8x64": 20.0}, quality=0.997)
    report = replace(REPORT, variants=(pytorch, missed, missed_early, served), chosen=served.name, samples=32)
    assert "int8 │ 0.0 │ - │ - │ - │ 0.9000 │" in _printed(report)
    assert "int8-static │ 0.0 │ - │ - │ - │ 0.9000 (8 of 32 samples)" in _printed(report)
    assert "<td>0.9000 (8 of 32 samples)</td>" in page(report)
    stands_alone(page(report))


def _printed(report: BuildReport) -> str:
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(report.table())
    return " ".join(console.export_text().split())


def test_report_page_shows_every_text_of_long_names_and_many_columns() -> None:
    """Regression: labels and axis titles overflowed the charts, and the table was cut off."""
    names = [
        "PyTorch fp32",
        *VARIANTS,
        "int4-weights, blocks of 128, int8 cache, 4 of 12 heads taken out, OpenVINO bf16",
    ]
    cells = [f"{batch}x{length}" for batch in (1, 8, 32) for length in (16, 64, 128, 512)]
    variants = tuple(
        MeasuredVariant(
            name, 10**9 // step, dict.fromkeys(cells, 12345.678 / step), quality=0.99 + step / 1e5, worst=0.98
        )
        for step, name in enumerate(names, 1)
    )
    html = page(replace(REPORT, variants=variants, chosen="int8", samples=32, metric="cosine similarity of embeddings"))
    stands_alone(html)
    shows_every_text(html)
    assert all(html.count(name) > 4 for name in names), "in the table and, whole, in each chart"


def test_chart_labels_of_near_points_do_not_overlap() -> None:
    near = {f"variant {i}": (5 + i / 1000, 0.99) for i in range(9)}
    chart = charts.points({"slow": (1.0, 0.98), **near}, ("speed", "cosine"), None)
    shows_every_text(f"{chart}.scroll {{overflow-x: auto}}")
    rows = [float(y) for y in re.findall(r'y="([\d.]+)" text-anchor="start">variant', chart)]
    assert min(abs(a - b) for a, b in pairwise(sorted(rows))) >= 12


def test_summary_is_small_and_describes_the_served_variant() -> None:
    pytorch = MeasuredVariant("PyTorch fp32", 80, {"1x16": 8.0, "8x64": 80.0, "8x128": 160.0})
    int8 = MeasuredVariant("int8", 20, {"1x16": 2.04321, "8x64": 20.0, "8x128": 40.0}, quality=0.997)
    report = replace(REPORT, variants=(pytorch, int8), chosen="int8", samples=32, memory={"weights": 20, "cache": 5})
    told_of = summary(report, date(2026, 11, 22))
    assert told_of["variant"] == "int8"
    assert told_of["speed_up"] == pytest.approx(4, abs=0.05)
    assert told_of["latency_ms"] == {"1x16": 2.04, "8x128": 40.0}
    assert (told_of["quality"], told_of["memory"], told_of["measured"]) == (0.997, 25, "2026-11-22")
    untimed = summary(replace(report, variants=(replace(int8, latency_ms={}),)), date(2026, 11, 22))
    assert (untimed["latency_ms"], "speed_up" in untimed) == ({}, False), "a GPU is to serve it"
    config = Config("front", "python", 8, [], [], (), Serving(), True, parameters={"task": "fill-mask"})
    entries = [RepositoryEntry("front", config, {}), RepositoryEntry("front_model", replace(config, name="e"), {})]
    front, engine = with_summary(entries, report)
    assert front.config.parameters["task"] == "fill-mask"
    assert json.loads(front.config.parameters["report"])["cpu"] == "a CPU"
    assert len(front.config.parameters["report"]) < 500
    assert engine is entries[1]
