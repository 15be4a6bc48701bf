"""Track a model that is loaded or loading, and the calls in progress on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from builder.serving.gateway.residency.repository_models import Stamp

PROCESS_DIED = "its process died"

T = TypeVar("T")


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"


@dataclass(eq=False)
class ResidentModel:
    """Model that is loaded or loading.

    `size`: its bytes, at least `reserved`. `stays_until`: it is not evicted before this time. `requested_at`: time of
    its last request.
    """

    name: str
    stamp: Stamp | None  # of the configuration it was loaded with; None if unknown
    version: str
    state: State = State.LOADING
    size: int = 0
    reserved: int = 0
    engines: tuple[str, ...] = ()
    leases: int = 0
    waiting: int = 0
    has_memory: bool = False
    since: float = 0.0
    stays_until: float = 0.0
    requested_at: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    earlier: frozenset[int] = frozenset()  # processes under its name that are not its own
    calls: set[asyncio.Timeout] = field(default_factory=set, repr=False)

    async def run_while_alive(self, call: Awaitable[T]) -> T:
        """Return the result of `call`, made to this model. Raises TimeoutError if the model dies.

        Triton may never report its death.
        """
        scope = asyncio.timeout(None)
        self.calls.add(scope)
        try:
            async with scope:
                return await call
        finally:
            self.calls.discard(scope)

    def end_calls(self) -> None:
        """End all calls to this model."""
        for scope in self.calls:
            scope.reschedule(asyncio.get_running_loop().time())
