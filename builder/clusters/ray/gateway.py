"""Run gateways over the Tritons of an application, each in a process that knows nothing of Ray."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from typing import Any

from ray import serve
from ray.exceptions import RayError

from builder.clusters.ray.cluster import RayOptions, log_line
from builder.clusters.ray.registry import Registry, Repeating
from builder.common.workplace import temporary_folder
from builder.serving.gateway.fleet.targets import AddressFile
from builder.serving.server.gateway import supervised_gateway

ANSWER_TIMEOUT_S = 5.0


@contextmanager
def ray_gateway(registry: Registry, host: str, port: int, *more: str, say: Callable[[str], None]) -> Iterator[None]:
    """Run `build-repo gateway` on `host`:`port` over the Tritons that `registry` names; `more`: its other options.

    Raises ServeError if it does not start, RayError if Ray's head does not answer.
    """
    name = uuid.uuid4().hex
    with temporary_folder() as folder, ExitStack() as stack:
        tritons = AddressFile(folder / "tritons")

        def exchange() -> None:
            requests = tritons.take_requests()
            if requests is not None:  # otherwise the entry dies, unless the gateway continues soon
                registry.gateways.write(name, requests)
            tritons.write(sorted(registry.tritons.read()))

        def leave() -> None:
            """Remove the entry, so that replicas that end do not wait for this gateway."""
            with suppress(RayError):  # it dies by itself
                registry.gateways.remove(name)

        exchange()
        stack.callback(leave)
        exchanging = Repeating(exchange)
        exchanging.start()
        stack.callback(exchanging.stop)
        stack.enter_context(supervised_gateway(str(tritons), host, port, *more, say=say))
        yield


class GatewayReplica:
    """One of the gateways that Ray places, restarts and checks. `tritons`: their deployment, which Ray runs with it."""

    def __init__(self, options: RayOptions, tritons: Any) -> None:
        self.options, self.stack = options, ExitStack()
        registry = Registry(serve.get_replica_context().app_name)
        gateway = ray_gateway(registry, options.host, options.port, *options.gateway_options, say=log_line)
        self.stack.enter_context(gateway)

    def check_health(self) -> None:
        """Raise OSError if the gateway does not answer, so that Ray starts another."""
        with closing(HTTPConnection(self.options.host, self.options.port, timeout=ANSWER_TIMEOUT_S)) as connection:
            connection.request("GET", "/health")
            connection.getresponse()

    def __del__(self) -> None:
        self.stack.pop_all().close()
