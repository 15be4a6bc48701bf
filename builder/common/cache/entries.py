"""Results of stages on disk: a document and files, each named by its content; whole, or not there.

stages/KEY.json   names the document and the files of one stage by their SHA-256
blobs/SHA256      a document or a file, once for all stages that made the same

Builders share a folder without locks: each file is written under another name and renamed into place, and is hashed
when it is read. A damaged file counts as missing, and so does one that another process has just removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from builder.common.cache.digests import write_whole
from builder.common.cache.folder import most_kept
from builder.common.cache.links import link
from builder.common.hashing import WRITTEN, sha256_of

SPARED = 0.05  # share of the disk that is left free


@dataclass(frozen=True)
class Entry:
    """Record of one stage, without its content. `made`: seconds since 1970; `took`: seconds; `size`: bytes."""

    stage: str
    key: str
    model: str
    made: float
    took: float
    size: int
    document: str
    files: Mapping[str, str]

    @property
    def blobs(self) -> set[str]:
        return {self.document, *self.files.values()}


class Entries:
    """Entries in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.stages, self.blobs = folder / "stages", folder / "blobs"

    def all(self) -> Iterator[tuple[Entry, float]]:
        """Yield each entry that can be read, with the time at which it was last used."""
        for path in sorted(self.stages.glob("*.json")):
            entry = self.find(path.stem)
            if entry is not None:
                with suppress(FileNotFoundError):
                    yield entry, path.stat().st_mtime

    def find(self, key: str) -> Entry | None:
        """Return the entry of `key`; None if there is none."""
        try:
            return Entry(**json.loads(self._path(key).read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def read(self, entry: Entry, folder: Path) -> bytes | None:
        """Return the document of `entry` and put its files into `folder`; if it is damaged, remove it and return None.

        Raises OSError if `folder` does not take the files, such as on a full disk: the entry stays.
        """
        document = self._whole_document(entry)
        if document is not None and self._put(entry, folder):
            with suppress(OSError):  # a full or read-only disk
                os.utime(self._path(entry.key))
            return document
        for name in entry.files:  # so that no later write goes through a link into the cache
            (folder / name).unlink(missing_ok=True)
        self.remove(entry)
        return None

    def _whole_document(self, entry: Entry) -> bytes | None:
        """Return the document of `entry`; None if it, or one of the files, differs from what was written."""
        with suppress(OSError):
            document = (self.blobs / entry.document).read_bytes()
            whole = hashlib.sha256(document).hexdigest() == entry.document
            if whole and all(sha256_of(self.blobs / digest) == digest for digest in {*entry.files.values()}):
                return document
        return None

    def _put(self, entry: Entry, folder: Path) -> bool:
        """Put the files of `entry` into `folder`; return True if they were all there."""
        with suppress(FileNotFoundError):  # another process has just pruned them
            for name, digest in entry.files.items():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                link(self.blobs / digest, target)
            return True
        return False

    def write(
        self, stage: str, key: str, model: str, took: float, document: bytes, folder: Path, names: list[str]
    ) -> None:
        """Keep `document` and the files `names` of `folder`, if the disk and the cache have space for them.

        Raises OSError.
        """
        stats = [(folder / name).stat() for name in names]
        size = len(document) + sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())
        self.blobs.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(self.blobs)
        if disk.free - size < SPARED * disk.total or size > most_kept():
            return
        files = {name: self._keep(folder / name) for name in names}
        digest = hashlib.sha256(document).hexdigest()
        write_whole(self.blobs / digest, document)
        entry = Entry(stage, key, model, time.time(), took, size, digest, files)
        write_whole(self._path(key), json.dumps(asdict(entry)).encode())
        self._keep_again(entry, document, folder)

    def _keep_again(self, entry: Entry, document: bytes, folder: Path) -> None:
        """Keep again what another process pruned because no entry named it yet, or only one that it removed."""
        if not (self.blobs / entry.document).exists():
            write_whole(self.blobs / entry.document, document)
        for name, digest in entry.files.items():
            if not (self.blobs / digest).exists():
                self._keep(folder / name)

    def _keep(self, file: Path) -> str:
        digest = WRITTEN.of(file)
        beside = self.blobs / f".{digest}.{os.getpid()}.{time.monotonic_ns()}"
        link(file, beside)
        beside.replace(self.blobs / digest)
        beside.unlink(missing_ok=True)  # to rename one of two links to the other does nothing
        return digest

    def remove(self, entry: Entry) -> None:
        """Forget one entry, and the blobs that no other entry has, with damaged ones."""
        self._path(entry.key).unlink(missing_ok=True)
        used = {digest for other, _ in self.all() for digest in other.blobs}
        for digest in entry.blobs - used:
            (self.blobs / digest).unlink(missing_ok=True)
        for digest in entry.blobs & used:
            with suppress(OSError):
                if sha256_of(self.blobs / digest) != digest:
                    (self.blobs / digest).unlink(missing_ok=True)

    def trim(self, most: int) -> None:
        """Prune if all blobs take more than `most` bytes: with thousands of entries that check alone is quick."""
        if sum(self._size(blob.name) for blob in self.blobs.glob("*")) > most:
            self.prune(most)

    def prune(self, most: int) -> list[Entry]:
        """Forget the least recently used entries until the rest takes at most `most` bytes, and blobs without an entry.

        Returns the entries that were removed.
        """
        newest_first = sorted(self.all(), key=lambda pair: pair[1], reverse=True)
        remaining: dict[str, int] = {}
        gone: list[Entry] = []
        for entry, _ in newest_first:
            more = {digest: self._size(digest) for digest in entry.blobs - set(remaining)}
            if gone or sum(remaining.values()) + sum(more.values()) > most:
                gone.append(entry)
                self._path(entry.key).unlink(missing_ok=True)
            else:
                remaining |= more
        theirs = {digest for entry in gone for digest in entry.blobs}
        # those that other processes kept meanwhile too
        used = set(remaining).union(*(entry.blobs for entry, _ in self.all()))
        for blob in self.blobs.glob("*"):
            if blob.name not in used and (blob.name in theirs or not _written_now(blob)):
                blob.unlink(missing_ok=True)
        return gone

    def _size(self, digest: str) -> int:
        with suppress(OSError):
            return (self.blobs / digest).stat().st_size
        return 0

    def _path(self, key: str) -> Path:
        return self.stages / f"{key}.json"


def _written_now(blob: Path) -> bool:
    """Return True if the blob may belong to an entry that another process is writing."""
    with suppress(OSError):
        return time.time() - blob.stat().st_ctime < 60
    return True
