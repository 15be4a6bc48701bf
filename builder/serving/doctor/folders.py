"""Examine the folders that builds write to: the repository, temporary files, the caches."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants

from builder.common.cache.folder import FOLDER_VARIABLE, cache_home, folder_size, is_cache_disabled, max_cache_bytes
from builder.common.errors import RepositoryError, SpecError
from builder.repository.locks import refuse_unwritable
from builder.serving.doctor.finding import Finding

MIN_DISK = 1e9  # bytes; the repository, checkpoint and stages of a small encoder take 0.2 GB


def find_folders(repository: Path) -> Iterator[Finding]:
    """Yield a finding on the repository, the folder of temporary files, the Hub's cache and the cache of builds."""
    yield _find_repository(repository)
    yield _find_space("temporary files", Path(tempfile.gettempdir()), "TMPDIR", stops=True)
    yield _find_space("Hub's cache", Path(constants.HF_HUB_CACHE), "HF_HOME", stops=False)
    yield _find_build_cache()


def _find_repository(repository: Path) -> Finding:
    try:
        refuse_unwritable(repository)
    except RepositoryError as error:
        return Finding("repository", f"{repository} may not be changed", str(error), stops=True)
    return _find_space("repository", repository, "--repository", stops=True)


def _find_space(subject: str, folder: Path, option: str, stops: bool) -> Finding:
    """Return whether a build has room in `folder`.

    `option`: where another one can be named; `stops`: every build needs it.
    """
    absolute = folder.absolute()
    existing = next(parent for parent in (absolute, *absolute.parents) if os.path.exists(parent))
    free = shutil.disk_usage(existing).free
    found = f"{folder}, where {free / 1e9:.1f} GB are free"
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(subject, found, f"you may not write to {existing}: name another in {option}", stops)
    if free < MIN_DISK:
        return Finding(subject, found, f"a build has no room: free some space, or name another in {option}", stops)
    return Finding(subject, found)


def _find_build_cache() -> Finding:
    if is_cache_disabled():
        return Finding("build cache", f"switched off by {FOLDER_VARIABLE}; nothing is reused", absent=True)
    home = cache_home()
    try:
        limit = max_cache_bytes()
    except SpecError as error:
        return Finding("build cache", str(home), str(error), stops=True)
    space = _find_space("build cache", home, FOLDER_VARIABLE, stops=False)
    size = folder_size(home) if home.is_dir() else 0
    return replace(space, found=f"{space.found}; {size / 1e9:.1f} GB are used, of {limit / 1e9:.0f} for stages")
