"""Fetch what describes a version in a store, without its weights."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePosixPath

from builder.common.engines import ENGINES
from builder.common.errors import RepositoryError
from builder.repository.config.render import CONFIG
from builder.repository.report.record import REPORT
from builder.repository.stores.opening import VersionStore
from builder.repository.stores.store import Blob, Manifest
from builder.repository.versions import BESIDE, version_numbers
from builder.runtime.contract import FILE

DESCRIBING_FILES = (  # of a version
    CONFIG,
    REPORT,
    FILE,
    *(facts.model_file for facts in ENGINES.values() if facts.runs_checkpoint),
)


def describing_blobs(manifest: Manifest) -> dict[str, Blob]:
    """Return the files that describe a version, by their paths."""
    of_version = {(str(manifest.version), file) for file in DESCRIBING_FILES}
    return {path: blob for path, blob in manifest.files.items() if PurePosixPath(path).parts[1:] in of_version}


def fetch_description(manifest: Manifest, store: VersionStore, folder: Path) -> int:
    """Write a version to `folder`: the files that describe it, and all others with their size but without content.

    So what reads configurations, reports and sizes reads the same as in a repository, and no Triton can load it. Files
    without content are sparse: they take no space. Returns the bytes that were fetched. Raises RepositoryError.
    """
    others = [number for number in version_numbers(folder / manifest.name) if number != manifest.version]
    if others:
        raise RepositoryError(
            f"{folder} has version {others[0]} of {manifest.name}, beside which version {manifest.version} without "
            "weights could be loaded: give it a folder of its own"
        )
    describing = describing_blobs(manifest)
    for path, blob in manifest.files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path in describing:
            store.get(blob, target)
            if target.name in BESIDE:
                shutil.copyfile(target, target.parents[1] / target.name)
        elif not target.exists():
            _write_empty(target, blob.size)
    return sum(blob.size for blob in describing.values())


def _write_empty(target: Path, size: int) -> None:
    """Write a sparse file. Raises RepositoryError for a size that the file system does not have."""
    try:
        with target.open("wb") as file:
            file.truncate(size)
    except OSError as error:
        raise RepositoryError(f"{target} cannot have {size} bytes ({error.strerror}), as its manifest says") from error
