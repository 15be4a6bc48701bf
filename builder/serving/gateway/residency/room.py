"""Memory for models: which load gets it, in which order, and which models are evicted.

Knows neither Triton nor the repository.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.resident import Resident, State

MOST_LOADS = 4  # concurrent loads: more would only compete for cores
ROOM_S = 60.0  # time that a load waits for evictions
LEASES_POLL_S = 0.05
SERVER = 100 << 20  # bytes of the server itself, until it is measured
AHEAD = 0.1  # largest share of the budget kept free for the next load: a process takes a second or more to end


@dataclass(eq=False)
class Seeker:
    """A load that waits for memory. `size`: bytes that it needs in addition to what it has."""

    resident: Resident
    size: int
    room: asyncio.Future[None]


class Room:
    """Memory budget of `budget` bytes for server and models. `pins` are never unloaded; `evict` unloads a model."""

    def __init__(
        self, budget: int, pins: Sequence[str], evict: Callable[[Resident], None], now: Callable[[], float]
    ) -> None:
        self.budget, self.pins, self.evict, self.now = budget, frozenset(pins), evict, now
        self.server = SERVER
        self.models: OrderedDict[str, Resident] = OrderedDict()  # least recently requested first
        self.leaving: set[Resident] = set()
        self.seekers: list[Seeker] = []
        self.looks_at = -1.0  # by the loop's clock: time of the next scheduled `make`

    def used(self) -> int:
        """Return the bytes that are in use or promised to a load."""
        return self.server + sum(r.size for r in self.models.values()) + sum(r.size for r in self.leaving)

    def most(self, resident: Resident) -> int:
        """Return the most bytes that a model can get: what the server and pinned models leave."""
        return self.budget - self.server - sum(self._pinned(resident))

    async def wait_for(self, resident: Resident, size: int) -> None:
        """Wait until `size` bytes are free. Raises ApiError 507 if that is impossible, 503 if it takes too long."""
        most = self.most(resident)
        if size > most:
            raise ApiError(
                507,
                f"{resident.name} needs {_mb(size)} and at most {_mb(most)} can be free: of {_mb(self.budget)} in all "
                f"(--memory-gb) the server has {_mb(self.server)} and pinned models the rest",
                code="model_too_large",
            )
        seeker = Seeker(resident, size, asyncio.get_running_loop().create_future())
        self.seekers.append(seeker)
        self.make()
        try:
            async with asyncio.timeout(ROOM_S):
                await seeker.room
        except TimeoutError as error:
            raise _no_room(resident.name) from error
        finally:
            if seeker in self.seekers:
                self.seekers.remove(seeker)

    async def until_idle(self, resident: Resident) -> None:
        """Wait until a model has no leases. Raises ApiError 503 if that takes too long."""
        try:
            async with asyncio.timeout(ROOM_S):
                while resident.leases:
                    await asyncio.sleep(LEASES_POLL_S)
        except TimeoutError as error:
            raise _no_room(resident.name) from error

    def make(self) -> None:
        """Give memory to the waiting loads, in order, and evict models for the others or if too much is in use."""
        free = self.budget - self.used()
        coming = sum(r.size for r in self.leaving)
        for victim in self._victims(-free - coming):
            coming += victim.size
            self.evict(victim)
        loads = sum(r.state is State.LOADING and r.has_room for r in self.models.values())
        for seeker in list(self.seekers):
            if loads >= MOST_LOADS:
                return
            if seeker.room.done():
                continue  # cancelled, but not yet removed
            if seeker.size <= free:
                self.seekers.remove(seeker)
                seeker.resident.size += seeker.size
                seeker.resident.has_room = True
                seeker.room.set_result(None)
                free -= seeker.size
                loads += 1
                continue
            going = self._enough(seeker.size - free - coming)
            if going is None:
                continue  # evicting would not suffice yet; a smaller load may fit
            coming += sum(victim.size for victim in going)
            for victim in going:
                self.evict(victim)
            taken = min(max(0, free), seeker.size)
            free, coming = free - taken, coming - (seeker.size - taken)
        if not self.seekers:
            self._go_ahead(free + coming)

    def _go_ahead(self, free: int) -> None:
        """Evict small models in advance, so that the next load need not wait for that."""
        sizes = [r.size for r in self.models.values() if r.state is State.READY]
        ahead = min(int(AHEAD * self.budget), sum(sizes) // max(1, len(sizes)))
        for victim in self._enough(ahead - free, largest=ahead) or ():
            self.evict(victim)

    def _enough(self, size: int, largest: int | None = None) -> list[Resident] | None:
        """Return models to evict for `size` bytes; None if all evictable models take less."""
        victims = self._victims(size, largest)
        return victims if sum(victim.size for victim in victims) >= size else None

    def _victims(self, size: int, largest: int | None = None) -> list[Resident]:
        """Return models to evict for `size` bytes, least recently requested first; all evictable ones if too few."""
        victims: list[Resident] = []
        for resident in self.models.values():
            if size <= 0:
                break
            if self._may_go(resident) and (largest is None or resident.size <= largest):
                victims.append(resident)
                size -= resident.size
        return victims

    def _may_go(self, resident: Resident) -> bool:
        if resident.state is not State.READY or resident.leases or resident.name in self.pins:
            return False
        early = resident.stays_until - self.now()
        if early > 0 and self.seekers:
            self._look_again(early)
        return early <= 0

    def _look_again(self, delay: float) -> None:
        """Call `make` in `delay` seconds, or earlier."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now <= self.looks_at <= now + delay:
            return
        self.looks_at = now + delay
        loop.call_later(delay, self.make)

    def _pinned(self, apart_from: Resident) -> list[int]:
        return [r.size for r in self.models.values() if r.name in self.pins and r is not apart_from]


def _no_room(name: str) -> ApiError:
    """Return the error for a load that got no memory in time."""
    return ApiError(
        503,
        f"no room for {name} within {ROOM_S:.0f} s: what is loaded is in use; send this again later",
        code="no_room",
        retry_after=ROOM_S / 4,
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
