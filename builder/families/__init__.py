"""One file a family of graphs: how its checkpoints are exported, verified, measured and laid out.

The folder is the registry: a task names its family, and `prepare` of that file makes what is published. What vLLM
or TensorRT-LLM runs is of the family of that name, whatever its task.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.checkpoint import CheckpointFiles
from builder.engines.cpu import cpu
from builder.engines.gpu import refuse_card
from builder.errors import SpecError
from builder.report import BuildReport, versions
from builder.repository.layout import RepositoryEntry
from builder.spec import BuildSpec

UNTIMED = "answers were judged on this machine's CPU; speed was not measured, for a GPU is to serve it"
GENERATING = ("fp32", "int8", "int8-weights", "int4-weights", "auto")  # precisions of models that generate
Stage = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Prepared:
    """Verified entries, the front model first, and what is known of them."""

    entries: Sequence[RepositoryEntry]
    report: BuildReport


def prepare(spec: BuildSpec, checkpoint: CheckpointFiles, folder: Path, stage: Stage) -> Prepared:
    """Make and verify the entries of `checkpoint` in `folder`. Raises BuilderError."""
    refuse_card(spec)
    name = str(spec.engine).replace("-", "_") if spec.runs_checkpoint else checkpoint.task.family
    family = importlib.import_module(f"{__name__}.{name}")
    prepared: Prepared = family.prepare(spec, checkpoint, folder, stage)
    return prepared


def built_from(spec: BuildSpec, checkpoint: CheckpointFiles) -> dict[str, Any]:
    """What every report begins with: what was asked, of which checkpoint, with which versions, where."""
    return {
        "name": spec.entry_name,
        "task": checkpoint.task.name,
        "triton": spec.triton,
        "target": spec.target,
        "checkpoint": checkpoint.identity(),
        "versions": versions(),
        "cpu": cpu(),
    }


def refuse_options(spec: BuildSpec, of_the_family: Mapping[str, bool], family: str) -> None:
    """No option is ignored: what means nothing to a model that generates is refused, by name. Raises SpecError.

    `of_the_family`: what this one refuses beyond that, and whether it was given.
    """
    given = {
        "--pooling": spec.pooling is not None,
        "--truncate": spec.truncate,
        "--instances (use --slots)": spec.instances > 1,
        "--max-queue-delay-us": spec.max_queue_delay_us > 0,
        f"--precision {spec.precision} (it has {', '.join(GENERATING)})": spec.target == "cpu"
        and spec.precision not in GENERATING,
        "--engine openvino (its cache would not stay in place)": spec.engine == "openvino",
        "--level": spec.level != "O2",
        "--prune": spec.prune is not None,
        "--graph": spec.graph is not None,
        **of_the_family,
        "serving.response_cache": spec.serving.response_cache,
        "serving.preferred_batch_sizes": bool(spec.serving.preferred_batch_sizes),
        "serving.priority_levels": spec.serving.priority_levels > 0,
    }
    unusable = [name for name, used in given.items() if used]
    if unusable:
        raise SpecError(f"{', '.join(unusable)}: not of {family}, which batches by itself")
