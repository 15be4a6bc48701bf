"""References of container images: https://pkg.go.dev/github.com/distribution/reference."""

from __future__ import annotations

import re

_HOST = r"(?:[A-Za-z0-9](?:[-.A-Za-z0-9]*[A-Za-z0-9])?(?::\d+)?/)?"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG, _DIGEST = r"(?::[A-Za-z0-9_][-.A-Za-z0-9_]{0,127})", r"(?:@sha256:[0-9a-f]{64})"
_REFERENCE = re.compile(rf"{_HOST}{_PART}(?:/{_PART})*(?:{_TAG}{_DIGEST}?|{_DIGEST})")


def is_reference(text: str) -> bool:
    """Return True if `text` names one image by its tag, by its digest or by both."""
    return _REFERENCE.fullmatch(text) is not None
