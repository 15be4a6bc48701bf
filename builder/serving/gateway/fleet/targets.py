"""Read the addresses of a fleet, and resolve names and files that stand for several servers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.common.addresses import join_port
from builder.common.errors import SpecError
from builder.common.files import write_atomically

DNS_SCHEME = "dns:///"
FILE_SCHEME = "file:///"
# HOST:PORT; an IPv6 address is in brackets, and may have a zone, such as fe80::1%eth0
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s/:,\[\]%]+):(\d{1,5})")
EXPECTED = "HOST:PORT, [IPV6]:PORT, dns:///NAME:PORT or file:///PATH"


@dataclass(frozen=True)
class DnsName:
    """Name that stands for as many servers as it has addresses; each listens on `port`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{DNS_SCHEME}{self.host}:{self.port}"


@dataclass(frozen=True)
class AddressFile:
    """File with the addresses of servers, one a line, which another program writes.

    The gateway writes the running requests of each server beside it. So that program can tell when a server whose
    address it removed has none left.
    """

    path: Path

    def __str__(self) -> str:
        return f"{FILE_SCHEME}{str(self.path).removeprefix('/')}"

    @property
    def requests_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.requests")

    def read(self) -> list[str]:
        """Return the addresses. Raises OSError, or SpecError for a line that is not an address."""
        addresses = self.path.read_text("utf-8", "replace").split()
        for address in addresses:
            if not _is_address(address):
                raise SpecError(
                    f"{self.path} has {address!r}, which is not the address of a server: expected HOST:PORT"
                )
        return addresses

    def write(self, addresses: Sequence[str]) -> None:
        """Replace the addresses. Raises OSError."""
        write_atomically(self.path, "".join(f"{address}\n" for address in addresses).encode())

    def take_requests(self) -> dict[str, int] | None:
        """Return the running requests by address, and remove their file. Raises OSError.

        Return None if the gateway has not written them since: it is starting, it hangs, or it ended.
        """
        try:
            requests = json.loads(self.requests_path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        self.requests_path.unlink()
        return dict(requests)

    def write_requests(self, requests: Mapping[str, int]) -> None:
        """Write the running requests by address. Raises OSError."""
        write_atomically(self.requests_path, json.dumps(requests).encode())


Target = str | DnsName | AddressFile  # one server's HOST:PORT, or what stands for several


def is_fleet(url: str) -> bool:
    """Return True if `url` names several servers: a list, a DNS name with all of its addresses, or a file of them."""
    return "," in url or url.startswith((DNS_SCHEME, FILE_SCHEME))


def parse_targets(url: str) -> list[Target]:
    """Return the targets of a list separated by commas, without repetitions. Raises SpecError."""
    return list(dict.fromkeys(_parse(part.strip()) for part in url.split(",")))


def _parse(text: str) -> Target:
    if text.startswith(FILE_SCHEME) and text != FILE_SCHEME:
        return AddressFile(Path("/", text.removeprefix(FILE_SCHEME)))
    address = text.removeprefix(DNS_SCHEME)
    is_name = address != text
    if not _is_address(address) or (is_name and "%" in address):  # resolving an address loses its zone
        raise SpecError(f"--url names {text!r}, which is not the address of a server; expected {EXPECTED}")
    host, _, port = address.rpartition(":")
    return DnsName(host.strip("[]"), int(port)) if is_name else text


def _is_address(text: str) -> bool:
    match = ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match[2]) <= 65535 and _is_encodable(match[1])


def _is_encodable(host: str) -> bool:
    """Return True if the resolver takes a name; Python refuses labels that are empty or above 63 bytes."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


async def resolve(target: Target) -> Sequence[str]:
    """Return the address, HOST:PORT, of each server that `target` stands for. Raises OSError if it is not resolved.

    Raises SpecError for a file with a line that is not an address.
    """
    if isinstance(target, str):
        return [target]
    if isinstance(target, AddressFile):
        return target.read()
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    return sorted({join_port(str(address[0]), target.port) for *_, address in entries})
