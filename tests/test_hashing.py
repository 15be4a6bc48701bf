"""Hashes of files are those of what the files hold, one after the other."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from builder.hashing import sha256_of


def test_several_files_are_hashed_as_if_they_were_one(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"a" * (1 << 20))
    second.write_bytes(b"b")
    assert sha256_of(first, second) == hashlib.sha256(first.read_bytes() + b"b").hexdigest()
    assert sha256_of(second, first) != sha256_of(first, second)


def test_a_file_that_is_not_there_has_no_hash(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sha256_of(tmp_path / "absent")
