"""Variants of models with known answers: their true score, refusals and report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from builder.building.pipeline import build
from builder.checkpoints.resolve import resolve
from builder.common.errors import SpecError, VerificationError
from builder.common.machine import cpu
from builder.engines.openvino import BF16
from builder.engines.optimise.static_quantisation import quantise_statically
from builder.engines.plain_attention import spell_out_attention
from builder.graphs.export.encoder import export
from builder.graphs.onnx.graph import read_graph
from builder.options import Calibration, make_spec
from builder.repository.report.record import read_report
from tests.tiny_encoders import make_checkpoint
from tests.trained import language_model, question_answering, token_classification
from tests.verified_once import VerifiedOnce

NO_BF16 = pytest.mark.skipif(not set(BF16) & set(cpu()["flags"]), reason="this CPU cannot multiply in bf16")
OPTIONS = (
    {"precision": "fp16"},
    pytest.param({"precision": "bf16"}, marks=NO_BF16),
    {"precision": "int8"},
    {"precision": "int8-static"},
    {"precision": "int8-static", "engine": "openvino"},
    {"precision": "int8-weights"},
    {"level": "O3"},
    {"level": "O4"},
    {"prune": 0.3},
    {"prune": 0.3, "precision": "int8-static"},
)


@pytest.fixture(scope="module")
def questions(module_folder: Callable[[str], Path]) -> VerifiedOnce:
    """Return the trained question-answering model, with its samples split for fitted variants."""
    model, samples = question_answering()
    spec = make_spec(model=str(model), name="qa", samples=samples, precision="int8-static")
    return VerifiedOnce(spec, module_folder("questions"))


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_question_answering_keeps_its_score(
    options: dict[str, object], questions: VerifiedOnce, tmp_path: Path
) -> None:
    _, samples = question_answering()
    spec = make_spec(model=questions.model, name="qa", samples=samples, output=tmp_path / "repository", **options)
    report = questions.build(spec)
    base, exact, *_, served = report.variants
    assert base.scores["F1"] >= 0.97
    assert exact.scores == base.scores
    assert served.scores["F1"] >= 0.99 * base.scores["F1"]
    assert served.name == report.chosen
    assert served.error is not None
    assert exact.error is not None
    assert served.error > exact.error, "it is not fp32 under another name"
    if "prune" in options:
        assert report.removed["pruned"]["neurons"] > 0
        assert served.size < 0.85 * base.size
    if "precision" in options and "prune" not in options:
        assert served.size < 0.6 * base.size


@pytest.mark.slow
def test_variant_that_loses_the_task_is_not_published(questions: VerifiedOnce, tmp_path: Path) -> None:
    """Pruning nine tenths of the layers loses the task: the true score shows it, and no variant remains."""
    _, samples = question_answering()
    spec = make_spec(model=questions.model, name="qa", samples=samples, output=tmp_path / "repository", prune=0.9)
    with pytest.raises(VerificationError, match=r"reaches a share of PyTorch's F1 of 0\.\d+ .* a smaller --prune"):
        questions.build(spec)
    assert not (tmp_path / "repository" / "qa").exists()


@pytest.mark.slow
def test_auto_precision_keeps_the_budget_of_the_users_data(questions: VerifiedOnce, tmp_path: Path) -> None:
    """Nothing is fitted to the data, and each variant that was judged has its measures and their intervals."""
    _, data = question_answering()
    spec = make_spec(
        model=questions.model, name="qa", output=tmp_path / "repository", precision="auto", budget="f1 -1%", data=data
    )
    report = questions.build(spec)
    base, exact, served = report.variants[0], report.variants[1], report.served
    assert report.gate == f"share of PyTorch's F1 on {data.name}"
    assert report.threshold == pytest.approx(0.99)
    assert report.budget is not None
    assert (report.budget["allowed"], report.budget["kind"]) == ("f1 -1%", "questions with answers")
    assert exact.scores == pytest.approx(base.scores)
    assert served.scores["F1"] >= 0.99 * base.scores["F1"]
    low, high = served.interval["F1"]
    assert low <= served.scores["F1"] - base.scores["F1"] <= high
    assert report.choice is not None
    assert "share of PyTorch's F1 on" in report.choice
    assert read_report(tmp_path / "repository", "qa").budget == report.budget


@pytest.mark.slow
def test_budget_that_is_not_kept_publishes_nothing(questions: VerifiedOnce, tmp_path: Path) -> None:
    _, data = question_answering()
    output = tmp_path / "repository"
    spec = make_spec(model=questions.model, name="qa", output=output, prune=0.9, budget="F1 -1%", data=data)
    message = r"reaches a share of PyTorch's F1 on samples\.jsonl of 0\.\d+.* or allow more with --budget"
    with pytest.raises(VerificationError, match=message):
        questions.build(spec)
    assert not (output / "qa").exists()


@pytest.mark.slow
def test_token_classification_keeps_its_score(tmp_path: Path) -> None:
    model, samples = token_classification()
    spec = make_spec(model=str(model), name="tags", samples=samples, precision="int8-static", output=tmp_path / "r")
    report = build(spec)
    assert report.variants[0].scores["entity F1"] >= 0.99
    assert report.variants[-1].scores["entity F1"] >= 0.99


@pytest.mark.slow
def test_language_model_keeps_its_perplexity(tmp_path: Path) -> None:
    model, samples = language_model()
    limits = {"quality": 0.8, "perplexity": 1.2}
    spec = make_spec(model=str(model), task="text-generation", samples=samples, output=tmp_path / "r", **limits)
    once, quality = VerifiedOnce(spec, tmp_path), {}
    for precision, limit in (("int8", 1.02), ("int4-weights", 1.2)):
        base, exact, rounded = once.build(spec.model_copy(update={"precision": precision})).variants
        assert base.perplexity is not None
        assert base.perplexity < 60, "it learned something: 600 tokens are possible"
        assert exact.perplexity == pytest.approx(base.perplexity, rel=1e-5)
        assert rounded.perplexity is not None
        assert rounded.perplexity != pytest.approx(base.perplexity, rel=1e-5), "it is not fp32 under another name"
        assert rounded.perplexity <= limit * base.perplexity
        assert rounded.quality is not None
        quality[precision] = rounded.quality
    assert quality["int4-weights"] < quality["int8"] < 1, "perplexities of rounded variants are too close to order"


def test_samples_that_do_not_fit_are_named_by_line(tmp_path: Path) -> None:
    model, samples = token_classification()
    lines = samples.read_text().splitlines()

    def error(*written: str, **options: object) -> str:
        path = tmp_path / "samples.jsonl"
        path.write_text("\n".join(written))
        with pytest.raises(SpecError) as raised:
            build(make_spec(model=str(model), name="tags", samples=path, output=tmp_path / "repository", **options))
        return str(raised.value)

    without = json.dumps({"text_input": "anna went to oslo"})
    assert "line 2: entities must be in every line or in none" in error(lines[0], without)
    assert "line 2: expected an object with text_input (and perhaps" in error(lines[0], '{"text": "no"}')
    assert "3 are too few, at least 16 are needed" in error(*lines[:3], precision="int8-static")
    wrong = json.dumps({"text_input": "anna went to oslo", "entities": "PER"})
    assert "the labels of --samples (entities) cannot be scored" in error(wrong)


@pytest.mark.slow
def test_qdq_graph_is_served_as_given(tmp_path: Path) -> None:
    """A QDQ graph like those of quantisation-aware training, from another tool, is verified on both engines."""
    model, samples = question_answering()
    spec = make_spec(model=str(model), name="qa", samples=samples, output=tmp_path / "repository", engine="auto")
    graph = export(resolve(spec), tmp_path).graph
    plain = spell_out_attention(graph, tmp_path)
    feeds = [{name: np.ones((2, 9), np.int64) for name in plain.inputs}]
    own = quantise_statically(plain, tmp_path / "qat" / "model.onnx", Calibration(), feeds).graph
    with pytest.raises(VerificationError, match=r"as given.* reaches a share of PyTorch's F1"):
        build(spec.model_copy(update={"graph": own.path}))  # ranges that are all 1
    tokenizer = resolve(spec).tokenizer
    lines = [json.loads(line) for line in samples.read_text().splitlines()[:100]]
    encoded = tokenizer(
        [x["question"] for x in lines], [x["context"] for x in lines], return_tensors="np", padding=True
    )
    feeds = [{name: encoded[name] for name in plain.inputs}]
    own = quantise_statically(plain, tmp_path / "qat" / "model.onnx", Calibration(), feeds).graph
    report = build(spec.model_copy(update={"graph": own.path}))
    assert {measured.name for measured in report.variants} == {"PyTorch fp32", "fp32", "as given", "as given OpenVINO"}
    assert report.chosen in ("as given", "as given OpenVINO")
    published = tmp_path / "repository" / "qa" / str(report.version) / "model.onnx"
    if report.engine == "onnxruntime":
        assert read_graph(published).operators["QuantizeLinear"] == own.operators["QuantizeLinear"] > 0
    other = tmp_path / "other.onnx"
    other.write_bytes(b"no graph")
    with pytest.raises(SpecError, match="cannot be read as ONNX"):
        build(spec.model_copy(update={"graph": other}))
    features = make_checkpoint(tmp_path / "features", "bert", "feature-extraction")
    wrong = make_spec(model=str(features), name="features", graph=own.path, output=tmp_path / "repository")
    with pytest.raises(SpecError, match=r"gives start_logits, end_logits; the task .* gives features: name them so"):
        build(wrong)
    with pytest.raises(SpecError, match="served as it is"):
        make_spec(model="qa", graph=own.path, precision="int8")
