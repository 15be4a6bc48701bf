"""Build the gateway with models loaded on demand."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.app import make_app
from builder.serving.gateway.metrics import Metrics
from builder.serving.gateway.residency.backend import OnDemandBackend
from builder.serving.gateway.residency.lifecycle import Lifecycle
from builder.serving.gateway.residency.loader import TritonLoader
from builder.serving.gateway.residency.loading_metrics import LoadingMetrics
from builder.serving.gateway.residency.processes import TritonProcesses
from builder.serving.gateway.residency.repository_models import RepositoryModels
from builder.serving.gateway.residency.resident_models import ResidentModels
from builder.serving.gateway.settings import GatewaySettings, OnDemandSettings


def make_on_demand_app(
    settings: GatewaySettings, options: OnDemandSettings, triton: Any, log: TextIO | None = sys.stdout
) -> tuple[AccessLog, OnDemandBackend]:
    """Return the application over `triton` and the backend, whose `watch` has to run.

    `triton`: a gateway.triton.Triton or an object with its methods.
    """
    metrics, models, processes = Metrics(), RepositoryModels(options.repository), TritonProcesses(settings.triton)
    loader = TritonLoader(triton, models, settings.triton, processes, options.verify_key)
    lifecycle = Lifecycle(models, loader, LoadingMetrics(metrics.registry), options.memory, options.pins)
    backend = OnDemandBackend(triton, ResidentModels(lifecycle, settings.max_waiting), processes)
    return make_app(settings, backend, log, models=models, metrics=metrics), backend
