"""Choose a server for a request from what is known of each server.

Does no I/O and keeps no state. Gateways that see the same servers make the same choices without talking to each other:
a rendezvous hash orders the servers for each key (Thaler and Ravishankar, 1996), and a server above its share of the
load is passed over (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from typing import Protocol, TypeVar

BALANCE = 1.25  # a server is full when its load is above this multiple of the average, and BATCHED_TOKENS
BATCHED_TOKENS = 2048  # load that a decode loop runs side by side, however little the others have


class ServerLoad(Protocol):
    """Load of one server by this gateway. `work`: tokens of its unanswered requests; `requests`: their number.

    `slowness`: time of its answers, as a multiple of the usual one.
    """

    @property
    def name(self) -> str: ...
    @property
    def work(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def slowness(self) -> float: ...


S = TypeVar("S", bound=ServerLoad)


def load_of(server: ServerLoad, added_tokens: int = 0) -> float:
    """Return the load of a server with `added_tokens`, in tokens of a server of usual speed."""
    return (server.work + added_tokens) * server.slowness


def nearly_least_loaded(tokens: int, servers: Sequence[S]) -> list[S]:
    """Return the servers with the least load once they have a request of so many `tokens`, or nearly so."""
    limit = BALANCE * min(load_of(server, tokens) for server in servers)
    return [server for server in servers if load_of(server, tokens) <= limit]


def least_loaded(tokens: int, servers: Sequence[S], random: Random) -> S:
    """Return the server that is to have a request of so many `tokens`.

    Of two random ones with nearly the least load, it is the one with fewer requests. Chance keeps several gateways,
    whose knowledge is equal, from choosing the same server.
    """
    eligible = nearly_least_loaded(tokens, servers)
    return min(random.sample(eligible, min(2, len(eligible))), key=lambda server: server.requests)


def by_prefix(prefix: bytes, tokens: int, servers: Sequence[S]) -> S:
    """Return the server whose cache has the blocks of prompts that begin with `prefix`, unless it is full or slow.

    With a request of so many `tokens`, a server counts as having half a batch at least: an idle one of half the usual
    speed is passed over. A server that joins or leaves moves only its own prefixes.
    """
    loads = [max(server.work + tokens, BATCHED_TOKENS // 2) * server.slowness for server in servers]
    limit = max(load_limit(servers, tokens), min(loads))
    return max((server for server, load in zip(servers, loads, strict=True) if load <= limit), key=rank_for(prefix))


def load_limit(servers: Sequence[ServerLoad], tokens: int = 0) -> float:
    """Return the load above which one of `servers` is full, with a request of so many `tokens`.

    Each has the average load if they share the work by their speeds.
    """
    average = (sum(server.work for server in servers) + tokens) / sum(1 / server.slowness for server in servers)
    return BALANCE * average + max(BATCHED_TOKENS, tokens)


def rank_for(key: bytes) -> Callable[[ServerLoad], bytes]:
    """Return the rank of servers for a key; the highest is the first choice, in every gateway."""
    hashed = blake2b(key, digest_size=8)

    def rank(server: ServerLoad) -> bytes:
        ranked = hashed.copy()
        ranked.update(server.name.encode())
        return ranked.digest()

    return rank
