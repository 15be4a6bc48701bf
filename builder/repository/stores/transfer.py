"""Push versions to a store, an object store or a registry, pull them from it, and publish builds to it.

A push sends the blobs that the store lacks, then the manifest. A pull fetches a version beside the repository (of a
mount, into a folder of it), verifies it and publishes it in one change. Triton reads the repository and never the
store: its polling would reload models for nothing, and can load half of one.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from builder.common.errors import RepositoryError
from builder.common.files import link
from builder.common.hashing import FileDigests
from builder.common.progress import OnProgress
from builder.options.choices import KEEP
from builder.repository.check import check
from builder.repository.locks import locked, sync, workspace
from builder.repository.publish import move_in, publish, remove_old_versions
from builder.repository.report.record import REPORT, BuildReport, checkpoint_source
from builder.repository.sharing.hosting import refuse_hosted
from builder.repository.signatures import unsigned
from builder.repository.stores.opening import VersionStore
from builder.repository.stores.store import Blob, Manifest, VersionTakenError
from builder.repository.transaction import changing
from builder.repository.verdict import Unverified, Verified
from builder.repository.versions import (
    activate,
    copy_beside,
    entry_names,
    require_front,
    served_number,
    version_numbers,
)

AT_ONCE = 8  # concurrent transfers of blobs
PARTS = (".", "warmup")  # folders of an entry that have files of a version: builder/repository/publish.py


@dataclass(frozen=True)
class Pushed:
    """Result of a push. `sent`: bytes of the blobs that the store lacked."""

    manifest: Manifest
    sent: int


@dataclass(frozen=True)
class Pulled:
    """Result of a pull. `fetched`: bytes that came from the store; the others were already here."""

    manifest: Manifest
    fetched: int


def push(
    repository: Path,
    name: str,
    store: VersionStore,
    version: int | None = None,
    verify: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> Pushed:
    """Push a version of a model, by default the served one. Raises RepositoryError.

    An interrupted push leaves blobs that no manifest names, and the next push continues from them. `verify`: read the
    blobs of the version that the store has, and send those that are damaged. `on_progress` is called with the bytes
    that are in the store, and with all of the version.
    """
    require_front(repository, name)
    number = served_number(repository / name) if version is None else version
    if number not in version_numbers(repository / name):
        raise RepositoryError(f"{repository} has no version {number} of {name}; see build-repo versions {name}")
    entries = [repository / entry for entry in entry_names(repository, name, number)]
    folders = [entry / part / str(number) for entry in entries for part in PARTS]
    paths = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    files = {file.relative_to(repository).as_posix(): file for file in paths}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        blobs = dict(zip(files, pool.map(partial(_blob_of, digests=FileDigests()), files.values()), strict=True))
        sources = {blob: files[path] for path, blob in blobs.items()}
        puts = {pool.submit(store.put, source, blob, verify): blob for blob, source in sources.items()}
        _wait(puts, on_progress)
        sent = sum(blob.size for put, blob in puts.items() if put.result())
    manifest = Manifest(name, number, checkpoint_source(repository / name / str(number) / REPORT), blobs)
    store.publish(manifest)
    return Pushed(manifest, sent)


def _wait(transfers: Mapping[Future[Any], Blob], on_progress: OnProgress) -> None:
    """Wait for all transfers. Raises RepositoryError if one failed."""
    done, total = 0, sum(blob.size for blob in transfers.values())
    for future in as_completed(transfers):
        future.result()
        done += transfers[future].size
        on_progress(done, total)


def publish_to(
    store: VersionStore, outcome: Verified | Unverified, folder: Path, version: int | None = None
) -> BuildReport:
    """Make `outcome` the next version in `store`, or `version`; `folder`: temporary layout. Raises RepositoryError."""
    while True:
        number = version or 1 + max(store.versions(outcome.report.name), default=0)
        repository = folder / f"version_{number}"
        report = publish(repository, outcome, first=number, workplace=folder)
        try:
            push(repository, report.name, store)
        except VersionTakenError:  # by another process meanwhile: take the next number
            if version is not None:
                raise
            continue
        return report


def source_in(store: VersionStore, name: str) -> str | None:
    """Return the checkpoint that the model `name` in `store` was built from; None if there is no such model."""
    return store.manifest(name).source if name in store.models() else None


def pull(
    store: VersionStore,
    name: str,
    repository: Path,
    version: int | None = None,
    keep: int = KEEP,
    verify_key: Path | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> Pulled:
    """Pull a version of a model, by default the newest, into `repository` and make it the served one.

    `keep`: versions that remain there. `verify_key`: key that it must be signed with. `on_progress` is called with the
    bytes that were fetched, and that are to be. Raises RepositoryError; the repository is then unchanged, and fetched
    files stay for the next pull.
    """
    refuse_hosted(repository, name)
    manifest = store.manifest(name, version)
    repository.mkdir(parents=True, exist_ok=True)
    staging = workspace(repository) / f".{repository.name}.pull"
    with locked(staging):
        staging.mkdir(exist_ok=True)
        digests = FileDigests()
        sizes = {blob.size for blob in manifest.files.values()}
        files = [file for entry in manifest.entries() for file in sorted((repository / entry).rglob("*"))]
        local = {_blob_of(file, digests): file for file in files if file.is_file() and file.stat().st_size in sizes}
        missing = {blob for blob in manifest.files.values() if blob not in local}
        to_fetch = {blob for blob in missing if not (staging / blob.sha256).exists()}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            _wait({pool.submit(store.get, blob, staging / blob.sha256): blob for blob in to_fetch}, on_progress)
        fetched = {blob: staging / blob.sha256 for blob in missing}
        _publish_pulled(manifest, {**local, **fetched}, repository, keep, verify_key, digests)
        shutil.rmtree(staging)
    return Pulled(manifest, sum(blob.size for blob in to_fetch))


def _publish_pulled(
    manifest: Manifest,
    blobs: dict[Blob, Path],
    repository: Path,
    keep: int,
    verify_key: Path | None,
    digests: FileDigests,
) -> None:
    number, names = manifest.version, manifest.entries()
    if number in version_numbers(repository / manifest.name):
        _refuse_another(manifest, repository, digests)
    before = served_number(repository / manifest.name)
    with changing(repository, manifest.name) as change:
        new = change.staging / "new"
        for path, blob in manifest.files.items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            link(blobs[blob], new / path)
            sync(new / path)
        for entry in names:
            copy_beside(new / entry, number)
        if sorted(entry_names(new, manifest.name, number)) != sorted(names):
            raise RepositoryError(
                f"{manifest.name}: its manifest has files of {', '.join(names)}, and its build.json says "
                f"{', '.join(entry_names(new, manifest.name, number))}; push the version again"
            )
        problems = [*check(new, digests=digests), *(unsigned(new, verify_key) if verify_key is not None else ())]
        if problems:
            raise RepositoryError(f"what was pulled would not load: {problems[0]}. Nothing was published")
        if number not in version_numbers(repository / manifest.name):
            for entry in reversed(names):
                move_in(change, new / entry, repository / entry, number)
        activate(change, repository, names, number)
        change.commit()
        remove_old_versions(repository, manifest.name, change.staging / "removed", keep, [number, before])


def _refuse_another(manifest: Manifest, repository: Path, digests: FileDigests) -> None:
    """Raise RepositoryError if the repository has a different version with that number."""
    files = {path: repository / path for path in manifest.files}
    other = [
        path
        for path, blob in manifest.files.items()
        if not (files[path].is_file() and _blob_of(files[path], digests) == blob)
    ]
    if other:
        raise RepositoryError(
            f"{repository} has another version {manifest.version} of {manifest.name}: {other[0]} is not the file of "
            f"the store. Pull into another repository, or remove the model first: build-repo remove {manifest.name}"
        )


def _blob_of(file: Path, digests: FileDigests) -> Blob:
    return Blob(digests.of(file), file.stat().st_size)
