"""Interface of an engine that runs encoders: its precisions and targets, the graph it reads, its own file format.

Knows graphs and precisions; knows no model and no task.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from builder.common.progress import Stage
from builder.engines import graph_engine, graph_engines
from builder.engines.optimise import Quantised
from builder.engines.placement import version_files
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.runtime.contract import EncoderServing


@dataclass(frozen=True)
class Variant:
    """Precision on an engine, for a target. `fast_with`: instruction sets; fast on a CPU that has one of them."""

    precision: str
    engine: str
    fast_with: tuple[str, ...] = ()
    target: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.precision} {encoding_engine(self.engine).titles[self.target]}".strip()


class EncodingEngine:
    """Choose the precisions, graphs and files with which one engine runs encoders."""

    name: ClassVar[str]
    titles: ClassVar[Mapping[str, str]]  # by target: its name in the names of variants
    variants: ClassVar[tuple[Variant, ...]]  # in the order in which the user sees them
    auto: ClassVar[tuple[str, ...]] = ("fp32",)  # precisions on a CPU that `--precision auto` tries
    prepares_shapes: ClassVar[bool] = False  # True if the first run of a shape takes longer than those after it
    converts_to_half: ClassVar[bool] = False  # True if it converts a graph in fp32 to fp16 and bf16 itself
    runs_rest_in_half: ClassVar[bool] = False  # True if on a GPU the unquantised part runs in fp16
    takes_adapters: ClassVar[bool] = False  # True if its graphs may take adapters, in process

    def reads_fused(self, target: str) -> bool:
        """Return True if it starts from the graph with ONNX Runtime's operators, not from one of standard operators."""
        return False

    def source(self, graph: Graph, target: str, folder: Path) -> Graph:
        """Return the graph in fp32 that it reads for `target`, written into `folder`. Raises ExportError."""
        return graph

    def finish(self, quantised: Quantised, precision: str, path: Path) -> Quantised:
        """Return `quantised` in the form that it opens, at or beside `path`. Raises ExportError."""
        return replace(quantised, graph=replace(quantised.graph, engine=self.name))

    def files(
        self,
        graph: Graph,
        options: BuildSpec,
        serving: EncoderServing,
        feeds: Sequence[Mapping[str, np.ndarray]],
        folder: Path,
        stage: Stage,
    ) -> Mapping[str, bytes | Path]:
        """Return the published files, by path in the model's folder; they are written in `folder`. Raises SpecError.

        `feeds`: inputs of `graph` on the samples, for an engine that compares its own answers later.
        """
        return version_files(graph)

    def unable(self, precision: str, flags: Collection[str]) -> str | None:
        """Return why it cannot run `precision` on a CPU with `flags` (instruction sets), and what to do; or None."""
        return None

    def refuse_on_gpu(self, spec: BuildSpec, precision: str) -> None:
        """Raise SpecError if the engine of the Triton release cannot run graphs in `precision` on `spec.target`."""
        return None

    def without_half(self, operators: Collection[str], precision: str, target: str, triton: str) -> Collection[str]:
        """Return those of `operators` that stay in fp32: the engine has no kernel for them in fp16 or bf16."""
        return ()


def encoding_engine(name: str) -> EncodingEngine:
    """Return how the engine `name` runs encoders."""
    encoding = graph_engine(name).encoding
    assert encoding is not None, f"{name} runs no encoders"
    return encoding


def all_variants() -> tuple[Variant, ...]:
    """Return the variants of every engine that can be requested, those of the preferred engine first."""
    encodings = [one.encoding for one in graph_engines() if one.facts.targets]
    return tuple(variant for encoding in encodings if encoding is not None for variant in encoding.variants)
