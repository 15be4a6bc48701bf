"""Addresses of models in OCI registries: oci://REGISTRY/REPOSITORY[:VERSION]."""

from __future__ import annotations

import re
from dataclasses import dataclass

from builder.common.addresses import is_loopback
from builder.common.errors import SpecError

COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"  # distribution-spec, "Pulling manifests"
ADDRESS = re.compile(
    rf"(?i:oci(?P<plain>\+http)?)://(?P<registry>(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+)(?::\d+)?)"
    rf"/(?P<repository>{COMPONENT}(?:/{COMPONENT})*)(?::(?P<tag>[^/:@]+))?"
)
DOCKER_HUB, DOCKER_HUB_API = "docker.io", "registry-1.docker.io"


@dataclass(frozen=True)
class Address:
    """A repository of a registry, which holds the versions of one model. `version`: that the address names, if any."""

    registry: str
    repository: str
    is_plain_http: bool
    version: int | None = None

    @property
    def url(self) -> str:
        """Return the address without a version."""
        return f"oci{'+http' if self.is_plain_http else ''}://{self.registry}/{self.repository}"

    @property
    def endpoint(self) -> str:
        """Return the address of the registry's API. Only this machine's registries are asked over http by default."""
        host = self.registry.rsplit(":", 1)[0] if not self.registry.endswith("]") else self.registry
        scheme = "http" if self.is_plain_http or is_loopback(host.strip("[]")) else "https"
        return f"{scheme}://{DOCKER_HUB_API if self.registry == DOCKER_HUB else self.registry}"


def parse_address(text: str) -> Address:
    """Parse the address of a model in a registry. Raises SpecError."""
    match = ADDRESS.fullmatch(text)
    if match is None:
        raise SpecError(
            f"{text} is not the address of a model in a registry; expected oci://REGISTRY/REPOSITORY:VERSION, the "
            "repository in lowercase"
        )
    tag = match["tag"]
    if tag is not None and not re.fullmatch(r"[1-9]\d*", tag):
        raise SpecError(f"{text}: the tag {tag!r} is not a version of a model; expected its number, for example :3")
    return Address(match["registry"], match["repository"], match["plain"] is not None, int(tag) if tag else None)
