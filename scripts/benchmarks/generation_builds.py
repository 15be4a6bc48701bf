"""Builds of `scripts/bench generation`: the options that one of `--ours` names, and its repository."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builder.building.pipeline import build
from builder.building.variants.encoder import measurements_of
from builder.options import make_spec
from scripts.benchmarks.generation_work import Cell
from scripts.benchmarks.generators import first_layers

CONTEXT_SLOTS, CONTEXT_LENGTH = 16, 8448  # of a build for --contexts, at least: all of them are runs of one build


def own_side(cells: Mapping[str, Cell], kind: str) -> tuple[str, dict[str, Any]]:
    """Return the title and the options of the build of one of `--ours`."""
    engine, _, rest = kind.rpartition(":")
    rest, _, layers = rest.partition("+")
    weights, _, cache = rest.partition("/")
    precision, _, block = weights.partition("@")
    title = (
        f"ours {'OpenVINO ' * bool(engine)}{precision}"
        + (f", blocks of {block}" if block else "")
        + (f", {cache} cache" if cache else "")
        + (f", draft of {layers} layers" if layers else "")
    )
    by_context = any(cell.context for cell in cells.values())
    return title, {
        "engine": engine or None,
        "precision": precision,
        "cache": cache or "fp32",
        "block_size": int(block or 32),
        "max_length": max([*(cell.longest for cell in cells.values()), CONTEXT_LENGTH * by_context]),
        "slots": max([*(cell.clients for cell in cells.values()), CONTEXT_SLOTS * by_context]),
        "draft": layers or None,
        "quality": 0.0,  # random weights have none to lose
        "perplexity": 1e9,
    }


def built(checkpoint: Path, folder: Path, options: dict[str, Any]) -> Path:
    """Return the repository of a side, built and verified at its first use."""
    if options["draft"]:
        options = {**options, "draft": str(first_layers(checkpoint, int(options["draft"])))}
    repository = folder / f"ours-{_key(options)}"
    if not repository.exists():
        build(make_spec(model=str(checkpoint), name="model", output=repository, **options))
    return repository


def _key(options: dict[str, Any]) -> str:
    """Return the name of a cached repository: it differs for other options or another version of this project."""
    path = measurements_of(options).path
    assert path is not None
    return path.stem[:12]
