"""Load tests without a server: levels, output of perf_analyzer and Triton, noise, and the figures saved and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.common.errors import ServeError, SpecError
from builder.serving.load import measure
from builder.serving.load.compare import compare_runs, comparison_table
from builder.serving.load.figures import from_csv, from_export, statistics_between
from builder.serving.load.noise import Estimate, compare_means, compare_pairs
from builder.serving.load.page import page
from builder.serving.load.record import LoadTestRun, read, save, table
from builder.serving.load.traffic import Level, concurrencies, rates, shares
from tests.pages import shows_every_text, stands_alone
from tests.serving.load.runs import encoder, run_of, shown, stream

EIGHT, TWENTY = Level("concurrency", 8), Level("rate", 20.0)


def test_levels_are_lists_or_ramps() -> None:
    assert [level.value for level in concurrencies("1,8,32")] == [1, 8, 32]
    assert [level.value for level in rates("10:100:30")] == [10, 40, 70, 100]
    assert [level.value for level in rates("0.1:0.3:0.1")] == pytest.approx([0.1, 0.2, 0.3])
    assert str(rates("2.5")[0]) == "2.5/s"


@pytest.mark.parametrize("text", ["", "0", "-1", "1,two", "1.5", "5:1:1", "1:5", "1:5:0", "1:9999:1"])
def test_concurrencies_refuse_invalid_levels(text: str) -> None:
    with pytest.raises(SpecError, match="is not a list of numbers such as"):
        concurrencies(text)


@pytest.mark.parametrize("text", ["nan", "inf", "1,nan", "1:inf:1", "1:2:inf", "1:1e15:1e-3", "1:1e300:1"])
def test_rates_refuse_invalid_levels(text: str) -> None:
    with pytest.raises(SpecError, match="is not a list of numbers such as"):
        rates(text)


def test_shares_divide_a_level_between_models() -> None:
    mix = shares(["topics:3", "writes"])
    assert mix == {"topics": 0.75, "writes": 0.25}
    assert [TWENTY.part(share).value for share in mix.values()] == [15.0, 5.0]
    assert [Level("concurrency", 2).part(share).value for share in mix.values()] == [2, 1], "at least one each"
    for wrong in (["a:0"], ["a:-1"], ["a:x"], ["a:nan"], ["a:inf"], ["a", "a:2"]):
        with pytest.raises(SpecError, match="as NAME or NAME:SHARE"):
            shares(wrong)


def test_csv_of_perf_analyzer_is_parsed() -> None:
    text = (
        "Concurrency,Inferences/Second,Client Send,Server Queue,Client Recv,p50 latency,p90 latency,p95 latency,"
        "p99 latency\n8,523.5,12,3400,5,14800,21000,22000,30500\n"
    )
    seen = from_csv(text)
    assert (seen.requests_per_s, seen.p50_ms, seen.p90_ms, seen.p99_ms) == (523.5, 14.8, 21.0, 30.5)
    assert seen.stream is None


def _request(start_ms: int, *responses_ms: int, tokens: int | None = None) -> dict[str, Any]:
    outputs: list[dict[str, Any]] = [{"text_output": "x"} for _ in responses_ms]
    if tokens is not None:
        outputs[-1]["completion_tokens"] = tokens
    times = [time * 1_000_000 for time in responses_ms]
    return {"timestamp": start_ms * 1_000_000, "response_timestamps": times, "response_outputs": outputs}


def _export(*requests: dict[str, Any]) -> dict[str, Any]:
    boundaries = [1_000_000_000, 2_000_000_000, 3_000_000_000]
    return {"experiments": [{"requests": list(requests), "window_boundaries": boundaries}]}


def test_export_yields_token_times_of_completed_streams() -> None:
    seen = from_export(
        _export(
            _request(900, 950, 990),  # ended before the measurement
            _request(990, 1040, 1050, 1060, tokens=5),  # several tokens in one response
            _request(1100, 1130, 1150),
            _request(2900, 2990, 3010),  # ended after the measurement
            _request(2950),  # never answered
        )
    )
    assert seen.requests_per_s == 1.0, "two in two seconds"
    assert seen.stream is not None
    assert seen.stream.tokens_per_s == 3.5, "5 as counted and 2 responses, in two seconds"
    assert seen.stream.first_p50_ms == 40.0
    assert seen.stream.between_p50_ms == 10.0
    assert seen.p50_ms == 60.0
    assert from_export(_export(_request(1100, 1200))).stream is not None, "an answer of one piece"


def test_export_without_a_completed_stream_is_an_error() -> None:
    with pytest.raises(ServeError, match="measure for longer"):
        from_export(_export(_request(2900, 3010)))


def test_statistics_are_the_difference_of_two_snapshots() -> None:
    """In the JSON of Triton's gRPC, 64-bit numbers are strings, and zeros are omitted."""
    before = {
        "name": "topics",
        "version": "1",
        "inference_count": "10",
        "execution_count": "10",
        "inference_stats": {"success": {"count": "10", "ns": "9"}, "queue": {"count": "10", "ns": "1000000"}},
        "batch_stats": [{"batch_size": "1", "compute_infer": {"count": "10", "ns": "5"}}],
    }
    after = {
        "inference_count": "40",
        "execution_count": "20",
        "inference_stats": {
            "success": {"count": "30"},
            "fail": {"count": "2"},
            "queue": {"count": "30", "ns": "41000000"},
            "compute_input": {"count": "30", "ns": "2000000"},
            "compute_infer": {"count": "30", "ns": "90000000"},
            "compute_output": {"count": "30", "ns": "8000000"},
        },
        "batch_stats": [
            {"batch_size": "4", "compute_infer": {"count": "6"}},
            {"batch_size": "1", "compute_infer": {"count": "14"}},
        ],
    }
    served = statistics_between(before, after)
    assert (served.queue_ms, served.compute_ms, served.mean_batch, served.failures) == (2.0, 5.0, 3.0, 2)
    assert served.batches == {"1": 4, "4": 6}


