"""The retrieval benchmark: its requests, ratios and limits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import BertConfig, Qwen3Config

from scripts.benchmarks.peers.retrieval_libraries import CONVERTERS, LIBRARIES
from scripts.benchmarks.retrieval import BYTES, _cosine, _limits, _medians, _ratios, write_run
from scripts.benchmarks.retrieval_models import RETRIEVAL_MODELS
from scripts.benchmarks.retrieval_sides import PEERS, triton_door
from scripts.documentation import retrieval
from scripts.documentation.retrieval import PRECISIONS, TITLES


def rounds(*rates: float) -> list[dict[str, dict[str, float]]]:
    return [
        {clients: {"texts_per_s": rate, "p50_ms": 1, "p99_ms": 2} for clients in ("1", "8", "32")} for rate in rates
    ]


def test_ratio_is_the_median_over_rounds_beside_the_fastest_peer_of_a_run() -> None:
    measured = {
        "ours fp32": rounds(20, 30, 60),
        "ours fp32 OpenVINO": rounds(10, 40, 10),
        "FastEmbed": rounds(10, 10, 20),
        "vLLM": rounds(5, 20, 10),
    }
    own = ["ours fp32", "ours fp32 OpenVINO"]
    assert _ratios(measured, own) == {"1": 2.0, "8": 2.0, "32": 2.0}
    assert _ratios({"ours fp32": rounds(1)}, own) == {}, "no peer ran"


def test_run_replaces_the_earlier_run_of_its_model_and_precision(tmp_path: Path) -> None:
    """A ratio compares sides of one run, so that no side of an earlier run may stay beside it."""
    path = tmp_path / "figures.json"
    write_run(path, {"cores": 2}, "minilm", "fp32", {"sides": {"ours fp32": {}, "FastEmbed": {}}})
    write_run(path, {"cores": 2}, "minilm", "int8", {"sides": {"ours int8": {}}})
    write_run(path, {"cores": 2}, "minilm", "fp32", {"sides": {"ours fp32": {}}})
    assert json.loads(path.read_text()) == {
        "cores": 2,
        "models": {"minilm": {"fp32": {"sides": {"ours fp32": {}}}, "int8": {"sides": {"ours int8": {}}}}},
    }


def test_cosine_of_scores_is_their_correlation() -> None:
    assert _cosine("embed", [3, 4], [6, 8]) == pytest.approx(1)
    assert _cosine("embed", [1, 0], [1, 1]) == pytest.approx(0.5**0.5)
    assert _cosine("rerank", [101, 102, 103], [5, 7, 9]) == pytest.approx(1)
    assert _cosine("rerank", [1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


def test_door_of_triton_reads_the_numbers_behind_the_json() -> None:
    head = {"outputs": [{"name": "embedding", "parameters": {"binary_data_size": 8}}]}
    content = json.dumps(head).encode() + np.array([1.5, -2], np.float32).tobytes()
    assert triton_door(1, "embed").numbers(content) == [1.5, -2]


def test_medians_are_taken_by_clients() -> None:
    assert _medians(rounds(1, 9, 4))["8"] == {"texts_per_s": 4, "p50_ms": 1, "p99_ms": 2}


def test_rerankers_get_a_query_and_as_many_documents_as_the_entry_says() -> None:
    model = RETRIEVAL_MODELS["qwen3-reranker"]
    texts = [f"text {number}" for number in range(25)]
    requests = model.requests(texts)
    assert len(requests) == 25
    assert all(len(request["documents"]) == 20 == model.texts for request in requests)
    assert all(request["query"] not in request["documents"] for request in requests)
    body = triton_door(1, model.kind).body(requests[3])
    assert [(tensor["name"], tensor["shape"]) for tensor in body["inputs"]] == [
        ("query", [1, 1]),
        ("documents", [1, 20]),
    ]


def test_page_has_a_title_for_every_model_and_a_place_for_every_precision() -> None:
    assert list(TITLES) == list(RETRIEVAL_MODELS)
    assert list(PRECISIONS) == list(BYTES)


def test_sentence_says_how_many_runs_there_are_and_of_which_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"ratios": {"1": 1.5, "8": 2.0, "32": 3.0}}
    models = {"minilm": {"fp32": run, "int8": {"ratios": {}}}, "colbert": {"bf16": run}}
    again = {"minilm": {"fp32": {"ratios": {"1": 1.2}}}}
    machines = [
        retrieval.Machine("a", {"cores": 2, "cpu": "AMD", "models": models}),
        retrieval.Machine("b", {"cores": 2, "cpu": "Intel", "models": again}),
    ]
    monkeypatch.setattr(retrieval, "_machines", lambda: machines)
    told = retrieval.sentence()
    assert "on 2 cores of 2 machines" in told
    assert "(embedders, ColBERT)" in told
    assert "1.20x to 1.50x with 1 client" in told
    assert "2 of 24 runs" in told, "a run on two machines counts once"


def test_every_model_has_a_peer_of_its_kind() -> None:
    kinds = {model.kind for model in RETRIEVAL_MODELS.values()}
    assert all(any(kind in peer.kinds for peer in PEERS.values()) for kind in kinds)


def test_every_library_of_a_side_can_be_opened_and_converted() -> None:
    sides = {name: side for name, side in PEERS.items() if name in LIBRARIES}
    assert list(sides) == list(LIBRARIES)
    assert {name for name, side in sides.items() if side.converter} == set(CONVERTERS)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_limit_counts_the_weights_of_the_layers(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    if kind == "bert":
        config, weights, wide = BertConfig(**sizes), 3 * (4 * 8 * 8 + 2 * 8 * 16), 8
    else:
        config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=6)
        weights, wide = 3 * (8 * (2 * 12 + 2 * 6) + 3 * 8 * 16), 12
    config.save_pretrained(tmp_path)
    limits = _limits(tmp_path, [2, 4], {"fp32": 2.0, "bf16": 3.0, "int8": 4.0, "bandwidth": 8.0})
    operations = 2 * weights * 3 + 4 * 3 * wide * (4 + 16) / 2
    assert limits["fp32"] == pytest.approx(2e9 / operations)
    assert limits["int8"] == pytest.approx(4e9 / operations)
    assert limits["int8-weights"] == limits["int8"], "products with 8-bit weights round their inputs to 8 bits too"
    assert limits["fp32 alone"] == pytest.approx(8e9 / (4 * weights))
