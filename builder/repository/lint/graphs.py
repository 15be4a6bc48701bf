"""Graph of a version, as far as an engine of this machine can read it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from google.protobuf.message import DecodeError

from builder.engines import graph_engine, stock
from builder.graphs.onnx.graph import MODEL_FILE
from builder.repository.lint.repository import ModelVersion


class Unreadable(Exception):
    """Graph that its engine cannot read; the message is the reason."""


def signature_of(version: ModelVersion) -> stock.Signature | None:
    """Return the tensors of a version's graph; None if it has none that can be read here. Raises Unreadable.

    For a plan, return those of the graph that it was compiled from, if that lies beside it.
    """
    facts = version.model.engine
    if facts is None or facts.runs_checkpoint or facts.is_missing():
        return None
    path = version.recipe / MODEL_FILE if facts.compiles_where_served else version.graph
    if not all(file.is_file() for file in graph_engine(facts.name).files(path)):
        return None
    return _signature(facts.name, path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _signature(engine: str, path: Path, changed_ns: int) -> stock.Signature | None:
    """Read a graph once for all rules: it may have gigabytes of weights."""
    try:
        signature = graph_engine(engine).signature(path)
    except (DecodeError, OSError, RuntimeError, ValueError) as error:
        raise Unreadable((str(error).strip().splitlines() or [repr(error)])[-1]) from error
    if signature is not None and not signature.outputs:
        raise Unreadable("it has no outputs")
    return signature


def readable(version: ModelVersion) -> stock.Signature | None:
    """Return the result of `signature_of`, but None for a graph that cannot be read: another rule reports that."""
    try:
        return signature_of(version)
    except Unreadable:
        return None
