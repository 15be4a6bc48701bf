"""One file a family of graphs: how its checkpoints are exported, verified, measured and laid out.

The folder is the registry: a task names its family, whose `begin` gives the steps that builder/building/pipeline.py
takes in order. What vLLM or TensorRT-LLM runs is of the family of that name, whatever its task: its `hand_over` takes
the checkpoint as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from builder.building.families.whole_checkpoint import refuse_options
from builder.building.verify.runtimes import Replay
from builder.checkpoints.checkpoint import Checkpoint, CheckpointFiles
from builder.common.cpu import cpu
from builder.common.progress import Stage
from builder.options import BuildSpec, LayoutOptions
from builder.repository.config.entries import RepositoryEntry
from builder.repository.report.provenance import samples_file, versions
from builder.repository.report.record import BuildReport, EngineCheck
from builder.repository.verdict import Comparison, Unverified

MAPPED = (
    "fp32 was judged and timed with its weights left in their file, which takes less memory: it was not opened as it "
    "is served, and the served model is faster than these numbers"
)
GRAPHS = "the graphs in fp32, of which the variants are made,"
UNTIMED = "answers were judged on this machine's CPU; speed was not measured, for a GPU is to serve it"

Exported = TypeVar("Exported")
Reference = TypeVar("Reference")
Fused = TypeVar("Fused")
Exact = TypeVar("Exact")
Chosen = TypeVar("Chosen")


class Family(Protocol[Exported, Reference, Fused, Exact, Chosen]):
    """Stages of a build for one checkpoint, which exchange frozen dataclasses.

    Every step raises BuilderError.
    """

    def export(self) -> Exported:
        """Return the checkpoint as ONNX, with its attention fused where that is possible."""
        ...

    def reference(self, exported: Exported) -> Reference:
        """Return PyTorch's answers to the samples and its latency.

        Runs before any engine is open, since the threads of an open engine would wait.
        """
        ...

    def fuse(self, exported: Exported) -> Fused:
        """Return the export with its operators fused as far as every value stays the same."""
        ...

    def verify(self, fused: Fused, reference: Reference) -> Exact:
        """Return the fused graph after checking that it answers as PyTorch does."""
        ...

    def select(self, exact: Exact, stage: Stage) -> Chosen:
        """Return the variant to serve, with all that were measured for it."""
        ...

    def lasts(self, chosen: Chosen) -> bool:
        """Return True if a later build of the same may reuse `chosen`; False if memory was short for a part of it."""
        ...

    def replay(self, chosen: Chosen) -> Replay:
        """Return calls for the serving engine to repeat, where its version differs from this build's."""
        ...

    def lay_out(self, chosen: Chosen, stage: Stage) -> Sequence[RepositoryEntry]:
        """Return the entries of the repository, the front model first."""
        ...

    def comparison(self, chosen: Chosen) -> Comparison:
        """Return all comparisons with PyTorch, of the fused graph and of the variant that is served."""
        ...

    def report(
        self, chosen: Chosen, entries: Sequence[RepositoryEntry], checks: tuple[EngineCheck, ...]
    ) -> BuildReport:
        """Return the report of everything that was decided and measured."""
        ...


def begin(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Family[Any, Any, Any, Any, Any]:
    """Return the steps for `checkpoint`, whose graphs are created in `folder`. Raises SpecError and CheckpointError."""
    family: Family[Any, Any, Any, Any, Any] = _module(checkpoint.task.family).begin(spec, checkpoint, folder, stage)
    return family


def hand_over(spec: BuildSpec, checkpoint: CheckpointFiles) -> Unverified:
    """Return the entry of an engine that runs the whole checkpoint. Raises SpecError."""
    section = str(spec.engine).replace("-", "_")  # of models.yaml
    engine, options = _module(section), spec.layout
    refuse_options(spec, checkpoint, engine.DTYPES)
    about = built_from(options, spec.samples, checkpoint)
    outcome: Unverified = engine.hand_over(options, getattr(spec, section), spec.whole_checkpoint, checkpoint, about)
    return outcome


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


def code_not_run(checkpoint: CheckpointFiles) -> str | None:
    """Return a remark if the checkpoint's model is code of its own and transformers has a class of that type too."""
    names = getattr(checkpoint.config, "auto_map", None) or {}
    code = names.get(checkpoint.task.auto_class().__name__) if isinstance(names, dict) else None
    if code is None:
        return None
    return (
        f"config.json names code of the checkpoint ({code}), which is not run: answers are those of transformers' own "
        f"{checkpoint.config.model_type}, and may not be what its authors show (its attention may be causal here, say)"
    )


def built_from(options: LayoutOptions, samples: Path | None, checkpoint: CheckpointFiles) -> dict[str, Any]:
    """Return what every report begins with: the request, the checkpoint, the versions and the machine.

    `samples`: the user's own.
    """
    return {
        "name": options.name,
        "task": checkpoint.task.name,
        "triton": options.triton,
        "target": options.target,
        "checkpoint": {**checkpoint.identity(), **checkpoint.card},
        "versions": versions(),
        "cpu": cpu(),
        "samples_file": samples_file(samples),
    }
