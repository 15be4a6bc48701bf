"""New versions with changed settings, from the files of an existing version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from builder.common.errors import RepositoryError, SpecError
from builder.repository import publish as publish_module
from builder.repository import settings as settings_module
from builder.repository.config.render import CONFIG
from builder.repository.publish import publish
from builder.repository.report.record import file_hashes, read_report
from builder.repository.settings import publish_settings, read_settings
from builder.repository.verdict import Unverified
from builder.repository.versions import loaded_numbers, rollback, version_numbers
from builder.runtime.contract import load_encoder
from tests.reports import REPORT
from tests.repository.test_settings import _entry


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Publish an encoder like a build, with invalid weights, which no linter reads."""
    for module in (publish_module, settings_module):
        monkeypatch.setattr(module, "check", lambda staged, digests=None: [])
    entry = replace(_entry(name="front"), name="front")
    entry = replace(entry, files={**entry.files, "1/model.onnx": b"weights"})
    report = replace(REPORT, files=file_hashes((entry,)), memory={"weights": 7, "activations": 1000})
    publish(tmp_path / "model_repository", Unverified((entry,), report))
    return tmp_path / "model_repository"


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_derive_publishes_new_settings_with_the_same_files(repository: Path) -> None:
    front = repository / "front"
    before = _contents(front / "1")
    settings = {"max_batch_size": 24, "instances": 2, "threads": 2}
    assert publish_settings(repository, "front", settings, "12% faster") == 2
    assert loaded_numbers(front) == [2]
    assert settings.items() <= read_settings(front / "2").items()
    assert _contents(front / "1") == before, "links share their bytes: none may be written through"
    changed = {name for name, content in _contents(front / "2").items() if content != before[name]}
    assert changed == {CONFIG, "build.json", "report.html", "bom.cdx.json", "serving.json"} - _same(front)
    assert (front / "1" / "model.onnx").samefile(front / "2" / "model.onnx")
    report = read_report(repository, "front")
    assert (report.version, report.settings) == (
        2,
        "max_batch_size 24, instances 2, threads 2, of version 1: 12% faster",
    )
    assert set(report.files["front"]) == {f"2/{name}" for name in before if f"2/{name}" in report.files["front"]}
    rollback(repository, "front")
    assert loaded_numbers(front) == [1]
    assert [path.name for path in repository.parent.iterdir()] == ["model_repository"]


def _same(front: Path) -> set[str]:
    """Return the pages that are equal in versions 1 and 2."""
    pages = ("report.html", "bom.cdx.json")
    return {page for page in pages if (front / "1" / page).read_bytes() == (front / "2" / page).read_bytes()}


def test_memory_of_the_largest_call_follows_the_token_budget_to_one_text(repository: Path) -> None:
    first = repository / "front" / "1"
    budget, length = read_settings(first)["serving.token_budget"], load_encoder(first).max_length
    for changed, tokens in ((2 * budget, 2 * budget), (length // 2, length)):
        publish_settings(repository, "front", {"serving.token_budget": changed}, "it was measured")
        memory = read_report(repository, "front").memory
        assert memory == {"weights": 7, "activations": 1000 * tokens // budget}


def test_derive_applies_a_second_change_to_the_first(repository: Path) -> None:
    publish_settings(repository, "front", {"max_batch_size": 24}, "once")
    assert publish_settings(repository, "front", {"max_queue_delay_us": 700}, "twice") == 3
    assert publish_settings(repository, "front", {"max_queue_delay_us": 800}, "again") == 4
    assert version_numbers(repository / "front") == [2, 3, 4]
    assert read_settings(repository / "front" / "3")["max_batch_size"] == 24


@pytest.mark.parametrize(
    ("name", "settings", "error", "says"),
    [
        ("front", {"precision": 8}, SpecError, "precision needs a build"),
        ("other", {"instances": 2}, RepositoryError, "has no model other"),
    ],
)
def test_derive_with_refused_settings_changes_nothing(
    name: str, settings: dict[str, int], error: type[Exception], says: str, repository: Path
) -> None:
    before = _contents(repository)
    with pytest.raises(error, match=says):
        publish_settings(repository, name, settings, "")
    assert _contents(repository) == before
    assert [path.name for path in repository.parent.iterdir()] == ["model_repository"]
