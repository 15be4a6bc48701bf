"""Object stores on an S3 server and in a folder: objects are returned unchanged and complete, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import boto3
import gcsfs
import pytest
from azure.storage.blob._shared.policies_async import ExponentialRetry
from fsspec.registry import _registry

from builder.common.errors import RepositoryError, SpecError
from builder.repository.stores import store as module
from builder.repository.stores.store import (
    Blob,
    Manifest,
    Store,
    VersionTakenError,
    dump_manifest,
    is_store,
    load_manifest,
    open_store,
)
from tests.repository.stores.conftest import Port, Reach
from tests.repository.stores.emulators import HOST, answering
from tests.repository.stores.faulty import Faulty

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # gcsfs does

CONTENT = bytes(range(256)) * 4096
CONTINUE = "HTTP/1.1 100 Continue\r\n\r\n"  # moto sends it twice before it accepts an object


def _blob(content: bytes) -> Blob:
    return Blob(hashlib.sha256(content).hexdigest(), len(content))


def _file(folder: Path, content: bytes) -> Path:
    path = folder / hashlib.sha256(content).hexdigest()[:8]
    path.write_bytes(content)
    return path


MANIFEST = Manifest("front", 1, "org/name", {"front/1/model.py": _blob(b"a"), "front_model/1/model.onnx": _blob(b"b")})


@pytest.fixture(params=["s3", "gs", "az", "file"])
def any_store(request: pytest.FixtureRequest, make_bucket: Callable[[str], str], tmp_path: Path) -> Store:
    scheme = request.param
    return open_store(f"file://{tmp_path / 'store'}" if scheme == "file" else f"{scheme}://{make_bucket(scheme)}/fleet")


def test_store_returns_the_content_that_was_put(any_store: Store, tmp_path: Path) -> None:
    for content in (CONTENT, b"", b"x"):
        blob = _blob(content)
        assert any_store.put(_file(tmp_path, content), blob) is True
        assert any_store.put(_file(tmp_path, content), blob) is False, "it is there"
        any_store.get(blob, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == content
    assert not list(tmp_path.glob("*.part"))


def test_store_lists_a_version_once_its_manifest_is_published(any_store: Store) -> None:
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


def test_store_never_replaces_a_version(any_store: Store) -> None:
    any_store.publish(MANIFEST)
    with pytest.raises(VersionTakenError, match="has a version 1 of front already"):
        any_store.publish(replace(MANIFEST, source="org/other"))
    assert any_store.manifest("front") == MANIFEST


def test_store_names_a_missing_model_or_version(any_store: Store) -> None:
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
def test_manifest_with_a_path_outside_the_repository_is_refused(path: str) -> None:
    document = json.loads(dump_manifest(MANIFEST))
    document["files"][path] = {"sha256": "0" * 64, "size": 1}
    with pytest.raises(RepositoryError, match="is not the manifest of a version"):
        load_manifest(json.dumps(document).encode(), "it")


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
def test_damaged_manifest_is_refused(text: str) -> None:
    with pytest.raises(RepositoryError, match="is not the manifest of a version"):
        load_manifest(text.encode(), "it")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without a wait: Azure's library would wait for 15 s, Google's for 1 and 2."""
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(ExponentialRetry, "get_backoff_time", lambda self, settings: 0.01)
    monkeypatch.setattr(gcsfs.retry.random, "random", lambda: -100.0)


