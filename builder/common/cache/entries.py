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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from builder.common.cache.folder import cache_home, is_cache_disabled, max_cache_bytes
from builder.common.files import link, write_atomically
from builder.common.hashing import WRITTEN_DIGESTS, sha256_of

FREE_DISK_SHARE = 0.05  # share of the disk that is left free


@dataclass(frozen=True)
class CacheEntry:
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


class CacheEntries:
    """Entries in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.stages, self.blobs = folder / "stages", folder / "blobs"

    def all(self) -> Iterator[tuple[CacheEntry, float]]:
        """Yield each entry that can be read, with the time at which it was last used."""
        for path in sorted(self.stages.glob("*.json")):
            entry = self.find(path.stem)
            if entry is not None:
                with suppress(FileNotFoundError):
                    yield entry, path.stat().st_mtime

    def find(self, key: str) -> CacheEntry | None:
        """Return the entry of `key`; None if there is none."""
        try:
            return CacheEntry(**json.loads(self._path(key).read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def read(self, entry: CacheEntry, folder: Path) -> bytes | None:
        """Return the document of `entry` and put its files into `folder`; if it is damaged, remove it and return None.

        Raises OSError if `folder` does not take the files, such as on a full disk: the entry stays.
        """
        document = self._intact_document(entry)
        if document is not None and self._link_files(entry, folder):
            with suppress(OSError):  # a full or read-only disk
                os.utime(self._path(entry.key))
            return document
        for name in entry.files:  # so that no later write goes through a link into the cache
            (folder / name).unlink(missing_ok=True)
        self.remove(entry)
        return None

    def _intact_document(self, entry: CacheEntry) -> bytes | None:
        """Return the document of `entry`; None if it, or one of the files, differs from what was written."""
        with suppress(OSError):
            document = (self.blobs / entry.document).read_bytes()
            is_intact = hashlib.sha256(document).hexdigest() == entry.document
            if is_intact and all(sha256_of(self.blobs / digest) == digest for digest in {*entry.files.values()}):
                return document
        return None

    def _link_files(self, entry: CacheEntry, folder: Path) -> bool:
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
        if disk.free - size < FREE_DISK_SHARE * disk.total or size > max_cache_bytes():
            return
        files = {name: self._store(folder / name) for name in names}
        digest = hashlib.sha256(document).hexdigest()
        write_atomically(self.blobs / digest, document)
        entry = CacheEntry(stage, key, model, time.time(), took, size, digest, files)
        write_atomically(self._path(key), json.dumps(asdict(entry)).encode())
        self._restore_pruned(entry, document, folder)

    def _restore_pruned(self, entry: CacheEntry, document: bytes, folder: Path) -> None:
        """Store again the files that another process pruned before the entry named them."""
        if not (self.blobs / entry.document).exists():
            write_atomically(self.blobs / entry.document, document)
        for name, digest in entry.files.items():
            if not (self.blobs / digest).exists():
                self._store(folder / name)

    def _store(self, file: Path) -> str:
        digest = WRITTEN_DIGESTS.of(file)
        beside = self.blobs / f".{digest}.{os.getpid()}.{time.monotonic_ns()}"
        link(file, beside)
        beside.replace(self.blobs / digest)
        beside.unlink(missing_ok=True)  # to rename one of two links to the other does nothing
        return digest

    def remove(self, entry: CacheEntry) -> None:
        """Forget one entry, and the blobs that no other entry has, with damaged ones."""
        self._path(entry.key).unlink(missing_ok=True)
        used = {digest for other, _ in self.all() for digest in other.blobs}
        for digest in entry.blobs - used:
            (self.blobs / digest).unlink(missing_ok=True)
        for digest in entry.blobs & used:
            with suppress(OSError):
                if sha256_of(self.blobs / digest) != digest:
                    (self.blobs / digest).unlink(missing_ok=True)

    def trim(self, max_bytes: int) -> None:
        """Prune if all blobs take more than `max_bytes` bytes: with thousands of entries that check alone is quick."""
        if sum(self._size(blob.name) for blob in self.blobs.glob("*")) > max_bytes:
            self.prune(max_bytes)

    def prune(self, max_bytes: int) -> list[CacheEntry]:
        """Remove the least recently used entries until the rest fits into `max_bytes`, and blobs without an entry.

        Returns the entries that were removed.
        """
        newest_first = sorted(self.all(), key=lambda pair: pair[1], reverse=True)
        remaining: dict[str, int] = {}
        removed: list[CacheEntry] = []
        for entry, _ in newest_first:
            more = {digest: self._size(digest) for digest in entry.blobs - set(remaining)}
            if removed or sum(remaining.values()) + sum(more.values()) > max_bytes:
                removed.append(entry)
                self._path(entry.key).unlink(missing_ok=True)
            else:
                remaining |= more
        removed_blobs = {digest for entry in removed for digest in entry.blobs}
        # those that other processes kept meanwhile too
        used = set(remaining).union(*(entry.blobs for entry, _ in self.all()))
        for blob in self.blobs.glob("*"):
            if blob.name not in used and (blob.name in removed_blobs or not _may_be_in_use(blob)):
                blob.unlink(missing_ok=True)
        return removed

    def _size(self, digest: str) -> int:
        with suppress(OSError):
            return (self.blobs / digest).stat().st_size
        return 0

    def _path(self, key: str) -> Path:
        return self.stages / f"{key}.json"


def _may_be_in_use(blob: Path) -> bool:
    """Return True if the blob may belong to an entry that another process is writing."""
    with suppress(OSError):
        return time.time() - blob.stat().st_ctime < 60
    return True


@contextmanager
def bounded_cache() -> Iterator[None]:
    """Trim the stages to `max_cache_bytes` bytes after the block. Raises SpecError as `max_cache_bytes` does."""
    if is_cache_disabled():
        yield
        return
    limit = max_cache_bytes()
    try:
        yield
    finally:
        with suppress(OSError):  # a read-only disk
            CacheEntries(cache_home()).trim(limit)
