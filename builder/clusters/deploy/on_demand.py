"""Pods of models on demand: Tritons that start without models, and gateways in front of all of them.

A gateway loads a model on the Triton that it chooses, and sends its requests there. So a new Triton gets requests for
what it has loaded alone. One that stops leaves the name by which gateways find it as soon as it is told to, and goes on
answering until all of them have looked the name up again.
"""

from __future__ import annotations

from dataclasses import replace

from builder.clusters.deploy.deployment import Deployment, LoadingOnDemand
from builder.clusters.deploy.pod import (
    GATEWAY_DRAIN_S,
    PRESTOP_SLEEP_S,
    PULLED_MODELS,
    Document,
    gateway,
    pod_settings,
    pull_volumes,
    pulls,
    triton,
    volumes,
)
from builder.repository.config.arguments import EXIT_TIMEOUT_S, GRPC_PORT, MODELS_FOLDER

GATEWAYS = 2  # so that one may stop
# A resolver may keep a name for 30 s (NodeLocal DNSCache; CoreDNS for 5), and a gateway looks it up every 5.
NOTICED_S = 40
STOPPING_S = NOTICED_S + 20  # of a Triton that still answers


def of_tritons(deployment: Deployment) -> Deployment:
    """Return the deployment with the name of its Tritons' objects."""
    return replace(deployment, name=f"{deployment.name}-tritons")


def triton_pod(deployment: Deployment) -> Document:
    """Return the spec of a pod with a Triton alone. Raises SpecError if the deployment names no registry."""
    container = {**triton(deployment), "lifecycle": {"preStop": {"sleep": {"seconds": STOPPING_S}}}}
    return {
        **pod_settings(of_tritons(deployment), STOPPING_S + EXIT_TIMEOUT_S),
        "initContainers": pulls(deployment),
        "containers": [container],
        "volumes": volumes(deployment),
    }


def gateway_pod(deployment: Deployment) -> Document:
    """Return the spec of a pod with a gateway over all Tritons, and with what it reads of the models."""
    loading = deployment.on_demand
    assert loading is not None
    container = gateway(deployment, f"--url=dns:///{of_tritons(deployment).name}:{GRPC_PORT}", *_options(loading))
    container["volumeMounts"].append(PULLED_MODELS)
    return {
        **pod_settings(deployment, PRESTOP_SLEEP_S + GATEWAY_DRAIN_S),
        "initContainers": pulls(deployment, with_weights=False),
        "containers": [container],
        "volumes": pull_volumes(deployment, with_weights=False),
    }


def _options(loading: LoadingOnDemand) -> list[str]:
    pins = [f"--pin={name}" for name in loading.pins]
    return ["--load-on-demand", f"--repository={MODELS_FOLDER}", f"--memory-gb={loading.memory / 1e9}", *pins]
