"""Samples of a build: those that fail stop it, and rounded variants are verified on more of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
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
from builder.runtime.encoder.pipeline import Answer, Pipeline
from builder.runtime.encoder.task import Task
from builder.runtime.fields import Field, InputError, Tensors
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


def test_refused_row_of_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: its number counted from the start of its call, and the emitted code was said to fail."""

    class Refusing(Pipeline):
        def __call__(self, requests: Sequence[Tensors]) -> list[Answer]:
            refused = InputError("too long")
            return [refused if one["text_input"][0, 0] == b"3" else {"score": np.ones((1, 1))} for one in requests]

    monkeypatch.setattr(evaluator, "Pipeline", Refusing)
    monkeypatch.setattr(evaluator, "MAX_REQUESTS", 2)
    (tmp_path / FILE).write_text(dump(encoder_serving()))
    (tmp_path / "tokenizer.json").write_text(make_tokenizer("wordpiece", type_ids=True).backend_tokenizer.to_str())
    fields = (Field("text_input", "TYPE_STRING"),), (Field("score", "TYPE_FP32"),)
    front = SimpleNamespace(fields=fields, front_of=lambda graph: tmp_path)
    requests = [{"text_input": str(number)} for number in range(1, 5)]
    answers = evaluator.Evaluator.answers(cast(Any, front), cast(Any, None), dict, requests, "reviews.jsonl")
    with pytest.raises(SpecError, match=r"reviews.jsonl: text 3 is refused by the model itself: too long"):
        list(answers)


def test_samples_that_name_an_adapter_are_refused(tmp_path: Path) -> None:
    """Regression: they were read, and answered without the adapter."""
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"text_input": "a museum", "lora_name": "sql"}\n')
    model = make_checkpoint(tmp_path / "model", "bert", "feature-extraction")
    spec = make_spec(model=str(model), samples=samples, adapters=1)
    checkpoint = resolve(spec)
    exported = export(checkpoint, tmp_path)
    with pytest.raises(SpecError, match="line 1: expected an object with text_input"):
        make_evaluator(spec, checkpoint, exported.module, exported.graph, tmp_path)


def test_large_model_is_judged_on_half_of_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of eight documents: with a template of 90 tokens PyTorch alone took minutes for all of a 0.6B decoder's."""
    monkeypatch.setattr(evaluator, "MIN_JUDGED_ROWS", 8)
    spec = make_spec(model=str(make_reranker(tmp_path / "reranker", "qwen3")))
    checkpoint = resolve(spec)
    exported = export(checkpoint, tmp_path)
    whole, half = (_samples(spec, checkpoint, exported, tmp_path, monkeypatch, limit) for limit in (1e13, 1.0))
    assert len(whole) > 4
    assert half == whole[::2]
    monkeypatch.setattr(evaluator, "MIN_JUDGED_ROWS", 64 * len(whole))
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
