"""Run a replica: a Triton of its own, whose address it publishes.

It ends with its Triton, so that Ray starts another.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from ray import serve
from ray.exceptions import RayError
from ray.util import get_node_ip_address

from builder.clusters.ray.cluster import RayOptions, log_line
from builder.clusters.ray.registry import PERIOD_S, Registry, Repeating
from builder.clusters.ray.scaling import REQUESTS
from builder.serving.server.heartbeat import heartbeat
from builder.serving.server.triton import running
from builder.serving.server.watch import Watcher

TRITON_ENDED = 70  # exit status of a replica whose Triton ended by itself: EX_SOFTWARE of sysexits.h
DRAIN_TIMEOUT_S = 600.0  # for the requests that gateways run on it, as long as they let a request take


class TritonReplica:
    """One of a deployment's replicas: a Triton on the address of its node, in a local cluster the loopback address.

    `registry`: by default that of the application that Ray runs it for.
    """

    def __init__(self, options: RayOptions, registry: Registry | None = None) -> None:
        self.requests, self.stopping, self.stack = 0, False, ExitStack()
        self.registry = registry or Registry(serve.get_replica_context().app_name)
        # On this thread, which lives as long as the process: Triton ends with the thread that started it.
        self.server = self.stack.enter_context(
            running(
                Path(options.repository),
                get_node_ip_address(),
                strict=False,
                insecure_bind=options.insecure_bind,
                on_demand=options.on_demand,
                liveness=True,
            )
        )
        self.exchange()
        self.exchanging = Repeating(self.exchange)
        self.exchanging.start()
        self.stack.callback(self._withdraw)
        threading.Thread(target=self._watch, daemon=True).start()

    def exchange(self) -> None:
        """Publish the address, and read how many requests the gateways run on it. Raises RayError."""
        self.registry.tritons.write(self.server.url)
        self.requests = sum(requests.get(self.server.url, 0) for requests in self.registry.gateways.read().values())

    def record_autoscaling_stats(self) -> dict[str, int]:
        """Return what Ray scales by."""
        return {REQUESTS: self.requests}

    def _watch(self) -> None:
        """Watch the models until Triton ends, and then end this process."""
        with heartbeat(self.server, log_line):
            status = Watcher(self.server, log_line).watch()
        if not self.stopping:
            self.stopping = True
            log_line(f"Triton ended by itself, with status {status}: this replica ends too")
            self.stack.pop_all().close()  # its models' processes, and their shared memory, outlive a killed server
            os._exit(TRITON_ENDED)

    def _withdraw(self) -> None:
        """Take back the address, and wait until no gateway uses it any more."""
        self.exchanging.stop()
        try:
            self.registry.tritons.remove(self.server.url)
            end = time.monotonic() + DRAIN_TIMEOUT_S
            while any(self.server.url in requests for requests in self.registry.gateways.read().values()):
                if self.server.process.poll() is not None or time.monotonic() > end:
                    break
                time.sleep(PERIOD_S)
        except RayError as error:
            log_line(f"the gateways were not told that this replica ends: {error}")

    def __del__(self) -> None:
        if not self.stopping:
            self.stopping = True
            self.stack.close()
