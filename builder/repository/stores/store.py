"""One object store: blobs by their hash, manifests by model and version."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from builder.common.distribution import installing
from builder.common.errors import RepositoryError, SpecError
from builder.common.hashing import sha256_of
from builder.repository.stores.problems import credentials_for, is_absent, one_line_errors, reason, scheme_of, silence

SCHEMA = 1
DIGEST = re.compile(r"[0-9a-f]{64}")
PART = re.compile(r"[A-Za-z0-9_.+-]+")  # of a path
URL = re.compile(r"(s3|gs|az|abfs|file)://.+")
EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "abfs": "azure", "file": "s3"}
CHUNK = 8 << 20  # bytes of one read
ATTEMPTS = 4  # of a chunk, one after another
PAUSE_S = 0.2  # after the first failure; doubles each time


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


def dump_manifest(manifest: Manifest) -> bytes:
    """Return `manifest` as JSON."""
    return json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1, sort_keys=True).encode()


def load_manifest(text: bytes, where: str) -> Manifest:
    """Parse a manifest, which anyone with write access to the store may have changed. Raises RepositoryError."""
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']}; this version reads {SCHEMA}")
        version = int(document["version"])
        files = {checked_path(path, version): _checked_blob(blob) for path, blob in document["files"].items()}
        manifest = Manifest(str(document["name"]), version, document["source"], files)
        if manifest.name not in manifest.entries():
            raise ValueError(f"no file of {manifest.name}")
        return manifest
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RepositoryError(f"{where} is not the manifest of a version ({error}); push the version again") from error


def checked_path(path: str, version: int) -> str:
    """Return `path`. Raises ValueError unless it stays within the version's folders of a model."""
    entry, *parts = path.split("/")
    rest = parts[1:] if parts[:1] == ["warmup"] else parts
    plain = all(PART.fullmatch(part) and part.strip(".") for part in (entry, *parts))
    if not plain or len(rest) < 2 or rest[0] != str(version):
        raise ValueError(f"the path {path!r}")
    return path


def _checked_blob(document: Any) -> Blob:
    digest, size = document["sha256"], document["size"]
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ValueError(f"the hash {digest!r}")
    if type(size) is not int or size < 0:
        raise ValueError(f"the size {size!r}")
    return Blob(digest, size)


class VersionTakenError(RepositoryError):
    """Another process pushed a version with that number meanwhile."""


def is_store(text: str) -> bool:
    """Return True if `text` is the address of an object store."""
    return URL.fullmatch(text) is not None


