"""Samples of a build: those that fail stop it, and rounded variants are verified on more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.building.pipeline import build
from builder.building.variants import evaluator
from builder.building.variants.evaluator import make_evaluator
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import Sample
from builder.common.errors import SpecError
from builder.graphs.export.encoder import Export, export
from builder.options import BuildSpec, make_spec
from builder.runtime.contract import FILE, dump
from builder.runtime.encoder.task import Task
from builder.runtime.fields import Field, InputError
from tests.rerankers import make_reranker
from tests.servings import encoder_serving
from tests.tiny_encoders import make_checkpoint, make_tokenizer


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (InputError("too long"), SpecError, "sample 1 is refused by the model itself: too long"),
        (KeyError("ids"), KeyError, "ids"),
    ],
)
def test_failing_sample_stops_the_build(
    error: Exception, raised: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Task, "rows", fail)
    (tmp_path / FILE).write_text(dump(encoder_serving()))
    (tmp_path / "tokenizer.json").write_text(make_tokenizer("wordpiece", type_ids=True).backend_tokenizer.to_str())
    with pytest.raises(raised, match=message):
        evaluator._engine_feeds(tmp_path, ((Field("text_input", "TYPE_STRING"),), ()), ({"text_input": "a museum"},))


def test_large_model_is_judged_on_half_of_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of eight documents: with a template of 90 tokens PyTorch alone took minutes for all of a 0.6B decoder's."""
    monkeypatch.setattr(evaluator, "ENOUGH_ROWS", 8)
    spec = make_spec(model=str(make_reranker(tmp_path / "reranker", "qwen3")))
    checkpoint = resolve(spec)
    exported = export(checkpoint, tmp_path)
    whole, half = (_samples(spec, checkpoint, exported, tmp_path, monkeypatch, limit) for limit in (1e13, 1.0))
    assert len(whole) > 4
    assert half == whole[::2]
    monkeypatch.setattr(evaluator, "ENOUGH_ROWS", 64 * len(whole))
    assert _samples(spec, checkpoint, exported, tmp_path, monkeypatch, 1.0) == whole


def _samples(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    exported: Export,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
) -> tuple[Sample, ...]:
    monkeypatch.setattr(evaluator, "MAX_QUICK_CALLS", limit)
    return make_evaluator(spec, checkpoint, exported.module, exported.graph, folder).samples


@pytest.mark.slow
def test_rounded_variant_is_judged_on_a_hundred_samples(tmp_path: Path) -> None:
    """Regression: the minimum over 32 samples was too optimistic for rounded variants; exact ones still use 32."""
    model = make_checkpoint(tmp_path / "model", "bert", "feature-extraction")
    spec = make_spec(model=str(model), max_length=512, output=tmp_path / "repository")
    assert build(spec).samples == 32
    assert build(spec.model_copy(update={"precision": "int8", "quality": 0.5})).samples >= 100
