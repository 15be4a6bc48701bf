"""Addresses of servers and object stores, as given on a command line or in a models.yaml."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from builder.common.errors import SpecError

REGISTRY = re.compile(r"oci(\+http)?:/.*", re.IGNORECASE)
SCHEMES = ("s3", "gs", "az", "abfs", "file", r"oci(?:\+http)?")
ADDRESS = re.compile(rf"({'|'.join(SCHEMES)}):/+(.+)", re.IGNORECASE)
LOOPBACK = re.compile(r"127(\.\d{1,3}){3}")
NAME_AND_VERSION = re.compile(r"([A-Za-z0-9_.+-]+)(?:@([1-9]\d*))?")


def is_address(url: str) -> bool:
    """Return True if it is the address of a server over HTTP."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", url)
        )
    except ValueError:  # of a port beyond 65535
        return False


def is_registry(text: str) -> bool:
    """Return True if `text` is meant as the address of a model in an OCI registry."""
    return REGISTRY.fullmatch(text) is not None


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches an address."""
    return host in ("localhost", "::1") or LOOPBACK.fullmatch(host) is not None


def address_family(host: str) -> socket.AddressFamily:
    """Return the family of an IP address, or of a name, which is asked for IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def join_port(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_version(text: str) -> tuple[str, int | None]:
    """Split NAME or NAME@VERSION, as given on a command line, into name and version. Raises SpecError."""
    match = NAME_AND_VERSION.fullmatch(text)
    if match is None:
        raise SpecError(f"{text!r} is not a model: expected NAME or NAME@VERSION")
    return match[1], int(match[2]) if match[2] else None


def store_address(output: str | Path) -> str | None:
    """Return `output` as the address of a store or a registry; None for a folder.

    Accepts a Path, which has lost a slash, and a scheme in any case, which it returns in lowercase (RFC 3986, 3.1).
    """
    match = ADDRESS.fullmatch(str(output))
    if match is None:
        return None
    scheme, rest = match[1].lower(), match[2].lstrip("/")
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
