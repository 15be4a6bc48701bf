"""Describe the queue of an encoder in a plan: its limits, and which component enforces them."""

from __future__ import annotations

from builder.options import BuildSpec
from builder.repository.layout.encoder import queue_limits
from builder.serving.plan.lines import number


def queue_note(options: BuildSpec) -> str:
    """Return the limits that a build with these options would have, as a sentence."""
    limits, serving = queue_limits(options), options.serving
    if not limits.size and not limits.timeout_us:
        return "nothing limits how many requests wait, nor for how long (serving.queue)"
    many = f"at most {limits.size} requests" if limits.size else "any number of requests"
    many += " of each priority" if serving.priority_levels else ""
    late = ", and then behind all others" if serving.queue.timeout_action == "DELAY" else ""
    time = f"for at most {number(limits.timeout_us / 1e6)} s{late}" if limits.timeout_us else "for any time"
    keeper = "the front" if limits.by_front else "Triton's batcher, which pauses where it has limits,"
    return f"{keeper} lets {many} wait, each {time} (serving.queue)"
