"""Open a place that keeps versions of models, an object store or a repository of an OCI registry, by its address."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from builder.common.addresses import is_registry
from builder.common.errors import SpecError
from builder.common.registry_address import parse_address
from builder.repository.stores.store import Blob, Manifest, open_store


class VersionStore(Protocol):
    """A place that keeps versions of models: builder/repository/stores/store.py says what each function does."""

    @property
    def url(self) -> str: ...

    def models(self) -> list[str]: ...

    def versions(self, name: str) -> list[int]: ...

    def manifest(self, name: str, version: int | None = None) -> Manifest: ...

    def publish(self, manifest: Manifest) -> None: ...

    def put(self, source: Path, blob: Blob, verify: bool = False) -> bool: ...

    def read(self, blob: Blob) -> bytes: ...

    def get(self, blob: Blob, target: Path) -> None: ...


def open_versions(url: str) -> VersionStore:
    """Open the object store or the registry's repository at `url`. Raises SpecError."""
    if not is_registry(url):
        return open_store(url)
    from builder.repository.stores.oci.store import open_repository  # object stores need no requests

    return open_repository(parse_address(url))


def chosen_version(url: str, version: int | None) -> int | None:
    """Return the version that `url` or an option names; None if neither does. Raises SpecError if they differ."""
    named = parse_address(url).version if is_registry(url) else None
    if named is not None and version not in (None, named):
        raise SpecError(f"{url} names version {named}, and version {version} was requested: leave one of them out")
    return named or version
