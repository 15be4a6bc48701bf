"""What the families that generate share: how their decode loop is set up.

Knows the specification and the contract with the emitted loop; knows no graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

from builder.export.decoder import CacheShape
from builder.runtime.contract import LayerShape, Session
from builder.spec import BuildSpec

QUEUE = 256  # sequences that may wait, where the user does not say


def cpu_session(spec: BuildSpec) -> Session:
    """How the emitted loop opens its graphs on the CPU."""
    spinning = {"session.intra_op.allow_spinning": "1" if spec.serving.spinning else "0"}
    return Session(threads=spec.loop_threads, entries=spinning)


def layer_shapes(caches: Sequence[CacheShape]) -> list[LayerShape]:
    """Each layer's keys and values, as serving.json states them."""
    return [LayerShape(cache.heads, cache.size) for cache in caches]
