"""Benchmarks: their measures, workloads, peers and files of figures."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file

from builder.graphs.onnx.graph import save_graph
from builder.runtime.contract import LayerShape
from scripts.benchmarks import generation, generators, load_programs, lookups, paced_streams, peers, seq2seq, step
from scripts.benchmarks.circumstances import circumstances, refuse_other, write_figures
from scripts.benchmarks.cluster_failures import Cut, Failed, Fleet, Turn, read_embedding, read_stream
from scripts.benchmarks.decode_limits import decode_limit
from scripts.benchmarks.fleet_loads import stages
from scripts.benchmarks.generation import check_counts, medians
from scripts.benchmarks.generation_work import WORKS, make_cells, make_work
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
    assert figures["tokens"] == 16
    assert "decode_tokens_per_s" not in figures, "the last request began when the others had ended"


def test_clock_returns_the_rate_while_all_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock()
    clock.send("early")
    clock.send("late")
    for at, request, count in ((1, "early", 5), (3, "late", 1), (4, "early", 2), (5, "late", 4), (7, "late", 9)):
        now = float(at)
        clock.tokens(request, count)
    clock.tokens("early", 1)
    assert clock.figures()["decode_tokens_per_s"] == pytest.approx((2 + 4 + 9 + 1) / 4.0)


def test_write_figures_keeps_figures_of_other_sides(tmp_path: Path) -> None:
    """A table is filled by several runs of a few minutes."""
    path = tmp_path / "figures.json"
    write_figures(path, {"date": "1", "models": {"gpt2": {"ours": {"1": {"tokens_per_s": 1}}}}})
    write_figures(path, {"date": "2", "models": {"gpt2": {"ours": {"8": {"tokens_per_s": 2}}, "theirs": {}}}})
    assert json.loads(path.read_text()) == {
        "date": "2",
        "models": {"gpt2": {"ours": {"1": {"tokens_per_s": 1}, "8": {"tokens_per_s": 2}}, "theirs": {}}},
    }


def test_step_operators_of_an_older_run_are_replaced(tmp_path: Path) -> None:
    """Regression: operators that the newer run does not have stayed beside its own."""
    path = tmp_path / "figures.json"
    for spent in ({"MatMul": 2.0, "Add": 1.0}, {"Gemm": 3.0}):
        write_figures(path, {"gpt2": {"int8": {"operators": step.slowest(spent)}}})
    assert json.loads(path.read_text()) == {"gpt2": {"int8": {"operators": [["Gemm", 3.0], ["others", 0]]}}}


def test_step_reads_matrices_and_rows_of_tables(tmp_path: Path) -> None:
    """A lookup reads one row of its table, a product all of its matrix."""
    table, matrix = np.zeros((50, 4), np.float32), np.zeros((4, 6), np.int8)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["hidden"]),
        helper.make_node("DequantizeLinear", ["matrix", "scale"], ["real"]),
        helper.make_node("MatMul", ["hidden", "real"], ["logits"]),
    ]
    constants = {"table": table, "matrix": matrix, "scale": np.array(0.5, np.float32)}
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 6])],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    saved = save_graph(helper.make_model(graph), tmp_path / "model.onnx")
    assert step.weight_bytes(saved) == matrix.nbytes + 4


def test_refuse_other_rejects_figures_of_another_workload(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    refuse_other(None, work="long")
    refuse_other(path, work="long")
    write_figures(path, {"work": "mixed"})
    refuse_other(path, work="mixed")
    with pytest.raises(SystemExit, match="figures of work 'mixed', and these are of 'long'"):
        refuse_other(path, work="long")


def test_refuse_other_rejects_figures_that_do_not_name_a_circumstance(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_figures(path, {"cpu": "Xeon"})
    with pytest.raises(SystemExit, match="figures of instructions None"):
        refuse_other(path, cpu="Xeon", instructions=["amx_int8"])


def test_circumstances_have_date_machine_and_versions() -> None:
    assert set(circumstances()) == {"date", "cores", "cpu", "instructions", "versions"}


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


def test_contexts_make_one_request_of_equal_length_for_each_client() -> None:
    options = argparse.Namespace(contexts="40,90", concurrency="1,3")
    cells = make_cells(Words(), 1000, options)
    assert list(cells) == ["1/40", "3/40", "1/90", "3/90"]
    assert [len(item.prompt) for item in cells["3/90"].work] == [90] * 3
    assert len({item.text for item in cells["3/90"].work}) == 3, "no prompt begins as another"


def test_figures_are_medians_over_rounds() -> None:
    rounds = [{"1": {"tokens_per_s": rate, "sample": [1]}} for rate in (1.0, 5.0, 2.0)]
    assert medians(rounds) == {"1": {"tokens_per_s": 2.0, "sample": [1]}}


def test_side_that_answers_fewer_tokens_is_refused() -> None:
    documents = {"1": {"requests": [{"prompt": [1], "new_tokens": 5}]}}
    check_counts("theirs", documents, {"1": {"tokens": 5}})
    with pytest.raises(SystemExit, match="theirs, 1: 4 tokens came, and 5 were asked for"):
        check_counts("theirs", documents, {"1": {"tokens": 4}})


@pytest.mark.parametrize("experts", [0, 4])
def test_decode_limit_counts_weights_caches_and_states(experts: int, tmp_path: Path) -> None:
    """With 1 byte a weight: all weights once, the chosen experts, and each client's cache and state."""
    config = {"model_type": "granitemoe", "num_local_experts": experts, "num_experts_per_tok": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = {"model.embed_tokens.weight": torch.zeros(10, 8), "experts": torch.zeros(4, 5, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    layers = [LayerShape(2, 3), LayerShape(0, 0, [[7]])]
    of_experts = 160 if not experts else 160 * (1 - 0.75**2)
    read = 80 + of_experts + 2 * (2 * 2 * 3 * 100) + 2 * 2 * (7 * 4)
    machine = {"bandwidth": 1e-9, "int8": 1e9}
    assert decode_limit(tmp_path, layers, 2, 100, machine) == pytest.approx(2 / read)
    multiplied = 2 * 2 * (80 + (160 if not experts else 40))
    assert decode_limit(tmp_path, layers, 2, 100, {"bandwidth": 1e9, "int8": 1e-9}) == pytest.approx(2 / multiplied)


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


def test_stream_that_fails_before_its_first_piece_could_be_sent_again() -> None:
    piece, usage, error = (
        b"data: " + json.dumps(event).encode() + b"\n\n"
        for event in ({"choices": [{"text": "A"}]}, {"choices": [], "usage": {"completion_tokens": 2}}, {"error": 1})
    )
    done = b"data: [DONE]\n\n"
    assert read_stream(piece + piece + usage + done) == ("AA", 2)
    with pytest.raises(Cut):
        read_stream(piece + error)
    with pytest.raises(Failed):
        read_stream(error)


@pytest.mark.parametrize("content", [b"", b"<html>", b'{"data": []}'])
def test_turn_of_a_cluster_counts_an_answer_that_cannot_be_read_as_failed(content: bytes) -> None:
    """Regression: the client's thread ended, unseen, and its request was sent and had no outcome."""
    several = threading.Event()

    class Broken(Fleet):
        def __init__(self) -> None:
            self.asked = 0

        def ask(self, gateway: int, kind: str, text: str) -> Any:
            self.asked += 1
            if self.asked > 100:
                several.set()
            return read_embedding(content) if kind == "embedding" else read_stream(content)

    @contextmanager
    def wait() -> Iterator[None]:
        assert several.wait(60)
        yield

    figures = Turn(Broken(), [{}, {}]).run(wait, 0.0)
    assert figures["sent"] == figures["failed"] >= 100
    assert figures["errors"]


def test_stages_of_a_load_are_read_from_the_log_and_the_metrics() -> None:
    log = [
        'I1129 03:00:00.000000 1 model_lifecycle.cc:472] "loading: tiny0001:2"',
        'I1129 03:00:00.010000 1 python_be.cc:1] "TRITONBACKEND_ModelInstanceInitialize: tiny0001_0_0 (CPU device 0)"',
        "I1129 03:00:00.310000 1 model_lifecycle.cc:839] \"successfully loaded 'tiny0001'\"",
        "not of Triton",
    ]
    counts = {"model_load_seconds_count": 1.0, "model_load_seconds_sum": 0.5, "model_load_wait_seconds": 0.15}
    figures = stages(log, counts)
    assert figures == {
        "loads": 1,
        "triton_ms": 10.0,
        "process_ms": 300.0,
        "whole_ms": 500.0,
        "waiting_ms": 150.0,
        "gateway_ms": 40.0,
    }


def test_paced_streams_have_the_tokens_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_streams, "FIRST_S", 0.0)
    monkeypatch.setattr(paced_streams, "BETWEEN_S", 0.0)

    async def events() -> list[str]:
        return [event async for event in paced_streams.events(3)]

    *texts, end, usage, done = asyncio.run(events())
    assert [json.loads(text.removeprefix("data: "))["choices"][0]["text"] for text in texts] == [" a"] * 3
    assert json.loads(end.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 3
    assert done == "data: [DONE]\n\n"


def test_planned_figures_are_those_of_the_paced_streams() -> None:
    """Four clients, each with 64 tokens in 50 ms and 63 times 20 ms."""
    figures = load_programs.planned(4)
    assert figures["requests_per_s"] == pytest.approx(4 / 1.31)
    assert figures["tokens_per_s"] == pytest.approx(4 * 64 / 1.31)


def test_lookups_count_a_text_that_repeats_and_one_that_does_not() -> None:
    costs = [(1, 6.0), (2, 7.0), (16, 12.0)]
    assert lookups.step_ms(9, costs) == 9.5
    assert lookups.step_ms(30, costs) == pytest.approx(17)
    repeated = [lookups.Text([*range(40), 0, 1, 2], list(range(3, 40)))]
    novel = [lookups.Text([1, 2, 3] * 4, [token for number in range(50) for token in (1, 100 + number)])]
    for rule in lookups.RULES.values():
        figures = lookups.simulate(rule, repeated, 1, costs)
        assert figures["speed"] > 2
        assert figures["guessed"] > 0.8
        assert figures["right"] == 1
    ours, fixed = (lookups.simulate(rule, novel, 1, costs) for rule in lookups.RULES.values())
    assert fixed["speed"] < 0.95 < 0.99 < ours["speed"]
    assert ours["guessed"] == fixed["guessed"] < 0.02
