"""Addresses of object stores, as a command line or a models.yaml says them."""

from __future__ import annotations

import re
from pathlib import Path

from builder.errors import SpecError

SCHEMES = ("s3", "gs", "az", "abfs", "file")
ADDRESS = re.compile(rf"({'|'.join(SCHEMES)}):/+(.+)")


NAMED = re.compile(r"([A-Za-z0-9_.+-]+)(?:@([1-9]\d*))?")


def named_version(text: str) -> tuple[str, int | None]:
    """A model as a command line says it, NAME or NAME@VERSION, as both. Raises SpecError."""
    found = NAMED.fullmatch(text)
    if found is None:
        raise SpecError(f"{text!r} is not a model: expected NAME or NAME@VERSION")
    return found[1], int(found[2]) if found[2] else None


def store_address(output: str | Path) -> str | None:
    """`output` as the address of an object store; None where it is a folder. A Path has lost a slash."""
    found = ADDRESS.fullmatch(str(output))
    if found is None:
        return None
    scheme, rest = found[1], found[2].lstrip("/")
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
