"""Build the gateway's application over a fleet."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.app import make_app
from builder.serving.gateway.fleet.backend import FleetBackend
from builder.serving.gateway.fleet.catalogue import FleetCatalogue
from builder.serving.gateway.fleet.hedging import AnswerTimes
from builder.serving.gateway.fleet.members import FleetMembers
from builder.serving.gateway.fleet.metrics import FleetMetrics
from builder.serving.gateway.fleet.on_demand import OnDemandFleetBackend
from builder.serving.gateway.fleet.on_demand_server import on_demand_servers
from builder.serving.gateway.fleet.targets import parse_targets
from builder.serving.gateway.limits import RateLimits
from builder.serving.gateway.metrics import LoadingMetrics, Metrics
from builder.serving.gateway.residency.repository_models import RepositoryModels
from builder.serving.gateway.settings import GatewaySettings


@asynccontextmanager
async def fleet_app(settings: GatewaySettings, limits: RateLimits) -> AsyncIterator[AccessLog]:
    """Yield the application over the Tritons that `settings.triton` names, which it follows meanwhile."""
    metrics, targets = Metrics(), parse_targets(settings.triton)
    fleet_metrics = FleetMetrics(metrics.registry)
    if settings.on_demand is None:
        members = FleetMembers(targets, fleet_metrics)
        app = make_app(
            settings, FleetBackend(members), sys.stdout, models=FleetCatalogue(members), metrics=metrics, limits=limits
        )
        watches = [members.watch()]
    else:
        models = RepositoryModels(settings.on_demand.repository)
        connect = on_demand_servers(models, settings.on_demand, LoadingMetrics(metrics.registry), settings.max_waiting)
        members = FleetMembers(targets, fleet_metrics, connect=connect)
        backend = OnDemandFleetBackend(members, models)
        app = make_app(settings, backend, sys.stdout, models=models, metrics=metrics, limits=limits)
        watches = [members.watch(), backend.watch()]
    if settings.hedge_percentile is not None:
        members.answer_times = AnswerTimes(settings.hedge_percentile)
    await members.update()
    watching = [asyncio.ensure_future(watch) for watch in watches]
    try:
        yield app
    finally:
        for task in watching:
            task.cancel()
        await members.close()
