"""Which models are loaded: leases, room, and who goes first.

All of it happens on one event loop and needs no lock: a request that finds its model loaded takes a lease without
waiting for anything. One that does not waits for the load of that model, the same for all who ask for it. Loads wait
for room, in their order, which is made by unloading what was not asked for longest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol, TypeVar

from builder.gateway.errors import ApiError
from builder.gateway.residency.backoff import Backoff, failed
from builder.gateway.residency.measures import Measures
from builder.gateway.residency.needs import Needs
from builder.gateway.residency.offered import Offered, Stamp

MOST_LOADS = 4  # at once: more of them would only wait for one another's cores
ROOM_S = 60.0  # that a load waits for others to go
ENDED = "its process died"
UNLOADED = "Request for unknown model: "  # somebody else has unloaded it, and what runs is answered
SERVER = 100 << 20  # bytes of the server itself, until it was measured
GROWS = 1.15  # a process that has answered, by the one that was just loaded: 42 and 37 MB, until the next look
AHEAD = 0.1  # of the budget, at most, is kept free for the next load: a process takes a second or more to end


T = TypeVar("T")


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(eq=False)
class Resident:
    """A model that is loaded, or is about to be. `size`: bytes, at least those `reserved`; `stays_until`: it is not
    unloaded for others before.
    """

    name: str
    stamp: Stamp | None  # of the configuration that it was loaded with; None where nobody knows
    version: str
    state: State = State.LOADING
    size: int = 0
    reserved: int = 0
    engines: tuple[str, ...] = ()
    leases: int = 0
    waiting: int = 0
    has_room: bool = False
    since: float = 0.0
    stays_until: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    earlier: frozenset[int] = frozenset()  # processes under its name that are not its own
    calls: set[asyncio.Timeout] = field(default_factory=set, repr=False)

    async def unless_dead(self, call: Awaitable[T]) -> T:
        """What `call` gives, asked of this model. Raises TimeoutError when it dies: Triton then may never say so."""
        scope = asyncio.timeout(None)
        self.calls.add(scope)
        try:
            async with scope:
                return await call
        finally:
            self.calls.discard(scope)

    def break_off(self) -> None:
        """End what is asked of this model."""
        for scope in self.calls:
            scope.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False)
class Seeker:
    """A load that waits for room. `size`: bytes that it needs besides what it has."""

    resident: Resident
    size: int
    room: asyncio.Future[None]


class Loading(Protocol):
    """What is asked of Triton and of the machine."""

    async def needs(self, name: str, version: str) -> Needs:
        """What a version takes, by an estimate."""
        ...

    async def load(self, resident: Resident, *, instead: bool) -> int | None:
        """Load a version; `instead`: of the one that answers, which does so until then.

        Returns the bytes it was measured to take; None where that cannot be known. Raises ApiError.
        """
        ...

    async def unload(self, name: str) -> None:
        """Unload a front or an engine. Returns when its memory is back."""
        ...


class Residents:
    """The models that are loaded, within `budget` bytes for them and the server. `pins` are never unloaded."""

    def __init__(
        self,
        offered: Offered,
        loading: Loading,
        measures: Measures,
        budget: int,
        pins: Sequence[str] = (),
        most_waiting: int = 256,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.offered, self.loading, self.measures = offered, loading, measures
        self.budget, self.pins, self.most_waiting, self.now = budget, frozenset(pins), most_waiting, now
        self.server = SERVER
        self.backoff = Backoff(now)
        self.models: OrderedDict[str, Resident] = OrderedDict()  # the one that was asked for longest ago first
        self.leaving: set[Resident] = set()
        self.seekers: list[Seeker] = []
        self.known: dict[str, tuple[str, int]] = {}  # (version, bytes) of what was measured
        self.looks_at = -1.0  # by the loop's clock: when room is made again
        measures.budget.set(budget)

    async def lease(self, name: str) -> Resident:
        """A model that is loaded and stays so until `release`. Raises ApiError."""
        while True:
            stamp, found = self.offered.stamp(name), self.models.get(name)
            if found is not None and found.state is State.READY and self._fits(found, stamp):
                found.leases += 1
                self.models.move_to_end(name)
                return found
            if found is None or found.state is State.READY or found.stamp == stamp:
                return await self._wait(name, found)
            if found.task is not None:  # loads what the repository said before
                await asyncio.wait({found.task})

    def release(self, resident: Resident) -> None:
        """A request is answered."""
        resident.leases -= 1
        if not resident.leases and self.seekers:
            self._make_room()

    def died(self, resident: Resident, reason: str) -> None:
        """A model does not answer any more: it is unloaded, and loaded again when somebody asks for it."""
        if self.models.get(resident.name) is not resident or resident.state is not State.READY:
            return
        if UNLOADED not in reason:
            resident.break_off()
        self.measures.deaths.inc()
        if resident.stamp is not None:
            self.backoff.note_death(resident.name, resident.stamp, reason, self.now() - resident.since)
        self._leave(resident)

    def ended(self, name: str, process: int) -> None:
        """A process of a model was found dead."""
        resident = self.models.get(name)
        if resident is not None and process not in resident.earlier:
            resident.break_off()
            self.died(resident, ENDED)

    def adopt(self, name: str, version: str) -> None:
        """A model that somebody else has loaded."""
        if name in self.models or any(other.name == name for other in self.leaving):
            return
        with suppress(ApiError):
            offer = self.offered.offer(name)
            if offer.model is not None:
                stamp = offer.stamp if offer.model.version == version else None
                self.models[name] = Resident(name, stamp, version, State.READY, since=self.now())
                self.models.move_to_end(name, last=False)

    def lost(self, name: str, before: float) -> None:
        """A model was not loaded any more when somebody looked, after `before`."""
        found = self.models.get(name)
        if found is not None and found.state is State.READY and found.since < before:
            del self.models[name]

    def measured(self, server: int, models: dict[str, int]) -> None:
        """What the server and its models take now. Where that is too much, models go."""
        held = {model: r for r in (*self.models.values(), *self.leaving) for model in (r.name, *r.engines)}
        self.server = server + sum(size for model, size in models.items() if model not in held)
        for resident in self.models.values():
            size = sum(models.get(model, 0) for model in (resident.name, *resident.engines))
            if resident.state is State.READY and size:
                self._weigh(resident, size)
        self._make_room()
        self._count()

    def used(self) -> int:
        """Bytes that are taken, or promised to a load."""
        return self.server + sum(r.size for r in self.models.values()) + sum(r.size for r in self.leaving)

    def _fits(self, resident: Resident, stamp: Stamp | None) -> bool:
        """Whether a model is what the repository says; or what it says now does not load, and is not tried yet."""
        return resident.stamp == stamp or (stamp is not None and self.backoff.waits(resident.name, stamp))

    async def _wait(self, name: str, found: Resident | None) -> Resident:
        """Wait for a load, which goes on where one who waits for it leaves."""
        if found is None or found.state is not State.LOADING:
            found = self._begin(name, found)
        if found.waiting >= self.most_waiting:
            raise ApiError(
                429,
                f"{found.waiting} requests wait for {name} to be loaded, which is the limit; send this one again later",
                code="queue_full",
                retry_after=2,
            )
        assert found.task is not None
        found.waiting += 1
        found.leases += 1
        self.measures.waits.inc()
        try:
            await asyncio.shield(found.task)
        except BaseException as error:
            self.release(found)
            before = self.models.get(name)
            if before is None or before.state is not State.READY or not isinstance(error, ApiError):
                raise
            before.leases += 1  # a version that does not load takes the place of none that answers
            return before
        finally:
            found.waiting -= 1
        return found

    def _begin(self, name: str, before: Resident | None) -> Resident:
        """Begin to load a model; `before`: what answers by that name now. Raises ApiError."""
        offer = self.offered.offer(name)
        if offer.model is None:
            raise ApiError(404, f"{name} is not a model for clients", param="model", code="model_not_found")
        pause = self.backoff.pause(name, offer.stamp)
        resident = self.models[name] = Resident(name, offer.stamp, offer.model.version)
        self.models.move_to_end(name)
        resident.size = before.size if before is not None else 0
        resident.task = asyncio.ensure_future(self._load(resident, before, pause))
        resident.task.add_done_callback(_noticed)
        return resident

    async def _load(self, resident: Resident, before: Resident | None, pause: float) -> None:
        begun = started = self.now()
        try:
            await asyncio.sleep(pause)
            await self._gone({resident.name})
            needs = await self._needs(resident)
            resident.engines, resident.reserved = needs.engines, needs.reserved
            await self._gone(set(needs.engines))
            await self._room(resident, needs.size)
            started = self.now()
            size = await self._loaded(resident, instead=before is not None)
        except BaseException as error:
            self._failed(resident, before, error)
            raise
        resident.state, resident.since = State.READY, self.now()
        resident.stays_until = resident.since + (resident.since - started)  # as long as its load took, at least
        grown = needs.size if size is None else max(self._known(resident), int(GROWS * size))
        resident.size = max(grown, needs.reserved)
        self.measures.loads.inc()
        self.measures.load_s.observe(self.now() - begun)
        if before is not None:
            with suppress(ApiError):
                await self._unload_engines(before)
        self._make_room()
        self._count()

    async def _loaded(self, resident: Resident, *, instead: bool) -> int | None:
        try:
            return await resident.unless_dead(self.loading.load(resident, instead=instead))
        except TimeoutError as error:
            why = f"{ENDED} while it was loaded; where that goes on, Triton waits for it until it is started again"
            raise ApiError(503, why, code="model_failed") from error

    async def _needs(self, resident: Resident) -> Needs:
        needs = await self.loading.needs(resident.name, resident.version)
        return replace(needs, size=max(self._known(resident) or needs.size, needs.reserved))

    def _known(self, resident: Resident) -> int:
        """Bytes that this version took when it was looked at; 0 where it never was."""
        version, size = self.known.get(resident.name, ("", 0))
        return size if version == resident.version else 0

    def _failed(self, resident: Resident, before: Resident | None, error: BaseException) -> None:
        """A load came to nothing: what there is of the model goes, or what answered before goes on."""
        if isinstance(error, ApiError) and error.code == "model_failed" and resident.stamp is not None:
            self.measures.failures.inc()
            delay = self.backoff.note(resident.name, resident.stamp, error.message)
            error.message, error.retry_after = failed(resident.name, error.message, delay).message, delay
        if before is not None:
            self.models[resident.name] = before
        elif resident.has_room and not isinstance(error, asyncio.CancelledError):
            self._leave(resident)
        else:
            del self.models[resident.name]

    async def _room(self, resident: Resident, size: int) -> None:
        """Wait until there is room for `size` bytes. Raises ApiError 507 where there never is, 503 where none comes."""
        most = self.budget - self.server - sum(self._pinned(resident))
        if size > most:
            raise ApiError(
                507,
                f"{resident.name} needs {_mb(size)} and at most {_mb(most)} can be free: of {_mb(self.budget)} in all "
                f"(--memory-gb) the server has {_mb(self.server)} and pinned models the rest",
                code="model_too_large",
            )
        seeker = Seeker(resident, size, asyncio.get_running_loop().create_future())
        self.seekers.append(seeker)
        self._make_room()
        try:
            async with asyncio.timeout(ROOM_S):
                await seeker.room
        except TimeoutError as error:
            raise ApiError(
                503,
                f"no room for {resident.name} within {ROOM_S:.0f} s: what is loaded is in use; send this again later",
                code="no_room",
                retry_after=ROOM_S / 4,
            ) from error
        finally:
            if seeker in self.seekers:
                self.seekers.remove(seeker)

    def _pinned(self, apart_from: Resident) -> list[int]:
        return [r.size for r in self.models.values() if r.name in self.pins and r is not apart_from]

    def _make_room(self) -> None:
        """Give room to those that wait for it, in their order, and have models go for those that have to wait on."""
        free = self.budget - self.used()
        coming = sum(r.size for r in self.leaving)
        loads = sum(r.state is State.LOADING and r.has_room for r in self.models.values())
        for seeker in list(self.seekers):
            if loads >= MOST_LOADS:
                return
            if seeker.size <= free:
                self.seekers.remove(seeker)
                seeker.resident.size += seeker.size
                seeker.resident.has_room = True
                seeker.room.set_result(None)
                free -= seeker.size
                loads += 1
                continue
            going = self._victims(seeker.size - free - coming)
            if going is None:
                continue  # nothing would be gained yet; a smaller one may fit
            coming += sum(victim.size for victim in going)
            for victim in going:
                self._evict(victim)
            taken = min(max(0, free), seeker.size)
            free, coming = free - taken, coming - (seeker.size - taken)
        if not self.seekers:
            self._go_ahead(free + coming)

    def _go_ahead(self, free: int) -> None:
        """Have models go where too much is taken, and small ones so that the next load need not wait for that."""
        for victim in self._victims(-free) or ():
            free += victim.size
            self._evict(victim)
        sizes = [r.size for r in self.models.values() if r.state is State.READY]
        ahead = min(int(AHEAD * self.budget), sum(sizes) // max(1, len(sizes)))
        for victim in self._victims(ahead - free, largest=ahead) or ():
            self._evict(victim)

    def _victims(self, size: int, largest: int | None = None) -> list[Resident] | None:
        """Models to unload for `size` bytes, what was asked for longest ago first; None where there are not enough."""
        found: list[Resident] = []
        for resident in self.models.values():
            if size <= 0:
                break
            if self._may_go(resident) and (largest is None or resident.size <= largest):
                found.append(resident)
                size -= resident.size
        return found if size <= 0 else None

    def _may_go(self, resident: Resident) -> bool:
        if resident.state is not State.READY or resident.leases or resident.name in self.pins:
            return False
        early = resident.stays_until - self.now()
        if early > 0 and self.seekers:
            self._look_again(early)
        return early <= 0

    def _look_again(self, delay: float) -> None:
        """Make room in `delay` seconds, or earlier."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now <= self.looks_at <= now + delay:
            return
        self.looks_at = now + delay
        loop.call_later(delay, self._make_room)

    def _evict(self, resident: Resident) -> None:
        self.measures.evictions.inc()
        self._leave(resident)

    def _leave(self, resident: Resident) -> None:
        del self.models[resident.name]
        resident.state = State.LEAVING
        self.leaving.add(resident)
        resident.task = asyncio.ensure_future(self._unload(resident))
        resident.task.add_done_callback(_noticed)

    async def _unload(self, resident: Resident) -> None:
        try:
            await self.loading.unload(resident.name)
            await self._unload_engines(resident)
        except ApiError as error:
            logging.getLogger(__name__).warning("%s is not unloaded: %s", resident.name, error.message)
        finally:
            self.leaving.discard(resident)
            self._make_room()
            self._count()

    async def _unload_engines(self, resident: Resident) -> None:
        """Unload the engines that a model called and no other does."""
        for engine in resident.engines:
            if not any(engine in other.engines for other in self.models.values()):
                await self.loading.unload(engine)

    async def _gone(self, names: set[str]) -> None:
        """Wait until what was loaded under these names before has gone."""
        for other in list(self.leaving):
            if other.task is not None and names & {other.name, *other.engines}:
                await asyncio.wait({other.task})

    def _weigh(self, resident: Resident, size: int) -> None:
        resident.size = max(size, resident.reserved)
        self.known[resident.name] = (resident.version, size)

    def _count(self) -> None:
        self.measures.models.set(sum(r.state is State.READY for r in self.models.values()))
        self.measures.bytes.set(self.used())


def _noticed(task: asyncio.Task[None]) -> None:
    """The failure of a load for which nobody waits any more."""
    if not task.cancelled():
        task.exception()


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
