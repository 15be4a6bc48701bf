"""Interface of an engine that runs encoders: its precisions and targets, the graph it reads, its own file format.

An engine that runs encoders has a class `Encoding` in the `encoding.py` of its folder; the folders are the registry.
Knows graphs and precisions; knows no model and no task.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from builder.common.progress import Stage
from builder.engines import rooms
from builder.engines.optimise.quantised import Quantised
from builder.engines.placement import version_files
from builder.graphs.onnx.graph import Graph
from builder.options import LayoutOptions
from builder.runtime.contract import EncoderServing

ROOM = "encoding"
VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")  # instruction sets that multiply bytes


@dataclass(frozen=True)
class Variant:
    """Precision on an engine, for a target. `fast_with`: instruction sets; fast on a CPU that has one of them."""

    precision: str
    engine: str
    fast_with: tuple[str, ...] = ()
    target: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.precision} {encoding_engine(self.engine).called[self.target]}".strip()


class Encoders(Protocol):
    """One encoder in fp32, in the two forms that engines start from. Their own forms go into `folder`."""

    @property
    def folder(self) -> Path: ...

    @property
    def fused(self) -> Graph:
        """Graph with the fused operators of ONNX Runtime."""
        ...

    @property
    def plain(self) -> Graph:
        """Graph with standard operators only, for engines that fuse by themselves."""
        ...


class EncodingEngine(ABC):
    """One engine."""

    name: ClassVar[str]
    called: ClassVar[Mapping[str, str]]  # by target: its name in the names of variants
    variants: ClassVar[tuple[Variant, ...]]  # in the order in which the user sees them
    preference: ClassVar[int]  # without --engine, the engine with the least of these runs a precision on the CPU
    prepares_shapes: ClassVar[bool] = False  # True if the first run of a shape takes longer than those after it
    halves_itself: ClassVar[bool] = False  # True if it converts a graph in fp32 to fp16 and bf16 itself
    half_beside_bytes: ClassVar[bool] = False  # True if on a GPU the unquantised part runs in fp16

    @abstractmethod
    def source(self, encoders: Encoders, target: str) -> Graph:
        """Return the graph in fp32 that it reads for `target`. Raises ExportError."""

    def finish(self, quantised: Quantised, precision: str, path: Path) -> Quantised:
        """Return `quantised` in the form that it opens, at or beside `path`. Raises ExportError."""
        return replace(quantised, graph=replace(quantised.graph, engine=self.name))

    def files(
        self,
        graph: Graph,
        options: LayoutOptions,
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

    def refuse_release(self, target: str, triton: str) -> None:
        """Raise SpecError if the engine in a Triton release cannot run graphs for `target`."""
        return None

    def without_half(self, operators: Collection[str], precision: str, target: str, triton: str) -> Collection[str]:
        """Return those of `operators` that stay in fp32: the engine has no kernel for them in fp16 or bf16."""
        return ()


def encoding_engine(name: str) -> EncodingEngine:
    """Return the engine `name`."""
    engine: EncodingEngine = importlib.import_module(f"builder.engines.{name}.{ROOM}").Encoding()
    return engine


def all_variants() -> tuple[Variant, ...]:
    """Return the variants of every engine, those of the preferred engine first."""
    ordered = sorted(map(encoding_engine, rooms(ROOM)), key=lambda engine: engine.preference)
    return tuple(variant for engine in ordered for variant in engine.variants)
