"""Read the addresses of a fleet, and resolve names that stand for several servers."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable, Sequence
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


Target = str | DnsName  # one server's HOST:PORT, or a name of several


def is_fleet(url: str) -> bool:
    """Return True if `url` names several servers: a list, or a DNS name with all of its addresses."""
    return "," in url or url.startswith(DNS_SCHEME)


def parse_targets(url: str) -> list[Target]:
    """Return the targets of a list separated by commas, without repetitions. Raises SpecError."""
    return list(dict.fromkeys(_parse(part.strip()) for part in url.split(",")))


def _parse(text: str) -> Target:
    match = ADDRESS.fullmatch(text.removeprefix(DNS_SCHEME))
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise SpecError(f"--url names {text!r}, which is not the address of a server; expected {EXPECTED}")
    return DnsName(match[1].strip("[]"), int(match[2])) if text.startswith(DNS_SCHEME) else text


async def resolve(targets: Iterable[Target]) -> list[str]:
    """Return the address of each server, HOST:PORT, without repetitions. Raises OSError if a name is not resolved."""
    found = await asyncio.gather(*map(_addresses, targets))
    return list(dict.fromkeys(address for addresses in found for address in addresses))


async def _addresses(target: Target) -> Sequence[str]:
    if isinstance(target, str):
        return [target]
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    return sorted({_join(family, str(address[0]), target.port) for family, _, _, _, address in entries})


def _join(family: int, host: str, port: int) -> str:
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
