"""Drive streams with AIPerf: its input, its command and its report, by a program in its place."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder.commands import load_test
from builder.commands.gateway import KEYS_VARIABLE
from builder.common.errors import ServeError, SpecError
from builder.serving.load import aiperf
from builder.serving.load.compare import compare_runs
from builder.serving.load.figures import StreamLatency
from builder.serving.load.record import AIPERF, LoadMeasurement, read, save, table
from builder.serving.load.traffic import Level, Target
from builder.serving.server import gateway as gateway_module
from tests.serving.load.runs import run_of, shown, stream

EIGHT, TWENTY = Level("concurrency", 8), Level("rate", 20.0)
SAMPLES = [{"text_input": "The museum", "max_tokens": 8, "ignore_eos": True, "stream": True}]
REPORT: dict[str, Any] = {  # the part of a report of 0.13.0 that is read
    "request_throughput": {"unit": "requests/sec", "avg": 4.5},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 36.0},
    "request_latency": {"unit": "ms", "avg": 210.0, "p50": 200.0, "p90": 220.0, "p99": 240.0},
    "time_to_first_token": {"unit": "ms", "avg": 21.0, "p50": 20.0, "p99": 30.0},
    "inter_token_latency": {"unit": "ms", "avg": 25.5, "p50": 25.0, "p99": 31.0},
    "error_summary": [],
}


def test_report_of_aiperf_is_parsed() -> None:
    seen = aiperf.from_report(REPORT)
    assert (seen.requests_per_s, seen.p50_ms, seen.p90_ms, seen.p99_ms) == (4.5, 200.0, 220.0, 240.0)
    assert seen.stream == StreamLatency(20.0, 30.0, 25.0, 31.0, 36.0)
    assert seen.bounded_ms == 30.0
    single = aiperf.from_report({name: value for name, value in REPORT.items() if name != "inter_token_latency"})
    assert single.stream is not None
    assert single.stream.between_p50_ms == 0, "answers of one token"


def test_report_with_failed_requests_is_an_error() -> None:
    refused = [{"error_details": {"code": 400, "message": "writes does not support top_k"}, "count": 3}]
    with pytest.raises(ServeError, match="3 requests failed, the first with: writes does not support top_k"):
        aiperf.from_report({**REPORT, "error_summary": refused})
    with pytest.raises(ServeError, match="measure for longer"):
        aiperf.from_report({"error_summary": None})


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Place a program on PATH that keeps its arguments and, if there is a report, writes it where AIPerf does."""
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / "aiperf"
    file.write_text(
        f"""#!/bin/sh
echo "$@" > {tmp_path}/arguments
echo "$TMPDIR" > {tmp_path}/temporary
[ -e {tmp_path}/report ] || {{ echo no tokenizer; exit 3; }}
while [ "$1" != --artifact-dir ]; do shift; done
mkdir -p "$2" && cp {tmp_path}/report "$2/profile_export_aiperf.json"
"""
    )
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(file.parent), prepend=os.pathsep)
    return tmp_path


@pytest.mark.parametrize(
    ("level", "options"), [(EIGHT, "--concurrency 8 --warmup-request-count 8"), (TWENTY, "--request-rate 20")]
)
def test_aiperf_gets_the_samples_as_completions(level: Level, options: str, program: Path) -> None:
    (program / "report").write_text(json.dumps(REPORT))
    seen = aiperf.drive("http://127.0.0.1:9", "writes", SAMPLES, level, 6, 1, program, 60)
    assert seen == aiperf.from_report(REPORT)
    line = {"text": "The museum", "extra": {"max_tokens": 8, "ignore_eos": True}}
    assert json.loads((program / "writes.requests.jsonl").read_text()) == line
    arguments = (program / "arguments").read_text()
    assert options in arguments
    assert "--url http://127.0.0.1:9 --endpoint-type completions --streaming" in arguments
    assert (program / "temporary").read_text().strip() == str(program), "AIPerf leaves folders of its own behind"


LISTENS = """
import os, socket, sys, time
open(os.environ["SEEN"], "w").write("\\n".join(os.environ))
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
time.sleep(600)
"""


def test_gateway_for_aiperf_has_no_keys(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with keys in the environment, it refused all requests of AIPerf, which has none."""
    monkeypatch.setenv(KEYS_VARIABLE, "alice:secret")
    monkeypatch.setenv("SEEN", str(program / "seen"))
    monkeypatch.setattr(gateway_module, "GATEWAY_PROGRAM", LISTENS)
    with contextlib.ExitStack() as stack:
        assert load_test._gateway("127.0.0.1:9", [Target("writes", SAMPLES)], stack)
    assert KEYS_VARIABLE not in (program / "seen").read_text()


def test_only_streams_are_measured_with_aiperf() -> None:
    """Regression: a sample that does not stream was sent as a stream."""
    client: Any = SimpleNamespace(signature=SimpleNamespace(streams=True))
    assert aiperf.is_completion(client, SAMPLES)
    assert not aiperf.is_completion(client, [*SAMPLES, {"text_input": "The museum", "stream": False}])
    assert not aiperf.is_completion(client, [*SAMPLES, {"messages": "[]", "stream": True}])


def test_aiperf_that_measures_nothing_is_an_error(program: Path) -> None:
    with pytest.raises(ServeError, match="AIPerf ended with status 3: no tokenizer"):
        aiperf.drive("http://127.0.0.1:9", "writes", SAMPLES, EIGHT, 6, 0, program, 60)


def test_missing_program_is_named_with_how_to_install_it(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert aiperf.missing() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert aiperf.missing() == aiperf.INSTALLING


def test_programs_are_named_and_not_compared_with_each_other(tmp_path: Path) -> None:
    before = run_of(*stream(EIGHT, [640.0, 650.0]))
    after = run_of(*(LoadMeasurement(**{**vars(load), "program": AIPERF}) for load in before.loads))
    save(after, tmp_path / "load.json")
    assert read(tmp_path / "load.json") == after
    assert "AIPerf over the gateway" in shown(table(after))
    assert compare_runs(after, after)
    with pytest.raises(SpecError, match="it has writes at 8 at once, by perf_analyzer over gRPC"):
        compare_runs(before, after)
