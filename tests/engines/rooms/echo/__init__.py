"""An engine that no other file names: ONNX files under its own name, for a backend that Triton does not have."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from builder.common.errors import SpecError
from builder.engines import Infer, onnxruntime
from builder.graphs.onnx.graph import Graph

NAME = "Echo"
PACKAGE = "onnxruntime"
MODEL_FILE = "model.echo"
ROWS_ARE_AN_AXIS = False


def infer(graph: Graph, threads: int, spinning: bool = False) -> Infer:
    return onnxruntime.infer(graph, threads, spinning)


def buckets(max_rows: int, max_length: int, token_budget: int) -> tuple[tuple[int, int], ...]:
    return ()


def session(graph: Graph, threads: int, spinning: bool) -> Any:
    raise SpecError("echo runs in a Triton model of its own: use --executor bls")


def served_version(triton: str, in_process: bool) -> str:
    return version(PACKAGE)


def half_constants(graph: Graph) -> bool:
    return False


def wrong_cpus(graph: Graph) -> tuple[str, ...]:
    return ("an-instruction-set",)