def test_estimate_uses_students_t_interval() -> None:
    """For 10, 12 and 14: s = 2, t = 4.303, half width 4.303 * 2 / sqrt(3); a single value has no interval."""
    estimate = Estimate.of([10.0, 12.0, 14.0])
    assert estimate.mean == 12.0
    assert estimate.half == pytest.approx(4.968, abs=1e-3)
    assert str(estimate) == "12 ±4.97"
    assert str(Estimate.of([523.46])) == "523"


def test_change_is_significant_if_its_interval_excludes_zero() -> None:
    measured = compare_means([100.0, 101.0, 99.0], [120.0, 121.0, 119.0])
    assert measured is not None
    assert measured.share == pytest.approx(0.2)
    assert measured.half == pytest.approx(0.0227, abs=1e-3), "Welch with equal variances: t(4) * sqrt(2/3)"
    assert measured.sure
    noisy = compare_means([100.0, 140.0, 60.0], [120.0, 160.0, 80.0])
    assert noisy is not None
    assert not noisy.sure
    once = compare_means([100.0], [200.0, 210.0])
    assert once is not None
    assert not once.sure
    assert compare_means([0.0, 0.0], [1.0, 1.0]) is None


def test_compare_pairs_judges_each_pair_of_rounds() -> None:
    """Three times as fast in each of two rounds, between which the machine became ten times slower."""
    measured = compare_pairs([100.0, 10.0], [300.0, 30.0])
    assert measured is not None
    assert measured.sure
    assert measured.share == pytest.approx(2.0)
    slower = compare_pairs([100.0, 10.0, 50.0], [90.0, 9.1, 44.0])
    assert slower is not None
    assert slower.sure
    assert slower.share == pytest.approx(-0.103, abs=0.01)
    assert not compare_means([100.0, 10.0], [300.0, 30.0]).sure  # type: ignore[union-attr]
    once = compare_pairs([100.0], [200.0])
    assert once is not None
    assert not once.sure
    assert compare_pairs([0.0, 1.0], [1.0, 1.0]) is None


def test_saved_run_is_read_back_unchanged(tmp_path: Path) -> None:
    run = run_of(*encoder(EIGHT, [100.0, 110.0]), *stream(TWENTY, [640.0]))
    save(run, tmp_path / "load.json")
    assert read(tmp_path / "load.json") == run
    (tmp_path / "load.json").write_text(json.dumps({**run.document(), "schema": 0}))
    with pytest.raises(SpecError, match="has schema 0"):
        read(tmp_path / "load.json")
    for wrong in ("[]", "{}", "no JSON"):
        (tmp_path / "load.json").write_text(wrong)
        with pytest.raises(SpecError, match="is not a load test that was saved"):
            read(tmp_path / "load.json")


