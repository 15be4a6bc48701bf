"""Audit an object store: blobs that are damaged or missing, and those that no version needs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from builder.common.errors import RepositoryError
from builder.common.progress import OnProgress
from builder.repository.stores.store import Blob, Manifest, Store
from builder.repository.stores.transfer import AT_ONCE


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    `problems`: a sentence for each damaged manifest or blob; `versions`: how many were audited; `unnamed`: blobs that
    no manifest names.
    """

    problems: tuple[str, ...]
    versions: int
    unnamed: tuple[Blob, ...]


def audit(store: Store, on_progress: OnProgress = lambda done, total: None) -> Audit:
    """Read every manifest of `store`, and every blob that one names, and compare the blobs with their hashes.

    `on_progress` is called with the bytes that were read, and all of them.
    Raises RepositoryError for a store without versions: it would be found sound, whatever its address was meant to be.
    """
    manifests, problems = _manifests(store)
    if not (manifests or problems):
        raise RepositoryError(f"{store.url} has no versions of models; correct the address, or push one first")
    users: dict[Blob, list[str]] = {}
    for manifest in manifests:
        for blob in set(manifest.files.values()):
            users.setdefault(blob, []).append(f"{manifest.name}@{manifest.version}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done, total = 0, sum(blob.size for blob in users)
        for blob, problem in zip(users, pool.map(partial(_problem, store), users), strict=True):
            if problem is not None:
                problems.append(f"{problem}: {', '.join(users[blob])}")
            done += blob.size
            on_progress(done, total)
    return Audit(tuple(problems), len(manifests), _unnamed(store, manifests))


def collect(store: Store, min_age_s: float) -> list[Blob]:
    """Remove blobs that no manifest names and that are `min_age_s` seconds old; return them.

    A push that runs meanwhile may count on such a blob, and one that was interrupted continues from it. Raises
    RepositoryError if a manifest cannot be read, because its blobs are then unknown.
    """
    manifests, problems = _manifests(store)
    if problems:
        raise RepositoryError(f"nothing was removed, because a manifest cannot be read: {problems[0]}")
    removed = [blob for blob in _unnamed(store, manifests) if store.age(blob) >= min_age_s]
    for blob in removed:
        store.remove(blob)
    return removed


def _manifests(store: Store) -> tuple[list[Manifest], list[str]]:
    """Return the manifests of all versions, and why others cannot be read."""
    manifests, problems = [], []
    for name in store.models():
        for version in store.versions(name):
            try:
                manifests.append(store.manifest(name, version))
            except RepositoryError as error:
                problems.append(str(error))
    return manifests, problems


def _problem(store: Store, blob: Blob) -> str | None:
    """Return what is wrong with a blob and what to do, for the versions that need it; None if nothing is wrong."""
    try:
        problem = store.problem(blob)
    except RepositoryError as error:  # one that the store refuses to read does not hide the others
        return f"{error}; needed by"
    return None if problem is None else f"the blob {blob.sha256} {problem}; push again with --verify"


def _unnamed(store: Store, manifests: list[Manifest]) -> tuple[Blob, ...]:
    named = {blob.sha256 for manifest in manifests for blob in manifest.files.values()}
    return tuple(blob for blob in store.blobs() if blob.sha256 not in named)
