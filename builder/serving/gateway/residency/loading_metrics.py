"""Record the Prometheus metrics of loading on demand."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)


class LoadingMetrics:
    """Metrics of all models together, since thousands of series per metric would burden the collector."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, description: str) -> Counter:
            return Counter(f"build_repo_gateway_{name}", description, registry=registry)

        def gauge(name: str, description: str) -> Gauge:
            return Gauge(f"build_repo_gateway_{name}", description, registry=registry)

        self.loads = counter("model_loads", "Models loaded for a request")
        self.failures = counter("model_load_failures", "Models that did not load")
        self.deaths = counter("model_deaths", "Models that were loaded and did not answer any more")
        self.evictions = counter("model_evictions", "Models unloaded to free memory for others")
        self.waits = counter("cold_requests", "Requests that waited for their model to be loaded")
        self.load_s = Histogram(
            "build_repo_gateway_model_load_seconds",
            "Time to load a model, including the wait for memory",
            registry=registry,
            buckets=SECONDS,
        )
        self.models = gauge("resident_models", "Models that are loaded")
        self.bytes = gauge("resident_bytes", "Memory of the server and its models, as far as it is known")
        self.budget = gauge("memory_budget_bytes", "Limit of the memory of the server and its models")
