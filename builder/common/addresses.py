"""Checks of the address of a server."""

from __future__ import annotations

import re
from urllib.parse import urlsplit


def is_address(url: str) -> bool:
    """Return True if it is the address of a server over HTTP."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", url)
        )
    except ValueError:  # of a port beyond 65535
        return False
