"""Record the gateway's Prometheus metrics, with vLLM's and TEI's names where they mean the same.

Sources: https://docs.vllm.ai/en/latest/usage/metrics.html, https://huggingface.co/docs/text-embeddings-inference and,
for the cache usage, the Gateway API's inference extension, docs/proposals/003-model-server-protocol
"""

from __future__ import annotations

import re
import urllib.request
from http.client import HTTPException
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from builder.serving.gateway.context import RequestRecord

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
QUEUED = (0.001, 0.005, 0.01, 0.05, *WHOLE[1:])
SHORT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
Labels = tuple[str, ...]
ENGINE = "0"  # vLLM's label of an engine replica; by default there is one
LOAD_BUCKETS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
CACHE_USAGE_HELP = "Share of the cache that running requests have, of the model that has the fullest, 0 to 1"
CACHE_USAGE = "vllm:kv_cache_usage_perc"
TRITON_CACHE_USAGE = re.compile(r"^build_repo_cache_usage\{[^}]*\} (\S+)$", re.MULTILINE)
CACHE_USAGE_TIMEOUT_S = 1.0


class Metrics:
    """Metrics in a registry of their own, so that a process may hold several gateways."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        model, version = ("model_name",), ("model_name", "version")

        def histogram(name: str, description: str, buckets: tuple[float, ...], labels: Labels = model) -> Histogram:
            return Histogram(name, description, labels, registry=self.registry, buckets=buckets)

        def counter(name: str, description: str, labels: Labels = model) -> Counter:
            return Counter(name, description, labels, registry=self.registry)

        def gauge(name: str, description: str, labels: Labels = ()) -> Gauge:
            return Gauge(name, description, labels, registry=self.registry)

        self.first_token = histogram("vllm:time_to_first_token_seconds", "Time to the first token", FIRST)
        self.between = histogram("vllm:inter_token_latency_seconds", "Time between two tokens of an answer", BETWEEN)
        self.queue = histogram("vllm:request_queue_time_seconds", "Time of a request in the model's queue", QUEUED)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "Time of a request that generates", WHOLE)
        self.short = histogram(
            "te_request_duration", "Time of a request that does not generate, in seconds", SHORT_BUCKETS_S
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated")
        self.success = counter("vllm:request_success", "Answers, by why they ended", (*model, "finished_reason"))
        self.running = gauge("vllm:num_requests_running", "Requests that are being answered", (*model, "engine"))
        self.unanswered = gauge(
            "build_repo_gateway_unanswered", "Requests to models that generate whose answer has not started"
        )
        self.versions = histogram(
            "build_repo_gateway_canary_seconds",
            "Time to a version's first answer during a canary",
            SHORT_BUCKETS_S,
            version,
        )
        self.failures = counter(
            "build_repo_gateway_canary_failures", "Requests that a version failed during a canary", version
        )
        self.responses = counter("build_repo_gateway_responses", "Responses, by route and status", ("route", "status"))

    def start(self, record: RequestRecord, model: str) -> None:
        """Count a request as running, now that its model is known."""
        record.model = model
        self.running.labels(model, ENGINE).inc()

    def finish(self, record: RequestRecord) -> None:
        """Record a finished request."""
        if not record.model:
            return
        self.running.labels(record.model, ENGINE).dec()
        if record.status >= 400:
            return
        if record.first_token_s is None:
            self.short.labels(record.model).observe(record.elapsed_s)
        else:
            self.whole.labels(record.model).observe(record.elapsed_s)
            self.generation_tokens.labels(record.model).inc(record.completion_tokens)
        self.prompt_tokens.labels(record.model).inc(record.prompt_tokens)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' exposition format."""
        return generate_latest(self.registry)


class Residency(Protocol):
    """Models that one server has loaded: their number, and the bytes that they and the server use and may use."""

    @property
    def loaded(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def limit(self) -> int: ...


class LoadingMetrics:
    """Metrics of all models together, since thousands of series per metric would burden the collector.

    The gauges are sums over `residencies`, one for each server.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.residencies: list[Residency] = []

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
            buckets=LOAD_BUCKETS,
        )
        self.load_wait_s = counter(
            "model_load_wait_seconds", "Seconds of these that loads waited for memory, and for other loads to end"
        )
        models = gauge("resident_models", "Models that are loaded")
        used = gauge("resident_bytes", "Memory of the server and its models, as far as it is known")
        limit = gauge("memory_budget_bytes", "Limit of the memory of the server and its models")
        models.set_function(lambda: sum(residency.loaded for residency in self.residencies))
        used.set_function(lambda: sum(residency.used for residency in self.residencies))
        limit.set_function(lambda: sum(residency.limit for residency in self.residencies))


def cache_usage(url: str) -> bytes:
    """Return a gauge in Prometheus' format, from the metrics that Triton publishes at `url`.

    Returns nothing if they cannot be read, or no model has a cache; an absent gauge means that the usage is unknown.
    """
    try:
        with urllib.request.urlopen(url, timeout=CACHE_USAGE_TIMEOUT_S) as response:
            shares = [float(value) for value in TRITON_CACHE_USAGE.findall(response.read().decode())]
    except (OSError, HTTPException, ValueError):
        return b""
    if not shares:
        return b""
    head = f"# HELP {CACHE_USAGE} {CACHE_USAGE_HELP}\n# TYPE {CACHE_USAGE} gauge\n"
    return f"{head}{CACHE_USAGE} {max(shares)}\n".encode()
