"""Pull a version from an object store: fetch it beside the repository, verify it, and publish it in one change.

Triton reads the folder and never the store: its polling would reload models for nothing, and can load half of one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from builder.common.errors import RepositoryError
from builder.options.choices import KEEP
from builder.repository.check import check
from builder.repository.locks import locked, sync
from builder.repository.publish import move_in, remove_old_versions
from builder.repository.sharing.hosting import refuse_hosted
from builder.repository.signatures import unsigned
from builder.repository.stores.manifest import Blob, Manifest
from builder.repository.stores.push import AT_ONCE, blob_of
from builder.repository.stores.store import Store
from builder.repository.transaction import changing
from builder.repository.versions import BESIDE, activate, entry_names, served_number, version_numbers


@dataclass(frozen=True)
class Pulled:
    """Result of a pull. `fetched`: bytes that came from the store; the others were already here."""

    manifest: Manifest
    fetched: int


def pull(
    store: Store,
    name: str,
    repository: Path,
    version: int | None = None,
    keep: int = KEEP,
    verify_key: Path | None = None,
) -> Pulled:
    """Pull a version of a model, by default the newest, into `repository` and make it the served one.

    `keep`: versions that remain there. `verify_key`: key that it must be signed with. Raises RepositoryError; the
    repository is then unchanged, and fetched files stay beside it for the next pull.
    """
    refuse_hosted(repository, name)
    manifest = store.manifest(name, version)
    repository.mkdir(parents=True, exist_ok=True)
    staging = repository.parent / f".{repository.name}.pull"
    with locked(staging):
        staging.mkdir(exist_ok=True)
        local = _local_blobs(manifest, repository)
        missing = {blob for blob in manifest.files.values() if blob not in local}
        to_fetch = {blob for blob in missing if not (staging / blob.sha256).exists()}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for future in [pool.submit(store.get, blob, staging / blob.sha256) for blob in to_fetch]:
                future.result()
        fetched = {blob: staging / blob.sha256 for blob in missing}
        _publish(manifest, {**local, **fetched}, repository, keep, verify_key)
        shutil.rmtree(staging)
    return Pulled(manifest, sum(blob.size for blob in to_fetch))


def _local_blobs(manifest: Manifest, repository: Path) -> dict[Blob, Path]:
    """Return the blobs of a version that the repository already has, in files of any version."""
    sizes = {blob.size for blob in manifest.files.values()}
    folders = (repository / entry for entry in manifest.entries())
    files = (file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file())
    by_blob = {blob_of(file): file for file in files if file.stat().st_size in sizes}
    return {blob: by_blob[blob] for blob in manifest.files.values() if blob in by_blob}


def _publish(
    manifest: Manifest, blobs: Mapping[Blob, Path], repository: Path, keep: int, verify_key: Path | None
) -> None:
    number, names = manifest.version, manifest.entries()
    if number in version_numbers(repository / manifest.name):
        _refuse_another(manifest, repository)
    before = served_number(repository / manifest.name)
    with changing(repository, manifest.name) as change:
        new = change.staging / "new"
        for path, blob in manifest.files.items():
            _link_or_copy(blobs[blob], new / path)
        for entry in names:
            _copy_beside(new / entry, number)
        if sorted(entry_names(new, manifest.name, number)) != sorted(names):
            raise RepositoryError(
                f"{manifest.name}: its manifest has files of {', '.join(names)}, and its build.json says "
                f"{', '.join(entry_names(new, manifest.name, number))}; push the version again"
            )
        problems = [*check(new), *(unsigned(new, verify_key) if verify_key is not None else ())]
        if problems:
            raise RepositoryError(f"what was pulled would not load: {problems[0]}. Nothing was published")
        if number not in version_numbers(repository / manifest.name):
            for entry in reversed(names):
                move_in(change, new / entry, repository / entry, number)
        activate(change, repository, names, number)
        change.commit()
        remove_old_versions(repository, manifest.name, change.staging / "removed", keep, [number, before])


def _refuse_another(manifest: Manifest, repository: Path) -> None:
    """Raise RepositoryError if the repository has a different version with that number."""
    files = {path: repository / path for path in manifest.files}
    other = [
        path
        for path, blob in manifest.files.items()
        if not (files[path].is_file() and files[path].stat().st_size == blob.size and blob_of(files[path]) == blob)
    ]
    if other:
        raise RepositoryError(
            f"{repository} has another version {manifest.version} of {manifest.name}: {other[0]} is not the file of "
            f"the store. Pull into another repository, or remove the model first: build-repo remove {manifest.name}"
        )


def _link_or_copy(source: Path, target: Path) -> None:
    """Create `target` as a hard link to `source`, or as a copy if linking fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    sync(target)


def _copy_beside(entry: Path, number: int) -> None:
    """Copy the files that a repository has beside the version folders."""
    for name in BESIDE:
        if (entry / str(number) / name).is_file():
            shutil.copyfile(entry / str(number) / name, entry / name)
    for folder in (entry, *(path for path in entry.rglob("*") if path.is_dir())):
        sync(folder)
