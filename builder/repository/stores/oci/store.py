"""The versions of one model in a repository of an OCI registry; a version's tag is its number."""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests

from builder.common.errors import RepositoryError, first_line
from builder.common.hashing import sha256_of
from builder.common.registry_address import Address
from builder.repository.stores.oci.artefact import ACCEPT, MANIFEST, dump_artefact, dump_config, load_artefact
from builder.repository.stores.oci.client import Body, RegistryClient, RegistryDownError
from builder.repository.stores.store import ATTEMPTS, PAUSE_S, Blob, Manifest, VersionTakenError

DIGEST_HEADER = "Docker-Content-Digest"
MAX_MANIFEST_BYTES = 4 << 20  # what a registry has to take: distribution-spec, "Pushing Manifests"
CHUNK = 1 << 16  # bytes of one read; a connection that breaks loses what it read of it


@dataclass(frozen=True)
class OciStore:
    """Keeps versions of one model in the repository at an address."""

    client: RegistryClient

    @property
    def url(self) -> str:
        return self.client.address.url

    def models(self) -> list[str]:
        """Return the model whose versions are there; nothing if there are none."""
        return [self._manifest(number).name for number in self._numbers()[-1:]]

    def versions(self, name: str) -> list[int]:
        """Return the versions that are there, in order. Raises RepositoryError if they are of another model."""
        numbers = self._numbers()
        if numbers and (own := self._manifest(numbers[-1]).name) != name:
            raise RepositoryError(f"{self.url} has versions of {own}; {name} needs a repository of its own")
        return numbers

    def _numbers(self) -> list[int]:
        """Return the tags that are numbers, in order."""
        found: list[int] = []
        page: str | None = "tags/list"
        while page is not None:
            answer = self.client.send("GET", page, (200, 404))
            if answer.status_code == 404:  # a repository that nothing was pushed to
                return []
            tags = self._document(answer).get("tags") or []
            found += [int(tag) for tag in tags if re.fullmatch(r"[1-9]\d*", tag)]
            page = answer.links.get("next", {}).get("url")
        return sorted(found)

    def manifest(self, name: str, version: int | None = None) -> Manifest:
        """Return the manifest of a version, by default the newest. Raises RepositoryError if none exists."""
        number = max(self.versions(name), default=None) if version is None else version
        if number is None:
            raise RepositoryError(f"{self.url} has no versions; correct the address, or push one first")
        manifest = self._manifest(number)
        if (manifest.name, manifest.version) != (name, number):
            raise RepositoryError(
                f"{self.url}:{number} is version {manifest.version} of {manifest.name}, not {number} of {name}"
            )
        return manifest

    def publish(self, manifest: Manifest) -> None:
        """Write a manifest after all of its blobs. Raises VersionTakenError if its version number is taken."""
        config = dump_config(manifest)
        config_blob = Blob(hashlib.sha256(config).hexdigest(), len(config))
        content, path = dump_artefact(manifest, config_blob), f"manifests/{manifest.version}"
        if len(content) > MAX_MANIFEST_BYTES:
            raise RepositoryError(f"{manifest.name} has {len(manifest.files)} files, too many for a registry")
        there = self.client.send("HEAD", path, (200, 404), headers={"Accept": ACCEPT})
        if there.status_code == 200:
            if there.headers.get(DIGEST_HEADER) == _digest(content):
                return
            raise VersionTakenError(f"{self.url} has a version {manifest.version} already; nothing of it was changed")
        self.versions(manifest.name)  # refuses those of another model
        if not self._has(config_blob):
            self._upload(config_blob, lambda: config)
        self.client.send("PUT", path, (201,), headers={"Content-Type": MANIFEST}, body=lambda: content)

    def read(self, blob: Blob) -> bytes:
        """Return the content of a small blob. Raises RepositoryError if its digest is another."""
        content = self._blob(blob, {}, stream=False).content
        if hashlib.sha256(content).hexdigest() != blob.sha256:
            raise RepositoryError(f"{self._where(blob)} is not what its digest says; push the version elsewhere")
        return content

    def put(self, source: Path, blob: Blob, verify: bool = False) -> bool:
        """Upload the content of `source` unless it is there. Returns True if it was sent.

        `verify`: read a blob that is there, and compare its digest. Raises RepositoryError if it is damaged: a registry
        does not replace a blob that it has.
        """
        if self._has(blob):
            if verify and (problem := self._problem(blob)):
                raise RepositoryError(f"{self._where(blob)} {problem}; remove it from the registry's storage first")
            return False
        self._upload(blob, (lambda: source.open("rb")) if blob.size else (lambda: b""))  # of an empty file, no length
        return True

    def get(self, blob: Blob, target: Path) -> None:
        """Download a blob to `target`, continuing where an earlier attempt ended. Raises RepositoryError."""
        unfinished, failures = target.with_name(f"{target.name}.part"), 0
        with unfinished.open("ab") as stream:
            if stream.tell() > blob.size:
                stream.truncate(stream.seek(0))
            while stream.tell() < blob.size:
                begin, problem = stream.tell(), "it ended early"
                with self._blob(blob, {"Range": f"bytes={begin}-"} if begin else {}) as answer:
                    if answer.status_code == 200:  # the registry ignores ranges
                        stream.truncate(stream.seek(0))
                    try:
                        for piece in answer.iter_content(CHUNK):
                            stream.write(piece)
                            if stream.tell() > blob.size:
                                break
                    except requests.RequestException as error:
                        problem = first_line(error)
                failures = 0 if stream.tell() > begin else failures + 1
                if failures == ATTEMPTS:
                    raise RepositoryError(
                        f"{self._where(blob)} could not be read ({problem}); try again: a pull goes on from there"
                    )
        if sha256_of(unfinished) != blob.sha256:
            unfinished.unlink()
            raise RepositoryError(f"{self._where(blob)} is not what its digest says; push the version elsewhere")
        os.replace(unfinished, target)

    def _manifest(self, number: int) -> Manifest:
        """Return the manifest of a tag. Raises RepositoryError."""
        where, headers = f"{self.url}:{number}", {"Accept": ACCEPT}
        answer = self.client.send("GET", f"manifests/{number}", (200, 404), headers=headers)
        if answer.status_code == 404:
            has = ", ".join(map(str, self._numbers())) or "none"
            raise RepositoryError(f"{self.url} has no version {number}; it has {has}")
        digest, own = answer.headers.get(DIGEST_HEADER), _digest(answer.content)
        if digest not in (None, own):
            raise RepositoryError(f"{where} is damaged: its digest is {own} instead of {digest}")
        return load_artefact(answer.content, where)

    def _problem(self, blob: Blob) -> str | None:
        """Read a blob and return what is wrong with it, the end of a sentence; None if nothing is."""
        digest = hashlib.sha256()
        with self._blob(blob, {}) as answer:
            try:
                for piece in answer.iter_content(CHUNK):
                    digest.update(piece)
            except requests.RequestException as error:
                return f"could not be read ({first_line(error)})"
        return None if digest.hexdigest() == blob.sha256 else "is not what its digest says"

    def _blob(self, blob: Blob, headers: dict[str, str], stream: bool = True) -> requests.Response:
        """Return an answer with the content of a blob, or of its rest. Raises RepositoryError."""
        path = f"blobs/sha256:{blob.sha256}"
        answer = self.client.send("GET", path, (200, 206, 404), headers=headers, stream=stream)
        if answer.status_code == 404:
            answer.close()
            raise RepositoryError(f"{self._where(blob)} is not there; push the version again")
        return answer

    def _has(self, blob: Blob) -> bool:
        """Return True if the registry has a blob."""
        return self.client.send("HEAD", f"blobs/sha256:{blob.sha256}", (200, 404)).status_code == 200

    def _upload(self, blob: Blob, body: Body) -> None:
        """Send a blob in one request; after a failure from its beginning, in a new upload."""
        for attempt in range(1, ATTEMPTS + 1):
            started = self.client.send("POST", "blobs/uploads/", (202,), headers={"Content-Length": "0"})
            parts = urlsplit(self.client.absolute(started.headers["Location"]))
            query = "&".join(filter(None, (parts.query, f"digest=sha256:{blob.sha256}")))
            headers = {"Content-Type": "application/octet-stream"}
            try:
                location = urlunsplit(parts._replace(query=query))
                self.client.send("PUT", location, (201,), headers=headers, body=body, attempts=1)
                return
            except RegistryDownError:
                if self._has(blob):  # the answer was lost
                    return
                if attempt == ATTEMPTS:
                    raise
                time.sleep(PAUSE_S * 2**attempt)

    def _document(self, answer: requests.Response) -> dict[str, Any]:
        """Return an answer's JSON object. Raises RepositoryError."""
        try:
            document = answer.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise RepositoryError(f"{self.url}: {answer.url} did not answer as a registry does; correct the address")
        return document

    def _where(self, blob: Blob) -> str:
        return f"{self.url}: the blob sha256:{blob.sha256}"


def open_repository(address: Address) -> OciStore:
    """Open a repository of a registry."""
    return OciStore(RegistryClient(address))


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
