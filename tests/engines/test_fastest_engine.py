"""--engine auto for decoders: every possible engine is built and measured, and one is served."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder.building.families.decoder.fastest_engine import FastestEngine, PerEngine, run_each
from builder.building.pipeline import build
from builder.building.variants.traffic import Rates
from builder.common.errors import BuilderError, ExportError, SpecError
from builder.options import make_spec
from builder.repository.check import check
from builder.repository.report.record import BuildReport
from builder.runtime.contract import GenerationServing, load_generation
from tests.decoders import make_decoder_checkpoint
from tests.generation.test_cuda_executor import answers

RATES = {"onnxruntime": Rates({1: (10.0,) * 3, 8: (20.0,) * 3}), "openvino": Rates({1: (9.0,) * 3, 8: (30.0,) * 3})}


def built(folder: Path, model_type: str = "llama", **options: Any) -> tuple[BuildReport, GenerationServing]:
    checkpoint = make_decoder_checkpoint(folder / "checkpoint", model_type)
    wanted = {"precision": "int8", "max_length": 128, "quality": 0.5, "perplexity": 1.5, "engine": "auto", **options}
    report = build(make_spec(model=str(checkpoint), name="writes", output=folder / "repository", **wanted))
    return report, load_generation(folder / "repository" / "writes" / str(report.version))


def test_auto_serves_the_faster_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use rates of a machine on which OpenVINO is faster."""
    monkeypatch.setattr("builder.building.families.decoder.fastest_engine.measure", lambda *_: RATES)
    report, serving = built(tmp_path)
    assert report.chosen == "int8 OpenVINO"
    names = [f"{precision} {engine}" for engine in ("ONNX Runtime", "OpenVINO") for precision in ("fp32", "int8")]
    assert [measured.name for measured in report.variants] == ["PyTorch fp32", *names]
    assert all(measured.quality for measured in report.variants), "each was judged"
    assert (report.choice or "").startswith("chose OpenVINO: answers of 16 tokens a second as served, at 1 and at 8")
    assert serving.session.engine == "openvino"
    assert serving.arena.blocks is not None
    assert not check(tmp_path / "repository")
    assert all(answers(tmp_path / "repository" / "writes" / "1", ["The museum in Oslo", "The museum of Bergen"]))


@pytest.mark.parametrize(("slots", "clients"), [(1, (1,)), (4, (1, 4)), (64, (1, 8))])
def test_auto_measures_as_many_clients_as_slots(slots: int, clients: tuple[int, ...]) -> None:
    """Regression: a model for one client was chosen by its speed at 8."""
    decoder: Any = SimpleNamespace(spec=make_spec(model="model", engine="auto", slots=slots))
    assert FastestEngine({"onnxruntime": decoder}, {}).clients == clients


def test_auto_names_an_engine_that_cannot_run_the_model(tmp_path: Path) -> None:
    """OpenVINO's attention does not cap scores; the other engine is still measured."""
    report, serving = built(tmp_path, "gemma2")
    assert serving.session.engine == "onnxruntime"
    assert "not possible: OpenVINO (its attention caps scores" in (report.choice or "")


def test_auto_measures_both_engines_again_for_other_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds with one and with two engines do not share cached choices."""
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    both, serving = built(tmp_path)
    assert both.kept == {}
    for title in ("ONNX Runtime", "OpenVINO"):
        assert re.search(rf"int8 {title} [1-9]\d* \(.*\) and [1-9]\d* \(", both.choice or ""), "answers a second"
    assert "not possible" not in (both.choice or "")
    assert (both.chosen or "").endswith({"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}[serving.session.engine])
    report, serving = built(tmp_path, cache="fp16", cache_gb=0.00004)
    assert {*report.kept} == {"export", "reference"}
    assert serving.session.engine == "openvino"
    assert serving.arena.dtype == "float16"
    assert report.chosen == "int8, fp16 cache OpenVINO"
    assert "not possible: ONNX Runtime (--cache-gb is for --engine openvino" in (report.choice or "")


def test_auto_refuses_options_that_no_engine_has(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"no engine can serve .*: ONNX Runtime \(--cache-gb .*\), OpenVINO \(--executor bls"
    ):
        built(tmp_path, cache_gb=0.00004, executor="bls")


@pytest.mark.parametrize(
    ("refused", "errors", "kind"),
    [
        ({}, [SpecError("one"), SpecError("other")], SpecError),
        ({}, [SpecError("one"), ExportError("other")], BuilderError),
        ({}, [ExportError("one"), SpecError("other")], BuilderError),
        ({"onnxruntime": "one"}, [ExportError("other")], BuilderError),
    ],
)
def test_auto_reports_the_reason_of_every_engine_that_failed(
    refused: dict[str, str], errors: list[BuilderError], kind: type[BuilderError]
) -> None:
    """The error is not of a type that belongs to only one of them."""
    results = dict(zip(["onnxruntime", "openvino"][-len(errors) :], errors, strict=True))

    def failing(engine: str, error: BuilderError) -> None:
        raise error

    text = r"no engine can serve this model with these options: ONNX Runtime \(one\), OpenVINO \(other\)"
    with pytest.raises(kind, match=text) as raised:
        run_each(PerEngine(results, refused), failing, (SpecError, ExportError))
    assert raised.type is kind
