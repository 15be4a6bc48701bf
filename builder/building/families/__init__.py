"""Families of graphs, one module each: how their checkpoints are exported, verified, measured and laid out.

The folder is the registry: a checkpoint names its family, its task's in general, and `begin` in the family's module
returns its stages. vLLM and TensorRT-LLM run the checkpoint as it is, whatever its task: whole_checkpoint.py returns
their entry.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

from builder.building.verify.runtimes import Replay
from builder.checkpoints.checkpoint import Checkpoint, CheckpointFiles
from builder.common.machine import cpu
from builder.common.progress import Stage
from builder.engines import refuse_to_choose
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.repository.config.entries import RepositoryEntry
from builder.repository.report.record import BuildReport, package_versions, samples_file
from builder.repository.verdict import Comparison

GRAPHS = "the graphs in fp32, of which the variants are made,"
UNTIMED = "answers were judged on this machine's CPU; speed was not measured, for a GPU is to serve it"

MAPPED = (
    "fp32 was judged and timed with its weights left in their file, which takes less memory: it was not opened as it "
    "is served, and the served model is faster than these numbers"
)


class Choice(Protocol):
    """Variant that a family selected."""

    @property
    def is_cacheable(self) -> bool:
        """True if a later build may reuse the choice; False if memory was too short to judge a part of it."""


@dataclass(frozen=True)
class Result:
    """Entries of a verified model, the front first; all comparisons with PyTorch; everything decided and measured."""

    entries: tuple[RepositoryEntry, ...]
    comparison: Comparison
    report: BuildReport


@dataclass(frozen=True)
class Fp32Judging:
    """Decide how a build opens the fp32 graph to judge it: as it is served, or with its weights left in their file.

    The second takes less memory and is slower. It is for a large graph that is not served itself, or for which this
    machine lacks memory now; a later build that serves the graph and has the memory judges it again.

    `is_served`: fp32 may be served; `chooses_by_time`: its time as served is compared with other variants'.

    `leaves_in_file`: returns True for a graph that an engine opens over its file, given whether it is served.
    """

    is_served: bool
    chooses_by_time: bool
    leaves_in_file: Callable[[Graph, bool], bool]

    def is_mapped(self, graph: Graph) -> bool:
        """Return True if `graph` is judged with its weights left in their file.

        Raises BuilderError if it is to be chosen by its time as served.
        """
        mapped = self.leaves_in_file(graph, self.is_served)
        if mapped and self.is_served and self.chooses_by_time:
            refuse_to_choose(graph.size)
        return mapped

    def is_outdated(self, was_mapped: bool, graph: Graph) -> bool:
        """Return True if an earlier build judged `graph` from its file, but this one can open it as served."""
        return was_mapped and self.is_served and not self.is_mapped(graph)

    def is_final(self, was_mapped: bool) -> bool:
        """Return True if a later build with more memory would judge the graph in the same way."""
        return not (was_mapped and self.is_served)


class Family(Protocol):
    """Stages of the build of one checkpoint; builder/building/pipeline.py runs them in this order.

    Each takes the results of earlier ones: frozen dataclasses of the family, which the cache can store. Every stage
    raises BuilderError.
    """

    def export(self) -> Any:
        """Return the checkpoint as ONNX, with its attention fused if possible."""

    def reference(self, exported: Any) -> Any:
        """Return PyTorch's answers to the samples and its latency.

        Runs before any engine is open, since the threads of an open engine would wait.
        """

    def fuse(self, exported: Any) -> Any:
        """Return the export with operators fused by rewrites that leave every value the same."""

    def verify(self, fused: Any, reference: Any) -> Any:
        """Return the fused graph after checking that it answers as PyTorch does."""

    def select(self, exact: Any, stage: Stage) -> Choice:
        """Return the variant to serve, and every variant that was measured."""

    def replay(self, choice: Any) -> Replay:
        """Return calls for the serving engine to repeat, where its version differs from this build's."""

    def result(self, choice: Any, stage: Stage) -> Result:
        """Lay out the choice for the repository, compare it with PyTorch and report it."""


@dataclass(frozen=True)
class BuiltModel:
    """Choice of a family, ready to be laid out. `reused`: the stages that an earlier build ran, for the report."""

    family: Family
    choice: Choice
    reused: Mapping[str, dict[str, str]]

    def replay(self) -> Replay:
        return self.family.replay(self.choice)

    def result(self, stage: Stage) -> Result:
        result = self.family.result(self.choice, stage)
        return replace(result, report=replace(result.report, kept=dict(self.reused)))


def begin(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Family:
    """Return the family of `checkpoint`, whose graphs are created in `folder`. Raises SpecError and CheckpointError."""
    module = importlib.import_module(f"{__name__}.{checkpoint.family}")
    family: Family = module.begin(spec, checkpoint, folder, stage)
    return family


def given_options(spec: BuildSpec, *names: str) -> list[str]:
    """Return those of `names` that have another value than the default in `spec`.

    A name is a flag or a path in models.yaml, with or without a hint after it: "--instances (use --slots)".
    """
    defaults = BuildSpec.model_construct(model=spec.model)
    given = []
    for name in names:
        path = name.split(" ")[0].removeprefix("--").replace("-", "_").split(".")
        if reduce(getattr, path, spec) != reduce(getattr, path, defaults):
            given.append(name)
    return given


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


def built_from(spec: BuildSpec, checkpoint: CheckpointFiles) -> dict[str, Any]:
    """Return the fields that every report begins with: the request, the checkpoint, the versions and the machine."""
    pooling = {} if spec.pooling is None else {"pooling": spec.pooling}
    return {
        "name": spec.entry_name,
        "task": checkpoint.task.name,
        "triton": spec.triton,
        "target": spec.target,
        "gpu": spec.gpu.card,
        "checkpoint": {**checkpoint.identity(), **pooling, **checkpoint.card},
        "versions": package_versions(),
        "cpu": cpu(),
        "samples_file": samples_file(spec.samples),
    }