@dataclass(frozen=True)
class Store:
    """An object store under `url`."""

    url: str
    files: Any  # fsspec's AbstractFileSystem
    root: str

    def models(self) -> list[str]:
        """Return the models that have a version."""
        listing = partial(self.files.ls, f"{self.root}/models", detail=False)
        return sorted(Path(path).name for path in self._listed(listing))

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model, in order."""
        # find, not ls: adlfs' ls would first list each folder whose name begins with this one's
        listing = partial(self.files.find, f"{self.root}/models/{name}")
        files = (PurePosixPath(path) for path in self._listed(listing))
        own = (file.name for file in files if file.parent.name == name)
        return sorted(int(match[1]) for text in own if (match := re.fullmatch(r"([1-9]\d*)\.json", text)))

    def manifest(self, name: str, version: int | None = None) -> Manifest:
        """Return the manifest of a version of a model, by default the newest. Raises RepositoryError if none exists."""
        versions = self.versions(name)
        if not versions:
            raise RepositoryError(f"{self.url} has no model {name}; it has {', '.join(self.models()) or 'none'}")
        number = versions[-1] if version is None else version
        if number not in versions:
            has = ", ".join(map(str, versions))
            raise RepositoryError(f"{self.url} has no version {number} of {name}; it has {has}")
        path = self._manifest(name, number)
        with one_line_errors(self.url, "read"):
            manifest = load_manifest(self.files.cat_file(path), path)
        if (manifest.name, manifest.version) != (name, number):
            raise RepositoryError(
                f"{path} is the manifest of version {manifest.version} of {manifest.name}; push it again"
            )
        return manifest

    def publish(self, manifest: Manifest) -> None:
        """Write a manifest after all of its blobs. Raises VersionTakenError if its version number is taken."""
        path, content = self._manifest(manifest.name, manifest.version), dump_manifest(manifest)
        try:
            with self._writing():
                if self._is_local:
                    self._link(path, content)
                else:
                    self.files.pipe_file(path, content, mode="create")
        except FileExistsError as error:
            with one_line_errors(self.url, "read"):
                is_same = self.files.cat_file(path) == content
            if is_same:  # written by a retry: the answer to the first was lost
                return
            raise VersionTakenError(
                f"{self.url} has a version {manifest.version} of {manifest.name} already; nothing of it was changed"
            ) from error

    def put(self, source: Path, blob: Blob, verify: bool = False) -> bool:
        """Upload the content of `source` unless it is there. Returns True if it was sent.

        `verify`: read a blob that is there, and the one that was sent, and compare its hash. Raises RepositoryError if
        the store changes what is sent.
        """
        path = self._blob(blob)
        if (self.problem(blob) if verify else self._size_problem(blob)) is None:
            return False
        with self._writing():
            if self._is_local:
                self._link(path, source.read_bytes(), replace=True)
            else:
                self.files.put_file(str(source), path)
        if verify and (problem := self.problem(blob)):
            raise RepositoryError(f"{self.url}: the blob {path} {problem}, just after it was sent; check the store")
        return True

    def read(self, blob: Blob) -> bytes:
        """Return the content of a small blob. Raises RepositoryError if it does not match its hash."""
        with one_line_errors(self.url, "read"):
            content: bytes = self.files.cat_file(self._blob(blob))
        if hashlib.sha256(content).hexdigest() != blob.sha256:
            raise RepositoryError(
                f"{self.url}: the blob {self._blob(blob)} is not what its name says; remove it there and push the "
                "version again"
            )
        return content

    def get(self, blob: Blob, target: Path) -> None:
        """Download a blob to `target`, continuing where an earlier attempt ended. Raises RepositoryError."""
        path, unfinished = self._blob(blob), target.with_name(f"{target.name}.part")
        problem = self._size_problem(blob)
        if problem is not None:
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

    def problem(self, blob: Blob) -> str | None:
        """Read a blob, and return what is wrong with it: the end of a sentence; None if it is what its name says."""
        problem = self._size_problem(blob)
        if problem is not None:
            return problem
        digest, position = hashlib.sha256(), 0
        while position < blob.size:
            content = self._chunk(self._blob(blob), position, blob.size)
            digest.update(content)
            position += len(content)
        return None if digest.hexdigest() == blob.sha256 else "is not what its name says"

    def blobs(self) -> list[Blob]:
        """Return all blobs, those that no manifest names too, in the order of their names."""
        listing = partial(self.files.find, f"{self.root}/blobs/sha256", detail=True)
        found: Mapping[str, Any] = self._listed(listing)
        named = {PurePosixPath(path).name: facts for path, facts in found.items()}
        return [Blob(name, int(named[name]["size"])) for name in sorted(named) if DIGEST.fullmatch(name)]

    def age(self, blob: Blob) -> float:
        """Return the seconds since a blob was written."""
        with one_line_errors(self.url, "read"):
            return time.time() - float(self.files.modified(self._blob(blob)).timestamp())

    def remove(self, blob: Blob) -> None:
        """Remove a blob, which no manifest may name."""
        with one_line_errors(self.url, "written"):
            self.files.rm_file(self._blob(blob))

    def _size_problem(self, blob: Blob) -> str | None:
        size = self._size(self._blob(blob))
        if size == blob.size:
            return None
        return "is not there" if size is None else f"has {size} bytes instead of {blob.size}"

    def _chunk(self, path: str, begin: int, size: int) -> bytes:
        """Return bytes of a blob from `begin` on, at least one. Raises RepositoryError after ATTEMPTS failures."""
        problem = ""
        for attempt in range(ATTEMPTS):
            try:
                content: bytes = self.files.cat_file(path, start=begin, end=min(begin + CHUNK, size))
                if content:
                    return content
            except Exception as error:  # a broken connection makes the libraries raise many types
                problem = reason(error)
            time.sleep(PAUSE_S * 2**attempt)
        raise RepositoryError(f"{self.url}: {path} could not be read ({problem}); try again: a pull goes on from there")

    def _size(self, path: str) -> int | None:
        """Return the bytes of an object; None if it does not exist."""
        with one_line_errors(self.url, "read"):
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

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with one_line_errors(self.url, "written"):
            try:
                yield
            except Exception as error:
                if is_absent(error):
                    self._require_bucket()
                raise

    def _listed(self, listing: Callable[[], Any]) -> Any:
        """Return the paths of a listing, or its facts by path; empty if its folder does not exist."""
        self.files.invalidate_cache()
        with one_line_errors(self.url, "read"):
            try:
                found = listing()
            except FileNotFoundError:
                found = {}
            if not found:
                self._require_bucket()
            return found

    def _require_bucket(self) -> None:
        """Raise RepositoryError if the store reports that the bucket does not exist."""
        if self._is_local:
            return
        name = self.root.split("/")[0]
        try:
            self.files.ls(name, detail=False)
        except FileNotFoundError as error:
            raise RepositoryError(
                f"{self.url}: there is no bucket or container {name}; make it first, or correct the address"
            ) from error
        except Exception:  # unknown, for example if the credentials only cover a part of it
            return

    def _link(self, path: str, content: bytes, replace: bool = False) -> None:
        """Write an object in a folder: under a temporary name, then link or rename it."""
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
    """Open the store under `url`. Raises SpecError for an invalid address or a missing package."""
    if not is_store(url):
        raise SpecError(
            f"{url} is not the address of an object store; expected s3://, gs://, az:// or file:// and a path"
        )
    silence()
    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise SpecError(
            f"{url} needs a package that is not here ({reason(error)}): {installing(EXTRAS[scheme_of(url)])}"
        ) from error
    except ValueError as error:  # of adlfs, if the account is missing or malformed
        raise SpecError(f"{url} could not be opened: {reason(error)}; {credentials_for(url)}") from error
    return Store(url.rstrip("/"), files, root.rstrip("/"))
