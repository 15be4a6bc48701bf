"""Hashes of one or several files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from builder.common.hashing import MIN_CACHED_BYTES, FileDigests, sha256_of


def test_sha256_of_hashes_files_as_one_concatenation(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"a" * (1 << 20))
    second.write_bytes(b"b")
    assert sha256_of(first, second) == hashlib.sha256(first.read_bytes() + b"b").hexdigest()
    assert sha256_of(second, first) != sha256_of(first, second)


def test_sha256_of_raises_for_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sha256_of(tmp_path / "absent")


def test_digests_hash_a_large_file_again_only_after_a_write(tmp_path: Path) -> None:
    digests = FileDigests()
    file, other, one, two = tmp_path / "file", tmp_path / "other", b"1" * MIN_CACHED_BYTES, b"2" * MIN_CACHED_BYTES
    file.write_bytes(one)
    first = digests.of(file)
    os.link(file, other)
    stat = file.stat()
    file.write_bytes(two)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # hides the write, so the cached digest is used
    assert digests.of(file) == digests.of(other) == first == sha256_of_bytes(one)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    assert digests.of(other) == FileDigests().of(file) == sha256_of_bytes(two)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        digests.of(file)


def sha256_of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
