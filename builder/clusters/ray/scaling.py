"""Decide how many replicas there should be. Ray adds the limits and the delays, and runs this in its controller."""

from __future__ import annotations

from typing import Any

REQUESTS = "requests"  # of a replica's Triton, in what it reports to Ray


def replicas_for_requests(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas so that each has the target of running requests, and no state of its own.

    `context`: ray.serve.config.AutoscalingContext.
    """
    requests = sum(context.aggregated_metrics.get(REQUESTS, {}).values())
    return requests / context.config.get_target_ongoing_requests(), {}
