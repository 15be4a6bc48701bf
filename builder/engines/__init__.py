"""Inference engines: one package each, named as the Triton backend that runs its graphs.

For encoders, a package says how a graph is opened and what Triton and the emitted code are told (`Engine`); for
decoders, its `decoding.py` does (builder/engines/decoding.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from builder.common.errors import BuilderError
from builder.common.machine import available_memory
from builder.runtime.contract import OpenVinoSession, Session

if TYPE_CHECKING:
    from builder.graphs.onnx.graph import Graph

LARGE = 1_000_000_000  # bytes of a graph
OPENED = 1.2  # times its bytes: memory to open a graph as it is served, and to run it

Infer = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]


class Engine(Protocol):
    """Interface of the `__init__` of an engine's package."""

    NAME: str  # as people write it
    PACKAGE: str  # its name in the Python package index, whose versions identify it
    MODEL_FILE: str
    ROWS_ARE_AN_AXIS: bool  # its Triton backend takes max_batch_size 0 only, with the rows as an axis of each tensor

    def infer(self, graph: Graph, threads: int, spinning: bool = False) -> Infer:
        """Open `graph` on the CPU: named arrays in, named arrays out."""
        ...

    def buckets(self, max_rows: int, max_length: int, token_budget: int) -> tuple[tuple[int, int], ...]:
        """Return the shapes, (rows, tokens of a row), that calls are padded to; none if a new shape costs nothing."""
        ...

    def session(self, graph: Graph, threads: int, spinning: bool) -> Session | OpenVinoSession:
        """Return how a front opens `graph` in process. Raises SpecError where it cannot."""
        ...

    def served_version(self, triton: str, in_process: bool) -> str:
        """Return the version of the engine on the CPU of a Triton release: in a front's process, or as its backend."""
        ...

    def half_constants(self, graph: Graph) -> bool:
        """Return True if constants of `graph` are stored in fp16, so that its results are rounded."""
        ...

    def wrong_cpus(self, graph: Graph) -> tuple[str, ...]:
        """Return instruction sets with any of which Triton's backend would compute otherwise than was verified."""
        ...


def engine(name: str) -> Engine:
    """Return the engine of a graph, by `Graph.engine`."""
    module: Engine = importlib.import_module(f"{__name__}.{name}")
    return module


def rooms(file: str) -> list[str]:
    """Return the engines whose package has a module `file`, such as "encoding"; the package's path is the registry."""
    return sorted(room.parent.name for folder in __path__ for room in Path(folder).glob(f"*/{file}.py"))


def title(name: str) -> str:
    """Return the engine `name` as people write it."""
    return engine(name).NAME


def left_in_file(size: int, served: bool) -> bool:
    """Return True if a graph of `size` bytes is judged with its weights left in their file, which is mapped.

    That is a large graph that is not `served` as it is, or for which this machine lacks memory now.
    """
    return size >= LARGE and not (served and available_memory() > OPENED * size)


def refuse_to_choose(size: int) -> NoReturn:
    """Raise BuilderError: fp32, a graph of `size` bytes, must be timed as served, and memory is short.

    The error is not of a type for which another engine is tried.
    """
    raise BuilderError(
        f"auto times fp32 as it is served, which takes {OPENED * size / 1e9:.1f} GB of memory, and "
        f"{available_memory() / 1e9:.1f} GB are free: free more, or state --precision and --engine"
    )


def infer_with(graph: Graph, threads: int, spinning: bool = False) -> Infer:
    """Open `graph` in the engine it was made for, with `threads` threads."""
    return engine(graph.engine).infer(graph, threads, spinning)
