"""Build the application for Ray Serve: import_path `builder.clusters.ray.application:application`, args RayOptions."""

from __future__ import annotations

from typing import Any

from ray import serve

from builder.clusters.ray.cluster import RayOptions, read_options
from builder.clusters.ray.gateway import GatewayReplica
from builder.clusters.ray.replica import DRAIN_TIMEOUT_S, TritonReplica
from builder.repository.config.arguments import EXIT_TIMEOUT_S

POLICY = "builder.clusters.ray.scaling:replicas_for_requests"
GATEWAY_STOP_TIMEOUT_S = 90.0  # it drains within 60 s


def application(arguments: dict[str, Any]) -> Any:
    """Return the Serve application of `arguments`. Raises SpecError for arguments that are not those of RayOptions."""
    options = read_options(arguments)
    tritons = _tritons(options)
    if not options.gateways:
        return tritons
    gateways = serve.deployment(
        GatewayReplica,
        name="Gateway",
        num_replicas=options.gateways,
        max_replicas_per_node=1,  # all listen on the same port
        graceful_shutdown_timeout_s=GATEWAY_STOP_TIMEOUT_S,
        ray_actor_options={"num_cpus": 0},  # mostly waiting
    )
    return gateways.bind(options, tritons)


def _tritons(options: RayOptions) -> Any:
    deployment = serve.deployment(
        TritonReplica,
        name="Triton",
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S + 2 * EXIT_TIMEOUT_S,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.busy,
            "upscale_delay_s": options.grow_after_s,
            "downscale_delay_s": options.shrink_after_s,
            "policy": {"policy_function": POLICY},
        },
        ray_actor_options={"num_cpus": options.cores, **({"memory": options.memory} if options.memory else {})},
    )
    return deployment.bind(options)
