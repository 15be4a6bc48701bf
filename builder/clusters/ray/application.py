"""Build the application for Ray Serve: import_path `builder.clusters.ray.application:application`, args RayOptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import serve

from builder.clusters.ray.cluster import RayOptions, read_options
from builder.clusters.ray.replica import replica_class
from builder.clusters.ray.replicas import ReplicaBackend
from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.app import make_app
from builder.serving.gateway.auth import read_keys
from builder.serving.gateway.residency.repository_models import RepositoryModels
from builder.serving.gateway.settings import GatewaySettings

MAX_ONGOING_REQUESTS = 1024  # requests that a gateway handles at the same time
MAX_LOAD_FACTOR = 2  # times `busy`: a replica with so many takes no more, and its models are loaded elsewhere too
SHUTDOWN_TIMEOUT_S = 60.0  # time that running requests get when a replica is stopped


class RayGateway:
    """Application of the gateway over `replicas`, a ray.serve DeploymentHandle."""

    def __init__(self, options: RayOptions, replicas: Any) -> None:
        self.options, self.replicas = options, replicas

    def __serve_build_asgi_app__(self) -> AccessLog:
        file = self.options.keys_file
        settings = GatewaySettings("the replicas", keys=read_keys(Path(file) if file else None, ""))
        return make_app(settings, ReplicaBackend(self.replicas), models=RepositoryModels(Path(self.options.repository)))


def application(arguments: dict[str, Any]) -> Any:
    """Return the Serve application of `arguments`. Raises SpecError for arguments that are not those of RayOptions."""
    options = read_options(arguments)
    replicas = serve.deployment(
        replica_class(options.models_per_replica, serve.multiplexed),
        name="Triton",
        max_ongoing_requests=max(1, round(MAX_LOAD_FACTOR * options.busy)),
        graceful_shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.busy,
            "upscale_delay_s": options.grow_after_s,
            "downscale_delay_s": options.shrink_after_s,
        },
        ray_actor_options={"num_cpus": options.cores, **({"memory": options.memory} if options.memory else {})},
    )
    gateway = serve.deployment(
        serve.ingress()(RayGateway),
        name="Gateway",
        num_replicas=options.gateways,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
        ray_actor_options={"num_cpus": 0},  # mostly waiting
    )
    return gateway.bind(options, replicas.bind(options.repository))
