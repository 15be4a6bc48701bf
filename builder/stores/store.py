"""One object store: blobs by their hash, manifests by model and version. Knows fsspec; knows no repository."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from builder.distribution import installing
from builder.errors import RepositoryError, SpecError, first_line
from builder.hashing import sha256_of
from builder.stores.manifest import Blob, Manifest, dump, load

URL = re.compile(r"(s3|gs|az|abfs|file)://.+")
EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "abfs": "azure", "file": "s3"}
CHUNK = 8 << 20  # bytes that are asked for at once
ATTEMPTS = 4  # of a chunk, one after another
PAUSE_S = 0.2  # after the first that failed; doubles


class VersionTakenError(RepositoryError):
    """A version of that number was pushed by somebody else meanwhile."""


def is_store(text: str) -> bool:
    """Whether `text` is the address of an object store."""
    return URL.fullmatch(text) is not None


@dataclass(frozen=True)
class Store:
    """An object store under `url`."""

    url: str
    files: Any  # fsspec's AbstractFileSystem
    root: str

    def models(self) -> list[str]:
        """The models that have a version."""
        return sorted(Path(path).name for path in self._list(f"{self.root}/models"))

    def versions(self, name: str) -> list[int]:
        """The versions of a model, in order."""
        names = (Path(path).name for path in self._list(f"{self.root}/models/{name}"))
        return sorted(int(match[1]) for text in names if (match := re.fullmatch(r"([1-9]\d*)\.json", text)))

    def manifest(self, name: str, version: int | None = None) -> Manifest:
        """That of a version of a model, the newest where none is named. Raises RepositoryError where there is none."""
        there = self.versions(name)
        if not there:
            raise RepositoryError(f"{self.url} has no model {name}; it has {', '.join(self.models()) or 'none'}")
        wanted = there[-1] if version is None else version
        if wanted not in there:
            raise RepositoryError(f"{self.url} has no version {wanted} of {name}; it has {', '.join(map(str, there))}")
        path = self._manifest(name, wanted)
        with _as_repository_error(f"{self.url} could not be read"):
            manifest = load(self.files.cat_file(path), path)
        if (manifest.name, manifest.version) != (name, wanted):
            raise RepositoryError(
                f"{path} is the manifest of version {manifest.version} of {manifest.name}; push it again"
            )
        return manifest

    def publish(self, manifest: Manifest) -> None:
        """Write a manifest whose blobs are all there. Raises VersionTakenError where there is one of that number."""
        path = self._manifest(manifest.name, manifest.version)
        try:
            with _as_repository_error(f"{self.url} could not be written"):
                self._create(path, dump(manifest))
        except FileExistsError as error:
            raise VersionTakenError(
                f"{self.url} has a version {manifest.version} of {manifest.name} already; nothing of it was changed"
            ) from error

    def put(self, source: Path, blob: Blob) -> bool:
        """Have what `source` holds there. Returns whether it had to be sent."""
        path = self._blob(blob)
        if self._size(path) == blob.size:
            return False
        with _as_repository_error(f"{self.url} could not be written"):
            if self._is_local:
                self._link(path, source.read_bytes(), replace=True)
            else:
                self.files.put_file(str(source), path)
        return True

    def read(self, blob: Blob) -> bytes:
        """What a small blob holds. Raises RepositoryError where that is not what its name says."""
        with _as_repository_error(f"{self.url} could not be read"):
            content: bytes = self.files.cat_file(self._blob(blob))
        if hashlib.sha256(content).hexdigest() != blob.sha256:
            raise RepositoryError(
                f"{self.url}: the blob {self._blob(blob)} is not what its name says; remove it there and push the "
                "version again"
            )
        return content

    def get(self, blob: Blob, target: Path) -> None:
        """Bring a blob to `target`, going on where an earlier attempt ended. Raises RepositoryError."""
        path, unfinished = self._blob(blob), target.with_name(f"{target.name}.part")
        size = self._size(path)
        if size != blob.size:
            problem = "is not there" if size is None else f"has {size} bytes instead of {blob.size}"
            raise RepositoryError(f"{self.url}: the blob {path} {problem}; push the version again")
        unfinished.touch()
        if unfinished.stat().st_size > blob.size:
            unfinished.unlink()
        with unfinished.open("ab") as stream:
            while stream.tell() < blob.size:
                stream.write(self._chunk(path, stream.tell(), blob.size))
        if sha256_of(unfinished) != blob.sha256:
            unfinished.unlink()
            raise RepositoryError(
                f"{self.url}: the blob {path} is not what its name says; remove it there and push the version again"
            )
        os.replace(unfinished, target)

    def _chunk(self, path: str, begin: int, size: int) -> bytes:
        """Some bytes of a blob from `begin` on, at least one."""
        problem = ""
        for attempt in range(ATTEMPTS):
            try:
                content: bytes = self.files.cat_file(path, start=begin, end=min(begin + CHUNK, size))
                if content:
                    return content
            except Exception as error:  # whatever a connection that breaks makes the libraries raise
                problem = first_line(error)[:300]
            time.sleep(PAUSE_S * 2**attempt)
        raise RepositoryError(f"{self.url}: {path} could not be read ({problem}); pull again to go on from there")

    def _size(self, path: str) -> int | None:
        """Bytes of an object; None where there is none."""
        with _as_repository_error(f"{self.url} could not be read"):
            try:
                return int(self.files.info(path)["size"])
            except FileNotFoundError:
                return None

    @property
    def _is_local(self) -> bool:
        return self.url.startswith("file:")

    def _blob(self, blob: Blob) -> str:
        return f"{self.root}/blobs/sha256/{blob.sha256[:2]}/{blob.sha256}"

    def _manifest(self, name: str, version: int) -> str:
        return f"{self.root}/models/{name}/{version}.json"

    def _list(self, path: str) -> list[str]:
        self.files.invalidate_cache()
        with _as_repository_error(f"{self.url} could not be read"):
            try:
                return list(self.files.ls(path, detail=False))
            except FileNotFoundError:
                return []

    def _create(self, path: str, content: bytes) -> None:
        """Write a new object, whole. Raises FileExistsError where there is one."""
        if self._is_local:
            self._link(path, content)
        else:
            self.files.pipe_file(path, content, mode="create")

    def _link(self, path: str, content: bytes, replace: bool = False) -> None:
        """The same in a folder: written beside, and linked to its name."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            unfinished.write_bytes(content)
            if replace:
                os.replace(unfinished, target)
            else:
                os.link(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)


def open_store(url: str) -> Store:
    """The store under `url`. Raises SpecError where that cannot be one, or its package is missing."""
    if not is_store(url):
        raise SpecError(
            f"{url} is not the address of an object store; expected s3://, gs://, az:// or file:// and a path"
        )
    scheme = url.split(":", 1)[0]
    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        raise SpecError(
            f"{url} needs a package that is not here ({first_line(error)[:300]}): {installing(EXTRAS[scheme])}"
        ) from error
    return Store(url.rstrip("/"), files, root.rstrip("/"))


@contextlib.contextmanager
def _as_repository_error(what: str) -> Iterator[None]:
    """An error of the store, in a line."""
    try:
        yield
    except (FileExistsError, RepositoryError):
        raise
    except Exception as error:  # whatever the libraries of a store raise: credentials, names, connections
        raise RepositoryError(f"{what}: {first_line(error)[:300]}") from error
