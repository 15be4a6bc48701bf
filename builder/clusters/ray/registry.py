"""Exchange addresses of Tritons and their running requests between replicas and gateways.

Each of them writes an entry to the key-value store of Ray's head once a second. No request waits for that, and while
the head does not answer, all continue with what they read last.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from ray.experimental import internal_kv

PERIOD_S = 1.0
MAX_UNCHANGED_READS = 15  # in a row, after which the writer of an entry counts as dead
STOP_TIMEOUT_S = 10.0  # for the last exchange, which may wait for Ray's head
NAMESPACE = "build-repo"  # of the keys
log = logging.getLogger(__name__)


class Entries:
    """Entries whose keys begin with `prefix`. `store`: ray.experimental.internal_kv.

    An entry is dead if it does not change for MAX_UNCHANGED_READS. Counting reads rather than seconds needs no common
    clock, and no entry dies while the store is away.
    """

    def __init__(self, prefix: str, store: Any) -> None:
        self.prefix, self.store = prefix, store
        self.writes = 0
        self.read_before: dict[str, tuple[bytes, int]] = {}  # values, and how often they were read in a row

    def write(self, name: str, value: object = None) -> None:
        """Write one's own entry, also if `value` is the same. Raises RayError."""
        self.writes += 1
        text = json.dumps([self.writes, value])
        self.store._internal_kv_put(f"{self.prefix}{name}", text, namespace=NAMESPACE)

    def remove(self, name: str) -> None:
        """Remove an entry. Raises RayError."""
        self.store._internal_kv_del(f"{self.prefix}{name}", namespace=NAMESPACE)

    def read(self) -> dict[str, Any]:
        """Return the values by name, and remove dead entries. Call it once a PERIOD_S. Raises RayError."""
        found: dict[str, tuple[bytes, int]] = {}
        for key in self.store._internal_kv_list(self.prefix, namespace=NAMESPACE):
            value, name = self.store._internal_kv_get(key, namespace=NAMESPACE), key.decode().removeprefix(self.prefix)
            before, times = self.read_before.get(name, (b"", 0))
            times = times + 1 if value == before else 0
            if times >= MAX_UNCHANGED_READS:
                self.remove(name)
            elif value is not None:  # otherwise it was removed meanwhile
                found[name] = value, times
        self.read_before = found
        return {name: json.loads(value)[1] for name, (value, _) in found.items()}


class Registry:
    """Entries of an application: an empty one for each Triton's address, and each gateway's requests by address."""

    def __init__(self, application: str, store: Any = internal_kv) -> None:
        self.tritons = Entries(f"{application}/tritons/", store)
        self.gateways = Entries(f"{application}/gateways/", store)


class Repeating(threading.Thread):
    """Thread that calls `action` every PERIOD_S until it is stopped. Logs its errors, which may be passing ones."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(name=f"repeats {action.__qualname__}", daemon=True)
        self.action, self.stopping = action, threading.Event()

    def run(self) -> None:
        while not self.stopping.wait(PERIOD_S):
            try:
                self.action()
            except Exception as error:
                log.warning("the exchange with Ray failed once: %s", error)

    def stop(self) -> None:
        """Stop, after an action that has begun."""
        self.stopping.set()
        self.join(STOP_TIMEOUT_S)
