"""Benchmarks: their measures, workloads, peers and files of figures."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import generation, generators, peers, seq2seq
from scripts.benchmarks.circumstances import circumstances, refuse_other, write_figures
from scripts.benchmarks.generation import WORKS, make_work
from scripts.benchmarks.peers.clock import Clock


def test_clock_returns_rates_and_median_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock()
    for request, first, later in (("a", 0.5, 2.5), ("b", 1.5, 2.5), ("c", 1.0, 4.0)):
        now = 10.0
        clock.send(request)
        now = 10.0 + first
        clock.tokens(request)
        now = 10.0 + later
        clock.tokens(request, 4)
    now = 11.0
    clock.send("alone")
    now = 12.0
    clock.tokens("alone", 1)
    figures = clock.figures()
    assert figures["tokens_per_s"] == pytest.approx(16 / 4.0)
    assert figures["first_token_ms"] == pytest.approx(1000 * 1.0)
    assert figures["inter_token_ms"] == pytest.approx(1000 * 0.5)


def test_write_figures_keeps_figures_of_other_sides(tmp_path: Path) -> None:
    """A table is filled by several runs of a few minutes."""
    path = tmp_path / "figures.json"
    write_figures(path, {"date": "1", "models": {"gpt2": {"ours": {"1": {"tokens_per_s": 1}}}}})
    write_figures(path, {"date": "2", "models": {"gpt2": {"ours": {"8": {"tokens_per_s": 2}}, "theirs": {}}}})
    assert json.loads(path.read_text()) == {
        "date": "2",
        "models": {"gpt2": {"ours": {"1": {"tokens_per_s": 1}, "8": {"tokens_per_s": 2}}, "theirs": {}}},
    }


def test_refuse_other_rejects_figures_of_another_workload(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    refuse_other(None, work="long")
    refuse_other(path, work="long")
    write_figures(path, {"work": "mixed"})
    refuse_other(path, work="mixed")
    with pytest.raises(SystemExit, match="figures of work 'mixed', and these are of 'long'"):
        refuse_other(path, work="long")


def test_circumstances_have_date_machine_and_versions() -> None:
    assert set(circumstances()) == {"date", "cores", "cpu", "versions"}


class Words:
    """Tokeniser of one token a word."""

    def __call__(self, text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    def decode(self, words: list[str]) -> str:
        return " ".join(words)


@pytest.mark.parametrize("kind", WORKS)
def test_make_work_respects_lengths_and_positions(kind: str) -> None:
    (least, most), (fewest, longest) = WORKS[kind]
    work = make_work(Words(), 20, kind)
    assert all(least - 1 <= len(item.prompt) <= most for item in work)
    assert all(fewest - 1 <= item.new_tokens <= longest for item in work)
    assert make_work(Words(), 5, kind) == work[:5]
    short = make_work(Words(), 20, kind, positions=400)
    assert all(len(item.prompt) + item.new_tokens <= 400 for item in short)


FAILING_PEER = """
import sys
print("operator torchvision::nms does not exist", file=sys.stderr)
sys.exit("Traceback of the program that called it")
"""
WORKING_PEER = """
print("a log line")
print('{"tokens_per_s": 2.0, "first_token_ms": 1.0, "inter_token_ms": 1.0, "answer_ms": 1.0}')
"""


@pytest.fixture
def fake_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[str, str, str], ...]:
    """Return two peers that run in this environment: one fails, one works."""
    for name, source in (("failing", FAILING_PEER), ("working", WORKING_PEER)):
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "PACKAGES", {"failing": (), "working": ()})
    return ("theirs", "failing", "int8"), ("others", "working", "int8")


@pytest.mark.parametrize(
    ("benchmark", "shapes", "cell", "options"),
    [
        (generation, {"tiny": ("gpt2", {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 2048})}, "1", []),
        (
            seq2seq,
            {"tiny": ("t5", {"d_model": 8, "d_ff": 8, "num_layers": 1, "d_kv": 4, "num_heads": 2, "vocab_size": 2048})},
            "1/1",
            ["--beams", "1"],
        ),
    ],
    ids=["generation", "seq2seq"],
)
def test_benchmark_fails_with_the_reason_of_a_failed_peer(
    benchmark: Any,
    shapes: dict[str, Any],
    cell: str,
    options: list[str],
    fake_peers: tuple[tuple[str, str, str], ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: a peer with a broken environment left a dash in the table, and the exit status was 0."""
    monkeypatch.setattr(benchmark, "PEERS", fake_peers)
    monkeypatch.setattr(generators if benchmark is generation else seq2seq, "SHAPES", shapes)
    output = tmp_path / "figures.json"
    arguments = ["bench", "--models", "tiny", "--ours", "", "--concurrency", "1", "--peers", "theirs,others"]
    monkeypatch.setattr("sys.argv", [*arguments, *options, "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert "tiny, theirs: " in str(ended.value)
    assert "torchvision::nms" in str(ended.value), "the first reason, before the traceback of its caller"
    sides = json.loads(output.read_text())["models"]["tiny"]
    assert set(sides) == {"others"}, "a side that failed has no figures"
    assert sides["others"][cell]["tokens_per_s"] == 2.0, "the sides after it are still measured"
    assert "others" in capsys.readouterr().out


def test_benchmark_refuses_the_name_of_an_unknown_peer() -> None:
    with pytest.raises(SystemExit, match=r"llama is not a peer; choose from .*llama\.cpp Q8_0"):
        peers.chosen(generation.PEERS, "llama.cpp Q8_0,llama")


def test_peer_that_prints_no_figures_fails(fake_peers: object, tmp_path: Path) -> None:
    (tmp_path / "working.py").write_text("print('nothing')")
    with pytest.raises(peers.PeerError, match="working printed no figures"):
        peers.run("working", tmp_path)


@pytest.mark.slow
def test_peer_environment_has_no_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: torchvision of another index than torch made transformers fail at its import."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = tmp_path / "torchvision-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torchvision.py", "raise RuntimeError('operator torchvision::nms does not exist')")
        archive.writestr(
            "torchvision-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n"
        )
        archive.writestr(
            "torchvision-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("torchvision-0.1.dist-info/RECORD", "")
    python = peers.environment("peer", [str(wheel)], tmp_path / "environments")
    assert "None" in peers.run_command([python, "-c", "import importlib.util as u; print(u.find_spec('torchvision'))"])
