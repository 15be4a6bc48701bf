"""Load models on demand over a fleet: send a request where its model is loaded, or choose where to load it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import lru_cache
from random import Random

from tritonclient.grpc import service_pb2

from builder.serving.gateway.backend import Metadata, StreamFunction
from builder.serving.gateway.background import start_task
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.fleet.backend import RETRYABLE, Attempts, FleetBackend, LoadedElsewhere
from builder.serving.gateway.fleet.fleet_server import FleetServer
from builder.serving.gateway.fleet.members import FleetMembers
from builder.serving.gateway.fleet.on_demand_server import OnDemandServer
from builder.serving.gateway.fleet.placement import (
    CANDIDATES,
    COPY_IDLE_S,
    are_full,
    candidates_for,
    choose_copy,
    place,
    place_copy,
    ranked,
)
from builder.serving.gateway.fleet.request_work import RequestWork
from builder.serving.gateway.fleet.routing import BATCHED_TOKENS, load_of
from builder.serving.gateway.residency.repository_models import RepositoryModels, Stamp
from builder.serving.gateway.tensors import Outputs

LOAD_ERRORS = ("no_room", "model_failed")
WAIT_CHECK_INTERVAL_S = 0.1  # of a request that waits for a load, until other servers are looked at again
COPY_PAUSE_S = 1.0  # after a copy of a model, until its servers are looked at again
IDLE_COPIES_INTERVAL_S = 5.0
FIRST_SERVERS = 8  # of a model's order, which are remembered: the candidates are among them unless many are away
MAX_MODELS = 100_000  # whose first servers are remembered
log = logging.getLogger(__name__)


class OnDemandFleetBackend(FleetBackend):
    """Backend over the OnDemandServers of `members`, which load `models`. `watch` has to run while it is used.

    Each server loads the version that the repository serves before it answers, so requests need not name one.
    """

    retryable = (*RETRYABLE, *LOAD_ERRORS)

    def __init__(self, members: FleetMembers, models: RepositoryModels, random: Random | None = None) -> None:
        super().__init__(members, random)
        self.models = models
        self.sizes: dict[str, tuple[Stamp, int]] = {}  # estimated bytes
        self.copying: dict[str, list[OnDemandServer | None]] = {}  # servers that load a copy; None: it has none yet
        self.has_no_place: set[str] = set()  # models that no server may load a copy of, until COPY_PAUSE_S later
        self.first_servers = lru_cache(MAX_MODELS)(self._order)

    def _sender(
        self, server: FleetServer, model: str, attempts: Attempts, send_to: Callable[[FleetServer], StreamFunction]
    ) -> StreamFunction:
        send = send_to(server)
        return send if server.has_loaded(model) else self._while_first(_on_demand(server), send, attempts)

    def _while_first(self, server: OnDemandServer, send: StreamFunction, attempts: Attempts) -> StreamFunction:
        """Return `send`, which raises LoadedElsewhere while it waits for a model that another server has loaded.

        A server that failed to answer the request does not count.
        """

        async def stream(request: service_pb2.ModelInferRequest, metadata: Metadata) -> AsyncGenerator[Outputs, None]:
            async with aclosing(send(request, metadata)) as answers:
                first = asyncio.ensure_future(anext(answers, None))
                try:
                    while not (await asyncio.wait({first}, timeout=WAIT_CHECK_INTERVAL_S))[0]:
                        if self._is_loaded_beside(server, request.model_name, attempts.excluded):
                            raise LoadedElsewhere
                finally:
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)
                outputs = first.result()
                while outputs is not None:
                    yield outputs
                    outputs = await anext(answers, None)

        return stream

    def _is_loaded_beside(self, server: OnDemandServer, model: str, tried: Sequence[FleetServer]) -> bool:
        """Return True if another healthy server, which was not `tried`, has loaded what `server` is loading."""
        if not server.is_loading(model):
            return False
        now, stamp = self.members.now(), server.residents.models[model].stamp
        others = [other for other in self._holders(model) if other not in tried]
        return any(other.has_loaded_as(model, stamp) and other.is_healthy(model, now) for other in others)

    async def _candidates(self, model: str, attempts: Attempts) -> tuple[str, list[FleetServer]]:
        """Return the servers that have a model, or the one that is to load it.

        Until then a server that leaves and has the model answers, so that nobody waits for the load. A full queue makes
        no other server load the model: `_copy_if_full` decides that.
        """
        now, tried = self.members.now(), attempts.excluded
        holders = [server for server in self._holders(model) if server not in tried and server.has_loaded(model)]
        holders = [server for server in holders if server.is_healthy(model, now)]
        may_load = attempts.error is None or attempts.error.code != "queue_full"
        if not holders and may_load:
            holders = leaving = self._leaving(model, tried)
            if servers := self._servers(model, tried):
                size = await self._size(model, servers[0])
                copies = [server for server in self._copies(model) if server not in tried]
                loaded = [server for server in (*servers, *copies) if server.has_loaded(model)]
                loading = [server for server in servers if server.is_loading(model)]
                if loading and tried:  # copies may fail for the same reason
                    copies = []
                if leaving and not (loaded or loading or model in self.copying):
                    self._start_copy(model, place(size, servers))
                holders = loaded or leaving or [*loading, *copies] or [place(size, servers)]
        return attempts.requested, list(dict.fromkeys(holders))

    def _leaving(self, model: str, tried: Sequence[FleetServer]) -> list[OnDemandServer]:
        """Return the servers that leave, still answer, and have a model loaded."""
        now, servers = self.members.now(), map(_on_demand, self.members.holders.of(model))
        leaving = [server for server in servers if server.is_leaving and server.is_ready and server not in tried]
        return [server for server in leaving if server.has_loaded(model) and server.is_healthy(model, now)]

    def _holders(self, model: str) -> list[OnDemandServer]:
        """Return the servers that had a model at their last check, and those that have begun to load it since."""
        return list(dict.fromkeys((*map(_on_demand, self.members.accepting_with(model)), *self._copies(model))))

    def _copies(self, model: str) -> list[OnDemandServer]:
        """Return the servers that load a copy of `model`, without those on which it has just failed."""
        now, servers = self.members.now(), [server for server in self.copying.get(model, ()) if server is not None]
        return [server for server in servers if server.accepts_requests and server.is_healthy(model, now)]

    def _servers(self, model: str, tried: Sequence[FleetServer]) -> list[OnDemandServer]:
        """Return the candidates for `model`, those on which it fails only if there are no others."""
        now = self.members.now()
        servers = [server for server in self._may_load(model) if server not in tried]
        return [server for server in servers if server.is_healthy(model, now)] or servers

    def _may_load(self, model: str) -> list[OnDemandServer]:
        """Return the candidates for `model`. Looks at few servers: a large fleet takes a millisecond to order."""
        first = self.first_servers(model, self.members.joined)
        accepting = [_on_demand(server) for server in first if server.accepts_requests]
        is_enough = len(accepting) >= CANDIDATES
        return accepting[:CANDIDATES] if is_enough else candidates_for(model, self._accepting())

    def _order(self, model: str, joined: int) -> list[FleetServer]:
        """Return the first servers of a model's order, which a server that joins may change."""
        return candidates_for(model, self.members.servers.values(), FIRST_SERVERS)

    def _accepting(self) -> list[OnDemandServer]:
        return list(map(_on_demand, self.members.accepting()))

    def _choose(self, model: str, holders: Sequence[FleetServer], work: RequestWork) -> FleetServer:
        self._copy_if_full(model, holders)
        if work.prefix:
            return super()._choose(model, holders, work)
        return choose_copy(model, work.tokens, holders)

    def _copy_if_full(self, model: str, holders: Sequence[FleetServer]) -> None:
        """Start to load another copy of a model for each batch that its servers have too much.

        Requests go on meanwhile. They do not wait for a copy unless the first one is loading, too.
        """
        loads, copying = list(map(load_of, holders)), self.copying.get(model, [])
        copies = len(holders) + sum(server not in holders for server in copying)
        if model in self.has_no_place or min(loads) <= BATCHED_TOKENS or sum(loads) <= BATCHED_TOKENS * copies:
            return
        if servers := self._accepting():
            target = None
            if are_full(holders, servers):
                excluded = {*holders, *self._targets(model), *self._failing(model, servers)}
                target = place_copy(model, self._known_size(model, holders), excluded, servers)
                if target is None:
                    self.has_no_place.add(model)
            self._start_copy(model, target)

    def _start_copy(self, model: str, target: OnDemandServer | None) -> None:
        self.copying.setdefault(model, []).append(target)
        start_task(self._copy(model, target))

    def _targets(self, model: str) -> set[FleetServer]:
        """Return the servers that load a copy of `model`, and those that have not begun to load one of another.

        Once they have begun, their memory says what is left for others.
        """
        return {
            target
            for name, targets in self.copying.items()
            for target in targets
            if target is not None and (name == model or name not in target.residents.models)
        }

    def _failing(self, model: str, servers: Sequence[OnDemandServer]) -> set[FleetServer]:
        """Return the servers on which requests to `model` failed, or its last load did."""
        now, stamp = self.members.now(), self.models.stamp(model)
        return {
            server
            for server in servers
            if not server.is_healthy(model, now)
            or (stamp is not None and server.residents.backoff.is_waiting(model, stamp))
        }

    async def _copy(self, model: str, target: OnDemandServer | None) -> None:
        try:
            if target is not None:
                target.residents.release(await target.residents.lease(model))
        except ApiError as error:
            log.warning("no other Triton loads a copy of %s: %s", model, error.message)
            if target is not None:  # the next copy goes elsewhere
                target.model_health[model].eject(self.members.now())
            self.copying[model].remove(target)
            self.copying[model].append(target := None)
        finally:
            await asyncio.sleep(COPY_PAUSE_S)
            self.copying[model].remove(target)
            if target is None:
                self.has_no_place.discard(model)
            if not self.copying[model]:
                del self.copying[model]

    def _may_retry(self, model: str, error: ApiError, holders: Sequence[FleetServer]) -> bool:
        """Return True if the budget allows another try, or if a load failed and the other servers need no new one."""
        if error.code in LOAD_ERRORS and all(
            holder.has_loaded(model) or holder.is_loading(model) for holder in map(_on_demand, holders)
        ):
            return True
        return super()._may_retry(model, error, holders)

    def _known_size(self, model: str, holders: Sequence[FleetServer]) -> int:
        """Return the bytes of a model that `holders` have, or are loading."""
        residents = [_on_demand(holder).residents.models.get(model) for holder in holders]
        sizes = [resident.size for resident in residents if resident is not None]
        return max(self.sizes.get(model, (None, 0))[1], *sizes, 0)

    async def _size(self, model: str, server: OnDemandServer) -> int:
        """Return the estimated bytes of a model, 0 if they are unknown: the server that is to load it says why.

        Raises ApiError for a model that the repository does not have.
        """
        configured = self.models.configured(model)
        stamp, size = self.sizes.get(model, (None, 0))
        if stamp != configured.stamp and configured.model is not None:
            try:
                size = (await server.residents.loader.estimate(model, configured.model.version)).size
            except ApiError:
                return 0
            self.sizes[model] = configured.stamp, size
        return size

    async def watch(self) -> None:
        """Unload copies that no request needs any more."""
        while True:
            await asyncio.sleep(IDLE_COPIES_INTERVAL_S)
            for model, holders in self.members.holders.shared():
                servers = [_on_demand(server) for server in holders if server.accepts_requests]
                for server in ranked(model, servers)[1:]:
                    server.residents.unload_idle(model, COPY_IDLE_S)


def _on_demand(server: FleetServer) -> OnDemandServer:
    assert isinstance(server, OnDemandServer)
    return server