def test_table_shows_the_measured_figures() -> None:
    both = shown(table(run_of(*encoder(EIGHT, [100.0, 110.0]), *stream(TWENTY, [640.0, 641.0]))))
    for text in ("topics", "8 at once", "105 ±63.5", "writes", "20/s", "between tokens p50 ms", "tokens/s", "queue ms"):
        assert text in both
    assert "failures" not in both
    alone = shown(table(run_of(*encoder(EIGHT, [100.0]))))
    assert "±" not in alone
    assert "first token" not in alone


def test_compare_runs_matches_models_and_levels() -> None:
    before = run_of(*encoder(EIGHT, [100.0, 101.0, 99.0]), *encoder(TWENTY, [20.0]))
    after = run_of(*encoder(EIGHT, [130.0, 131.0, 129.0]), *encoder(TWENTY, [21.0]))
    rows = {(row.level, row.figure.title): row.verdict for row in compare_runs(before, after)}
    assert rows[("8 at once", "requests/s")] == "better"
    assert rows[("8 at once", "p50 ms")] == "better"
    assert rows[("8 at once", "p99 ms")] == "within noise", "the same each time"
    assert rows[("20/s", "requests/s")] == "noise unknown"
    back = {(row.level, row.figure.title): row.verdict for row in compare_runs(after, before)}
    assert back[("8 at once", "requests/s")] == "worse"
    assert "+30.0%" in shown(comparison_table(compare_runs(before, after), before))
    with pytest.raises(SpecError, match="no model and level in common with this one: it has topics at 20/s"):
        compare_runs(run_of(*encoder(TWENTY, [20.0])), run_of(*encoder(EIGHT, [20.0])))


def test_page_is_self_contained_and_shows_every_figure() -> None:
    levels = [Level("concurrency", value) for value in (1, 8, 32)]
    loads = [load for level in levels for load in encoder(level, [level.value * 10, level.value * 11], "<b>topics")]
    loads += [load for level in levels for load in stream(level, [level.value * 100])]
    run = run_of(*loads)
    html = page(run, run, compare_runs(run, run))
    stands_alone(html)
    shows_every_text(html)
    assert "&lt;b&gt;topics" in html
    for title in ("latency against throughput", "queue against compute", "sizes of batches", "ms to the first token"):
        assert title in html
    assert html.count("<svg") == 3 + 4
    assert "p99 before" in html
    assert "Measured once" not in html


def test_page_of_single_measurements_warns_of_unknown_noise() -> None:
    run = LoadTestRun(**{**vars(run_of(*encoder(EIGHT, [100.0]))), "stopped": "16 at once: p99 of topics is 80 ms"})
    html = page(run)
    assert "the noise of these figures is unknown" in html
    assert "Stopped at 16 at once" in html


def test_samples_are_sent_in_random_order() -> None:
    """The samples are sorted by length; ten long ones in a row would queue behind each other, unlike real traffic."""
    samples = [{"text_input": "word " * number} for number in range(50)]
    sent = measure.in_random_order(samples, seed=0)
    assert len(sent) == 500
    for begin in range(0, 500, 50):
        assert sorted(map(str, sent[begin : begin + 50])) == sorted(map(str, samples)), "each of them in each pass"
    lengths = [len(sample["text_input"]) for sample in sent]
    assert abs(np.corrcoef(lengths[:-1], lengths[1:])[0, 1]) < 0.2
    assert sent == measure.in_random_order(samples, seed=0) != measure.in_random_order(samples, seed=1)
    assert measure.in_random_order(samples[:1] * 600, seed=0) == samples[:1] * 600


def test_intervals_are_random_with_the_exact_mean_rate() -> None:
    intervals = measure._intervals(20, 6, seed=0)
    assert sum(intervals) / len(intervals) == pytest.approx(50_000, rel=1e-4)
    assert np.std(intervals) == pytest.approx(50_000, rel=0.15), "as of a Poisson process"
    assert intervals != measure._intervals(20, 6, seed=1)
    assert intervals == measure._intervals(20, 6, seed=0)
    assert len(measure._intervals(0.1, 1, seed=0)) == 2
