"""Choose the server that loads a model, and decide when a second copy pays. Does no I/O and keeps no state.

Gateways that see the same servers choose alike: each model has a few candidates by rendezvous hash. Among these, memory
decides, so that no server has much more to hold than others (Mitzenmacher, "The Power of Two Choices in Randomized Load
Balancing", 2001), and a model that fails to load is tried on few servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from heapq import nlargest
from typing import Protocol, TypeVar

from builder.serving.gateway.fleet.routing import ServerLoad, load_limit, load_of, nearly_least_loaded, rank_for

CANDIDATES = 3  # servers that may load a model
MAX_SLOWNESS = 2.0  # of the first choice, up to which it gets a request when it is idle, as `by_prefix` does
COPY_IDLE_S = 60.0  # without a request, after which a copy is unloaded, or a model is evicted for a copy of another


class ServerMemory(ServerLoad, Protocol):
    """Load and memory of one server, as a gateway knows them."""

    def idle_s(self, size: int) -> float:
        """Return how long the models were idle that a load of `size` bytes would evict; infinite if none has to go."""
        ...


S = TypeVar("S", bound=ServerLoad)
M = TypeVar("M", bound=ServerMemory)


def ranked(model: str, servers: Sequence[S]) -> list[S]:
    """Return the servers in the order in which a model prefers them, which is another one for each model."""
    return sorted(servers, key=rank_for(model.encode()), reverse=True)


def candidates_for(model: str, servers: Iterable[S], count: int = CANDIDATES) -> list[S]:
    """Return the servers that may load a model, first choice first."""
    return nlargest(count, servers, key=rank_for(model.encode()))


def place(size: int, candidates: Sequence[M]) -> M:
    """Return the candidate that is to load a model of `size` bytes.

    The first one with memory for it, or else the one whose least recently requested models are idle for longest. Those
    with more than their share of the load are passed over; not all can have that.
    """
    limit = load_limit(candidates)
    return max((server for server in candidates if load_of(server) <= limit), key=lambda server: server.idle_s(size))


def are_full(holders: Sequence[ServerLoad], servers: Sequence[ServerLoad]) -> bool:
    """Return True if all `holders` of a model have more than their share of the load of all `servers`."""
    return min(map(load_of, holders)) > load_limit(servers)


def place_copy(model: str, size: int, excluded: Set[ServerLoad], servers: Sequence[M]) -> M | None:
    """Return the server to load another copy on; None if each is full or it costs a model in use.

    `excluded`: servers that may not load it, such as those that have it already.
    """
    limit = load_limit(servers)
    others = [server for server in servers if server not in excluded and load_of(server) <= limit]
    if not others:
        return None
    target = place(size, candidates_for(model, others))
    return target if target.idle_s(size) >= COPY_IDLE_S else None


def choose_copy(model: str, tokens: int, servers: Sequence[S]) -> S:
    """Return the server to send a request to: the same one while it is idle, so that other copies become idle too."""
    rank = rank_for(model.encode())
    first = max(servers, key=rank)
    if not first.work and first.slowness < MAX_SLOWNESS:
        return first
    return max(nearly_least_loaded(tokens, servers), key=rank)
