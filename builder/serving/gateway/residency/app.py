"""The gateway with models loaded on demand."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from builder.serving.gateway.app import make_app
from builder.serving.gateway.journal import Journal
from builder.serving.gateway.metrics import Metrics
from builder.serving.gateway.residency.backend import OnDemand
from builder.serving.gateway.residency.lifecycle import Lifecycle
from builder.serving.gateway.residency.loading import TritonLoading
from builder.serving.gateway.residency.measures import Measures
from builder.serving.gateway.residency.offered import Offered
from builder.serving.gateway.residency.processes import Processes
from builder.serving.gateway.residency.residents import Residents
from builder.serving.gateway.settings import OnDemand as Options
from builder.serving.gateway.settings import Settings


def make_on_demand(
    settings: Settings, options: Options, triton: Any, log: TextIO | None = sys.stdout
) -> tuple[Journal, OnDemand]:
    """Return the application over `triton` and the backend whose `watch` has to run.

    `triton`: a gateway.triton.Triton or an object with its methods.
    """
    metrics, offered, processes = Metrics(), Offered(options.repository), Processes(settings.triton)
    loading = TritonLoading(triton, offered, settings.triton, processes, options.verify_key)
    measures = Measures(metrics.registry)
    lifecycle = Lifecycle(offered, loading, measures, options.memory, options.pins)
    residents = Residents(lifecycle, settings.max_waiting)
    backend = OnDemand(triton, residents, processes)
    return make_app(settings, backend, log, models=offered, metrics=metrics), backend
