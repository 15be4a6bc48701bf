"""Publish a build to an object store, from a temporary folder."""

from __future__ import annotations

from pathlib import Path

from builder.repository.publish import publish
from builder.repository.report.record import BuildReport
from builder.repository.stores.push import push
from builder.repository.stores.store import Store, VersionTakenError
from builder.repository.verdict import Unverified, Verified


def publish_to(store: Store, outcome: Verified | Unverified, folder: Path) -> BuildReport:
    """Make `outcome` the next version in `store`; `folder`: temporary layout. Raises RepositoryError."""
    while True:
        number = 1 + max(store.versions(outcome.report.name), default=0)
        repository = folder / f"version_{number}"
        report = publish(repository, outcome, first=number, workplace=folder)
        try:
            push(repository, report.name, store)
        except VersionTakenError:  # by another process meanwhile: take the next number
            continue
        return report


def source_in(store: Store, name: str) -> str | None:
    """Return the checkpoint that the model `name` in `store` was built from; None if there is no such model."""
    return store.manifest(name).source if store.versions(name) else None
