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

BALANCE = 1.25  # a server is full when its work is above this multiple of the average, and BATCHED_TOKENS
BATCHED_TOKENS = 2048  # work that a decode loop runs side by side, however little the others have


class ServerLoad(Protocol):
    """Load of one server by this gateway. `work`: tokens of its unanswered requests; `requests`: their number."""

    @property
    def name(self) -> str: ...
    @property
    def work(self) -> int: ...
    @property
    def requests(self) -> int: ...


S = TypeVar("S", bound=ServerLoad)


def least_loaded(servers: Sequence[S], random: Random) -> S:
    """Return the server with the least work; among equals, the one of two random ones with fewer requests.

    Chance keeps several gateways, whose knowledge is equal, from choosing the same server.
    """
    least = min(server.work for server in servers)
    equals = [server for server in servers if server.work == least]
    return min(random.sample(equals, min(2, len(equals))), key=lambda server: server.requests)


def by_prefix(prefix: bytes, servers: Sequence[S]) -> S:
    """Return the server whose cache has the blocks of prompts that begin with `prefix`, unless it is full.

    At least one server is not above the average, so not all are full. A server that joins or leaves moves only its own
    prefixes.
    """
    limit = work_limit(servers)
    return max((server for server in servers if server.work <= limit), key=rank_for(prefix))


def work_limit(servers: Sequence[ServerLoad]) -> float:
    """Return the work, in tokens, above which one of `servers` is full."""
    return BALANCE * sum(server.work for server in servers) / len(servers) + BATCHED_TOKENS


def rank_for(key: bytes) -> Callable[[ServerLoad], bytes]:
    """Return the rank of servers for a key; the highest is the first choice, in every gateway."""
    hashed = blake2b(key, digest_size=8)

    def rank(server: ServerLoad) -> bytes:
        ranked = hashed.copy()
        ranked.update(server.name.encode())
        return ranked.digest()

    return rank
