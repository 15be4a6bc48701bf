"""Build the gateway's application over a fleet."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.app import make_app
from builder.serving.gateway.fleet.backend import FleetBackend
from builder.serving.gateway.fleet.catalogue import FleetCatalogue
from builder.serving.gateway.fleet.members import FleetMembers
from builder.serving.gateway.fleet.metrics import FleetMetrics
from builder.serving.gateway.fleet.targets import parse_targets
from builder.serving.gateway.metrics import Metrics
from builder.serving.gateway.settings import GatewaySettings


@asynccontextmanager
async def fleet_app(settings: GatewaySettings, log: TextIO | None = sys.stdout) -> AsyncIterator[AccessLog]:
    """Yield the application over the Tritons that `settings.triton` names, which it follows meanwhile."""
    metrics = Metrics()
    members = FleetMembers(parse_targets(settings.triton), FleetMetrics(metrics.registry))
    await members.update()
    watching = asyncio.ensure_future(members.watch())
    try:
        yield make_app(settings, FleetBackend(members), log, models=FleetCatalogue(members), metrics=metrics)
    finally:
        watching.cancel()
        await members.close()
