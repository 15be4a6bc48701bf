"""Divide memory among models: decide which load gets it, in which order, and which models are evicted.

Knows neither Triton nor the repository.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.resident_model import ResidentModel, State

MAX_CONCURRENT_LOADS = 4  # concurrent loads: more would only compete for cores
MEMORY_TIMEOUT_S = 60.0  # time that a load waits for evictions
LEASES_POLL_S = 0.05
SERVER_BYTES = 100 << 20  # bytes of the server itself, until it is measured
EVICT_AHEAD_SHARE = 0.1  # maximum share of the budget kept free for the next load: a process takes a second to end


@dataclass(eq=False)
class PendingLoad:
    """A load that waits for memory. `size`: additional bytes that it needs."""

    resident: ResidentModel
    size: int
    granted: asyncio.Future[None]


class MemoryBudget:
    """Memory budget of `budget` bytes for server and models. `pins` are never unloaded; `evict` unloads a model."""

    def __init__(
        self, budget: int, pins: Sequence[str], evict: Callable[[ResidentModel], None], now: Callable[[], float]
    ) -> None:
        self.total, self.pins, self.evict, self.now = budget, frozenset(pins), evict, now
        self.server = SERVER_BYTES
        self.models: OrderedDict[str, ResidentModel] = OrderedDict()  # least recently requested first
        self.unloading: set[ResidentModel] = set()
        self.pending: list[PendingLoad] = []
        self.rebalance_at = -1.0  # by the loop's clock: time of the next scheduled `rebalance`

    def used(self) -> int:
        """Return the bytes that are in use or promised to a load."""
        return self.server + sum(r.size for r in self.models.values()) + sum(r.size for r in self.unloading)

    def max_size(self, resident: ResidentModel) -> int:
        """Return the maximum bytes for a model, beside the server and the pinned models."""
        pinned = [r.size for r in self.models.values() if r.name in self.pins and r is not resident]
        return self.total - self.server - sum(pinned)

    def idle_s(self, size: int) -> float:
        """Return for how many seconds the models were idle that a load of `size` bytes would evict.

        Infinite if none has to go, and minus infinity if too few may. Loads that have just begun, whose size is not
        known, count with this `size` too.
        """
        loading = sum(r.state is State.LOADING and not r.has_memory for r in self.models.values()) - len(self.pending)
        promised = sum(load.size for load in self.pending) + loading * size
        expected = self.total - self.used() + sum(r.size for r in self.unloading) - promised
        ahead = self._ahead()
        missing = size - expected + (ahead if size <= ahead else 0)
        if missing <= 0:
            return math.inf
        victims = self._victims_for(missing)
        return -math.inf if victims is None else self.now() - max(victim.requested_at for victim in victims)

    def is_idle(self, resident: ResidentModel, seconds: float) -> bool:
        """Return True if a model may be evicted and had no request for so long."""
        return self._is_evictable(resident) and self.now() - resident.requested_at >= seconds

    async def wait_for(self, resident: ResidentModel, size: int) -> None:
        """Wait until `size` bytes are free. Raises ApiError 507 if that is impossible, 503 if it takes too long."""
        max_size = self.max_size(resident)
        if size > max_size:
            raise ApiError(
                507,
                f"{resident.name} needs {_mb(size)} and at most {_mb(max_size)} can be free: of {_mb(self.total)} "
                f"(--memory-gb) the server uses {_mb(self.server)} and pinned models the rest",
                code="model_too_large",
            )
        load = PendingLoad(resident, size, asyncio.get_running_loop().create_future())
        self.pending.append(load)
        self.rebalance()
        try:
            async with asyncio.timeout(MEMORY_TIMEOUT_S):
                await load.granted
        except TimeoutError as error:
            raise _memory_timeout(resident.name) from error
        finally:
            if load in self.pending:
                self.pending.remove(load)

    async def wait_idle(self, resident: ResidentModel) -> None:
        """Wait until a model has no leases. Raises ApiError 503 if that takes too long."""
        try:
            async with asyncio.timeout(MEMORY_TIMEOUT_S):
                while resident.leases:
                    await asyncio.sleep(LEASES_POLL_S)
        except TimeoutError as error:
            raise _memory_timeout(resident.name) from error

    def rebalance(self) -> None:
        """Give memory to the waiting loads, in order, and evict models for the others or if too much is in use."""
        free = self.total - self.used()
        expected = sum(r.size for r in self.unloading)
        for victim in self._victims(-free - expected):
            expected += victim.size
            self.evict(victim)
        loads = sum(r.state is State.LOADING and r.has_memory for r in self.models.values())
        for load in list(self.pending):
            if loads >= MAX_CONCURRENT_LOADS:
                return
            if load.granted.done():
                continue  # cancelled, but not yet removed
            if load.size <= free:
                self.pending.remove(load)
                load.resident.size += load.size
                load.resident.has_memory = True
                load.granted.set_result(None)
                free -= load.size
                loads += 1
                continue
            victims = self._victims_for(load.size - free - expected)
            if victims is None:
                continue  # evicting would not suffice yet; a smaller load may fit
            expected += sum(victim.size for victim in victims)
            for victim in victims:
                self.evict(victim)
            granted = min(max(0, free), load.size)
            free, expected = free - granted, expected - (load.size - granted)
        if not self.pending:
            self._evict_ahead(free + expected)

    def _evict_ahead(self, free: int) -> None:
        """Evict small models in advance, so that the next load need not wait for that."""
        ahead = self._ahead()
        for victim in self._victims_for(ahead - free, largest=ahead) or ():
            self.evict(victim)

    def _ahead(self) -> int:
        """Return the bytes that are kept free for the next load, if it is small."""
        sizes = [r.size for r in self.models.values() if r.state is State.READY]
        return min(int(EVICT_AHEAD_SHARE * self.total), sum(sizes) // max(1, len(sizes)))

    def _victims_for(self, size: int, largest: int | None = None) -> list[ResidentModel] | None:
        """Return models to evict for `size` bytes; None if all evictable models take less."""
        victims = self._victims(size, largest)
        return victims if sum(victim.size for victim in victims) >= size else None

    def _victims(self, size: int, largest: int | None = None) -> list[ResidentModel]:
        """Return models to evict for `size` bytes, least recently requested first; all evictable ones if too few."""
        victims: list[ResidentModel] = []
        for resident in self.models.values():
            if size <= 0:
                break
            if self._is_evictable(resident) and (largest is None or resident.size <= largest):
                victims.append(resident)
                size -= resident.size
        return victims

    def _is_evictable(self, resident: ResidentModel) -> bool:
        if resident.state is not State.READY or resident.leases or resident.name in self.pins:
            return False
        early = resident.stays_until - self.now()
        if early > 0 and self.pending:
            self._schedule_rebalance(early)
        return early <= 0

    def _schedule_rebalance(self, delay: float) -> None:
        """Call `rebalance` in `delay` seconds, or earlier."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now <= self.rebalance_at <= now + delay:
            return
        self.rebalance_at = now + delay
        loop.call_later(delay, self.rebalance)


def _memory_timeout(name: str) -> ApiError:
    """Return the error for a load that got no memory in time."""
    return ApiError(
        503,
        f"no memory for {name} within {MEMORY_TIMEOUT_S:.0f} s: the loaded models are in use; send this again later",
        code="no_room",
        retry_after=MEMORY_TIMEOUT_S / 4,
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
