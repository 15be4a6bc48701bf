"""docs/architectures.json lists the outcome of every architecture of transformers; some are reproduced here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from scripts import architecture_table
from scripts.architecture_table import FILE, NO_REASON, OUTCOMES, Differs, row_error, tried
from scripts.tiny_models import HEADS, architectures, tiny_model


def rows() -> list[dict[str, str]]:
    document = json.loads(FILE.read_text("utf-8"))
    assert document["transformers"] == transformers.__version__, "run scripts/architectures"
    return list(document["rows"])


def test_table_lists_every_architecture_of_transformers() -> None:
    listed = [(row["head"], row["model_type"]) for row in rows()]
    assert listed == [(head, model_type) for head in HEADS for model_type in architectures(head)]


def test_table_outcomes_are_known_and_have_a_reason() -> None:
    for row in rows():
        assert row["outcome"] in OUTCOMES
        assert row["reason"] or row["outcome"] == "verified", row
        assert row["outcome"] != "refused" or not NO_REASON.search(row["reason"]), row


def test_few_decoders_are_refused_and_for_what_they_are() -> None:
    others = [row for row in rows() if row["head"] == "CAUSAL_LM" and row["outcome"] != "verified"]
    assert len(others) <= 10
    for row in others:
        assert re.search("cannot be served for generation: |is several models in one", row["reason"]), row


@pytest.mark.parametrize(
    ("head", "model_type", "outcome", "message"),
    [
        ("CAUSAL_LM", "cwm", "verified", ""),
        ("CAUSAL_LM", "rwkv", "verified", ""),
        ("CAUSAL_LM", "reformer", "refused", "reformer cannot be served for generation: its tokens see those in the"),
        ("CAUSAL_LM", "gemma4_assistant", "verified", "as the --draft of a gemma4_text"),
        ("CAUSAL_LM", "mllama", "verified", "it also reads image"),
        ("CAUSAL_LM", "musicgen", "refused", "musicgen_decoder, is not served without the others"),
        ("CAUSAL_LM", "prophetnet", "refused", "prophetnet cannot be served for generation: in a prompt its"),
        pytest.param("TOKEN_CLASSIFICATION", "megatron-bert", "verified", "", marks=pytest.mark.slow),
    ],
)
def test_outcomes_of_the_table_are_reproduced(
    head: str, model_type: str, outcome: str, message: str, tmp_path: Path
) -> None:
    row = tried(head, model_type, tmp_path)
    assert row.outcome == outcome, row
    assert message in row.reason
    assert (row.error is None) == (outcome != "verified")


def test_row_error_refuses_an_answer_unlike_pytorch() -> None:
    model = tiny_model("TOKEN_CLASSIFICATION", "bert")
    feeds = {"input_ids": np.array([[5, 6, 7, 0]]), "attention_mask": np.array([[1, 1, 1, 0]])}
    with torch.no_grad():
        logits = model(**{name: torch.from_numpy(values) for name, values in feeds.items()}).logits.numpy()
    assert row_error(model, feeds, {"logits": logits}, 0) < 1e-5
    with pytest.raises(Differs, match="a row of 3 tokens in a batch of 1 is off by"):
        row_error(model, feeds, {"logits": logits * 1.01}, 0)


def test_time_limit_counts_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with a wall-clock limit, a build that waited for other programs was listed as failed."""

    def endless(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(architecture_table, "LIMIT_S", 1)
    monkeypatch.setattr(architecture_table, "tried", endless)
    row = architecture_table._in_a_process("CAUSAL_LM", "llama")
    assert (row.outcome, row.reason) == ("wrong", "not done after 1 s of a processor")


@pytest.mark.parametrize("model_type", ["afmoe", "axk2"])
def test_tiny_routers_have_no_zero_weights(model_type: str) -> None:
    """These models initialise routers to zero: all experts tie, and PyTorch and ONNX Runtime choose differently."""
    model = tiny_model("CAUSAL_LM", model_type)
    assert not [name for name, tensor in model.named_parameters() if tensor.dim() > 1 and not tensor.count_nonzero()]
