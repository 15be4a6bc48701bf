"""What the engine of an encoder decides: the precisions and targets that it has, the graph that it reads, its own form.

An engine that runs encoders has a class `Encoding` in `encoding.py` of its room; the folders are the registry. Knows
graphs and precisions; knows no model and no task.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from builder.engines import rooms
from builder.onnx.graph import Graph
from builder.optimise.quantised import Quantised
from builder.progress import Stage
from builder.runtime.contract import EncoderServing
from builder.spec import LayoutOptions
from builder.triton.entries import version_files

ROOM = "encoding"
VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")  # instruction sets that multiply bytes


@dataclass(frozen=True)
class Variant:
    """A precision on an engine, for a target. `fast_with`: instruction sets, one of which makes it fast."""

    precision: str
    engine: str
    fast_with: tuple[str, ...] = ()
    target: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.precision} {encoding_engine(self.engine).called[self.target]}".strip()


class Encoders(Protocol):
    """One encoder in fp32, in the forms that engines begin with. What is made of them goes into `folder`."""

    @property
    def folder(self) -> Path: ...

    @property
    def fused(self) -> Graph:
        """With the fused operators of ONNX Runtime."""
        ...

    @property
    def plain(self) -> Graph:
        """Of standard operators, which an engine fuses itself."""
        ...


class EncodingEngine(ABC):
    """One engine."""

    name: ClassVar[str]
    called: ClassVar[Mapping[str, str]]  # by target: what a rung is called after it
    variants: ClassVar[tuple[Variant, ...]]  # for a target other than the CPU, as it lists them to the user
    preference: ClassVar[int]  # that with the least runs a precision on the CPU where no engine is asked for
    halves_itself: ClassVar[bool] = False  # whether fp16 and bf16 are its own doing, from a graph in fp32
    half_beside_bytes: ClassVar[bool] = False  # whether on a GPU what is not quantised to 8 bits runs in fp16

    @abstractmethod
    def source(self, encoders: Encoders, target: str) -> Graph:
        """The graph in fp32 that it reads for `target`. Raises ExportError."""

    def finish(self, quantised: Quantised, precision: str, path: Path) -> Quantised:
        """`quantised` in the form that it opens, at or beside `path`. Raises ExportError."""
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
        """What it is published as, by path in the model's folder; made in `folder`. Raises SpecError.

        `feeds`: inputs of `graph` on the samples, for an engine that compares its own answers later.
        """
        return version_files(graph)

    def unable(self, precision: str, flags: Collection[str]) -> str | None:
        """Why it has no `precision` on a CPU with the instruction sets `flags`, and what to do; None where it has."""
        return None

    def refuse_release(self, target: str, triton: str) -> None:
        """Raises SpecError where the engine that a Triton release carries cannot run what is made for `target`."""
        return None

    def without_half(self, operators: Collection[str], precision: str, target: str, triton: str) -> Collection[str]:
        """Those of `operators` that it does not have in `precision`, fp16 or bf16, and that therefore stay in fp32."""
        return ()


def encoding_engine(name: str) -> EncodingEngine:
    """The engine `name`."""
    made: EncodingEngine = importlib.import_module(f"builder.engines.{name}.{ROOM}").Encoding()
    return made


def all_variants() -> tuple[Variant, ...]:
    """Those of every engine, the preferred engine's first."""
    ordered = sorted(map(encoding_engine, rooms(ROOM)), key=lambda engine: engine.preference)
    return tuple(variant for engine in ordered for variant in engine.variants)
