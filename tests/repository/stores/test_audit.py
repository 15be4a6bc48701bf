"""Audit of an object store: damage is named with the versions that it concerns, and no needed blob is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.cli import main
from builder.common.errors import RepositoryError
from builder.repository.stores.audit import audit, collect
from builder.repository.stores.store import Blob, Store, open_store
from builder.repository.stores.transfer import push
from tests.repository.stores.versions import publish_version


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with two versions of a model, which share their weights."""
    repository = tmp_path / "built" / "model_repository"
    for comment in (b"one", b"two"):
        publish_version(repository, comment, bytes(5000))
    return repository


@pytest.fixture
def pushed(repository: Path, tmp_path: Path) -> Store:
    """Return a store with both versions."""
    store = open_store(f"file://{tmp_path / 'store'}")
    for version in (1, 2):
        push(repository, "front", store, version)
    return store


def _file_of(store: Store, version: int, path: str) -> Path:
    return Path(store._blob(store.manifest("front", version).files[path]))


def test_audit_finds_nothing_in_a_sound_store(pushed: Store) -> None:
    read: list[tuple[int, int]] = []
    result = audit(pushed, lambda *bytes_done: read.append(bytes_done))
    assert read[-1] == (sum(blob.size for blob in pushed.blobs()),) * 2
    assert (result.problems, result.versions, result.unnamed) == ((), 2, ())


def test_audit_names_damaged_and_missing_blobs_with_their_versions(pushed: Store) -> None:
    shared = _file_of(pushed, 1, "front_model/1/weights")
    shared.write_bytes(b"1" + bytes(4999))
    own = _file_of(pushed, 2, "front/2/model.py")
    own.unlink()
    problems = sorted(audit(pushed).problems, key=len)
    assert len(problems) == 2
    assert f"{own.name} is not there" in problems[0]
    assert problems[0].endswith(": front@2")
    assert f"{shared.name} is not what its name says" in problems[1]
    assert problems[1].endswith(": front@1, front@2")


def test_audit_continues_after_a_blob_that_cannot_be_read(pushed: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the first one ended the audit, and damaged blobs after it were not found."""
    damaged = _file_of(pushed, 1, "front_model/1/weights")
    damaged.write_bytes(b"1" + bytes(4999))
    refused, problem = _file_of(pushed, 2, "front/2/model.py"), Store.problem

    def refusing(store: Store, blob: Blob) -> str | None:
        if blob.sha256 == refused.name:
            raise RepositoryError(f"{store.url}: {refused} could not be read (Input/output error); try again")
        return problem(store, blob)

    monkeypatch.setattr(Store, "problem", refusing)
    problems = sorted(audit(pushed).problems, key=lambda text: damaged.name in text)
    assert len(problems) == 2
    assert "Input/output error" in problems[0]
    assert problems[0].endswith(": front@2")
    assert f"{damaged.name} is not what its name says" in problems[1]


def test_audit_refuses_a_store_without_versions(pushed: Store) -> None:
    """Regression: a check of a wrong address succeeded."""
    with pytest.raises(RepositoryError, match="has no versions of models; correct the address"):
        audit(open_store(f"{pushed.url}/typo"))


def test_audit_names_a_damaged_manifest(pushed: Store) -> None:
    Path(pushed._manifest("front", 1)).write_text("{}")
    result = audit(pushed)
    assert result.versions == 1
    assert "is not the manifest of a version" in result.problems[0]


def test_collect_removes_only_old_blobs_that_no_version_needs(pushed: Store) -> None:
    removed = Path(pushed._manifest("front", 2))
    own = _file_of(pushed, 2, "front/2/model.py")
    removed.unlink()
    assert own.name in [blob.sha256 for blob in audit(pushed).unnamed]
    assert collect(pushed, 3600) == []
    assert own.name in [blob.sha256 for blob in collect(pushed, 0)]
    assert not own.exists()
    result = audit(pushed)
    assert (result.problems, result.versions, result.unnamed) == ((), 1, ())


def test_collect_removes_nothing_beside_an_unreadable_manifest(pushed: Store) -> None:
    Path(pushed._manifest("front", 1)).write_text("{}")
    before = pushed.blobs()
    with pytest.raises(RepositoryError, match="nothing was removed, because a manifest cannot be read"):
        collect(pushed, 0)
    assert pushed.blobs() == before


def test_store_commands_report_and_mend_damage(
    repository: Path, pushed: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = _file_of(pushed, 1, "front_model/1/weights")
    weights.write_bytes(b"1" + bytes(4999))
    assert main(["store", "check", pushed.url]) == 1
    told = capsys.readouterr()
    assert f"{weights.name} is not what its name says" in told.out
    assert "2 versions, 1 problems" in told.err
    push_arguments = ["push", "front", "--to", pushed.url, "--repository", str(repository), "--version", "1"]
    assert main(push_arguments) == 0
    assert weights.read_bytes() != bytes(5000), "the size alone is compared"
    assert main([*push_arguments, "--verify"]) == 0
    assert weights.read_bytes() == bytes(5000)
    assert main(["store", "check", pushed.url]) == 0
    assert main(["store", "collect", pushed.url, "--min-age", "0"]) == 0
    assert "0 blobs removed, 0.0 MB" in capsys.readouterr().err
    assert main(["store", "check", pushed.url, "--min-age", "1"]) == 1
    assert "is for `build-repo store collect`" in capsys.readouterr().err
