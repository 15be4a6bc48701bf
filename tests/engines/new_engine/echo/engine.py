"""Echo as an engine."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from builder.engines import GraphEngine, Infer, onnxruntime
from builder.engines.placement import on_cpu
from builder.runtime.contract import Session

if TYPE_CHECKING:
    from builder.engines.placement import Placement
    from builder.engines.profiles import Calls
    from builder.graphs.onnx.graph import Graph
    from builder.options import BuildSpec


class Echo(GraphEngine):
    def infer(self, graph: Graph, threads: int, spinning: bool = False) -> Infer:
        return onnxruntime.infer(graph, threads, spinning)

    def place(self, options: BuildSpec, graph: Graph, calls: Calls) -> Placement:
        return on_cpu(options, {"longest": str(calls.length)})

    def session(self, graph: Graph, threads: int, spinning: bool) -> Session:
        return Session(engine=self.name, threads=threads)

    def served_version(self, triton: str, in_process: bool) -> str:
        return version("onnxruntime")

    def wrong_cpus(self, graph: Graph) -> tuple[str, ...]:
        return ("an-instruction-set",)


ENGINE = Echo()
