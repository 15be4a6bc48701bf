"""An engine that an extra brings and that is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from builder.building.pipeline import build
from builder.building.variants.candidates import requested_variants
from builder.common.errors import ServeError, SpecError
from builder.engines.decoding import measurable
from builder.options import make_spec
from builder.repository.check import check
from builder.serving.server.embedded import BACKENDS
from builder.serving.server.refusals import refuse_repository

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16")


def _engines_tried(**options: str) -> set[str]:
    return {variant.engine for variant in requested_variants(make_spec(model="org/name", **options), FLAGS)}


@pytest.fixture
def _without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "openvino" else find_spec(name))


def test_automatic_choice_tries_every_installed_engine() -> None:
    assert _engines_tried(precision="auto") == {"onnxruntime", "openvino"}
    assert measurable() == ["onnxruntime", "openvino"]


@pytest.mark.usefixtures("_without_openvino")
def test_automatic_choice_leaves_out_an_engine_that_is_not_installed() -> None:
    assert _engines_tried(precision="auto") == {"onnxruntime"}
    assert measurable() == ["onnxruntime"]


@pytest.mark.usefixtures("_without_openvino")
def test_requested_engine_that_is_not_installed_is_refused_with_its_extra() -> None:
    with pytest.raises(SpecError, match=r"OpenVINO is not installed: .*\[openvino\]"):
        build(make_spec(model="org/name", engine="openvino"))
    with pytest.raises(SpecError, match=r"\[openvino\]"):
        _engines_tried(precision="bf16")


@pytest.fixture
def openvino_model(tmp_path: Path) -> Path:
    """Repository with a model that an engine of its own runs."""
    entry = tmp_path / "model"
    (entry / "1").mkdir(parents=True)
    for name in ("model.xml", "model.bin"):
        (entry / "1" / name).write_bytes(b"")
    (entry / "config.pbtxt").write_text('name: "model" backend: "openvino"')
    return tmp_path


@pytest.mark.usefixtures("_without_openvino")
def test_check_reads_no_graph_of_an_engine_that_is_not_installed(openvino_model: Path) -> None:
    """Pulling such a model checks it, where only another machine serves it."""
    assert not [problem for problem in check(openvino_model) if "model.xml" in str(problem)]


@pytest.mark.usefixtures("_without_openvino")
def test_serving_a_model_names_the_extra_of_a_missing_engine(openvino_model: Path) -> None:
    with pytest.raises(ServeError, match=r"model: OpenVINO is not installed: .*\[openvino\]"):
        refuse_repository(openvino_model, BACKENDS, strict=True)


@pytest.mark.usefixtures("_without_openvino")
def test_version_that_is_not_served_needs_no_engine(openvino_model: Path) -> None:
    (openvino_model / "model" / "2").mkdir()
    refuse_repository(openvino_model, BACKENDS, strict=True)
