"""Read the addresses of a fleet, and resolve names that stand for several servers."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from builder.common.errors import SpecError

DNS_SCHEME = "dns:///"
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s/:,\[\]]+):(\d{1,5})")  # HOST:PORT; an IPv6 address is in brackets
EXPECTED = "HOST:PORT, [IPV6]:PORT or dns:///NAME:PORT"


@dataclass(frozen=True)
class DnsName:
    """Name that stands for as many servers as it has addresses; each listens on `port`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{DNS_SCHEME}{self.host}:{self.port}"


Target = str | DnsName  # one server's HOST:PORT, or a name of several


def is_fleet(url: str) -> bool:
    """Return True if `url` names several servers: a list, or a DNS name with all of its addresses."""
    return "," in url or url.startswith(DNS_SCHEME)


def parse_targets(url: str) -> list[Target]:
    """Return the targets of a list separated by commas, without repetitions. Raises SpecError."""
    return list(dict.fromkeys(_parse(part.strip()) for part in url.split(",")))


def _parse(text: str) -> Target:
    match = ADDRESS.fullmatch(text.removeprefix(DNS_SCHEME))
    if match is None or not 1 <= int(match[2]) <= 65535 or not _is_encodable(match[1]):
        raise SpecError(f"--url names {text!r}, which is not the address of a server; expected {EXPECTED}")
    return DnsName(match[1].strip("[]"), int(match[2])) if text.startswith(DNS_SCHEME) else text


def _is_encodable(host: str) -> bool:
    """Return True if the resolver takes a name; Python refuses labels that are empty or above 63 bytes."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


async def resolve(target: Target) -> Sequence[str]:
    """Return the address, HOST:PORT, of each server that `target` stands for. Raises OSError if it is not resolved."""
    if isinstance(target, str):
        return [target]
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    return sorted({_join(family, str(address[0]), target.port) for family, _, _, _, address in entries})


def _join(family: int, host: str, port: int) -> str:
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
