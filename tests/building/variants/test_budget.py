"""Read what --budget allows of a measure, and compare what variants keep of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from builder.building.families import encoder
from builder.building.keys import own_files
from builder.building.pipeline import build
from builder.building.variants.budget import LabelledJudge
from builder.checkpoints.labelled import Evaluation
from builder.checkpoints.labelled.evaluation import Comparison, LabelledData
from builder.checkpoints.metrics import LABEL_MEASURES, Scores, score_labels
from builder.common.errors import SpecError
from builder.options import make_spec
from builder.options.parts import Budget
from builder.repository.report.record import MeasuredVariant
from tests.tiny_encoders import make_checkpoint

DATA = {"name": "reviews.jsonl", "kind": "texts with labels", "count": "4 texts", "sha256": "0"}
LABELS = ("good", "bad", "good", "bad")


def judge(budget: Budget, answers: Sequence[str] = LABELS) -> LabelledJudge:
    """Return the judge of data that PyTorch answers with `answers`."""

    def items(found: Sequence[Any]) -> list[tuple[str, str]]:
        return [(label, answer["label"]) for label, answer in zip(LABELS, found, strict=True)]

    def score(pairs: Sequence[tuple[str, str]]) -> Scores:
        return score_labels(*zip(*pairs, strict=True))

    samples = [{"text_input": answer} for answer in answers]
    labelled = LabelledData(DATA["kind"], DATA["count"], samples, items, score, LABEL_MEASURES)
    comparison = Comparison(lambda sample: {"label": sample["text_input"]}, lambda a, b: float(a == b), "same label")
    return LabelledJudge(Evaluation(labelled, comparison), budget, DATA)


@pytest.mark.parametrize(
    ("budget", "measure", "share"),
    [
        (Budget("accuracy", 0.005, True), "accuracy", 0.995),
        (Budget("accuracy", 0.03, False), "accuracy", 0.96),
        (Budget("f1", 0.1, True), "F1 macro", 0.9),
        (Budget("F1_macro", 0.2, True), "F1 macro", 0.8),
    ],
)
def test_allowance_is_a_share_of_pytorchs_score(budget: Budget, measure: str, share: float) -> None:
    allowance = judge(budget, ("good", "bad", "good", "good")).allowance()
    assert allowance.measure == measure
    assert allowance.share == pytest.approx(share)
    assert allowance.metric == f"share of PyTorch's {measure} on reviews.jsonl"
    words = f"PyTorch's {measure} on reviews.jsonl is {allowance.score:.4f}: at least {share * allowance.score:.4f} is"
    assert str(allowance).startswith(words)


def test_variant_keeps_a_share_of_the_measure() -> None:
    labelled = judge(Budget("accuracy", 0.1, True))
    answers = [{"label": label} for label in ("good", "good", "good", "bad")]
    measured = labelled.judged(MeasuredVariant("int8", 1, {}), answers)
    allowance = labelled.allowance()
    assert measured.scores["accuracy"] == 0.75
    assert allowance.kept(measured) == 0.75
    assert allowance.kept(MeasuredVariant("not judged", 1, {})) == 0
    low, high = measured.interval["accuracy"]
    assert low <= -0.25 <= high
    assert measured.in_words("accuracy") == f"0.7500 ({low:+.4f} to {high:+.4f})"
    assert measured.in_words("recall@10") == "-"


@pytest.mark.parametrize(
    ("budget", "answers", "message"),
    [
        (Budget("accuracy", 0.1, True), ("bad", "good") * 2, "PyTorch's accuracy on reviews.jsonl is 0.0000"),
        (Budget("accuracy", 0.75, False), ("good", "bad", "good", "good"), "lose 0.75, .* is 0.7500: allow less"),
    ],
)
def test_budget_that_cannot_be_measured_is_refused(budget: Budget, answers: Sequence[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        judge(budget, answers).allowance()


def test_misspelt_measure_is_found_before_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was found after the export, and after PyTorch had answered all of the data."""
    data = tmp_path / "reviews.jsonl"
    data.write_text(json.dumps({"text": "A good film", "label": 0}))
    model = make_checkpoint(tmp_path / "model", "bert", "text-classification")
    monkeypatch.setattr(encoder, "export", lambda *_: pytest.fail("exported"))
    spec = make_spec(
        model=str(model), task="text-classification", budget="acuracy -0.5%", data=data, output=tmp_path / "r"
    )
    with pytest.raises(SpecError, match=r"names acuracy; reviews\.jsonl has texts .* measures are accuracy, F1 macro"):
        build(spec)


def test_keys_of_a_build_cover_the_data(tmp_path: Path) -> None:
    data = tmp_path / "reviews.jsonl"
    digests = []
    for text in ("good", "bad"):
        data.write_text(text)
        digests.append(own_files(None, None, data))
    assert digests[0] != digests[1]
