"""Push to an object store and pull into another repository: a version is transferred completely or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest

from builder.building.pipeline import build
from builder.cli import main
from builder.clusters.fleet.work import newest_report
from builder.common.errors import RepositoryError, SpecError
from builder.common.hashing import MIN_CACHED_BYTES
from builder.options import make_spec
from builder.repository.signatures import sign, unsigned
from builder.repository.signing_keys import Signer
from builder.repository.stores.store import Blob, Manifest, Store, VersionTakenError, open_store
from builder.repository.stores.transfer import publish_to, pull, push
from builder.repository.versions import served_number, version_numbers
from tests.repository.stores.versions import outcome, publish_version, tree
from tests.signing import write_keys

LARGE = bytes(range(256)) * 2048


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_pull_yields_the_published_files(cloud: Store, repository: Path, target: Path) -> None:
    publish_version(repository, b"one", LARGE)
    pushed = push(repository, "front", cloud)
    assert pushed.sent > len(LARGE)
    assert pushed.manifest.source == "org/name"
    pulled = pull(cloud, "front", target)
    assert tree(target) == tree(repository)
    assert pulled.fetched == pushed.sent
    assert [path.name for path in target.parent.iterdir()] == ["model_repository"], "nothing is left beside it"


def test_pull_into_a_mount_writes_nothing_beside_it(
    store: Store, repository: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a pull into a volume of a container whose own file system is read-only failed."""
    publish_version(repository, b"one", LARGE)
    push(repository, "front", store)
    target.mkdir()
    is_mount = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == target or is_mount(path))

    def guarded(change: Callable[..., Any]) -> Callable[..., Any]:
        def guard(path: str | Path, *rest: Any, **options: Any) -> Any:
            if Path(path).parent == target.parent and Path(path) != target:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return change(path, *rest, **options)

        return guard

    for name in ("open", "mkdir"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    pull(store, "front", target)
    assert tree(target) == tree(repository)
    assert sorted(path.name for path in target.iterdir()) == ["front", "front_model"], "nothing is left in it"


def test_concurrent_builds_become_consecutive_versions_in_a_store(
    cloud: Store, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, met, publish = threading.Barrier(2, timeout=600), set(), Store.publish

    def together(self: Store, manifest: Manifest) -> None:
        if threading.get_ident() not in met:  # both have asked which number is next
            met.add(threading.get_ident())
            meeting.wait()
        publish(self, manifest)

    assert newest_report(make_spec(model="org/name", name="front", output=cloud.url)) is None
    monkeypatch.setattr(Store, "publish", together)
    fronts = {comment: outcome(comment, LARGE) for comment in (b"one", b"two")}
    with ThreadPoolExecutor(2) as pool:
        reports = pool.map(lambda front: publish_to(cloud, fronts[front], _made(tmp_path / front.decode())), fronts)
        assert sorted(report.version for report in reports) == [1, 2]
    assert cloud.versions("front") == [1, 2]
    published = newest_report(make_spec(model="org/name", name="front", output=cloud.url))
    assert published is not None
    assert published.version == 2
    for version in (1, 2):
        pull(cloud, "front", target, version=version)
    models = [(target / "front" / str(version) / "model.py").read_bytes() for version in (1, 2)]
    assert sorted(model.rpartition(b"# ")[2] for model in models) == [b"one", b"two"]


def test_push_and_pull_transfer_only_changed_files(store: Store, repository: Path, target: Path) -> None:
    publish_version(repository, b"one", LARGE)
    push(repository, "front", store)
    pull(store, "front", target)
    publish_version(repository, b"two", LARGE)
    assert push(repository, "front", store).sent < len(LARGE)
    assert pull(store, "front", target).fetched < len(LARGE)
    assert tree(target) == tree(repository)
    assert (served_number(target / "front"), version_numbers(target / "front")) == (2, [1, 2])
    engine = target / "front_model"
    assert os.path.samefile(engine / "1" / "weights", engine / "2" / "weights"), "one file on the disk"
    assert pull(store, "front", target, version=1).fetched == 0, "back to the one before"
    assert (served_number(target / "front"), served_number(engine)) == (1, 1)
    publish_version(repository, b"three", LARGE)
    push(repository, "front", store)
    pull(store, "front", target, keep=1)
    assert version_numbers(target / "front") == [3]


def test_pull_refuses_a_model_that_a_shared_front_hosts(store: Store, repository: Path, target: Path) -> None:
    publish_version(repository, b"one", b"")
    push(repository, "front", store)
    (target / "news" / "models" / "front").mkdir(parents=True)
    (target / "news" / "models" / "hosted.json").write_text("{}")
    with pytest.raises(RepositoryError, match=r"news hosts front: its versions are in the repository .*news/models"):
        pull(store, "front", target)
    assert [path.name for path in target.iterdir()] == ["news"]


def test_file_store_pushes_and_pulls(tmp_path: Path, repository: Path, target: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    publish_version(repository, b"one", LARGE)
    sent: list[tuple[int, int]] = []
    fetched: list[tuple[int, int]] = []
    pushed = push(repository, "front", store, on_progress=lambda *bytes_done: sent.append(bytes_done))
    pull(store, "front", target, on_progress=lambda *bytes_done: fetched.append(bytes_done))
    assert tree(target) == tree(repository)
    size = sum(blob.size for blob in set(pushed.manifest.files.values()))
    assert sent[-1] == fetched[-1] == (size, size)
    assert sent == sorted(sent)


def test_pods_that_share_a_folder_fetch_once_and_read_once(
    tmp_path: Path, repository: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a pull read weights that were there three times."""
    store = open_store(f"file://{tmp_path / 'store'}")
    publish_version(repository, b"one", bytes(MIN_CACHED_BYTES))
    sent = push(repository, "front", store).sent
    with ThreadPoolExecutor(4) as pods:
        fetched = [pulled.fetched for pulled in pods.map(lambda _: pull(store, "front", target), range(4))]
    assert sorted(fetched) == [0, 0, 0, sent]
    assert tree(target) == tree(repository)
    read: list[str] = []

    def file_digest(stream: Any, digest: Any) -> Any:
        read.append(Path(stream.name).name)
        return hash_file(stream, digest)

    hash_file = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    pull(store, "front", target)
    assert read.count("weights") == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from builder.repository.stores import store
from builder.repository.stores.transfer import push
store.Store.publish = lambda self, manifest: os.kill(os.getpid(), signal.SIGKILL)
push(Path(sys.argv[1]), "front", store.open_store(sys.argv[2]))
"""


def test_killed_push_is_invisible_and_resumed_by_the_next(store: Store, repository: Path, target: Path) -> None:
    publish_version(repository, b"one", LARGE)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(repository), store.url], timeout=600)
    assert killed.returncode == -signal.SIGKILL
    assert (store.models(), store.versions("front")) == ([], [])
    with pytest.raises(RepositoryError, match="has no model front"):
        pull(store, "front", target)
    assert push(repository, "front", store).sent == 0, "its blobs are there"
    pull(store, "front", target)
    assert tree(target) == tree(repository)


def test_concurrent_pushes_of_one_number_do_not_mix(
    store: Store, repository: Path, tmp_path: Path, target: Path
) -> None:
    other = tmp_path / "other" / "model_repository"
    publish_version(repository, b"one", LARGE)
    publish_version(other, b"another", LARGE)
    push(repository, "front", store)
    with pytest.raises(VersionTakenError, match="has a version 1 of front already"):
        push(other, "front", store)
    pull(store, "front", target)
    assert tree(target) == tree(repository)
    with pytest.raises(RepositoryError, match=r"has another version 1 of front: .* is not the file of the store"):
        pull(store, "front", other)
    assert (other / "front" / "1" / "model.py").read_bytes().endswith(b"# another")


def _blob_key(manifest: bytes, path: str) -> str:
    digest = json.loads(manifest)["files"][path]["sha256"]
    return f"fleet/blobs/sha256/{digest[:2]}/{digest}"


@pytest.mark.parametrize("fault", ["lies", "is cut off", "is gone"])
def test_pull_of_a_damaged_blob_changes_nothing(
    fault: str,
    store: Store,
    bucket: str,
    raw: Callable[[str], bytes | None],
    repository: Path,
    target: Path,
) -> None:
    publish_version(repository, b"one", LARGE)
    push(repository, "front", store)
    pull(store, "front", target)
    before = tree(target)
    publish_version(repository, b"two", LARGE[::-1])
    push(repository, "front", store)
    manifest = raw("fleet/models/front/2.json")
    assert manifest is not None
    key = _blob_key(manifest, "front_model/2/weights")
    client = boto3.client("s3")
    if fault == "is gone":
        client.delete_object(Bucket=bucket, Key=key)
    else:
        client.put_object(Bucket=bucket, Key=key, Body=bytes(len(LARGE)) if fault == "lies" else LARGE[:100])
    with pytest.raises(RepositoryError, match="push the version again"):
        pull(store, "front", target)
    assert tree(target) == before
    client.put_object(Bucket=bucket, Key=key, Body=LARGE[::-1])
    pulled = pull(store, "front", target)
    assert pulled.fetched <= len(LARGE), "what had come before is not fetched again"
    assert tree(target) == tree(repository)


def test_pull_of_a_missing_or_wrong_manifest_changes_nothing(
    store: Store, bucket: str, raw: Callable[[str], bytes | None], repository: Path, target: Path
) -> None:
    publish_version(repository, b"one", LARGE)
    push(repository, "front", store)
    manifest = raw("fleet/models/front/1.json")
    assert manifest is not None
    client = boto3.client("s3")
    client.put_object(Bucket=bucket, Key="fleet/models/front/2.json", Body=manifest)
    with pytest.raises(RepositoryError, match="is the manifest of version 1 of front"):
        pull(store, "front", target)
    client.put_object(Bucket=bucket, Key="fleet/models/front/2.json", Body=manifest[:50])
    with pytest.raises(RepositoryError, match="is not the manifest of a version"):
        pull(store, "front", target)
    for number in (1, 2):
        client.delete_object(Bucket=bucket, Key=f"fleet/models/front/{number}.json")
    with pytest.raises(RepositoryError, match="has no model front; it has none"):
        pull(store, "front", target)
    assert not list(target.glob("*"))


def test_pull_of_a_manifest_with_foreign_files_changes_nothing(
    store: Store, bucket: str, raw: Callable[[str], bytes | None], repository: Path, target: Path
) -> None:
    publish_version(repository, b"one", LARGE)
    push(repository, "front", store)
    manifest = json.loads(raw("fleet/models/front/1.json") or b"")
    manifest["files"]["victim/1/model.py"] = manifest["files"]["front/1/model.py"]
    client = boto3.client("s3")
    client.put_object(Bucket=bucket, Key="fleet/models/front/1.json", Body=json.dumps(manifest).encode())
    with pytest.raises(RepositoryError, match=r"has files of front, front_model, victim, and its build.json says"):
        pull(store, "front", target)
    assert not list(target.glob("*"))


def test_pull_with_a_key_refuses_unsigned_versions(
    store: Store, repository: Path, target: Path, tmp_path: Path
) -> None:
    private, public = write_keys(tmp_path)
    publish_version(repository, b"one", LARGE)
    sign(repository, Signer(private))
    push(repository, "front", store)
    pull(store, "front", target, verify_key=public)
    assert unsigned(target, public) == []
    before = tree(target)
    publish_version(repository, b"two", LARGE)
    push(repository, "front", store)
    with pytest.raises(RepositoryError, match=r"version 2 is not signed .* Nothing was published"):
        pull(store, "front", target, verify_key=public)
    assert tree(target) == before


def test_build_publishes_to_a_store(
    bucket: str, checkpoint: Callable[[str], Path], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{bucket}/built"
    taken = Manifest("topics", 6, "topics-checkpoint", {"topics/6/x": Blob("0" * 64, 1)})
    open_store(url).publish(taken)
    assert build(make_spec(model=str(checkpoint("topics")), name="topics", output=url)).version == 7
    assert open_store(url).versions("topics") == [6, 7]
    assert main(["pull", "topics", "--from", url, "--repository", str(target)]) == 0
    assert "version 7 of topics is served" in capsys.readouterr().err.replace("\n", " ")
    assert main(["check", str(target)]) == 0
    with pytest.raises(RepositoryError, match="already has a model topics, built from topics-checkpoint"):
        build(make_spec(model=str(shutil.copytree(checkpoint("flags"), tmp_path / "topics")), output=url))


def test_push_and_pull_commands_name_what_is_missing(
    bucket: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_version(repository, b"one", LARGE)
    url = f"s3://{bucket}/fleet"
    for command, message in {
        ("push", "absent", "--to", url, "--repository", str(repository)): "has no model absent; it has front",
        ("push", "front", "--version", "7", "--to", url, "--repository", str(repository)): "has no version 7 of front",
        ("pull", "front", "--from", url, "--repository", str(repository)): "has no model front; it has none",
        ("pull", "front", "--from", "http://x/y", "--repository", str(repository)): "is not the address of an object",
    }.items():
        assert main(list(command)) == 1
        assert message in capsys.readouterr().err.replace("\n", " ")


def test_build_refuses_to_publish_an_uncompiled_plan_to_a_store() -> None:
    with pytest.raises(SpecError, match="a plan is compiled in a folder"):
        make_spec(model="org/name", target="tensorrt", precision="fp16", output="s3://bucket/x")


@pytest.mark.parametrize(
    ("output", "address"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        (Path("s3://bucket/a"), "s3://bucket/a"),
        (Path("file:///tmp/x"), "file:///tmp/x"),
        ("model_repository", None),
        (Path("/tmp/s3:/x"), None),
    ],
)
def test_output_address_selects_a_store(output: str | Path, address: str | None) -> None:
    assert make_spec(model="org/name", output=output).store == address
