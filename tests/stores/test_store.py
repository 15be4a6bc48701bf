"""An object store by itself, on a real S3 server and in a folder: what is got is what was put, whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest

from builder.errors import RepositoryError, SpecError
from builder.stores import store as module
from builder.stores.manifest import Blob, Manifest, dump, load
from builder.stores.store import Store, VersionTakenError, is_store, open_store
from tests.stores.faulty import Faulty

CONTENT = bytes(range(256)) * 4096


def _blob(content: bytes) -> Blob:
    return Blob(hashlib.sha256(content).hexdigest(), len(content))


def _file(folder: Path, content: bytes) -> Path:
    path = folder / hashlib.sha256(content).hexdigest()[:8]
    path.write_bytes(content)
    return path


MANIFEST = Manifest("front", 1, "org/name", {"front/1/model.py": _blob(b"a"), "front_model/1/model.onnx": _blob(b"b")})


@pytest.fixture(params=["s3", "file"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        store_of_kind: Store = request.getfixturevalue("store")
        return store_of_kind
    return open_store(f"file://{tmp_path / 'store'}")


def test_what_was_put_is_what_is_got(any_store: Store, tmp_path: Path) -> None:
    for content in (CONTENT, b"", b"x"):
        blob = _blob(content)
        assert any_store.put(_file(tmp_path, content), blob) is True
        assert any_store.put(_file(tmp_path, content), blob) is False, "it is there"
        any_store.get(blob, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == content
    assert not list(tmp_path.glob("*.part"))


def test_a_version_is_there_whole_once_it_is_published(any_store: Store) -> None:
    assert (any_store.models(), any_store.versions("front")) == ([], [])
    any_store.publish(MANIFEST)
    for version in (10, 9):
        files = {path.replace("/1/", f"/{version}/"): blob for path, blob in MANIFEST.files.items()}
        any_store.publish(replace(MANIFEST, version=version, files=files))
    assert any_store.models() == ["front"]
    assert any_store.versions("front") == [1, 9, 10], "by number"
    assert any_store.manifest("front").version == 10
    assert any_store.manifest("front", 1) == MANIFEST
    assert MANIFEST.entries() == ["front", "front_model"]


def test_a_version_is_never_replaced(any_store: Store) -> None:
    any_store.publish(MANIFEST)
    with pytest.raises(VersionTakenError, match="has a version 1 of front already"):
        any_store.publish(replace(MANIFEST, source="org/other"))
    assert any_store.manifest("front") == MANIFEST


def test_what_is_not_there_is_named(any_store: Store) -> None:
    with pytest.raises(RepositoryError, match="has no model front; it has none"):
        any_store.manifest("front")
    any_store.publish(MANIFEST)
    with pytest.raises(RepositoryError, match="has no model other; it has front"):
        any_store.manifest("other")
    with pytest.raises(RepositoryError, match="has no version 7 of front; it has 1"):
        any_store.manifest("front", 7)


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "front/../../x",
        "front/2/x",
        "front/config.pbtxt",
        "front/warmup/x",
        "front/1/../../x",
        "/etc/passwd",
        "front/1/..",
        "model.py",
        "front//x",
        "front/a\nb",
        "front/\u202e",
        "./x/y",
    ],
)
def test_a_manifest_names_nothing_outside_of_a_repository(path: str) -> None:
    document = json.loads(dump(MANIFEST))
    document["files"][path] = {"sha256": "0" * 64, "size": 1}
    with pytest.raises(RepositoryError, match="is not the manifest of a version"):
        load(json.dumps(document).encode(), "it")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"schema": 2}',
        '{"schema": 1, "files": {"front/x": {"sha256": "../x", "size": 1}}}',
    ],
)
def test_a_manifest_that_is_none(text: str) -> None:
    with pytest.raises(RepositoryError, match="is not the manifest of a version"):
        load(text.encode(), "it")


def test_a_connection_cut_mid_blob_goes_on_from_there(
    store: Store, s3_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = _blob(CONTENT)
    store.put(_file(tmp_path, CONTENT), blob)
    monkeypatch.setattr(module, "CHUNK", 1 << 18)
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    with Faulty(s3_port, after=100_000, cuts=3) as faulty:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.url)
        open_store(store.url).get(blob, tmp_path / "got")
        assert faulty.cut == 3
    assert (tmp_path / "got").read_bytes() == CONTENT


def test_a_store_that_is_gone_leaves_what_came_for_the_next_time(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = _blob(CONTENT)
    store.put(_file(tmp_path, CONTENT), blob)
    monkeypatch.setattr(module, "CHUNK", 1 << 18)
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    reads: list[int] = []

    def cat_file(path: str, start: int, end: int) -> bytes:
        reads.append(start)
        if start >= 1 << 19 and len(reads) < 10:
            raise OSError("the network is down")
        content: bytes = store.files.cat_file(path, start=start, end=end)
        return content

    broken = replace(store, files=SimpleNamespace(cat_file=cat_file, info=store.files.info))
    with pytest.raises(RepositoryError, match=r"could not be read \(the network is down\); pull again to go on"):
        broken.get(blob, tmp_path / "got")
    assert (tmp_path / "got.part").stat().st_size == 1 << 19
    reads.extend([0] * 10)
    before = len(reads)
    broken.get(blob, tmp_path / "got")
    assert reads[before] == 1 << 19, "not from the beginning"
    assert (tmp_path / "got").read_bytes() == CONTENT


@pytest.mark.parametrize("lie", [bytes(len(CONTENT)), CONTENT[:-1], b"", CONTENT + b"more"])
def test_a_blob_that_lies_is_refused(lie: bytes, store: Store, bucket: str, tmp_path: Path) -> None:
    blob = _blob(CONTENT)
    key = f"fleet/blobs/sha256/{blob.sha256[:2]}/{blob.sha256}"
    boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=lie)
    with pytest.raises(RepositoryError, match=r"push the version again"):
        store.get(blob, tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_a_push_replaces_a_blob_of_another_size(
    store: Store, bucket: str, raw: Callable[[str], bytes | None], tmp_path: Path
) -> None:
    blob = _blob(CONTENT)
    key = f"fleet/blobs/sha256/{blob.sha256[:2]}/{blob.sha256}"
    boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=CONTENT[:99])
    assert store.put(_file(tmp_path, CONTENT), blob) is True
    assert raw(key) == CONTENT


@pytest.mark.parametrize("url", ["s3://", "http://a/b", "model_repository", "ftp://x/y", "S3://a/b"])
def test_addresses_that_are_none(url: str) -> None:
    assert not is_store(url)
    with pytest.raises(SpecError, match="is not the address of an object store"):
        open_store(url)


def test_a_package_that_is_missing_is_named() -> None:
    for url, extra in (("gs://bucket/x", "gcs"), ("az://container/x", "azure")):
        with pytest.raises(SpecError, match=rf"pip install 'triton-model-repository-builder\[{extra}\]'"):
            open_store(url)


def test_a_bucket_that_is_not_there_is_one_line(store: Store, tmp_path: Path) -> None:
    absent = open_store("s3://no-such-bucket/x")
    with pytest.raises(RepositoryError, match=r"has no model front; it has none|could not be read"):
        absent.manifest("front")
    with pytest.raises(RepositoryError, match=r"could not be written: .*bucket"):
        absent.put(_file(tmp_path, b"x"), _blob(b"x"))
