"""Prometheus metrics of the gateway, with vLLM's and TEI's names where they mean the same.

Sources: https://docs.vllm.ai/en/latest/usage/metrics.html, https://huggingface.co/docs/text-embeddings-inference
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from builder.serving.gateway.facts import Facts

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
QUEUED = (0.001, 0.005, 0.01, 0.05, *WHOLE[1:])
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ENGINE = "0"  # vLLM's label of an engine replica; by default there is one


class Metrics:
    """Metrics in a registry of their own, so that a process may hold several gateways."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        model = ("model_name",)

        def histogram(name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, says, model, registry=self.registry, buckets=buckets)

        self.first_token = histogram("vllm:time_to_first_token_seconds", "Time to the first token", FIRST)
        self.between = histogram("vllm:inter_token_latency_seconds", "Time between two tokens of an answer", BETWEEN)
        self.queue = histogram("vllm:request_queue_time_seconds", "Time of a request in the model's queue", QUEUED)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "Time of a request that generates", WHOLE)
        self.short = histogram("te_request_duration", "Time of a request that does not generate, in seconds", SHORT)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Tokens of prompts", model, registry=self.registry)
        self.generated = Counter("vllm:generation_tokens", "Tokens generated", model, registry=self.registry)
        self.success = Counter(
            "vllm:request_success", "Answers, by why they ended", (*model, "finished_reason"), registry=self.registry
        )
        self.running = Gauge(
            "vllm:num_requests_running", "Requests that are being answered", (*model, "engine"), registry=self.registry
        )
        self.unanswered = Gauge(
            "build_repo_gateway_unanswered",
            "Requests to models that generate which have had no part of their answer yet",
            registry=self.registry,
        )
        version = ("model_name", "version")
        self.versions = Histogram(
            "build_repo_gateway_canary_seconds",
            "Time to the first answer of a version, while a canary runs",
            version,
            registry=self.registry,
            buckets=SHORT,
        )
        self.failures = Counter(
            "build_repo_gateway_canary_failures",
            "Requests that a version failed at, while a canary runs",
            version,
            registry=self.registry,
        )
        self.responses = Counter(
            "build_repo_gateway_responses",
            "Responses, by route and status",
            ("route", "status"),
            registry=self.registry,
        )

    def start(self, facts: Facts, model: str) -> None:
        """Count a request as running, now that its model is known."""
        facts.model = model
        self.running.labels(model, ENGINE).inc()

    def finish(self, facts: Facts) -> None:
        """Record a finished request."""
        if not facts.model:
            return
        self.running.labels(facts.model, ENGINE).dec()
        if facts.status >= 400:
            return
        if facts.first_token_s is None:
            self.short.labels(facts.model).observe(facts.elapsed_s)
        else:
            self.whole.labels(facts.model).observe(facts.elapsed_s)
            self.generated.labels(facts.model).inc(facts.completion_tokens)
        self.prompt_tokens.labels(facts.model).inc(facts.prompt_tokens)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' exposition format."""
        return generate_latest(self.registry)
