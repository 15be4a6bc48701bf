"""Equal files of two models are stored once, and a change to one model does not change the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from builder.common.cache.folder import forget_removed
from builder.options import Serving
from builder.repository import versions
from builder.repository.config.entries import Config, RepositoryEntry
from builder.repository.lint import lint
from builder.repository.lint.pbtxt import fix
from builder.repository.publish import publish
from builder.repository.report.record import file_hashes
from builder.repository.verdict import Unverified
from builder.repository.versions import remove, rollback
from tests.reports import REPORT

WEIGHTS = b"weights" * 1000


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(versions, "OVERLAP_S", 0)


def _publish(repository: Path, name: str, weights: bytes = WEIGHTS, own: bytes = b"", keep: int = 2) -> None:
    config = Config(name, "python", 1, [], [], [], Serving(), dynamic_batching=False)
    files: dict[str, bytes | Path] = {
        "1/model.py": b"class TritonPythonModel:\n    def execute(self, requests):\n        return []\n",
        "1/weights": weights,
    }
    entry = RepositoryEntry(name, config, {**files, "1/own": own or name.encode(), "1/again": weights})
    report = replace(REPORT, name=name, checkpoint={"source": name}, files=file_hashes([entry]))
    publish(repository, Unverified((entry,), report), keep)


def _links(repository: Path, *files: str) -> bool:
    first, *others = files
    return all((repository / first).samefile(repository / other) for other in others)


def test_published_links_equal_files_of_two_models(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    for name in ("one", "two"):
        _publish(repository, name)
    assert _links(repository, "one/1/weights", "two/1/weights", "one/1/again", "two/1/again")
    assert _links(repository, "one/1/model.py", "two/1/model.py")
    assert not _links(repository, "one/1/config.pbtxt", "two/1/config.pbtxt")
    assert (repository / "two" / "1" / "own").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["model_repository"]


def test_published_changes_of_one_model_leave_others_unchanged(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    for name in ("one", "two"):
        _publish(repository, name)
    before = {path: path.read_bytes() for path in (repository / "two").rglob("*") if path.is_file()}
    _publish(repository, "one", own=b"changed")
    rollback(repository, "one")
    fix(repository, lint(repository))
    remove(repository, "one")
    assert {path: path.read_bytes() for path in before} == before
    _publish(repository, "three")
    assert _links(repository, "two/1/weights", "three/1/again") is False, "the file that it was last is gone"
    assert (repository / "three" / "1" / "weights").read_bytes() == WEIGHTS
    _publish(repository, "four")
    assert _links(repository, "three/1/weights", "four/1/weights")


def test_published_does_not_link_a_file_changed_in_place(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, "one")
    with (repository / "one" / "1" / "weights").open("r+b") as stream:
        stream.write(b"W")
    _publish(repository, "two")
    assert (repository / "two" / "1" / "weights").read_bytes() == WEIGHTS
    assert not _links(repository, "one/1/weights", "two/1/weights")


def test_published_links_nothing_across_repositories(tmp_path: Path) -> None:
    _publish(tmp_path / "a", "one")
    _publish(tmp_path / "b", "two")
    assert not (tmp_path / "a/one/1/weights").samefile(tmp_path / "b/two/1/weights")


def test_published_forgets_removed_files(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    for name in ("one", "two"):
        _publish(repository, name)
    remove(repository, "two")
    known = tmp_path / "cache" / "published"
    before = {path.name for path in known.glob("*/*")}
    forget_removed()
    left = {path.name for path in known.glob("*/*")}
    assert left < before
    assert all(path.exists() for path in known.glob("*/*"))
