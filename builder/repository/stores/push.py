"""Push a version to an object store: the blobs that it lacks, then the manifest."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from builder.common.errors import RepositoryError
from builder.common.hashing import sha256_of
from builder.repository.report.record import REPORT
from builder.repository.stores.manifest import Blob, Manifest
from builder.repository.stores.store import Store
from builder.repository.versions import entry_names, require_front, served_number, version_numbers

AT_ONCE = 8  # concurrent uploads of blobs


@dataclass(frozen=True)
class Pushed:
    """Result of a push. `sent`: bytes of the blobs that the store lacked."""

    manifest: Manifest
    sent: int


def push(repository: Path, name: str, store: Store, version: int | None = None) -> Pushed:
    """Push a version of a model, by default the served one. Raises RepositoryError.

    An interrupted push leaves blobs that no manifest names, and the next push continues from them.
    """
    require_front(repository, name)
    number = served_number(repository / name) if version is None else version
    if number not in version_numbers(repository / name):
        raise RepositoryError(f"{repository} has no version {number} of {name}; see build-repo versions {name}")
    files = version_files(repository, name, number)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        blobs = dict(zip(files, pool.map(blob_of, files.values()), strict=True))
        sources = {blob: files[path] for path, blob in blobs.items()}
        was_sent = pool.map(store.put, sources.values(), sources)
        sent = sum(blob.size for blob, new in zip(sources, was_sent, strict=True) if new)
    manifest = Manifest(name, number, _source(repository / name, number), blobs)
    store.publish(manifest)
    return Pushed(manifest, sent)


def version_files(repository: Path, name: str, number: int) -> dict[str, Path]:
    """Return all files of a version, by their paths in the repository."""
    entries = [repository / entry for entry in entry_names(repository, name, number)]
    folders = [entry / part / str(number) for entry in entries for part in PARTS]
    files = (file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(repository).as_posix(): file for file in files}


PARTS = (".", "warmup")  # where a version has files: see builder/repository/publish.py


def blob_of(file: Path) -> Blob:
    """Return the blob of a file: its hash and size."""
    return Blob(sha256_of(file), file.stat().st_size)


def _source(entry: Path, number: int) -> str | None:
    """Return the checkpoint that a version was built from, according to its report; None if unknown."""
    try:
        return str(json.loads((entry / str(number) / REPORT).read_text("utf-8"))["checkpoint"]["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
