"""The retrieval benchmark: its requests, ratios and limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BertConfig, Qwen3Config

from scripts.benchmarks.retrieval import _limits, _medians, _ratios
from scripts.benchmarks.retrieval_models import RETRIEVAL_MODELS
from scripts.benchmarks.retrieval_sides import PEERS, triton_door


def rounds(*rates: float) -> list[dict[str, dict[str, float]]]:
    return [
        {clients: {"texts_per_s": rate, "p50_ms": 1, "p99_ms": 2} for clients in ("1", "8", "32")} for rate in rates
    ]


def test_ratio_is_the_median_over_rounds_beside_the_fastest_peer_of_equal_bits() -> None:
    measured = {
        "ours fp32": rounds(20, 30, 60),
        "ours int8": rounds(90, 90, 90),
        "FastEmbed fp32": rounds(10, 10, 20),
        "vLLM fp32": rounds(5, 20, 10),
    }
    precisions = {side: side.split()[-1] for side in measured}
    assert _ratios(measured, precisions) == {"fp32": {"1": 2.0, "8": 2.0, "32": 2.0}}


def test_medians_are_taken_by_clients() -> None:
    assert _medians(rounds(1, 9, 4))["8"] == {"texts_per_s": 4, "p50_ms": 1, "p99_ms": 2}


def test_rerankers_get_a_query_and_as_many_documents_as_the_entry_says() -> None:
    model = RETRIEVAL_MODELS["qwen3-reranker"]
    texts = [f"text {number}" for number in range(25)]
    requests = model.requests(texts)
    assert len(requests) == 25
    assert all(len(request["documents"]) == 20 == model.texts for request in requests)
    assert all(request["query"] not in request["documents"] for request in requests)
    body = triton_door(1, "rerank").body(requests[3])
    assert [(tensor["name"], tensor["shape"]) for tensor in body["inputs"]] == [
        ("query", [1, 1]),
        ("documents", [1, 20]),
    ]


def test_every_model_has_a_peer_of_its_kind() -> None:
    kinds = {model.kind for model in RETRIEVAL_MODELS.values()}
    assert all(any(kind in peer.kinds for peer in PEERS.values()) for kind in kinds)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_limit_counts_the_weights_of_the_layers(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    if kind == "bert":
        config, weights, wide = BertConfig(**sizes), 3 * (4 * 8 * 8 + 2 * 8 * 16), 8
    else:
        config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=6)
        weights, wide = 3 * (8 * (2 * 12 + 2 * 6) + 3 * 8 * 16), 12
    config.save_pretrained(tmp_path)
    limits = _limits(tmp_path, [2, 4], {"fp32": 2.0, "int8": 4.0, "bandwidth": 8.0})
    operations = 2 * weights * 3 + 4 * 3 * wide * (4 + 16) / 2
    assert limits["fp32"] == pytest.approx(2e9 / operations)
    assert limits["int8"] == pytest.approx(4e9 / operations)
    assert limits["fp32 alone"] == pytest.approx(8e9 / (4 * weights))
