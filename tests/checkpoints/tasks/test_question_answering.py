"""The emitted question answering against transformers' last pipeline for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from builder.checkpoints.distances import difference
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import encoder_task
from builder.checkpoints.tokenizer import tokenizer_json
from builder.common.tensors import to_tensors, to_values
from builder.engines.onnxruntime import open_session, run_with
from builder.graphs.export.encoder import export
from builder.options import make_spec
from builder.repository.layout.encoder import serving_document
from builder.runtime.contract import FILE, dump
from builder.runtime.encoder.pipeline import Pipeline
from tests.golden import checkpoints

GOLDEN = json.loads((Path(checkpoints.__file__).parent / "question_answering.json").read_text("utf-8"))


@pytest.mark.parametrize("model_type", checkpoints.QUESTION_ANSWERING)
def test_question_answering_gives_the_pipelines_golden_answers(model_type: str, tmp_path: Path) -> None:
    """Cover windows, n-best answers, unanswerable questions, strides and Unicode offsets."""
    checkpoints.make_question_answering(tmp_path)
    spec = make_spec(model=str(tmp_path / model_type), name="model", max_length=GOLDEN["max_length"])
    checkpoint = resolve(spec)
    graph = export(checkpoint, tmp_path).graph
    parameters = encoder_task(checkpoint.task).parameters(checkpoint)
    serving = serving_document(spec, "question_answering", graph, checkpoint.max_length, {"input_ids": 0}, parameters)
    (tmp_path / FILE).write_text(dump(serving))
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(checkpoint.tokenizer))
    pipeline = Pipeline(tmp_path, run_with(open_session(graph.path, 1)))
    inputs, outputs = checkpoint.task.fields(parameters)
    cases = [case for case in GOLDEN["cases"] if case["checkpoint"] == model_type]
    assert len(cases) == 8
    answers = pipeline([to_tensors(case["request"], inputs) for case in cases])
    for case, answer in zip(cases, answers, strict=True):
        assert isinstance(answer, dict), answer
        (values,) = to_values(answer, outputs)
        actual = json.loads(values["answers"])
        assert difference(case["answers"], actual) <= (1e-5, "answer~"), case["request"]
        assert {key: values[key] for key in ("answer", "start", "end")} == {
            key: actual[0][key] for key in ("answer", "start", "end")
        }


@pytest.mark.parametrize("model_type", checkpoints.QUESTION_ANSWERING)
def test_build_reference_reads_long_contexts_in_windows(model_type: str, tmp_path: Path) -> None:
    """Regression: the reference read a long context without windows, and the build rejected the served answer."""
    checkpoints.make_question_answering(tmp_path)
    spec = make_spec(model=str(tmp_path / model_type), name="model", max_length=GOLDEN["max_length"])
    checkpoint = resolve(spec)
    cases = [case for case in GOLDEN["cases"] if case["checkpoint"] == model_type]
    assert max(len(checkpoint.tokenizer(case["request"]["context"])["input_ids"]) for case in cases) > 128
    for case in cases:
        expected = encoder_task(checkpoint.task).reference(checkpoint, case["request"])
        assert difference(case["answers"][0], expected) <= (1e-5, "answer~"), case["request"]


def test_default_window_has_the_length_of_the_pipeline(checkpoint: Callable[[str], Path]) -> None:
    """The default is 384 tokens, as in the pipeline and in training, even if the tokeniser allows more."""
    folder = str(checkpoint("answers"))
    assert resolve(make_spec(model=folder, name="model")).max_length == 384
    assert resolve(make_spec(model=folder, name="model", max_length=512)).max_length == 512