@pytest.mark.usefixtures("impatient")
def test_store_resumes_a_blob_after_a_lost_connection(
    cloud: Store, port_of: Port, reach: Reach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, scheme = _blob(CONTENT), cloud.url.split(":")[0]
    cloud.put(_file(tmp_path, CONTENT), blob)
    monkeypatch.setattr(module, "CHUNK", 1 << 18)
    with Faulty(port_of(scheme), after=100_000, cuts=3) as faulty:
        reach(scheme, faulty.url)
        open_store(cloud.url).get(blob, tmp_path / "got")
        assert faulty.cut == 3
    assert (tmp_path / "got").read_bytes() == CONTENT


@pytest.mark.usefixtures("impatient")
def test_store_publishes_a_version_whose_acknowledgement_was_lost(cloud: Store, port_of: Port, reach: Reach) -> None:
    scheme = cloud.url.split(":")[0]
    with Faulty(port_of(scheme), after=2 * len(CONTINUE), cuts=1) as faulty:
        reach(scheme, faulty.url)
        open_store(cloud.url).publish(MANIFEST)  # sent again and refused, because the object exists
        assert faulty.cut == 1
    reach(scheme, f"http://{HOST}:{port_of(scheme)}")
    assert open_store(cloud.url).manifest("front") == MANIFEST


def test_store_lets_one_of_many_concurrent_publishers_win(any_store: Store) -> None:
    start = threading.Barrier(8, timeout=600)

    def publish(source: str) -> str | None:
        start.wait()
        with contextlib.suppress(VersionTakenError):
            any_store.publish(replace(MANIFEST, source=source))
            return source
        return None

    with ThreadPoolExecutor(8) as pool:
        winners = [winner for winner in pool.map(publish, map(str, range(8))) if winner is not None]
    assert [any_store.manifest("front").source] == winners


def test_store_does_not_mix_models_with_a_common_prefix(cloud: Store) -> None:
    for name, version in (("front", 1), ("front2", 2), ("front-x", 3)):
        cloud.publish(Manifest(name, version, None, {f"{name}/{version}/x": _blob(b"a")}))
    cloud.files.pipe_file(f"{cloud.root}/models/front/copies/9.json", b"{}")
    assert cloud.versions("front") == [1]
    assert cloud.models() == ["front", "front-x", "front2"]


def test_store_keeps_a_partial_download_for_the_next_attempt(
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
    with pytest.raises(RepositoryError, match=r"could not be read \(the network is down\); try again: a pull goes on"):
        broken.get(blob, tmp_path / "got")
    assert (tmp_path / "got.part").stat().st_size == 1 << 19
    reads.extend([0] * 10)
    before = len(reads)
    broken.get(blob, tmp_path / "got")
    assert reads[before] == 1 << 19, "not from the beginning"
    assert (tmp_path / "got").read_bytes() == CONTENT


@pytest.mark.parametrize("lie", [bytes(len(CONTENT)), CONTENT[:-1], b"", CONTENT + b"more"])
def test_store_refuses_a_blob_that_does_not_match_its_hash(
    lie: bytes, store: Store, bucket: str, tmp_path: Path
) -> None:
    blob = _blob(CONTENT)
    key = f"fleet/blobs/sha256/{blob.sha256[:2]}/{blob.sha256}"
    boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=lie)
    with pytest.raises(RepositoryError, match=r"push the version again"):
        store.get(blob, tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_push_replaces_a_blob_of_another_size(
    store: Store, bucket: str, raw: Callable[[str], bytes | None], tmp_path: Path
) -> None:
    blob = _blob(CONTENT)
    key = f"fleet/blobs/sha256/{blob.sha256[:2]}/{blob.sha256}"
    boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=CONTENT[:99])
    assert store.put(_file(tmp_path, CONTENT), blob) is True
    assert raw(key) == CONTENT


def test_push_with_verify_replaces_a_blob_of_other_contents(
    store: Store, bucket: str, raw: Callable[[str], bytes | None], tmp_path: Path
) -> None:
    """Regression: a damaged blob of the right size was confirmed with "0.0 MB sent"."""
    blob = _blob(CONTENT)
    key = f"fleet/blobs/sha256/{blob.sha256[:2]}/{blob.sha256}"
    boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=bytes(len(CONTENT)))
    assert store.put(_file(tmp_path, CONTENT), blob) is False
    assert store.put(_file(tmp_path, CONTENT), blob, verify=True) is True
    assert raw(key) == CONTENT
    assert store.put(_file(tmp_path, CONTENT), blob, verify=True) is False


