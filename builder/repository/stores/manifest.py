"""Manifest of a model version in an object store: its files, by path and hash. Reads nothing but JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from builder.common.errors import RepositoryError

SCHEMA = 1
DIGEST = re.compile(r"[0-9a-f]{64}")
PART = re.compile(r"[A-Za-z0-9_.+-]+")  # of a path


@dataclass(frozen=True)
class Blob:
    """Content of a file. `size`: bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """Version `version` of the model `name`, built from the checkpoint `source`; `files` by path in a repository."""

    name: str
    version: int
    source: str | None
    files: Mapping[str, Blob]

    def entries(self) -> list[str]:
        """Return the folders of a repository that it has files for, the front first."""
        return sorted({PurePosixPath(path).parts[0] for path in self.files}, key=lambda name: (name != self.name, name))


def dump(manifest: Manifest) -> bytes:
    """Return `manifest` as JSON."""
    return json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1, sort_keys=True).encode()


def load(text: bytes, where: str) -> Manifest:
    """Parse a manifest, which anyone with write access to the store may have changed. Raises RepositoryError."""
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']}; this version reads {SCHEMA}")
        version = int(document["version"])
        files = {_path(path, version): _blob(blob) for path, blob in document["files"].items()}
        manifest = Manifest(str(document["name"]), version, document["source"], files)
        if manifest.name not in manifest.entries():
            raise ValueError(f"no file of {manifest.name}")
        return manifest
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RepositoryError(f"{where} is not the manifest of a version ({error}); push the version again") from error


def _path(path: str, version: int) -> str:
    """Return `path`. Raises ValueError unless it stays within the version's folders of a model."""
    entry, *parts = path.split("/")
    rest = parts[1:] if parts[:1] == ["warmup"] else parts
    plain = all(PART.fullmatch(part) and part.strip(".") for part in (entry, *parts))
    if not plain or len(rest) < 2 or rest[0] != str(version):
        raise ValueError(f"the path {path!r}")
    return path


def _blob(document: Any) -> Blob:
    digest, size = document["sha256"], document["size"]
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ValueError(f"the hash {digest!r}")
    if type(size) is not int or size < 0:
        raise ValueError(f"the size {size!r}")
    return Blob(digest, size)
