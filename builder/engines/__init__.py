"""Inference engines: a room each, named as the Triton backend that runs its graphs.

A room says of encoders how a graph is opened and what Triton and the emitted code are told (`Engine`); of decoders the
same in its `decoding.py` (builder/engines/decoding.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from builder.errors import BuilderError
from builder.machine import available_memory
from builder.runtime.contract import OpenVinoSession, Session

if TYPE_CHECKING:
    from builder.onnx.graph import Graph

LARGE = 1_000_000_000  # bytes of a graph
OPENED = 1.2  # times its bytes: what it takes to open it as it is served, and to run it

Infer = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]


class Engine(Protocol):
    """What the `__init__` of an engine's room says."""

    NAME: str  # as people write it
    PACKAGE: str  # of the Python package index, by whose version it is known
    MODEL_FILE: str
    ROWS_ARE_AN_AXIS: bool  # its Triton backend takes max_batch_size 0 only, with the rows as an axis of each tensor

    def infer(self, graph: Graph, threads: int, spinning: bool = False) -> Infer:
        """Open `graph` on the CPU: named arrays in, named arrays out."""
        ...

    def buckets(self, max_rows: int, max_length: int, token_budget: int) -> tuple[tuple[int, int], ...]:
        """The shapes, (rows, tokens of a row), that calls are padded to; none where a new shape costs nothing."""
        ...

    def session(self, graph: Graph, threads: int, spinning: bool) -> Session | OpenVinoSession:
        """How a front opens `graph` in process. Raises SpecError where it cannot."""
        ...

    def served_version(self, triton: str, in_process: bool) -> str:
        """That which runs on the CPU where a Triton release serves: in a front's own process, or as its backend."""
        ...

    def half_constants(self, graph: Graph) -> bool:
        """Whether constants of `graph` are stored in fp16, so that its results are rounded."""
        ...

    def wrong_cpus(self, graph: Graph) -> tuple[str, ...]:
        """Instruction sets with any of which Triton's backend would compute otherwise than was verified."""
        ...


def engine(name: str) -> Engine:
    """The engine of a graph, by `Graph.engine`."""
    module: Engine = importlib.import_module(f"{__name__}.{name}")
    return module


def rooms(file: str) -> list[str]:
    """The engines whose room has a module `file`, such as "encoding"; the package's path is the registry."""
    return sorted(room.parent.name for folder in __path__ for room in Path(folder).glob(f"*/{file}.py"))


def title(name: str) -> str:
    """The engine `name` as people write it."""
    return engine(name).NAME


def left_in_file(size: int, served: bool) -> bool:
    """Whether what judges a graph of `size` bytes leaves its weights in their file, which is mapped: a large one that
    is not `served` as it is, or for which this machine has no memory now."""
    return size >= LARGE and not (served and available_memory() > OPENED * size)


def refuse_to_choose(size: int) -> NoReturn:
    """Raise BuilderError, of no type for which another engine is tried: fp32, a graph of `size` bytes, is to be timed
    as it is served, and there is no memory for that now."""
    raise BuilderError(
        f"auto times fp32 as it is served, which takes {OPENED * size / 1e9:.1f} GB of memory, and "
        f"{available_memory() / 1e9:.1f} GB are free: free more, or state --precision and --engine"
    )


def infer_with(graph: Graph, threads: int, spinning: bool = False) -> Infer:
    """Open `graph` in the engine it was made for, with `threads` threads."""
    return engine(graph.engine).infer(graph, threads, spinning)
