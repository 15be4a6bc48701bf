"""Keys of all that a build and each of its stages depend on: the checkpoint's files, options, code and machine.

Needs no torch: to find out that nothing changed takes milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from builder.checkpoints.untrusted import refuse_files
from builder.common.cache.entries import CacheEntries
from builder.common.cache.folder import cache_home, is_cache_disabled
from builder.common.data_folders import data_digest
from builder.common.distribution import PACKAGE
from builder.common.errors import CheckpointError, SpecError
from builder.common.hashing import digest_of
from builder.common.hub_cache import current_snapshot
from builder.common.machine import available_cores, cpu, total_memory
from builder.options import BuildSpec, Source
from builder.repository.report.record import PACKAGES, package_versions, samples_file

TEMPLATES = (PACKAGE.parent / "templates", PACKAGE / "templates")  # in a checkout, in an installed wheel
LIBRARIES = (*PACKAGES, "onnxscript", "onnx-ir", "safetensors", "sentencepiece")
# Files beside a checkpoint that the build does not read: weights of other frameworks.
UNREAD = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".ot", ".tflite", ".gguf", ".onnx"})

ORDER = ("export", "reference", "fuse", "verify", "select")
OF_ADAPTERS = ("adapters", "adapter_rank", "adapter_layers", "adapter_labels")
EXPORT = ("task", "target", "max_length", "pooling", "late_chunking", "beams", "max_answer", *OF_ADAPTERS)
REFERENCE = (*EXPORT, "engine", "instances", "threads", "machine", "serving")
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
# also by the choice of an engine, which measures the emitted loop, and of slots or blocks on a GPU
MEASURED_AS_SERVED = ("prefill_tokens",)


def build_key(spec: BuildSpec) -> str:
    """Return the key of the whole build of `spec`: 64 hexadecimal digits, equal for builds with the same result.

    The folder that it publishes to is not part of it. Raises CheckpointError if there is no such checkpoint, SpecError
    for --samples or --graph that cannot be read.
    """
    return key_of(
        {
            "options": spec.facts,
            "files": own_files(spec.samples, spec.graph, spec.data),
            "draft": None if spec.draft_source is None else checkpoint_facts(spec.draft_source),
            **surroundings(),
            **checkpoint_facts(spec.source),
        }
    )


def stage_keys(spec: BuildSpec) -> dict[str, str]:
    """Return the key of each stage of `spec`. Raises CheckpointError and SpecError."""
    options = spec.facts
    is_measured = spec.engine == "auto" or spec.target != "cpu"
    laid_out = [name for name in SERVING_LAID_OUT if not (is_measured and name in MEASURED_AS_SERVED)]
    options["serving"] = {name: v for name, v in options["serving"].items() if name not in laid_out}
    around, files = surroundings(), own_files(spec.samples, spec.graph, spec.data)
    exported = {**checkpoint_facts(spec.source), "code": around["code"], "libraries": around["libraries"]}
    exported["draft"] = _exported_for(spec)
    measured = {**exported, **around, "samples": files["samples"]}
    exact = {**measured, "options": _some(options, EXACT if spec.engine != "auto" else ANY_ENGINE), "fits": spec.fits}
    every = {name: value for name, value in options.items() if name not in LAID_OUT}
    facts = {
        "export": {**exported, "options": _some(options, EXPORT)},
        "reference": {**measured, "options": _some(options, REFERENCE)},
        "fuse": exact,
        "verify": {**exact, "precision is chosen": spec.precision == "auto"},  # then timed for longer
        "select": {**measured, "options": every, "graph": files["graph"], "data": files["data"]},
    }
    return {stage: key_of({"stage": stage, **facts[stage]}) for stage in facts}


def _exported_for(spec: BuildSpec) -> dict[str, Any] | None:
    """Return the facts of a draft that reads hidden states, which the graph of its target returns; None for others."""
    draft = spec.draft_source
    if draft is None:
        return None
    from builder.checkpoints.drafts import draft_format  # loads huggingface_hub

    return None if draft_format(draft, spec.source) is None else checkpoint_facts(draft)


def _some(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: options[name] for name in names}


def last_cached_stage(spec: BuildSpec) -> str | None:
    """Return the last stage of `spec` that the cache has, so that a build begins after it; None if it has none.

    Raises CheckpointError and SpecError.
    """
    if is_cache_disabled():
        return None
    entries, keys = CacheEntries(cache_home()), stage_keys(spec)
    return next((stage for stage in reversed(ORDER) if entries.find(keys[stage]) is not None), None)


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the hash of `facts` (JSON), in hexadecimal."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def own_files(samples: Path | None, graph: Path | None, data: Path | None = None) -> dict[str, Any]:
    """Return the digests of the user's own samples, of the files of the graph, and of the data. Raises SpecError."""
    digests: dict[str, str] = {}
    try:
        if graph is not None:
            from builder.building.own_graph import graph_digests  # loads onnx

            digests = graph_digests(graph)
        labelled = None if data is None else data_digest(data)
        return {"samples": samples_file(samples), "graph": digests, "data": labelled}
    except OSError as error:
        raise SpecError(f"{error.filename} cannot be read ({error.strerror})") from error


def surroundings() -> dict[str, Any]:
    """Return the facts of this package, the libraries, and the machine that measures."""
    memory = total_memory() >> 30
    return {"code": code(), "libraries": dict(libraries()), "machine": [cpu(), available_cores(), memory]}


@cache
def code() -> str:
    """Return the hash of this package as it is installed."""
    digest = hashlib.sha256()
    for folder in (PACKAGE, *TEMPLATES):
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            digest.update(f"{file.relative_to(folder)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def libraries() -> tuple[tuple[str, str], ...]:
    """Return the libraries that make and judge graphs, and Python, with their versions."""
    python = ".".join(map(str, sys.version_info[:3]))
    return ("python", python), *package_versions(LIBRARIES).items()


def checkpoint_facts(source: Source) -> dict[str, Any]:
    """Return the commit of a Hub id, or all readable files of a folder. Raises CheckpointError and SpecError."""
    folder = Path(source.model).expanduser()
    if not folder.is_dir():
        from builder.checkpoints.fetch import fetch  # loads huggingface_hub

        _, commit = fetch(source.model, source.revision, weights=False)
        return {"source": source.model.rstrip("/"), "commit": commit}
    snapshot = current_snapshot(folder)
    refuse_files(snapshot, source.model)  # a FIFO would block, and a link to a device never end
    try:
        return {"source": folder.resolve().name, "contents": dict(_contents(snapshot))}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror})") from error


def _contents(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the files that a build may read with their digests; the weights of a folder, which are large, share one."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
        inside = [file for file in files if file.suffix not in UNREAD and file.is_file()]
        weights = [file for file in inside if file.suffix == ".safetensors"]
        yield from ((str(file.relative_to(folder)), digest_of([file])) for file in inside if file not in weights)
        if weights:
            sizes = " ".join(f"{file.relative_to(folder)} {file.stat().st_size}" for file in weights)
            yield sizes, digest_of(weights)
