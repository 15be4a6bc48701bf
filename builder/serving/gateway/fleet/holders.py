"""Index the servers of a fleet by model, so that a request looks only at those that have its model loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

S = TypeVar("S")


class ModelHolders(Generic[S]):
    """Servers by model, in the order in which they loaded it."""

    def __init__(self) -> None:
        self.servers: dict[str, dict[S, None]] = {}

    def of(self, model: str) -> Iterable[S]:
        return self.servers.get(model, ())

    def shared(self) -> list[tuple[str, list[S]]]:
        """Return the models that several servers have, with these."""
        return [(model, list(servers)) for model, servers in self.servers.items() if len(servers) > 1]

    def change(self, server: S, before: Iterable[str], after: Iterable[str]) -> None:
        """Record that a server has the models `after` instead of those `before`."""
        loaded, unloaded = set(after) - set(before), set(before) - set(after)
        for model in loaded:
            self.servers.setdefault(model, {})[server] = None
        for model in unloaded:
            del self.servers[model][server]
            if not self.servers[model]:
                del self.servers[model]
