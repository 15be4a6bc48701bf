"""Keys of all that each stage of a build depends on, and the stages that the cache has. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from builder.building.keys import checkpoint_facts, key_of, own_files, surroundings
from builder.common.cache.entries import CacheEntries
from builder.common.cache.folder import cache_home, is_cache_disabled
from builder.options import BuildSpec

ORDER = ("export", "reference", "fuse", "verify", "select")
EXPORT = ("task", "max_length", "pooling", "beams", "max_answer")
REFERENCE = (*EXPORT, "target", "engine", "instances", "threads", "machine", "serving")
EXACT = (*REFERENCE, "level", "triton", "executor", "gpu", "truncate")
ANY_ENGINE = (*EXACT, "cache", "cache_gb", "slots")  # decide which engines can be chosen: some refuse these
# Options that stages before the layout do not read: the queue, and the front's settings in config.pbtxt.
LAID_OUT = ("name", "max_batch_size", "max_queue_delay_us")
SERVING_LAID_OUT = (
    "preferred_batch_sizes",
    "queue",
    "priority_levels",
    "default_priority",
    "front_instances",
    "warm_up",
    "response_cache",
    "rate_limiter",
    "rate_limiter_priority",
    "optimization_level",
    "prefill_tokens",
    "prefix_cache",
    "tool_parser",
    "batch_dimension",
    "metadata",
)
MEASURED_AS_SERVED = ("prefill_tokens",)  # also by the choice of an engine, which measures the emitted loop


def stage_keys(spec: BuildSpec) -> dict[str, str]:
    """Return the key of each stage of `spec`. Raises CheckpointError and SpecError."""
    options = spec.facts
    laid_out = [name for name in SERVING_LAID_OUT if spec.engine != "auto" or name not in MEASURED_AS_SERVED]
    options["serving"] = {name: v for name, v in options["serving"].items() if name not in laid_out}
    around, files = surroundings(), own_files(spec.samples, spec.graph)
    exported = {**checkpoint_facts(spec.source), "code": around["code"], "libraries": around["libraries"]}
    measured = {**exported, **around, "samples": files["samples"]}
    exact = {**measured, "options": _some(options, EXACT if spec.engine != "auto" else ANY_ENGINE), "fits": spec.fits}
    every = {name: value for name, value in options.items() if name not in LAID_OUT}
    facts = {
        "export": {**exported, "options": _some(options, EXPORT)},
        "reference": {**measured, "options": _some(options, REFERENCE)},
        "fuse": exact,
        "verify": {**exact, "precision is chosen": spec.precision == "auto"},  # then timed for longer
        "select": {**measured, "options": every, "graph": files["graph"]},
    }
    return {stage: key_of({"stage": stage, **facts[stage]}) for stage in facts}


def _some(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: options[name] for name in names}


def furthest_kept(spec: BuildSpec) -> str | None:
    """Return the last stage of `spec` that the cache has, so that a build begins after it; None if it has none.

    Raises CheckpointError and SpecError.
    """
    if is_cache_disabled():
        return None
    entries, keys = CacheEntries(cache_home()), stage_keys(spec)
    return next((stage for stage in reversed(ORDER) if entries.find(keys[stage]) is not None), None)