def test_push_with_verify_names_a_store_that_changes_what_is_sent(store: Store, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"is not what its name says, just after it was sent"):
        store.put(_file(tmp_path, bytes(len(CONTENT))), _blob(CONTENT), verify=True)


def test_store_lists_and_removes_blobs(any_store: Store, tmp_path: Path) -> None:
    assert any_store.blobs() == []
    blobs = sorted([_blob(content) for content in (CONTENT, b"", b"x")], key=lambda blob: blob.sha256)
    for content in (CONTENT, b"", b"x"):
        any_store.put(_file(tmp_path, content), _blob(content))
    assert any_store.blobs() == blobs
    assert [any_store.problem(blob) for blob in blobs] == [None] * 3
    assert all(0 <= any_store.age(blob) + 2 < 600 for blob in blobs), "clocks may differ a little"
    any_store.remove(_blob(b"x"))
    assert any_store.problem(_blob(b"x")) == "is not there"
    assert _blob(b"x") not in any_store.blobs()


@pytest.mark.parametrize("url", ["s3://", "http://a/b", "model_repository", "ftp://x/y", "S3://a/b"])
def test_store_refuses_an_invalid_address(url: str) -> None:
    assert not is_store(url)
    with pytest.raises(SpecError, match="is not the address of an object store"):
        open_store(url)


@pytest.mark.parametrize(
    ("scheme", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs"), ("az", "adlfs", "azure")]
)
def test_store_names_the_missing_package(
    scheme: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(_registry, scheme, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SpecError, match=rf"pip install 'triton-model-repository-builder\[{extra}\]'"):
        open_store(f"{scheme}://bucket/x")


def test_store_reports_a_missing_bucket_in_one_line(cloud: Store, tmp_path: Path) -> None:
    absent = open_store(f"{cloud.url.split(':')[0]}://no-such-bucket/x")
    nothing: Callable[[], object]
    for nothing in (
        absent.models,
        partial(absent.versions, "front"),
        partial(absent.manifest, "front"),
        partial(absent.put, _file(tmp_path, b"x"), _blob(b"x")),
        partial(absent.publish, MANIFEST),
    ):
        with pytest.raises(RepositoryError, match=r"x: there is no bucket or container no-such-bucket; make it first"):
            nothing()


REFUSALS = {  # as each API documents them
    "s3": ("application/xml", b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"),
    "gs": (
        "application/json",
        b'{"error": {"code": 403, "message": "me@x does not have storage.objects.list access"}}',
    ),
    "az": ("application/xml", b"<Error><Code>AuthorizationFailure</Code><Message>Not authorized.</Message></Error>"),
}


@pytest.mark.parametrize(
    ("scheme", "said", "advice"),
    [
        ("s3", "Access Denied", "AWS_ACCESS_KEY_ID"),
        ("gs", "me@x does not have storage.objects.list access", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az", "Not authorized", "AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_store_names_the_sources_of_credentials(
    scheme: str, said: str, advice: str, reach: Reach, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with answering(403, *REFUSALS[scheme]) as endpoint:
        reach(scheme, endpoint)
        store = open_store(f"{scheme}://bucket/x")
        with pytest.raises(RepositoryError, match=f"could not be read: .*{said}.*; its credentials .* {advice}"):
            store.manifest("front")
        with pytest.raises(RepositoryError, match=f"could not be written: .*; its credentials .* {advice}"):
            store.publish(MANIFEST)
    assert capfd.readouterr().err == "", "no library prints a traceback beside it"


def test_store_without_an_account_does_not_name_a_missing_package(reach: Reach) -> None:
    with pytest.raises(
        SpecError, match=r"az://c/x could not be opened: .*account_name.* AZURE_STORAGE_CONNECTION_STRING"
    ):
        open_store("az://c/x")


def test_store_reports_missing_credentials(reach: Reach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reach("s3", "http://127.0.0.1:1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(RepositoryError, match=r"Unable to locate credentials; its credentials are looked for in AWS_"):
        open_store("s3://bucket/x").models()
