"""NumPy as the engine of tables."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.errors import SpecError
from builder.engines import GraphEngine, Infer
from builder.runtime.contract import Session
from builder.runtime.encoder.table import ROWS, SCALES, Table

if TYPE_CHECKING:
    from builder.engines.placement import Placement
    from builder.engines.profiles import Calls
    from builder.graphs.onnx.graph import Graph
    from builder.options import BuildSpec


class NumPy(GraphEngine):
    def infer(self, graph: Graph, threads: int, spinning: bool = False) -> Infer:
        """Open the table. One thread reads it: `threads` and `spinning` have no effect."""
        table, (output,) = Table(graph.path), graph.outputs
        return lambda feeds: {output: table.embed(feeds["input_ids"], feeds["attention_mask"])}

    def place(self, options: BuildSpec, graph: Graph, calls: Calls) -> Placement:
        raise SpecError("a table has no backend in Triton: leave --executor bls out")

    def session(self, graph: Graph, threads: int, spinning: bool) -> Session:
        return Session(engine=self.name, threads=1)

    def served_version(self, triton: str, in_process: bool) -> str:
        """Return the version of this build: the emitted requirements pin the only one that Triton can use."""
        return version("numpy")

    def files(self, model: Path) -> tuple[Path, ...]:
        scales = model.with_name(SCALES)
        return (model, model.with_name(ROWS), *([scales] if scales.is_file() else []))


ENGINE = NumPy()
