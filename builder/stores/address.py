"""Addresses of object stores, as a command line or a models.yaml says them."""

from __future__ import annotations

import re
from pathlib import Path

SCHEMES = ("s3", "gs", "az", "abfs", "file")
ADDRESS = re.compile(rf"({'|'.join(SCHEMES)}):/+(.+)")


def store_address(output: str | Path) -> str | None:
    """`output` as the address of an object store; None where it is a folder. A Path has lost a slash."""
    found = ADDRESS.fullmatch(str(output))
    if found is None:
        return None
    scheme, rest = found[1], found[2].lstrip("/")
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
