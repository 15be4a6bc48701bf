"""Record the Prometheus metrics of each server of a fleet."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from builder.serving.gateway.fleet.fleet_server import FleetServer

LABELS = ("server",)


class FleetMetrics:
    """Metrics by server; those of a server that left are removed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, description: str, labels: tuple[str, ...] = LABELS) -> Counter:
            return Counter(f"build_repo_gateway_{name}", description, labels, registry=registry)

        def gauge(name: str, description: str) -> Gauge:
            return Gauge(f"build_repo_gateway_{name}", description, LABELS, registry=registry)

        self.accepting = gauge("server_accepting", "1 if the server takes new requests, otherwise 0")
        self.requests = gauge("server_requests", "Requests that run on the server")
        self.work = gauge("server_work_tokens", "Tokens of these requests that are not read or generated yet, at most")
        self.slowness = gauge(
            "server_slowness", "Time of its recent answers, as a multiple of the usual one; 1 below 1.5"
        )
        self.models = gauge("server_models", "Models that the server has loaded")
        self.ejections = counter("server_ejections", "Times that failed requests ejected the server, or a model on it")
        self.retries = counter("server_retries", "Requests that failed on the server and were sent to another")
        self.hedges = counter(
            "server_hedges", "Requests that took unusually long, and were sent to a second server too"
        )
        self.hedge_wins = counter("hedge_wins", "Requests that the second server answered first", ())
        self.refused_retries = counter("refused_retries", "Requests not sent again, for lack of a budget", ())

    def add(self, server: FleetServer) -> None:
        """Publish the metrics of a server, read when they are collected."""
        self.accepting.labels(server.name).set_function(lambda: server.accepts_requests)
        self.requests.labels(server.name).set_function(lambda: server.requests)
        self.work.labels(server.name).set_function(lambda: server.work)
        self.slowness.labels(server.name).set_function(lambda: server.slowness)
        self.models.labels(server.name).set_function(lambda: len(server.versions))
        for metric in (self.ejections, self.retries, self.hedges):
            metric.labels(server.name)

    def remove(self, server: FleetServer) -> None:
        gauges = (self.accepting, self.requests, self.work, self.slowness, self.models)
        for metric in (*gauges, self.ejections, self.retries, self.hedges):
            metric.remove(server.name)
