"""Repositories that earlier releases of build-repo wrote are still read.

The folder `earlier` has the documents that version 0.2.0 wrote for tiny checkpoints: serving.json, build.json and
config.pbtxt of a version. Never rewrite them: they stand for what users have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builder.cli import main
from builder.common.errors import RepositoryError
from builder.repository.config.render import parse
from builder.repository.lint import lint
from builder.repository.report.page import page
from builder.repository.report.record import parse_report, read_report
from builder.repository.sharing.hosting import FRONT, hosted_model
from builder.repository.versions import newest_first, rollback, served_number
from builder.runtime.contract import dump, read
from builder.serving.gateway.served_model import read_model
from tests.reports import REPORT
from tests.versions import copy_version

EARLIER = Path(__file__).with_name("earlier")
GENERATING = {"chat", "writes", "sums"}  # on ONNX Runtime, on OpenVINO, and an encoder-decoder
FRONTS = ("topics", "features", *sorted(GENERATING))
VARIANTS = ["PyTorch fp32", "fp32"]


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Return a repository of version 1 of each model; `topics` calls the engine `topics_model`. No graphs, no code."""
    repository = tmp_path / "model_repository"
    for source in sorted(EARLIER.glob("*/*")):
        version = repository / source.parent.name / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / source.name).write_bytes(source.read_bytes())
        if source.name != "serving.json":
            (version.parent / source.name).write_bytes(source.read_bytes())
    return repository


@pytest.mark.parametrize("name", FRONTS)
def test_earlier_serving_documents_are_read(name: str, earlier: Path, tmp_path: Path) -> None:
    serving = read(earlier / name / "1")
    (tmp_path / "serving.json").write_text(dump(serving), "utf-8")
    assert read(tmp_path) == serving
    stored = json.loads((EARLIER / name / "serving.json").read_text("utf-8"))
    written = json.loads(dump(serving))
    assert _common(written, stored) == stored, "no field has another meaning or is gone"


def _common(document: Any, like: Any) -> Any:
    """Return `document` without the fields that `like` does not have."""
    if isinstance(document, dict) and isinstance(like, dict):
        return {key: _common(value, like[key]) for key, value in document.items() if key in like}
    if isinstance(document, list) and isinstance(like, list) and len(document) == len(like):
        return [_common(value, earlier) for value, earlier in zip(document, like, strict=True)]
    return document


@pytest.mark.parametrize("name", FRONTS)
def test_earlier_reports_are_shown(name: str, earlier: Path, tmp_path: Path) -> None:
    report = read_report(earlier, name)
    assert [variant.name for variant in report.variants] == VARIANTS
    assert report.verdict.startswith("verified: fp32 against PyTorch")
    assert main(["report", name, "--repository", str(earlier), "--output", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").read_text("utf-8") == page(report)


def test_earlier_report_with_cached_times_shows_no_speed_up(earlier: Path) -> None:
    """Regression: without `timed_in`, times of two builds counted as those of one, and "437.2x" was printed."""
    document = json.loads((earlier / "chat" / "build.json").read_text("utf-8"))
    alone = parse_report(json.dumps(document).encode(), "build.json")
    assert alone.variants[1].speed_up(alone.variants[0]) is not None, "all stages ran in this build"
    document["kept"] = {"baseline": {"key": "abc", "ran": "2026-11-20T10:00:00+00:00"}}
    report = parse_report(json.dumps(document).encode(), "build.json")
    assert report.variants[1].speed_up(report.variants[0]) is None
    assert report.has_times_of_other_builds


def test_earlier_repositories_are_checked(earlier: Path) -> None:
    findings = lint(earlier, None)
    assert {finding.model for finding in findings if finding.code == "TR312"} == GENERATING
    unreadable = ("TR101", "TR102", "TR103", "TR151", "TR156", "TR702", "TR703", "TR801")
    assert [finding for finding in findings if finding.code in unreadable] == []


@pytest.mark.parametrize("name", FRONTS)
def test_earlier_models_are_known_to_the_gateway(name: str, earlier: Path) -> None:
    model = read_model(parse((earlier / name / "config.pbtxt").read_text("utf-8"), name), "1")
    assert model is not None
    assert (model.task == "text2text-generation") is (name == "sums")
    assert model.has_chat_template is (name == "chat")
    assert model.report is not None
    assert ("max_tokens" in model.inputs) is (name in GENERATING)


def test_earlier_encoder_can_be_shared(earlier: Path) -> None:
    front = earlier / "features" / "1" / FRONT
    front.parent.mkdir()
    front.touch()
    hosted = hosted_model(earlier / "features", 1)
    assert (hosted.version, hosted.max_batch_size) == (1, 64)
    assert hosted.inputs["text_input"] is False
    with pytest.raises(RepositoryError, match="topics calls its engine topics_model through BLS"):
        hosted_model(earlier / "topics", 1)


@pytest.mark.parametrize("name", FRONTS)
def test_earlier_versions_can_be_rolled_back(name: str, earlier: Path) -> None:
    copy_version(earlier, name, 2)
    assert [version.number for version in newest_first(earlier, name)] == [2, 1]
    before = _configurations(earlier)
    assert rollback(earlier, name, 2) == 2
    assert served_number(earlier / name) == 2
    assert rollback(earlier, name) == 1
    assert _configurations(earlier) == before


def _configurations(repository: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(repository.glob("*/config.pbtxt"))}


def test_report_answers_to_the_earlier_name_of_its_variants() -> None:
    """Programs written for version 0.3 read `report.ladder`."""
    assert REPORT.ladder == REPORT.variants != ()
