"""A trained classifier with known answers: int8 keeps its accuracy."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from builder.building.pipeline import build
from builder.options import make_spec
from tests.tiny_encoders import make_checkpoint

TOPICS = {
    "travel": ("train", "river", "coast", "pass"),
    "food": ("soup", "batter", "salt", "kettle"),
    "music": ("cello", "orchestra", "concerto", "note"),
}
FRAMES = ("the {0} was better than the {1}", "please send the {0}", "i would not buy the {1} and the {0} again", "{0}?")


def _sentences() -> list[tuple[str, int]]:
    return [
        (frame.format(a, b), label)
        for label, words in enumerate(TOPICS.values())
        for frame in FRAMES
        for a, b in itertools.permutations(words, 2)
    ]


def _train(folder: Path) -> float:
    """Train on nine tenths of the sentences; return the accuracy on the rest."""
    labels = dict(enumerate(TOPICS))
    make_checkpoint(folder, "bert", "text-classification", labels, initializer_range=0.02, hidden_dropout_prob=0.0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    torch.manual_seed(0)
    data = _sentences()
    order = np.random.default_rng(0).permutation(len(data))
    texts = tokenizer([data[i][0] for i in order], return_tensors="pt", padding=True)
    targets = torch.tensor([data[i][1] for i in order])
    split = len(data) * 9 // 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        logits = model(**{key: value[:split] for key, value in texts.items()}).logits
        loss = torch.nn.functional.cross_entropy(logits, targets[:split])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    model.eval().save_pretrained(folder)
    with torch.no_grad():
        predicted = model(**{key: value[split:] for key, value in texts.items()}).logits.argmax(-1)
    return float((predicted == targets[split:]).float().mean())


@pytest.mark.slow
def test_trained_classifier_keeps_its_accuracy_in_int8(tmp_path: Path) -> None:
    assert _train(tmp_path / "topics") >= 0.95
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps({"text_input": text}) + "\n" for text, _ in _sentences()))
    report = build(
        make_spec(model=str(tmp_path / "topics"), precision="int8", samples=samples, output=tmp_path / "repository")
    )
    measured = report.variants[-1]
    assert measured.name == "int8"
    assert measured.quality is not None
    assert measured.quality >= 0.99
    assert measured.error is not None
    assert measured.error > 1e-4, "int8 is not fp32 under another name"
    assert report.quantised is not None
    assert report.quantised["matmuls"] >= 6
