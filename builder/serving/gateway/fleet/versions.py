"""Pick the version of a model that a fleet answers with while its servers change one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar


class LoadedVersions(Protocol):
    """A server and the versions that it has loaded of each model."""

    @property
    def versions(self) -> Mapping[str, Sequence[str]]: ...


S = TypeVar("S", bound=LoadedVersions)


def serving_version(loaded: Iterable[Sequence[str]]) -> str:
    """Return the version that most servers have loaded, the newest of equals; "" if no server has any.

    `loaded`: the versions of each server. A new version takes over once as many servers have it as the one before.
    """
    counts = Counter(version for versions in loaded for version in versions)
    return max(counts, key=lambda version: (counts[version], int(version)), default="")


def holders_of(servers: Iterable[S], model: str, requested: str = "", before: str = "") -> tuple[str, list[S]]:
    """Return the version of `model` to ask for, and the servers that have it loaded.

    That is the version that the client `requested`, or else the one asked for `before` if a server still has it.
    """
    loaded = [server for server in servers if model in server.versions]
    version = requested or serving_version(server.versions[model] for server in loaded)
    if not requested and any(before in server.versions[model] for server in loaded):
        version = before
    return version, [server for server in loaded if version in server.versions[model]]
