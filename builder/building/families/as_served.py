"""Decide how a build opens the fp32 graph to judge it: as it is served, or with its weights left in their file.

The second takes less memory and is slower. It is for a large graph that is not served itself, or for which this machine
lacks memory now; a later build that serves the graph and has the memory judges it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from builder.engines import refuse_to_choose
from builder.graphs.onnx.graph import Graph

MAPPED = (
    "fp32 was judged and timed with its weights left in their file, which takes less memory: it was not opened as it "
    "is served, and the served model is faster than these numbers"
)


@dataclass(frozen=True)
class Fp32Judging:
    """`is_served`: fp32 may be served; `chooses_by_time`: its time as served is compared with other variants'.

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
