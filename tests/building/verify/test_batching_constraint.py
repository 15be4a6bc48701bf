"""Rows share an engine call only if PyTorch answers each row as it does alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from builder.building.verify.parity import TOLERANCE, batching_constraint, first_row_distance, reference
from builder.checkpoints.distances import difference
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import TaskGraph, encoder_task
from builder.common.samples import TEXTS
from builder.graphs.export.encoder import task_graph
from builder.graphs.export.rows import Rows, rows_of
from builder.options import make_spec
from tests.fronts import answers, front_over_pytorch
from tests.tiny_encoders import SIZES, VOCABULARY, make_checkpoint


@pytest.mark.parametrize("name", ["topics", "entail", "names", "pooled", "ranks"])
def test_batching_of_most_models_is_unconstrained(name: str, checkpoint: Callable[[str], Path]) -> None:
    spec = make_spec(model=str(checkpoint(name)), pooling="cls" if name == "pooled" else None)
    resolved = resolve(spec)
    assert batching_constraint(task_graph(resolved), rows_of(resolved), resolved.max_length) is None


@pytest.mark.parametrize("model_type", ["convbert", "fnet"])
def test_batching_by_length_if_padding_changes_answers(model_type: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", model_type, "text-classification", {0: "a", 1: "b", 2: "c"})
    spec = make_spec(model=str(folder))
    checkpoint = resolve(spec)
    front = front_over_pytorch(checkpoint, spec, tmp_path)
    assert front.serving.batching.alike == "length"
    samples = [{"text_input": text, "top_k": 3} for text in (*TEXTS[:12], TEXTS[0])]
    expected = [encoder_task(checkpoint.task).reference(checkpoint, sample) for sample in samples]
    error, where = max(difference(e, a) for e, a in zip(expected, answers(front, checkpoint, samples), strict=True))
    assert error < 1e-5, where
    assert front.counts.calls < len(samples), "texts of one length still share calls"


def test_batching_by_length_if_positions_scale_with_the_batch() -> None:
    """Regression: a short text beside one beyond the original length used the longer one's rotary frequencies."""
    scaling = {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model("phi3", **SIZES, rope_parameters=scaling, original_max_position_embeddings=64)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    module = TaskGraph(model, ("input_ids", "attention_mask"), ("logits",))
    rows = Rows((2,), (3,), np.arange(10, VOCABULARY), 0, 1)
    one, beside = reference(module, rows, [9]), reference(module, rows, [9, 100])
    assert first_row_distance(one, beside) > TOLERANCE
    assert (batching_constraint(module, rows, 128), batching_constraint(module, rows, 64)) == ("length", None)


def test_batching_by_end_tokens_if_the_head_pools_there(tmp_path: Path) -> None:
    """Regression: in models like BART, a text with an end token failed or changed the answers of its batch."""
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    folder = make_checkpoint(tmp_path / "c", "bart", "zero-shot-classification", labels)
    spec = make_spec(model=str(folder), task="zero-shot-classification")
    checkpoint = resolve(spec)
    front = front_over_pytorch(checkpoint, spec, tmp_path)
    assert front.serving.batching.alike == checkpoint.config.eos_token_id
    texts = [TEXTS[0], f"{TEXTS[1]} [SEP] and [SEP] more", TEXTS[2], f"{TEXTS[3]} [SEP] so"]
    samples = [{"text_input": text, "candidate_labels": ["a", "food"]} for text in texts]
    expected = [encoder_task(checkpoint.task).reference(checkpoint, sample) for sample in samples]
    error, where = max(difference(e, a) for e, a in zip(expected, answers(front, checkpoint, samples), strict=True))
    assert error < 1e-5, where
