"""Provenance of a build: the packages that made it, and the hash of each file of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.engines import ENGINES
from builder.common.hashing import WRITTEN_DIGESTS, sha256_of

if TYPE_CHECKING:
    from builder.repository.config.entries import RepositoryEntry

_ENGINES = tuple(facts.package for facts in ENGINES.values() if facts.is_installed and facts.package)
PACKAGES = ("torch", "transformers", "tokenizers", "onnx", *_ENGINES, "optimum", "numpy")


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the installed versions of the packages that make graphs."""
    return {package: version(package) for package in packages}


def samples_file(path: Path | None) -> dict[str, str] | None:
    """Return the name and hash of the user's file of samples; None if the builder's own samples are used."""
    return None if path is None else {"name": path.name, "sha256": sha256_of(path)}


def file_hashes(entries: Sequence[RepositoryEntry]) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of each file of each entry."""
    return {
        entry.name: {
            name: hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else WRITTEN_DIGESTS.of(content)
            for name, content in sorted(entry.files.items())
        }
        for entry in entries
    }
