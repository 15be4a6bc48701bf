"""SHA-256 of files, which are read a piece at a time: a graph of gigabytes never lies in memory for its hash."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256_of(*files: Path) -> str:
    """SHA-256 of the contents of `files`, one after the other, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
